"""Connections of this process, ended by the names that gRPC has for their peers."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from npugrad_server.rpc.connections import UNMOVED_S, UnixConnections, end_connections


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


def is_open(client: socket.socket) -> bool:
    """Whether the server's end was not shut down; takes what was sent."""
    client.setblocking(False)
    try:
        while client.recv(2**16):
            pass
    except BlockingIOError:
        return True
    return False


def test_connections_of_a_unix_socket_whose_clients_take_nothing_are_ended(tmp_path: Path) -> None:
    """Not those that move or are of another socket; without anything to send, only if memory is short."""
    with ExitStack() as stack:
        names = ("stuck", "moving", "idle", "foreign", "young")
        clients, servers, listeners = {}, {}, {}
        for socket_name in ("own", "other"):
            listeners[socket_name] = stack.enter_context(socket.socket(socket.AF_UNIX))
            listeners[socket_name].bind(str(tmp_path / socket_name))
            listeners[socket_name].listen()

        def connect(name: str) -> None:
            clients[name] = stack.enter_context(socket.socket(socket.AF_UNIX))
            clients[name].connect(str(tmp_path / ("other" if name == "foreign" else "own")))
            servers[name], _ = listeners["other" if name == "foreign" else "own"].accept()
            stack.enter_context(servers[name])

        for name in names[:-1]:
            connect(name)
        for name in ("stuck", "moving", "foreign"):
            servers[name].sendall(bytes(1000))
        connections = UnixConnections()
        own = [str(tmp_path / "own")]
        assert connections.end_unread(own, 0.0, is_short=True) == 0
        servers["moving"].sendall(bytes(1000))
        assert connections.end_unread(own, UNMOVED_S - 1, is_short=True) == 0
        connect("young")
        assert connections.end_unread(own, UNMOVED_S, is_short=True) == 1
        assert {name for name in names if not is_open(clients[name])} == {"stuck"}
        servers["stuck"].close()
        assert connections.end_unread(own, 2 * UNMOVED_S, is_short=False) == 0
        assert connections.end_unread(own, 2 * UNMOVED_S, is_short=True) == 2
        assert {name for name in names if is_open(clients[name])} == {"young", "foreign"}
        connections.forget()
        assert connections.end_unread(own, 9 * UNMOVED_S, is_short=True) == 0
