"""Element types and storage formats: one row for each, with wire, ACL and NumPy names.

Source: `aclDataType` and `aclFormat` of CANN's public header `acl/acl_base.h`.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from npugrad.errors import WrongType, WrongValue


class DType(str, Enum):
    """Element type of a tensor; compares equal to its name, such as ``"float32"``.

    Attributes:
        wire: Number in `npugrad.v1.DataType`.
        acl: Number in `aclDataType`.
        itemsize: Bytes per element; 0 for types whose data is never sent.
    """

    wire: int
    acl: int
    itemsize: int

    def __new__(cls, name: str, wire: int, acl: int, itemsize: int) -> DType:
        """Builds one row of the table."""
        member = str.__new__(cls, name)
        member._value_ = name
        member.wire, member.acl, member.itemsize = wire, acl, itemsize
        return member

    FLOAT32 = ("float32", 1, 0, 4)
    FLOAT16 = ("float16", 2, 1, 2)
    BFLOAT16 = ("bfloat16", 3, 27, 2)
    FLOAT64 = ("float64", 4, 11, 8)
    INT8 = ("int8", 5, 2, 1)
    INT16 = ("int16", 6, 6, 2)
    INT32 = ("int32", 7, 3, 4)
    INT64 = ("int64", 8, 9, 8)
    UINT8 = ("uint8", 9, 4, 1)
    UINT16 = ("uint16", 10, 7, 2)
    UINT32 = ("uint32", 11, 8, 4)
    UINT64 = ("uint64", 12, 10, 8)
    BOOL = ("bool", 13, 12, 1)
    STRING = ("string", 14, 13, 0)
    COMPLEX64 = ("complex64", 15, 16, 0)
    COMPLEX128 = ("complex128", 16, 17, 0)
    COMPLEX32 = ("complex32", 17, 33, 0)
    INT4 = ("int4", 18, 29, 0)
    UINT1 = ("uint1", 19, 30, 0)
    HIFLOAT8 = ("hifloat8", 20, 34, 0)
    FLOAT8_E5M2 = ("float8_e5m2", 21, 35, 0)
    FLOAT8_E4M3FN = ("float8_e4m3fn", 22, 36, 0)
    FLOAT8_E8M0 = ("float8_e8m0", 23, 37, 0)
    FLOAT6_E3M2 = ("float6_e3m2", 24, 38, 0)
    FLOAT6_E2M3 = ("float6_e2m3", 25, 39, 0)
    FLOAT4_E2M1 = ("float4_e2m1", 26, 40, 0)
    FLOAT4_E1M2 = ("float4_e1m2", 27, 41, 0)

    def __str__(self) -> str:
        """The name."""
        return str(self.value)

    @property
    def has_data(self) -> bool:
        """Whether tensors of this type are sent with data."""
        return self.itemsize > 0

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy type, little-endian; `ml_dtypes.bfloat16` for bfloat16.

        Raises:
            TypeError: Data of this type is never sent.
        """
        if not self.has_data:
            raise WrongType(f"dtype {self} has no data; data can be sent as {', '.join(DATA_DTYPES)}")
        return _NUMPY[self]


DATA_DTYPES: tuple[DType, ...] = tuple(d for d in DType if d.has_data)
"""The types whose data can be sent."""

_NUMPY: dict[DType, np.dtype[Any]] = {
    d: np.dtype(ml_dtypes.bfloat16) if d is DType.BFLOAT16 else np.dtype(d.value).newbyteorder("<")
    for d in DATA_DTYPES
}
_BY_WIRE: dict[int, DType] = {d.wire: d for d in DType}
_BY_NUMPY: dict[np.dtype[Any], DType] = {np_dtype: d for d, np_dtype in _NUMPY.items()}
_BY_NAME: dict[str, DType] = {d.value: d for d in DType}


def dtype_from_name(name: DType | str | npt.DTypeLike | None) -> DType:
    """Finds a type by its name or by a NumPy type.

    Args:
        name: A `DType`, a name such as ``"bfloat16"``, or anything `numpy.dtype` takes but None.

    Raises:
        WrongValue: Unknown type; the message lists all names.
    """
    if isinstance(name, str):
        found = _BY_NAME.get(name)
    else:
        try:
            native = None if name is None else np.dtype(name)  # NumPy reads None as float64
        except TypeError:
            native = None
        found = native and (_BY_NUMPY.get(native.newbyteorder("<")) or _BY_NAME.get(native.name))
    if not found:
        raise WrongValue(f"unknown dtype {name!r}; known are {', '.join(DType)}")
    return found


def dtype_from_wire(number: int) -> DType | None:
    """The type with this number in `npugrad.v1.DataType`; None if there is none."""
    return _BY_WIRE.get(number)


class Format(str, Enum):
    """Storage format of a tensor; compares equal to its name, such as ``"ND"``.

    Attributes:
        wire: Number in `npugrad.v1.Format`.
        acl: Number in `aclFormat`.
    """

    wire: int
    acl: int

    def __new__(cls, name: str, wire: int, acl: int) -> Format:
        """Builds one row of the table."""
        member = str.__new__(cls, name)
        member._value_ = name
        member.wire, member.acl = wire, acl
        return member

    ND = ("ND", 1, 2)
    NCHW = ("NCHW", 2, 0)
    NHWC = ("NHWC", 3, 1)
    NC1HWC0 = ("NC1HWC0", 4, 3)
    FRACTAL_Z = ("FRACTAL_Z", 5, 4)
    HWCN = ("HWCN", 6, 16)
    NDHWC = ("NDHWC", 7, 27)
    FRACTAL_NZ = ("FRACTAL_NZ", 8, 29)
    NCDHW = ("NCDHW", 9, 30)
    NDC1HWC0 = ("NDC1HWC0", 10, 32)
    FRACTAL_Z_3D = ("FRACTAL_Z_3D", 11, 33)
    NC = ("NC", 12, 35)
    NCL = ("NCL", 13, 47)

    def __str__(self) -> str:
        """The name."""
        return str(self.value)


_FORMAT_BY_NAME: dict[str, Format] = {f.value: f for f in Format}
_FORMAT_BY_WIRE: dict[int, Format] = {f.wire: f for f in Format} | {0: Format.ND}


def format_from_name(name: Format | str) -> Format:
    """Finds a storage format by its name; raises WrongValue listing all names."""
    if name not in _FORMAT_BY_NAME:
        raise WrongValue(f"unknown format {name!r}; known are {', '.join(_FORMAT_BY_NAME)}")
    return _FORMAT_BY_NAME[name]


def format_from_wire(number: int) -> Format | None:
    """The format with this number in `npugrad.v1.Format`; None if there is none."""
    return _FORMAT_BY_WIRE.get(number)
