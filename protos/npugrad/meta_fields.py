"""Encodes and decodes metas in messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npugrad.dtypes import dtype_from_wire, format_from_wire
from npugrad.errors import MalformedTensor
from npugrad.meta import MAX_RANK, TensorMeta

if TYPE_CHECKING:
    from npugrad.v1 import tensor_pb2


def decode_meta(message: tensor_pb2.TensorMeta, operator: str, operand: str) -> TensorMeta:
    """Decodes a meta; raises MalformedTensor naming operator and operand."""
    dtype, layout = dtype_from_wire(message.data_type), format_from_wire(message.format)
    if dtype is None or layout is None:
        found = f"data type {message.data_type}" if dtype is None else f"format {message.format}"
        raise MalformedTensor(
            f"{operator}: {operand}: found {found}; expected one of the contract's numbers",
            operator=operator,
            operand=operand,
        )
    try:
        _check_lengths(message)
        strides = tuple(message.strides) or None
        return TensorMeta(dtype, tuple(message.shape), layout, strides, message.storage_offset)
    except MalformedTensor as error:
        raise MalformedTensor(f"{operator}: {operand}: {error}", operator=operator, operand=operand) from None


def _check_lengths(message: tensor_pb2.TensorMeta) -> None:
    """Refuses a list of too many sizes unread: reading a million would block a server for long."""
    if len(message.shape) > MAX_RANK:
        raise MalformedTensor(f"found rank {len(message.shape)}; expected at most {MAX_RANK}")
    if len(message.strides) > MAX_RANK:
        raise MalformedTensor(
            f"found {len(message.strides)} strides, rank {len(message.shape)}; expected one for each axis"
        )


def encode_meta(meta: TensorMeta, message: tensor_pb2.TensorMeta) -> None:
    """Writes a meta into a message."""
    message.data_type = meta.dtype.wire  # type: ignore[assignment]
    message.shape.extend(meta.shape)
    message.format = meta.format.wire  # type: ignore[assignment]
    message.strides.extend(meta.strides or ())
    message.storage_offset = meta.storage_offset
    message.SetInParent()
