"""A worker kept free for a call that was overtaken too often for want of room."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npugrad_server.pool.types import DeviceState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from npugrad_server.pool.ledger import CallRecord, WorkerRecord

MAX_OVERTAKEN = 16
"""Calls that may overtake one that waits for room before a worker is kept free for it."""


class Claim:
    """At most one at a time; void when its worker is not ready any more, or is again without the operator."""

    def __init__(self) -> None:
        """Starts with none."""
        self._held: tuple[CallRecord, WorkerRecord] | None = None

    def make(self, call: CallRecord, workers: Iterable[WorkerRecord]) -> None:
        """Keeps one of the workers, all of which can run it, free for a call that was overtaken too often."""
        if call.overtaken < MAX_OVERTAKEN:
            return
        ready = [worker for worker in workers if worker.state is DeviceState.READY]
        held = self._current()
        stays = held is not None and held[0].priority >= call.priority
        # It may have been kept one that is not the right one any more.
        if held is not None and stays and (held[0] is not call or held[1] in ready):
            return
        if ready:
            best = min(ready, key=lambda w: (call.killed[w.index], w.outputs.used_bytes, len(w.running)))
            self._held = (call, best)

    def keeps_off(self, call: CallRecord, worker: WorkerRecord) -> bool:
        """Whether the worker is kept free for another call, of no lower priority."""
        held = None if self._held is None else self._current()
        if held is None or held[0] is call or held[0].priority < call.priority:
            return False
        claimed = held[1]
        same_memory = worker.spec.memory == claimed.spec.memory and call.memory_bytes > 0
        return worker is claimed or same_memory

    def drop(self, call: CallRecord) -> None:
        """The call does not wait any more."""
        if self._held is not None and self._held[0] is call:
            self._held = None

    def _current(self) -> tuple[CallRecord, WorkerRecord] | None:
        if self._held is not None:
            call, worker = self._held
            if worker.state is not DeviceState.READY or not worker.may_run(call):
                self._held = None
        return self._held
