"""Calls of the sizes that models really make, and data for them.

The simulation's kernels are plain loops in double precision, so there each size is replaced by a smaller one;
`Size.factor` tells how much smaller. Reports name it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad.tolerance import T
from npugrad_server.acceptance.job import Job, make_job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy.typing as npt

    from npugrad.dtypes import DType
    from npugrad.meta import CallMeta
    from npugrad.operator import OpRecord
    from npugrad.products import Product

    Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Size:
    """One realistic size of an operator.

    Attributes:
        name: What has it, such as ``"decoder"``.
        real: Keywords of the record's `build`.
        simulated: The same, smaller.
    """

    name: str
    real: Mapping[str, Any]
    simulated: Mapping[str, Any]

    def build(self, record: OpRecord, simulated: bool, **more: Any) -> CallMeta:
        """The call."""
        return record.build(**(self.simulated if simulated else self.real), **more)

    def factor(self, record: OpRecord) -> float:
        """How many times smaller the operands are on the simulation."""
        return _bytes(self.build(record, False)) / _bytes(self.build(record, True))


def _bytes(call: CallMeta) -> int:
    return sum(meta.nbytes for meta in call.inputs.values() if meta is not None)


_PYRAMID = ((100, 134), (50, 67), (25, 34), (13, 17))
"""Levels of an image of 800 x 1066 pixels, as detectors with deformable attention have them."""

SIZES: Mapping[str, tuple[Size, ...]] = {
    "multi_scale_deformable_attention_grad": (
        Size(
            "decoder",
            {"bs": 2, "nq": 900, "nh": 8, "ch": 32, "levels": _PYRAMID, "points": 4},
            {"bs": 1, "nq": 60, "nh": 8, "ch": 16, "levels": ((20, 26), (10, 13), (5, 7)), "points": 4},
        ),
        Size(
            "encoder",
            {"bs": 1, "nq": 17821, "nh": 8, "ch": 32, "levels": _PYRAMID, "points": 4},
            {"bs": 1, "nq": 185, "nh": 4, "ch": 16, "levels": ((10, 14), (5, 9)), "points": 4},
        ),
    ),
    "grid_sampler_2d_backward": (
        Size(
            "warp",
            {"n": 4, "c": 64, "h": 160, "w": 160, "oh": 160, "ow": 160},
            {"n": 2, "c": 16, "h": 60, "w": 50, "oh": 50, "ow": 40},
        ),
        Size(
            "flow",
            {"n": 8, "c": 3, "h": 480, "w": 640, "oh": 480, "ow": 640},
            {"n": 2, "c": 3, "h": 90, "w": 120, "oh": 90, "ow": 120},
        ),
    ),
    "group_norm_backward": (
        Size(
            "diffusion",
            {"n": 8, "c": 512, "hxw": 4096, "group": 32, "shape": (8, 512, 64, 64)},
            {"n": 2, "c": 128, "hxw": 256, "group": 32, "shape": (2, 128, 16, 16)},
        ),
        Size(
            "detector",
            {"n": 2, "c": 256, "hxw": 13400, "group": 32, "shape": (2, 256, 100, 134)},
            {"n": 2, "c": 64, "hxw": 650, "group": 32, "shape": (2, 64, 25, 26)},
        ),
    ),
    "fused_floyd_attention_grad": (
        Size(
            "triangles",
            {"b": 1, "h": 4, "n": 128, "m": 128, "k": 128, "d": 64},
            {"b": 1, "h": 1, "n": 16, "m": 128, "k": 128, "d": 32},
        ),
        Size(
            "long",
            {"b": 1, "h": 4, "n": 64, "m": 256, "k": 384, "d": 128},
            {"b": 1, "h": 1, "n": 16, "m": 256, "k": 128, "d": 32},
        ),
    ),
}
"""Realistic sizes by operator."""


def float_dtypes(record: OpRecord, product: Product) -> tuple[DType, ...]:
    """The types of an operator's first operand, those a result can be compared in."""
    return tuple(dtype for dtype in record.inputs[0].dtypes[product] if dtype in T)


def realistic_calls(
    record: OpRecord, product: Product, simulated: bool
) -> Iterator[tuple[Size, DType, CallMeta]]:
    """Every realistic size in every type."""
    for size in SIZES.get(record.name, ()):
        for dtype in float_dtypes(record, product):
            yield size, dtype, size.build(record, simulated, dtype=dtype, product=product)


def realistic_job(record: OpRecord, call: CallMeta, seed: int = 0, **options: Any) -> Job:
    """A call with data that no rounding of a coordinate can turn into another result.

    Among many sampling points some fall so near to a pixel's edge that the rounding of float32 decides to
    which side they belong. The gradient jumps there, so two right results may differ; these are moved.
    """
    job = make_job(record, call, seed, **options)
    settle = _SETTLE.get(record.name)
    if settle is not None:
        settle(job)
    return job


_MARGIN = 1 / 128
"""Least distance of a sampling point to where the gradient jumps, in pixels."""


def _settle_grid(job: Job) -> None:
    image, grid = job.call.tensor("input"), _operand(job, "grid")
    for axis, size in ((0, image.shape[3]), (1, image.shape[2])):
        # For corners aligned and not, so that the same data serves either; nearest jumps at the halves.
        for scale in (size, size - 1):
            _move(grid[..., axis], scale / 2, (size - 1) / 2, 2)


def _settle_location(job: Job) -> None:
    location, levels = _operand(job, "location"), _operand(job, "spatial_shape")
    for level, (height, width) in enumerate(levels.tolist()):
        for axis, size in ((0, width), (1, height)):
            _move(location[..., level, :, axis], size, -0.5, 1)


def _operand(job: Job, name: str) -> Array:
    array = job.arrays[name]
    if array is None:
        raise ValueError(f"{job.record.name}: {name}: found null; expected a tensor")
    return array


def _move(coordinates: Array, scale: float, offset: float, steps: int) -> None:
    """Replaces coordinates next to a multiple of 1/`steps` pixel by others of the same array, in place.

    Args:
        coordinates: What the operator turns into pixels: scale * coordinate + offset.
        scale: Pixels of one unit.
        offset: Pixel of coordinate 0.
        steps: Jumps of the gradient in one pixel.
    """
    where = (coordinates.astype(np.float64) * scale + offset) * steps
    unsafe = np.abs(where - np.rint(where)) < _MARGIN * steps
    safe = coordinates[~unsafe]
    if safe.size:
        coordinates[unsafe] = np.resize(safe, int(unsafe.sum()))


_SETTLE: Mapping[str, Callable[[Job], None]] = {
    "grid_sampler_2d_backward": _settle_grid,
    "multi_scale_deformable_attention_grad": _settle_location,
}
