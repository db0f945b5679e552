"""Ends connections that gRPC cannot end, by finding them among this process's sockets by peer.

gRPC lets a server end an RPC with a status, which waits behind data that the client does not take, and a
connection by its age. For a client that takes nothing, the kernel is asked to shut down the connection: gRPC
sees it closed, and drops everything that was to be sent on it. Peers on Unix sockets have no names: there,
connections are judged by what is in their send queues.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
import termios
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

if TYPE_CHECKING:
    from collections.abc import Collection

_DESCRIPTORS = Path("/proc/self/fd")
UNMOVED_S = 5.0
"""Seconds for which a send queue has not moved if nobody reads it."""


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


@dataclass(frozen=True)
class _SendQueue:
    """What a connection had to send: bytes, since when that many, and when it was seen first."""

    nbytes: int
    since_s: float
    seen_s: float


class UnixConnections:
    """Connections of this process that Unix sockets accepted, and what is in their send queues."""

    def __init__(self) -> None:
        """Starts without any."""
        self._queues: dict[str, _SendQueue] = {}

    def forget(self) -> None:
        """Every reply is taken in time."""
        self._queues.clear()

    def end_unread(self, paths: Collection[str], now_s: float, *, is_short: bool) -> int:
        """Shuts down connections whose send queue holds something and has not moved for some seconds.

        To be called again and again while some reply is not taken. A client may also take all that is sent
        and give its streams no window: its connection looks like any other. If replies are still not taken
        after twice as long, and memory is short, all connections that were there all the time are shut down.

        Args:
            paths: Paths of the sockets of these replies.
            now_s: Time on the monotonic clock.
            is_short: Whether memory is short.

        Returns:
            Number of connections that were shut down.
        """
        found, ended = {}, 0
        for path in _DESCRIPTORS.iterdir():
            with suppress(OSError):  # closed meanwhile, not a socket, or the one that listens
                name = os.readlink(path)
                if not name.startswith("socket:"):
                    continue
                with socket.socket(fileno=os.dup(int(path.name))) as each:
                    if each.family != socket.AF_UNIX or each.getsockname() not in paths:
                        continue
                    each.getpeername()
                    found[name] = queue = self._seen(name, _queued_bytes(each), now_s)
                    is_stuck = queue.nbytes and now_s - queue.since_s >= UNMOVED_S
                    if is_stuck or (is_short and now_s - queue.seen_s >= 2 * UNMOVED_S):
                        each.shutdown(socket.SHUT_RDWR)
                        ended += 1
        self._queues = found
        return ended

    def _seen(self, name: str, nbytes: int, now_s: float) -> _SendQueue:
        before = self._queues.get(name)
        if before is None:
            return _SendQueue(nbytes, now_s, now_s)
        return before if before.nbytes == nbytes else _SendQueue(nbytes, now_s, before.seen_s)


def _queued_bytes(connection: socket.socket) -> int:
    """Bytes that were sent and not read yet, as memory."""
    (found,) = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))
    return int(found)
