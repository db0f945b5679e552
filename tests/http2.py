"""HTTP/2 by hand: what a client sends that is not grpc's, byte for byte."""

from __future__ import annotations

import struct
from functools import cache

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = 0, 1, 2, 3, 4
PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 6, 7, 8, 9
"""Types of frames."""
ACK, END_STREAM, END_HEADERS = 1, 1, 4
"""Flags of frames."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """An HTTP/2 frame."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def literal(name: bytes, value: bytes) -> bytes:
    """A header field, literal, in the way HPACK writes what it does not want to remember."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def start_call(path: bytes, *more: tuple[bytes, bytes]) -> bytes:
    """A connection's start and the headers of one gRPC call on stream 1, with more fields where there are."""
    return PREFACE + frame(SETTINGS, 0, 0) + call_headers(path, 1, *more)


def call_headers(path: bytes, stream: int, *more: tuple[bytes, bytes]) -> bytes:
    """The headers of a gRPC call on a stream."""
    return frame(HEADERS, END_HEADERS, stream, header_block(path, *more))


@cache
def header_block(path: bytes, *more: tuple[bytes, bytes]) -> bytes:
    """The headers of a gRPC call as HPACK writes them."""
    fields = (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path),
        (b":authority", b"test"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        *more,
    )
    return b"".join(literal(*field) for field in fields)


def message(announced: int, data: bytes, compressed: int = 0) -> bytes:
    """A gRPC message that says how long it is."""
    return struct.pack(">BI", compressed, announced) + data


def split_frames(data: bytes) -> tuple[list[tuple[int, int, int, bytes]], bytes]:
    """Type, flags, stream and payload of each whole frame, and the bytes that are left."""
    frames = []
    while len(data) >= 9 and len(data) >= 9 + (length := int.from_bytes(data[:3], "big")):
        frames.append((*struct.unpack_from(">BBI", data, 3), data[9 : 9 + length]))
        data = data[9 + length :]
    return frames, data
