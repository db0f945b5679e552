"""Frames by hand mean what they mean to protobuf: the same bytes out, and the same frame or none back."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st
from tests.synthetic.record import REGISTRY as SYNTHETIC_REGISTRY

from npugrad.frames import Chunk, encode_chunk, encode_frame, frame_decoder
from npugrad.registry import REGISTRY
from npugrad.v1 import backward_pb2
from npugrad.varint import encode_varint, read_varint, tag

FRAMES: list[type[Any]] = [
    registry_frame
    for registry in (REGISTRY, SYNTHETIC_REGISTRY)
    for registry_frame in (registry.execute_request, registry.execute_response)
]
CHUNKS = st.builds(
    Chunk,
    st.one_of(st.integers(0, 40), st.integers(0, 2**32 - 1)),
    st.one_of(st.integers(0, 300), st.integers(0, 2**64 - 1)),
    st.binary(max_size=200),
)


def written(frame: type[Any], chunk: Chunk) -> bytes:
    """What protobuf makes of a chunk."""
    operand, offset, data = chunk
    made = backward_pb2.Chunk(operand=operand, offset=offset, data=bytes(data))
    return bytes(frame(chunk=made).SerializeToString())


def read_by_protobuf(frame: type[Any], data: bytes) -> Any:
    """A chunk, another message, or DecodeError itself."""
    try:
        found = frame.FromString(data)
    except DecodeError:
        return DecodeError
    if found.WhichOneof("frame") != "chunk":
        return found
    return Chunk(found.chunk.operand, found.chunk.offset, found.chunk.data)


def read_by_hand(frame: type[Any], data: bytes) -> Any:
    """The same by our decoder."""
    try:
        found = frame_decoder(frame)(data)
    except DecodeError:
        return DecodeError
    return found._replace(data=bytes(found.data)) if isinstance(found, Chunk) else found


def assert_read_alike(data: bytes) -> Any:
    """Both parsers make the same of some bytes, for each kind of frame; what they make of a request."""
    for frame in reversed(FRAMES):
        found, expected = read_by_hand(frame, data), read_by_protobuf(frame, data)
        assert found == expected, data.hex()
        assert type(found) is type(expected)
    return found


# ------------------------------------------------------------------------------------------ good chunks


def test_fields_of_a_chunk_are_those_that_are_read_by_hand() -> None:
    for frame in FRAMES:
        chunk = frame.DESCRIPTOR.fields_by_name["chunk"]
        assert chunk.number == backward_pb2.ExecuteRequest.CHUNK_FIELD_NUMBER < 16
        assert chunk.message_type is backward_pb2.Chunk.DESCRIPTOR
        assert chunk.containing_oneof.name == "frame"
    fields = backward_pb2.Chunk.DESCRIPTOR.fields
    assert {(f.name, f.type) for f in fields} == {
        ("operand", fields[0].TYPE_UINT32),
        ("offset", fields[0].TYPE_UINT64),
        ("data", fields[0].TYPE_BYTES),
    }
    assert all(f.number < 16 and not f.has_presence for f in fields)


@given(chunk=CHUNKS)
@example(Chunk(0, 0, b""))
@example(Chunk(2**32 - 1, 2**64 - 1, b"\0"))
@example(Chunk(0, 2**20, bytes(127)))
def test_bytes_are_those_of_protobuf(chunk: Chunk) -> None:
    for frame in FRAMES:
        assert encode_chunk(chunk) == encode_frame(chunk) == written(frame, chunk)
    view = memoryview(b"<" + bytes(chunk.data) + b">")[1:-1]
    assert encode_chunk(chunk._replace(data=view)) == written(FRAMES[0], chunk)
    assert assert_read_alike(encode_chunk(chunk)) == chunk


def test_data_is_a_view_of_the_bytes_that_came_and_other_messages_are_left_to_protobuf() -> None:
    decode = frame_decoder(backward_pb2.ExecuteRequest)
    for nbytes in (1, 127, 128, 2**20, 4 * 2**20):
        data = random.Random(nbytes).randbytes(nbytes)
        came = encode_chunk(Chunk(3, 2**40, data))
        found = decode(came)
        assert found == Chunk(3, 2**40, memoryview(data))
        assert found.data.obj is came
        assert found.data.readonly
    header = backward_pb2.ExecuteRequest(header=backward_pb2.ExecuteHeader())
    assert decode(encode_frame(header)) == header
    assert decode(b"") == backward_pb2.ExecuteRequest()


# ----------------------------------------------------------------------------------- frames of any shape


def varint(value: int, padding: int = 0) -> bytes:
    """A number, in more bytes than it needs if there is padding."""
    if not padding:
        return encode_varint(value)
    encoded = bytearray(encode_varint(value))
    encoded[-1] |= 0x80
    return bytes(encoded) + b"\x80" * (padding - 1) + b"\0"


def field(number: int, wire_type: int, value: bytes) -> bytes:
    return varint(tag(number, wire_type)) + value


def lengthy(number: int, value: bytes, lie: int = 0) -> bytes:
    """A field with its length, or with one that is wrong."""
    return field(number, 2, varint(max(len(value) + lie, 0)) + value)


PADDING = st.sampled_from([0, 0, 0, 1, 2, 4, 8])
LIES = st.sampled_from([0, 0, 0, 0, 1, -1, 2**31, 2**40])
NUMBERS = st.one_of(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**29 + 5))
VALUES = st.one_of(st.integers(0, 300), st.integers(0, 2**64 - 1))


@st.composite
def any_field(draw: st.DrawFn, inside: st.SearchStrategy[bytes]) -> bytes:
    """A field of any number and wire type, right, padded or broken."""
    wire_type = draw(st.sampled_from([0, 0, 1, 2, 2, 2, 3, 5, 4, 6, 7]))
    number, padding = draw(NUMBERS), draw(PADDING)
    start = varint(tag(number, wire_type), draw(PADDING))
    if wire_type == 0:
        return start + varint(draw(VALUES), padding)
    if wire_type in (1, 5):
        size = 8 if wire_type == 1 else 4
        return start + draw(st.binary(min_size=size, max_size=size))
    if wire_type == 2:
        value = draw(inside)
        return start + varint(max(len(value) + draw(LIES), 0), padding) + value
    if wire_type == 3:
        end = draw(st.sampled_from([number, number, number, number + 1]))
        return start + draw(inside) + varint(tag(end, 4))
    return start


def several(one: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    return st.lists(one, max_size=5).map(b"".join)


INNERMOST = any_field(st.binary(max_size=6))
INNER = several(st.one_of(INNERMOST, any_field(several(INNERMOST))))
CHUNK_FIELDS = several(
    st.one_of(
        st.builds(lambda value, padding: field(1, 0, varint(value, padding)), VALUES, PADDING),
        st.builds(lambda value, padding: field(2, 0, varint(value, padding)), VALUES, PADDING),
        st.builds(lengthy, st.just(3), st.binary(max_size=9), LIES),
        INNERMOST,
    )
)


@given(data=several(st.one_of(st.builds(lengthy, st.just(2), CHUNK_FIELDS, LIES), any_field(INNER))))
def test_any_fields_and_chunks_with_fields_in_any_order_any_number_of_times(data: bytes) -> None:
    assert_read_alike(data)


OPERAND, OFFSET, DATA = field(1, 0, b"\5"), field(2, 0, b"\x90\x4e"), lengthy(3, b"content")
HEADER = lengthy(1, b"")
KNOWN: dict[str, tuple[bytes, Any]] = {
    "backwards": (lengthy(2, DATA + OFFSET + OPERAND), Chunk(5, 10000, b"content")),
    "written zeros": (lengthy(2, field(1, 0, b"\0") + field(2, 0, b"\0") + b"\x1a\0"), Chunk(0, 0, b"")),
    "last counts": (lengthy(2, OPERAND + DATA + field(1, 0, b"\6")), Chunk(6, 0, b"content")),
    "data twice": (lengthy(2, DATA + lengthy(3, b"other")), Chunk(0, 0, b"other")),
    "two chunks merge": (lengthy(2, OPERAND + DATA) + lengthy(2, OFFSET), Chunk(5, 10000, b"content")),
    "header, then chunk": (HEADER + lengthy(2, OPERAND), Chunk(5, 0, b"")),
    "chunk, then header": (
        lengthy(2, OPERAND) + HEADER,
        backward_pb2.ExecuteRequest(header=backward_pb2.ExecuteHeader()),
    ),
    "chunk, header, chunk": (lengthy(2, OPERAND) + HEADER + lengthy(2, DATA), Chunk(0, 0, b"content")),
    "padded": (lengthy(2, field(1, 0, varint(5, 9))), Chunk(5, 0, b"")),
    "operand above 32 bits": (lengthy(2, field(1, 0, varint(2**32 + 7))), Chunk(7, 0, b"")),
    "offset of the wrong type": (lengthy(2, field(2, 1, bytes(8)) + OPERAND), Chunk(5, 0, b"")),
    "cut in data": (lengthy(2, OPERAND + DATA)[:-1], DecodeError),
    "data longer than the chunk": (lengthy(2, lengthy(3, b"content", lie=1)) + b"more", DecodeError),
    "chunk longer than the frame": (lengthy(2, OPERAND, lie=1), DecodeError),
    "chunk shorter than its data": (lengthy(2, DATA, lie=-1), DecodeError),
    "field number 0": (lengthy(2, OPERAND + b"\0\0"), DecodeError),
    "11 bytes of a number": (lengthy(2, b"\x08" + b"\xff" * 10 + b"\1"), DecodeError),
    "open group": (lengthy(2, OPERAND + field(9, 3, b"")), DecodeError),
    "tag alone": (b"\x12", DecodeError),
}


def test_known_shapes() -> None:
    for name, (data, expected) in KNOWN.items():
        assert assert_read_alike(data) == expected, name


@pytest.mark.parametrize("wire_type", [0, 1, 2, 3, 5])
def test_ten_thousand_unknown_fields(wire_type: int) -> None:
    value = {0: b"\1", 1: bytes(8), 2: b"\3abc", 3: b"\x78\1" + varint(tag(9, 4)), 5: bytes(4)}[wire_type]
    unknown, plain = field(9, wire_type, value) * 10_000, OPERAND + OFFSET + DATA
    for data in (unknown + lengthy(2, plain), lengthy(2, plain + unknown), lengthy(2, plain) + unknown):
        assert assert_read_alike(data) == Chunk(5, 10000, b"content")


INTACT = [
    encode_chunk(Chunk(5, 10_000, b"content")),
    encode_chunk(Chunk(0, 300, bytes(130))),
    encode_chunk(Chunk(7, 0, b"")),
    KNOWN["two chunks merge"][0],
    HEADER,
]


TELLING = (0, 1, 2, 7, 8, 10, 16, 18, 26, 34, 127, 128, 129, 255)
"""Tags of the fields, and the ends of what a byte of a number says."""


def damaged(data: bytes, others: Iterable[int]) -> Iterator[bytes]:
    """Some bytes cut off at each place, with each byte changed to others, lost, or another put in."""
    for at in range(len(data) + 1):
        yield data[:at]
        yield data[:at] + data[at + 1 :]
        for byte in others:
            yield data[:at] + bytes((byte,)) + data[at + 1 :]
            yield data[:at] + bytes((byte,)) + data[at:]


@pytest.mark.parametrize(
    "others", [TELLING, pytest.param(range(256), marks=pytest.mark.deep)], ids=["telling", "every"]
)
def test_every_damage_of_one_byte(others: Iterable[int]) -> None:
    for data in INTACT:
        for worse in damaged(data, others):
            assert_read_alike(worse)


@given(chunk=CHUNKS, cuts=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 9), st.binary(max_size=4))))
def test_damage_of_several_bytes(chunk: Chunk, cuts: list[tuple[int, int, bytes]]) -> None:
    data = encode_chunk(chunk)
    for at, lost, put in cuts:
        data = data[:at] + put + data[at + lost :]
    assert_read_alike(data)


# ----------------------------------------------------------------------------------------------- varints


@given(value=VALUES, before=st.binary(max_size=3), after=st.binary(max_size=3))
@example(2**64 - 1, b"", b"")
def test_a_number_is_read_as_it_was_written(value: int, before: bytes, after: bytes) -> None:
    encoded = encode_varint(value)
    assert read_varint(before + encoded + after, len(before)) == (value, len(before) + len(encoded))
    with pytest.raises(ValueError, match=r"found none at byte \d+ of \d+; expected one in its fewest"):
        read_varint(before + encoded[:-1], len(before))


def test_what_is_no_number_is_neither_written_nor_read() -> None:
    for value in (-1, 2**64, -(2**70)):
        with pytest.raises(ValueError, match=rf"found {value}; expected 0 to 2\*\*64 - 1"):
            encode_varint(value)
    for data in (b"", varint(0, 1), varint(2**63, 1), b"\xff" * 9 + b"\2", b"\xff" * 10 + b"\1"):
        with pytest.raises(ValueError, match="expected one in its fewest bytes"):
            read_varint(data, 0)
