"""Float64 reference of aclnnEmbeddingDenseBackward: the rows of grad of each index, added up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad.references._blocks import SCRATCH_BYTES, flat_float64, spans, store

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    Array = npt.NDArray[Any]

# Peak scratch memory of an element of grad or of a sum, and of a row of either, in bytes.
_ELEMENT_BYTES = (
    32  # in float64, once more in the order of the indices, their sums, and a run before its cast
)
_ROW_BYTES = 96  # index, order, first row of each index, and what is computed of them


def reference(
    inputs: Mapping[str, Array | None],
    attrs: Mapping[str, Any],
    outputs: Mapping[str, Array],
    *,
    scratch_bytes: int = SCRATCH_BYTES,
) -> None:
    """Compute the gradient of an embedding with respect to its weights.

    Args:
        inputs: `grad`, (..., D), of any float dtype; `indices`, as many elements as grad has rows, of any
            dtype. Any strides.
        attrs: `padding_idx`, the index that is left out; `scale_grad_by_freq`, whether each sum is divided by
            how many rows it has. Indices outside 0 to num_weights - 1 are left out.
        outputs: `grad_weight`, (num_weights, D), a C-contiguous array of any float dtype to fill.
        scratch_bytes: Maximum scratch memory, in bytes.
    """
    grad, indices, half = np.asarray(inputs["grad"]), np.asarray(inputs["indices"]), scratch_bytes // 2
    width = grad.shape[-1]
    is_whole = width * _ELEMENT_BYTES + _ROW_BYTES <= half  # else there is one row at a time
    for output in (each for each in outputs.values() if each.size):
        for columns in (slice(0, width),) if is_whole else spans(width, _ELEMENT_BYTES, half):
            row_bytes = (columns.stop - columns.start) * _ELEMENT_BYTES + _ROW_BYTES
            blocks = [*spans(indices.size, row_bytes if is_whole else half + 1, half)]
            for rows in spans(len(output), row_bytes, half):
                with np.errstate(all="ignore"):  # NaN and infinite data are computed without warnings
                    store(output[rows, columns], _sums(grad, indices, attrs, rows, columns, blocks))


def _sums(
    grad: Array, indices: Array, attrs: Mapping[str, Any], rows: slice, columns: slice, blocks: list[slice]
) -> Array:
    """The sums of some rows of the output."""
    width, chosen = grad.shape[-1], columns.stop - columns.start
    sums, counts = np.zeros((rows.stop - rows.start, chosen)), np.zeros((rows.stop - rows.start, 1))
    for block in blocks:
        found = _run(indices, block)
        order = np.argsort(found, kind="stable")
        is_in = (found >= rows.start) & (found < rows.stop) & (found != attrs["padding_idx"])
        order = order[is_in[order]]
        if not order.size:
            continue
        start = block.start * width + columns.start
        values = flat_float64(grad, start, start + (block.stop - block.start) * chosen).reshape(-1, chosen)
        index, first, count = np.unique(found[order], return_index=True, return_counts=True)
        sums[index - rows.start] += np.add.reduceat(values[order], first, axis=0)
        counts[index - rows.start, 0] += count
    return sums / np.maximum(counts, 1) if attrs["scale_grad_by_freq"] else sums


def _run(indices: Array, block: slice) -> Array:
    """Some indices, in C order, as int64."""
    flat: Array = indices.reshape(-1) if indices.flags.c_contiguous else indices.flat  # type: ignore[assignment]
    return np.array(flat[block]).astype(np.int64)
