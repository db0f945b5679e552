"""Placement: which devices may take a call, which of them does, and what the calls on workers hold.

Every budget is changed here alone.

Guarantees
    - Calls on a worker never hold more of its own memory, or of the host's, than there is.
    - What a call holds goes back once, when it leaves its worker, however it leaves it.
    - A call whose workspace was refused is placed only where there is room for all of it.
    - A call is never on a device that lacks its operator, nor a deterministic one where nothing is; nor is
      such a device reserved for it. A call that asks for no determinism is on a device that is always
      deterministic only if no other one that has its operator is ready.
    - A call that a device could not take goes to another one as long as one is ready that could hold it, and
      to one that is not exhausted itself before one that is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from npugrad_server.pool.device_memory import LearnedWorkspaces, largest_workspace, workspace_footprint
from npugrad_server.pool.forecast import Forecast
from npugrad_server.pool.types import DeviceState
from npugrad_server.worker.protocol import WorkspaceGranted, WorkspaceRefused

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from npugrad_server.pool.state import CallState, WorkerState

MAX_OVERTAKEN = 16
"""Calls that may overtake one that waits for room before a worker is reserved for it."""
SIMILAR = 1.25
"""Devices whose expected times are within this factor of the least one take turns: a device that is passed
over for a small difference would never get the calls that show it has become the quicker one."""


class Reservation:
    """A worker kept free for a call that was overtaken too often for want of room: at most one at a time.

    It lapses when its worker is not ready any more, or is again without the operator.
    """

    def __init__(self) -> None:
        """Starts with none."""
        self._held: tuple[CallState, WorkerState] | None = None

    def reserve(self, call: CallState, workers: Iterable[WorkerState]) -> None:
        """Reserves one of the workers, all of which can run it, for a call that was overtaken too often."""
        if call.overtaken < MAX_OVERTAKEN:
            return
        ready = [worker for worker in workers if worker.state is DeviceState.READY]
        held = self._current()
        stays = held is not None and not _goes_before(call, held[0])
        # The worker may not be the right one any more.
        if held is not None and stays and (held[0] is not call or held[1] in ready):
            return
        if ready:
            best = min(
                ready, key=lambda w: (call.worker_losses[w.index], w.outputs.used_bytes, len(w.running))
            )
            self._held = (call, best)

    def bars(self, call: CallState, worker: WorkerState) -> bool:
        """Whether the worker is reserved for another call that this one does not go before."""
        held = None if self._held is None else self._current()
        if held is None or held[0] is call or _goes_before(call, held[0]):
            return False
        reserved = held[1]
        same_memory = worker.spec.memory == reserved.spec.memory and call.memory_bytes > 0
        return worker is reserved or same_memory

    def release(self, call: CallState) -> None:
        """The call does not wait any more."""
        if self._held is not None and self._held[0] is call:
            self._held = None

    def _current(self) -> tuple[CallState, WorkerState] | None:
        if self._held is not None:
            call, worker = self._held
            if worker.state is not DeviceState.READY or not worker.may_run(call):
                self._held = None
        return self._held


def _goes_before(call: CallState, held: CallState) -> bool:
    """Whether a call may take what is reserved for another one: a higher priority counts within a tenant."""
    return call.priority > held.priority and call.tenant.name == held.tenant.name


@dataclass(frozen=True)
class Eligibility:
    """Which devices calls of one operator and mode may go to, as long as none of them changes.

    Attributes:
        refusal: Row of the error table and why no device runs such calls; None when one does, or may once
            ready.
        most_bytes: The most of a device's own memory that such a call can have; None where it has no bound,
            or not yet.
        eligible: Devices that run such calls, or may once they are ready.
        preferred: Those of them that such calls go to: any mode will do for a call that asks for none.
        is_confined: Whether some device that is ready is not one of those.
        is_bounded: Whether one of them has memory of its own.
    """

    refusal: tuple[str, str] | None
    most_bytes: int | None
    eligible: tuple[WorkerState, ...]
    preferred: tuple[WorkerState, ...]
    is_confined: bool
    is_bounded: bool


class EligibilityTable(dict[tuple[str, bool], Eligibility]):
    """The eligible devices as they are, by operator and mode; `clear` belongs to every change of one.

    There are as many as operators and modes that calls have come with.
    """

    def __init__(self, workers: Sequence[WorkerState]) -> None:
        """Knows none yet.

        Args:
            workers: The devices.
        """
        super().__init__()
        self._workers = workers

    def __missing__(self, kind: tuple[str, bool]) -> Eligibility:
        """For calls of an operator and mode that nobody has asked for since."""
        self[kind] = found = self.fresh(*kind)
        return found

    def fresh(self, operator: str, deterministic: bool) -> Eligibility:
        """The same, found anew."""
        eligible = tuple(worker for worker in self._workers if worker.runs(operator, deterministic))
        suiting = tuple(worker for worker in eligible if worker.deterministic in (None, deterministic))
        is_ready = any(worker.state is DeviceState.READY for worker in suiting)
        preferred = suiting if is_ready else eligible
        ready = [worker for worker in self._workers if worker.state is DeviceState.READY]
        return Eligibility(
            refusal=self._why_refused(operator, deterministic),
            most_bytes=most_bytes([w for w in self._coming() if not w.why_refuses(operator, deterministic)]),
            eligible=eligible,
            preferred=preferred,
            is_confined=not all(worker in preferred for worker in ready),
            is_bounded=any(worker.memory_bytes is not None for worker in self._workers),
        )

    def why_unavailable(self, operator: str) -> str:
        """Why no device can run an operator; empty when one can, or may once it is ready."""
        reasons = [worker.why_unavailable(operator) for worker in self._coming()]
        return "; ".join(dict.fromkeys(reasons)) if all(reasons) else ""

    def _why_refused(self, operator: str, deterministic: bool) -> tuple[str, str] | None:
        lacking = self.why_unavailable(operator)
        if lacking:
            return "OPERATOR_UNSUPPORTED", f"no device has it: {lacking}"
        reasons = [worker.why_refuses(operator, deterministic) for worker in self._coming()]
        if not reasons or not all(reasons):
            return None
        told = "; ".join(dict.fromkeys(reasons))
        return (
            "DETERMINISM_UNSUPPORTED",
            f"deterministic: found True; expected False on these devices: {told}",
        )

    def _coming(self) -> list[WorkerState]:
        """Devices that are ready, or may be one day."""
        return [worker for worker in self._workers if not worker.damaged]


def most_bytes(workers: Sequence[WorkerState]) -> int | None:
    """The most memory of its own that one of them has; None when one has no bound, or none yet."""
    found = [worker.memory_bytes for worker in workers if worker.memory_bytes is not None]
    return max(found, default=0) if len(found) == len(workers) else None


class Placement:
    """Puts calls on workers and takes them off.

    Attributes:
        reservation: The worker that is kept free for a call that waits too long.
        running: Calls on workers, those that nobody waits for included.
        crowded: Workers that could have taken a call, were there room for its results.
        eligibility: Which devices calls may go to, by operator and mode.
        forecast: When calls would be done.
    """

    def __init__(self, workers: Sequence[WorkerState], memory: Mapping[str, int]) -> None:
        """Starts with everything free.

        Args:
            workers: The devices.
            memory: Bytes of each host memory that the devices name.
        """
        self._workers = workers
        self._memory = dict(memory)
        self._workspaces = LearnedWorkspaces()
        self.eligibility = EligibilityTable(workers)
        self.reservation = Reservation()
        self.forecast = Forecast(workers, self.eligibility)
        self.running = 0
        self.crowded: set[int] = set()
        self._starts = 0

    # -------------------------------------------------------------------------------------------- what can be

    def worker_changed(self) -> None:
        """A device has come into another state, or is found to be another one than before."""
        self.eligibility.clear()

    def why_never(self, call: CallState) -> tuple[str, str] | None:
        """Why a call can run nowhere now: row of the error table and what happened; None when it may."""
        devices = self.eligibility[call.kind]
        if devices.refusal is not None:
            return devices.refusal
        if devices.eligible and not devices.is_bounded:
            return None
        most, found = devices.most_bytes, call.device_bytes
        if most is not None and found > most:
            what = f"found {found} bytes of tensors on the device; expected at most {most}"
            return "CALL_TOO_LARGE", what
        for worker in devices.eligible:
            if worker.could_hold(found):
                return None
        return "NO_DEVICE", "the devices that may run it are down"

    def why_late(self, call: CallState, now: float) -> tuple[str, str] | None:
        """Why a call that could start would be done too late wherever it can go; None when it would not."""
        ready = [worker for worker in self._targets(call) if worker.state is DeviceState.READY]
        return self.forecast.why_late(call, ready, now)

    def is_confined(self, call: CallState) -> bool:
        """Whether some device that is ready is not for it, so that those of another kind may pass it."""
        return self.eligibility[call.kind].is_confined

    def has_other(self, call: CallState) -> bool:
        """Whether a device is ready that could take a call which one could not."""
        return bool(self._others(call))

    def _choices(self, call: CallState) -> Sequence[WorkerState]:
        """Devices that a call may go to, now or once they are ready."""
        if call.declined_by is not None and (others := self._others(call)):
            return others
        devices = self.eligibility[call.kind]
        if not devices.is_bounded or any(w.could_hold(call.device_bytes) for w in devices.preferred):
            return devices.preferred
        return (
            devices.eligible
        )  # where its own kind of device is too small, one that keeps another mode will do

    def _others(self, call: CallState) -> list[WorkerState]:
        """Where a call goes that a device could not take; none for other calls."""
        if call.declined_by is None:
            return []
        ready = [w for w in self._workers if w.state is DeviceState.READY and not w.has_declined(call)]
        return [w for w in ready if w.may_run(call) and w.could_hold(call.device_bytes)]

    def _targets(self, call: CallState) -> Sequence[WorkerState]:
        """Those of its choices worth waiting for."""
        devices = self.eligibility[call.kind]
        if call.declined_by is None and not devices.is_bounded:
            return devices.preferred
        choices = self._choices(call)
        wanted = call.device_bytes + workspace_footprint(self._expected(call))
        targets = [worker for worker in choices if worker.could_hold(wanted)] or choices
        if call.declined_by is None:
            return targets
        # It has one try more: not where it would most likely be declined again.
        return [worker for worker in targets if not worker.exhausted] or targets

    # ------------------------------------------------------------------------------------------- on and off

    def place(self, call: CallState, now: float) -> WorkerState | None:
        """Puts a call on the best worker with room for it, its memory taken; None when none has room now."""
        for worker in self._by_rank(call, now):
            workspace, device_bytes = None, 0
            if worker.memory_bytes is not None:
                workspace = self._workspace_of(call, worker.memory_bytes)
                device_bytes = call.device_bytes + workspace_footprint(workspace)
                if not worker.has_free(device_bytes):
                    continue
            if self._memory[worker.spec.memory] < call.memory_bytes:
                continue
            region = worker.outputs.allocate(call.output_bytes)
            if region is None:
                self.crowded.add(worker.index)
            else:
                call.region, call.arena = region, worker.outputs
                self._join(call, worker, device_bytes, workspace)
                return worker
        return None

    def _by_rank(self, call: CallState, now: float) -> list[WorkerState]:
        """The workers that a call may join now, the best first."""
        choices = []
        targets = self._targets(call)
        for worker in targets:
            if worker.admits(call) and not self.reservation.bars(call, worker):
                choices.append(worker)
        if call.deadline_s is not None and len(targets) > 1:
            choices = [worker for worker in choices if not self.forecast.is_late_on(worker, call, now)]
        if len(choices) > 1:
            finish_s = {worker.index: self.forecast.finish_on(worker, call, now) for worker in choices}
            similar_s = SIMILAR * min((seconds for seconds in finish_s.values() if seconds), default=0.0)
            late_s = {
                index: seconds if seconds > similar_s and self.forecast.passes_over(index, call) else 0.0
                for index, seconds in finish_s.items()
            }
            # A device that fails calls at once would else be the least busy one.
            choices.sort(
                key=lambda worker: (
                    call.worker_losses[worker.index],
                    worker.exhausted,
                    late_s[worker.index],
                    len(worker.running),
                    worker.last_start,
                )
            )
        return choices

    def _workspace_of(self, call: CallState, memory_bytes: int) -> int:
        """Workspace to set aside for a call on a device that has so much memory of its own."""
        expected = self._expected(call)
        wanted = call.device_bytes + workspace_footprint(expected)
        if any(choice.could_hold(wanted) for choice in self._choices(call)):
            return expected
        # What was learned may be true no more. It gets all there is, and its first phase has the last word.
        return largest_workspace(memory_bytes - call.device_bytes)

    def _expected(self, call: CallState) -> int:
        if call.workspace_bytes is not None:
            return call.workspace_bytes
        return self._workspaces.expect(call.workspace_key)

    def _join(self, call: CallState, worker: WorkerState, device_bytes: int, workspace: int | None) -> None:
        self.reservation.release(call)
        self._starts += 1
        worker.last_start = self._starts
        worker.running[call.id] = call
        self.running += 1
        self._memory[worker.spec.memory] -= call.memory_bytes
        worker.memory_used_bytes += device_bytes
        call.held_bytes, call.set_aside_bytes, call.too_large = device_bytes, workspace, False

    def take_off(self, number: int, worker: WorkerState) -> CallState:
        """Takes a call off its worker; its outputs stay where they are."""
        call = worker.running.pop(number)
        self.running -= 1
        self._memory[worker.spec.memory] += call.memory_bytes
        worker.memory_used_bytes -= call.held_bytes
        call.held_bytes, call.set_aside_bytes = 0, None
        return call

    def wait(self, call: CallState) -> None:
        """There is no room for a call now: some may have to be reserved for it."""
        self.reservation.reserve(call, self._targets(call))

    # --------------------------------------------------------------------------------------------- workspaces

    def learn(self, call: CallState, nbytes: int) -> None:
        """A device said how much workspace a call needs."""
        if call.workspace_key is not None:
            self._workspaces.learn(call.workspace_key, nbytes)

    def extend(
        self, call: CallState, worker: WorkerState, nbytes: int
    ) -> WorkspaceGranted | WorkspaceRefused:
        """Sets aside all the workspace that a running call needs, if there is room for it now."""
        if call.set_aside_bytes is None:
            return WorkspaceGranted(call.id)  # nobody counts it
        self.learn(call, nbytes)
        call.too_large = False
        wanted = call.device_bytes + workspace_footprint(nbytes)
        more = wanted - call.held_bytes
        if not call.orphaned and (more <= 0 or worker.has_free(more)):
            if more > 0:
                worker.memory_used_bytes += more
                call.held_bytes, call.set_aside_bytes = wanted, nbytes
            return WorkspaceGranted(call.id)
        choices = [*self._choices(call), worker]
        call.too_large = not call.orphaned and not any(choice.could_hold(wanted) for choice in choices)
        most = largest_workspace((most_bytes(choices) or 0) - call.device_bytes)
        return WorkspaceRefused(call.id, call.too_large, most)
