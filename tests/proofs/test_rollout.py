"""A small `make prove-rollout`: the paths that need nothing, and the proxies that are installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.proofs.rollout import KINDS, PATHS, Size, knows_drain_delay, measured

if TYPE_CHECKING:
    from pathlib import Path

    from tests.proofs.rollout import Way

SMALL = Size(calls=200, held_s=2.0, drain_delay_s=1.0)
CHOSEN = [
    pytest.param(path, caller, id=f"{path.name}-{caller}")
    for path in PATHS
    for caller in KINDS
    if caller == "SDK" or path.name == "client round robin"  # a plain caller with one connection: tests/e2e
]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "caller"), CHOSEN)
def test_a_rollout_loses_no_call_of_the_sdk_and_hardly_one_of_others(
    path: Way, caller: str, tmp_path: Path
) -> None:
    if path.missing():
        pytest.skip(path.missing())
    if not knows_drain_delay():
        pytest.skip("this server has no --drain-delay-s")
    row = measured(path, caller, SMALL, tmp_path / "row")
    assert row.calls >= SMALL.calls
    assert row.is_kept, row
