"""Cuts large tensors into blocks for the references, reads them as float64 and rounds into the outputs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterator

SCRATCH_BYTES = 256 * 2**20
"""Scratch memory a reference may hold at once, in bytes, beyond its inputs and outputs."""


def spans(total: int, row_bytes: int, scratch_bytes: int = SCRATCH_BYTES) -> Iterator[slice]:
    """Cut `range(total)` into consecutive slices whose rows fit the scratch memory together.

    Args:
        total: Number of rows; nothing is yielded for 0.
        row_bytes: Scratch memory one row needs, in bytes.
        scratch_bytes: Scratch memory one slice may use, in bytes. A slice has at least one row, even if
            that is more.

    Yields:
        Slices with explicit start and stop, in order, covering every row once.
    """
    rows = max(1, scratch_bytes // max(1, row_bytes))
    for start in range(0, total, rows):
        yield slice(start, min(start + rows, total))


def tiles(
    shape: tuple[int, ...], element_bytes: int, scratch_bytes: int = SCRATCH_BYTES
) -> Iterator[tuple[slice, ...]]:
    """Cut an array into rectangular tiles, each one contiguous run of its C-order elements.

    Args:
        shape: Extents of the array; nothing is yielded when one of them is 0.
        element_bytes: Scratch memory one element needs, in bytes.
        scratch_bytes: Scratch memory one tile may use, in bytes. A tile has at least one element.

    Yields:
        One slice per axis with explicit start and stop, in C order, covering every element once.
    """
    if not shape:
        yield ()
        return
    for rows in spans(shape[0], math.prod(shape[1:]) * element_bytes, scratch_bytes):
        # More than one row only if whole rows fit: then the remaining axes come back as one full tile.
        for rest in tiles(shape[1:], (rows.stop - rows.start) * element_bytes, scratch_bytes):
            yield (rows, *rest)


def flat_float64(array: npt.NDArray[Any], start: int, stop: int) -> npt.NDArray[np.float64]:
    """Copy the C-order elements `start` to `stop` of an array of any shape and strides.

    Only the requested run is materialised, even if the array is strided or broadcast (stride 0).

    Args:
        array: Array of any shape and of any dtype that casts to float64.
        start: First element, counted in C order.
        stop: One past the last element.

    Returns:
        New contiguous float64 array of shape (stop - start,), free to be overwritten.
    """
    run = array.reshape(-1)[start:stop] if array.flags.c_contiguous else array.flat[start:stop]
    return np.array(run, dtype=np.float64)


def store(target: npt.NDArray[Any], values: npt.NDArray[np.float64]) -> None:
    """Round float64 values into an output, once and to nearest even; overflow becomes infinity, silently.

    Args:
        target: Writable array, or view of one, of any float dtype, including bfloat16.
        values: float64 array of the same shape; it is not changed.
    """
    with np.errstate(all="ignore"):
        if target.dtype != ml_dtypes.bfloat16:
            target[...] = values
            return
        for tile in tiles(values.shape, element_bytes=24, scratch_bytes=2**18):
            target[tile] = _round_to_odd(values[tile])


def _round_to_odd(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Narrow to float32 such that a further rounding to bfloat16 is as good as rounding once.

    ml_dtypes converts float64 to bfloat16 by way of float32, which would round twice. Truncating instead, and
    setting the last bit if anything was lost, keeps what the second rounding needs.
    """
    single = values.astype(np.float32)
    inexact = single != values
    bits = single.view(np.int32)
    bits -= np.abs(single) > np.abs(values)
    bits |= inexact
    return single
