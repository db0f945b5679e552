"""Float64 reference of aclnnMultiScaleDeformableAttentionGrad.

For each batch b, query q, head m, level l and point p, with `(H, W) = spatial_shape[l]`,
`s = level_start_index[l]`, `a = attn_weight[b, q, m, l, p]` and `go = grad_output[b, q, m, :]`:

    w = location[..., 0] * W - 0.5;  h = location[..., 1] * H - 0.5       (the last axis is x, y),
    by a rule of `npugrad.coordinates`;
    (h0, w0) = floor((h, w));  (lh, lw) = (h, w) - (h0, w0);  (hh, hw) = 1 - (lh, lw)

a sample with `-1 < h < H` and `-1 < w < W` reads up to four corners, those inside the level:

    corner     weight   by h   by w
    h0  , w0   hh*hw    -hw    -hh          val, dh, dw = sum of v * (weight, by h, by w)
    h0  , w0+1 hh*lw    -lw    +hh          grad_value[corner] += weight * a * go
    h0+1, w0   lh*hw    +hw    -lh          grad_attn_weight = sum(go * val)
    h0+1, w0+1 lh*lw    +lw    +lh          grad_location = (W * a * sum(go * dw), H * a * sum(go * dh))

with `v = value[b, s + y*W + x, m, :]`. Any other sample, including one at NaN, contributes nothing and its
gradients are 0, whatever its weight, even NaN or infinite: the vendor's kernel (GridSampleCompute in
multi_scale_deformable_attention_grad.h) skips it, as do those of Deformable-DETR (ms_deform_im2col_cuda.cuh)
and mmcv (ms_deform_attn_cuda_kernel.cuh), forward and backward. mmcv's function in plain PyTorch, which is
not a peer here, multiplies such a weight by 0 and gets NaN. `spatial_shape` and `level_start_index` are the
caller's data and may contain anything here: a corner whose flat index lies outside [0, num_keys) is dropped,
and the index is never computed in a way that can wrap. The record's reference refuses such levels first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad.coordinates import CoordinateRule, attention_pixels
from npugrad.references._blocks import SCRATCH_BYTES, spans, store

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]
    Ints = npt.NDArray[np.int64]
    Bools = npt.NDArray[np.bool_]

__all__ = ["reference"]

# Working blocks larger than the caches only make the passes slower (2 to 8 MiB measured best).
_BLOCK_BYTES = 4 * 2**20
# Live bytes per corner besides those that grow with the channels: indices, bounds, weights, masks.
_CORNER_BYTES = 160
# A flat index whose float64 estimate is below this fits int64 with room for the estimate's error.
_INDEX_BOUND = 2.0**62
# Offsets (y, x) of the four corners from (h0, w0).
_CORNER_Y = np.array([0, 0, 1, 1], dtype=np.int64)
_CORNER_X = np.array([0, 1, 0, 1], dtype=np.int64)


def reference(
    inputs: Mapping[str, npt.NDArray[Any] | None],
    attrs: Mapping[str, Any],
    outputs: Mapping[str, npt.NDArray[Any]],
    *,
    rule: CoordinateRule = CoordinateRule.MMCV,
    scratch_bytes: int = SCRATCH_BYTES,
) -> None:
    """Compute the wanted gradients in float64 and write each with one rounding.

    Args:
        inputs: Arrays of any strides, floats of any float dtype: `value` (bs, num_keys, num_heads,
            channels); `location` (bs, num_queries, num_heads, num_levels, num_points, 2), as (x, y) in units
            of the level's size; `attn_weight` (bs, num_queries, num_heads, num_levels, num_points);
            `grad_output` (bs, num_queries, num_heads * channels) or with the two last apart; and, int32 or
            int64, `spatial_shape` (num_levels, 2) as (H, W) and `level_start_index` (num_levels,).
        attrs: Not used: the operator has no attributes.
        outputs: Arrays to fill, any of `grad_value`, `grad_location` and `grad_attn_weight`, each shaped like
            the input it belongs to. Every element is written; all zeros when any input is empty.
        rule: How locations become pixels; all else is float64.
        scratch_bytes: Bound on the memory used besides inputs and outputs.
    """
    if any(array is not None and array.size == 0 for array in inputs.values()):
        for output in outputs.values():
            output.fill(0)
        return
    call = _Call.of(inputs, rule)
    # Non-finite data is computed like any other; NumPy's warnings about it are irrelevant.
    with np.errstate(all="ignore"):
        if "grad_value" in outputs:
            _write_grad_value(call, outputs["grad_value"], scratch_bytes)
        if "grad_location" in outputs or "grad_attn_weight" in outputs:
            _write_sample_grads(call, outputs, scratch_bytes)


@dataclass(frozen=True)
class _Call:
    """The operands, with heads and channels of `grad_output` as two axes and the levels as exact int64.

    A *slab* is one (batch, head), numbered batch by batch; slabs share nothing but the levels.
    """

    value: npt.NDArray[Any]
    location: npt.NDArray[Any]
    attn_weight: npt.NDArray[Any]
    grad_output: npt.NDArray[Any]
    height: Ints
    width: Ints
    start: Ints
    rule: CoordinateRule

    @classmethod
    def of(cls, inputs: Mapping[str, npt.NDArray[Any] | None], rule: CoordinateRule) -> _Call:
        given = {name: array for name, array in inputs.items() if array is not None}
        bs, nq, nh = given["attn_weight"].shape[:3]
        channels = given["value"].shape[3]
        shape = np.array(given["spatial_shape"], dtype=np.int64)
        return cls(
            value=given["value"],
            location=given["location"],
            attn_weight=given["attn_weight"],
            grad_output=given["grad_output"].reshape(bs, nq, nh, channels),  # splits an axis: a view
            # One trailing axis for the points, so that each level broadcasts to its own samples.
            height=shape[:, :1],
            width=shape[:, 1:],
            start=np.array(given["level_start_index"], dtype=np.int64)[:, None],
            rule=rule,
        )

    @property
    def corners_per_query(self) -> int:
        levels, points = self.attn_weight.shape[3:]
        return 4 * int(levels * points)

    def slabs(self, span: slice) -> tuple[Ints, Ints]:
        """Return the batches and heads of a span of slabs."""
        batch, head = np.divmod(np.arange(span.start, span.stop), self.value.shape[2])
        return batch, head

    def blocks(self, row_bytes: int, scratch_bytes: int) -> Iterator[tuple[slice, slice]]:
        """Yield spans of slabs and queries whose rows, one for each (slab, query), fit the scratch."""
        bs, nq, nh = self.attn_weight.shape[:3]
        for slabs in spans(bs * nh, nq * row_bytes, scratch_bytes):
            for queries in spans(nq, (slabs.stop - slabs.start) * row_bytes, scratch_bytes):
                yield slabs, queries


@dataclass(frozen=True)
class _Samples:
    """Where the samples of one block of slabs and queries fall.

    Attributes:
        reached: Whether a sample contributes at all; (slabs, queries, levels, points).
        low_y: lh of the module's formulas, meaningless unless reached; shaped like `reached`.
        low_x: lw likewise.
        key: Index of each corner along the key axis, 0 unless kept; (..., points, 4).
        kept: Whether a corner of a reached sample lies in its level and among the keys.
    """

    reached: Bools
    low_y: Floats
    low_x: Floats
    key: Ints
    kept: Bools

    @classmethod
    def of(cls, call: _Call, batch: Ints, queries: slice, head: Ints) -> _Samples:
        # An index array on both sides of a slice puts its axis, the slabs, first.
        location = call.location[batch, queries, head]
        on_x, first_x, low_x = _along_axis(location[..., 0], call.width, call.rule)
        on_y, first_y, low_y = _along_axis(location[..., 1], call.height, call.rule)
        reached = on_x & on_y
        key, kept = _corner_keys(call, first_y, first_x)
        kept &= reached[..., None]
        key[~kept] = 0
        return cls(reached, low_y, low_x, key, kept)

    def weights(self) -> Floats:
        """Return the share of each corner in its sample; (..., points, 4)."""
        low_y, low_x = self.low_y, self.low_x
        high_y, high_x = 1 - low_y, 1 - low_x
        return np.stack([high_y * high_x, high_y * low_x, low_y * high_x, low_y * low_x], axis=-1)

    def stencil(self) -> Floats:
        """Return the corners' weights and their derivatives by w and by h; (..., points, 3, 4)."""
        low_y, low_x = self.low_y, self.low_x
        high_y, high_x = 1 - low_y, 1 - low_x
        by_w = np.stack([-high_y, high_y, -low_y, low_y], axis=-1)
        by_h = np.stack([-high_x, -low_x, high_x, low_x], axis=-1)
        return np.stack([self.weights(), by_w, by_h], axis=-2)


