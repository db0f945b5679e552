"""A small `make prove-edges`: a call of each operator at each kind of points."""

from __future__ import annotations

from tests.edge_calls import KINDS, MUTANTS, SAMPLERS
from tests.proofs.edges import proved


def test_right_results_are_accepted_and_mistakes_refused() -> None:
    found = proved(len(SAMPLERS) * len(KINDS), 0)
    assert found.seen == found.right
    sources = {what for _, _, what in found.seen}
    assert sources >= {"PyTorch", "torch", "torch-unfused", "vendor-a2", "vendor-950", "mmcv", "float64"}
    assert sources >= {*MUTANTS}
