"""LayerNorm: types, sizes, masks, ranks, strides; weight and bias in float32, as its binding takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

from tests.congruence.combinations import FLOATS, Combination, bits, restride
from tests.operators import LAYER_NORM

from npugrad.meta import CallMeta

_SIZES: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "one of one": {"leading": (), "normalized": (1,)},
    "rank1": {"leading": (), "normalized": (48,)},
    "two axes": {"normalized": (2, 4)},
    "all axes": {"leading": (), "normalized": (2, 3, 4)},
    "rank8": {"leading": (1, 2, 1, 3), "normalized": (2, 1, 2, 1)},
    "odd": {"leading": (3, 5), "normalized": (7,)},
    "long": {"leading": (2,), "normalized": (1031,)},
    "no row": {"leading": (0, 3)},
    "rows of nothing": {"normalized": (2, 0)},
}
_LAYOUTS: Mapping[str, Callable[[CallMeta], CallMeta]] = {
    "axes swapped": lambda call: restride(call, grad_out=((4, 8, 1), 0), input=((4, 8, 1), 0)),
    "expanded gradient": lambda call: restride(call, grad_out=((0, 0, 0), 0)),
    "expanded rows": lambda call: restride(call, grad_out=((0, 4, 1), 0)),
    "input behind others": lambda call: restride(call, input=((12, 4, 1), 5)),
    "overlapping windows": lambda call: restride(call, input=((4, 2, 1), 0)),
    "every third element": lambda call: restride(call, grad_out=((36, 12, 3), 0)),
    "statistics transposed": lambda call: restride(call, mean=((1, 2, 1), 0), rstd=((1, 2, 1), 1)),
    "every second weight": lambda call: restride(call, weight=((2,), 3), bias=((2,), 0)),
}


def combinations() -> Iterator[Combination]:
    """All of them."""
    for dtype, (size, options), mask in product(FLOATS, _SIZES.items(), product((True, False), repeat=3)):
        call = LAYER_NORM.build(dtype=dtype, is_mixed=True, output_mask=mask, **options)
        yield Combination(f"{dtype}, {size}, {bits(mask)}", call)
    for dtype, (name, layout) in product(FLOATS, _LAYOUTS.items()):
        call = layout(LAYER_NORM.build(dtype=dtype, is_mixed=True))
        yield Combination(f"{dtype}, {name}", call)
        yield Combination(f"{dtype}, deterministic, {name}", call, True)
