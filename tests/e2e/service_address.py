"""One address in front of several servers, as a cluster's service is, and a cable that can be cut."""

from __future__ import annotations

import itertools
import math
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER of 0 seconds: closing sends a reset and no farewell, as when a host loses its power."""
_TIMEOUT_S = 20.0


class ServiceAddress:
    """Carries connections, each to the next server that takes it; looks at no byte of them.

    Attributes:
        address: What clients connect to.
        servers: Addresses that new connections go to, in turn; may be replaced at any time.
        cut: Set once a connection was cut, both ends, because so many bytes went one way.
    """

    def __init__(self, *servers: str, up_bytes: float = math.inf, down_bytes: float = math.inf) -> None:
        self.servers, self.cut = servers, threading.Event()
        self._limits, self._turn = (up_bytes, down_bytes), itertools.count()
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
                for pair, limit in zip(((near, far), (far, near)), self._limits, strict=True):
                    pump = threading.Thread(target=self._pump, args=(*pair, limit), daemon=True)
                    pump.start()
                    self._threads.append(pump)

    def _connect(self) -> socket.socket | None:
        servers = self.servers
        for _ in servers:
            host, _, port = servers[next(self._turn) % len(servers)].rpartition(":")
            with suppress(OSError):
                return socket.create_connection((host, int(port)))
        return None

    def _pump(self, source: socket.socket, target: socket.socket, left: float) -> None:
        with suppress(OSError):
            while left > 0 and (data := source.recv(int(min(2**16, left)))):
                target.sendall(data)
                left -= len(data)
        with suppress(OSError):
            if left > 0:
                target.shutdown(socket.SHUT_WR)
                return
            for end in (source, target):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                end.shutdown(socket.SHUT_RD)  # wakes the other pump
                end.close()
        self.cut.set()

    def close(self) -> None:
        for end in (self._listener, *self._ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # wakes whoever waits for it, which closing alone does not
            end.close()
        for thread in self._threads:
            thread.join(_TIMEOUT_S)


@contextmanager
def service_address(*servers: str, **cut_after: float) -> Iterator[ServiceAddress]:
    made = ServiceAddress(*servers, **cut_after)
    try:
        yield made
    finally:
        made.close()
