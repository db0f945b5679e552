"""Floyd attention: types, mask null and of both types, scales, sizes, strides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

from tests.congruence.combinations import Combination, restride
from tests.operators import FLOYD

from npugrad.meta import CallMeta

_SCALES = (
    *(32**-0.5, -0.17, 0.1 + 0.2, -0.0, 1e-300, 5e-324, 1.7976931348623157e308, float("-inf")),
    *(1.0, 0.0, -2.3e-308, float("inf"), 0.25, 1 / 3),
)
_SIZES: tuple[Mapping[str, int], ...] = (
    {"h": 2},
    {"b": 2},
    {"n": 32},
    {"m": 256},
    {"k": 256},
    {"d": 64},
    {"d": 128},
)
_LAYOUTS: Mapping[str, Callable[[CallMeta], CallMeta]] = {
    "expanded gradient": lambda call: restride(call, dy=((0, 0, 0, 0, 0), 0)),
    "heads inside": lambda call: restride(
        _two_heads(call), query=((131072, 32, 8192, 64, 1), 0), dy=((131072, 32, 8192, 64, 1), 64)
    ),
    "keys transposed": lambda call: restride(
        call, key1=((65536, 65536, 4096, 1, 128), 0), key2=((524288, 524288, 32, 4096, 1), 0)
    ),
    "every second element": lambda call: restride(call, query=((131072, 131072, 8192, 64, 2), 0)),
    "every third element": lambda call: restride(call, value1=((196608, 196608, 12288, 96, 3), 0)),
    "values behind others": lambda call: restride(call, value2=((524288, 524288, 4096, 32, 1), 17)),
    "one statistic for eight": lambda call: restride(
        call, softmax_max=((2048, 2048, 128, 1, 0), 0), softmax_sum=((2048, 2048, 128, 1, 0), 3)
    ),
    "one mask for all": lambda call: restride(
        FLOYD.build(dtype=call.tensor("query").dtype, with_mask=True), atten_mask=((0, 0, 0, 0, 1), 0)
    ),
}


def _two_heads(call: CallMeta) -> CallMeta:
    return FLOYD.build(dtype=call.tensor("query").dtype, h=2)


def combinations() -> Iterator[Combination]:
    """Types, mask null and of both types, scales, sizes, strides."""
    dtypes = ("float16", "bfloat16")
    masks: Mapping[str, Mapping[str, Any]] = {
        "no mask": {},
        "bool mask": {"with_mask": True},
        "uint8 mask": {"with_mask": True, "mask_dtype": "uint8"},
    }
    for dtype, (name, mask) in product(dtypes, masks.items()):
        for scale in _SCALES[:11] if mask else _SCALES:
            call = FLOYD.build(dtype=dtype, scale_value=scale, **mask)
            yield Combination(f"{dtype}, {name}, scale {scale!r}", call)
    for options, (dtype, name) in product(_SIZES, zip(dtypes, ("no mask", "bool mask"), strict=True)):
        call = FLOYD.build(dtype=dtype, **options, **masks[name])
        yield Combination(f"{dtype}, {dict(options)}, {name}", call)
    for dtype, (name, layout) in product(dtypes, _LAYOUTS.items()):
        yield Combination(f"{dtype}, {name}", layout(FLOYD.build(dtype=dtype)))
