"""Descriptions of tensors agree with NumPy on layout, calls are values, and arrays travel bit for bit."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from npugrad import layout
from npugrad.attributes import AttrValue, Scalar
from npugrad.dtypes import DATA_DTYPES, DType, Format
from npugrad.errors import MalformedTensor
from npugrad.meta import INT64_MAX, MAX_RANK, CallMeta, TensorMeta

SHAPES = st.lists(st.integers(0, 5), max_size=6).map(tuple)


@st.composite
def strided(draw: st.DrawFn) -> TensorMeta:
    shape = draw(SHAPES)
    strides = tuple(draw(st.integers(0, 40)) for _ in shape)
    return TensorMeta(draw(st.sampled_from(DATA_DTYPES)), shape, "ND", strides, draw(st.integers(0, 9)))


@given(shape=SHAPES, dtype=st.sampled_from(DATA_DTYPES))
@example((), DType.FLOAT64)
def test_contiguous_layout_is_numpy_s(shape: tuple[int, ...], dtype: DType) -> None:
    meta, array = TensorMeta(dtype, shape), np.empty(shape, dtype.numpy)
    assert (meta.rank, meta.size, meta.nbytes) == (array.ndim, array.size, array.nbytes)
    assert meta.content_bytes == array.nbytes
    assert meta.is_contiguous
    if array.size:  # NumPy gives an empty array any strides
        assert tuple(step * dtype.itemsize for step in meta.contiguous_strides) == array.strides
    assert meta.element_strides == meta.contiguous_strides


@given(meta=strided())
@example(TensorMeta("float64", (), strides=(), storage_offset=3))
@example(TensorMeta("int8", (1, 4), strides=(99, 1)))
@example(TensorMeta("float16", (3, 2), strides=(1, 3)))
def test_content_ends_with_the_last_element_and_numpy_views_it_alike(meta: TensorMeta) -> None:
    """Against the positions of all elements, counted one by one."""
    assert meta.strides is not None
    itemsize = meta.dtype.itemsize
    axes = np.indices(meta.shape).reshape(meta.rank, meta.size)
    positions = meta.storage_offset + np.array(meta.strides, np.int64).reshape(1, -1) @ axes
    last = int(positions.max()) + 1 if meta.size else meta.storage_offset
    assert meta.content_bytes == last * itemsize
    assert meta.is_contiguous == bool((positions == np.arange(meta.size)).all() and meta.storage_offset == 0)
    start, strides = meta.storage_offset * itemsize, [step * itemsize for step in meta.strides]
    buffer = np.zeros(meta.content_bytes, np.uint8)
    array: np.ndarray[Any, Any] = np.ndarray(meta.shape, meta.dtype.numpy, buffer, start, strides)
    assert (array.ndim, array.size, array.nbytes) == (meta.rank, meta.size, meta.nbytes)
    dense = meta.contiguous()
    assert (dense.dtype, dense.shape, dense.format) == (meta.dtype, meta.shape, meta.format)
    assert (dense.strides, dense.storage_offset) == (None, 0)
    assert dense.is_contiguous
    assert dense.contiguous() == dense


def test_an_expanded_tensor_costs_one_element() -> None:
    meta = TensorMeta("float32", (2**20, 2**20), strides=(0, 0))
    assert (meta.size, meta.content_bytes) == (2**40, 4)
    assert not meta.is_contiguous


def test_permuted_axes_name_the_same_elements() -> None:
    meta = TensorMeta("int32", (2, 3, 4), "NHWC", strides=(1, 2, 6), storage_offset=5)
    content = np.arange(29, dtype=np.int32).tobytes()
    moved = meta.permuted((0, 2, 1))
    np.testing.assert_array_equal(layout.view(moved, content), layout.view(meta, content).transpose(0, 2, 1))
    assert moved.format == "ND"
    assert meta.permuted((0, 1, 2)) is meta


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": (2, -1)}, r"found shape \[2, -1\]; expected sizes of 0 or more"),
        ({"shape": (2,), "strides": (-1,)}, r"found strides \[-1\]; expected 0 or more"),
        ({"shape": (2,), "strides": (1, 1)}, "found 2 strides, rank 1; expected one for each axis"),
        ({"shape": (), "strides": (1,)}, "found 1 strides, rank 0"),
        ({"shape": (2,), "storage_offset": -1}, "found storage offset -1; expected 0 or more"),
        ({"shape": (1,) * 33}, "found rank 33; expected at most 32"),
        ({"shape": (2**61,)}, r"above 2\^63 - 1 bytes"),
        ({"shape": (2**32, 2**32)}, r"above 2\^63 - 1 bytes"),
        ({"shape": (10**30,)}, r"above 2\^63 - 1 bytes"),
        ({"shape": (2**31,), "strides": (2**31,)}, r"above 2\^63 - 1 bytes"),
        ({"shape": (2,), "storage_offset": 2**62}, r"above 2\^63 - 1 bytes"),
        ({"shape": (2**62, 2**62), "strides": (0, 0)}, r"above 2\^63 - 1 bytes"),
    ],
)
def test_what_cannot_be_a_tensor_is_malformed(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(MalformedTensor, match=message):
        TensorMeta("float32", **arguments)


def test_the_limits_themselves_are_legal() -> None:
    assert TensorMeta("int8", (INT64_MAX,)).nbytes == INT64_MAX
    assert TensorMeta("float32", (1,) * MAX_RANK).rank == MAX_RANK
    assert TensorMeta("float32", (0, 2**62)).nbytes == 0


def test_sizes_are_integers_and_names_known() -> None:
    wrong: list[dict[str, Any]] = [
        *({"shape": shape} for shape in ((2.5,), ("2",), 3, None)),
        *({"shape": (2,), name: value} for name, value in (("strides", (1.0,)), ("storage_offset", 0.5))),
    ]
    for arguments in wrong:
        with pytest.raises(TypeError):
            TensorMeta("float32", **arguments)
    for names in ({"dtype": "float33"}, {"format": "nd"}, {"dtype": None}):
        with pytest.raises(ValueError, match="unknown"):
            TensorMeta(**{"dtype": "float32", "shape": (2,), **names})  # type: ignore[arg-type]


def test_names_lists_and_numpy_integers_are_accepted() -> None:
    meta = TensorMeta("bfloat16", [np.int64(2), 3], "NCHW", [np.int32(3), 1], np.uint8(0))
    assert meta == TensorMeta(DType.BFLOAT16, (2, 3), Format.NCHW, (3, 1), 0)
    assert [type(size) for size in meta.shape] == [int, int]
    assert str(meta) == "bfloat16[2, 3]"
    assert len({meta, TensorMeta("bfloat16", (2, 3), "NCHW", (3, 1))}) == 1


@given(meta=strided())
def test_what_follows_from_a_meta_is_computed_once_and_is_no_part_of_it(meta: TensorMeta) -> None:
    facts = ("size", "nbytes", "contiguous_strides", "element_strides", "content_bytes", "is_contiguous")
    fresh = TensorMeta(meta.dtype, meta.shape, meta.format, meta.strides, meta.storage_offset)
    before = (hash(fresh), repr(fresh), pickle.dumps(fresh))
    for name in facts:
        assert getattr(meta, name) is getattr(meta, name)
        assert getattr(meta, name) == getattr(fresh, name)
        assert name in vars(meta)
    assert (hash(meta), repr(meta), pickle.dumps(meta)) == before
    twin = pickle.loads(pickle.dumps(meta))
    assert vars(twin).keys().isdisjoint(facts)
    assert twin == meta == fresh == copy.copy(meta) == copy.deepcopy(meta)
    with pytest.raises(FrozenInstanceError):
        meta.shape = (1,)  # type: ignore[misc]


def test_calls_are_values_too() -> None:
    inputs: dict[str, TensorMeta | None] = {"x": TensorMeta("float32", (2,)), "y": None}
    attrs: dict[str, AttrValue] = {"n": 3, "scale": 0.5, "mask": (True,), "sizes": (2, 3), "weights": (0.5,)}
    call = CallMeta(inputs, {**attrs, "text": "a", "alpha": Scalar("int8", 1)}, {"z": None})
    inputs["y"] = inputs["x"]
    assert call.inputs["y"] is None
    with pytest.raises(TypeError):
        call.attrs["n"] = 4  # type: ignore[index]
    other = call.with_inputs(y=inputs["x"]).with_attrs(n=4).with_outputs(z=inputs["x"])
    assert (other.tensor("y"), other.integer("n"), other.number("scale")) == (inputs["x"], 4, 0.5)
    assert (other.mask("mask"), other.declared("z"), other.is_null_output("z")) == (
        (True,),
        inputs["x"],
        False,
    )
    assert (call.integer("n"), call.declared("z"), call.is_null_output("z")) == (3, None, True)
    assert (call.integers("sizes"), call.numbers("weights"), call.text("text")) == ((2, 3), (0.5,), "a")
    assert call.scalar("alpha") == Scalar("int8", 1)
    assert (call.declared("w"), call.is_null_output("w")) == (None, False)
    for wrong in (lambda: call.tensor("y"), lambda: call.integer("scale"), lambda: call.number("mask")):
        with pytest.raises(KeyError):
            wrong()


def test_summary_has_what_is_there_and_fits_a_line() -> None:
    call = CallMeta({"x": TensorMeta("float16", (2, 3)), "y": None}, {"eps": 0.5, "mask": (True, False)})
    assert call.summary == "x=float16[2, 3], eps=0.5, mask=(True, False)"
    assert len(call.with_attrs(mask=(True,) * 1000).summary) == 512


# Arrays to contents and back: nothing but the bytes of the array travels, and none of its bits change.

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
