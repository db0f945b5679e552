"""A small `make prove-rotation`, judged without a clock."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.proofs.rotation import proof

pytestmark = pytest.mark.slow


def test_certificates_that_change_lose_no_good_call_and_let_in_no_bad_one(tmp_path: Path) -> None:
    found = proof(tmp_path, 5.0)
    assert found.is_kept, found.line()
    assert found.swap_count > 0
    assert set(found.calls) == {"sync", "async"}
    assert set(found.tries) == {"foreign", "expired", "for servers", "without"}
