"""A small `make prove-front-memory`."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.proofs.front_memory import SMALL, rows

pytestmark = pytest.mark.slow


def test_what_callers_make_the_front_process_hold_is_bounded_shown_and_given_up(tmp_path: Path) -> None:
    found = list(rows(tmp_path, SMALL))
    assert [str(row) for row in found if not row.is_kept] == []
    assert all(row.shown_bytes for row in found if "unread" in row.name)
