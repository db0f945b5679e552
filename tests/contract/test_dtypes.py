"""Element types, storage formats and products: the same everywhere they have a name or a number."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from enum import Enum
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from npugrad.dtypes import (
    DATA_DTYPES,
    DType,
    Format,
    dtype_from_name,
    dtype_from_wire,
    format_from_name,
    format_from_wire,
)
from npugrad.products import Product, chip_kind, product_from_name, product_from_soc, product_from_wire
from npugrad.v1 import tensor_pb2

# (aclDataType, bytes) by name, from the enumeration in CANN's public header; 0 bytes where no data travels.
ACL_DATA_TYPES = {
    "float32": (0, 4),
    "float16": (1, 2),
    "int8": (2, 1),
    "int32": (3, 4),
    "uint8": (4, 1),
    "int16": (6, 2),
    "uint16": (7, 2),
    "uint32": (8, 4),
    "int64": (9, 8),
    "uint64": (10, 8),
    "float64": (11, 8),
    "bool": (12, 1),
    "string": (13, 0),
    "complex64": (16, 0),
    "complex128": (17, 0),
    "bfloat16": (27, 2),
    "int4": (29, 0),
    "uint1": (30, 0),
    "complex32": (33, 0),
    "hifloat8": (34, 0),
    "float8_e5m2": (35, 0),
    "float8_e4m3fn": (36, 0),
    "float8_e8m0": (37, 0),
    "float6_e3m2": (38, 0),
    "float6_e2m3": (39, 0),
    "float4_e2m1": (40, 0),
    "float4_e1m2": (41, 0),
}
TABLES: list[Any] = [
    pytest.param(DType, tensor_pb2.DataType, "DATA_TYPE_", id="dtypes"),
    pytest.param(Format, tensor_pb2.Format, "FORMAT_", id="formats"),
]


def test_numbers_and_sizes_are_those_of_the_header() -> None:
    assert {d.value: (d.acl, d.itemsize) for d in DType} == ACL_DATA_TYPES


@pytest.mark.parametrize(("table", "proto", "prefix"), TABLES)
def test_the_wire_numbers_are_those_of_the_proto(table: type[Enum], proto: Any, prefix: str) -> None:
    names = {name.removeprefix(prefix).lower(): number for name, number in proto.items()}
    assert names.pop("unspecified") == 0
    assert names == {member.value.lower(): vars(member)["wire"] for member in table}


def test_acl_numbers_are_unique() -> None:
    for table in (DType, Format):
        numbers = [vars(member)["acl"] for member in table]
        assert len(set(numbers)) == len(numbers)


def test_types_with_data_are_those_of_numpy_and_others_are_known_by_name() -> None:
    for dtype in DATA_DTYPES:
        native = dtype.numpy
        assert native.itemsize == dtype.itemsize
        assert native.byteorder in "<=|"
        names = (dtype, dtype.value, native, native.type, native.newbyteorder(">"), np.empty(0, native).dtype)
        for name in names:
            assert dtype_from_name(name) is dtype
    for dtype in (d for d in DType if not d.has_data):
        assert dtype_from_name(dtype.value) is dtype
        with pytest.raises(TypeError, match=f"dtype {dtype} has no data; data can be sent as float32, "):
            _ = dtype.numpy
    for other in ("complex64", "complex128", ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn):
        assert dtype_from_name(np.dtype(other)).value == np.dtype(other).name


def test_unknown_types_are_refused_with_a_list() -> None:
    for wrong in ("float", "FLOAT32", "", "f4", None, object, np.dtype("U3"), [("a", "f4")], 3):
        with pytest.raises(ValueError, match=r"unknown dtype .*; known are float32, float16, bfloat16, "):
            dtype_from_name(wrong)  # type: ignore[arg-type]


def test_bfloat16_is_the_upper_half_of_float32() -> None:
    bits = np.array([0x3F80, 0xC000, 0x7F80, 0x0001], np.uint16)
    widened = (bits.astype(np.uint32) << 16).view(np.float32)
    assert (bits.view(DType.BFLOAT16.numpy).astype(np.float32) == widened).all()


@pytest.mark.parametrize(
    ("table", "by_name", "by_wire"),
    [
        (DType, dtype_from_name, dtype_from_wire),
        (Format, format_from_name, format_from_wire),
        (Product, product_from_name, product_from_wire),
    ],
)
def test_members_are_found_by_name_and_by_number_and_read_as_their_names(
    table: type[Enum], by_name: Callable[[Any], Any], by_wire: Callable[[int], Any]
) -> None:
    for member in table:
        assert by_name(member) is by_name(member.value) is by_wire(vars(member)["wire"]) is member
        assert str(member) == f"{member}" == member.value == member
        assert pickle.loads(pickle.dumps(member)) is member
    assert by_wire(10_000) is None
    assert by_wire(-1) is None
    with pytest.raises(ValueError, match=r"unknown \w+ 'nothing'; known are "):
        by_name("nothing")


SUFFIXES = {
    Product.ATLAS_TRAINING: ["A", "B", "ProA", "ProB", "PremiumA"],
    Product.ATLAS_A2: ["B1", "B2", "B2C", "B3", "B4", "B4-1"],
    Product.ATLAS_A3: ["_9361", "_9362", "_9372", "_9381", "_9382", "_9391", "_9392"],
}
OF_NO_PRODUCT = {
    "of the Ascend 950 family, which is not supported": [
        *("Ascend950PR_9579", "Ascend950DT_950x", "Ascend910_9589", "Ascend950")
    ],
    "of no known product": [*("Ascend310P3", "Ascend910", "Ascend910B9", "Ascend910_93", "ascend910b2", "")],
}


def test_the_chip_tells_the_product() -> None:
    """The names of torch_npu's NpuVariables.cpp and of CANN's runtime, whose bare 910B is no Atlas A2."""
    for product, suffixes in SUFFIXES.items():
        for soc in (f"Ascend910{suffix}" for suffix in suffixes):
            assert (product_from_soc(soc), chip_kind(soc)) == (product, product.value)
    for kind, names in OF_NO_PRODUCT.items():
        for soc in names:
            assert (product_from_soc(soc), chip_kind(soc)) == (None, kind)


def test_what_is_not_set_on_the_wire() -> None:
    """An unset format is ND, as documented; a tensor without a type has none."""
    assert format_from_wire(0) is Format.ND
    assert dtype_from_wire(0) is None
    assert product_from_wire(0) is None
