"""Shared by both transports: settings, channel options, stubs, forks, timeouts."""

from __future__ import annotations

import ipaddress
import json
import math
import os
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsFloat

from google.protobuf.message_factory import GetMessageClass

from npugrad import codec
from npugrad.errors import ClientUnusable, DeadlineExceeded, WrongType, WrongValue
from npugrad.frames import encode_frame, frame_decoder
from npugrad.registry import REGISTRY, Registry
from npugrad.usage import require_number
from npugrad.v1 import server_pb2
from npugrad_client._attempt import Attempt
from npugrad_client._retry import ONCE, RetryPolicy
from npugrad_client._targets import ADDRESS, complete_target
from npugrad_client._tls import Tls, TlsSource

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from google.protobuf.descriptor import ServiceDescriptor

    from npugrad.operator import OpRecord
    from npugrad_client._retry import Launch
    from npugrad_client._tls import PemParts

STREAM_FROM_BYTES = 2**21 + 1
"""Calls with more than 2 MiB of data in either direction are streamed. Below, one message is faster: a stream
costs a thread and several steps on both sides. Above, copying one chunk overlaps with sending another."""
LARGEST_UNARY_BYTES = 3 * 2**20
"""No setting sends a call with this much data or more as one message. With everything else in it, a message
thus stays below gRPC's default limit of 4 MiB."""
REFUSAL_WAIT_S = 1.0
"""How long a call that the local record refuses delays its data, so that the server can refuse it first."""
KEEPALIVE_S = 60
"""Interval between pings on a connection with calls."""
_ENDLESS_S = 1e9
"""Timeouts from here on count as none; grpc's clock cannot represent much more."""

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", codec.MAX_MESSAGE_BYTES),
    # A chunk or a unary reply, with room for the rest: a server cannot make a client hold more at once.
    ("grpc.max_receive_message_length", codec.MAX_CHUNK_BYTES + 2**16),
    # None but "identity": a small message could become a huge one.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # Detects a lost connection while a call is quiet. Not more often, because a server counts pings and
    # closes the connection, with its calls, of a client that sends too many (ours accepts one in 30 s, gRPC's
    # default is one in 300 s).
    ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # Finds a restarted server quickly, and one that was down within seconds, not grpc's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # How long a host may stay silent while a connection is opened; grpc's default is 20 s.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # Each channel has its own connection: one shared with the parent from before a fork is broken.
    ("grpc.use_local_subchannel_pool", 1),
)
_LOOPBACK = re.compile(r"(dns:/*|ipv4:|ipv6:)?(localhost|127\.[0-9.]+|\[::1\])(:[0-9]+)?", re.I)
_UNIX = re.compile(r"unix(-abstract)?:.*", re.I)
_SAME_HOST: tuple[tuple[str, int], ...] = (
    # How much of a reply gRPC reads ahead. By default it probes how much data is in flight, to fill a long
    # link; on one host the probe finds how far the reader is behind, many MiB, which gRPC then buffers.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", codec.CHUNK_BYTES),
)


_SEVERAL = re.compile(r"dns:|ipv[46]:[^,]*,", re.I)
_LIST = re.compile(r"ipv[46]:[^,]*,.*", re.I)
_PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
"""What gRPC reads, in lower case only: the first one that is set decides, even if it is empty."""
_PROXY_URL = re.compile(r"http://([^/?#]*@)?(?P<address>[^/?#@]+).*", re.S)
"""gRPC ignores proxies of other schemes. Credentials are not for messages."""
_ROUND_ROBIN = json.dumps(
    {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}}
)
"""For targets that may name several servers: round robin over those whose health service says SERVING."""


