"""A small `make prove-skew`, and where the earlier version is not to be had."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.proofs import skew
from tests.proofs.skew import Missing, tried

from npugrad import OPERATORS


@pytest.mark.slow
def test_each_version_understands_the_other(tmp_path: Path) -> None:
    try:
        rows = list(tried(tmp_path, step=10))
    except Missing as missing:
        pytest.skip(str(missing))
    assert {row.operator for row in rows} <= set(OPERATORS)
    assert len({row.direction for row in rows}) == 2
    for row in rows:
        assert not row.failed
        assert row.right["unary"] == row.right["streamed"] == row.right["validated"] >= len(row.dtypes) > 1


def test_a_history_that_ends_too_early_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skew, "EARLIER", "0123456789abcdef")
    with pytest.raises(
        Missing, match="the history here lacks the earlier version, 0123456789abcdef: git fetch"
    ):
        skew.unpacked(tmp_path)
