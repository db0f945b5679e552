"""A small `make prove-slow-streams`: all streams, a byte more often, and judged without a time."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.proofs.slow_streams import prove, slow_server

pytestmark = pytest.mark.slow


def test_slow_streams_cost_a_neighbour_no_call(tmp_path: Path) -> None:
    with slow_server(tmp_path) as server:
        found = prove(server, 0.5, (0.0, 0.0), 40)
    assert found.beside.count >= 40
    assert not found.beside.failed
    assert found.held == (0, 0)
