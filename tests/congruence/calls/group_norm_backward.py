"""GroupNorm: types, sizes, masks, gamma given and null, groups, ranks, strides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

from tests.congruence.combinations import FLOATS, Combination, bits, reshape, restride
from tests.operators import GROUP_NORM

from npugrad.meta import CallMeta

_SIZES: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "scalar": {"n": 1, "c": 1, "hxw": 1, "group": 1, "shape": ()},
    "rank1": {"shape": (48,)},
    "rank2": {"shape": (2, 24)},
    "rank4": {"shape": (2, 6, 2, 2)},
    "rank5": {"shape": (2, 6, 1, 2, 2)},
    "rank8": {"n": 1, "c": 4, "hxw": 8, "group": 2, "shape": (1, 4, 2, 1, 2, 1, 2, 1)},
    "odd": {"n": 3, "c": 7, "hxw": 5, "group": 7},
    "one group": {"n": 2, "c": 5, "hxw": 3, "group": 1},
    "long": {"n": 1, "c": 2, "hxw": 1031, "group": 2},
    "no sample": {"n": 0},
    "no pixel": {"hxw": 0},
    "no channel": {"c": 0},
}
_LAYOUTS: Mapping[str, Callable[[CallMeta], CallMeta]] = {
    "channels last": lambda call: restride(call, grad_out=((24, 1, 6), 0), input=((24, 1, 6), 0)),
    "expanded gradient": lambda call: restride(call, grad_out=((0, 0, 0), 0)),
    "expanded samples": lambda call: restride(call, grad_out=((0, 4, 1), 0)),
    "input behind others": lambda call: restride(call, input=((24, 4, 1), 5)),
    "overlapping windows": lambda call: restride(call, input=((4, 2, 1), 0)),
    "statistics transposed": lambda call: restride(call, mean=((1, 2), 0), rstd=((1, 2), 1)),
    "every second gamma": lambda call: restride(call, gamma=((2,), 3)),
    "every third gamma": lambda call: restride(call, gamma=((3,), 0)),
    "odd step of one sample": lambda call: restride(
        GROUP_NORM.build(dtype=call.tensor("input").dtype, n=1), grad_out=((99, 4, 1), 0)
    ),
    "strides of nothing": lambda call: restride(
        GROUP_NORM.build(dtype=call.tensor("input").dtype, n=0), input=((7, 1, 6), 0)
    ),
    "flat gradient": lambda call: reshape(call, grad_out=(48,)),
    "statistics of other ranks": lambda call: reshape(call, mean=(6,), rstd=(2, 3, 1), gamma=(1, 6)),
}


def combinations() -> Iterator[Combination]:
    """Types, sizes, masks, gamma given and null, groups, ranks, strides."""
    masks = list(product((True, False), repeat=3))
    for dtype, (size, options) in product(FLOATS, _SIZES.items()):
        for mask in masks:
            call = GROUP_NORM.build(dtype=dtype, output_mask=mask, **options)
            yield Combination(f"{dtype}, {size}, {bits(mask)}", call)
        for mask in masks if size == "plain" else [(True, False, False)]:
            call = GROUP_NORM.build(dtype=dtype, output_mask=mask, with_gamma=False, **options)
            yield Combination(f"{dtype}, {size}, {bits(mask)}, no gamma", call)
    for dtype, (name, layout) in product(FLOATS, _LAYOUTS.items()):
        yield Combination(f"{dtype}, {name}", layout(GROUP_NORM.build(dtype=dtype)))
        yield Combination(f"{dtype}, deterministic, {name}", layout(GROUP_NORM.build(dtype=dtype)), True)