def _along_axis(location: npt.NDArray[Any], size: Ints, rule: CoordinateRule) -> tuple[Bools, Ints, Floats]:
    """Place samples on one axis of their level: whether in reach, the lower corner, the distance from it."""
    pixel = attention_pixels(location, size, rule)
    # False for NaN. A pixel of 2**63 or more lies beyond every size and would overflow in the cast.
    reached = (pixel > -1.0) & (pixel < 2.0**63)
    pixel[~reached] = 0.0
    lower = np.floor(pixel)
    first = lower.astype(np.int64)
    # The condition is pixel < size; on integers it is exact, where a float64 size might not be.
    reached &= first < size
    return reached, first, pixel - lower


def _corner_keys(call: _Call, first_y: Ints, first_x: Ints) -> tuple[Ints, Bools]:
    """Return the flat index of every corner and whether it is valid.

    `start + y * width + x` can need 127 bits. Modulo 2**64 it is cheap, and it equals the true index if that
    fits int64, which a float64 estimate decides with a wide margin.
    """
    y, x = first_y[..., None] + _CORNER_Y, first_x[..., None] + _CORNER_X
    height, width, start = call.height[..., None], call.width[..., None], call.start[..., None]
    estimate = y.astype(np.float64)
    estimate *= width.astype(np.float64)
    estimate += x
    estimate += start
    kept = (y >= 0) & (y < height) & (x >= 0) & (x < width)
    kept &= np.abs(estimate) < _INDEX_BOUND
    key = y.view(np.uint64)
    key *= width.view(np.uint64)
    key += x.view(np.uint64)
    key += start.view(np.uint64)
    kept &= key < np.uint64(call.value.shape[1])  # a negative index is a huge one here
    return key.view(np.int64), kept


