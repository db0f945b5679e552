"""Operands in, results out: nothing is copied without need, nothing changed, nothing odd let through."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from npugrad import layout
from npugrad.dtypes import DATA_DTYPES, DType
from npugrad.meta import TensorMeta
from npugrad_client import _arrays

Array = npt.NDArray[Any]


class OnlyArray:
    def __init__(self, values: Any) -> None:
        self.values = values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.values


class OnlyDLPack:
    def __init__(self, values: Array, device: tuple[int, int] = (1, 0)) -> None:
        self.values, self.device = values, device

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.values.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


class Stubborn:
    """Has the protocol's method, which refuses, as arrays on a GPU do."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        raise TypeError("implicit conversion is not allowed")


def same_memory(left: Array, right: Array) -> bool:
    return bool(np.shares_memory(left, right))


def packed(value: Any) -> tuple[TensorMeta, memoryview]:
    meta, content = _arrays.pack(_arrays.to_numpy(value, "op", "x"))
    assert content is not None
    return meta, content


def test_every_type_that_travels_keeps_its_memory() -> None:
    for dtype in DATA_DTYPES:
        array = np.zeros((3, 4), dtype.numpy)
        assert same_memory(_arrays.to_numpy(array, "op", "x"), array)
        meta, content = packed(array)
        assert (meta.dtype, meta.shape, content.nbytes) == (dtype, (3, 4), 12 * dtype.itemsize)


def test_protocols_give_their_memory() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    for kind in (OnlyArray, OnlyDLPack):
        found = _arrays.to_numpy(kind(array), "op", "x")
        assert same_memory(found, array)
        np.testing.assert_array_equal(found, array)


def test_scalars_misaligned_arrays_big_endian_ones_and_nan_payloads_arrive_whole() -> None:
    meta, content = packed(np.float32(1.5))
    assert (meta, bytes(content)) == (TensorMeta("float32", ()), np.float32(1.5).tobytes())
    misaligned = np.ndarray((5,), "<f4", bytearray(1 + 5 * 4), 1)
    misaligned[...] = np.arange(5)
    assert not misaligned.flags.aligned
    np.testing.assert_array_equal(layout.view(*packed(misaligned)), np.arange(5))
    for code in (">f4", ">f2", ">f8", ">i8", ">u2"):
        array = np.arange(6).reshape(2, 3).astype(code)
        meta, content = packed(array)
        assert bytes(content) == array.astype(code.replace(">", "<")).tobytes()
        np.testing.assert_array_equal(layout.view(meta, content), array)
    bits_of_all = np.arange(2**16, dtype=np.uint16)
    meta, content = packed(bits_of_all.view(ml_dtypes.bfloat16))
    assert (meta.dtype, bytes(content)) == (DType.BFLOAT16, bits_of_all.tobytes())


def test_a_type_without_data_is_described_so_that_the_server_can_refuse_it() -> None:
    for kind, dtype in (
        (np.complex64, DType.COMPLEX64),
        (np.complex128, DType.COMPLEX128),
        (ml_dtypes.float8_e5m2, DType.FLOAT8_E5M2),
        (ml_dtypes.int4, DType.INT4),
    ):
        found = _arrays.pack(_arrays.to_numpy(np.zeros(3, kind), "op", "x"))
        assert found == (TensorMeta(dtype, (3,)), None)


REFUSED = {
    "list": ([1.0, 2.0], "found list; expected a NumPy array"),
    "float": (1.0, "found float; expected"),
    "int": (3, "found int; expected"),
    "bytes": (b"abc", "found bytes; expected"),
    "string": ("secret", "found str; expected"),
    "object": (np.array([object()]), "dtype object"),
    "text": (np.array(["secret"]), "dtype <U6"),
    "raw": (np.zeros(2, "V2"), r"dtype \|V2"),
    "records": (np.zeros(2, [("a", "<f4")]), "dtype"),
    "datetime": (np.array(["2020"], "M8[Y]"), "dtype datetime64"),
    "timedelta": (np.array([1], "m8[s]"), "dtype timedelta64"),
    "masked": (np.ma.masked_array([1.0, 2.0], [True, False]), "masked array; .* call .filled()"),
    "refusing": (Stubborn(), "Stubborn that cannot be converted to an array: implicit conversion"),
    "device": (OnlyDLPack(np.zeros(2), (2, 1)), r"DLPack device \(2, 1\); expected CPU memory"),
}


