"""The pool as the service sees it: admit a call, run it, give its memory back.

It carries out what the scheduler decides; the scheduler decides everything that can be decided.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from typing import TYPE_CHECKING

from npugrad.errors import ServerDraining
from npugrad_server.devices import parse_device
from npugrad_server.machine import memory_bytes
from npugrad_server.pool.admission import Admission
from npugrad_server.pool.answers import error_from_verdict, error_without_device
from npugrad_server.pool.arena import InputArena
from npugrad_server.pool.commands import DeviceChanged, ReleaseCall, WorkerSpec
from npugrad_server.pool.device_memory import budget
from npugrad_server.pool.driver import Driver
from npugrad_server.pool.fleet import Fleet
from npugrad_server.pool.gate import Gate
from npugrad_server.pool.questions import Questions
from npugrad_server.pool.replies import Replies
from npugrad_server.pool.scheduler import Scheduler
from npugrad_server.pool.types import DeviceState, DeviceStatus, Outcome, PoolObserver, PoolStats
from npugrad_server.worker.protocol import CallDone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from npugrad.meta import CallMeta
    from npugrad.operator import OpRecord
    from npugrad_server.pool.commands import Command, Failure
    from npugrad_server.pool.ledger import WorkerRecord
    from npugrad_server.pool.types import PlannedCall, PoolSettings
    from npugrad_server.worker.protocol import (
        CallDeferred,
        CallFailed,
        CallPlanned,
        DeviceReady,
        NeedWorkspace,
    )

_log = logging.getLogger(__name__)

_HOST = "host"
"""The memory that CPU and simulated devices share."""


class DevicePool:
    """All devices of the server. Everything here is called on the event loop that opened it.

    Guarantees
        - Every accepted call gets one answer, also when workers die; none is lost by the pool.
        - Memory of a call is reused only after its admission was closed and no worker can touch it.
        - No method holds the loop for longer than it takes to send a message.

    Attributes:
        on_change: Called, with nothing, whenever a device went into another state, or its start to another
            stage.
    """

    def __init__(self, settings: PoolSettings, observer: PoolObserver | None = None) -> None:
        """Makes the arena; use `open`.

        Args:
            settings: Devices, sizes and times.
            observer: Who counts.
        """
        self.on_change: list[Callable[[], None]] = []
        self._settings = settings
        self._observer = observer or PoolObserver()
        self._replies = Replies(self._observer, self.devices)
        self._loop = asyncio.get_running_loop()
        devices = [parse_device(name) for name in settings.devices]
        self._inputs = InputArena(settings.input_arena_bytes)
        self._gate = Gate(
            settings,
            settings.device_memory_bytes or memory_bytes() // 2,
            own_memory=any(device.owns_memory for device in devices),
        )
        self._fleet = Fleet(settings, devices, self._inputs, self)
        self._admissions: dict[int, Admission] = {}
        self._driver = Driver(self._fleet, self._admissions, self._replies, self._observer)
        self._scheduler = Scheduler(
            settings,
            [
                WorkerSpec(
                    settings.streams_per_device, self._gate.output_bytes, _HOST, heavy=device.kind == "npu"
                )
                for device in devices
            ],
            {_HOST: self._gate.memory_bytes},
        )
        self._numbers = itertools.count(1)
        self._questions = Questions(self._fleet, self._scheduler, self._numbers)
        self._uploads = self._accepted = 0
        self._closing = False
        self._states: dict[int, DeviceState] = {}
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_s = math.inf
        self._progress = asyncio.Event()

    @classmethod
    async def open(cls, settings: PoolSettings, observer: PoolObserver | None = None) -> DevicePool:
        """Starts a worker for every device and returns before they are ready.

        Args:
            settings: Devices, sizes and times.
            observer: Who counts; nobody by default.

        Raises:
            DeviceListError: A device that is not one.
            OSError: No memory or descriptor is left.
        """
        pool = cls(settings, observer)
        pool._apply(pool._scheduler.start(time.monotonic()))
        pool._fleet.prefault(pool._inputs)
        return pool

    # ------------------------------------------------------------------------------------------------- calls

    def admit(self, planned: PlannedCall) -> Admission:
        """Reserves all bytes and a queue place.

        Raises:
            CallTooLarge: It can never fit.
            ServerBusy: QUEUE_FULL, queue or operand memory are full now; NO_DEVICE, all devices are down.
            ServerDraining: The pool was closed, or its calls were abandoned.
            UnsupportedOperator: No device can run the operator.
            OperatorError: DETERMINISM_UNSUPPORTED, no device can run it deterministically.
        """
        operator = planned.plan.record.name
        if self._closing:
            raise _shut_down(planned)
        if self._scheduler.all_down:
            raise error_without_device(self.devices(), planned)
        deterministic = planned.options.deterministic
        offer = self._scheduler.offers[operator, deterministic]
        if offer.refused is not None:
            raise error_from_verdict(planned, *offer.refused)
        waiting = self._uploads + self._scheduler.queue_depth
        demand, region = self._gate.reserve(
            planned,
            waiting,
            self._scheduler.running,
            offer.most_bytes,
        )
        admission = Admission(
            next(self._numbers),
            planned,
            demand,
            region,
            self._inputs.view(region, 0, region.nbytes),
            self._closed,
        )
        self._admissions[admission.number] = admission
        self._uploads += 1
        self._accepted += 1
        self._observer.call_accepted(planned)
        return admission

    async def run(self, admission: Admission) -> Outcome:
        """Runs an admitted call whose operands are all written.

        Args:
            admission: From `admit`; it must stay open until the outcome was used.

        Returns:
            Views of the results, valid until the admission is closed.

        Raises:
            CallTooLarge: No device has room for its tensors, as turned out after it was admitted.
            DeadlineExceeded: The deadline passed before the result was there.
            ServerBusy: NO_DEVICE, the last device was marked down.
            ServerDraining: The pool was closed meanwhile.
            WorkerLost: The worker died at every attempt.
            DeviceError: The device or the operator failed; INTERNAL, VERIFICATION_FAILED or a vendor number.
            DeviceOutOfMemory: The device has no memory for it now, nor has another one.
            RequestError: UNSAFE_LEVELS.
            OperatorError: DETERMINISM_UNSUPPORTED.
            UnsupportedOperator: No device can run the operator, as turned out after it was admitted.
            RuntimeError: The admission was closed or run before.
        """
        planned = admission.planned
        if admission.closed or admission.started:
            raise RuntimeError(f"{planned.plan.record.name}: an admission runs once, before it is closed")
        if self._closing:
            raise _shut_down(planned)
        admission.started = True
        self._uploads -= 1
        future: asyncio.Future[Outcome] = asyncio.Future(loop=self._loop)
        admission.future = future
        self._apply(self._scheduler.submit(admission.record, time.monotonic()))
        try:
            return await future
        except asyncio.CancelledError:
            self._apply(self._scheduler.cancel(admission.number, time.monotonic()))
            self._replies.report(admission, "CANCELLED", None)
            raise

    async def workspace_bytes(self, record: OpRecord, call: CallMeta) -> int | None:
        """Workspace that a legal call would need; None when no device can tell it now."""
        return await self._questions.workspace_bytes(record, call)

    def _closed(self, admission: Admission) -> None:
        """An admission was closed: its memory goes back now, or when its worker is done with it."""
        if admission.held is not None:
            self._fleet.let_go(admission.held)
            admission.held = None
        if admission.started:
            self._apply(self._scheduler.close(admission.number, time.monotonic()))
        else:
            self._uploads -= 1
            self._release(admission.number)

    def _release(self, number: int) -> None:
        self._gate.operands.free(self._admissions.pop(number).operands)

    # ----------------------------------------------------------------------------------- what the workers say

    def worker_ready(self, worker: int, incarnation: int, ready: DeviceReady) -> None:
        """A process has opened its device."""
        for operator, reason in ready.unavailable.items():
            _log.warning("%s: without %s: %s", self._fleet.names[worker], operator, reason)
        memory_bytes = None
        if ready.memory_bytes is not None:
            memory_bytes = budget(ready.memory_bytes, self._settings.streams_per_device)
        self._apply(
            self._scheduler.ready(
                worker,
                incarnation,
                time.monotonic(),
                ready.one_mode,
                memory_bytes,
                ready.unavailable,
                ready.deterministic,
                ready.no_determinism,
            )
        )

    def worker_answered(self, worker: int, incarnation: int, answer: CallDone | CallFailed) -> None:
        """A process has answered a call."""
        if self._questions.take(answer):
            return
        admission = self._admissions.get(answer.call)
        if admission is not None:
            self._replies.take(admission, answer)
        good, workspace_bytes, reason = isinstance(answer, CallDone), None, ""
        if isinstance(answer, CallDone):
            self._gate.note(answer.copy_in_s + answer.run_s + answer.copy_out_s)
            workspace_bytes = answer.workspace_bytes
        else:
            reason = answer.reason
        now = time.monotonic()
        self._apply(
            self._scheduler.answered(worker, incarnation, answer.call, good, now, workspace_bytes, reason)
        )

    def worker_asks(self, worker: int, incarnation: int, question: NeedWorkspace) -> None:
        """A process needs more workspace for a call than is set aside."""
        needed = question.workspace_bytes
        self._apply(self._scheduler.need_workspace(worker, incarnation, question.call, needed))

    def worker_deferred(self, worker: int, incarnation: int, answer: CallDeferred) -> None:
        """A process has given a call back, for want of room for its workspace."""
        needed, now = answer.workspace_bytes, time.monotonic()
        self._apply(self._scheduler.deferred(worker, incarnation, answer.call, needed, now))

    def worker_lacks(self, worker: int, call: int) -> None:
        """The process of a device lacks the plan of a call."""
        self._driver.bring_whole(worker, call)

    def worker_planned(self, worker: int, incarnation: int, answer: CallPlanned) -> None:
        """A process has said what a call would need."""
        self._questions.take(answer)

    def worker_failing(self, worker: int, incarnation: int, failure: Failure) -> None:
        """A process has said that its device failed, or did not open, and ends."""
        self._apply(self._scheduler.failing(worker, incarnation, failure, time.monotonic()))

    def worker_opening(self, worker: int, incarnation: int, stage: str) -> None:
        """A process has come to another stage of opening its device."""
        self._apply(self._scheduler.progress(worker, incarnation, stage, time.monotonic()))

    def worker_lost(self, worker: int, incarnation: int, reason: str, *, host: bool = False) -> None:
        """A process has ended, or, where the host is to blame, could not be started."""
        self._questions.lost(worker, incarnation)
        if not self._closing:
            self._observer.worker_lost(self._fleet.names[worker], reason)
        self._apply(self._scheduler.lost(worker, incarnation, reason, time.monotonic(), host=host))

    # --------------------------------------------------------------------------- what the scheduler decides

    def _apply(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if isinstance(command, ReleaseCall):
                self._release(command.call)
            elif isinstance(command, DeviceChanged):
                self._changed(command)
            else:
                self._driver.carry_out(command)
        when = self._scheduler.next_alarm()
        if when is not None and when < self._alarm_s and not self._closing:
            self._set_alarm(when)

    def _changed(self, command: DeviceChanged) -> None:
        if self._closing:
            return  # its end is no news
        status = self._status(command.worker)
        _log.info("%s: %s%s", status.name, status.state, f", {status.reason}" if status.reason else "")
        if status.state is not self._states.get(command.worker):
            self._states[command.worker] = status.state
            self._observer.device_changed(status)
        for callback in self.on_change:
            callback()
        self._signal()

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
        self._apply(self._scheduler.tick(time.monotonic()))

    # ------------------------------------------------------------------------------------ how the pool stands

    def unavailable(self, operator: str) -> str:
        """Why no device can run an operator; empty while one can, or may once it is ready."""
        return self._scheduler.offers.why_lacking(operator)

    def devices(self) -> tuple[DeviceStatus, ...]:
        """Every device, in the order of the settings."""
        return tuple(self._status(worker) for worker in range(len(self._fleet.devices)))

    def _status(self, worker: int) -> DeviceStatus:
        device, record = self._fleet.devices[worker], self._scheduler.workers[worker]
        info = device.info
        return DeviceStatus(
            name=self._fleet.names[worker],
            backend=info.backend if info else "",
            description=info.description if info else "",
            simulated=info.simulated if info else False,
            state=record.state,
            restarts=max(0, record.incarnation - 1),
            reason=record.reason,
            pid=device.process.pid if device.process else None,
            memory_bytes=record.memory_bytes,
            memory_used_bytes=record.memory_used_bytes,
            next_try_s=_next_try_s(record),
        )

    def stats(self) -> PoolStats:
        """Figures of this moment."""
        return PoolStats(
            queue_depth=self._scheduler.queue_depth,
            running=self._scheduler.running,
            accepted_calls=self._accepted,
            finished_calls=self._replies.count,
            input_arena_used_bytes=self._gate.operands.used_bytes,
            output_arena_used_bytes=self._scheduler.output_used_bytes,
            uploads=self._uploads,
            input_arena_bytes=self._gate.operands.nbytes,
            output_arena_bytes=self._gate.output_bytes * len(self._fleet.devices),
        )

    async def wait_ready(self, timeout_s: float) -> None:
        """Waits until every device is ready or down.

        Args:
            timeout_s: Seconds to wait; when they are over, one ready device is enough.

        Raises:
            ServerBusy: NO_DEVICE, none is ready; the message says why, device by device.
        """
        final = (DeviceState.READY, DeviceState.DOWN)
        await self._until(lambda: all(status.state in final for status in self.devices()), timeout_s)
        found = self.devices()
        if not any(status.state is DeviceState.READY for status in found):
            raise error_without_device(found)

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        end = self._loop.time() + timeout_s
        while not condition():
            self._progress.clear()
            try:
                await asyncio.wait_for(self._progress.wait(), end - self._loop.time())
            except asyncio.TimeoutError:
                return condition()
        return True

    def _signal(self) -> None:
        self._progress.set()

    # -------------------------------------------------------------------------------------------- how it ends

    def abandon(self) -> None:
        """Answers calls inside, and every later one, with `ServerDraining`; workers stay. Idempotent."""
        self._closing = True
        self._cancel_alarm()
        for number, admission in list(self._admissions.items()):
            if admission.future is not None and not admission.future.done():
                self._replies.finish(admission, _shut_down(admission.planned))
                self._apply(self._scheduler.cancel(number, time.monotonic()))

    async def close(self) -> None:
        """Abandons what is inside, ends all workers and waits for them. Idempotent."""
        self.abandon()
        await self._fleet.close()
        self._inputs.close()


def _next_try_s(worker: WorkerRecord) -> float | None:
    """Seconds until a device that is down is tried again; 0 while it is."""
    if worker.state is not DeviceState.DOWN or worker.gone:
        return None
    return 0.0 if worker.alive or worker.alarm is None else max(0.0, worker.alarm - time.monotonic())


def _shut_down(planned: PlannedCall) -> ServerDraining:
    return ServerDraining(
        f"{planned.plan.record.name}: the server was shut down before the result was there",
        operator=planned.plan.record.name,
        request_id=planned.request_id,
    )
