"""A small `make prove-poison`: long enough for the breaker to open, and judged without a rate."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.proofs.poison import WAYS, proofs

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("way", WAYS)
def test_a_caller_whose_calls_kill_workers_stops_nobody_else(way: str, tmp_path: Path) -> None:
    (found,) = proofs(tmp_path, [way], 3.0)
    assert found.failed == []
    assert found.told["CIRCUIT_OPEN"] > 0
    # One for each device and one that was on its way; without the breaker it goes on.
    assert 2 <= found.deaths <= 4
    assert found.beside > 0
    assert found.recovery_s < float("inf")
