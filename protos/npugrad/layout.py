"""Converts between arrays and contents: strided views of bytes, and the fewest bytes for an array."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from npugrad.dtypes import Format, dtype_from_name
from npugrad.meta import TensorMeta

if TYPE_CHECKING:
    from collections.abc import Iterable

    Buffer = bytes | bytearray | memoryview


def view(meta: TensorMeta, buffer: Buffer, byte_offset: int = 0) -> npt.NDArray[Any]:
    """Returns a view of the tensor in a buffer, without a copy; writable if the buffer is.

    Args:
        meta: Type, shape, strides (in elements) and storage offset.
        buffer: Memory that holds the content.
        byte_offset: Where the content starts in it.

    Raises:
        ValueError: The content extends beyond the buffer.
    """
    available = memoryview(buffer).nbytes - byte_offset
    if byte_offset < 0 or available < meta.content_bytes:
        raise ValueError(f"found {available} bytes for {meta}; expected {meta.content_bytes}")
    dtype = meta.dtype.numpy
    if not meta.size:
        return np.empty(meta.shape, dtype)
    strides = tuple(step * dtype.itemsize for step in meta.element_strides)
    start = byte_offset + meta.storage_offset * dtype.itemsize
    return np.ndarray(meta.shape, dtype, buffer, start, strides)


def content(array: npt.NDArray[Any], format: Format | str = Format.ND) -> tuple[TensorMeta, memoryview]:
    """Returns the smallest content that holds an array, and the meta that describes it.

    A dense permutation (such as a transpose) and an expanded (stride 0) array are sent as they are; arrays
    with gaps, negative or misaligned strides, or another byte order are packed first.

    Args:
        array: Any array of a dtype whose data can be sent.
        format: Storage format to declare.

    Returns:
        The meta, and the bytes; a view of the array's own memory unless it had to be packed.
    """
    dtype = dtype_from_name(array.dtype)
    if array.dtype != dtype.numpy:
        array = array.astype(dtype.numpy)
    if array.flags.c_contiguous or not array.size:
        return TensorMeta(dtype, array.shape, format), _bytes(np.ascontiguousarray(array))
    strides = _element_strides(array)
    if strides is not None:
        span = sum((s - 1) * step for s, step in zip(array.shape, strides, strict=True)) + 1
        if span <= array.size:
            flat = np.lib.stride_tricks.as_strided(array, (span,), (array.itemsize,), writeable=False)
            return TensorMeta(dtype, array.shape, format, strides), _bytes(flat)
    return TensorMeta(dtype, array.shape, format), _bytes(np.ascontiguousarray(array))


def _element_strides(array: npt.NDArray[Any]) -> tuple[int, ...] | None:
    if any(step < 0 or step % array.itemsize for step in array.strides):
        return None
    # An axis of one element may have any stride; 0 keeps it out of the span.
    return tuple(
        0 if s == 1 else step // array.itemsize for s, step in zip(array.shape, array.strides, strict=True)
    )


def _bytes(array: npt.NDArray[Any]) -> memoryview:
    if not array.size:
        return memoryview(b"")
    return array.reshape(-1).view(np.uint8).data.toreadonly()


def chunks(data: memoryview, chunk_bytes: int) -> Iterable[tuple[int, memoryview]]:
    """Cuts bytes into pieces: (offset, piece) of at most `chunk_bytes` each; none for no bytes."""
    for start in range(0, data.nbytes, chunk_bytes):
        yield start, data[start : start + chunk_bytes]
