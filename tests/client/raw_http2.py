"""A peer that ends HTTP/2 streams as proxies do whose server is gone, which no gRPC server would."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tests.http2 import ACK, END_HEADERS, GOAWAY, HEADERS, PING, PREFACE, SETTINGS, frame, literal

_DATA, _RST_STREAM, _END_STREAM = 0, 3, 1
_STATUS_200 = b"\x88"
"""``:status: 200``, from HPACK's own table."""
_REPLY = _STATUS_200 + literal(b"content-type", b"application/grpc")
NO_STATUS = [frame(HEADERS, END_HEADERS | _END_STREAM, 0, _REPLY)]
"""A stream that ends well, but without a word of gRPC's."""
GONE = [frame(GOAWAY, 0, 0, struct.pack(">II", 2**31 - 1, 0)), b""]
"""The end of the connection, with every stream named as taken."""


def reset(code: int, *, has_begun: bool = False) -> list[bytes]:
    """A stream that is broken off, before or after its reply has begun."""
    begin = [frame(HEADERS, END_HEADERS, 0, _REPLY)] if has_begun else []
    return [*begin, frame(_RST_STREAM, 0, 0, struct.pack(">I", code))]


class Peer:
    """Answers every stream in one way: once its headers have come, or at its end with what begins a reply.

    Attributes:
        address: What a client connects to.
        stream_count: Streams so far.
    """

    def __init__(self, answer: list[bytes]) -> None:
        """Listens; frames of streams get their numbers, and an empty one closes the connection."""
        self.stream_count = 0
        self._answer = answer
        self._is_reply = answer[0][3] == HEADERS
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):  # it is closed
            while True:
                end, _ = self._listener.accept()
                self._ends.append(end)
                self._threads.append(threading.Thread(target=self._serve, args=(end,), daemon=True))
                self._threads[-1].start()

    def _serve(self, end: socket.socket) -> None:
        with suppress(OSError), end, end.makefile("rb") as came:  # the client may leave
            if came.read(len(PREFACE)) != PREFACE:
                return
            end.sendall(frame(SETTINGS, 0, 0))
            while len(head := came.read(9)) == 9:
                length, kind, is_ack = int.from_bytes(head[:3], "big"), head[3], head[4] & ACK
                payload = came.read(length)
                if kind in (SETTINGS, PING) and not is_ack:
                    end.sendall(frame(kind, ACK, 0, payload if kind == PING else b""))
                is_time = head[4] & _END_STREAM if self._is_reply else kind == HEADERS
                if kind in (HEADERS, _DATA) and is_time and not self._end_stream(end, head[5:]):
                    return

    def _end_stream(self, end: socket.socket, number: bytes) -> bool:
        """Whether the connection goes on."""
        self.stream_count += 1
        for piece in self._answer:
            if not piece:
                end.shutdown(socket.SHUT_RDWR)
                return False
            end.sendall(piece if piece[3] == GOAWAY else piece[:5] + number + piece[9:])
        return True

    def close(self) -> None:
        """Ends it and its connections."""
        for end in (self._listener, *self._ends):
            with suppress(OSError):  # closing alone would leave threads in accept and read
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in self._threads:
            thread.join(10)


@contextmanager
def peer(answer: list[bytes]) -> Iterator[Peer]:
    """A peer for a block."""
    made = Peer(answer)
    try:
        yield made
    finally:
        made.close()
