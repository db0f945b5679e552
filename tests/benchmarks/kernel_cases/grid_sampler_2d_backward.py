"""Cases of grid_sampler_2d_backward: feature maps, pictures, many small maps, one image alone.

Limit: loads and stores at the four corners of each point, and the caches they come from; the roofline counts
operands and results once. torch goes point by point through the channels, and takes a thread for each image.

In 16 bit torch 2.13 ends with a segmentation fault on the larger maps: there it is asked only for the small
ones.

Expected before the first run: 4 to 9 against torch with 64 channels and more, less with 3, whose points cost
as much as their channels.
"""

from __future__ import annotations

from tests.benchmarks.kernel_cases import TORCH, KernelCase


def _sizes(n: int, c: int, size: int) -> dict[str, int]:
    return {"n": n, "c": c, "h": size, "w": size, "oh": size, "ow": size}


_SIZES = (
    ("4x64x256x256", _sizes(4, 64, 256)),
    ("8x3x512x512", _sizes(8, 3, 512)),
    ("32x256x14x14", _sizes(32, 256, 14)),
    ("1x64x256x256", _sizes(1, 64, 256)),
)
_TOLERANCE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
_SURVIVED = "32x256x14x14"
CASES = tuple(
    KernelCase(
        "grid_sampler_2d_backward",
        name,
        dtype,
        sizes,
        peers={"torch": TORCH} if dtype == "float32" or name == _SURVIVED else {},
        tolerance=tolerance,
    )
    for dtype, tolerance in _TOLERANCE.items()
    for name, sizes in _SIZES
)
