"""Encodes and decodes attributes: plain ones in optional fields, arrays and scalars in messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from npugrad.attributes import KINDS, MAX_ENTRIES, Scalar, string
from npugrad.dtypes import dtype_from_wire
from npugrad.errors import MalformedRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from npugrad.attributes import AttrType, AttrValue
    from npugrad.operator import AttrParam, OpRecord
    from npugrad.v1 import tensor_pb2


def decode_attr(record: OpRecord, param: AttrParam, message: Any) -> AttrValue:
    """Reads an attribute from a typed request; None for a null pointer.

    Raises:
        MalformedRequest: It is unset but not a pointer, out of range, too long, or not a number of its type.
    """
    if not message.HasField(param.name):
        if KINDS[param.type].is_pointer:
            return None
        problem = "found nothing; expected the attribute to be set"
    else:
        value, read = getattr(message, param.name), _READ.get(param.type)
        if read is None:
            return value  # type: ignore[no-any-return]
        try:
            return read(value)
        except ValueError as error:
            problem = str(error)
    raise MalformedRequest(
        f"{record.name}: {param.name}: {problem}", operator=record.name, operand=param.name
    )


def encode_attr(message: Any, param: AttrParam, value: AttrValue) -> None:
    """Writes an attribute, as `make_call` returns it, into a typed request; a null one stays unset."""
    if isinstance(value, tuple):
        array = getattr(message, param.name)
        array.SetInParent()
        array.values.extend(value)
    elif isinstance(value, Scalar):
        scalar = getattr(message, param.name)
        scalar.data_type, scalar.value = value.dtype.wire, value.content
    elif value is not None:
        setattr(message, param.name, value)


def _read_int8(value: int) -> int:
    if not -128 <= value <= 127:
        raise ValueError(f"found {value}; expected {KINDS['int8'].expected}")
    return value


def _read_array(message: Any) -> AttrValue:
    if len(message.values) > MAX_ENTRIES:
        raise ValueError(f"found {len(message.values)} entries; expected at most {MAX_ENTRIES}")
    return tuple(message.values)


def _read_scalar(message: tensor_pb2.Scalar) -> Scalar:
    dtype = dtype_from_wire(message.data_type)
    if dtype is None:
        raise ValueError(f"found data type {message.data_type}; expected one of the contract's numbers")
    return Scalar.of_content(dtype, message.value)


def _read_string(value: str) -> str:
    try:
        return string(value)
    except ValueError:
        raise ValueError(f"found {repr(value)[:80]}; expected {KINDS['string'].expected}") from None


_READ: dict[AttrType, Callable[[Any], AttrValue]] = {
    "int8": _read_int8,
    **dict.fromkeys(("int64_array", "float_array", "bool_array"), _read_array),
    "scalar": _read_scalar,
    "string": _read_string,
}
"""Readers of the kinds whose values protobuf does not check itself."""
