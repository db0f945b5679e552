"""Float64 reference of the backward of grid sampling, bilinear and nearest, of images and volumes.

Each grid point gives a position on every spatial axis of its sample, by a rule of `npugrad.coordinates`; all
else is float64. Bilinear interpolation reads the corners around it, weighted by products of 1 - t and
`t = position - floor(position)` over the axes; nearest reads the one corner at rint(position). For every such
corner inside the sample, with weight w:

    input_grad[corner]  += w * grad_output[point]               in each channel
    d                    = sum over channels of input[corner] * grad_output[point]
    grid_grad[point]    += d * m * dw/dt    on each axis        (zeros for nearest)

where m is the derivative of the position by the coordinate. A corner outside contributes nothing at all.

Axes are in the order of `input`, the slowest first; the coordinates of a point are in the opposite order.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from npugrad.coordinates import CoordinateRule, GridAxis
from npugrad.references._blocks import SCRATCH_BYTES, spans, store, tiles

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Float64Array: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]
Tile: TypeAlias = tuple[slice, ...]

_NEAREST = 1  # interpolation_mode

# Peak scratch memory of a corner of a grid point, in bytes: for each axis positions, weight, cell and
# selection; for each channel grad_output, a value and its cell.
_AXIS_BYTES, _VALUE_BYTES = 56, 28

_BLOCK_BYTES = 16 * 2**20  # larger blocks of points or values only fall out of the cache


def reference(
    inputs: Mapping[str, npt.NDArray[Any] | None],
    attrs: Mapping[str, Any],
    outputs: Mapping[str, npt.NDArray[Any]],
    *,
    rule: CoordinateRule = CoordinateRule.TORCH,
    scratch_bytes: int = SCRATCH_BYTES,
) -> None:
    """Compute the gradients of grid sampling with respect to its input and its grid.

    Args:
        inputs: `grad_output` (N, C, OH, OW), `input` (N, C, H, W), `grid` (N, OH, OW, 2) with (x, y) on its
            last axis; in three dimensions (N, C, OD, OH, OW), (N, C, D, H, W), (N, OD, OH, OW, 3) with
            (x, y, z). Any float dtypes and strides.
        attrs: `interpolation_mode` 0 bilinear or 1 nearest; `padding_mode` 0 zeros, 1 border or 2 reflection;
            `align_corners`. Others are not read.
        outputs: C-contiguous arrays of any float dtype to fill, each of which may be absent: `input_grad`
            shaped like `input`, `grid_grad` like `grid`. They become zeros if any operand is empty.
        rule: How grid values become positions; all else is float64.
        scratch_bytes: Maximum scratch memory, in bytes.
    """
    call = _Call(inputs, attrs, rule)
    if 0 in (call.grad_output.size, call.input.size):
        for output in outputs.values():
            output.fill(0)
        return
    with np.errstate(all="ignore"):  # NaN and infinite data are computed without warnings
        if "input_grad" in outputs:
            _write_input_grad(call, outputs["input_grad"], scratch_bytes)
        if "grid_grad" in outputs:
            _write_grid_grad(call, outputs["grid_grad"], scratch_bytes)


class _Call:
    """Operands and attributes."""

    def __init__(
        self,
        inputs: Mapping[str, npt.NDArray[Any] | None],
        attrs: Mapping[str, Any],
        rule: CoordinateRule,
    ) -> None:
        self.grad_output = np.asarray(inputs["grad_output"])
        self.input = np.asarray(inputs["input"])
        self.grid = np.asarray(inputs["grid"])
        self.axes = self.input.ndim - 2
        self.corners = 2**self.axes
        self.is_nearest = attrs["interpolation_mode"] == _NEAREST
        self.rule = rule
        padding_mode, align_corners = int(attrs["padding_mode"]), bool(attrs["align_corners"])
        self.grid_axes = [
            GridAxis(size, padding_mode, align_corners, self.axes) for size in self.input.shape[2:]
        ]

    def read_grad_output(self, tile: Tile, channels: slice) -> Float64Array:
        """Copy grad_output at the points of a tile, (channels, points)."""
        where = (tile[0], channels, *tile[1:])
        block = self.grad_output[where].swapaxes(0, 1)
        return np.array(block, dtype=np.float64, order="C").reshape(len(block), -1)

    def channel_spans(self, count: int, points: int, block_bytes: int) -> Iterator[slice]:
        """Cut channels so that the values of all points at all corners fit a block."""
        return spans(count, points * self.corners * _VALUE_BYTES, min(block_bytes, _BLOCK_BYTES))


class _Points:
    """The grid points of a tile, in C order: where they lie on each axis, and in which sample."""

    def __init__(self, call: _Call, tile: Tile) -> None:
        grid = call.grid[tile].reshape(-1, call.axes)
        samples = np.arange(tile[0].start, tile[0].stop)
        self.sample = samples.repeat(len(grid) // len(samples))
        located = [axis.locate(grid[:, -1 - k], call.rule) for k, axis in enumerate(call.grid_axes)]
        self.position = [position for position, _ in located]
        self.slope = [slope for _, slope in located]

    def corners(self, is_nearest: bool) -> tuple[IntArray, Float64Array]:
        """Find what each point reads: corners, (axes, corners, points), and weights, (corners, points)."""
        if is_nearest:
            index = np.rint(self.position).astype(np.int64)
            return index[:, np.newaxis], np.ones((1, len(self.sample)))
        first = np.floor(self.position).astype(np.int64)
        beyond = [position - start for position, start in zip(self.position, first, strict=True)]
        steps = list(itertools.product((0, 1), repeat=len(first)))
        weights = [np.ones(len(self.sample)) for _ in steps]
        for weight, corner in zip(weights, steps, strict=True):
            for t, step in zip(beyond, corner, strict=True):
                weight *= t if step else 1 - t
        return first[:, np.newaxis] + np.array(steps).T[:, :, np.newaxis], np.stack(weights)


def _inside(index: Sequence[IntArray] | IntArray, region: Tile) -> npt.NDArray[np.bool_]:
    """Tell which corners lie in a region, a slice of each axis."""
    inside: npt.NDArray[np.bool_] = index[0] >= region[0].start
    inside &= index[0] < region[0].stop
    for along, part in zip(index[1:], region[1:], strict=True):
        inside &= along >= part.start
        inside &= along < part.stop
    return inside


def _point_tiles(call: _Call, samples: slice, block_bytes: int) -> Iterator[Tile]:
    """Cut the grid points of some samples into tiles: slices of samples and of each axis of the grid."""
    shape = (samples.stop - samples.start, *call.grid.shape[1:-1])
    point_bytes = call.axes * call.corners * _AXIS_BYTES
    for sub, *rest in tiles(shape, point_bytes, min(block_bytes, _BLOCK_BYTES)):
        yield slice(samples.start + sub.start, samples.start + sub.stop), *rest


def _write_input_grad(call: _Call, output: npt.NDArray[Any], scratch_bytes: int) -> None:
    """Write input_grad region by region: whole samples if they fit, else channels, else bands."""
    for region in tiles(call.input.shape, 8, scratch_bytes // 2):
        store(output[region], _sum_region(call, region, scratch_bytes // 4))


def _sum_region(call: _Call, region: Tile, block_bytes: int) -> Float64Array:
    """Add up input_grad in a region (samples, channels, then each axis)."""
    sums = np.zeros([span.stop - span.start for span in region])
    for tile in _point_tiles(call, region[0], block_bytes):
        _scatter(call, tile, region, sums, block_bytes)
    return sums


def _scatter(call: _Call, tile: Tile, region: Tile, sums: Float64Array, block_bytes: int) -> None:
    """Add the contributions of a tile's points to the sums of a region of input_grad."""
    samples, channels, *inner = region
    points = _Points(call, tile)
    index, weight = points.corners(call.is_nearest)
    chosen = np.flatnonzero(_inside(index, tuple(inner)))
    point = chosen % len(points.sample)
    weight = weight.reshape(-1)[chosen]
    depth, plane = sums.shape[1], math.prod(sums.shape[2:])
    cell = (points.sample[point] - samples.start) * (depth * plane)
    step = plane
    for along, part, size in zip(index, inner, sums.shape[2:], strict=True):
        step //= size
        cell += (along.reshape(-1)[chosen] - part.start) * step
    for part in call.channel_spans(depth, len(points.sample), block_bytes):
        grad = call.read_grad_output(tile, slice(channels.start + part.start, channels.start + part.stop))
        values = grad.take(point, axis=1)
        values *= weight
        cells = cell + np.arange(part.start, part.stop)[:, np.newaxis] * plane
        np.add.at(sums.reshape(-1), cells.reshape(-1), values.reshape(-1))


