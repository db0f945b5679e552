"""Shared by both transports: settings, channel options, stubs, forks, timeouts."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsFloat

from google.protobuf.message_factory import GetMessageClass

from npugrad import codec
from npugrad.errors import DeadlineExceeded
from npugrad.frames import encode_frame, frame_decoder
from npugrad.registry import REGISTRY, Registry
from npugrad.v1 import server_pb2
from npugrad_client._attempt import Attempt
from npugrad_client._retry import ONCE, RetryPolicy
from npugrad_client._targets import complete_target
from npugrad_client._tls import Tls, TlsSource

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from google.protobuf.descriptor import ServiceDescriptor

    from npugrad.operator import OpRecord
    from npugrad_client._retry import Launch
    from npugrad_client._tls import PemParts

STREAM_FROM_BYTES = 2**21 + 1
"""Calls with more than 2 MiB of data either way are streamed. Up to there one message is quicker: a stream
costs a thread and several turns of both sides. Above, the copies of one chunk overlap with the way of
another."""
LARGEST_UNARY_BYTES = 3 * 2**20
"""No setting sends a call as one message with this much data or more: with all else that it has, it so stays
below the 4 MiB that gRPC takes everywhere unless it is told otherwise."""
REFUSAL_WAIT_S = 1.0
"""How long the data of a call that the local record refuses waits for the server to refuse it, too."""
KEEPALIVE_S = 60
"""How often a connection with calls on it is pinged."""
_ENDLESS_S = 1e9
"""Timeouts from here on are none; grpc's clock cannot hold much more."""

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", codec.MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", codec.MAX_MESSAGE_BYTES),
    # A path that was lost is noticed while a call is quiet. Not more often: a server counts pings, and closes
    # the connection, with its calls, of who sends them too often (ours takes one in 30 s, gRPC's own default
    # one in 300 s).
    ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # A server that restarts is found again soon, and a dead one within seconds, not grpc's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # How long a host may be silent that a connection is opened to; grpc's default is 20 s.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # A connection of its own: one that is shared with a parent's, from before a fork, is broken.
    ("grpc.use_local_subchannel_pool", 1),
)
_LOOPBACK = re.compile(r"(dns:/*|ipv4:|ipv6:)?(localhost|127\.[0-9.]+|\[::1\])(:[0-9]+)?", re.I)
_UNIX = re.compile(r"unix(-abstract)?:.*", re.I)
_SAME_HOST: tuple[tuple[str, int], ...] = (
    # How much of a reply gRPC reads ahead. By default it probes how much is on its way, to fill a long line;
    # on one host what it finds is how far the reader is behind, many MiB, which it then has to hold.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", codec.CHUNK_BYTES),
)


_SEVERAL = re.compile(r"dns:|ipv[46]:[^,]*,", re.I)
_ROUND_ROBIN = json.dumps(
    {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}}
)
"""For targets that may name several servers: in turn, and only those whose health service says SERVING."""


@dataclass(frozen=True)
class Settings:
    """How a transport connects and sends.

    Attributes:
        targets: Addresses with ports, one per server.
        stream_from_bytes: Calls with this much data in either direction are streamed; to a server that took
            less as one message, from less on.
        retry: When to retry calls.
        tls: Certificates to trust and to present; None for an unencrypted connection.
    """

    targets: tuple[str, ...]
    stream_from_bytes: int = STREAM_FROM_BYTES
    retry: RetryPolicy = ONCE
    tls: TlsSource | None = None

    @property
    def name(self) -> str:
        """The targets, for messages."""
        return ", ".join(self.targets)

    def attempt(self, what: str, operator: str, step: Launch) -> Attempt:
        """A try that begins now."""
        timeout_s = None if step.timeout_s is None else grpc_timeout(step.timeout_s, what)
        return Attempt(
            what,
            self.targets[step.server],
            timeout_s,
            self.tls is not None,
            operator=operator,
            number=step.number,
        )

    def options(self, target: str) -> list[tuple[str, Any]]:
        """Options of a channel to one of the targets."""
        options = channel_options(target)
        if self.tls is not None and self.tls.server_name is not None:
            options.append(("grpc.ssl_target_name_override", self.tls.server_name))
        return options


