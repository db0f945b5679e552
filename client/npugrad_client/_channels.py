"""What the blocking and the asynchronous transport share: targets, options, stubs, timeouts, messages."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from npugrad import codec
from npugrad.errors import DeadlineExceeded
from npugrad.v1 import backward_pb2_grpc, server_pb2_grpc, validation_pb2_grpc

if TYPE_CHECKING:
    from npugrad.spec import OpSpec

STREAM_FROM_BYTES = 2**20
"""Calls with this much data either way are streamed: below, one message is quicker; above, grpc copies a
message several times into fresh memory."""
LARGEST_UNARY_BYTES = 2**30
"""No setting makes a message larger than this: protobuf ends at 2 GiB."""
REFUSAL_WAIT_S = 1.0
"""How long the data of a call that the local record refuses waits for the server to refuse it, too."""
_ENDLESS_S = 1e9
"""Timeouts from here on are none; grpc's clock cannot hold much more."""

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", codec.MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", codec.MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # A server that comes back is found again within seconds, not grpc's two minutes.
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # A connection of its own: one that is shared with a parent's, from before a fork, is broken.
    ("grpc.use_local_subchannel_pool", 1),
)
_LOOPBACK = re.compile(r"(dns:/*|ipv4:|ipv6:)?(localhost|127\.[0-9.]+|\[::1\])(:[0-9]+)?", re.I)


class Stubs:
    """The RPCs of one channel, blocking or not as the channel is."""

    def __init__(self, channel: Any) -> None:
        """Makes the stubs; nothing is sent."""
        self._backward: Any = backward_pb2_grpc.BackwardServiceStub(channel)
        server: Any = server_pb2_grpc.ServerServiceStub(channel)
        validation: Any = validation_pb2_grpc.ValidationServiceStub(channel)
        self.execute: Any = self._backward.Execute
        self.services: dict[str, Any] = {
            "validate": validation.Validate,
            "server_info": server.GetServerInfo,
            "list_operators": server.ListOperators,
        }

    def unary(self, spec: OpSpec) -> Any:
        """The unary RPC of an operator."""
        return getattr(self._backward, spec.rpc)


def check_target(target: object) -> None:
    """Raises TypeError or ValueError for what is no address."""
    if not isinstance(target, str):
        raise TypeError(f"target: found {type(target).__name__}; expected text such as 'localhost:50051'")
    if not target:
        raise ValueError("target: found empty text; expected host:port, unix:path or dns:///name:port")


def channel_options(target: str) -> list[tuple[str, Any]]:
    """Options of a channel to a target."""
    options: list[tuple[str, Any]] = list(_OPTIONS)
    if _LOOPBACK.fullmatch(target):
        options.append(("grpc.enable_http_proxy", 0))  # grpc would ask a proxy for this very host
    return options


def grpc_timeout(timeout_s: float | None, what: str) -> float | None:
    """The timeout as grpc takes it, which reads 0 as none and refuses infinity."""
    if timeout_s is None:
        return None
    if math.isnan(timeout_s):
        raise ValueError(f"{what}: timeout_s: found nan; expected seconds or None")
    if timeout_s <= 0:
        raise DeadlineExceeded(
            f"{what}: found a deadline of {timeout_s:g} s, which has passed; expected one above 0"
        )
    return None if timeout_s >= _ENDLESS_S else timeout_s


def closed(target: str) -> RuntimeError:
    """The error of a call after close()."""
    return RuntimeError(f"found the client for {target} closed; expected calls before close()")
