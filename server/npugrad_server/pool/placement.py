"""Placement: which devices may take a call, which one does, and what the calls on workers hold.

All budgets are changed only here.

Guarantees
    - Calls on a worker never hold more of its own memory, or of the host's, than there is.
    - What a call holds is freed once, when it leaves its worker for whatever reason.
    - A call whose workspace was refused is placed only where there is room for all of it.
    - A call is never placed on a device that lacks its operator, nor a deterministic call on a device that
      cannot run it deterministically; nor is such a device reserved for it. A call that does not ask for
      determinism goes to a device that is always deterministic only if no other device that has its operator
      is ready.
    - A call that a device could not take goes to another one as long as a ready one could hold it, and to an
      exhausted one only if there is no other.
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

    from npugrad_server.pool.isolation import Isolation
    from npugrad_server.pool.state import CallState, WorkerState

MAX_OVERTAKEN = 16
"""Calls that may overtake one that waits for room before a worker is reserved for it."""
SIMILAR = 1.25
"""Devices whose expected times are within this factor of the shortest take turns: a device passed over for a
small difference would never get the calls that show that it has become the faster one."""


class Reservation:
    """A worker kept free for a call that lacked room and was overtaken too often; at most one at a time.

    It lapses when the worker is no longer ready, or can no longer run the call.
    """

    def __init__(self) -> None:
        """Starts with none."""
        self._held: tuple[CallState, WorkerState] | None = None

    def reserve(self, call: CallState, workers: Iterable[WorkerState]) -> None:
        """Reserves one of the workers, all able to run it, for a call that was overtaken too often."""
        if call.overtaken < MAX_OVERTAKEN:
            return
        ready = [worker for worker in workers if worker.state is DeviceState.READY]
        held = self._current()
        stays = held is not None and not _goes_before(call, held[0])
        # A call's own reservation moves if its worker is not among those given any more.
        if held is not None and stays and (held[0] is not call or held[1] in ready):
            return
        if ready:
            best = min(
                ready, key=lambda w: (call.worker_losses[w.index], w.outputs.used_bytes, len(w.running))
            )
            self._held = (call, best)

    def bars(self, call: CallState, worker: WorkerState) -> bool:
        """Whether a reservation for another call, which this one may not override, bars the worker."""
        held = None if self._held is None else self._current()
        if held is None or held[0] is call or _goes_before(call, held[0]):
            return False
        reserved = held[1]
        same_memory = worker.spec.memory == reserved.spec.memory and call.memory_bytes > 0
        return worker is reserved or same_memory

    def release(self, call: CallState) -> None:
        """Drops the reservation for a call that no longer waits."""
        if self._held is not None and self._held[0] is call:
            self._held = None

    def _current(self) -> tuple[CallState, WorkerState] | None:
        if self._held is not None:
            call, worker = self._held
            if worker.state is not DeviceState.READY or not worker.may_run(call):
                self._held = None
        return self._held


def _goes_before(call: CallState, held: CallState) -> bool:
    """Whether a call may override another's reservation: only by a higher priority within one tenant."""
    return call.priority > held.priority and call.tenant.name == held.tenant.name


@dataclass(frozen=True)
class Eligibility:
    """Which devices calls of one operator and mode may go to; valid until a device changes.

    Attributes:
        refusal: Row of the error table and why no device runs such calls; None if one does, or may once
            ready.
        most_bytes: The most of a device's own memory that such a call can get; None if unbounded, or not
            known yet.
        eligible: Devices that run such calls, or may once they are ready.
        preferred: Those of them that such calls go to: devices whose mode suits if one is ready, else any.
        is_confined: Whether some ready device is not among the preferred ones.
        is_bounded: Whether any device has memory of its own.
    """

    refusal: tuple[str, str] | None
    most_bytes: int | None
    eligible: tuple[WorkerState, ...]
    preferred: tuple[WorkerState, ...]
    is_confined: bool
    is_bounded: bool


class EligibilityTable(dict[tuple[str, bool], Eligibility]):
    """Cache of the eligible devices by operator and mode; `clear` it whenever a device changes.

    It holds one item for each operator and mode that calls have come with.
    """

    def __init__(self, workers: Sequence[WorkerState]) -> None:
        """Starts empty.

        Args:
            workers: The devices.
        """
        super().__init__()
        self._workers = workers

    def __missing__(self, kind: tuple[str, bool]) -> Eligibility:
        """Computes and caches the eligibility for an operator and mode."""
        self[kind] = found = self.fresh(*kind)
        return found

    def fresh(self, operator: str, deterministic: bool) -> Eligibility:
        """Computes the eligibility for an operator and mode."""
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
        """Returns why no device can run an operator; empty if one can, or may once it is ready."""
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
        """Returns the devices that are ready, or may become so."""
        return [worker for worker in self._workers if not worker.damaged]


def most_bytes(workers: Sequence[WorkerState]) -> int | None:
    """Returns the largest own memory of the devices; None if one's is unbounded, or not known yet."""
    found = [worker.memory_bytes for worker in workers if worker.memory_bytes is not None]
    return max(found, default=0) if len(found) == len(workers) else None


