"""Queries that ask devices how much workspace a call would need. They reserve nothing."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from npugrad_server.pool.types import DeviceState
from npugrad_server.worker.protocol import AskWorkspace, WorkspaceFound

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npugrad.meta import CallMeta
    from npugrad.operator import OpRecord
    from npugrad_server.pool.fleet import Fleet
    from npugrad_server.pool.scheduler import Scheduler
    from npugrad_server.worker.protocol import CallDone, CallFailed

_log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 5.0
"""Seconds a device has to answer; it may be busy with a call on every stream."""


class WorkspaceQueries:
    """Asks workers, and passes each answer to whoever waits for it. On the pool's event loop."""

    def __init__(self, fleet: Fleet, scheduler: Scheduler, numbers: Iterator[int]) -> None:
        """Asks nothing yet.

        Args:
            fleet: The processes.
            scheduler: Knows which of them are ready.
            numbers: Numbers that no call uses.
        """
        self._fleet, self._scheduler, self._numbers = fleet, scheduler, numbers
        self._open: dict[int, tuple[int, int, asyncio.Future[int | None]]] = {}

    async def workspace_bytes(
        self, record: OpRecord, call: CallMeta, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> int | None:
        """Workspace that a legal call would need; None when no device can tell now.

        Args:
            record: The operator.
            call: Metas and attributes.
            timeout_s: Seconds to wait for the answer.
        """
        worker = self._least_busy(record.name)
        if worker is None:
            return None
        number, process = next(self._numbers), self._fleet.process(worker)
        future: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._open[number] = (worker, process.incarnation, future)
        process.send(AskWorkspace(number, record.name, call))
        try:
            return await asyncio.wait_for(future, timeout_s)
        except asyncio.TimeoutError:
            return None
        finally:
            del self._open[number]

    def _least_busy(self, operator: str) -> int | None:
        """The least busy device with memory of its own, and thus a first phase to ask."""
        able = []
        for worker in self._scheduler.workers:
            info = self._fleet.devices[worker.index].info
            if worker.state is not DeviceState.READY or info is None or info.memory_bytes is None:
                continue
            if operator not in info.unavailable:
                able.append(worker)
        return min(able, key=lambda worker: len(worker.running)).index if able else None

    def take(self, answer: WorkspaceFound | CallDone | CallFailed) -> bool:
        """Takes the answer to a query; returns whether it was one."""
        if answer.call not in self._open:
            return False
        if not isinstance(answer, WorkspaceFound):
            _log.error("GetWorkspaceSize rejected a call that passed validation: %s", answer)
        self._settle(answer.call, answer.workspace_bytes if isinstance(answer, WorkspaceFound) else None)
        return True

    def lost(self, worker: int, incarnation: int) -> None:
        """A process has ended: it answers no more queries."""
        for number, (asked, its_incarnation, _) in list(self._open.items()):
            if (asked, its_incarnation) == (worker, incarnation):
                self._settle(number, None)

    def _settle(self, number: int, workspace_bytes: int | None) -> None:
        *_, future = self._open[number]
        if not future.done():
            future.set_result(workspace_bytes)