def _write_sample_grads(call: _Call, outputs: Mapping[str, npt.NDArray[Any]], scratch_bytes: int) -> None:
    """Write grad_location and grad_attn_weight, with one gather of the corners for both."""
    channels = call.value.shape[3]
    corner_bytes = _CORNER_BYTES + channels * (call.value.itemsize + 8 + 6)
    row_bytes = call.corners_per_query * corner_bytes + 16 * channels
    scale = np.stack([np.ones(call.width.shape), call.width, call.height], axis=-1)
    for slabs, queries in call.blocks(row_bytes, min(scratch_bytes, _BLOCK_BYTES)):
        batch, head = call.slabs(slabs)
        samples = _Samples.of(call, batch, queries, head)
        sums = scale * _read(call, samples, batch, queries, head)
        if "grad_attn_weight" in outputs:
            grad = np.where(samples.reached, sums[..., 0], 0.0)
            _put(outputs["grad_attn_weight"], (batch, queries, head), grad)
        if "grad_location" in outputs:
            grad = sums[..., 1:] * call.attn_weight[batch, queries, head, ..., None].astype(np.float64)
            grad = np.where(samples.reached[..., None], grad, 0.0)
            _put(outputs["grad_location"], (batch, queries, head), grad)


def _read(call: _Call, samples: _Samples, batch: Ints, queries: slice, head: Ints) -> Floats:
    """Return sum(go * (val, dw, dh)) of every sample of a block; (slabs, queries, levels, points, 3)."""
    index = (slice(None),) + (None,) * 4
    value = np.array(call.value[batch[index], samples.key, head[index]], dtype=np.float64, order="C")
    value[~samples.kept] = 0.0  # not a weight of 0: a dropped corner may hold NaN
    reads = samples.stencil() @ value
    slabs, rows, levels, points = samples.reached.shape
    reads = reads.reshape(slabs, rows, levels * points * 3, -1)
    grad_output = np.array(call.grad_output[batch, queries, head], dtype=np.float64, order="C")
    return (reads @ grad_output[..., None]).reshape(slabs, rows, levels, points, 3)


def _write_grad_value(call: _Call, output: npt.NDArray[Any], scratch_bytes: int) -> None:
    """Write grad_value: bands of keys are summed completely in float64, then rounded.

    A band is some slabs or, if one slab is too large, some of its keys; each band goes through all queries of
    its slabs and takes the corners that fall into it.
    """
    bs, keys, heads, channels = call.value.shape
    row_bytes = call.corners_per_query * (_CORNER_BYTES + 24) + 24 * channels
    block_bytes = min(scratch_bytes // 4, _BLOCK_BYTES)
    slab_bytes = max(keys * 16 * channels, call.attn_weight.shape[1] * row_bytes)
    for slabs in spans(bs * heads, slab_bytes, block_bytes):
        batch, head = call.slabs(slabs)
        key_bytes = 16 * channels * len(batch)  # the sums, and their rounded copy
        for band in spans(keys, key_bytes, scratch_bytes // 2):
            sums = np.zeros((channels, len(batch), band.stop - band.start))
            for queries in spans(call.attn_weight.shape[1], len(batch) * row_bytes, block_bytes):
                _scatter(call, sums, batch, queries, head, band)
            _put(output, (batch, band, head), sums.transpose(1, 2, 0))


def _scatter(call: _Call, sums: Floats, batch: Ints, queries: slice, head: Ints, band: slice) -> None:
    """Add the contributions of queries to a band of keys; sums is (channels, slabs, keys of the band)."""
    samples = _Samples.of(call, batch, queries, head)
    hits = samples.kept & (samples.key >= band.start) & (samples.key < band.stop)
    corner = np.flatnonzero(hits)
    share = samples.weights() * call.attn_weight[batch, queries, head, ..., None].astype(np.float64)
    share = share.reshape(-1)[corner]
    row = corner // call.corners_per_query
    slab = row // (queries.stop - queries.start)
    cell = samples.key.reshape(-1)[corner] - band.start + slab * sums.shape[2]
    grad_output = np.array(call.grad_output[batch, queries, head], dtype=np.float64, order="C")
    by_channel = np.ascontiguousarray(grad_output.reshape(-1, sums.shape[0]).T)
    # A loop over channels: np.add.at on one flat axis is an order of magnitude faster than on rows.
    for total, gradient in zip(sums.reshape(sums.shape[0], -1), by_channel, strict=True):
        np.add.at(total, cell, share * gradient.take(row))


def _put(output: npt.NDArray[Any], index: tuple[Ints, slice, Ints], grad: Floats) -> None:
    """Round a gradient and write it to some slabs of an output; `store` itself needs a view to write to."""
    block = np.empty(grad.shape, dtype=output.dtype)
    store(block, grad)
    output[index] = block