def _write_grid_grad(call: _Call, output: npt.NDArray[Any], scratch_bytes: int) -> None:
    """Write grid_grad tile by tile."""
    if call.is_nearest:
        output.fill(0)
        return
    for tile in _point_tiles(call, slice(0, len(call.grid)), scratch_bytes // 2):
        points = _Points(call, tile)
        products = _corner_products(call, tile, points, scratch_bytes // 2)
        beyond = [position - np.floor(position) for position in points.position]
        gradient = np.stack(
            [points.slope[axis] * _slope(products, beyond, axis) for axis in reversed(range(call.axes))],
            axis=-1,
        )
        store(output[tile], gradient.reshape(output[tile].shape))


def _slope(products: Float64Array, beyond: Sequence[Float64Array], axis: int) -> Float64Array:
    """Return the difference along an axis, interpolated over the others; one value per point."""
    corners = products.reshape(*(2,) * len(beyond), -1)
    values: Float64Array = np.diff(corners, axis=axis).squeeze(axis)
    for other, t in enumerate(beyond):
        if other != axis:
            values = values[0] * (1 - t) + values[1] * t
    return values


def _corner_products(call: _Call, tile: Tile, points: _Points, block_bytes: int) -> Float64Array:
    """Sum input at each corner times grad_output over the channels, (corners, points); 0 if outside."""
    depth, *sizes = call.input.shape[1:]
    index, _ = points.corners(call.is_nearest)
    is_outside = ~_inside(index, tuple(slice(0, size) for size in sizes))
    index[:, is_outside] = 0
    products = np.zeros(is_outside.shape)
    for part in call.channel_spans(depth, len(points.sample), block_bytes):
        where = (points.sample, np.arange(part.start, part.stop)[:, np.newaxis, np.newaxis], *index)
        values = np.array(call.input[where], dtype=np.float64, order="C")
        products += np.einsum("cp,ckp->kp", call.read_grad_output(tile, part), values)
    products[is_outside] = 0
    return products
