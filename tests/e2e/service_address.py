"""One address in front of several servers, as a cluster's service is: a connection keeps the one it got."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class ServiceAddress:
    """Carries connections, each to the next server that takes it; looks at no byte of them.

    Attributes:
        address: What clients connect to.
        servers: Addresses that new connections go to, in turn; may be replaced at any time.
    """

    def __init__(self, *servers: str) -> None:
        self.servers = servers
        self._turn = itertools.count()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = self._connect()
                if far is None:
                    near.close()
                    continue
                self._ends += near, far
                for pair in ((near, far), (far, near)):
                    pump = threading.Thread(target=_pump, args=pair, daemon=True)
                    pump.start()
                    self._threads.append(pump)

    def _connect(self) -> socket.socket | None:
        servers = self.servers
        for _ in servers:
            host, _, port = servers[next(self._turn) % len(servers)].rpartition(":")
            with suppress(OSError):
                return socket.create_connection((host, int(port)))
        return None

    def close(self) -> None:
        """Ends every connection."""
        for end in (self._listener, *self._ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # wakes whoever waits for it, which closing alone does not
            end.close()
        for thread in self._threads:
            thread.join(20)


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(2**16):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


@contextmanager
def service_address(*servers: str) -> Iterator[ServiceAddress]:
    """One address for a block."""
    made = ServiceAddress(*servers)
    try:
        yield made
    finally:
        made.close()
