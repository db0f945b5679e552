"""A gRPC proxy that takes no large messages, neither requests nor replies, as gateways do."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc


class _Forward(grpc.GenericRpcHandler):
    """Passes calls on as they are, and notes their methods."""

    def __init__(self, channel: grpc.Channel, methods: list[str]) -> None:
        self._channel, self._methods = channel, methods

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        name = details.method.rpartition("/")[2]
        if name == "Execute":
            stream: Any = self._channel.stream_stream(details.method)
            return grpc.stream_stream_rpc_method_handler(lambda frames, context: self._stream(stream, frames))
        unary: Any = self._channel.unary_unary(details.method)
        return grpc.unary_unary_rpc_method_handler(
            lambda data, context: self._whole(unary, name, data, context)
        )

    def _stream(self, stream: Any, frames: Iterator[bytes]) -> Iterator[bytes]:
        self._methods.append("Execute")
        yield from stream(frames, timeout=60)

    def _whole(self, unary: Any, name: str, data: bytes, context: grpc.ServicerContext) -> Any:
        self._methods.append(name)
        try:
            return unary(data, timeout=60)
        except grpc.RpcError as error:
            context.abort(error.code(), error.details() or "")


@contextmanager
def limiting_proxy(address: str, max_message_bytes: int) -> Iterator[tuple[str, list[str]]]:
    """Runs one for a block: its address, and the methods of the calls that it has passed on so far."""
    options = [("grpc.max_receive_message_length", max_message_bytes), ("grpc.use_local_subchannel_pool", 1)]
    methods: list[str] = []
    with grpc.insecure_channel(address, options=options) as channel:
        server = grpc.server(futures.ThreadPoolExecutor(8), options=[*options, ("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers((_Forward(channel, methods),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}", methods
        finally:
            server.stop(0).wait(10)
