"""A small `make prove-tenants`, judged by shares and refusals, not by rates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.proofs.tenants import WAYS, proofs

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


def test_no_caller_takes_the_share_of_another(tmp_path: Path) -> None:
    for found in proofs(tmp_path, [*WAYS], 2.0):
        assert found.refused_count == 0, found.line()
        assert found.share > 0.35, found.line()
