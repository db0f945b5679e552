"""Kinds of attributes: C type, Python values, and whether they may be null."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from itertools import islice
from operator import index
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from npugrad.dtypes import DType, dtype_from_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

MAX_ENTRIES = 1024
"""Longest array."""
MAX_STRING_BYTES = 4096
"""Longest string, in UTF-8."""


@dataclass(frozen=True, repr=False)
class Scalar:
    """A number with a dtype, like aclScalar; equal to another of the same dtype and bits.

    Example:
        >>> Scalar("float16", 0.1).value
        0.0999755859375

    Attributes:
        dtype: Dtype; names are converted to `DType`.
        content: The number, little-endian, itemsize bytes.

    Raises:
        TypeError: The value is not a number, or data of this dtype is never sent.
        OverflowError: The number is finite but out of range for the dtype.
        ValueError: Unknown dtype.
    """

    dtype: DType
    content: bytes

    def __init__(self, dtype: DType | str, value: bool | int | float) -> None:
        """Creates the scalar; see the class for errors.

        Args:
            dtype: Type.
            value: The number, which a float type rounds; a bool for bool, an integer for integer types.
        """
        object.__setattr__(self, "dtype", dtype_from_name(dtype))
        object.__setattr__(self, "content", _content(self.dtype, value))

    @classmethod
    def of_content(cls, dtype: DType, content: bytes) -> Scalar:
        """Returns the scalar with these bytes.

        Raises:
            ValueError: They are not one number of the type, or data of the type is never sent.
        """
        made = object.__new__(cls)
        if not dtype.has_data:
            raise ValueError(f"found dtype {dtype}; expected one whose data can be sent")
        if len(content) != dtype.itemsize:
            raise ValueError(f"found {len(content)} bytes; expected {dtype.itemsize} for {dtype}")
        if dtype is DType.BOOL and content[0] > 1:
            raise ValueError(f"found a bool of {content[0]}; expected 0 or 1")
        object.__setattr__(made, "dtype", dtype)
        object.__setattr__(made, "content", content)
        return made

    @property
    def value(self) -> bool | int | float:
        """The number."""
        number = np.frombuffer(self.content, self.dtype.numpy)[0]
        if self.dtype is DType.BOOL:
            return bool(number)
        return int(number) if self.dtype.numpy.kind in "iu" else float(number)

    def __repr__(self) -> str:
        """Such as ``Scalar('float32', 0.5)``."""
        return f"Scalar({self.dtype.value!r}, {self.value!r})"


AttrValue = int | float | bool | str | Scalar | tuple[bool, ...] | tuple[int, ...] | tuple[float, ...] | None
"""Value of an attribute of any kind; None is a null pointer."""
AttrType = Literal[
    "int64", "int32", "int8", "uint64", "double", "float", "bool",
    "int64_array", "float_array", "bool_array", "scalar", "string",
]  # fmt: skip
"""Name of a kind."""


@dataclass(frozen=True)
class AttrKind:
    """A kind of attribute.

    Attributes:
        c_type: Its type in C, without const.
        annotation: Its type in Python.
        expected: What error messages say was expected.
        convert: Converts a caller's value; raises TypeError, ValueError or OverflowError if it is invalid.
        is_pointer: Whether it may be null.
    """

    c_type: str
    annotation: str
    expected: str
    convert: Callable[[Any], AttrValue]
    is_pointer: bool = False


def _content(dtype: DType, value: Any) -> bytes:
    if dtype is DType.BOOL:
        return bytes([_bool(value)])
    if isinstance(value, np.bool_):
        raise TypeError("a bool is not a number")
    kind = dtype.numpy
    if kind.kind in "iu":
        return _integer(value).to_bytes(kind.itemsize, "little", signed=kind.kind == "i")
    number = _double(value)
    with np.errstate(over="ignore"):
        made = np.array(number).astype(kind)
    if math.isinf(float(made)) and not math.isinf(number):
        raise OverflowError(f"outside {dtype}")
    return made.tobytes()


def _integer(value: Any) -> int:
    if isinstance(value, (bool, np.bool_)):  # NumPy before 2.3 gives its bool an __index__
        raise TypeError("a bool is not an integer")
    return index(value)


def _within(lowest: int, highest: int) -> Callable[[Any], int]:
    def convert(value: Any) -> int:
        number: int = value if value.__class__ is int else _integer(value)  # the fast path of every call
        if lowest <= number <= highest:
            return number
        raise OverflowError(f"outside {lowest} to {highest}")

    return convert


_int64 = _within(-(2**63), 2**63 - 1)


def _double(value: Any) -> float:
    if isinstance(value, (bool, str)):
        raise TypeError("not a number")
    number = float(value)
    if math.isfinite(number) or not isinstance(value, int):
        return number
    raise OverflowError("outside double")


def _float(value: Any) -> float:
    rounded: float = struct.unpack("<f", struct.pack("<f", _double(value)))[0]  # OverflowError beyond float32
    return rounded


def _bool(value: Any) -> bool:
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise TypeError("not a bool")


def _entries(value: Iterable[Any]) -> Sequence[Any]:
    if isinstance(value, (str, bytes)):
        raise TypeError("not a sequence of numbers")
    entries = value if isinstance(value, (tuple, list)) else list(islice(value, MAX_ENTRIES + 1))
    if len(entries) > MAX_ENTRIES:
        raise OverflowError("too long")
    return entries


def _bool_array(value: Any) -> tuple[bool, ...]:
    return tuple(_bool(v) for v in _entries(value))


def _int64_array(value: Any) -> tuple[int, ...]:
    return tuple(_int64(v) for v in _entries(value))


def _float_array(value: Any) -> tuple[float, ...]:
    numbers = [_double(v) for v in _entries(value)]
    form = f"<{len(numbers)}f"
    return struct.unpack(form, struct.pack(form, *numbers))  # OverflowError beyond the range of float32


def _scalar(value: Any) -> Scalar:
    if isinstance(value, Scalar):
        return value
    if isinstance(value, (np.generic, np.ndarray)):
        if value.shape:
            raise TypeError("an array is not a number")
        dtype = dtype_from_name(value.dtype)
        return Scalar.of_content(dtype, value.astype(dtype.numpy).tobytes())  # a NaN keeps its bits
    if isinstance(value, bool):
        return Scalar(DType.BOOL, value)
    return Scalar(DType.INT64, value) if isinstance(value, int) else Scalar(DType.FLOAT64, value)


def string(value: Any) -> str:
    """Checks a string attribute and returns it.

    Raises:
        TypeError: It is not a string.
        ValueError: It contains a NUL, is not valid Unicode, or is too long.
    """
    if not isinstance(value, str):
        raise TypeError("not a text")
    if "\0" in value or len(value.encode()) > MAX_STRING_BYTES:
        raise ValueError("a NUL, or too long")
    return value


KINDS: Mapping[AttrType, AttrKind] = {
    "int64": AttrKind("int64_t", "int", "an integer in int64", _int64),
    "int32": AttrKind("int", "int", "an integer in int32", _within(-(2**31), 2**31 - 1)),
    "int8": AttrKind("int8_t", "int", "an integer in int8", _within(-128, 127)),
    "uint64": AttrKind("uint64_t", "int", "an integer in uint64", _within(0, 2**64 - 1)),
    "double": AttrKind("double", "float", "a number", _double),
    "float": AttrKind("float", "float", "a number in float32", _float),
    "bool": AttrKind("bool", "bool", "True or False", _bool),
    "int64_array": AttrKind(
        "aclIntArray*",
        "Sequence[int] | None",
        f"a sequence of integers in int64 or None, at most {MAX_ENTRIES}",
        _int64_array,
        is_pointer=True,
    ),
    "float_array": AttrKind(
        "aclFloatArray*",
        "Sequence[float] | None",
        f"a sequence of numbers in float32 or None, at most {MAX_ENTRIES}",
        _float_array,
        is_pointer=True,
    ),
    "bool_array": AttrKind(
        "aclBoolArray*",
        "Sequence[bool] | None",
        f"a sequence of bools or None, at most {MAX_ENTRIES}",
        _bool_array,
        is_pointer=True,
    ),
    "scalar": AttrKind(
        "aclScalar*",
        "Scalar | bool | float | None",
        "a Scalar, a NumPy scalar, a bool, an integer in int64, a number or None",
        _scalar,
        is_pointer=True,
    ),
    "string": AttrKind(
        "char*",
        "str | None",
        f"text without NUL of at most {MAX_STRING_BYTES} bytes of UTF-8, or None",
        string,
        is_pointer=True,
    ),
}
"""Every kind by name."""


def attrs_to_json(attrs: Mapping[str, AttrValue]) -> dict[str, Any]:
    """Converts attributes to JSON values; a NaN keeps its sign and payload, which JSON lacks."""
    return {name: _to_json(value) for name, value in attrs.items()}


def attrs_from_json(found: Mapping[str, Any]) -> dict[str, AttrValue]:
    """Restores attributes from the result of `attrs_to_json`."""
    return {name: _from_json(value) for name, value in found.items()}


def _to_json(value: Any) -> Any:
    if isinstance(value, Scalar):
        return {"dtype": value.dtype.value, "content": value.content.hex()}
    if isinstance(value, float) and math.isnan(value):
        return {"nan": struct.pack("<d", value).hex()}
    if isinstance(value, tuple) and any(entry != entry for entry in value):
        return [_to_json(entry) for entry in value]
    return value


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_from_json(entry) if isinstance(entry, dict) else entry for entry in value)
    if not isinstance(value, dict):
        return value
    if "nan" in value:
        return struct.unpack("<d", bytes.fromhex(value["nan"]))[0]
    return Scalar.of_content(dtype_from_name(value["dtype"]), bytes.fromhex(value["content"]))
