"""Workloads of aclnnGridSampler2DBackward: sizes of models, and variants of small calls."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad.dtypes import DType
from npugrad.ops._grid_sampler import VARIANTS, example_attrs, ties
from npugrad.workloads import Example, Expanded, Filled, Huge, Workload, Workloads, measured, named

if TYPE_CHECKING:
    import numpy.typing as npt

# fmt: off
_IMAGE = {"c": 16, "h": 256, "w": 256}
_MOST_POINTS = 2**24
"""Number of equal float32 values that can be added one by one, in any order, without rounding."""


def _sizes(n: int, c: int, h: int, w: int | None = None, **modes: int) -> dict[str, int]:
    """Sizes with as many points as pixels."""
    w = h if w is None else w
    return {"n": n, "c": c, "h": h, "w": w, "oh": h, "ow": w, **modes}


def _example() -> Filled:
    points = np.array([-1, -1, 0, -1, 1, -1, -1, 0, 0, 0, 1, 0, -1, 1, 0, 1, 1, 1], np.float32)
    edge, middle, zero = [0.25, 0, 0, 0.25, 0.25, 0, 0, 0.25], [0.5, 0, 0, 0.5, 0.5, 0, 0, 0.5], [0] * 8
    grid_grad = [2, 1.25, 2, 11.25, -16, 10, 68, 10, 4, 20, -96, 10, 66, -41.25, 2, -91.25, -80, -50]
    input_grad, image = np.array([edge, zero, middle, zero, edge]), np.arange(1, 41, dtype=np.float32)
    operands = {"grad_output": np.ones((1, 1, 3, 3), np.float32), "input": image.reshape(1, 1, 5, 8)}
    return Filled({**operands, "grid": points.reshape(1, 3, 3, 2)}, example_attrs(),
        {"input_grad": input_grad.reshape(1, 1, 5, 8), "grid_grad": np.array(grid_grad).reshape(1, 3, 3, 2)})


def _large(images: int) -> Expanded:
    sizes = {"n": images, **_IMAGE, "oh": 1, "ow": 1, "output_mask": (False, True)}
    return Expanded(name="large", sizes=sizes, values={"grad_output": 1.0, "input": 1.0, "grid": 0.0})


def long_call(n: int, c: int, points: int) -> Expanded:
    """A call that adds up `points` x `points` equal values at one pixel of each channel; the sum is exact."""
    value, modes = 1.0 / _MOST_POINTS, {"align_corners": True, "output_mask": (True, False)}
    # Every point lies on the centre of the first pixel, whose weight is 1.
    return Expanded(name=f"{n} x {c} x {points} x {points}",
        sizes={"n": n, "c": c, "h": 2, "w": 2, "oh": points, "ow": points, **modes},
        values={"grad_output": value, "input": 0.0, "grid": -1.0},
        expected=partial(_sums, n, c, value * points**2))


def _sums(n: int, c: int, total: float) -> dict[str, npt.NDArray[Any]]:
    return {"input_grad": np.broadcast_to(total * np.array([[1.0, 0.0], [0.0, 0.0]]), (n, c, 2, 2))}


_SINGLE, _HALF = ("float32",), ("float16", "bfloat16")
# Feature maps and pictures sampled along a rotated image, as in registration and augmentation.
_RACED = ((4, 64, 256, _SINGLE), (8, 3, 512, _SINGLE), (4, 64, 128, _HALF), (8, 3, 128, _HALF),
    (32, 256, 14, _SINGLE + _HALF), (1, 64, 256, _SINGLE), (1, 64, 128, _HALF))

WORKLOADS = Workloads(
    named=named(
        *measured(_sizes, (1, 3, 8), (1, 3, 16), (4, 3, 128), (4, 64, 128)),
        Workload(name="pictures", model="spatial transformer", sizes=_sizes(8, 3, 224), shown=True),
        Workload(name="features", model="feature warping", sizes=_sizes(4, 64, 64), shown=True),
        Workload(name="warping", model="warped feature maps",
            sizes=_sizes(4, 64, 64, interpolation_mode=0, padding_mode=1, align_corners=True)),
        Workload(name="warp", model="warping of large feature maps", sizes=_sizes(4, 64, 160),
            simulated={"n": 2, "c": 16, "h": 60, "w": 50, "oh": 50, "ow": 40}),
        Workload(name="flow", model="optical flow of pictures", sizes=_sizes(8, 3, 480, 640),
            simulated=_sizes(2, 3, 90, 120)),
        *(Workload(name=f"{n}x{c}x{size}x{size}", sizes=_sizes(n, c, size), raced=types, pattern="turned")
            for n, c, size, types in _RACED),
        # Scattered points, for which no cache helps.
        Workload(name="8x3x512x512 scattered", sizes=_sizes(8, 3, 512), raced=_SINGLE)),
    variants=VARIANTS, uneven={"n": 2, "c": 21, "h": 13, "w": 19, "oh": 11, "ow": 23},
    canary={"n": 2, "c": 3, "h": 5, "w": 7, "oh": 4, "ow": 9},
    examples=(Example("", DType.FLOAT32, _example),),
    huge=Huge(unit_bytes=4 * math.prod(_IMAGE.values()), large=_large,
        # None has 2^31 elements.
        long=(*(long_call(1, 1, points) for points in (256, 512, 1024, 1448, 2048, 2896)),
            *(long_call(n, c, math.isqrt(_MOST_POINTS)) for n, c in ((1, 1), (1, 4), (1, 16), (2, 32))))),
    ties=ties)
