"""The driver of the scheduler: feeds it what workers say and the time, and carries out what it decides.

The scheduler has neither clock nor sockets; here are both.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from typing import TYPE_CHECKING

from npugrad_server.backends.canary import CanaryResult
from npugrad_server.pool.commands import (
    CircuitChanged,
    CompleteCall,
    DeviceChanged,
    DeviceMismatch,
    FailCall,
    KillWorker,
    MakeRoom,
    PostponeCall,
    RedirectCall,
    ReleaseCall,
    RequeueCall,
    SpawnWorker,
    StartCall,
    StartCanary,
    TellWorker,
    WorkerSpec,
)
from npugrad_server.pool.completion import Completion
from npugrad_server.pool.device_memory import budget
from npugrad_server.pool.fleet import Fleet
from npugrad_server.pool.quarantine import MOST_MISMATCHES
from npugrad_server.pool.regions import EMPTY
from npugrad_server.pool.scheduler import Scheduler
from npugrad_server.pool.types import DeviceState, DeviceStatus
from npugrad_server.pool.verification import Verification
from npugrad_server.pool.workspace_queries import WorkspaceQueries
from npugrad_server.worker.canary_messages import RunCanary
from npugrad_server.worker.protocol import AbandonCall, CallDone, WorkspaceGranted, WorkspaceRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from npugrad.errors import NpugradError
    from npugrad_server.devices import DeviceName
    from npugrad_server.pool.admission import AdmissionControl
    from npugrad_server.pool.arena import InputArena
    from npugrad_server.pool.commands import Command, Failure
    from npugrad_server.pool.state import WorkerState
    from npugrad_server.pool.ticket import Ticket
    from npugrad_server.pool.types import PlannedCall, PoolObserver, PoolSettings
    from npugrad_server.pool.verification import ResultCheck
    from npugrad_server.worker.canary_messages import CanaryRun
    from npugrad_server.worker.protocol import (
        CallDeferred,
        CallFailed,
        DeviceReady,
        NeedWorkspace,
        WorkspaceFound,
    )

_log = logging.getLogger(__name__)

_HOST = "host"
"""The memory that CPU and simulated devices share."""
_CROWDED_S = 0.5
"""How often, with nothing else to look at, those are asked again whose results others wait for."""


class Driver:
    """Between the scheduler on one side, and workers and callers on the other. On the pool's event loop.

    Attributes:
        tickets: The pool's calls by number.
        numbers: Numbers of calls and queries.
        fleet: The processes.
        scheduler: Decides.
        completion: Gives callers their answers.
        verification: Compares results with the reference.
        queries: Asks devices what a call would need.
        on_change: Called, with nothing, whenever a device went into another state, or its start to another
            stage.
        closing: Whether calls were abandoned.
    """

    def __init__(
        self,
        settings: PoolSettings,
        devices: Sequence[DeviceName],
        inputs: InputArena,
        admission: AdmissionControl,
        observer: PoolObserver,
    ) -> None:
        """Starts nothing yet.

        Args:
            settings: Sizes, times and limits.
            devices: The devices.
            inputs: Arena of the operands.
            admission: Counts its regions.
            observer: Who counts.
        """
        self._settings, self._admission, self._observer = settings, admission, observer
        self._loop = asyncio.get_running_loop()
        self.tickets: dict[int, Ticket] = {}
        self.numbers = itertools.count(1)
        self.fleet = Fleet(settings, list(devices), inputs, self)
        specs = [
            WorkerSpec(settings.streams_per_device, admission.output_bytes, _HOST, heavy=device.kind == "npu")
            for device in devices
        ]
        self.scheduler = Scheduler(settings, specs, {_HOST: admission.memory_bytes})
        self.completion = Completion(observer, self.devices)
        self.verification = Verification(
            settings, self.fleet, inputs, self.completion, observer, on_mismatch=self._mismatched
        )
        self.queries = WorkspaceQueries(self.fleet, self.scheduler, self.numbers)
        self.on_change: list[Callable[[], None]] = []
        self.closing = False
        self._states: dict[int, DeviceState] = {}
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_s = math.inf

    # ----------------------------------------------------------------------------------- what the workers say

    def worker_ready(self, worker: int, incarnation: int, ready: DeviceReady) -> None:
        """A process has opened its device."""
        for operator, reason in ready.unavailable.items():
            _log.warning("%s: without %s: %s", self.fleet.names[worker], operator, reason)
        self._observer.canaries_run(self.fleet.names[worker], CanaryResult.OK.value, ready.canaries)
        memory_bytes = None
        if ready.memory_bytes is not None:
            memory_bytes = budget(ready.memory_bytes, self._settings.streams_per_device)
        self.apply(
            self.scheduler.ready(
                worker,
                incarnation,
                time.monotonic(),
                one_mode=ready.one_mode,
                memory_bytes=memory_bytes,
                unavailable=ready.unavailable,
                deterministic=ready.deterministic,
                no_determinism=ready.no_determinism,
                canaries=ready.canaries,
            )
        )

    def worker_answered(self, worker: int, incarnation: int, answer: CallDone | CallFailed) -> None:
        """A process has answered a call."""
        if self.queries.take(answer):
            return
        ticket = self.tickets.get(answer.call)
        if ticket is not None:
            self.completion.take(ticket, answer)
        good, seconds, workspace_bytes, reason = isinstance(answer, CallDone), None, None, ""
        if isinstance(answer, CallDone):
            seconds = answer.copy_in_s + answer.run_s + answer.copy_out_s
            workspace_bytes = answer.workspace_bytes
        else:
            reason = answer.reason
        now = time.monotonic()
        self.apply(
            self.scheduler.answered(
                worker,
                incarnation,
                answer.call,
                good,
                now,
                seconds=seconds,
                workspace_bytes=workspace_bytes,
                reason=reason,
            )
        )

    def worker_ran_canary(self, worker: int, incarnation: int, answer: CanaryRun) -> None:
        """A process has run a canary."""
        device = self.fleet.names[worker]
        if answer.result == CanaryResult.ERROR:
            _log.warning("%s: the canary of %s failed: %s", device, answer.operator, answer.detail)
        self._observer.canaries_run(device, answer.result, 1)
        self.apply(self.scheduler.canary(worker, incarnation, answer, time.monotonic()))

    def worker_needs_workspace(self, worker: int, incarnation: int, need: NeedWorkspace) -> None:
        """A process needs more workspace for a call than is set aside."""
        needed = need.workspace_bytes
        self.apply(self.scheduler.need_workspace(worker, incarnation, need.call, needed))

    def worker_deferred(self, worker: int, incarnation: int, answer: CallDeferred) -> None:
        """A process has given a call back, for want of room for its workspace."""
        needed, now = answer.workspace_bytes, time.monotonic()
        self.apply(self.scheduler.deferred(worker, incarnation, answer.call, needed, now))

    def worker_missed_plan(self, worker: int, call: int) -> None:
        """A process lacks the plan of a call that it was sent by number: it gets the call whole."""
        ticket, process = self.tickets.get(call), self.fleet.process(worker)
        if ticket is None or not process.plans.missed(call):
            return  # nothing that it was asked
        _log.warning("request %s: %s lacks its plan", ticket.planned.request_id, self.fleet.names[worker])
        process.send(ticket.whole())
        if ticket.future is not None and ticket.future.done():
            process.send(AbandonCall(call))  # it may have been told before it had the call

    def worker_found_workspace(self, worker: int, incarnation: int, answer: WorkspaceFound) -> None:
        """A process has said what a call would need."""
        self.queries.take(answer)

    def worker_failing(self, worker: int, incarnation: int, failure: Failure) -> None:
        """A process has said that its device failed, or did not open, and ends."""
        if failure.wrong:
            device = self.fleet.names[worker]
            self._observer.canaries_run(device, CanaryResult.MISMATCH.value, MOST_MISMATCHES)
        self.apply(self.scheduler.failing(worker, incarnation, failure, time.monotonic()))

    def worker_opening(self, worker: int, incarnation: int, stage: str) -> None:
        """A process has come to another stage of opening its device."""
        self.apply(self.scheduler.progress(worker, incarnation, stage, time.monotonic()))

    def worker_lost(self, worker: int, incarnation: int, reason: str, *, host: bool = False) -> None:
        """A process has ended, or, where the host is to blame, could not be started."""
        self.queries.lost(worker, incarnation)
        if not self.closing:
            self._observer.worker_lost(self.fleet.names[worker], reason)
        self.apply(self.scheduler.lost(worker, incarnation, reason, time.monotonic(), host=host))

    # --------------------------------------------------------------------------- what the scheduler decides

    def apply(self, commands: Iterable[Command]) -> None:
        """Carries out what the scheduler decided, and has it woken when it wants to be."""
        for command in commands:
            if isinstance(command, ReleaseCall):
                self.release(command.call)
            elif isinstance(command, DeviceChanged):
                self._changed(command)
            else:
                self._carry_out(command)
        when = self.scheduler.next_alarm()
        if when is not None and when < self._alarm_s and not self.closing:
            self._set_alarm(when)

    def _changed(self, command: DeviceChanged) -> None:
        if self.closing:
            return  # its end is no news
        status = self._status(command.worker)
        _log.info("%s: %s%s", status.name, status.state, f", {status.reason}" if status.reason else "")
        if status.state is not self._states.get(command.worker):
            self._states[command.worker] = status.state
            self._observer.device_changed(status)
        for callback in self.on_change:
            callback()

    def _set_alarm(self, when: float) -> None:
        """Has the scheduler woken sooner than it would be.

        Never later: most alarms are of calls that end long before, and a timer that turns out to be too early
        costs less than a new one for every call.
        """
        self._cancel_alarm()
        self._alarm_s = when
        self._alarm = self._loop.call_later(max(0.0, when - time.monotonic()), self._tick)

    def _cancel_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm, self._alarm_s = None, math.inf

    def _tick(self) -> None:
        self._alarm, self._alarm_s = None, math.inf
        self.apply(self.scheduler.tick(time.monotonic()))

    def _carry_out(self, command: Command) -> None:
        """Does what a command says."""
        if isinstance(command, StartCall):
            self._start(command)
        elif isinstance(command, CompleteCall):
            self.verification.complete(self.tickets[command.call])
        elif isinstance(command, FailCall):
            self.completion.fail(self.tickets[command.call], command)
        elif isinstance(command, TellWorker):
            self._tell(command)
        elif isinstance(command, StartCanary):
            self.fleet.tell(command.worker, command.incarnation, RunCanary(command.number))
        elif isinstance(command, DeviceMismatch):
            device = self.fleet.names[command.worker]
            _log.error("%s: it computed %s wrongly: %s", device, command.operator, command.detail)
            self._observer.device_mismatched(device, command.operator)
        elif isinstance(command, MakeRoom):
            self._make_room(command)
        elif isinstance(command, SpawnWorker):
            self.fleet.spawn(command.worker, command.incarnation, command.canary_rounds)
        elif isinstance(command, KillWorker):
            _log.warning("%s: its worker is ended: %s", self.fleet.names[command.worker], command.reason)
            self.fleet.kill(command.worker, command.incarnation)
        else:
            self._note(command)

    def _note(self, command: Command) -> None:
        """Says what happened to a call that goes on, or to calls like it."""
        if isinstance(command, RequeueCall):
            self.completion.requeued(self.tickets[command.call], self.fleet.names[command.worker])
        elif isinstance(command, RedirectCall):
            device = self.fleet.names[command.worker]
            self.completion.redirected(self.tickets[command.call], device, command.reason)
        elif isinstance(command, PostponeCall):
            self.completion.postponed(self.tickets[command.call], self.fleet.names[command.worker])
        elif isinstance(command, CircuitChanged):
            self.completion.circuit_changed(self.tickets[command.call], command.deaths)

    def _start(self, command: StartCall) -> None:
        ticket = self.tickets[command.call]
        process = self.fleet.process(command.worker)
        process.send(ticket.order(command, process))
        device = self.fleet.names[command.worker]
        self._observer.call_started(ticket.planned, device, command.attempt, command.queued_s)

    def _mismatched(self, check: ResultCheck, detail: str) -> None:
        """The results of a call were wrong."""
        worker, number = check.worker, check.ticket.number
        now = time.monotonic()
        self.apply(self.scheduler.mismatched(worker, check.incarnation, number, detail, now))

    def _tell(self, command: TellWorker) -> None:
        self.fleet.tell(command.worker, command.incarnation, command.message)
        device = self.fleet.names[command.worker]
        if isinstance(command.message, WorkspaceGranted):
            self._observer.workspace_asked(device, "granted")
        elif isinstance(command.message, WorkspaceRefused):
            self._observer.workspace_asked(device, "refused" if command.message.final else "postponed")

    def release(self, number: int) -> None:
        """No worker touches the operands of a call any more: their memory goes back."""
        ticket = self.tickets.pop(number)
        self._admission.operands.free(ticket.operands)
        if ticket.use is not None:
            self._admission.quotas.leave(ticket.use, ticket.inflight_bytes, waits=ticket.waits)

    def drop_operands(self, ticket: Ticket) -> None:
        """The memory of the operands of a call that is done goes back before its results were taken."""
        self._admission.operands.free(ticket.operands)
        ticket.give_back(ticket.operands.nbytes)
        ticket.operands = EMPTY

    def _make_room(self, command: MakeRoom) -> None:
        """Has results leave the arena of a worker that nobody takes; if none can, looks again soon."""
        arena = self.scheduler.workers[command.worker].outputs
        for ticket in self.tickets.values():
            if ticket.state.arena is arena and ticket.give_way is not None and ticket.give_way():
                return
        soon = time.monotonic() + _CROWDED_S
        if soon < self._alarm_s and not self.closing:
            self._set_alarm(soon)

    # ------------------------------------------------------------------------------------ how devices stand

    def devices(self) -> tuple[DeviceStatus, ...]:
        """Every device, in the order of the settings."""
        return tuple(self._status(worker) for worker in range(len(self.fleet.devices)))

    def _status(self, index: int) -> DeviceStatus:
        device, worker = self.fleet.devices[index], self.scheduler.workers[index]
        info = device.info
        return DeviceStatus(
            name=self.fleet.names[index],
            backend=info.backend if info else "",
            description=info.description if info else "",
            simulated=info.simulated if info else False,
            state=worker.state,
            restarts=max(0, worker.incarnation - 1),
            reason=worker.reason,
            pid=device.process.pid if device.process else None,
            memory_bytes=worker.memory_bytes,
            memory_used_bytes=worker.memory_used_bytes,
            next_try_s=_next_try_s(worker),
            unavailable=frozenset(worker.unavailable),
        )

    def abandon(self, error: Callable[[PlannedCall], NpugradError]) -> None:
        """Gives every call inside an error, and is not woken any more; workers stay. Idempotent.

        Args:
            error: Makes the error of a call.
        """
        self.closing = True
        self._cancel_alarm()
        for number, ticket in list(self.tickets.items()):
            if ticket.future is not None and not ticket.future.done():
                self.completion.finish(ticket, error(ticket.planned))
                self.apply(self.scheduler.cancel(number, time.monotonic()))


def _next_try_s(worker: WorkerState) -> float | None:
    """Seconds until a device that is down is tried again; 0 while it is."""
    if not worker.is_out or worker.damaged:
        return None
    return 0.0 if worker.alive or worker.alarm is None else max(0.0, worker.alarm - time.monotonic())
