"""A small `make prove-soak`: too short to judge memory, which is still warming up."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.e2e.load import mixed_work
from tests.proofs.soak import QUARTERS, soak


@pytest.mark.deep
@pytest.mark.slow
def test_mixed_faults_leave_nothing_behind(tmp_path: Path) -> None:
    small = [work for work in mixed_work() if not work.streamed][:8]
    found = soak(6.0, tmp_path, small)
    assert found.failed == []
    assert len(found.quiet) == QUARTERS
    assert found.is_kept, found
    assert min(found.faults.values()) > 0
