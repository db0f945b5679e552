"""Float64 reference of aclnnFusedFloydAttentionGrad.

For each batch and head, with the caller's softmax maximum and sum (entry 0 of their last axis) and the
caller's attention output:

    S[n,m,k]   = scale * (sum_d query[n,m,d] * key1[n,k,d] + sum_d query[n,m,d] * key2[k,m,d])
    S          = -FLT_MAX where atten_mask[n,k] is set: replaced, after scaling
    P          = exp(S - softmax_max) / softmax_sum                       (not normalised again)
    dP[n,m,k]  = sum_d dy[n,m,d] * value1[n,k,d] + sum_d dy[n,m,d] * value2[k,m,d]
    dS         = P * (dP - sum_d dy * attention_in)
    dq[n,m,d]  = scale * (sum_k dS * key1[n,k,d] + sum_k dS * key2[k,m,d])
    dk1[n,k,d] = scale * sum_m dS * query           dk2[k,m,d] = scale * sum_n dS * query
    dv1[n,k,d] = sum_m P * dy                       dv2[k,m,d] = sum_n P * dy

A row whose every key is masked has P = 1 / K, and its dS is not zeroed: the gradient passes the mask.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad.references._blocks import SCRATCH_BYTES, spans, store

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]
    Sizes = tuple[int, int, int]
    Spans = tuple[slice, slice, slice]

__all__ = ["reference"]

_MASKED = -float(np.finfo(np.float32).max)
# Larger tiles gain nothing in the matrix products and no longer fit the caches.
_TILE_BYTES = 32 * 2**20
# The axes (0 is n, 1 is m, 2 is k) an output has besides d; the third one is summed over.
_KEPT_AXES = {"dq": (0, 1), "dk1": (0, 2), "dv1": (0, 2), "dk2": (2, 1), "dv2": (2, 1)}
_SCALED = ("dq", "dk1", "dk2")


def reference(
    inputs: Mapping[str, npt.NDArray[Any] | None],
    attrs: Mapping[str, Any],
    outputs: Mapping[str, npt.NDArray[Any]],
    *,
    scratch_bytes: int = SCRATCH_BYTES,
) -> None:
    """Compute the wanted gradients in float64 and write each with one rounding.

    Args:
        inputs: Arrays of any strides, floats of any float dtype: `query`, `dy`, `attention_in`
            (B, H, N, M, D); `key1`, `value1` (B, H, N, K, D); `key2`, `value2` (B, H, K, M, D);
            `softmax_max`, `softmax_sum` (B, H, N, M, 8); and `atten_mask` (B, 1, N, 1, K), bool or uint8,
            non-zero where masked, or None.
        attrs: `scale_value`, used as the float64 it is.
        outputs: Arrays to fill, any of `dq`, `dk1`, `dv1`, `dk2` and `dv2`, shaped like query, key1, value1,
            key2 and value2. Every element is written; all zeros when any input is empty.
        scratch_bytes: Bound on the memory used besides inputs and outputs.
    """
    if any(array is not None and array.size == 0 for array in inputs.values()):
        for output in outputs.values():
            output.fill(0)
        return
    call = _Call.of(inputs, attrs)
    # Non-finite data is computed like any other; NumPy's warnings about it are irrelevant.
    with np.errstate(all="ignore"):
        for wanted, region in _sweeps(call, tuple(outputs), scratch_bytes // 2):
            for batch, head in np.ndindex(call.query.shape[:2]):
                slab = call.slab(batch, head)
                slab_outputs = {name: outputs[name][batch, head] for name in wanted}
                for spans_nmk in _cut(call.sizes, region):
                    _sweep(slab, spans_nmk, slab_outputs, scratch_bytes // 2)


@dataclass(frozen=True)
class _Call:
    """The operands; those of one (batch, head) lack the two leading axes."""

    query: npt.NDArray[Any]
    key1: npt.NDArray[Any]
    value1: npt.NDArray[Any]
    key2: npt.NDArray[Any]
    value2: npt.NDArray[Any]
    dy: npt.NDArray[Any]
    atten_mask: npt.NDArray[Any] | None
    softmax_max: npt.NDArray[Any]
    softmax_sum: npt.NDArray[Any]
    attention_in: npt.NDArray[Any]
    scale: float

    @classmethod
    def of(cls, inputs: Mapping[str, npt.NDArray[Any] | None], attrs: Mapping[str, Any]) -> _Call:
        given = {name: array for name, array in inputs.items() if array is not None}
        mask = given.pop("atten_mask", None)
        return cls(**given, atten_mask=mask, scale=float(attrs["scale_value"]))

    def slab(self, batch: int, head: int) -> _Call:
        mask = self.atten_mask
        names = [field.name for field in fields(self) if field.name not in ("atten_mask", "scale")]
        return replace(
            self,
            **{name: getattr(self, name)[batch, head] for name in names},
            atten_mask=None if mask is None else mask[batch, 0, :, 0],
        )

    @property
    def sizes(self) -> Sizes:
        """N, M and K."""
        n, m = self.query.shape[-3:-1]
        return n, m, self.key1.shape[-2]

    @property
    def depth(self) -> int:
        """The length D of the vectors."""
        return int(self.query.shape[-1])


def _sweeps(
    call: _Call, names: tuple[str, ...], scratch_bytes: int
) -> Iterator[tuple[tuple[str, ...], Sizes]]:
    """Yield which outputs to sum together and the region (n, m, k) in which their sums fit the scratch.

    No order of tiles completes sums over n, over m and over k each in little memory. If the sums of all
    outputs fit whole, one sweep over the tiles serves them all. Otherwise several sweeps recompute P and dS:
    a slab of n completes all but the sums over n, if its sums fit; if not, each axis that is summed over has
    its own sweep.
    """
    if _sum_bytes(call, names, call.sizes) <= scratch_bytes:
        yield names, call.sizes
        return
    for cut, group in _groups(call, names, scratch_bytes):
        region = call.sizes
        while _sum_bytes(call, group, region) > scratch_bytes and any(region[axis] > 1 for axis in cut):
            region = _halved(region, max(cut, key=lambda axis: region[axis]))
        yield group, region


def _groups(
    call: _Call, names: tuple[str, ...], scratch_bytes: int
) -> Iterator[tuple[tuple[int, ...], tuple[str, ...]]]:
    """Yield the axes to cut along and the outputs whose sums such a cut leaves complete."""
    apart = dict.fromkeys(_KEPT_AXES[name] for name in names)
    by_n = tuple(name for name in names if 0 in _KEPT_AXES[name])
    _, m, k = call.sizes
    if by_n and _sum_bytes(call, by_n, (1, m, k)) <= scratch_bytes:
        yield (0,), by_n
        apart = dict.fromkeys(axes for axes in apart if 0 not in axes)
    for axes in apart:
        yield axes, tuple(name for name in names if _KEPT_AXES[name] == axes)


def _sum_bytes(call: _Call, names: tuple[str, ...], region: Sizes) -> int:
    """Return the bytes that the float64 sums of some outputs take in a region."""
    pairs = (_KEPT_AXES[name] for name in names)
    return 8 * call.depth * sum(region[rows] * region[columns] for rows, columns in pairs)


def _tile_sizes(call: _Call, region: Sizes, scratch_bytes: int) -> Sizes:
    """Return the largest near-cubic tile whose operands, scores and products fit the scratch."""
    tile = region
    while max(tile) > 1:
        n, m, k = tile
        rows = 5 * n * m + 3 * n * k + 3 * k * m
        if 8 * (4 * n * m * k + call.depth * rows) <= scratch_bytes:
            break
        tile = _halved(tile, max(range(3), key=lambda axis: tile[axis]))
    return tile


def _halved(sizes: Sizes, axis: int) -> Sizes:
    n, m, k = (-(-size // 2) if index == axis else size for index, size in enumerate(sizes))
    return n, m, k


def _cut(sizes: Sizes, piece: Sizes) -> Iterator[Spans]:
    """Cut a box from the origin into pieces of at most the given size."""
    n, m, k = (spans(size, 1, part) for size, part in zip(sizes, piece, strict=True))
    return itertools.product(n, m, k)


def _sweep(slab: _Call, region: Spans, outputs: Mapping[str, npt.NDArray[Any]], scratch_bytes: int) -> None:
    """Go through the tiles of a region, sum the wanted gradients in float64 and write their part."""
    n, m, k = (axis.stop - axis.start for axis in region)
    sizes = (n, m, k)
    sums: dict[str, Floats] = {}
    for name in outputs:
        rows, columns = _KEPT_AXES[name]
        sums[name] = np.zeros((sizes[rows], sizes[columns], slab.depth))
    for tile in _cut(sizes, _tile_sizes(slab, sizes, min(scratch_bytes, _TILE_BYTES))):
        _add_tile(slab, region, tile, sums)
    for name, total in sums.items():
        if name in _SCALED:
            total *= slab.scale
        rows, columns = _KEPT_AXES[name]
        store(outputs[name][region[rows], region[columns]], total)


def _add_tile(slab: _Call, region: Spans, inner: Spans, sums: Mapping[str, Floats]) -> None:
    """Add the contribution of one tile, placed relative to its region, to each of the region's sums."""
    n, m, k = (
        slice(outer.start + part.start, outer.start + part.stop)
        for outer, part in zip(region, inner, strict=True)
    )
    tile = _Tile.of(slab, n, m, k)
    for name, total in sums.items():
        rows, columns = _KEPT_AXES[name]
        tile.add(name, total[inner[rows], inner[columns]])


