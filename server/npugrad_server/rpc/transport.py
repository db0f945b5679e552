"""The gRPC server itself: its address, TLS, and limits of connections."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from npugrad_server.addresses import Address, AddressError, check_free
from npugrad_server.rpc.front_limits import FrontLimits
from npugrad_server.rpc.identity import ARRIVED_BY

if TYPE_CHECKING:
    from npugrad_server.config import ServerSettings
    from npugrad_server.rpc.certificates import LiveCertificates

    ChannelOptions = tuple[tuple[str, int], ...]

LEAST_PING_INTERVAL_S = 30.0
"""A connection may be pinged this often. grpc's own limit of 300 s would end every call that is silent for so
long, because clients ping once a minute to check that the server is still there."""
_MAX_PING_STRIKES = 2
"""Pings that may come too early; the next one ends the connection, so that pings cannot keep us busy."""
_FRAME_BYTES = 2**20
_ENDLESS_S = 1e9
_METADATA_BYTES, _MOST_METADATA_BYTES = 8 * 2**10, 16 * 2**10
"""Metadata of a call: above the first limit some calls are refused at random, above the second all. These are
grpc's own defaults, set here so that no version of it has others."""


class GrpcServers:
    """The gRPC servers of one process, one for each address: gRPC does not say by which a call came."""

    def __init__(self, *servers: grpc.aio.Server) -> None:
        self._servers = servers

    def add_generic_rpc_handlers(self, handlers: tuple[grpc.GenericRpcHandler, ...]) -> None:
        """As the method of a server, of each."""
        for server in self._servers:
            server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """As the method of a server, of each; grpc's generated code calls it."""
        for server in self._servers:
            server.add_registered_method_handlers(service, handlers)

    async def start(self) -> None:
        """Serves."""
        for server in self._servers:
            await server.start()

    async def stop(self, grace_s: float | None) -> None:
        """Stops all of them, as the method of a server; called again, it can only be sooner.

        gRPC is given no time of its own: of two calls of its `stop` whose times are up at the same moment,
        one frees the server and the other one then cancels its calls, which is a SIGSEGV (1.85).
        """
        endings = {server: asyncio.ensure_future(server.stop(_ENDLESS_S)) for server in self._servers}
        if grace_s is not None:
            await asyncio.wait(endings.values(), timeout=grace_s)
        for server, ending in endings.items():
            if not ending.done():
                await server.stop(None)
        await asyncio.gather(*endings.values())

    async def wait_for_termination(self) -> None:
        """Waits until one of them ends."""
        ends = [asyncio.ensure_future(server.wait_for_termination()) for server in self._servers]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)


class _ArrivedBy(grpc.aio.ServerInterceptor):
    """Notes by which Unix socket a call came."""

    def __init__(self, socket: str) -> None:
        self._socket = socket

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """For what else runs in the task of the call."""
        ARRIVED_BY.set(self._socket)
        return await continuation(handler_call_details)


def open_servers(
    settings: ServerSettings,
    *interceptors: grpc.aio.ServerInterceptor,
    certificates: LiveCertificates | None = None,
) -> tuple[GrpcServers, tuple[Address, ...]]:
    """Binds the addresses; nothing is served yet.

    Args:
        settings: Addresses and limits.
        interceptors: See calls before their handlers do.
        certificates: The server's certificates; None for plaintext.

    Returns:
        The servers, and their addresses with the bound ports.

    Raises:
        AddressError: An address cannot be listened on.
    """
    servers, addresses = [], []
    for address in settings.listen_addresses:
        check_free(address)
        first = (_ArrivedBy(str(address)),) if address.path else ()
        server = grpc.aio.server(options=server_options(settings), interceptors=(*first, *interceptors))
        addresses.append(_bind(server, address, certificates))
        servers.append(server)
    return GrpcServers(*servers), tuple(addresses)


def _bind(server: grpc.aio.Server, address: Address, certificates: LiveCertificates | None) -> Address:
    try:
        if certificates is None:
            port = server.add_insecure_port(str(address))
        else:
            port = server.add_secure_port(str(address), certificates.credentials())
    except RuntimeError as error:
        raise AddressError(f"cannot listen on {address}: {error}") from None
    if address.mode is not None:
        os.chmod(address.path, address.mode)
    return address.with_port(port)


def server_options(settings: ServerSettings) -> ChannelOptions:
    """Returns grpc's options for the port, messages and connections."""
    limit = int(settings.max_message_bytes)
    return (
        # Otherwise two servers on one port would share its calls without anybody noticing.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", limit),
        ("grpc.max_send_message_length", limit),
        # A compressed request is refused by its headers, with UNIMPLEMENTED: otherwise a message of some KiB
        # would be inflated to the message limit, on the event loop, before anything could count it.
        ("grpc.compression_enabled_algorithms_bitset", 1 << grpc.Compression.NoCompression),
        ("grpc.max_metadata_size", _METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", _MOST_METADATA_BYTES),
        *_window_options(settings),
        *ping_options(),
        *_age_options(settings),
        *_count_options(settings),
    )


def _window_options(settings: ServerSettings) -> ChannelOptions:
    """What a client may send of a call before it is read; by itself, gRPC would allow 4 MiB and more."""
    return (
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", FrontLimits.of(settings).window_bytes),
        # Without probes it would stay at 16 KiB, and large messages would take half as long again.
        ("grpc.http2.max_frame_size", _FRAME_BYTES),
    )


def ping_options(least_interval_s: float = LEAST_PING_INTERVAL_S) -> ChannelOptions:
    """How often a client may ping, whether or not it has a call in progress.

    Args:
        least_interval_s: Seconds between two pings of a connection without penalty.
    """
    return (
        # The value of GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS in grpc's C core has no "recv",
        # and grpc ignores names that it does not know.
        ("grpc.http2.min_ping_interval_without_data_ms", round(least_interval_s * 1000)),
        ("grpc.http2.max_ping_strikes", _MAX_PING_STRIKES),
        # Otherwise a connection without calls may be pinged only once in two hours, and proxies ping those.
        ("grpc.keepalive_permit_without_calls", 1),
    )


def _count_options(settings: ServerSettings) -> ChannelOptions:
    pending = settings.max_pending_calls
    return (
        # Reset calls count until they are forgotten. Without a limit, four connections that reset their calls
        # at once (CVE-2023-44487) fill grpc's queue of pending calls, and it cancels 98 of 100 calls, whoever
        # sent them.
        ("grpc.max_concurrent_streams", settings.max_streams_per_connection),
        ("grpc.max_allowed_incoming_connections", settings.max_connections),
        ("grpc.server.max_pending_requests", pending),
        # gRPC's own defaults are 1000 and 3000.
        ("grpc.server.max_pending_requests_hard_limit", min(3 * pending, 2**31 - 1)),
        ("grpc.server_handshake_timeout_ms", round(settings.handshake_timeout_s * 1000)),
    )


def _age_options(settings: ServerSettings) -> ChannelOptions:
    ages = {"age": settings.max_connection_age_s, "age_grace": settings.max_connection_age_grace_s}
    return tuple((f"grpc.max_connection_{k}_ms", round(s * 1000)) for k, s in ages.items() if s is not None)
