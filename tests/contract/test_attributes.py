"""Values of attributes: what each kind takes, and what scalars, arrays and strings are made of."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import replace
from typing import Any, get_args

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from npugrad.attributes import (
    KINDS,
    MAX_ENTRIES,
    MAX_STRING_BYTES,
    AttrType,
    AttrValue,
    Scalar,
    attrs_from_json,
    attrs_to_json,
)
from npugrad.dtypes import DATA_DTYPES, DType, dtype_from_name
from npugrad.errors import MalformedRequest
from npugrad.operator import AttrParam
from npugrad.ops import get_operator
from npugrad.validation import make_call

INTEGERS = {"int64": (-(2**63), 2**63 - 1), "int32": (-(2**31), 2**31 - 1), "int8": (-128, 127)}
RANGES: dict[str, tuple[int, int]] = {**INTEGERS, "uint64": (0, 2**64 - 1)}
TYPES: tuple[AttrType, ...] = get_args(AttrType)
POINTERS = {"int64_array", "float_array", "bool_array", "scalar", "string"}
NORM = get_operator("group_norm_backward")


def value_of(kind: AttrType, **attrs: Any) -> AttrValue:
    """What a call has of an attribute of a kind."""
    record = replace(NORM, params=(AttrParam(name="attr", c_name="attr", type=kind, doc="One."),))
    return make_call(record, {}, attrs).attrs["attr"]


def test_there_is_a_row_for_every_kind() -> None:
    assert list(KINDS) == list(TYPES)
    assert {name for name, kind in KINDS.items() if kind.is_pointer} == POINTERS
    assert all(kind.is_pointer == kind.annotation.endswith("| None") for kind in KINDS.values())
    assert all(kind.is_pointer == ("None" in kind.expected) for kind in KINDS.values())


@pytest.mark.parametrize("kind", TYPES)
def test_what_is_not_given_is_null_for_pointers_and_malformed_else(kind: AttrType) -> None:
    if kind in POINTERS:
        assert value_of(kind) is None
        assert value_of(kind, attr=None) is None
        empty: Any = {"int64_array": (), "float_array": (), "bool_array": (), "string": ""}.get(kind)
        assert kind == "scalar" or value_of(kind, attr=empty) == empty is not None
        return
    with pytest.raises(MalformedRequest, match="attr: found nothing; expected"):
        value_of(kind)
    with pytest.raises(TypeError, match="attr: found None; expected"):
        value_of(kind, attr=None)


@pytest.mark.parametrize("kind", RANGES)
@given(number=st.integers(-(2**66), 2**66))
@example(number=0)
def test_an_integer_is_taken_where_it_fits(kind: AttrType, number: int) -> None:
    lowest, highest = RANGES[kind]
    for each in (number, lowest, highest, lowest - 1, highest + 1):
        if lowest <= each <= highest:
            assert value_of(kind, attr=each) == each
        else:
            with pytest.raises(MalformedRequest, match=rf"attr: found {each}; expected an integer in {kind}"):
                value_of(kind, attr=each)


WRONG: dict[AttrType, tuple[Any, ...]] = {
    **dict.fromkeys(("int64", "int32", "int8", "uint64"), (True, np.True_, 1.0, "1", (1,))),
    "double": (True, "1", None.__class__, 10**400, 1j),
    "float": (True, "1", None.__class__, 10**400, 1j, 1e39, -3.5e38),
    "bool": (1, 0.0, "true"),
    "int64_array": (3, "12", b"12", (1, 2.0), (1, None), (True,), (2**63,), np.zeros((2, 2), int)),
    "float_array": (3.0, "12", (1.0, "2"), (True,), (1e39,), (10**400,), (-3.5e38,)),
    "bool_array": (True, "10", (1, 0), (True, None)),
    "scalar": ("1", (1,), np.zeros(1), np.str_("1"), np.complex64(1), 2**63, object()),
    "string": (3, b"text", "a\0b", "\ud800", ("a",)),
}


@pytest.mark.parametrize("kind", TYPES)
def test_what_is_of_another_kind_is_malformed(kind: AttrType) -> None:
    for value in WRONG[kind]:
        with pytest.raises(MalformedRequest, match=r"(?s)attr: found .*; expected ") as caught:
            value_of(kind, attr=value)
        assert KINDS[kind].expected in str(caught.value)
        assert caught.value.operand == "attr"


RIGHT: dict[AttrType, tuple[tuple[Any, Any], ...]] = {
    "int64": tuple((value, 2) for value in (np.int8(2), np.uint64(2), np.int64(2), np.array(2))),
    "double": (
        *((1, 1), (0.5, 0.5), (-0.0, -0.0), (math.inf, math.inf)),
        *((np.float32(0.5), 0.5), (ml_dtypes.bfloat16(1), 1)),
    ),
    "float": ((0.1, float(np.float32(0.1))), (-0.0, -0.0), (3, 3), (-math.inf, -math.inf)),
    "int64_array": tuple((v, (1, -2)) for v in ([1, -2], np.array([1, -2], np.int8), [np.int32(1), -2])),
    "float_array": tuple((v, (1.0, -2.0)) for v in ([1, -2], np.array([1, -2]), [np.int32(1), -2])),
    "bool_array": tuple((v, (True,) * 3) for v in ([True] * 3, np.array([True] * 3), (np.True_,) * 3)),
}


@pytest.mark.parametrize("kind", RIGHT)
def test_numbers_and_sequences_of_numpy_are_taken(kind: AttrType) -> None:
    for given_value, expected in RIGHT[kind]:
        assert value_of(kind, attr=given_value) == expected
    assert kind not in ("double", "float") or math.isnan(value_of(kind, attr=math.nan))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "entry"), [("int64_array", 3), ("float_array", 0.5), ("bool_array", True), ("string", "x")]
)
def test_the_longest_array_and_string(kind: AttrType, entry: Any) -> None:
    most = MAX_STRING_BYTES if kind == "string" else MAX_ENTRIES
    made: Any = value_of(kind, attr=entry * most if kind == "string" else [entry] * most)
    assert len(made) == most
    with pytest.raises(MalformedRequest, match=f"expected .*{most}"):
        value_of(kind, attr=entry * (most + 1) if kind == "string" else [entry] * (most + 1))


def test_a_string_is_measured_in_utf8() -> None:
    assert value_of("string", attr="ü" * (MAX_STRING_BYTES // 2)) is not None
    with pytest.raises(MalformedRequest):
        value_of("string", attr="ü" * (MAX_STRING_BYTES // 2) + "x")


def test_an_endless_array_is_refused_and_not_read_to_its_end() -> None:
    with pytest.raises(MalformedRequest):
        value_of("int64_array", attr=iter(int, 1))


@given(numbers=st.lists(st.floats(width=64), max_size=20))
def test_a_float_array_holds_what_float32_holds(numbers: list[float]) -> None:
    with np.errstate(over="ignore"):
        rounded = np.array(numbers).astype(np.float32)
    if (np.isinf(rounded) & ~np.isinf(numbers)).any():
        with pytest.raises(MalformedRequest):
            value_of("float_array", attr=numbers)
        return
    made = value_of("float_array", attr=numbers)
    np.testing.assert_array_equal(np.array(made, np.float64), rounded.astype(np.float64))


# -------------------------------------------------------------------------------------------- scalars


@pytest.mark.parametrize("dtype", DATA_DTYPES)
@given(data=st.data())
def test_a_scalar_has_the_bits_of_an_element(dtype: DType, data: st.DataObject) -> None:
    """Any bits are a scalar's, and those of its value but for what is no number."""
    content = data.draw(st.binary(min_size=dtype.itemsize, max_size=dtype.itemsize))
    if dtype is DType.BOOL:
        content = bytes([content[0] & 1])
    made = Scalar.of_content(dtype, content)
    assert np.frombuffer(content, dtype.numpy)[0] == made.value or math.isnan(made.value)
    assert math.isnan(made.value) or Scalar(dtype, made.value) == made
    assert value_of("scalar", attr=np.frombuffer(content, dtype.numpy)[0]) == made
    assert value_of("scalar", attr=np.frombuffer(content, dtype.numpy).reshape(())) == made
    assert value_of("scalar", attr=made) is made
    assert hash(Scalar.of_content(dtype, bytes(content))) == hash(made)