def _float64(array: npt.NDArray[Any]) -> Floats:
    """Copy into a C-contiguous array, so that an operand's layout does not change how a product is summed."""
    return np.array(array, dtype=np.float64, order="C")


def _swap(array: Floats) -> Floats:
    """View the two leading axes swapped."""
    return array.transpose(1, 0, 2)


def _per_row(array: Floats) -> Floats:
    """View a stack of matrices transposed."""
    return array.transpose(0, 2, 1)


@dataclass(frozen=True)
class _Tile:
    """One box of scores and the operands that it needs.

    The products with key1 and value1 are matrix products for each n, those with key2 and value2 for each m,
    for which `_by_m` copies the operands with m leading.
    """

    scores: Floats  # P, (n, m, k)
    scores_grad: Floats  # dS
    query: Floats  # (n, m, d)
    dy: Floats  # (n, m, d)
    key1: Floats  # (n, k, d)
    key2_by_m: Floats  # (m, k, d)

    @classmethod
    def of(cls, slab: _Call, n: slice, m: slice, k: slice) -> _Tile:
        query, dy = _float64(slab.query[n, m]), _float64(slab.dy[n, m])
        key1, key2 = _float64(slab.key1[n, k]), _float64(slab.key2[k, m].transpose(1, 0, 2))
        scores = _paired(query, key1, key2)
        scores *= slab.scale
        if slab.atten_mask is not None:
            masked = slab.atten_mask[n, k] != 0
            np.copyto(scores, _MASKED, where=masked[:, None, :])
        scores -= _float64(slab.softmax_max[n, m, :1])
        np.exp(scores, out=scores)
        scores /= _float64(slab.softmax_sum[n, m, :1])
        grad = _paired(dy, _float64(slab.value1[n, k]), _float64(slab.value2[k, m].transpose(1, 0, 2)))
        grad -= np.einsum("nmd,nmd->nm", dy, _float64(slab.attention_in[n, m]))[..., None]
        grad *= scores
        return cls(scores, grad, query, dy, key1, key2)

    def add(self, name: str, total: Floats) -> None:
        """Add this tile's part, not yet scaled, to the sums of an output."""
        if name == "dq":
            total += self.scores_grad @ self.key1
            total += _swap(_by_m(self.scores_grad) @ self.key2_by_m)
            return
        scores, rows = (self.scores_grad, self.query) if name in _SCALED else (self.scores, self.dy)
        if _KEPT_AXES[name] == (0, 2):
            total += _per_row(scores) @ rows
        else:
            total += _swap(_per_row(_by_m(scores)) @ _by_m(rows))


def _by_m(array: Floats) -> Floats:
    """Copy an array (n, m, ...) with m leading: strides of a power of two make slow matrix operands."""
    return np.ascontiguousarray(_swap(array))


def _paired(rows: Floats, by_n: Floats, by_m: Floats) -> Floats:
    """Return sum_d rows[n,m,d] * (by_n[n,k,d] + by_m[m,k,d]), each half a stack of matrix products."""
    pairs = rows @ _per_row(by_n)
    pairs += _swap(_by_m(rows) @ _per_row(by_m))
    return pairs
