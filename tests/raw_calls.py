"""Many gRPC calls at little cost: bytes go out over one HTTP/2 connection, and of answers the status is read.

No gRPC library is between: a message may be anything, and a client of Python takes longer for a call than the
server. It keeps the peer's flow control and leaves compression of headers alone.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import grpc
from tests.http2 import (
    ACK,
    DATA,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    call_headers,
    frame,
    message,
)

T = TypeVar("T")

MAX_CALL_BYTES = 60_000
"""Of all messages of a call: below HTTP/2's first window of a stream."""
_FRAME_BYTES, _WINDOW = 16_384, 2**31 - 1
_FIRST_WINDOW = 65_535
_STATUSES = {str(status.value[0]).encode(): status for status in grpc.StatusCode}
_AT_ONCE = 64


@dataclass(frozen=True)
class RawCall:
    """A call to send: `b"/service/Method"`, and messages without gRPC's prefix."""

    path: bytes
    messages: Sequence[bytes]


class Unanswered(Exception):
    """The server ended the connection, or gave no answer in time."""


@dataclass
class _Open:
    """A call that waits for its end."""

    call: RawCall
    sent_s: float
    status: grpc.StatusCode | None = None


@dataclass
class RawCaller:
    """One connection."""

    address: str
    timeout_s: float = 60.0
    _open: dict[int, _Open] = field(default_factory=dict)
    _received: bytearray = field(default_factory=bytearray)

    def __enter__(self) -> RawCaller:
        host, _, port = self.address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), self.timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._next, self._may_send, self._taken = 1, _FIRST_WINDOW, 0
        # No table of headers, and windows that no answer fills.
        settings = struct.pack(">HIHI", 1, 0, 4, _WINDOW)
        self._out = bytearray(PREFACE + frame(SETTINGS, 0, 0, settings))
        self._out += frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", _WINDOW - _FIRST_WINDOW))
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def statuses(self, calls: Iterable[RawCall]) -> Iterator[tuple[RawCall, grpc.StatusCode]]:
        """Sends calls, some dozens at once, and gives each with the status it ended with.

        Raises:
            Unanswered: The server ended the connection or a stream, or was silent for too long.
        """
        waiting = iter(calls)
        call = next(waiting, None)
        while call is not None or self._open:
            while call is not None and len(self._open) < _AT_ONCE and self._send(call):
                call = next(waiting, None)
            self._socket.sendall(self._out)
            self._out.clear()
            yield from self._answers()

    def _send(self, call: RawCall) -> bool:
        """Puts a call among what is to be sent, if the connection's window has room."""
        data = b"".join(message(len(each), each) for each in call.messages)
        if len(data) > MAX_CALL_BYTES:
            raise ValueError(f"a call of {len(data)} bytes; expected at most {MAX_CALL_BYTES}")
        if len(data) > self._may_send:
            return False
        self._may_send -= len(data)
        self._out += call_headers(call.path, self._next)
        for at in range(0, max(len(data), 1), _FRAME_BYTES):
            end = END_STREAM if at + _FRAME_BYTES >= len(data) else 0
            self._out += frame(DATA, end, self._next, data[at : at + _FRAME_BYTES])
        self._open[self._next] = _Open(call, time.monotonic())
        self._next += 2
        return True

    def _answers(self) -> list[tuple[RawCall, grpc.StatusCode]]:
        """What has come, or comes first."""
        if not select.select([self._socket], [], [], self.timeout_s)[0]:
            raise Unanswered(f"{len(self._open)} calls had no answer within {self.timeout_s:g} s")
        if not (data := self._socket.recv(2**20)):
            raise Unanswered(f"the connection ended with {len(self._open)} calls open")
        self._received += data
        answers, at, size = [], 0, len(self._received)
        while size - at >= 9:
            length = int.from_bytes(self._received[at : at + 3], "big")
            if size - at < 9 + length:
                break
            kind, flags, stream = struct.unpack_from(">BBI", self._received, at + 3)
            payload = bytes(self._received[at + 9 : at + 9 + length])
            at += 9 + length
            if self._takes(kind, flags, stream, payload):
                ended = self._open.pop(stream)
                answers.append((ended.call, _told(ended, stream)))
        del self._received[:at]
        oldest = next(iter(self._open.values()), None)
        if oldest is not None and time.monotonic() - oldest.sent_s > self.timeout_s:
            raise Unanswered(f"{oldest.call.path.decode()}: no answer within {self.timeout_s:g} s")
        return answers

    def _takes(self, kind: int, flags: int, stream: int, payload: bytes) -> bool:
        """Takes a frame; True when it ends a call."""
        if kind == HEADERS and stream in self._open:
            self._open[stream].status = status_in(payload) or self._open[stream].status
        elif kind == DATA:
            self._taken += len(payload)
            if self._taken > _WINDOW // 2:
                self._out += frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", self._taken))
                self._taken = 0
        elif kind == WINDOW_UPDATE and stream == 0:
            self._may_send += int.from_bytes(payload, "big")
        elif kind in (SETTINGS, PING) and not flags & ACK:
            self._out += frame(kind, ACK, 0, payload if kind == PING else b"")
        elif kind == GOAWAY:
            raise Unanswered(f"the server closes the connection: {payload[8:]!r}")
        ends = kind == RST_STREAM or (kind in (HEADERS, DATA) and flags & END_STREAM)
        return bool(ends) and stream in self._open


def _told(ended: _Open, stream: int) -> grpc.StatusCode:
    if ended.status is None:
        raise Unanswered(f"{ended.call.path.decode()}: stream {stream} ended without a status")
    return ended.status


def status_in(block: bytes) -> grpc.StatusCode | None:
    """The status in a block of headers that uses no table of its own; None without one."""
    at = 0
    while at < len(block):
        first = block[at]
        if first & 0x80:  # a field of the static table
            _, at = _integer(block, at, 7)
            continue
        if first & 0xE0 == 0x20:  # the size of the table
            _, at = _integer(block, at, 5)
            continue
        name = b""
        index, at = _integer(block, at, 6 if first & 0x40 else 4)
        if not index:
            name, at = _string(block, at)
        value, at = _string(block, at)
        if name == b"grpc-status":
            return _STATUSES[value]
    return None


def _integer(block: bytes, at: int, bits: int) -> tuple[int, int]:
    most = 2**bits - 1
    number, at = block[at] & most, at + 1
    if number < most:
        return number, at
    shift = 0
    while True:
        number += (block[at] & 127) << shift
        shift, at = shift + 7, at + 1
        if not block[at - 1] & 128:
            return number, at


def _string(block: bytes, at: int) -> tuple[bytes, int]:
    """A string; one in Huffman's code as it is, since what is looked for never comes in it."""
    length, at = _integer(block, at, 7)
    return block[at : at + length], at + length