@given(number=st.floats(width=64), dtype=st.sampled_from(["float32", "float16", "bfloat16", "float64"]))
def test_a_scalar_is_rounded_to_its_type(number: float, dtype: str) -> None:
    kind = dtype_from_name(dtype).numpy
    with np.errstate(over="ignore"):
        rounded = np.array(number).astype(kind)
    if math.isinf(float(rounded)) and not math.isinf(number):
        with pytest.raises(OverflowError):
            Scalar(dtype, number)
        return
    assert Scalar(dtype, number).content == rounded.tobytes()


def test_what_carries_no_scalar_type_gets_the_one_of_c() -> None:
    typed: dict[str, list[Any]] = {
        "bool": [True, np.True_],
        "int64": [3],
        "float64": [0.1, np.float64(0.1)],
        "uint8": [np.uint8(3)],
    }
    typed |= {
        "float32": [np.float32(0.1)],
        "bfloat16": [ml_dtypes.bfloat16(0.5)],
        "int16": [np.array(3, ">i2")],
    }
    for dtype, value in ((dtype, value) for dtype, values in typed.items() for value in values):
        made = value_of("scalar", attr=value)
        assert isinstance(made, Scalar)
        assert (made.dtype, made.value) == (dtype, value)
        assert repr(made) == f"Scalar({dtype!r}, {made.value!r})"