@pytest.mark.parametrize(("value", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_operand_is_a_type_error_that_names_it(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"^group_norm_backward: gamma: .*{message}") as caught:
        _arrays.to_numpy(value, "group_norm_backward", "gamma")
    assert "secret" not in str(caught.value), "its content"


@pytest.mark.skipif(not hasattr(np, "dtypes") or not hasattr(np.dtypes, "StringDType"), reason="NumPy 2")
def test_a_string_type_of_numpy_2_is_a_type_error_as_well() -> None:
    text = np.array(["a"], np.dtypes.StringDType())
    with pytest.raises(TypeError, match="op: x: found dtype StringDType"):
        _arrays.to_numpy(text, "op", "x")


@st.composite
def strided(draw: st.DrawFn) -> Array:
    """An array of any rank, type and layout: steps, reversals, permutations, expanded axes, offsets."""
    dtype = draw(st.sampled_from([d.numpy for d in DATA_DTYPES]))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
    base = np.frombuffer(draw(st.randoms(use_true_random=False)).randbytes(int(np.prod(shape)) * 8), np.uint8)
    array: Array = np.ndarray(shape, dtype, base.copy())
    array = array.transpose(draw(st.permutations(range(len(shape)))))
    for axis in range(array.ndim):
        start = draw(st.integers(0, 2))
        step = draw(st.sampled_from([-2, -1, 1, 1, 1, 2]))
        array = array[(slice(None),) * axis + (slice(start, None),)]
        array = array[(slice(None),) * axis + (slice(None, None, step),)]
        if draw(st.booleans()) and array.shape[axis]:
            first = array[(slice(None),) * axis + (slice(0, 1),)]
            array = np.broadcast_to(
                first, (*array.shape[:axis], draw(st.integers(1, 4)), *array.shape[axis + 1 :])
            )
    return array


def bits(array: Array) -> bytes:
    return np.ascontiguousarray(array).tobytes()


@given(strided(), st.integers(0, 9), st.integers(1, 7))
def test_any_layout_comes_back_bit_for_bit_from_anywhere_in_a_buffer(
    array: Array, offset: int, missing: int
) -> None:
    meta, content = packed(array)
    assert content.nbytes == meta.content_bytes <= array.nbytes
    assert content.readonly
    back = layout.view(meta, content)
    assert (back.shape, back.dtype) == (array.shape, array.dtype)
    assert bits(back) == bits(array)
    assert bits(layout.view(meta, bytes(offset) + bytes(content) + b"rest", offset)) == bits(array)
    if content.nbytes:
        with pytest.raises(ValueError, match="expected"):
            layout.view(meta, content[: -min(missing, content.nbytes)])


@given(strided())
def test_a_copy_of_any_layout_travels_like_the_original(array: Array) -> None:
    before, found = packed(array), _arrays.copied({"x": array, "n": 3})
    copy = found.pop("x")
    assert found == {"n": 3}
    assert not same_memory(copy, array)
    assert packed(copy) == before
    assert (copy.dtype.itemsize, bits(copy)) == (array.dtype.itemsize, bits(array))


def test_a_copy_is_made_of_whatever_is_an_array() -> None:
    values = np.arange(3.0)
    for value in (OnlyArray(values), OnlyDLPack(values)):
        copy = _arrays.copied({"x": value})["x"]
        assert copy.tolist() == [0, 1, 2]
        assert not same_memory(copy, values)
    for other in (np.float32(1), None, Stubborn(), np.zeros(2, np.complex64), {"grad": values}):
        assert _arrays.copied({"x": other})["x"] is other


def test_dense_layouts_travel_without_a_copy_and_an_expanded_one_as_one_element() -> None:
    base = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    for array in (base, base.T, base.transpose(1, 2, 0), base[1]):
        assert same_memory(np.frombuffer(packed(array)[1], np.uint8), base)
    meta, content = packed(np.broadcast_to(np.float32(1), (2**20, 2**20)))
    assert meta == TensorMeta("float32", (2**20, 2**20), strides=(0, 0))
    assert content.nbytes == 4


def test_any_layout_with_memory_of_its_own_can_be_filled() -> None:
    base = np.zeros((4, 6), np.float32)
    for array in (base, base.T, base[::2, ::-1], base[1:3, 2:4], base.astype(">f4")):
        assert _arrays.writable(array, "op", "x") is array


def read_only() -> Array:
    array = np.zeros(3)
    array.flags.writeable = False
    return array


UNWRITABLE = {
    "read-only": (read_only(), "found a read-only array in out; expected a writable one"),
    "bytes": (np.frombuffer(b"12345678", np.float32), "read-only"),
    "scalar": (np.float32(1), "found float32 in out; expected TensorMeta, None, a NumPy array"),
    "list": ([0.0], "found list in out"),
    "copying": (OnlyArray(np.zeros(3)), "found OnlyArray in out"),
    "masked": (np.ma.masked_array([1.0], [True]), "found MaskedArray in out"),
    "expanded": (
        np.lib.stride_tricks.as_strided(np.zeros(1), (3,), (0,)),
        "found an expanded array in out; expected memory for every element",
    ),
    "text": (np.array(["a"]), "found dtype <U1"),
}


@pytest.mark.parametrize(("value", "message"), UNWRITABLE.values(), ids=UNWRITABLE)
def test_what_results_could_not_be_seen_in_is_refused(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"^op: x: .*{message}"):
        _arrays.writable(value, "op", "x")
