"""How methods get into the server: one function, which also chooses how their bytes become messages."""

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

    Handler = Callable[[Any, "grpc.aio.ServicerContext[Any, Any]"], Awaitable[Any]]
    Deserializer = Callable[[bytes], Any]
    Serializer = Callable[[Any], bytes]

_METHOD_LENGTH = 80


@dataclass(frozen=True)
class Garbage:
    """Takes the place of a message whose bytes do not parse, so that our funnel answers and not gRPC.

    Attributes:
        nbytes: Length of what came.
        expected: Full name of the message that should have come.
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
    """A parser that returns `Garbage` where protobuf, or `parse` in its place, would raise."""
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
    server: grpc.aio.Server,
    service: ServiceDescriptor,
    handlers: Mapping[str, Handler],
    deserializers: Mapping[str, Deserializer] | None = None,
    serializers: Mapping[str, Serializer] | None = None,
) -> None:
    """Adds every method of a service.

    Args:
        server: The server, not yet started.
        service: The service's descriptor.
        handlers: Handler of each method by name. It reads with the context's `read`: a unary one its message,
            a stream frames, which are `Chunk` or messages, as are those that it hands to `write`.
        deserializers: Other parsers than protobuf's by name of method; `bytes` leaves what came as it is.
        serializers: The same for what is sent.

    Raises:
        ValueError: Methods and handlers are not the same set.
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
    """Tells clients of another major version, whose methods have another package, what is spoken here."""

    def __init__(self, package: str) -> None:
        """Knows its own.

        Args:
            package: What is spoken here, such as ``"npugrad.v1"``; its unknown methods are left to gRPC.
        """
        self._own = f"/{package}."
        self._expected = f"expected {package}, which this server of version {npugrad.__version__} speaks"

    def service(self, handler_call_details: Any) -> Any:
        """The handler that refuses a call; None for one that is not meant for a server of ours."""
        method = handler_call_details.method
        if not method.startswith("/npugrad.") or method.startswith(self._own):
            return None
        text = f"found a call of {ascii(method)[1:-1][:_METHOD_LENGTH]}; {self._expected}"

        async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, text)

        return grpc.stream_stream_rpc_method_handler(refuse)


def _codec(method: MethodDescriptor) -> tuple[Deserializer, Serializer]:
    """How bytes become what a handler gets, and what it sends becomes bytes."""
    request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    if method.client_streaming and method.server_streaming:
        return frame_deserializer(request), encode_frame
    return tolerant_deserializer(request), response.SerializeToString


_MAKE: dict[tuple[bool, bool], Any] = {
    # The same on the wire, but that the handler reads the message, by the context: nothing is read of a call
    # that is refused, and nothing holds its message while its reply waits to be taken.
    (False, False): grpc.stream_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
