"""The scheduler's driver: feeds it workers' messages and the time, and carries out its decisions.

The scheduler has neither a clock nor sockets; the driver has both.
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
"""Seconds until results are asked again to give way in a crowded arena, if nothing happens before."""


class Driver:
    """Connects the scheduler with workers and callers. On the pool's event loop.

    Attributes:
        tickets: Tickets of the pool's calls, by number.
        numbers: Source of numbers for calls and queries.
        fleet: The worker processes.
        scheduler: Decides what to do.
        completion: Gives callers their answers.
        verification: Compares results with the reference.
        queries: Asks devices how much workspace a call would need.
        on_change: Callbacks without arguments, called whenever a device changes its state, or its start
            reaches another stage.
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
            admission: Allocates its regions.
            observer: Notified of events.
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

    # ------------------------------------------------------------------------------------- events of workers

    def worker_ready(self, worker: int, incarnation: int, ready: DeviceReady) -> None:
        """A process has opened its device."""
        for operator, reason in ready.unavailable.items():
            _log.warning("%s: operator %s is not available: %s", self.fleet.names[worker], operator, reason)
        self._observer.canaries_run(self.fleet.names[worker], CanaryResult.OK.value, ready.compared)
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
        """A process has given a call back because there is no room for its workspace."""
        needed, now = answer.workspace_bytes, time.monotonic()
        self.apply(self.scheduler.deferred(worker, incarnation, answer.call, needed, now))

    def worker_missed_plan(self, worker: int, call: int) -> None:
        """A process lacks the plan of a call that was sent by plan number: sends it the whole call."""
        ticket, process = self.tickets.get(call), self.fleet.process(worker)
        if ticket is None or not process.plans.missed(call):
            return  # it was not sent this call with a plan's number
        _log.warning("request %s: %s has lost its plan", ticket.planned.request_id, self.fleet.names[worker])
        process.send(ticket.whole())
        if ticket.future is not None and ticket.future.done():
            process.send(AbandonCall(call))  # it may have been told before it got the call

    def worker_found_workspace(self, worker: int, incarnation: int, answer: WorkspaceFound) -> None:
        """A process has reported how much workspace a call would need."""
        self.queries.take(answer)

    def worker_failing(self, worker: int, incarnation: int, failure: Failure) -> None:
        """A process has reported that its device failed or did not open, and is about to end."""
        if failure.wrong:
            device = self.fleet.names[worker]
            self._observer.canaries_run(device, CanaryResult.MISMATCH.value, MOST_MISMATCHES)
        self.apply(self.scheduler.failing(worker, incarnation, failure, time.monotonic()))

    def worker_opening(self, worker: int, incarnation: int, stage: str) -> None:
        """A process has reached another stage of opening its device."""
        self.apply(self.scheduler.progress(worker, incarnation, stage, time.monotonic()))

    def worker_lost(self, worker: int, incarnation: int, reason: str, *, host: bool = False) -> None:
        """A process has ended or, if `host` is true, could not be started because of the host."""
        self.queries.lost(worker, incarnation)
        if not self.closing:
            self._observer.worker_lost(self.fleet.names[worker], reason)
        self.apply(self.scheduler.lost(worker, incarnation, reason, time.monotonic(), host=host))

    # ------------------------------------------------------------------------------ commands of the scheduler

    def apply(self, commands: Iterable[Command]) -> None:
        """Carries out the scheduler's commands, and sets the timer for its next alarm."""
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
            return  # devices are expected to end
        status = self._status(command.worker)
        _log.info("%s: %s%s", status.name, status.state, f", {status.reason}" if status.reason else "")
        if status.state is not self._states.get(command.worker):
            self._states[command.worker] = status.state
            self._observer.device_changed(status)
        for callback in self.on_change:
            callback()

    def _set_alarm(self, when: float) -> None:
        """Moves the scheduler's timer to an earlier time.

        It is never moved later: most alarms belong to calls that end long before, and a timer that fires too
        early costs less than a new one for every call.
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
        """Carries out one command."""
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
            _log.warning("%s: killing its worker: %s", self.fleet.names[command.worker], command.reason)
            self.fleet.kill(command.worker, command.incarnation)
        else:
            self._note(command)

    def _note(self, command: Command) -> None:
        """Reports what happened to a call that goes on, or to calls like it."""
        if isinstance(command, RequeueCall):
            self.completion.requeued(self.tickets[command.call], self.fleet.names[command.worker])
        elif isinstance(command, RedirectCall):
            device = self.fleet.names[command.worker]
            self.completion.redirected(self.tickets[command.call], device, command.reason)
        elif isinstance(command, PostponeCall):
            self.completion.postponed(self.tickets[command.call], self.fleet.names[command.worker])
        elif isinstance(command, CircuitChanged):
            self.completion.circuit_changed(self.tickets[command.call], command)

    def _start(self, command: StartCall) -> None:
        ticket = self.tickets[command.call]
        process = self.fleet.process(command.worker)
        process.send(ticket.order(command, process))
        device = self.fleet.names[command.worker]
        self._observer.call_started(ticket.planned, device, command.attempt, command.queued_s)

    def _mismatched(self, check: ResultCheck, detail: str) -> None:
        """Tells the scheduler that the results of a call were wrong."""
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
        """Frees the operands of a call, which no worker touches any more."""
        ticket = self.tickets.pop(number)
        self._admission.operands.free(ticket.operands)
        if ticket.use is not None:
            self._admission.quotas.leave(ticket.use, ticket.inflight_bytes, waits=ticket.waits)

    def drop_operands(self, ticket: Ticket) -> None:
        """Frees the operands of a completed call before its results are taken."""
        self._admission.operands.free(ticket.operands)
        ticket.give_back(ticket.operands.nbytes)
        ticket.operands = EMPTY

    def _make_room(self, command: MakeRoom) -> None:
        """Has results that nobody takes leave a worker's arena; if none can, looks again soon."""
        arena = self.scheduler.workers[command.worker].outputs
        for ticket in self.tickets.values():
            if ticket.state.arena is arena and ticket.give_way is not None and ticket.give_way(math.inf):
                return
        soon = time.monotonic() + _CROWDED_S
        if soon < self._alarm_s and not self.closing:
            self._set_alarm(soon)

    # ------------------------------------------------------------------------------------------------- status

    def devices(self) -> tuple[DeviceStatus, ...]:
        """Returns the status of every device, in the order of the settings."""
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
        """Fails every call, and cancels the timer; workers keep running. Idempotent.

        Args:
            error: Makes the error for a call.
        """
        self.closing = True
        self._cancel_alarm()
        for number, ticket in list(self.tickets.items()):
            if ticket.future is not None and not ticket.future.done():
                self.completion.finish(ticket, error(ticket.planned))
                self.apply(self.scheduler.cancel(number, time.monotonic()))


def _next_try_s(worker: WorkerState) -> float | None:
    """Returns the seconds until a device that is down is tried again; 0 during the try."""
    if not worker.is_out or worker.damaged:
        return None
    return 0.0 if worker.alive or worker.alarm is None else max(0.0, worker.alarm - time.monotonic())
