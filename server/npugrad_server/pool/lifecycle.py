"""How a worker lives: started, ended, started anew after a while, given up."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from npugrad_server.backends.base import Comeback
from npugrad_server.pool.commands import DeviceChanged, KillWorker, SpawnWorker
from npugrad_server.pool.regions import RegionAllocator
from npugrad_server.pool.types import DeviceState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npugrad_server.pool.commands import Command
    from npugrad_server.pool.ledger import WorkerRecord
    from npugrad_server.pool.types import PoolSettings

MAX_SLOW_DOUBLINGS = 3
"""How often the longest wait for a device that needs time is doubled."""


class Lifecycle:
    """Changes the states of workers; part of the scheduler, which knows their calls."""

    def __init__(self, settings: PoolSettings, workers: Sequence[WorkerRecord]) -> None:
        """Starts nothing yet."""
        self._settings, self._workers = settings, workers

    @property
    def all_down(self) -> bool:
        """Whether no device will ever be ready again."""
        return all(worker.state is DeviceState.DOWN for worker in self._workers)

    @property
    def why_down(self) -> str:
        """The reasons of all devices."""
        return "; ".join(Counter(worker.reason for worker in self._workers)) or "there is no device"

    def spawn(self, worker: WorkerRecord, now: float, out: list[Command]) -> None:
        """Starts the next process of a device."""
        worker.incarnation += 1
        worker.alive, worker.blameless, worker.ended_for, worker.failure = True, False, "", None
        worker.outputs = RegionAllocator(worker.spec.output_bytes)
        worker.alarm = now + self._settings.worker_start_timeout_s
        out.append(SpawnWorker(worker.index, worker.incarnation))
        self.change(worker, DeviceState.STARTING, worker.reason, out)

    def restart(self, worker: WorkerRecord, now: float, out: list[Command]) -> None:
        """Plans the next process of a device, or marks it down."""
        comeback = Comeback.SOON if worker.failure is None else worker.failure.comeback
        if comeback is Comeback.NEVER or worker.failures > self._settings.max_respawns:
            worker.alarm = None
            self.change(worker, DeviceState.DOWN, worker.reason, out)
            return
        worker.alarm = now + self._delay_s(worker.failures, comeback)
        self.change(worker, DeviceState.RESTARTING, worker.reason, out)

    def _delay_s(self, failures: int, comeback: Comeback) -> float:
        """Seconds until the next process of a device."""
        doublings = max(failures - 1, 0)
        longest = self._settings.respawn_backoff_max_s
        if comeback is Comeback.SLOWLY:
            return longest * (1 << min(doublings, MAX_SLOW_DOUBLINGS))
        return min(self._settings.respawn_backoff_s * (1 << min(doublings, 32)), longest)

    def overdue(self, worker: WorkerRecord, now: float, out: list[Command]) -> None:
        """The alarm of a worker has come: it is not open yet, or is to be started again."""
        if worker.alive:
            timeout = self._settings.worker_start_timeout_s
            self.kill(worker, f"the device was not open within {timeout:g} s", out, blameless=False)
        else:
            self.spawn(worker, now, out)

    def kill(self, worker: WorkerRecord, reason: str, out: list[Command], *, blameless: bool) -> None:
        """Ends the process of a device; one that is being ended already is left alone."""
        if worker.state not in (DeviceState.STARTING, DeviceState.READY):
            return
        worker.alarm, worker.blameless, worker.ended_for = None, blameless, reason
        out.append(KillWorker(worker.index, worker.incarnation, reason))
        self.change(worker, DeviceState.RESTARTING, reason, out)

    @staticmethod
    def change(worker: WorkerRecord, state: DeviceState, reason: str, out: list[Command]) -> None:
        """Puts a device into a state and says so."""
        worker.state, worker.reason = state, reason
        out.append(DeviceChanged(worker.index))
