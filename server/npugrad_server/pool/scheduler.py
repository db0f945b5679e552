"""Decides which call runs where and when: events in, commands out.

No clock, no thread, no socket: each event brings the time, and `next_alarm` says when `tick` is due. The
driver carries out the commands in order.

Guarantees
    - A call gets exactly one `CompleteCall` or `FailCall`, unless the caller cancelled or closed it first.
    - Every call gets exactly one `ReleaseCall`, once it is closed and no worker touches its memory.
    - A call that runs for longer than `run_limit_s` and its grace has its worker killed, and is not retried.
    - A call starts at most `max_attempts` times, not counting workers that were killed from outside or died
      together, never past its deadline and never on a device that lacks its operator or its mode. Once a
      device failed under it, it is not started again after `call_lifecycle.SUSPECT_ATTEMPTS` such deaths.
    - Calls that may kill workers run isolated, and leave devices to others (`isolation`). Calls whose circuit
      is open (`circuit_breaker`) do not start, except for one trial at a time.
    - A call that a device cannot take now (`call_lifecycle.EXHAUSTION_REASONS`) is tried once on another
      device, if there is one; its caller gets the second answer. The first device is chosen last until its
      next success.
    - Tenants with calls waiting get device time in proportion to their weights (`fair_queue`). Priorities
      and labels order calls only within a tenant, and no priority starves (`queues.MAX_PASSED`).
    - A call for which there is no room is overtaken by at most `placement.MAX_OVERTAKEN` calls behind it in
      the queue; then a worker is reserved for it, which only calls of a higher priority of its own tenant may
      take first.
    - A tenant's calls of one label and priority start in order, except that calls of another operator or mode
      may pass one that has to wait for devices that run its own.
    - Calls never hold more of a device's own memory than it has, workspaces included from the moment their
      size is known; what a call holds is given back once.
    - A call whose workspace found no room waits at the front of its lane, as if untried, for enough room.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npugrad_server.pool.call_lifecycle import CallLifecycle
from npugrad_server.pool.circuit_breaker import Death
from npugrad_server.pool.commands import CompleteCall, MakeRoom, PostponeCall, TellWorker
from npugrad_server.pool.isolation import Isolation
from npugrad_server.pool.placement import Placement
from npugrad_server.pool.quarantine import Quarantine
from npugrad_server.pool.regions import RegionAllocator
from npugrad_server.pool.state import CallStage, WorkerState
from npugrad_server.pool.types import DeviceState
from npugrad_server.pool.worker_lifecycle import WorkerLifecycle

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from npugrad_server.pool.commands import Command, Failure, WorkerSpec
    from npugrad_server.pool.state import CallState
    from npugrad_server.pool.types import PoolSettings
    from npugrad_server.worker.canary_messages import CanaryRun


class Scheduler:
    """The state of all calls and workers; every event is a method that returns the resulting commands.

    Attributes:
        workers: The devices.
        eligibility: Which devices calls may go to, by operator and mode.
        circuits: Circuit breaker for calls that killed workers.
        forecast: Predicts when calls would be done.
        queue: Calls that wait for a worker.
    """

    def __init__(
        self, settings: PoolSettings, workers: Sequence[WorkerSpec], memory: Mapping[str, int]
    ) -> None:
        """Starts with no process.

        Args:
            settings: Times and limits.
            workers: The devices.
            memory: Bytes of each host memory named in the devices' specs.
        """
        self.workers = [WorkerState(index, spec) for index, spec in enumerate(workers)]
        isolation = self._isolation = Isolation(settings.circuit_deaths)
        self.queue, self.circuits = isolation.queue, isolation.circuits
        self._placement = Placement(self.workers, memory, isolation)
        self.eligibility, self.forecast = self._placement.eligibility, self._placement.forecast
        self._worker_lifecycle = WorkerLifecycle(settings, self.workers, self._placement.worker_changed)
        self._quarantine = Quarantine(settings, self._worker_lifecycle)
        self._call_lifecycle = CallLifecycle(
            settings, self.workers, self._placement, self._worker_lifecycle, isolation
        )
        self._calls, self._alarms = self._call_lifecycle.calls, self._call_lifecycle.alarms

    # ------------------------------------------------------------------------------ what is seen from outside

    @property
    def queue_depth(self) -> int:
        """Calls that wait for a worker."""
        return self.queue.count

    @property
    def running(self) -> int:
        """Calls on workers, orphaned ones included."""
        return self._placement.running

    @property
    def output_used_bytes(self) -> int:
        """Bytes of all regions that calls hold, including those in arenas of dead processes."""
        return sum(call.region.nbytes for call in self._calls.values())

    @property
    def all_down(self) -> bool:
        """Whether no device is ready or about to be."""
        return self._worker_lifecycle.all_down

    def next_alarm(self) -> float | None:
        """When `tick` is due; None when only an event can change anything."""
        first = self._alarms.next()
        alarms = [alarm for worker in self.workers for alarm in (worker.alarm, worker.trust.alarm)]
        for alarm in (*alarms, self._isolation.again_s):
            if alarm is not None and (first is None or alarm < first):
                first = alarm
        return first

    # ------------------------------------------------------------------------------------------------- events

    def start(self, now: float) -> list[Command]:
        """The pool opens: every device gets a process, at once or in its turn."""
        out: list[Command] = []
        for worker in self.workers:
            self._worker_lifecycle.begin(worker, now, out)
        return out

    def submit(self, call: CallState, now: float) -> list[Command]:
        """All operands of a call have arrived."""
        out: list[Command] = []
        call.submitted_s = now
        self._calls[call.id] = call
        if self._worker_lifecycle.all_down:
            self._call_lifecycle.fail(call, "NO_DEVICE", self._worker_lifecycle.why_down, now, out)
            return out
        if not self._call_lifecycle.enter(call, now, out):
            return out
        self.queue.push(call)
        if call.deadline_s is not None:
            self._alarms.set(call.deadline_s, call.id, len(self._calls))
        self._dispatch(now, out)
        if call.stage is CallStage.QUEUED:
            self.forecast.queued(call)
        return out

    def ready(
        self,
        index: int,
        incarnation: int,
        now: float,
        *,
        one_mode: bool = False,
        memory_bytes: int | None = None,
        unavailable: Mapping[str, str] | None = None,
        deterministic: bool | None = None,
        no_determinism: str = "",
        canaries: int = 0,
    ) -> list[Command]:
        """A process has opened its device; arguments as in `worker.protocol.DeviceReady`."""
        out: list[Command] = []
        worker = self.workers[index]
        if not worker.is_current(incarnation) or worker.opened or worker.ending or worker.failure is not None:
            return out  # or it reported that the device did not open, and is about to end
        worker.one_mode, worker.memory_bytes = one_mode, memory_bytes
        worker.unavailable, worker.exhausted = dict(unavailable or {}), False
        worker.deterministic, worker.no_determinism = deterministic, no_determinism
        self._quarantine.opened(worker, canaries, now)
        if worker.ended_s is not None:
            self.circuits.opened(now - worker.ended_s)
        self._worker_lifecycle.opened(worker, out)
        self._worker_lifecycle.take_turns(now, out)
        self._dispatch(now, out)
        return out

    def progress(self, index: int, incarnation: int, stage: str, now: float) -> list[Command]:
        """A process has come to another stage of opening its device."""
        out: list[Command] = []
        if self.workers[index].is_current(incarnation):
            self._worker_lifecycle.progress(self.workers[index], stage, now, out)
        return out

    def answered(
        self,
        index: int,
        incarnation: int,
        number: int,
        good: bool,
        now: float,
        *,
        seconds: float | None = None,
        workspace_bytes: int | None = None,
        reason: str = "",
    ) -> list[Command]:
        """A process has completed a call, or survived an error in it.

        Args:
            index: Which device.
            incarnation: Which process.
            number: Which call.
            good: Whether there are results.
            now: Current time.
            seconds: Time it spent on the call; None if unknown.
            workspace_bytes: Workspace its operator asked for; None if unknown.
            reason: Row of the error table, if there are no results.
        """
        out: list[Command] = []
        worker = self.workers[index]
        if not worker.is_current(incarnation) or number not in worker.running:
            return out
        if worker.state is DeviceState.QUARANTINED:
            return out  # the call runs again elsewhere once the process has ended
        if workspace_bytes is not None and worker.memory_bytes is not None:
            self._placement.learn(worker.running[number], workspace_bytes)
        done = self._placement.take_off(number, worker)
        self.queue.come_off(done, now)
        if good:
            self._worker_lifecycle.count_success(worker, done)
            if seconds is not None:
                self.forecast.learn(done, index, seconds, now)
        self._call_lifecycle.clear(done, now, out, good=good)
        if good or not self._call_lifecycle.redirect(done, worker, reason, out):
            if not done.orphaned:
                out.append(CompleteCall(number))
            self._call_lifecycle.settle(done, now, out)
        self._dispatch(now, out)
        return out

    def canary(self, index: int, incarnation: int, answer: CanaryRun, now: float) -> list[Command]:
        """A process has run a canary and compared its results."""
        out: list[Command] = []
        worker = self.workers[index]
        if worker.is_current(incarnation):
            self._quarantine.answered(worker, answer, now, out)
            self._dispatch(now, out)
        return out

    def mismatched(self, index: int, incarnation: int, number: int, detail: str, now: float) -> list[Command]:
        """A comparison with the reference has found that a process computed a call wrongly."""
        out: list[Command] = []
        worker, call = self.workers[index], self._calls[number]
        self._quarantine.computed(worker, incarnation, call.operator, detail, now, out)
        self._dispatch(now, out)
        return out

    def need_workspace(self, index: int, incarnation: int, number: int, nbytes: int) -> list[Command]:
        """A running call needs this much workspace, more than is set aside for it."""
        worker = self.workers[index]
        if not worker.is_current(incarnation) or number not in worker.running:
            return []
        reply = self._placement.extend(worker.running[number], worker, nbytes)
        return [TellWorker(index, incarnation, reply)]

    def deferred(self, index: int, incarnation: int, number: int, nbytes: int, now: float) -> list[Command]:
        """A process has given a call back because its workspace of `nbytes` was refused for now."""
        out: list[Command] = []
        worker = self.workers[index]
        if not worker.is_current(incarnation) or number not in worker.running:
            return out
        back = self._placement.take_off(number, worker)
        self.queue.come_off(back, now)
        if back.orphaned:
            self._call_lifecycle.settle(back, now, out)
        else:
            back.free_region()
            back.workspace_bytes = nbytes
            back.attempts -= 1
            self._call_lifecycle.put_back(back)
            out.append(PostponeCall(number, index))
        self._dispatch(now, out)
        return out

    def failing(self, index: int, incarnation: int, failure: Failure, now: float) -> list[Command]:
        """A process has reported that its device failed, and is ending; `lost` follows."""
        out: list[Command] = []
        worker = self.workers[index]
        if not worker.is_current(incarnation):
            return out
        worker.failure = failure
        worker.end(now)
        if worker.state is DeviceState.READY:
            death = Death.TIMED_OUT if failure.exempt or failure.silent else Death.DIED
            death = Death.KILLED if failure.killed else death
            self._worker_lifecycle.kill(worker, failure.reason, out, exempt=failure.exempt, death=death)
            self._dispatch(now, out)
        return out

    def lost(
        self, index: int, incarnation: int, reason: str, now: float, *, host: bool = False
    ) -> list[Command]:
        """A process has ended and was waited for: it cannot write any more.

        `reason` says in words how it ended, `host` whether it could not even be started.
        """
        out: list[Command] = []
        worker = self.workers[index]
        if not worker.is_current(incarnation):
            return out
        worker.alive = False
        worker.end(now)
        worker.reason = worker.ended_for or reason
        self._quarantine.failed_start(worker, out)
        self._worker_lifecycle.count_loss(worker, host=host, blamed=worker.culprit() is not None)
        died_under = list(worker.running)
        self._call_lifecycle.blame(worker, now, out)
        # Calls go back in the reverse order of their starts, so that the first one ends up in front.
        for number in reversed(died_under):
            call = self._placement.take_off(number, worker)
            self.queue.come_off(call, now)
            if worker.state is DeviceState.QUARANTINED:
                self._call_lifecycle.move(call, worker, now, out)
                continue
            call.note_loss(worker, sole=len(died_under) == 1)
            self._call_lifecycle.retry(worker, call, now, out)
        worker.outputs = RegionAllocator(0)
        self._worker_lifecycle.restart(worker, now, out, idle=not died_under)
        self._worker_lifecycle.take_turns(now, out)
        for waiting in list(self.queue) if self.all_down else ():
            self._call_lifecycle.give_up(waiting, "NO_DEVICE", self._worker_lifecycle.why_down, now, out)
        self._dispatch(now, out)
        return out

    def cancel(self, number: int, now: float) -> list[Command]:
        """The caller no longer wants the answer."""
        out: list[Command] = []
        call = self._calls.get(number)
        if call is not None:
            self._call_lifecycle.orphan(call, now, out)
            self._dispatch(now, out)
        return out

    def drop_last(self, tenant: str, now: float) -> list[Command]:
        """A tenant's last call gives way to one of another tenant; nothing happens if none waits."""
        out: list[Command] = []
        call = self.queue.last(tenant)
        if call is not None:
            self._call_lifecycle.drop(call, now, out)
            self._dispatch(now, out)  # others may have waited behind it
        return out

    def close(self, number: int, now: float) -> list[Command]:
        """The caller is done with operands and results."""
        out: list[Command] = []
        call = self._calls.get(number)
        if call is None or call.closed:
            return out
        call.closed = True
        if call.stage is CallStage.SETTLED:
            self._call_lifecycle.forget(call, out)
        else:
            self._call_lifecycle.orphan(call, now, out)
        self._dispatch(now, out)
        return out

    def tick(self, now: float) -> list[Command]:
        """Time has passed."""
        out: list[Command] = []
        for number in self._alarms.due(now):
            call = self._calls.get(number)
            if call is not None:
                self._call_lifecycle.overdue(call, now, out)
        for worker in self.workers:
            if worker.alarm is not None and worker.alarm <= now:
                self._worker_lifecycle.overdue(worker, now, out)
            if worker.trust.alarm is not None and worker.trust.alarm <= now:
                self._quarantine.overdue(worker, now, out)
        self._dispatch(now, out)
        return out

    # -------------------------------------------------------------------------------------------- dispatching

    def _dispatch(self, now: float, out: list[Command]) -> None:
        self._isolation.begin(now)
        while self.queue.count and any(w.has_stream for w in self.workers) and self._start_one(now, out):
            pass

    def _start_one(self, now: float, out: list[Command]) -> bool:
        """Starts the first call that can start, or fails one that cannot any more; returns whether it did."""
        blocked: list[CallState] = []
        for call in self.queue.in_turn(self._placement.is_confined):
            deadline, why = call.deadline_s, self._placement.why_never(call)
            if deadline is not None and deadline <= now:
                why = "DEADLINE_EXCEEDED", "the deadline passed in the queue"
            elif deadline is not None and (call.queued_s is not None or now + call.longest_run_s > deadline):
                why = why or self._placement.why_late(call, now)
            if why is not None:
                self._call_lifecycle.give_up(call, *why, now, out)
                return True  # its lane has changed
            if not self._call_lifecycle.compared.has_room(call.tenant, call.compared_millionths):
                continue  # until the results of others of its tenant have been compared
            worker = self._placement.place(call, now)
            if worker is not None:
                self._call_lifecycle.start(call, worker, now, out)
                for other in blocked:
                    other.overtaken += 1
                return True
            self._placement.wait(call, now)
            blocked.append(call)
        if self._placement.crowded:
            out.extend(MakeRoom(index) for index in self._placement.crowded)
            self._placement.crowded.clear()
        return False
