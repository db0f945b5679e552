"""Pings workers at intervals; one that stops responding is hung, whatever it runs.

A worker's listening thread responds while its streams run operators, so silence means that the process was
stopped, or is stuck holding the interpreter's lock. Silence is counted in pings, not in seconds: while the
whole server stands still, on a suspended machine or under a debugger, its workers do as well.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from npugrad_server.worker.protocol import Ping

if TYPE_CHECKING:
    from collections.abc import Callable

    from npugrad_server.pool.process import WorkerProcess

MISSED_PINGS = 6
"""Consecutive unanswered pings after which a worker counts as hung."""


class Heartbeat:
    """Watches the workers that are ready. On the pool's event loop."""

    def __init__(self, timeout_s: float, on_silence: Callable[[WorkerProcess], None]) -> None:
        """Watches no worker yet.

        Args:
            timeout_s: Seconds of silence after which a worker counts as hung.
            on_silence: Called once with a worker that counts as hung; it is no longer watched then.
        """
        self._pause_s = timeout_s / MISSED_PINGS
        self._on_silence = on_silence
        self._unanswered: dict[WorkerProcess, int] = {}
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, process: WorkerProcess) -> None:
        """Starts pinging a worker."""
        self._unanswered[process] = 0
        if self._timer is None:
            self._wait()

    def heard(self, process: WorkerProcess) -> None:
        """Notes that a worker has sent a message."""
        if process in self._unanswered:
            self._unanswered[process] = 0

    def forget(self, process: WorkerProcess) -> None:
        """Stops pinging a worker."""
        self._unanswered.pop(process, None)

    def stop(self) -> None:
        """Stops pinging all workers."""
        self._unanswered.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._ask)

    def _ask(self) -> None:
        # However late this runs, the event loop has delivered pending messages of workers first.
        for process, count in list(self._unanswered.items()):
            if count == MISSED_PINGS:
                self.forget(process)
                self._on_silence(process)
            else:
                self._unanswered[process] = count + 1
                process.send(Ping())
        self._wait()
