"""A peer that ends HTTP/2 streams as proxies do whose server is gone, which no gRPC server would."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY = 1, 3, 4, 6, 7
_ACK = 1
_REPLY_HEADERS = b"\x88" + b"\x00\x0ccontent-type\x10application/grpc"
"""``:status: 200`` and the content type, in HPACK without a table."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A frame as it goes over the wire."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def reset(code: int, *, after_headers: bool = False) -> list[bytes]:
    """A stream that is broken off, before or after its reply has begun; stream numbers are filled in."""
    head = [frame(_HEADERS, 0x4, 0, _REPLY_HEADERS)] if after_headers else []
    return [*head, frame(_RST_STREAM, 0, 0, struct.pack(">I", code))]


def end_without_status() -> list[bytes]:
    """A stream that ends well, but without a word of gRPC's."""
    return [frame(_HEADERS, 0x5, 0, _REPLY_HEADERS)]


def goaway(code: int) -> list[bytes]:
    """The end of the connection, with every stream named as taken."""
    return [
        frame(_GOAWAY, 0, 0, struct.pack(">II", 2**31 - 1, code)),
        b"",
    ]


@contextmanager
def peer(answer: list[bytes]) -> Iterator[str]:
    """Answers every stream like this, once its headers have come; the address.

    An empty piece closes the connection.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []
    ends: list[socket.socket] = []

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            ends.append(connection)
            threads.append(threading.Thread(target=_serve, args=(connection, answer), daemon=True))
            threads[-1].start()

    threads.append(threading.Thread(target=accept, daemon=True))
    threads[0].start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)  # closing alone would leave the thread in accept
        listener.close()
        for end in ends:
            _close(end)
        for thread in threads:
            thread.join(10)


def _serve(connection: socket.socket, answer: list[bytes]) -> None:
    try:
        with connection, connection.makefile("rb") as stream:
            if stream.read(len(_PREFACE)) != _PREFACE:
                return
            connection.sendall(frame(_SETTINGS, 0, 0))
            while len(head := stream.read(9)) == 9:
                length, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
                number, payload = head[5:], stream.read(length)
                if kind == _SETTINGS and not flags & _ACK:
                    connection.sendall(frame(_SETTINGS, _ACK, 0))
                if kind == _PING and not flags & _ACK:
                    connection.sendall(frame(_PING, _ACK, 0, payload))
                if kind == _HEADERS:
                    for piece in answer:
                        if not piece:
                            _close(connection)
                            return
                        is_connections_own = piece[3] == _GOAWAY
                        connection.sendall(piece if is_connections_own else piece[:5] + number + piece[9:])
    except OSError:
        pass  # the client has left


def _close(end: socket.socket) -> None:
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # closed already