def test_scalars_differ_by_type_and_by_bits() -> None:
    assert Scalar("int64", 1) != Scalar("int32", 1)
    assert Scalar("float32", 0.0) != Scalar("float32", -0.0)
    assert Scalar("float32", math.nan) == Scalar("float32", math.nan)


def test_what_a_type_does_not_hold_is_no_scalar() -> None:
    wrong: list[tuple[type[Exception], list[tuple[str, Any]]]] = [
        (OverflowError, [("int8", 128), ("uint8", -1), ("uint64", 2**64), ("float16", 70000.0)]),
        (TypeError, [("int8", 1.0), ("int8", True), ("float32", True), ("float32", np.True_)]),
        (TypeError, [("float32", "1"), ("bool", 1), ("string", 1), ("complex64", 1)]),
        (ValueError, [("float33", 1)]),
    ]
    for error, dtype, value in ((error, *case) for error, cases in wrong for case in cases):
        with pytest.raises(error):
            Scalar(dtype, value)
    for dtype, content, message in (
        ("float32", b"\0\0\0", "found 3 bytes; expected 4 for float32"),
        ("int8", b"", "found 0 bytes; expected 1 for int8"),
        ("bool", b"\2", "found a bool of 2; expected 0 or 1"),
        ("complex64", b"", "found dtype complex64; expected one whose data can be sent"),
    ):
        with pytest.raises(ValueError, match=message):
            Scalar.of_content(dtype_from_name(dtype), content)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))
@example(0xFFF8_0000_0000_0ABC, 0xFFC0_0ABC)
def test_json_keeps_every_bit_of_a_number(double: int, single: int) -> None:
    """A NaN's sign and payload among them."""
    factor = struct.unpack("<d", double.to_bytes(8, "little"))[0]
    weight = struct.unpack("<f", single.to_bytes(4, "little"))[0]
    text = json.dumps(attrs_to_json({"factor": factor, "weights": (weight, 0.5)}))
    back: Any = attrs_from_json(json.loads(text))
    assert struct.pack("<d", back["factor"]) == struct.pack("<d", factor)
    assert struct.pack("<2f", *back["weights"]) == struct.pack("<2f", weight, 0.5)
