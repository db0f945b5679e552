"""Registers methods with the server, and chooses how their bytes become messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

import npugrad
from npugrad.bounded_parser import MessageTooBulky, bounded_parser
from npugrad.frames import encode_frame, frame_decoder

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

    from npugrad_server.rpc.transport import GrpcServers

    Handler = Callable[[Any, "grpc.aio.ServicerContext[Any, Any]"], Awaitable[Any]]
    Deserializer = Callable[[bytes], Any]
    Serializer = Callable[[Any], bytes]

_METHOD_LENGTH = 80


@dataclass(frozen=True)
class Garbage:
    """Replaces a message whose bytes do not parse, so that the funnel answers and not gRPC.

    Attributes:
        nbytes: Length of what arrived.
        expected: Full name of the expected message.
        excess: What it has too much of, if that is why it was not read.
    """

    nbytes: int
    expected: str
    excess: str = ""

    def __str__(self) -> str:
        """What was found and expected, for the caller."""
        if self.excess:
            return f"found {self.excess}; expected a {self.expected} with less to read"
        return f"found {self.nbytes} bytes that do not parse; expected {self.expected}"


def tolerant_deserializer(message: type[Message], parse: Deserializer | None = None) -> Deserializer:
    """A parser that returns `Garbage` if protobuf, or `parse` in its place, would raise."""
    parse = parse or bounded_parser(message)

    def deserialize(data: bytes) -> Any:
        try:
            return parse(data)
        except MessageTooBulky as error:
            return Garbage(len(data), message.DESCRIPTOR.full_name, str(error))
        except DecodeError:
            return Garbage(len(data), message.DESCRIPTOR.full_name)

    return deserialize


def frame_deserializer(message: type[Message]) -> Deserializer:
    """A tolerant parser of the frames of a stream, which are `Chunk` or messages."""
    return tolerant_deserializer(message, frame_decoder(message, bounded_parser(message)))


def register(
    server: grpc.aio.Server | GrpcServers,
    service: ServiceDescriptor,
    handlers: Mapping[str, Handler],
    deserializers: Mapping[str, Deserializer] | None = None,
    serializers: Mapping[str, Serializer] | None = None,
) -> None:
    """Adds every method of a service.

    Args:
        server: The server, not yet started.
        service: The service's descriptor.
        handlers: Handlers by method name. They read with the context's `read`: a unary one its message, a
            stream frames, which are `Chunk` or messages, as are those passed to `write`.
        deserializers: Parsers to use instead of protobuf's, by method name; `bytes` leaves a message
            serialized.
        serializers: The same for what is sent.

    Raises:
        ValueError: Handlers and methods do not match.
    """
    if set(handlers) != set(service.methods_by_name):
        raise ValueError(
            f"{service.full_name}: found handlers {sorted(handlers)}; "
            f"expected {sorted(service.methods_by_name)}"
        )
    methods = {}
    for name, handler in handlers.items():
        method = service.methods_by_name[name]
        make = _MAKE[method.client_streaming, method.server_streaming]
        parse, serialize = _codec(method)
        parse, serialize = (deserializers or {}).get(name, parse), (serializers or {}).get(name, serialize)
        methods[name] = make(handler, parse, serialize)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, methods),))


class OtherContracts(grpc.GenericRpcHandler):
    """Tells clients of another major version, and so of another package, which one this server speaks."""

    def __init__(self, package: str) -> None:
        """Stores the server's own package.

        Args:
            package: The server's package, such as ``"npugrad.v1"``; its unknown methods are left to gRPC.
        """
        self._own = f"/{package}."
        self._expected = f"expected {package}, which this server of version {npugrad.__version__} speaks"

    def service(self, handler_call_details: Any) -> Any:
        """A handler that refuses calls of other npugrad packages; None for all other calls."""
        method = handler_call_details.method
        if not method.startswith("/npugrad.") or method.startswith(self._own):
            return None
        text = f"found a call of {ascii(method)[1:-1][:_METHOD_LENGTH]}; {self._expected}"

        async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, text)

        return grpc.stream_stream_rpc_method_handler(refuse)


def _codec(method: MethodDescriptor) -> tuple[Deserializer, Serializer]:
    """The deserializer and the serializer of a method's messages."""
    request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    if method.client_streaming and method.server_streaming:
        return frame_deserializer(request), encode_frame
    return tolerant_deserializer(request), response.SerializeToString


_MAKE: dict[tuple[bool, bool], Any] = {
    # The same on the wire, except that the handler reads the message through the context: nothing is read of
    # a refused call, and nothing holds its message while its reply waits to be taken.
    (False, False): grpc.stream_unary_rpc_method_handler,
    (False, True): grpc.stream_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
