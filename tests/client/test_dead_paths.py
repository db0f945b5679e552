"""A path that loses its state, as a NAT does: what was connected is heard no more, new connections are."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from tests.client.both import PAIRS, Make
from tests.client.fake_service import fake_service, group_norm

from npugrad_client import Client, DeadlineExceeded, RetryPolicy, _attempt


class Path:
    """A relay to a server.

    Attributes:
        address: Where it listens.
        count: Connections so far.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.count = 0
        self._sockets: list[socket.socket] = []
        self._lost: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._sockets += [caller, server]
                self.count += 1
                for ends in ((caller, server), (server, caller)):
                    threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(2**16):
                if source not in self._lost:
                    target.sendall(data)

    def lose(self) -> None:
        """From now on takes what comes over the connections that there are, and delivers nothing."""
        self._lost.update(self._sockets)

    def close(self) -> None:
        for each in (self._listener, *self._sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@contextmanager
def path_to(target: str) -> Iterator[Path]:
    path = Path(target)
    try:
        yield path
    finally:
        path.close()


@pytest.fixture(autouse=True)
def any_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_attempt, "LEAST_AGE_S", 0.0)


@PAIRS
@pytest.mark.parametrize("retry", [None, RetryPolicy(try_timeout_s=0.3)], ids=["next call", "next try"])
def test_a_silent_connection_is_given_up_at_the_first_deadline(
    make: Make, way: int, retry: RetryPolicy | None
) -> None:
    with (
        fake_service() as service,
        path_to(service.address) as path,
        make(path.address, stream_from_bytes=way, retry=retry) as client,
    ):
        client.group_norm_backward(**group_norm(), timeout_s=60)
        path.lose()
        if retry is None:
            with pytest.raises(DeadlineExceeded):
                client.group_norm_backward(**group_norm(), timeout_s=0.3)
        info = client.group_norm_backward(**group_norm(), timeout_s=60).info
        assert info.tries == 1 if retry is None else info.tries > 1
        assert path.count == 2


def test_a_slow_call_beside_others_that_are_answered_costs_no_connection() -> None:
    ended = threading.Event()

    def slow(context: object) -> None:
        if not service.headers[-1].options.label:
            ended.wait(60)

    with (
        fake_service(before=slow) as service,
        path_to(service.address) as path,
        Client(path.address, retry=None) as client,
    ):
        client.group_norm_backward(**group_norm(), label="quick")
        waiting = client.submit.group_norm_backward(**group_norm(), timeout_s=2)
        while not waiting.done():
            client.group_norm_backward(**group_norm(), label="quick")
        with pytest.raises(DeadlineExceeded):
            waiting.result()
        ended.set()
        client.group_norm_backward(**group_norm(), label="quick")
        assert path.count == 1
