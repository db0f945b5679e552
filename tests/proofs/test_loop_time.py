"""A small `make prove-loop-time`."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.proofs.loop_time import CASES, MOST_S, rows, timed_server

pytestmark = pytest.mark.slow

LENIENCE = 5
"""A busy or slow machine takes more processor time for the same."""


def test_no_caller_holds_the_event_loop_for_long(tmp_path: Path) -> None:
    nbytes = 32 * 2**20
    with timed_server(tmp_path, nbytes) as server:
        found = list(rows(server, nbytes))
    assert [row.name for row in found] == list(CASES)
    assert not [str(row) for row in found if row.seconds > LENIENCE * MOST_S]
