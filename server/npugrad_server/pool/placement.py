"""Where there is room for a call, and what the calls on workers hold. Every budget is changed here alone.

Guarantees
    - Calls on a worker never hold more of its own memory, or of the host's, than there is.
    - What a call holds goes back once, when it leaves its worker, however it leaves it.
    - A call whose workspace was refused is placed only where there is room for all of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npugrad_server.pool.claim import Claim
from npugrad_server.pool.device_memory import largest_workspace, workspace_footprint
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
        self.claim = Claim()
        self._starts = 0

    # -------------------------------------------------------------------------------------------- what can be

    @property
    def most_device_bytes(self) -> int | None:
        """The most of a device's own memory that a call can have; None where it has no bound, or not yet."""
        most = 0
        for worker in self._workers:
            if worker.state is not DeviceState.DOWN:
                if worker.memory_bytes is None:
                    return None
                most = max(most, worker.memory_bytes)
        return most

    def why_never(self, call: CallRecord) -> str:
        """Why a call can run nowhere; empty when it can, or may."""
        most, found = self.most_device_bytes, call.request.device_bytes
        if most is None or found <= most:
            return ""
        return f"found {found} bytes of tensors on the device; expected at most {most}"

    # ------------------------------------------------------------------------------------------- on and off

    def place(self, call: CallRecord) -> WorkerRecord | None:
        """Puts a call on the best worker with room for it, its memory taken; None when none has room now."""
        choices = [w for w in self._workers if w.admits(call) and not self.claim.keeps_off(call, w)]
        for worker in sorted(choices, key=lambda w: (call.killed[w.index], len(w.running), w.last_start)):
            workspace = self._workspace_of(call, worker)
            device_bytes = 0
            if workspace is not None:
                device_bytes = call.request.device_bytes + workspace_footprint(workspace)
            if not worker.has_free(device_bytes) or not self._has_free(worker, call):
                continue
            region = worker.outputs.allocate(call.request.output_bytes)
            if region is not None:
                call.region, call.arena = region, worker.outputs
                self._join(call, worker, device_bytes, workspace)
                return worker
        return None

    def _has_free(self, worker: WorkerRecord, call: CallRecord) -> bool:
        return self._memory[worker.spec.memory] >= call.request.memory_bytes

    def _workspace_of(self, call: CallRecord, worker: WorkerRecord) -> int | None:
        """Workspace to set aside for a call; None where the device has no memory of its own."""
        if worker.memory_bytes is None:
            return None
        expected = self._expected(call)
        if self._somewhere(call.request.device_bytes + workspace_footprint(expected)):
            return expected
        # What was learned may be true no more. It gets all there is, and its first phase has the last word.
        return largest_workspace(worker.memory_bytes - call.request.device_bytes)

    def _expected(self, call: CallRecord) -> int:
        if call.workspace_bytes is not None:
            return call.workspace_bytes
        return self._workspaces.expect(call.request.workspace_key)

    def _somewhere(self, nbytes: int) -> bool:
        """Whether any device could have so much of its own memory free."""
        return any(w.state is not DeviceState.DOWN and w.could_hold(nbytes) for w in self._workers)

    def _join(self, call: CallRecord, worker: WorkerRecord, device_bytes: int, workspace: int | None) -> None:
        self.claim.drop(call)
        self._starts += 1
        worker.last_start = self._starts
        worker.running[call.id] = call
        self._memory[worker.spec.memory] -= call.request.memory_bytes
        worker.memory_used_bytes += device_bytes
        call.device_bytes, call.set_aside_bytes = device_bytes, workspace

    def take_off(self, call: int, worker: WorkerRecord) -> CallRecord:
        """Takes a call off its worker; its outputs stay where they are."""
        record = worker.running.pop(call)
        self._memory[worker.spec.memory] += record.request.memory_bytes
        worker.memory_used_bytes -= record.device_bytes
        record.device_bytes, record.set_aside_bytes = 0, None
        return record

    def wait(self, call: CallRecord) -> None:
        """There is no room for a call now: it may have to be kept some."""
        wanted = call.request.device_bytes + workspace_footprint(self._expected(call))
        roomy = [worker for worker in self._workers if worker.could_hold(wanted)]
        self.claim.make(call, roomy or self._workers)

    # --------------------------------------------------------------------------------------------- workspaces

    def learn(self, call: CallRecord, nbytes: int) -> None:
        """A device said how much workspace a call needs."""
        if call.request.workspace_key is not None:
            self._workspaces.learn(call.request.workspace_key, nbytes)

    def extend(
        self, call: CallRecord, worker: WorkerRecord, nbytes: int
    ) -> WorkspaceGranted | WorkspaceRefused:
        """Sets aside all the workspace that a running call needs, if there is room for it now."""
        if call.set_aside_bytes is None:
            return WorkspaceGranted(call.id)  # nobody counts it
        self.learn(call, nbytes)
        wanted = call.request.device_bytes + workspace_footprint(nbytes)
        more = wanted - call.device_bytes
        if not call.void and (more <= 0 or worker.has_free(more)):
            if more > 0:
                worker.memory_used_bytes += more
                call.device_bytes, call.set_aside_bytes = wanted, nbytes
            return WorkspaceGranted(call.id)
        final = not call.void and not self._somewhere(wanted)
        most = largest_workspace((self.most_device_bytes or 0) - call.request.device_bytes)
        return WorkspaceRefused(call.id, final, most)
