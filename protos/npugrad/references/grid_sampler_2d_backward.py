"""Float64 reference of aclnnGridSampler2DBackward, bilinear and nearest.

Each grid point (x, y) names a position (px, py) in the image of its sample. Bilinear interpolation reads the
four pixels around it, weighted by products of tx = px - floor(px), ty = py - floor(py) and their complements;
nearest reads the one pixel at (rint(px), rint(py)). For every such corner inside the image, with weight w:

    input_grad[corner]  += w * grad_output[point]               in each channel
    d                    = sum over channels of input[corner] * grad_output[point]
    grid_grad[point]    += d * (mx * dw/dtx, my * dw/dty)       (zeros for nearest)

where mx, my are the derivatives of px, py by x, y. A corner outside the image contributes nothing at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from npugrad.references._blocks import SCRATCH_BYTES, spans, store, tiles

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Float64Array: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]
Tile: TypeAlias = tuple[slice, ...]

_NEAREST = 1  # interpolation_mode
_ZEROS, _REFLECTION = 0, 2  # padding_mode; 1 is border

# Scratch memory at its peak, in bytes, of one grid point, and of one grid point in one channel.
_POINT_BYTES = 448  # coordinates, then for each of 4 corners position, weight, cell, selection
_VALUE_BYTES = 112  # grad_output, then for each of 4 corners a value and its cell

_BLOCK_BYTES = 16 * 2**20  # larger blocks of points or values only fall out of the cache

_FAR_OUTSIDE = -100.0  # the position given to a point that has none; no image has pixels around it


def reference(
    inputs: Mapping[str, npt.NDArray[Any] | None],
    attrs: Mapping[str, Any],
    outputs: Mapping[str, npt.NDArray[Any]],
    *,
    scratch_bytes: int = SCRATCH_BYTES,
) -> None:
    """Compute the gradients of 2-D grid sampling by its input and its grid.

    Args:
        inputs: `grad_output` (N, C, OH, OW), `input` (N, C, H, W), `grid` (N, OH, OW, 2) with (x, y) on its
            last axis. Any float dtypes and strides.
        attrs: `interpolation_mode` 0 bilinear or 1 nearest; `padding_mode` 0 zeros, 1 border or 2 reflection;
            `align_corners`. Others are not read.
        outputs: C-contiguous arrays of any float dtype to fill, each of which may be absent: `input_grad`
            (N, C, H, W), `grid_grad` (N, OH, OW, 2). They become zeros where any operand is empty.
        scratch_bytes: Scratch memory to stay within, in bytes.
    """
    call = _Call(inputs, attrs)
    if 0 in (call.grad_output.size, call.input.size):
        for output in outputs.values():
            output.fill(0)
        return
    with np.errstate(all="ignore"):  # NaN and infinite data are computed, without remark
        if "input_grad" in outputs:
            _write_input_grad(call, outputs["input_grad"], scratch_bytes)
        if "grid_grad" in outputs:
            _write_grid_grad(call, outputs["grid_grad"], scratch_bytes)


class _Call:
    """Operands and attributes."""

    def __init__(self, inputs: Mapping[str, npt.NDArray[Any] | None], attrs: Mapping[str, Any]) -> None:
        self.grad_output = np.asarray(inputs["grad_output"])
        self.input = np.asarray(inputs["input"])
        self.grid = np.asarray(inputs["grid"])
        self.is_nearest = attrs["interpolation_mode"] == _NEAREST
        self.padding_mode = int(attrs["padding_mode"])
        self.align_corners = bool(attrs["align_corners"])

    def read_grad_output(self, tile: Tile, channels: slice) -> Float64Array:
        """Copy grad_output at the points of a tile, (channels, points)."""
        images, rows, columns = tile
        block = self.grad_output[images, channels, rows, columns].transpose(1, 0, 2, 3)
        return np.array(block, dtype=np.float64, order="C").reshape(len(block), -1)


class _Points:
    """The grid points of a tile, in C order: where they lie, and in which image."""

    def __init__(self, call: _Call, tile: Tile) -> None:
        grid = np.array(call.grid[tile], dtype=np.float64, order="C").reshape(-1, 2)
        images = np.arange(tile[0].start, tile[0].stop)
        self.image = images.repeat(len(grid) // len(images))
        height, width = call.input.shape[2:]
        self.x, self.slope_x = _locate(grid[:, 0], width, call)
        self.y, self.slope_y = _locate(grid[:, 1], height, call)

    def corners(self, is_nearest: bool) -> tuple[IntArray, IntArray, Float64Array]:
        """Find the pixels each point reads: their rows, columns and weights, (corners, points)."""
        if is_nearest:
            row, column = np.rint([self.y, self.x]).astype(np.int64)
            return row[np.newaxis], column[np.newaxis], np.ones((1, len(row)))
        row, column = np.floor([self.y, self.x]).astype(np.int64)
        right, bottom = self.x - column, self.y - row
        left, top = 1 - right, 1 - bottom
        return (
            np.stack([row, row, row + 1, row + 1]),
            np.stack([column, column + 1, column, column + 1]),
            np.stack([left * top, right * top, left * bottom, right * bottom]),
        )


def _locate(coordinate: Float64Array, size: int, call: _Call) -> tuple[Float64Array, Float64Array]:
    """Turn normalised coordinates into positions on an axis of `size` pixels, and their derivatives."""
    if call.align_corners:
        position, slope = (coordinate + 1) / 2 * (size - 1), np.full_like(coordinate, (size - 1) / 2)
    else:
        position, slope = ((coordinate + 1) * size - 1) / 2, np.full_like(coordinate, size / 2)
    if call.padding_mode == _REFLECTION:
        position, factor = _reflect(position, size, call.align_corners)
        slope *= factor
    if call.padding_mode != _ZEROS:
        # Clipping comes after reflecting and before infinities are dropped: with border padding they count
        # as far outside. The bounds themselves have slope zero.
        at_start, at_end = position <= 0, position >= size - 1
        position = np.where(at_start, 0.0, np.where(at_end, float(size - 1), position))
        slope[at_start | at_end] = 0
    is_addressable = np.abs(position) < 2.0**31  # false for NaN
    return np.where(is_addressable, position, _FAR_OUTSIDE), slope


def _reflect(position: Float64Array, size: int, align_corners: bool) -> tuple[Float64Array, Float64Array]:
    """Fold positions back into the image at its edges; also the factor +1, -1 or 0 on their derivatives."""
    low, span = (0.0, size - 1) if align_corners else (-0.5, size)
    if span == 0:
        return np.zeros_like(position), np.zeros_like(position)
    distance = np.abs(position - low)
    sign = np.where(position < low, -1.0, 1.0)
    rest = np.fmod(distance, span)
    is_backward = np.fmod(np.floor(distance / span), 2) == 1
    return np.where(is_backward, span - rest, rest) + low, np.where(is_backward, -sign, sign)


def _inside(row: IntArray, column: IntArray, rows: slice, columns: slice) -> npt.NDArray[np.bool_]:
    """Tell which corners lie in a region of the image."""
    inside: npt.NDArray[np.bool_] = (row >= rows.start) & (row < rows.stop)
    inside &= column >= columns.start
    inside &= column < columns.stop
    return inside


def _point_tiles(call: _Call, images: slice, block_bytes: int) -> Iterator[Tile]:
    """Cut the grid points of some images into tiles: slices of images, grid rows and grid columns."""
    shape = (images.stop - images.start, *call.grid.shape[1:3])
    for sub, rows, columns in tiles(shape, _POINT_BYTES, min(block_bytes, _BLOCK_BYTES)):
        yield slice(images.start + sub.start, images.start + sub.stop), rows, columns


def _write_input_grad(call: _Call, output: npt.NDArray[Any], scratch_bytes: int) -> None:
    """Write input_grad region by region: whole images if they fit, else channels, else bands of rows."""
    for region in tiles(call.input.shape, 8, scratch_bytes // 2):
        store(output[region], _sum_region(call, region, scratch_bytes // 4))


def _sum_region(call: _Call, region: Tile, block_bytes: int) -> Float64Array:
    """Add up input_grad in a region (images, channels, rows, columns)."""
    sums = np.zeros([span.stop - span.start for span in region])
    for tile in _point_tiles(call, region[0], block_bytes):
        _scatter(call, tile, region, sums, block_bytes)
    return sums


def _scatter(call: _Call, tile: Tile, region: Tile, sums: Float64Array, block_bytes: int) -> None:
    """Add what the points of a tile give to the sums of a region of input_grad."""
    images, channels, rows, columns = region
    points = _Points(call, tile)
    row, column, weight = points.corners(call.is_nearest)
    chosen = np.flatnonzero(_inside(row, column, rows, columns))
    point = chosen % len(points.image)
    weight = weight.reshape(-1)[chosen]
    _, depth, height, width = sums.shape
    cell = (points.image[point] - images.start) * (depth * height * width)
    cell += (row.reshape(-1)[chosen] - rows.start) * width + (column.reshape(-1)[chosen] - columns.start)
    for part in spans(depth, len(points.image) * _VALUE_BYTES, min(block_bytes, _BLOCK_BYTES)):
        grad = call.read_grad_output(tile, slice(channels.start + part.start, channels.start + part.stop))
        values = grad.take(point, axis=1)
        values *= weight
        cells = cell + np.arange(part.start, part.stop)[:, np.newaxis] * (height * width)
        np.add.at(sums.reshape(-1), cells.reshape(-1), values.reshape(-1))


def _write_grid_grad(call: _Call, output: npt.NDArray[Any], scratch_bytes: int) -> None:
    """Write grid_grad tile by tile."""
    if call.is_nearest:
        output.fill(0)
        return
    for tile in _point_tiles(call, slice(0, len(call.grid)), scratch_bytes // 2):
        points = _Points(call, tile)
        products = _corner_products(call, tile, points, scratch_bytes // 2)
        top_left, top_right, bottom_left, bottom_right = products
        right, bottom = points.x - np.floor(points.x), points.y - np.floor(points.y)
        by_x = (top_right - top_left) * (1 - bottom) + (bottom_right - bottom_left) * bottom
        by_y = (bottom_left - top_left) * (1 - right) + (bottom_right - top_right) * right
        gradient = np.stack([points.slope_x * by_x, points.slope_y * by_y], axis=-1)
        store(output[tile], gradient.reshape(output[tile].shape))


def _corner_products(call: _Call, tile: Tile, points: _Points, block_bytes: int) -> Float64Array:
    """Sum input at each corner times grad_output over the channels, (corners, points); 0 if outside."""
    _, depth, height, width = call.input.shape
    row, column, _ = points.corners(call.is_nearest)
    is_outside = ~_inside(row, column, slice(0, height), slice(0, width))
    row[is_outside] = 0
    column[is_outside] = 0
    products = np.zeros(row.shape)
    for part in spans(depth, len(points.image) * _VALUE_BYTES, min(block_bytes, _BLOCK_BYTES)):
        channel = np.arange(part.start, part.stop)[:, np.newaxis, np.newaxis]
        values = np.array(call.input[points.image, channel, row, column], dtype=np.float64, order="C")
        products += np.einsum("cp,ckp->kp", call.read_grad_output(tile, part), values)
    products[is_outside] = 0
    return products
