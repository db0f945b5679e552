"""Limits what protobuf has to parse in a message: all but the bytes of contents, which are taken as they are.

Protobuf reads all fields in one go and makes an object of each number: for four MiB of them it would block an
event loop too long. So messages that are large enough to matter are scanned first.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError

from npugrad.varint import LENGTH_DELIMITED, MAX_VARINT_BYTES, VARINT

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from google.protobuf.descriptor import Descriptor
    from google.protobuf.message import Message

    M = TypeVar("M", bound=Message)

MAX_PARSED_BYTES = 64 * 1024
"""Maximum bytes of a message besides contents: some milliseconds. The largest calls have a few thousand."""
MAX_FIELDS = 4096
"""Maximum number of fields of a larger message; the largest calls have some hundred."""
_FIXED = {1: 8, 5: 4}
"""Lengths of the wire types of fixed length."""


class MessageTooBulky(DecodeError):
    """A message has more to parse than any call."""


def bounded_parser(message: type[M]) -> Callable[[bytes], M]:
    """Returns protobuf's parser of a message, for untrusted bytes.

    Returns:
        A function from bytes to the message; it raises `DecodeError` as protobuf does, and `MessageTooBulky`
        for more than `MAX_PARSED_BYTES` besides contents, or more than `MAX_FIELDS` in a larger message.

    Example:
        >>> from npugrad.v1.tensor_pb2 import Tensor
        >>> parse = bounded_parser(Tensor)
        >>> len(parse(Tensor(data=bytes(2**20)).SerializeToString()).data)
        1048576
    """
    parse: Callable[[bytes], M] = message.FromString
    contents = _contents(cast("Descriptor", message.DESCRIPTOR), {})

    def bounded(data: bytes) -> M:
        if len(data) > MAX_PARSED_BYTES:
            with suppress(IndexError):  # truncated, or not a number: protobuf fails there too
                _Walk(data).over(contents, 0, len(data))
        return parse(data)

    return bounded


class _Within(dict[int, "_Within | None"]):
    """The message and bytes fields of a message, by number; None for bytes, which are contents."""


def _contents(descriptor: Descriptor, known: dict[str, _Within]) -> _Within:
    if descriptor.full_name in known:
        return known[descriptor.full_name]
    found = known[descriptor.full_name] = _Within()
    for field in descriptor.fields:
        if field.message_type is not None:
            found[field.number] = _contents(field.message_type, known)
        elif field.type == FieldDescriptor.TYPE_BYTES:
            found[field.number] = None
    return found


class _Walk:
    """Scans a message, and stops early if it exceeds the limits."""

    def __init__(self, data: bytes) -> None:
        self._data, self._parsed_bytes, self._fields = data, 0, 0

    def over(self, within: _Within, at: int, end: int) -> None:
        """Counts bytes and fields between two offsets; raises MessageTooBulky if there are too many."""
        while at < end:
            at = self._field(within, at)

    def _field(self, within: _Within, at: int) -> int:
        begin = at
        key, at = self._varint(at)
        number, kind = key >> 3, key & 7
        self._fields += 1
        if kind == VARINT:
            _, at = self._varint(at)
        elif kind == LENGTH_DELIMITED:
            nbytes, body = self._varint(at)
            at = min(body + nbytes, len(self._data))
            if number in within:
                inner = within[number]
                self._count(body - begin)
                if inner is not None:
                    self.over(inner, body, at)
                return at
        else:
            at += _FIXED.get(kind, 0)
        self._count(at - begin)
        return at

    def _varint(self, at: int) -> tuple[int, int]:
        """A number and the offset after it; not necessarily in its fewest bytes, as protobuf accepts it."""
        value = 0
        for shift in range(0, 7 * MAX_VARINT_BYTES, 7):
            byte = self._data[at]
            value, at = value | (byte & 0x7F) << shift, at + 1
            if byte <= 0x7F:
                return value, at
        raise IndexError("a number of more bytes than there may be: protobuf comes no further")

    def _count(self, nbytes: int) -> None:
        self._parsed_bytes += nbytes
        if self._parsed_bytes > MAX_PARSED_BYTES or self._fields > MAX_FIELDS:
            raise MessageTooBulky(
                f"more than {MAX_PARSED_BYTES} bytes besides contents, or {MAX_FIELDS} fields"
            )
