"""Deformable attention: the record's samples, and types, index types, ranks, levels, sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from tests.congruence.combinations import FLOATS, Combination
from tests.operators import MSDA

from npugrad.meta import TensorMeta
from npugrad.products import Product

_LEVELS = (((3, 4), (2, 2)), ((1, 1),), ((5, 1), (1, 7), (2, 3)))
_SIZES: tuple[Mapping[str, Any], ...] = ({}, {"bs": 1, "nq": 5, "nh": 3, "ch": 16, "points": 1})


def combinations() -> Iterator[Combination]:
    """Every sample of the record, and types, index types, ranks, levels, sizes."""
    for sample in MSDA.samples(Product.ATLAS_A2):
        for deterministic in (False, True):
            yield Combination(f"{sample.name}, {deterministic}", sample.call, deterministic)
    axes = product(FLOATS, ("int32", "int64"), ("int32", "int64"), (3, 4), _LEVELS, _SIZES)
    for dtype, shapes, starts, rank, levels, sizes in axes:
        call = MSDA.build(
            dtype=dtype, index_dtype=shapes, grad_output_rank=rank, levels=levels, **sizes
        ).with_inputs(level_start_index=TensorMeta(starts, (len(levels),)))
        yield Combination(f"{dtype}, {shapes}, {starts}, rank {rank}, {levels}, {dict(sizes)}", call)
