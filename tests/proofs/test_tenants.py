"""A small `make prove-tenants`, judged by shares and refusals, not by rates."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.proofs.tenants import WAYS, proofs

pytestmark = pytest.mark.slow


def test_no_caller_takes_the_share_of_another(tmp_path: Path) -> None:
    ways = [*WAYS]
    for _ in range(3):  # a stall during a call is charged to its caller, as device time
        found = list(proofs(tmp_path, ways, 2.0))
        refused = [sharing.line() for sharing in found if sharing.refused_count]
        assert not refused, refused
        ways = [sharing.way for sharing in found if sharing.share <= 0.35]
        if not ways:
            return
    pytest.fail("; ".join(sharing.line() for sharing in found))
