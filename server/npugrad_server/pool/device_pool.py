"""The pool as the service sees it: admits a call, runs it, frees its memory.

The scheduler makes all decisions; the driver connects it to the rest of the world.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING

from npugrad.errors import ServerBusy, ServerDraining
from npugrad_server.devices import parse_device
from npugrad_server.machine import memory_bytes
from npugrad_server.pool.admission import AdmissionControl, demand_of
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
"""Uploads in progress allowed for each place of the queue: few of them complete at the same time."""
_UPLOAD_RETRY_S = 1.0
_JUDGED_AFTER_S, _WARNED_S = 1.0, 60.0
"""Seconds after which the rate of an upload is judged, and for which a tenant's uploads are judged at once
after one gave way: otherwise one that is sent again and again would keep its memory."""


class DevicePool:
    """All devices of the server. All methods must be called on the event loop that opened it.

    Guarantees
        - Every accepted call gets exactly one answer, even if workers die.
        - A call's memory is reused only after its ticket was closed and no worker can touch it.
        - No method blocks the event loop for longer than sending a message takes.

    Attributes:
        on_change: Callbacks without arguments, called whenever a device changes its state, or its start
            reaches another stage.
    """

    def __init__(self, settings: PoolSettings, observer: PoolObserver | None = None) -> None:
        """Creates the input arena; use `open` instead.

        Args:
            settings: Devices, sizes and times.
            observer: Notified of events.
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
            observer: Notified of events; none by default.

        Raises:
            DeviceListError: A device is invalid.
            OSError: No memory or descriptor is left.
        """
        pool = cls(settings, observer)
        pool._driver.apply(pool._scheduler.start(time.monotonic()))
        pool._fleet.prefault(pool._inputs)
        pool._driver.verification.open()
        return pool

    # ------------------------------------------------------------------------------------------------- calls

    def check(self, planned: PlannedCall, *, is_upload: bool = False) -> None:
        """Refuses a call that would not be admitted now; errors as for `admit`."""
        _, region, _ = self._reserve(planned, is_upload)
        self._admission.operands.free(region)

    def admit(self, planned: PlannedCall, *, is_upload: bool = False) -> Ticket:
        """Admits a call: reserves all its bytes and a place in the queue.

        Args:
            planned: The call.
            is_upload: Whether its operands are still to come, at its caller's pace. It takes no place in the
                queue until they are complete, and then gets one however long the queue is. There may be
                `UPLOADS_PER_PLACE` uploads for each place.

        Raises:
            CallTooLarge: It can never fit.
            DeadlineExceeded: Its deadline has passed.
            ServerBusy: QUEUE_FULL, the queue or operand memory is full now; QUOTA_EXCEEDED, its tenant's
                quota is used up; WOULD_MISS_DEADLINE, it would be done too late; NO_DEVICE, all devices are
                down.
            ServerDraining: The pool was closed, or its calls were abandoned.
            UnsupportedOperator: No device can run the operator.
            OperatorError: DETERMINISM_UNSUPPORTED, no device can run it deterministically.
            CircuitOpen: Calls of its tenant and signature, or operator, killed workers.
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
        if planned.options.verify:
            ticket.state.compared_millionths = self._admission.compared_millionths(demand)
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
            self._check_uploads(planned)
        return self._admission.reserve(
            planned,
            self._whole + self._scheduler.queue_depth,
            self._scheduler.forecast,
            time.monotonic(),
            eligible.most_bytes,
            lambda over: self._make_room(over) or self._give_turn(planned, over),
            drop=self._drop,
        )

    def _check_uploads(self, planned: PlannedCall) -> None:
        """Refuses an upload if there are too many others, none slow enough to have to give way."""
        found, operator = self._uploads - self._whole, planned.plan.record.name
        over = self._admission.quotas.over_share_of_places(planned.tenant)
        if found >= self._most_uploads and not self._make_room(over):
            raise ServerBusy(
                f"{operator}: found {found} uploads in progress; expected fewer than {self._most_uploads}",
                retry_after_s=_UPLOAD_RETRY_S,
                operator=operator,
            )

    def _make_room(self, over: Sequence[Tenant]) -> bool:
        """Has an upload give its memory back; returns whether there was one.

        It is one that is too slow, or else the youngest of the first tenant over its share that would take
        long.
        """
        uploads = [t for t in self._driver.tickets.values() if not t.started and t.give_way is not None]
        if any(self._end_upload(ticket, math.inf) for ticket in uploads):
            return True
        now = time.monotonic()
        for tenant in over:
            use = self._admission.quotas.uses[tenant.name]
            judged_after_s = 0.0 if now - use.gave_way_s < _WARNED_S else _JUDGED_AFTER_S
            own = [ticket for ticket in uploads if ticket.use is use]
            if any(self._end_upload(ticket, judged_after_s) for ticket in reversed(own)):
                use.gave_way_s = now
                return True
        return False

    def _give_turn(self, planned: PlannedCall, over: Sequence[Tenant]) -> bool:
        """Has uploads that may finish leave room for a call afterwards; False, as there is none now."""
        uses = [self._admission.quotas.uses[tenant.name] for tenant in over]
        uploads = [t for t in self._driver.tickets.values() if not t.started and t.give_way is not None]
        if any(ticket.use in uses for ticket in uploads):
            nbytes = demand_of(planned).inputs.nbytes
            self._admission.turns.refused(planned.tenant, nbytes, time.monotonic())
        return False

    def _end_upload(self, ticket: Ticket, judged_after_s: float) -> bool:
        """Has an upload give way if it has to; returns whether it did."""
        if ticket.give_way is None or not ticket.give_way(judged_after_s):
            return False
        ticket.close()
        return True

    def _drop(self, tenants: Sequence[Tenant]) -> bool:
        """Drops the last waiting call of the first tenant that has one; returns whether there was one."""
        for tenant in tenants:
            commands = self._scheduler.drop_last(tenant.name, time.monotonic())
            dropped = [self._driver.tickets[c.call] for c in commands if isinstance(c, FailCall)]
            self._driver.apply(commands)
            for ticket in dropped:  # its caller learns of it only later, but no worker reads its operands
                ticket.stop_waiting()
                self._driver.drop_operands(ticket)
                ticket.give_back(ticket.inflight_bytes)
            if dropped:
                return True
        return False

    def drop_operands(self, ticket: Ticket) -> None:
        """Frees the operands of a call that has its outcome; no worker reads them any more."""
        if ticket.check is None:
            self._driver.drop_operands(ticket)

    def _check_circuit(self, planned: PlannedCall) -> None:
        """Refuses a call early, before its operands are sent, if its circuit is open."""
        owner = planned.tenant.name, planned.plan.record.name
        refusal = self._scheduler.circuits.refusal(owner, planned.plan, time.monotonic())
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
            ticket: From `admit`; it must stay open until the outcome has been used.

        Returns:
            Views of the results, valid until the ticket is closed.

        Raises:
            CallTooLarge: No device has room for its tensors, as it turned out after it was admitted.
            DeadlineExceeded: The deadline passed before the result was ready.
            ServerBusy: NO_DEVICE, the last device was marked down; WOULD_MISS_DEADLINE, it could only start
                too late; QUEUE_FULL, it gave way to a call of a tenant that has less of the queue.
            ServerDraining: The pool was closed meanwhile.
            WorkerLost: The worker died at every attempt.
            CircuitOpen: Workers died under other calls of its tenant and signature, or operator, meanwhile.
            DeviceError: The device or the operator failed; INTERNAL, VERIFICATION_FAILED or a vendor number.
            DeviceOutOfMemory: Neither the device nor another one has memory for it now.
            RequestError: UNSAFE_LEVELS.
            OperatorError: DETERMINISM_UNSUPPORTED.
            UnsupportedOperator: No device can run the operator, as it turned out after it was admitted.
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
        """Returns the workspace that a legal call would need; None if no device can tell now."""
        return await self._driver.queries.workspace_bytes(record, call)

    def predict(self, planned: PlannedCall) -> tuple[float | None, float | None]:
        """Returns the seconds that a call sent now would wait and run; None for what is unknown."""
        options, forecast = planned.options, self._scheduler.forecast
        kind = planned.plan.record.name, options.deterministic
        lane = min(options.priority, planned.tenant.max_priority), options.label
        work, now = work_size_of(planned), time.monotonic()
        found = forecast.predict(planned.tenant, kind, work, now, lane, sent=False)
        return (found.wait_s if found.is_wait_known else None), found.run_s or None

    def _closed(self, ticket: Ticket) -> None:
        """Frees the memory of a closed ticket, now or once its worker is done with it."""
        if ticket.check is not None and self._driver.verification.keeps(ticket.check):
            return  # `Ticket.end_check` calls this again
        if ticket.held is not None:
            self._fleet.let_go(ticket.held)
            ticket.held = None
        if ticket.started:
            self._driver.apply(self._scheduler.close(ticket.number, time.monotonic()))
        else:
            self._uploads -= 1
            self._whole -= not ticket.is_upload
            self._driver.release(ticket.number)

    # ------------------------------------------------------------------------------------------------- status

    def unavailable(self, operator: str) -> str:
        """Returns why no device can run an operator; empty if one can, or may once it is ready."""
        return self._scheduler.eligibility.why_unavailable(operator)

    def devices(self) -> tuple[DeviceStatus, ...]:
        """Returns the status of every device, in the order of the settings."""
        return self._driver.devices()

    def stats(self) -> PoolStats:
        """Returns current figures."""
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
        """Waits until every device is ready, down or quarantined.

        Args:
            timeout_s: Seconds to wait; after that, one ready device is enough.

        Raises:
            ServerBusy: NO_DEVICE, none is ready; the message says why for each device.
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

    # ----------------------------------------------------------------------------------------------- shutdown

    def abandon(self) -> None:
        """Fails all current and later calls with `ServerDraining`; workers keep running. Idempotent."""
        self._driver.abandon(_shut_down)

    async def close(self) -> None:
        """Abandons all calls, ends all workers and waits for them. Idempotent."""
        self.abandon()
        await self._driver.verification.close()
        await self._fleet.close()
        self._inputs.close()


def _shut_down(planned: PlannedCall) -> ServerDraining:
    return ServerDraining(
        f"{planned.plan.record.name}: the server was shut down before the result was ready",
        operator=planned.plan.record.name,
        request_id=planned.request_id,
    )
