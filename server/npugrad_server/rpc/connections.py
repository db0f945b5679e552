"""Ends connections that gRPC cannot end, by finding them among this process's sockets by peer.

gRPC lets a server end an RPC with a status, which waits behind data that the client does not take, and a
connection by its age. For a client that takes nothing, the kernel is asked to shut down the connection: gRPC
sees it closed, and drops everything that was to be sent on it.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

if TYPE_CHECKING:
    from collections.abc import Collection

_DESCRIPTORS = Path("/proc/self/fd")


def end_connections(peers: Collection[str], port: int) -> int:
    """Shuts down the TCP connections from some peers to a port of this process.

    Args:
        peers: As gRPC names them, such as ``"ipv4:10.0.0.7:41234"`` or ``"ipv6:%5B::1%5D:41234"``; peers on
            Unix sockets have no names, and are left alone.
        port: The port that they are connected to.

    Returns:
        Number of connections that were shut down.
    """
    wanted = {_address(peer) for peer in peers} - {None}
    return sum(_end(int(path.name), wanted, port) for path in _DESCRIPTORS.iterdir()) if wanted else 0


def _end(descriptor: int, wanted: Collection[tuple[str, int] | None], port: int) -> bool:
    try:
        if not os.readlink(_DESCRIPTORS / str(descriptor)).startswith("socket:"):
            return False
        # A duplicate: by the time of the shutdown, the number itself may refer to another socket.
        with socket.socket(fileno=os.dup(descriptor)) as found:
            if found.family not in (socket.AF_INET, socket.AF_INET6) or found.getsockname()[1] != port:
                return False
            host, peer_port = found.getpeername()[:2]
            if (_plain(host), peer_port) not in wanted:
                return False
            found.shutdown(socket.SHUT_RDWR)
            return True
    except OSError:  # closed meanwhile, not a socket, or not connected
        return False


def _address(peer: str) -> tuple[str, int] | None:
    kind, _, rest = peer.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    return (_plain(host.strip("[]")), int(port)) if kind in ("ipv4", "ipv6") else None


def _plain(host: str) -> str:
    """The canonical form of an address: IPv4 if it is an IPv4-mapped IPv6 address."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address)
