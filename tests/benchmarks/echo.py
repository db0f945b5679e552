"""The peers of the transport: bare servers that send back what they get, and their clients.

All are as good as the library lets them be without more thought, and better than any real use: their
servers never look at the data, and the gRPC clients return views of the message instead of filling an array.

- grpcio, protobuf bytes: a message with one bytes field, protobuf's own serializers.
- grpcio, identity: the raw bytes as the message, no serializer at all.
- raw TCP: length and bytes; warm, reused buffers at both ends; the whole payload arrives before it goes back.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
import threading
from collections.abc import Mapping
from typing import Any

import grpc
import grpc.aio
import numpy as np
import numpy.typing as npt
from google.protobuf.wrappers_pb2 import BytesValue
from tests.benchmarks.contestant import tell
from tests.benchmarks.operands import Array, Call

_LENGTH = struct.Struct("<Q")
_OPTIONS = (
    ("grpc.max_receive_message_length", 2**31 - 1),
    ("grpc.max_send_message_length", 2**31 - 1),
)


def payload(nbytes: int) -> npt.NDArray[np.float32]:
    """Random data of a size that 4 divides."""
    return np.random.default_rng(7).standard_normal(nbytes // 4, dtype=np.float32)


class GrpcEcho:
    def __init__(self, address: str, message: str) -> None:
        channel = grpc.insecure_channel(address, options=_OPTIONS)
        if message == "protobuf":
            serializers = BytesValue.SerializeToString, BytesValue.FromString
            echo: Any = channel.unary_unary("/echo.Echo/Protobuf", *serializers)
            self._echo: Any = lambda sent: echo(BytesValue(value=sent)).value
        else:
            self._echo = channel.unary_unary("/echo.Echo/Identity", None, None)

    def prepare(self, case: Mapping[str, Any]) -> Call:
        sent = payload(case["nbytes"])

        def call() -> Mapping[str, Array]:
            return {"echo": np.frombuffer(self._echo(sent.tobytes()), np.float32)}

        _check(call(), sent)
        return call


class TcpEcho:
    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def prepare(self, case: Mapping[str, Any]) -> Call:
        """A call that sends an array of `nbytes` and fills another one, the same each time."""
        sent = payload(case["nbytes"])
        received = np.empty_like(sent)
        source, target = sent.data.cast("B"), received.data.cast("B")

        def call() -> Mapping[str, Array]:
            self._socket.sendall(_LENGTH.pack(source.nbytes))
            self._socket.sendall(source)
            _fill(self._socket, target)
            return {"echo": received}

        _check(call(), sent)
        return call


def _check(found: Mapping[str, Array], sent: Array) -> None:
    if not np.array_equal(found["echo"], sent):
        raise RuntimeError("the echo is not what was sent")


def _fill(connection: socket.socket, target: memoryview) -> bool:
    """Receives exactly as much as fits; False when the other side has ended."""
    filled = 0
    while filled < target.nbytes:
        received = connection.recv_into(target[filled:])
        if not received:
            return False
        filled += received
    return True


async def _serve_grpc() -> None:
    async def echo(message: Any, _: Any) -> Any:
        return message

    protobuf = grpc.unary_unary_rpc_method_handler(echo, BytesValue.FromString, BytesValue.SerializeToString)
    methods = {"Protobuf": protobuf, "Identity": grpc.unary_unary_rpc_method_handler(echo)}
    server = grpc.aio.server(options=_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo.Echo", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    tell({"address": f"127.0.0.1:{port}"})
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


def _serve_tcp() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    tell({"address": f"127.0.0.1:{listener.getsockname()[1]}"})
    threading.Thread(target=_accept, args=(listener,), daemon=True).start()
    sys.stdin.read()


def _accept(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_echo_tcp, args=(connection,), daemon=True).start()


def _echo_tcp(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    length, buffer = bytearray(_LENGTH.size), np.empty(0, np.uint8)
    while _fill(connection, memoryview(length)):
        (nbytes,) = _LENGTH.unpack(length)
        if buffer.nbytes < nbytes:
            buffer = np.empty(nbytes, np.uint8)
        data = buffer.data[:nbytes]
        if not _fill(connection, data):
            return
        connection.sendall(data)


if __name__ == "__main__":
    if sys.argv[1] == "tcp":
        _serve_tcp()
    else:
        asyncio.run(_serve_grpc())
