"""Arrays to contents and back: nothing but the bytes of the array travels, and none of its bits change."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from npugrad import layout
from npugrad.dtypes import DATA_DTYPES
from npugrad.meta import TensorMeta

DTYPES = [dtype.numpy for dtype in DATA_DTYPES]


def _random(dtype: np.dtype[Any], shape: tuple[int, ...], seed: int = 0) -> npt.NDArray[Any]:
    bits = np.random.default_rng(seed).integers(0, 256, int(np.prod(shape)) * dtype.itemsize, np.uint8)
    return (bits & 1).view(dtype).reshape(shape) if dtype.kind == "b" else bits.view(dtype).reshape(shape)


def _same_bits(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype and left.tobytes() == right.tobytes()


@st.composite
def strided_arrays(draw: st.DrawFn) -> npt.NDArray[Any]:
    """Slices, permutations, reversals and expansions of a small array of any dtype that travels."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    array = _random(dtype, shape, draw(st.integers(0, 9)))
    for axis in range(array.ndim):
        step = draw(st.sampled_from([1, 1, 2, -1, -2]))
        array = array[(slice(None),) * axis + (slice(draw(st.integers(0, 1)), None, step),)]
    array = array.transpose(draw(st.permutations(range(array.ndim))))
    if draw(st.booleans()):
        array = np.broadcast_to(array, (draw(st.integers(0, 3)), *array.shape))
    return array


@given(strided_arrays())
@example(np.arange(9.0)[::2])
@example(np.arange(9.0)[::-1])
@example(np.eye(4)[1:3, 1:3])
@example(_random(np.dtype(np.float16), ()))
@example(_random(np.dtype(np.float16), (3, 0, 2)))
def test_round_trip_keeps_every_bit(array: npt.NDArray[Any]) -> None:
    meta, data = layout.content(array)
    assert data.nbytes == meta.content_bytes <= array.nbytes
    assert _same_bits(layout.view(meta, data), array)
    if 0 not in array.strides:  # gaps and reversed axes are packed
        assert data.nbytes == array.nbytes


def test_expanded_array_costs_one_element() -> None:
    meta, data = layout.content(np.broadcast_to(np.float32(3), (2**20, 2**20)))
    assert (data.nbytes, meta.strides, meta.size) == (4, (0, 0), 2**40)


def test_transposed_array_travels_without_a_copy_and_one_with_gaps_contiguous() -> None:
    base = _random(np.dtype(np.float32), (3, 5))
    _, data = layout.content(base.T)
    assert np.shares_memory(np.frombuffer(data, np.uint8), base)
    for array in (np.arange(9.0)[::2], np.arange(9.0)[::-1], np.eye(4)[1:3, 1:3]):
        assert layout.content(array)[0].strides is None


def test_misaligned_and_foreign_byte_order_are_packed() -> None:
    records = np.zeros(4, np.dtype([("a", np.uint8), ("b", np.float32)]))
    records["b"] = [1, 2, 3, 4]
    for array in (records["b"], np.arange(4, dtype=">f4")):
        meta, data = layout.content(array)
        assert np.array_equal(layout.view(meta, data), array)
        assert layout.view(meta, data).dtype == np.dtype("<f4")


def test_bfloat16_nan_payloads_survive() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    meta, data = layout.content(bits.view(ml_dtypes.bfloat16))
    assert np.array_equal(layout.view(meta, data).view(np.uint16), bits)


def test_view_with_offsets_reads_the_right_elements() -> None:
    buffer = b"\xff" * 3 + np.arange(20, dtype=np.int32).tobytes()
    meta = TensorMeta("int32", (2, 3), strides=(4, 1), storage_offset=5)
    assert layout.view(meta, buffer, 3).tolist() == [[5, 6, 7], [9, 10, 11]]


def test_view_that_would_leave_the_buffer_is_refused() -> None:
    for nbytes, offset in ((23, 0), (24, 1), (24, -1), (0, 0)):
        with pytest.raises(ValueError, match="expected 24"):
            layout.view(TensorMeta("float32", (2, 3)), bytes(nbytes), offset)


def test_view_is_writable_only_over_writable_memory() -> None:
    meta = TensorMeta("float32", (2,))
    assert not layout.view(meta, bytes(8)).flags.writeable
    memory = bytearray(8)
    layout.view(meta, memory)[:] = 1
    assert np.frombuffer(memory, np.float32).tolist() == [1, 1]


@given(st.integers(0, 50), st.integers(1, 9))
def test_chunks_are_contiguous_and_complete(nbytes: int, chunk_bytes: int) -> None:
    data = memoryview(bytes(range(nbytes)))
    pieces = list(layout.chunks(data, chunk_bytes))
    assert b"".join(piece for _, piece in pieces) == data
    assert all(0 < piece.nbytes <= chunk_bytes for _, piece in pieces)
    assert [offset for offset, _ in pieces] == list(range(0, nbytes, chunk_bytes))
