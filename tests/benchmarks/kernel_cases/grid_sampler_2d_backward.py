"""Cases of grid_sampler_2d_backward: feature maps, pictures, many small maps, one image alone.

Limit: loads and stores at the four corners of each point, and the caches they come from; the roofline counts
operands and results once. torch goes point by point through the channels, and takes a thread for each image.

The grid is that of a turned image with some jitter, as registration and augmentation have it: points next to
each other are neighbours in the image too. One case has points scattered all over, which no cache helps.

In 16 bit torch 2.13 computes positions in the operands' type, which do not tell the pixels of a map of 256
apart, and ends with a segmentation fault or a broken heap there: in 16 bit it is asked for maps of 128 and
less only. Each peer has a process of its own, so that memory it damages is its own.

Expected before the first run: 4 to 9 against torch with 64 channels and more, less with 3, whose points cost
as much as their channels.
"""

from __future__ import annotations

from tests.benchmarks.goals import Goal, at_least, at_most
from tests.benchmarks.kernel_cases import ERROR, JAX, TORCH, KernelCase


def _sizes(n: int, c: int, size: int) -> dict[str, int]:
    return {"n": n, "c": c, "h": size, "w": size, "oh": size, "ow": size}


_SIZES = (
    ("4x64x256x256", _sizes(4, 64, 256)),
    ("8x3x512x512", _sizes(8, 3, 512)),
    ("32x256x14x14", _sizes(32, 256, 14)),
    ("1x64x256x256", _sizes(1, 64, 256)),
)
_HALF_SIZES = (
    ("4x64x128x128", _sizes(4, 64, 128)),
    ("8x3x128x128", _sizes(8, 3, 128)),
    ("32x256x14x14", _sizes(32, 256, 14)),
    ("1x64x128x128", _sizes(1, 64, 128)),
)
# A point within rounding of a pixel falls into the next cell in float32, where grid_grad jumps: a few such
# points of a large map are some hundredths of the norm. In 16 bit torch rounds positions to half a pixel or
# less: the work is the same, its results are far from ours, which are computed in float64.
_TOLERANCE = 5e-2
_HALF_TOLERANCE = {"float16": 0.5, "bfloat16": 1.5}
_PEERS = {"torch": TORCH, "jax": JAX}


def _goal(sizes: dict[str, int]) -> Goal:
    if sizes["c"] == 3:
        return at_least(1.5, 3.0)
    return at_least(3.0, 6.0) if sizes["n"] == 1 else at_least(4.0, 8.0)


CASES = (
    *(
        KernelCase(
            "grid_sampler_2d_backward",
            name,
            "float32",
            sizes,
            pattern="turned",
            peers=_PEERS,
            tolerance=_TOLERANCE,
            goals={"torch": _goal(sizes), ERROR: at_most(5e-7)},
        )
        for name, sizes in _SIZES
    ),
    KernelCase(
        "grid_sampler_2d_backward",
        "8x3x512x512 scattered",
        "float32",
        _sizes(8, 3, 512),
        peers=_PEERS,
        tolerance=_TOLERANCE,
    ),
    *(
        KernelCase(
            "grid_sampler_2d_backward",
            name,
            dtype,
            sizes,
            pattern="turned",
            peers=_PEERS,
            tolerance=tolerance,
            goals={"torch": at_least(4.0, 8.0)},
        )
        for dtype, tolerance in _HALF_TOLERANCE.items()
        for name, sizes in _HALF_SIZES
    ),
)
