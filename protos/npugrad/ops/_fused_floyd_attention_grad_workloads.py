"""Workloads of aclnnFusedFloydAttentionGrad: sizes of models, and variants of small calls."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from npugrad.dtypes import DType
from npugrad.workloads import Example, Filled, Workload, Workloads, measured, named

if TYPE_CHECKING:
    from npugrad.operator import Arrays


# fmt: off
def _sizes(h: int, n: int, m: int, k: int, d: int) -> dict[str, int]:
    return {"b": 1, "h": h, "n": n, "m": m, "k": k, "d": d}


def _example(literal: bool) -> Filled:
    """Inputs that are not a consistent forward result: all gradients overflow float16."""
    # n, m and k are equal. As written, 4-byte floats are copied into 2-byte elements: 1.0f reads as 0, 1.875.
    shape, statistics = (1, 1, 256, 256, 128), np.full((1, 1, 256, 256, 8), 3.0, np.float32)
    ones = np.ones(math.prod(shape) // 2, np.float32).view(np.float16).reshape(shape)
    data = ones if literal else np.ones(shape, np.float16)
    mask, names = np.zeros((1, 1, 256, 1, 256), np.uint8), "query key1 value1 key2 value2 dy attention_in"
    rest: Arrays = {"atten_mask": mask, **dict.fromkeys(("softmax_max", "softmax_sum"), statistics)}
    return Filled({**dict.fromkeys(names.split(), data), **rest}, {"scale_value": 128**-0.5})


_RACED = {"B1 H4 128^3 D32": _sizes(4, 128, 128, 128, 32), "B1 H1 256^3 D64": _sizes(1, 256, 256, 256, 64),
    "B1 H1 384^3 D32": _sizes(1, 384, 384, 384, 32)}
_SMALLEST = (1, 16, 128, 128, 32)
"""That the page allows: 3 MiB."""

WORKLOADS = Workloads(
    named=named(
        *measured(_sizes, _SMALLEST, _SMALLEST, (1, 64, 128, 128, 32), (1, 128, 128, 128, 64)),
        Workload(name="triangle", model="triangle attention", sizes=_sizes(1, 128, 128, 128, 32), shown=True),
        Workload(name="triangles", model="triangle attention of four heads",
            sizes=_sizes(4, 128, 128, 128, 64), simulated=_sizes(*_SMALLEST)),
        Workload(name="long", model="attention of pairs with long keys", sizes=_sizes(4, 64, 256, 384, 128),
            simulated=_sizes(1, 16, 256, 128, 32)),
        *(Workload(name=name, model="cube of scores", sizes=sizes, raced=("float32", "bfloat16"))
            for name, sizes in _RACED.items())),
    variants={"with_mask": (False, True), "mask_dtype": ("bool", "uint8"), "d": (32, 64, 128)},
    # 10 products of a cube of scores with one of its factors, each two operations per element.
    flops=lambda sizes: 20.0 * math.prod(sizes.values()),
    uneven={"h": 2, "n": 35, "m": 37, "k": 67, "d": 37, "with_mask": True},
    canary={"h": 1, "n": 3, "m": 5, "k": 7, "d": 9, "with_mask": True},
    examples=tuple(Example(f"{reading}: overflows", DType.FLOAT16, partial(_example, literal))
        for literal, reading in ((True, "as written"), (False, "as intended"))))
