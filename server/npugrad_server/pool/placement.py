"""Where there is room for a call, and what the calls on workers hold. Every budget is changed here alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npugrad_server.pool.claim import Claim

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from npugrad_server.pool.ledger import CallRecord, WorkerRecord


class Placement:
    """Puts calls on workers and takes them off.

    Attributes:
        claim: The worker that is kept free for a call that waits too long.
    """

    def __init__(self, workers: Sequence[WorkerRecord], memory: Mapping[str, int]) -> None:
        """Starts with everything free.

        Args:
            workers: The devices.
            memory: Bytes of each memory that the devices name.
        """
        self._workers = workers
        self._memory = dict(memory)
        self.claim = Claim()
        self._starts = 0

    def place(self, call: CallRecord) -> WorkerRecord | None:
        """Puts a call on the best worker with room for it, its memory taken; None when none has room now."""
        choices = [w for w in self._workers if w.admits(call) and not self.claim.keeps_off(call, w)]
        for worker in sorted(choices, key=lambda w: (call.killed[w.index], len(w.running), w.last_start)):
            if self._memory[worker.spec.memory] < call.request.memory_bytes:
                continue
            region = worker.outputs.allocate(call.request.output_bytes)
            if region is not None:
                call.region, call.arena = region, worker.outputs
                self._join(call, worker)
                return worker
        return None

    def _join(self, call: CallRecord, worker: WorkerRecord) -> None:
        self.claim.drop(call)
        self._starts += 1
        worker.last_start = self._starts
        worker.running[call.id] = call
        self._memory[worker.spec.memory] -= call.request.memory_bytes

    def take_off(self, call: int, worker: WorkerRecord) -> CallRecord:
        """Takes a call off its worker; its outputs stay where they are."""
        record = worker.running.pop(call)
        self._memory[worker.spec.memory] += record.request.memory_bytes
        return record

    def wait(self, call: CallRecord) -> None:
        """There is no room for a call now: it may have to be kept some."""
        self.claim.make(call, self._workers)
