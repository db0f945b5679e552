"""A small `make prove-rollout`: the paths that need nothing, and the proxies that are installed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.proofs.callers import KINDS
from tests.proofs.rollout import PATHS, PINNED, Size, Way, explained, measured

SMALL = Size(calls=100, held_s=1.5, drain_delay_s=1.0, left_alone_s=0.5, endpoint_lag_s=0.1)


# Alone: what else runs lengthens the moment in which grpc refuses calls of plain callers.
@pytest.mark.large
@pytest.mark.parametrize("path", [pytest.param(path, id=path.name) for path in PATHS])
def test_a_rollout_loses_no_call_of_the_sdk_and_hardly_one_of_others(path: Way, tmp_path: Path) -> None:
    if path.missing():
        pytest.skip(path.missing())
    for row in measured(path, list(KINDS), SMALL, tmp_path / "rollout"):
        assert row.calls >= SMALL.calls
        assert row.is_kept, row
        assert path.name != PINNED or all(explained(told) for told in row.failed), row