def settings(
    target: str | Sequence[str], stream_from_bytes: int, retry: RetryPolicy | None, tls: Tls | bool | None
) -> Settings:
    """Settings from what the caller of a client gave.

    Raises:
        TypeError: A target is not a string, or `retry` or `tls` has the wrong type.
        ValueError: There is no target, a target is empty or a URL, or `tls` names something that is not PEM.
        OSError: A file named in `tls` cannot be read.
    """
    targets = (complete_target(target),) if isinstance(target, str) else _listed(target)
    if retry is not None and not isinstance(retry, RetryPolicy):
        raise TypeError(f"retry: found {type(retry).__name__}; expected RetryPolicy or None")
    if tls is not None and not isinstance(tls, (bool, Tls)):
        raise TypeError(f"tls: found {type(tls).__name__}; expected Tls, True or None")
    chosen = Tls() if tls is True else (tls or None)
    return Settings(
        targets=targets,
        stream_from_bytes=min(stream_from_bytes, LARGEST_UNARY_BYTES),
        retry=retry or ONCE,
        tls=TlsSource(chosen) if chosen else None,
    )


def _listed(target: Iterable[str]) -> tuple[str, ...]:
    if not isinstance(target, (list, tuple)):
        complete_target(target)  # raises
    targets = tuple(dict.fromkeys(complete_target(one) for one in target))
    if not targets:
        raise ValueError("target: found no targets; expected at least one")
    return targets


class Stubs:
    """The RPCs of one channel, blocking or not as the channel is.

    Attributes:
        channel: The channel, which lives as long as somebody has its stubs.
        pem: What it was opened with; None for an unencrypted connection.
    """

    def __init__(self, channel: Any, registry: Registry = REGISTRY, pem: PemParts | None = None) -> None:
        """Makes the stubs; nothing is sent."""
        self.channel, self.pem = channel, pem
        # Bytes both ways: most are made and read without a message.
        self._unary = {
            name: channel.unary_unary(f"/{registry.backward.full_name}/{record.rpc}", _registered_method=True)
            for name, record in registry.records.items()
        }
        server = _methods(channel, server_pb2.DESCRIPTOR.services_by_name["ServerService"])
        self.execute: Any = _methods(channel, registry.backward)["Execute"]
        self.services: dict[str, Any] = {
            "validate": _methods(channel, registry.validation)["Validate"],
            "server_info": server["GetServerInfo"],
            "list_operators": server["ListOperators"],
        }

    def unary(self, record: OpRecord) -> Any:
        """The unary RPC of an operator, which takes and gives encoded messages."""
        return self._unary[record.name]


def _methods(channel: Any, service: ServiceDescriptor) -> dict[str, Any]:
    """The RPCs of a service by name, as a generated stub makes them; streams take and give `Chunk`."""
    methods = {}
    for method in service.methods:
        request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        is_stream = method.client_streaming
        methods[method.name] = getattr(channel, "stream_stream" if is_stream else "unary_unary")(
            f"/{service.full_name}/{method.name}",
            request_serializer=encode_frame if is_stream else request.SerializeToString,
            response_deserializer=frame_decoder(response) if is_stream else response.FromString,
            _registered_method=True,
        )
    return methods


def channel_options(target: str) -> list[tuple[str, Any]]:
    """Options of a channel to a target."""
    options: list[tuple[str, Any]] = list(_OPTIONS)
    is_loopback = _LOOPBACK.fullmatch(target)
    if is_loopback or _UNIX.fullmatch(target):
        options += _SAME_HOST
    if is_loopback:
        options.append(("grpc.enable_http_proxy", 0))  # grpc would ask a proxy for this very host
    if _SEVERAL.match(target):
        options.append(("grpc.service_config", _ROUND_ROBIN))
    return options


def check_fork() -> None:
    """Raises RuntimeError in a forked process where grpc's support of forks was switched off.

    grpc's own state survives a fork since 1.67, but for that switch; connections do not, so that a process
    opens its own.
    """
    if os.getpid() != _IMPORTED_BY and os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "1").lower() in _FALSE:
        raise RuntimeError(
            "this process was forked with GRPC_ENABLE_FORK_SUPPORT=0 in the environment, so gRPC would "
            "hang; unset the variable, or start the process with spawn"
        )


_IMPORTED_BY = os.getpid()
_FALSE = ("0", "false", "no", "")


def grpc_timeout(timeout_s: float | None, what: str) -> float | None:
    """The timeout as grpc takes it, which reads 0 as none and refuses infinity."""
    if timeout_s is None:
        return None
    if not isinstance(timeout_s, (float, int, SupportsFloat)):
        raise TypeError(f"{what}: timeout_s: found {type(timeout_s).__name__}; expected seconds or None")
    if math.isnan(timeout_s):
        raise ValueError(f"{what}: timeout_s: found nan; expected seconds or None")
    if timeout_s <= 0:
        raise DeadlineExceeded(f"{what}: the deadline of {timeout_s:g} s has already passed")
    return None if timeout_s >= _ENDLESS_S else timeout_s


def closed(target: str) -> RuntimeError:
    """The error of a call after close()."""
    return RuntimeError(f"the client for {target} is closed")
