"""Descriptions of tensors agree with NumPy on layout, impossible ones are refused, and calls are values."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from npugrad.attributes import AttrValue, Scalar
from npugrad.dtypes import DATA_DTYPES, DType, Format
from npugrad.errors import MalformedTensor
from npugrad.layout import view
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
    np.testing.assert_array_equal(view(moved, content), view(meta, content).transpose(0, 2, 1))
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
