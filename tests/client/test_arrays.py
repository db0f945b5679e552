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
    """Speaks the array protocol and nothing else."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.values


class OnlyDLPack:
    """Speaks DLPack and nothing else."""

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


# -------------------------------------------------------------------------------------- what goes in


@pytest.mark.parametrize("dtype", DATA_DTYPES, ids=str)
def test_every_type_that_travels_keeps_its_memory(dtype: DType) -> None:
    array = np.zeros((3, 4), dtype.numpy)
    assert same_memory(_arrays.to_numpy(array, "op", "x"), array)
    meta, content = _arrays.pack(array)
    assert (meta.dtype, meta.shape) == (dtype, (3, 4))
    assert content is not None
    assert content.nbytes == 12 * dtype.itemsize


@pytest.mark.parametrize("kind", [OnlyArray, OnlyDLPack])
def test_protocols_give_their_memory(kind: Any) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    found = _arrays.to_numpy(kind(array), "op", "x")
    assert same_memory(found, array)
    np.testing.assert_array_equal(found, array)


def test_numpy_scalars_are_tensors_of_rank_0() -> None:
    meta, content = _arrays.pack(_arrays.to_numpy(np.float32(1.5), "op", "x"))
    assert meta == TensorMeta("float32", ())
    assert content is not None
    assert bytes(content) == np.float32(1.5).tobytes()


def test_a_misaligned_array_arrives_whole() -> None:
    raw = bytearray(1 + 5 * 4)
    array = np.ndarray((5,), "<f4", raw, 1)
    array[...] = np.arange(5)
    assert not array.flags.aligned
    meta, content = _arrays.pack(_arrays.to_numpy(array, "op", "x"))
    assert content is not None
    np.testing.assert_array_equal(layout.view(meta, content), np.arange(5))


@pytest.mark.parametrize("code", [">f4", ">f2", ">f8", ">i8", ">u2"])
def test_big_endian_values_travel_little_endian(code: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(code)
    meta, content = _arrays.pack(_arrays.to_numpy(array, "op", "x"))
    assert content is not None
    assert bytes(content) == array.astype(code.replace(">", "<")).tobytes()
    np.testing.assert_array_equal(layout.view(meta, content), array)


def test_bfloat16_travels_bit_for_bit_with_nan_payloads() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    meta, content = _arrays.pack(_arrays.to_numpy(bits.view(ml_dtypes.bfloat16), "op", "x"))
    assert meta.dtype is DType.BFLOAT16
    assert content is not None
    assert bytes(content) == bits.tobytes()


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.zeros(3, np.complex64), DType.COMPLEX64),
        (np.zeros(3, np.complex128), DType.COMPLEX128),
        (np.zeros(3, ml_dtypes.float8_e5m2), DType.FLOAT8_E5M2),
        (np.zeros(3, ml_dtypes.int4), DType.INT4),
    ],
    ids=["complex64", "complex128", "float8_e5m2", "int4"],
)
def test_a_type_without_data_is_described_so_that_the_server_can_refuse_it(
    array: Array, dtype: DType
) -> None:
    assert _arrays.pack(_arrays.to_numpy(array, "op", "x")) == (TensorMeta(dtype, (3,)), None)


REFUSED = {
    "list": ([1.0, 2.0], "found list; expected a NumPy array"),
    "float": (1.0, "found float; expected"),
    "int": (3, "found int; expected"),
    "bytes": (b"abc", "found bytes; expected"),
    "string": ("abc", "found str; expected"),
    "object": (np.array([object()]), "dtype object"),
    "text": (np.array(["a"]), "dtype <U1"),
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
    with pytest.raises(TypeError, match=f"^group_norm_backward: gamma: .*{message}"):
        _arrays.to_numpy(value, "group_norm_backward", "gamma")


@pytest.mark.skipif(not hasattr(np, "dtypes") or not hasattr(np.dtypes, "StringDType"), reason="NumPy 2")
def test_a_string_type_of_numpy_2_is_a_type_error_as_well() -> None:
    text = np.array(["a"], np.dtypes.StringDType())
    with pytest.raises(TypeError, match="op: x: found dtype StringDType"):
        _arrays.to_numpy(text, "op", "x")


def test_messages_never_hold_contents() -> None:
    with pytest.raises(TypeError) as caught:
        _arrays.to_numpy(np.array(["secret"]), "op", "x")
    assert "secret" not in str(caught.value)


# ------------------------------------------------------------------------------------------- layouts


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
    meta, content = _arrays.pack(array)
    assert content is not None
    assert content.nbytes == meta.content_bytes <= array.nbytes
    assert content.readonly
    back = layout.view(meta, content)
    assert (back.shape, back.dtype) == (array.shape, array.dtype)
    assert bits(back) == bits(array)
    assert bits(layout.view(meta, bytes(offset) + bytes(content) + b"rest", offset)) == bits(array)
    if content.nbytes:
        with pytest.raises(ValueError, match="expected"):
            layout.view(meta, content[: -min(missing, content.nbytes)])


def test_dense_layouts_travel_without_a_copy() -> None:
    base = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    for array in (base, base.T, base.transpose(1, 2, 0), base[1], base[:, :1]):
        _, content = _arrays.pack(array)
        assert content is not None
        if array.size == base.size or array.flags.c_contiguous:
            assert same_memory(np.frombuffer(content, np.uint8), base)


def test_an_expanded_array_travels_as_one_element() -> None:
    meta, content = _arrays.pack(np.broadcast_to(np.float32(1), (2**20, 2**20)))
    assert meta == TensorMeta("float32", (2**20, 2**20), strides=(0, 0))
    assert content is not None
    assert content.nbytes == 4


# ----------------------------------------------------------------------------------------- what is out


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
