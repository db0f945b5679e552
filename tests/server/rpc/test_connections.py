"""Connections of this process, ended by the names that gRPC has for their peers."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from npugrad_server.rpc.connections import end_connections


def connected(stack: ExitStack, family: int, listen: str, host: str) -> tuple[socket.socket, str, int]:
    """A client's end of a connection to this process, its address with port, and the port of the server."""
    server = stack.enter_context(socket.socket(family))
    if family == socket.AF_INET6:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    server.bind((listen, 0))
    server.listen()
    port = server.getsockname()[1]
    client = stack.enter_context(socket.create_connection((host, port), 30))
    stack.enter_context(server.accept()[0])
    return client, str(client.getsockname()[1]), port


@pytest.mark.parametrize(
    ("family", "listen", "host", "peer"),
    [
        (socket.AF_INET, "127.0.0.1", "127.0.0.1", "ipv4:127.0.0.1:{}"),
        (socket.AF_INET6, "::1", "::1", "ipv6:%5B::1%5D:{}"),
        (socket.AF_INET6, "::", "127.0.0.1", "ipv4:127.0.0.1:{}"),
        (socket.AF_INET6, "::", "127.0.0.1", "ipv6:%5B::ffff:127.0.0.1%5D:{}"),
    ],
    ids=["ipv4", "ipv6", "mapped", "mapped, by its long name"],
)
def test_the_connection_of_a_peer_is_ended_and_no_other(
    family: int, listen: str, host: str, peer: str
) -> None:
    with ExitStack() as stack:
        try:
            client, own_port, port = connected(stack, family, listen, host)
        except OSError:
            pytest.skip("no IPv6 here")
        assert end_connections({peer.format(own_port)}, port + 1) == 0
        assert end_connections({peer.format(int(own_port) + 1)}, port) == 0
        client.setblocking(False)
        with pytest.raises(BlockingIOError):
            client.recv(1)
        client.settimeout(30)
        assert end_connections({peer.format(own_port)}, port) == 1
        assert client.recv(1) == b""


@pytest.mark.parametrize("peer", ["unix:", "unix:/run/npugrad.sock", "unix-abstract:name"])
def test_peers_without_an_address_are_left_alone(peer: str) -> None:
    assert end_connections({peer}, 50051) == 0
