"""Encodes and decodes frames of a streamed call: chunks by hand, everything else by protobuf.

Protobuf copies the data of a chunk into a message, into the frame around it and into bytes, and as often when
decoding. Here a chunk is copied once when sent and not at all when received. Bytes that are not plainly a
chunk are left to protobuf's parser, so that every frame means the same here and there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from npugrad.v1 import backward_pb2
from npugrad.varint import LENGTH_DELIMITED, VARINT, encode_varint, read_varint, tag

if TYPE_CHECKING:
    from collections.abc import Callable

    from google.protobuf.message import Message

# The frames of every registry number their chunk fields alike: tests/contract/test_frames.py.
_CHUNK = tag(backward_pb2.ExecuteRequest.CHUNK_FIELD_NUMBER, LENGTH_DELIMITED)
_OPERAND = tag(backward_pb2.Chunk.OPERAND_FIELD_NUMBER, VARINT)
_OFFSET = tag(backward_pb2.Chunk.OFFSET_FIELD_NUMBER, VARINT)
_DATA = tag(backward_pb2.Chunk.DATA_FIELD_NUMBER, LENGTH_DELIMITED)


class Chunk(NamedTuple):
    """A piece of the content of one tensor, as the message `Chunk`.

    Attributes:
        operand: Index of its parameter in the C signature, below 2**32.
        offset: First byte of the piece in the content, below 2**64.
        data: The piece; a view must be of single bytes, and keeps the viewed object alive.
    """

    operand: int
    offset: int
    data: bytes | memoryview


def encode_chunk(chunk: Chunk) -> bytes:
    """Encodes a chunk as the frame that protobuf would write for an `ExecuteRequest` or a reply."""
    operand, offset, data = chunk
    nbytes = len(data)
    head = bytearray()
    for field, value in ((_OPERAND, operand), (_OFFSET, offset), (_DATA, nbytes)):
        if value:  # protobuf leaves zeros out
            head.append(field)
            head += encode_varint(value)
    return b"".join((bytes((_CHUNK,)), encode_varint(len(head) + nbytes), head, data))


def encode_header(frame: Any, operator: str, message: bytes) -> bytes:
    """Encodes the first frame of a stream from a serialized request or response.

    Args:
        frame: The frame's message, which has a field `header` with a oneof `call`.
        operator: Name of the operator, and of its field in `call`.
        message: The serialized request or response.

    Returns:
        The bytes that protobuf would write for the frame.

    Example:
        >>> from npugrad.v1.backward_pb2 import ExecuteResponse
        >>> data = encode_header(ExecuteResponse, "layer_norm_backward", b"")
        >>> ExecuteResponse.FromString(data).header.WhichOneof("call")
        'layer_norm_backward'
    """
    header = frame.DESCRIPTOR.fields_by_name["header"]
    call = header.message_type.fields_by_name[operator]
    opening = encode_varint(tag(call.number, LENGTH_DELIMITED)) + encode_varint(len(message))
    nbytes = encode_varint(len(opening) + len(message))
    return b"".join((encode_varint(tag(header.number, LENGTH_DELIMITED)), nbytes, opening, message))


def encode_frame(frame: Chunk | Message | bytes) -> bytes:
    """Encodes a frame; a serialized one is returned unchanged."""
    if isinstance(frame, bytes):
        return frame
    return encode_chunk(frame) if isinstance(frame, Chunk) else frame.SerializeToString()


def frame_decoder(
    message: type[Message], parse: Callable[[bytes], Message] | None = None
) -> Callable[[bytes], Any]:
    """Returns a parser of frames.

    Args:
        message: The frame's message, which has a oneof `frame` with a field `chunk`.
        parse: Parses it instead of protobuf.

    Returns:
        A function from bytes to a `Chunk` if they are one, else to the message; it raises
        `google.protobuf.message.DecodeError` where protobuf does.
    """
    parse = parse or message.FromString

    def decode(data: bytes) -> Any:
        chunk = _plain_chunk(data)
        if chunk is not None:
            return chunk
        frame: Any = parse(data)
        if frame.WhichOneof("frame") != "chunk":
            return frame
        return Chunk(frame.chunk.operand, frame.chunk.offset, frame.chunk.data)

    return decode


def _plain_chunk(data: bytes) -> Chunk | None:
    """Decodes a chunk without repeated or other fields; None if protobuf has to parse the bytes."""
    if not data or data[0] != _CHUNK:
        return None
    operand: int | None = None
    offset: int | None = None
    piece: memoryview | None = None
    try:
        nbytes, at = read_varint(data, 1)
        if at + nbytes != len(data):
            return None
        while at < len(data):
            field = data[at]
            value, at = read_varint(data, at + 1)
            if field == _DATA and piece is None and value <= len(data) - at:
                piece = memoryview(data)[at : at + value]
                at += value
            elif field == _OFFSET and offset is None:
                offset = value
            elif field == _OPERAND and operand is None and value < 2**32:
                operand = value
            else:
                return None
    except ValueError:
        return None
    return Chunk(operand or 0, offset or 0, b"" if piece is None else piece)