@dataclass(frozen=True)
class Settings:
    """How a transport connects and sends.

    Attributes:
        targets: Addresses with ports, one per server.
        stream_from_bytes: Calls with this much data in either direction are streamed; for a server with a
            lower message limit, calls with less.
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
    target: str | Sequence[str],
    timeout_s: float | None,
    stream_from_bytes: int,
    retry: RetryPolicy | None,
    tls: Tls | bool | None,
) -> Settings:
    """Makes the settings from the arguments of a client.

    Raises:
        WrongType: A target is not a string, or another argument has the wrong type.
        WrongValue: There is no target, a target is no address, `tls` names something that is not PEM, or a
            number is out of range.
        OSError: A file named in `tls` cannot be read.
    """
    require_timeout(timeout_s)
    require_number(
        "stream_from_bytes", stream_from_bytes, "0 bytes or more", lambda given: given >= 0, whole=True
    )
    targets = (complete_target(target),) if isinstance(target, str) else _listed(target)
    if retry is not None and not isinstance(retry, RetryPolicy):
        raise WrongType(f"retry: found {type(retry).__name__}; expected RetryPolicy or None")
    if tls is not None and not isinstance(tls, (bool, Tls)):
        raise WrongType(f"tls: found {type(tls).__name__}; expected Tls, True or None")
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
        raise WrongValue("target: found no targets; expected at least one")
    return targets


class Stubs:
    """The RPCs of one channel, blocking or asynchronous like the channel.

    Attributes:
        channel: The channel, which lives as long as its stubs are referenced.
        pem: The PEM parts it was opened with; None for an unencrypted connection.
        proxy: What `proxy_note` said when it was opened.
        opened_s: When it was opened, on the monotonic clock.
        heard_s: When anything last arrived on it; at first when it was opened.
    """

    def __init__(
        self, channel: Any, registry: Registry = REGISTRY, pem: PemParts | None = None, proxy: str = ""
    ) -> None:
        """Makes the stubs; nothing is sent."""
        self.channel, self.pem, self.proxy = channel, pem, proxy
        self.heard_s = self.opened_s = time.monotonic()
        # Bytes both ways: most requests and replies are encoded and decoded without a message object.
        self._service = registry.backward.full_name
        self._unary: dict[str, Any] = {}  # made as they are asked for, because they need records
        server = _methods(channel, server_pb2.DESCRIPTOR.services_by_name["ServerService"])
        self.execute: Any = _methods(channel, registry.backward)["Execute"]
        self.services: dict[str, Any] = {
            "validate": _methods(channel, registry.validation)["Validate"],
            "server_info": server["GetServerInfo"],
            "list_operators": server["ListOperators"],
        }

    def unary(self, record: OpRecord) -> Any:
        """Returns the unary RPC of an operator, which takes and returns encoded messages."""
        method = self._unary.get(record.name)
        if method is None:
            name = f"/{self._service}/{record.rpc}"
            method = self._unary[record.name] = self.channel.unary_unary(name, _registered_method=True)
        return method


def _methods(channel: Any, service: ServiceDescriptor) -> dict[str, Any]:
    """Returns the RPCs of a service by name, as in a generated stub; streams take and return `Chunk`."""
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
    if _LOOPBACK.fullmatch(target) or _UNIX.fullmatch(target):
        options += _SAME_HOST
    if _is_direct(target):
        options.append(("grpc.enable_http_proxy", 0))
    if _SEVERAL.match(target):
        options.append(("grpc.service_config", _ROUND_ROBIN))
    return options


def _is_direct(target: str) -> bool:
    """Whether no proxy is asked: gRPC would ask it even for this host, and for a list as one odd name."""
    return any(pattern.fullmatch(target) for pattern in (_LOOPBACK, _UNIX, _LIST))


def proxy_note(target: str, environment: Mapping[str, str] = os.environ) -> str:
    """What sends the connections of a channel that is opened now through a proxy; empty if nothing does."""
    return "" if _is_direct(target) else _proxy_note(target, environment)


def _proxy_note(target: str, environment: Mapping[str, str]) -> str:
    name = next((name for name in _PROXY_VARIABLES if name in environment), "")
    proxy = _PROXY_URL.fullmatch(environment.get(name, ""))
    match = ADDRESS.fullmatch(target)
    exempting = "no_grpc_proxy" if "no_grpc_proxy" in environment else "no_proxy"
    if proxy is None or match is None or _is_exempt(match["host"], environment.get(exempting, "")):
        return ""
    return (
        f"the environment variable {name} sends connections to {match['host']} through the proxy "
        f"http://{proxy['address']}; to do without it, add {match['host']} to {exempting} (in lower case) "
        "before the client is made"
    )


def _is_exempt(host: str, listed: str) -> bool:
    """Whether gRPC goes to a host directly: the list has its name, the end of its name, or its network."""
    entries = [entry.strip().lower().removeprefix(".") for entry in listed.split(",")]
    return any(f".{host.lower()}".endswith(f".{entry}") or _has(entry, host) for entry in entries if entry)


def _has(network: str, host: str) -> bool:
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False


def check_fork() -> None:
    """Raises ClientUnusable in a forked process if grpc's fork support is switched off.

    Since 1.67, grpc's own state survives a fork if it is on. Connections do not, so each process opens its
    own.
    """
    if os.getpid() != _IMPORTED_BY and os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "1").lower() in _FALSE:
        raise ClientUnusable(
            "this process was forked with GRPC_ENABLE_FORK_SUPPORT=0 in the environment, so gRPC would "
            "hang; unset the variable, or start the process with spawn"
        )


_IMPORTED_BY = os.getpid()
_FALSE = ("0", "false", "no", "")


def grpc_timeout(timeout_s: float | None, what: str) -> float | None:
    """Converts a timeout for grpc, which treats 0 as none and refuses infinity."""
    if timeout_s is None:
        return None
    if not isinstance(timeout_s, (float, int, SupportsFloat)):
        raise WrongType(f"{what}: timeout_s: found {type(timeout_s).__name__}; expected seconds or None")
    if math.isnan(timeout_s):
        raise WrongValue(f"{what}: timeout_s: found nan; expected seconds or None")
    if timeout_s <= 0:
        raise DeadlineExceeded(f"{what}: the deadline of {timeout_s:g} s has already passed")
    return None if timeout_s >= _ENDLESS_S else timeout_s


def require_timeout(timeout_s: object) -> None:
    """Refuses a deadline that no call can meet, before there is one.

    Raises:
        WrongType: It is neither a number nor None.
        WrongValue: It is not above 0.
    """
    if timeout_s is not None:
        require_number("timeout_s", timeout_s, "seconds above 0, or None", lambda given: given > 0)


def closed(target: str) -> ClientUnusable:
    """The error of a call after close()."""
    return ClientUnusable(f"the client for {target} is closed; make a new one")
