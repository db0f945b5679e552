"""The end of a connection that gRPC does not end: found among this process's own sockets by its peer.

gRPC lets a server end one RPC by a status, which waits behind whatever the client does not take, and a
connection by its age. This is for the client that takes nothing: the kernel shuts its connection down, gRPC
sees it closed, and gives up all that was to go over it.
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
    """Shuts down the TCP connections of some peers to a port of this process.

    Args:
        peers: As gRPC names them, such as ``"ipv4:10.0.0.7:41234"`` or ``"ipv6:%5B::1%5D:41234"``; those of
            Unix sockets have no names, and are left alone.
        port: The port that they are connected to.

    Returns:
        How many were shut down.
    """
    wanted = {_address(peer) for peer in peers} - {None}
    return sum(_end(int(path.name), wanted, port) for path in _DESCRIPTORS.iterdir()) if wanted else 0


def _end(descriptor: int, wanted: Collection[tuple[str, int] | None], port: int) -> bool:
    try:
        if not os.readlink(_DESCRIPTORS / str(descriptor)).startswith("socket:"):
            return False
        # A copy: the number itself may stand for another socket by the time that it is shut down.
        with socket.socket(fileno=os.dup(descriptor)) as found:
            if found.family not in (socket.AF_INET, socket.AF_INET6) or found.getsockname()[1] != port:
                return False
            host, peer_port = found.getpeername()[:2]
            if (_plain(host), peer_port) not in wanted:
                return False
            found.shutdown(socket.SHUT_RDWR)
            return True
    except OSError:  # closed meanwhile, no socket, or not connected
        return False


def _address(peer: str) -> tuple[str, int] | None:
    kind, _, rest = peer.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    return (_plain(host.strip("[]")), int(port)) if kind in ("ipv4", "ipv6") else None


def _plain(host: str) -> str:
    """One way of writing an address: that of IPv4 where IPv6 carries one."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address)
