"""Where there is room for a call, and what the calls on workers hold. Every budget is changed here alone.

Guarantees
    - Calls on a worker never hold more of its own memory, or of the host's, than there is.
    - What a call holds goes back once, when it leaves its worker, however it leaves it.
    - A call whose workspace was refused is placed only where there is room for all of it.
    - A call is never on a device that lacks its operator, nor a deterministic one where nothing is; nor is it
      kept one free. A call that asks for no determinism is on a device that is always deterministic only if
      no other one that has its operator is ready.
    - A call that a device could not take goes to another one as long as one is ready that could hold it, and
      to one that is not short itself before one that is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npugrad_server.pool.claim import Claim
from npugrad_server.pool.device_memory import largest_workspace, workspace_footprint
from npugrad_server.pool.offers import Offers, most_bytes
from npugrad_server.pool.types import DeviceState
from npugrad_server.pool.workspaces import LearnedWorkspaces
from npugrad_server.worker.protocol import WorkspaceGranted, WorkspaceRefused

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from npugrad_server.pool.ledger import CallRecord, WorkerRecord


class Placement:
    """Puts calls on workers and takes them off.

    Attributes:
        claim: The worker that is kept free for a call that waits too long.
        running: Calls on workers, those that nobody waits for included.
        offers: What the devices have for calls, by operator and mode.
    """

    def __init__(self, workers: Sequence[WorkerRecord], memory: Mapping[str, int]) -> None:
        """Starts with everything free.

        Args:
            workers: The devices.
            memory: Bytes of each host memory that the devices name.
        """
        self._workers = workers
        self._memory = dict(memory)
        self._workspaces = LearnedWorkspaces()
        self.offers = Offers(workers)
        self.claim = Claim()
        self.running = 0
        self._starts = 0

    # -------------------------------------------------------------------------------------------- what can be

    def worker_changed(self) -> None:
        """A device has come into another state, or is found to be another one than before."""
        self.offers.clear()

    def why_never(self, call: CallRecord) -> tuple[str, str] | None:
        """Why a call can run nowhere now: row of the error table and what happened; None when it may."""
        offer = self.offers[call.kind]
        if offer.refused is not None:
            return offer.refused
        if offer.able and not offer.is_bounded:
            return None
        most, found = offer.most_bytes, call.device_bytes
        if most is not None and found > most:
            what = f"found {found} bytes of tensors on the device; expected at most {most}"
            return "CALL_TOO_LARGE", what
        for worker in offer.able:
            if worker.could_hold(found):
                return None
        return "NO_DEVICE", "the devices that may run it are down"

    def is_confined(self, call: CallRecord) -> bool:
        """Whether some device that is ready is not for it, so that those of another kind may pass it."""
        return self.offers[call.kind].is_confined

    def has_other(self, call: CallRecord) -> bool:
        """Whether a device is ready that could take a call which one could not."""
        return bool(self._others(call))

    def _choices(self, call: CallRecord) -> Sequence[WorkerRecord]:
        """Devices that a call may go to, now or once they are ready."""
        if call.declined_by is not None and (others := self._others(call)):
            return others
        offer = self.offers[call.kind]
        if not offer.is_bounded or any(w.could_hold(call.device_bytes) for w in offer.fitting):
            return offer.fitting
        return offer.able  # where its own kind of device is too small, one that keeps another mode will do

    def _others(self, call: CallRecord) -> list[WorkerRecord]:
        """Where a call goes that a device could not take; none for other calls."""
        if call.declined_by is None:
            return []
        ready = [w for w in self._workers if w.state is DeviceState.READY and not w.has_declined(call)]
        return [w for w in ready if w.may_run(call) and w.could_hold(call.device_bytes)]

    def _targets(self, call: CallRecord) -> Sequence[WorkerRecord]:
        """Those of its choices worth waiting for."""
        offer = self.offers[call.kind]
        if call.declined_by is None and not offer.is_bounded:
            return offer.fitting
        choices = self._choices(call)
        wanted = call.device_bytes + workspace_footprint(self._expected(call))
        targets = [worker for worker in choices if worker.could_hold(wanted)] or choices
        if call.declined_by is None:
            return targets
        # It has one try more: not where it would most likely be declined again.
        return [worker for worker in targets if not worker.short] or targets

    # ------------------------------------------------------------------------------------------- on and off

    def place(self, call: CallRecord) -> WorkerRecord | None:
        """Puts a call on the best worker with room for it, its memory taken; None when none has room now."""
        for worker in self._by_rank(call):
            workspace, device_bytes = None, 0
            if worker.memory_bytes is not None:
                workspace = self._workspace_of(call, worker.memory_bytes)
                device_bytes = call.device_bytes + workspace_footprint(workspace)
                if not worker.has_free(device_bytes):
                    continue
            if self._memory[worker.spec.memory] < call.memory_bytes:
                continue
            region = worker.outputs.allocate(call.output_bytes)
            if region is not None:
                call.region, call.arena = region, worker.outputs
                self._join(call, worker, device_bytes, workspace)
                return worker
        return None

    def _by_rank(self, call: CallRecord) -> list[WorkerRecord]:
        """The workers that a call may join now, the best first."""
        choices = []
        for worker in self._targets(call):
            if worker.admits(call) and not self.claim.keeps_off(call, worker):
                choices.append(worker)
        if len(choices) > 1:
            choices.sort(key=lambda worker: _rank(call, worker))
        return choices

    def _workspace_of(self, call: CallRecord, memory_bytes: int) -> int:
        """Workspace to set aside for a call on a device that has so much memory of its own."""
        expected = self._expected(call)
        wanted = call.device_bytes + workspace_footprint(expected)
        if any(choice.could_hold(wanted) for choice in self._choices(call)):
            return expected
        # What was learned may be true no more. It gets all there is, and its first phase has the last word.
        return largest_workspace(memory_bytes - call.device_bytes)

    def _expected(self, call: CallRecord) -> int:
        if call.workspace_bytes is not None:
            return call.workspace_bytes
        return self._workspaces.expect(call.workspace_key)

    def _join(self, call: CallRecord, worker: WorkerRecord, device_bytes: int, workspace: int | None) -> None:
        self.claim.drop(call)
        self._starts += 1
        worker.last_start = self._starts
        worker.running[call.id] = call
        self.running += 1
        self._memory[worker.spec.memory] -= call.memory_bytes
        worker.memory_used_bytes += device_bytes
        call.held_bytes, call.set_aside_bytes, call.too_large = device_bytes, workspace, False

    def take_off(self, call: int, worker: WorkerRecord) -> CallRecord:
        """Takes a call off its worker; its outputs stay where they are."""
        record = worker.running.pop(call)
        self.running -= 1
        self._memory[worker.spec.memory] += record.memory_bytes
        worker.memory_used_bytes -= record.held_bytes
        record.held_bytes, record.set_aside_bytes = 0, None
        return record

    def wait(self, call: CallRecord) -> None:
        """There is no room for a call now: it may have to be kept some."""
        self.claim.make(call, self._targets(call))

    # --------------------------------------------------------------------------------------------- workspaces

    def learn(self, call: CallRecord, nbytes: int) -> None:
        """A device said how much workspace a call needs."""
        if call.workspace_key is not None:
            self._workspaces.learn(call.workspace_key, nbytes)

    def extend(
        self, call: CallRecord, worker: WorkerRecord, nbytes: int
    ) -> WorkspaceGranted | WorkspaceRefused:
        """Sets aside all the workspace that a running call needs, if there is room for it now."""
        if call.set_aside_bytes is None:
            return WorkspaceGranted(call.id)  # nobody counts it
        self.learn(call, nbytes)
        call.too_large = False
        wanted = call.device_bytes + workspace_footprint(nbytes)
        more = wanted - call.held_bytes
        if not call.void and (more <= 0 or worker.has_free(more)):
            if more > 0:
                worker.memory_used_bytes += more
                call.held_bytes, call.set_aside_bytes = wanted, nbytes
            return WorkspaceGranted(call.id)
        choices = [*self._choices(call), worker]
        call.too_large = not call.void and not any(choice.could_hold(wanted) for choice in choices)
        most = largest_workspace((most_bytes(choices) or 0) - call.device_bytes)
        return WorkspaceRefused(call.id, call.too_large, most)


def _rank(call: CallRecord, worker: WorkerRecord) -> tuple[int, bool, int, int]:
    """The smallest is the best: a device that fails calls at once would else be the least busy one."""
    return call.killed[worker.index], worker.short, len(worker.running), worker.last_start