class Placement:
    """Puts calls on workers and takes them off.

    Attributes:
        reservation: The worker that is kept free for a call that waits too long.
        running: Calls on workers, orphaned ones included.
        crowded: Workers that could have taken a call if they had had room for its results.
        eligibility: Which devices calls may go to, by operator and mode.
        forecast: When calls would be done.
    """

    def __init__(
        self, workers: Sequence[WorkerState], memory: Mapping[str, int], isolation: Isolation
    ) -> None:
        """Starts with everything free.

        Args:
            workers: The devices.
            memory: Bytes of each host memory that the devices name.
            isolation: Says where suspect calls may run.
        """
        self._workers, self._isolation = workers, isolation
        self._memory = dict(memory)
        self._workspaces = LearnedWorkspaces()
        self.eligibility = EligibilityTable(workers)
        self.reservation = Reservation()
        self.forecast = Forecast(workers, self.eligibility)
        self.running = 0
        self.crowded: set[int] = set()
        self._starts = 0

    # ------------------------------------------------------------------------------------------ possibilities

    def worker_changed(self) -> None:
        """Forgets the eligible devices, because one has changed its state or its properties."""
        self.eligibility.clear()

    def why_never(self, call: CallState) -> tuple[str, str] | None:
        """Returns a row of the error table and why a call can run nowhere now; None if it may run."""
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
        """Returns why a call that could start would be late on every device it can go to, or None."""
        ready = [worker for worker in self._targets(call) if worker.state is DeviceState.READY]
        return self.forecast.why_late(call, ready, now)

    def is_confined(self, call: CallState) -> bool:
        """Whether some ready device is not for this call, so that calls of another kind may pass it."""
        return self.eligibility[call.kind].is_confined or self._isolation.isolates(call)

    def has_other(self, call: CallState) -> bool:
        """Whether another ready device could take a call that one device could not take."""
        return bool(self._others(call))

    def _choices(self, call: CallState) -> Sequence[WorkerState]:
        """Returns the devices that a call may go to, now or once they are ready."""
        if call.declined_by is not None and (others := self._others(call)):
            return others
        devices = self.eligibility[call.kind]
        if not devices.is_bounded or any(w.could_hold(call.device_bytes) for w in devices.preferred):
            return devices.preferred
        return devices.eligible  # if the preferred ones are too small, one that keeps another mode will do

    def _others(self, call: CallState) -> list[WorkerState]:
        """Returns where a call that a device could not take may go; none for other calls."""
        if call.declined_by is None:
            return []
        ready = [w for w in self._workers if w.state is DeviceState.READY and not w.has_declined(call)]
        return [w for w in ready if w.may_run(call) and w.could_hold(call.device_bytes)]

    def _targets(self, call: CallState) -> Sequence[WorkerState]:
        """Returns the choices that are worth waiting for."""
        devices = self.eligibility[call.kind]
        if call.declined_by is None and not devices.is_bounded:
            return devices.preferred
        choices = self._choices(call)
        wanted = call.device_bytes + workspace_footprint(self._expected(call))
        targets = [worker for worker in choices if worker.could_hold(wanted)] or choices
        if call.declined_by is None:
            return targets
        # It has one more try: not where it would most likely be declined again.
        return [worker for worker in targets if not worker.exhausted] or targets

    # ------------------------------------------------------------------------------------------- on and off

    def place(self, call: CallState, now: float) -> WorkerState | None:
        """Puts a call on the best worker with room and takes its memory; None if none has room now."""
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
        """Returns the workers that a call may join now, the best first."""
        choices = []
        targets = self._targets(call)
        for worker in targets:
            if self._isolation.admits(call, worker) and not self.reservation.bars(call, worker):
                choices.append(worker)
        choices = self._left_by_others(call, choices, now)
        if call.deadline_s is not None and len(targets) > 1:
            choices = [worker for worker in choices if not self.forecast.is_late_on(worker, call, now)]
        if len(choices) > 1:
            finish_s = {worker.index: self.forecast.finish_on(worker, call, now) for worker in choices}
            similar_s = SIMILAR * min((seconds for seconds in finish_s.values() if seconds), default=0.0)
            late_s = {
                index: seconds if seconds > similar_s and self.forecast.passes_over(index, call) else 0.0
                for index, seconds in finish_s.items()
            }
            # Losses first: otherwise a device that fails calls at once would look the least busy.
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
        """Returns the workspace to set aside for a call on a device with so much memory of its own."""
        expected = self._expected(call)
        wanted = call.device_bytes + workspace_footprint(expected)
        if any(choice.could_hold(wanted) for choice in self._choices(call)):
            return expected
        # What was learned may be outdated. It gets all there is, and its first phase has the last word.
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

    def wait(self, call: CallState, now: float) -> None:
        """Notes that there is no room for a call now, and reserves a worker if it was overtaken too often."""
        targets = self._left_by_others(call, self._targets(call), now)
        if targets:
            self.reservation.reserve(call, targets)
        else:
            self.reservation.release(call)

    def _left_by_others(
        self, call: CallState, workers: Sequence[WorkerState], now: float
    ) -> list[WorkerState]:
        """Returns the workers that a call may take as far as isolation is concerned."""
        devices = self.eligibility[call.kind].eligible
        return [w for w in workers if self._isolation.leaves_enough(call, w, devices, now)]

    # --------------------------------------------------------------------------------------------- workspaces

    def learn(self, call: CallState, nbytes: int) -> None:
        """Learns how much workspace a call needs, as a device reported."""
        if call.workspace_key is not None:
            self._workspaces.learn(call.workspace_key, nbytes)

    def extend(
        self, call: CallState, worker: WorkerState, nbytes: int
    ) -> WorkspaceGranted | WorkspaceRefused:
        """Sets aside all the workspace that a running call needs, if there is room for it now."""
        if call.set_aside_bytes is None:
            return WorkspaceGranted(call.id)  # its workspace is not counted
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
