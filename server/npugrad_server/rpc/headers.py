"""Reads the first frame of a streamed call only as far as it takes to tell the operator."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from npugrad.codec import unwrap
from npugrad.varint import LENGTH_DELIMITED, read_varint, tag
from npugrad_server.rpc.funnel import sane

if TYPE_CHECKING:
    from collections.abc import Callable

    from npugrad.operator import OpRecord
    from npugrad.registry import Registry
    from npugrad_server.rpc.register import Deserializer


@dataclass(frozen=True)
class Header:
    """The header of a call of a known operator.

    Attributes:
        record: The operator.
        data: The frame, if it consists only of the header, and the header only of the request; else None.
        start: Where the request begins in it; the request ends where the frame ends.
        read: Returns the typed request; raises MalformedRequest if it does not parse.
    """

    record: OpRecord
    data: bytes | None
    start: int
    read: Callable[[], Any]


def header_decoder(registry: Registry, parse: Deserializer) -> Deserializer:
    """A parser of frames that leaves requests serialized.

    Args:
        registry: The operators and their messages.
        parse: Parses the other frames.

    Returns:
        A function from bytes to a `Header` if they are plainly one, else to what `parse` returns.
    """
    header = registry.execute_request.DESCRIPTOR.fields_by_name["header"]
    first = tag(header.number, LENGTH_DELIMITED)
    calls = header.message_type.fields_by_name
    records = {
        tag(calls[name].number, LENGTH_DELIMITED): record
        for name, record in registry.records.items()
        if name in calls
    }

    def decode(data: bytes) -> Any:
        if not data or data[0] != first:
            return parse(data)
        try:
            length, at = read_varint(data, 1)
            number, inner = read_varint(data, at)
            inner_length, start = read_varint(data, inner)
        except ValueError:
            return parse(data)
        if number not in records or not at + length == start + inner_length == len(data):
            return parse(data)
        return Header(records[number], data, start, partial(_request, registry, parse, data))

    return decode


def _request(registry: Registry, parse: Deserializer, data: bytes) -> Any:
    _, message = unwrap(sane(parse(data)).header, registry)
    return message
