"""The pool as the service sees it: admit a call, run it, give its memory back.

The scheduler decides everything that can be decided; the driver is between it and the rest of the world.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from npugrad.errors import ServerBusy, ServerDraining
from npugrad_server.devices import parse_device
from npugrad_server.machine import memory_bytes
from npugrad_server.pool.admission import AdmissionControl
from npugrad_server.pool.arena import InputArena
from npugrad_server.pool.commands import FailCall
from npugrad_server.pool.completion import error_without_answer, error_without_device
from npugrad_server.pool.driver import Driver
from npugrad_server.pool.run_times import work_size_of
from npugrad_server.pool.ticket import Ticket
from npugrad_server.pool.types import DeviceState, Outcome, PoolObserver, PoolStats

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from npugrad.meta import CallMeta
    from npugrad.operator import OpRecord
    from npugrad_server.pool.admission import Demand
    from npugrad_server.pool.forecast import Prediction
    from npugrad_server.pool.regions import Region
    from npugrad_server.pool.tenant import Tenant
    from npugrad_server.pool.types import DeviceStatus, PlannedCall, PoolSettings

UPLOADS_PER_PLACE = 4
"""Uploads in progress for each place of the queue: few are whole at the same time."""
_UPLOAD_RETRY_S = 1.0


class DevicePool:
    """All devices of the server. Everything here is called on the event loop that opened it.

    Guarantees
        - Every accepted call gets one answer, also when workers die; none is lost by the pool.
        - Memory of a call is reused only after its ticket was closed and no worker can touch it.
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
        self._loop = asyncio.get_running_loop()
        devices = [parse_device(name) for name in settings.devices]
        self._inputs = InputArena(settings.input_arena_bytes)
        self._observer = observer or PoolObserver()
        self._admission = AdmissionControl(
            settings,
            settings.device_memory_bytes or memory_bytes() // 2,
            own_memory=any(device.owns_memory for device in devices),
        )
        self._driver = Driver(settings, devices, self._inputs, self._admission, self._observer)
        self._scheduler, self._fleet = self._driver.scheduler, self._driver.fleet
        self._completion = self._driver.completion
        self.on_change = self._driver.on_change
        self.on_change.append(self._signal)
        self._uploads = self._whole = self._accepted = 0
        self._most_uploads = UPLOADS_PER_PLACE * settings.max_queue_depth
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
        pool._driver.apply(pool._scheduler.start(time.monotonic()))
        pool._fleet.prefault(pool._inputs)
        pool._driver.verification.open()
        return pool

    # ------------------------------------------------------------------------------------------------- calls

    def check(self, planned: PlannedCall, *, is_upload: bool = False) -> None:
        """Refuses a call that would not be admitted now; errors as of `admit`."""
        _, region, _ = self._reserve(planned, is_upload)
        self._admission.operands.free(region)

    def admit(self, planned: PlannedCall, *, is_upload: bool = False) -> Ticket:
        """Reserves all bytes and a queue place.

        Args:
            planned: The call.
            is_upload: Whether its operands are still to come, at the pace of its caller: it has no place in
                the queue before they are there, and then gets one, however long the queue is. There may be
                `UPLOADS_PER_PLACE` of them for each place.

        Raises:
            CallTooLarge: It can never fit.
            DeadlineExceeded: Its deadline has passed.
            ServerBusy: QUEUE_FULL, queue or operand memory are full now; QUOTA_EXCEEDED, its tenant's quota
                is; WOULD_MISS_DEADLINE, it would be done too late; NO_DEVICE, all devices are down.
            ServerDraining: The pool was closed, or its calls were abandoned.
            UnsupportedOperator: No device can run the operator.
            OperatorError: DETERMINISM_UNSUPPORTED, no device can run it deterministically.
            CircuitOpen: Calls of its tenant and signature killed workers.
        """
        demand, region, prediction = self._reserve(planned, is_upload)
        ticket = Ticket(
            next(self._driver.numbers),
            planned,
            demand,
            region,
            self._inputs.view(region, 0, region.nbytes),
            self._closed,
            prediction=prediction,
        )
        ticket.use = self._admission.quotas.enter(planned.tenant, demand.inflight_bytes)
        ticket.inflight_bytes = demand.inflight_bytes
        self._driver.tickets[ticket.number] = ticket
        ticket.is_upload = is_upload
        self._uploads += 1
        self._whole += not is_upload
        self._accepted += 1
        self._observer.call_accepted(planned)
        return ticket

    def _reserve(self, planned: PlannedCall, is_upload: bool) -> tuple[Demand, Region, Prediction]:
        operator = planned.plan.record.name
        if self._driver.closing:
            raise _shut_down(planned)
        if self._scheduler.all_down:
            raise error_without_device(self.devices(), planned)
        deterministic = planned.options.deterministic
        eligible = self._scheduler.eligibility[operator, deterministic]
        if eligible.refusal is not None:
            raise error_without_answer(planned, *eligible.refusal)
        if len(self._scheduler.circuits):
            self._check_circuit(planned)
        if is_upload:
            self._check_uploads(operator)
        return self._admission.reserve(
            planned,
            self._whole + self._scheduler.queue_depth,
            self._scheduler.forecast,
            time.monotonic(),
            eligible.most_bytes,
            self._make_room,
            drop=self._drop,
        )

    def _check_uploads(self, operator: str) -> None:
        """Refuses an upload beside too many others, of which none is so slow that it has to give way."""
        found = self._uploads - self._whole
        if found >= self._most_uploads and not self._make_room():
            raise ServerBusy(
                f"{operator}: found {found} uploads in progress; expected fewer than {self._most_uploads}",
                retry_after_s=_UPLOAD_RETRY_S,
                operator=operator,
            )

    def _make_room(self) -> bool:
        """Has an upload give its memory back that is too slow; whether there was one."""
        for ticket in self._driver.tickets.values():
            if not ticket.started and ticket.give_way is not None and ticket.give_way():
                ticket.close()
                return True
        return False

    def _drop(self, tenants: Sequence[Tenant]) -> bool:
        """Has the last call of the first of some tenants that has one give way; whether there was one."""
        for tenant in tenants:
            commands = self._scheduler.drop_last(tenant.name, time.monotonic())
            dropped = [self._driver.tickets[c.call] for c in commands if isinstance(c, FailCall)]
            self._driver.apply(commands)
            for ticket in dropped:  # its caller only hears of it later, but no worker reads its operands
                ticket.stop_waiting()
                self._driver.drop_operands(ticket)
                ticket.give_back(ticket.inflight_bytes)
            if dropped:
                return True
        return False

    def drop_operands(self, ticket: Ticket) -> None:
        """Gives back the operands of a call whose outcome is there; no worker reads them any more."""
        if ticket.check is None:
            self._driver.drop_operands(ticket)

    def _check_circuit(self, planned: PlannedCall) -> None:
        """Refuses a call that would be refused later, before it is sent."""
        key = planned.tenant.name, planned.plan.signature
        refusal = self._scheduler.circuits.refusal(key, time.monotonic())
        if refusal is not None:
            after_s = refusal.retry_after_s
            raise error_without_answer(planned, "CIRCUIT_OPEN", refusal.detail, retry_after_s=after_s)

    @property
    def output_bytes(self) -> int:
        """Size of each output arena."""
        return self._admission.output_bytes

    async def run(self, ticket: Ticket) -> Outcome:
        """Runs an admitted call whose operands are all written.

        Args:
            ticket: From `admit`; it must stay open until the outcome was used.

        Returns:
            Views of the results, valid until the ticket is closed.

        Raises:
            CallTooLarge: No device has room for its tensors, as turned out after it was admitted.
            DeadlineExceeded: The deadline passed before the result was there.
            ServerBusy: NO_DEVICE, the last device was marked down; WOULD_MISS_DEADLINE, it could only start
                too late; QUEUE_FULL, it gave way to a call of a tenant that has less of the queue.
            ServerDraining: The pool was closed meanwhile.
            WorkerLost: The worker died at every attempt.
            CircuitOpen: Workers died under other calls of its tenant and signature meanwhile.
            DeviceError: The device or the operator failed; INTERNAL, VERIFICATION_FAILED or a vendor number.
            DeviceOutOfMemory: The device has no memory for it now, nor has another one.
            RequestError: UNSAFE_LEVELS.
            OperatorError: DETERMINISM_UNSUPPORTED.
            UnsupportedOperator: No device can run the operator, as turned out after it was admitted.
            RuntimeError: The ticket was closed or run before.
        """
        planned = ticket.planned
        if ticket.closed or ticket.started:
            raise RuntimeError(f"{planned.plan.record.name}: a ticket runs once, before it is closed")
        if self._driver.closing:
            raise _shut_down(planned)
        ticket.started = True
        self._uploads -= 1
        self._whole -= not ticket.is_upload
        future: asyncio.Future[Outcome] = asyncio.Future(loop=self._loop)
        ticket.future = future
        self._driver.apply(self._scheduler.submit(ticket.state, time.monotonic()))
        try:
            return await future
        except asyncio.CancelledError:
            self._driver.apply(self._scheduler.cancel(ticket.number, time.monotonic()))
            self._completion.report(ticket, "CANCELLED", None)
            raise

    async def workspace_bytes(self, record: OpRecord, call: CallMeta) -> int | None:
        """Workspace that a legal call would need; None when no device can tell it now."""
        return await self._driver.queries.workspace_bytes(record, call)

    def predict(self, planned: PlannedCall) -> tuple[float | None, float | None]:
        """Seconds that a call would wait and run, were it sent now; None for what nobody knows."""
        options, forecast = planned.options, self._scheduler.forecast
        kind = planned.plan.record.name, options.deterministic
        lane = min(options.priority, planned.tenant.max_priority), options.label
        work, now = work_size_of(planned), time.monotonic()
        found = forecast.predict(planned.tenant, kind, work, now, lane, sent=False)
        return (found.wait_s if found.is_wait_known else None), found.run_s or None

    def _closed(self, ticket: Ticket) -> None:
        """A ticket was closed: its memory goes back now, or when its worker is done with it."""
        if ticket.check is not None and self._driver.verification.keeps(ticket.check):
            return  # this is called again
        if ticket.held is not None:
            self._fleet.let_go(ticket.held)
            ticket.held = None
        if ticket.started:
            self._driver.apply(self._scheduler.close(ticket.number, time.monotonic()))
        else:
            self._uploads -= 1
            self._whole -= not ticket.is_upload
            self._driver.release(ticket.number)

    # ------------------------------------------------------------------------------------ how the pool stands

    def unavailable(self, operator: str) -> str:
        """Why no device can run an operator; empty while one can, or may once it is ready."""
        return self._scheduler.eligibility.why_unavailable(operator)

    def devices(self) -> tuple[DeviceStatus, ...]:
        """Every device, in the order of the settings."""
        return self._driver.devices()

    def stats(self) -> PoolStats:
        """Figures of this moment."""
        now = time.monotonic()
        return PoolStats(
            queue_depth=self._scheduler.queue_depth,
            running=self._scheduler.running,
            accepted_calls=self._accepted,
            finished_calls=self._completion.count,
            input_arena_used_bytes=self._admission.operands.used_bytes,
            output_arena_used_bytes=self._scheduler.output_used_bytes,
            uploads=self._uploads,
            input_arena_bytes=self._admission.operands.nbytes,
            output_arena_bytes=self._admission.output_bytes * len(self._fleet.devices),
            open_circuits=self._scheduler.circuits.open_count,
            tenants=self._admission.quotas.shown(),
            queued_s=self._scheduler.forecast.queued_s,
            longest_wait_s=max((now - call.submitted_s for call in self._scheduler.queue), default=0.0),
        )

    async def wait_ready(self, timeout_s: float) -> None:
        """Waits until every device is ready or down.

        Args:
            timeout_s: Seconds to wait; when they are over, one ready device is enough.

        Raises:
            ServerBusy: NO_DEVICE, none is ready; the message says why, device by device.
        """
        final = (DeviceState.READY, DeviceState.DOWN, DeviceState.QUARANTINED)
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
        self._driver.abandon(_shut_down)

    async def close(self) -> None:
        """Abandons what is inside, ends all workers and waits for them. Idempotent."""
        self.abandon()
        await self._driver.verification.close()
        await self._fleet.close()
        self._inputs.close()


def _shut_down(planned: PlannedCall) -> ServerDraining:
    return ServerDraining(
        f"{planned.plan.record.name}: the server was shut down before the result was there",
        operator=planned.plan.record.name,
        request_id=planned.request_id,
    )
