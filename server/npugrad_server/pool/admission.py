"""Admission control: what a call needs, and whether it can ever fit, fits now and would be done in time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from npugrad.errors import CallTooLarge, DeadlineExceeded, ServerBusy
from npugrad_server.pool.device_memory import FLOAT64_BYTES, need_of
from npugrad_server.pool.quotas import Quotas, Turns
from npugrad_server.pool.regions import ALIGNMENT, Region, RegionAllocator, aligned
from npugrad_server.pool.run_times import work_size_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from npugrad.meta import TensorMeta
    from npugrad_server.pool.forecast import Forecast, Prediction
    from npugrad_server.pool.run_times import WorkSize
    from npugrad_server.pool.tenant import Tenant
    from npugrad_server.pool.types import PlannedCall, PoolSettings

_MOST_RETRY_S = 30.0


@dataclass(frozen=True)
class RegionLayout:
    """Where tensors lie in one region.

    Attributes:
        offsets: First byte of each tensor, relative to the start of the region; the first tensor is at 0.
        nbytes: Length of the region.
    """

    offsets: Mapping[str, int]
    nbytes: int


@dataclass(frozen=True)
class Demand:
    """What a call needs.

    Attributes:
        inputs: Layout of the operands' contents, as transferred.
        outputs: Layout of the wanted outputs.
        memory_bytes: Host memory that the worker allocates for it: contiguous copies of tensors in other
            layouts, and the float64 results of a verification.
        unused_bytes: Size of the largest operand that is not kept. It takes no memory, but is limited like an
            operand that is kept as is or as a copy, whichever limit is higher.
        device_bytes: The device's own memory that its tensors take.
        workspace_key: Digest of what its workspace there depends on; None if the device has no memory of its
            own.
        work: Size by which its run time is looked up.
    """

    inputs: RegionLayout
    outputs: RegionLayout
    memory_bytes: int
    unused_bytes: int = 0
    device_bytes: int = 0
    workspace_key: bytes | None = None
    work: WorkSize | None = None

    @cached_property
    def inflight_bytes(self) -> int:
        """Bytes that count toward its tenant's quota: operands, as reserved, and results."""
        return aligned(self.inputs.nbytes) + self.outputs.nbytes


def demand_of(planned: PlannedCall, *, own_memory: bool = False) -> Demand:
    """Returns what a call needs, computed once for each plan.

    Args:
        planned: The call.
        own_memory: Whether devices have memory of their own, and accept operands that are not contiguous.
    """
    demands = planned.plan.demands
    if own_memory not in demands:
        demands[own_memory] = _count(planned, own_memory)
    return demands[own_memory]


def _count(planned: PlannedCall, own_memory: bool) -> Demand:
    kept = {name: meta for name, meta in planned.plan.call.inputs.items() if name not in planned.plan.unused}
    inputs = _layout({name: _content_bytes(meta) for name, meta in kept.items()})
    outputs = _layout({name: _tensor_bytes(meta) for name, meta in planned.plan.outputs.items()})
    unused = max((planned.plan.call.tensor(name).nbytes for name in planned.plan.unused), default=0)
    work = work_size_of(planned)
    if own_memory:
        need = need_of(planned)
        return Demand(inputs, outputs, need.host_bytes, unused, need.tensor_bytes, need.key, work)
    memory = copied_bytes(planned)
    if planned.options.verify:
        memory += sum(meta.size * FLOAT64_BYTES for meta in planned.plan.outputs.values() if meta is not None)
    return Demand(inputs, outputs, memory, unused, work=work)


def copied_bytes(planned: PlannedCall) -> int:
    """Returns the bytes of operands and results that are not contiguous in the formula's order of axes."""
    outputs = ((param, planned.plan.outputs.get(param.name)) for param in planned.plan.record.outputs)
    results = [param.ordered(meta) for param, meta in outputs if meta is not None]
    # If no output is wanted, the operands may be anything and are not examined.
    call = planned.plan.record.ordered(planned.plan.call) if results else planned.plan.call
    tensors = [*call.inputs.values(), *results]
    return sum(meta.nbytes for meta in tensors if meta is not None and not meta.is_contiguous)


def _content_bytes(meta: TensorMeta | None) -> int | None:
    return None if meta is None else meta.content_bytes


def _tensor_bytes(meta: TensorMeta | None) -> int | None:
    return None if meta is None else meta.nbytes


def _layout(sizes: Mapping[str, int | None]) -> RegionLayout:
    offsets: dict[str, int] = {}
    end = 0
    for name, nbytes in sizes.items():
        if nbytes is not None:
            offsets[name] = end
            end += aligned(nbytes)
    return RegionLayout(offsets, end)


def check_fits(
    operator: str,
    demand: Demand,
    *,
    input_arena_bytes: int,
    output_arena_bytes: int,
    memory_bytes: int,
    device_bytes: int | None = None,
) -> None:
    """Refuses a call that can never fit.

    Args:
        operator: Name of the operator.
        demand: What the call needs.
        input_arena_bytes: Memory for operands.
        output_arena_bytes: Memory for results.
        memory_bytes: Host memory for what workers allocate for calls.
        device_bytes: Own memory of the device that has the most; None if unbounded, or not known yet.

    Raises:
        CallTooLarge: It exceeds one of these limits; the message names the setting.
    """
    kept, copied = (
        (input_arena_bytes, "setting input_arena_bytes"),
        (memory_bytes, "setting device_memory_bytes"),
    )
    for what, found, limit, setting in (
        ("operands", demand.inputs.nbytes, input_arena_bytes, "setting input_arena_bytes"),
        ("results", demand.outputs.nbytes, output_arena_bytes, "setting output_arena_bytes"),
        ("copies in the worker", demand.memory_bytes, memory_bytes, "setting device_memory_bytes"),
        ("an operand that is not used", demand.unused_bytes, *max(kept, copied)),
        ("tensors on the device", demand.device_bytes, device_bytes, "the most that any device has free"),
    ):
        if limit is not None and found > limit:
            raise CallTooLarge(
                f"{operator}: found {found} bytes of {what}; expected at most {limit} ({setting})",
                operator=operator,
            )


class AdmissionControl:
    """Counts operand memory and queue places.

    Attributes:
        quotas: Quotas of the tenants.
        turns: Memory that tenants leave to others.
        operands: Allocator of regions of the input arena.
        output_bytes: Size of each output arena, a multiple of `ALIGNMENT`.
        memory_bytes: Host memory for what workers allocate for calls.
    """

    def __init__(self, settings: PoolSettings, memory_bytes: int, *, own_memory: bool = False) -> None:
        """Starts with everything free.

        Args:
            settings: Sizes and the depth of the queue.
            memory_bytes: Host memory for what workers allocate for calls.
            own_memory: Whether the devices have memory of their own.
        """
        self.quotas = Quotas()
        self.turns = Turns()
        self.operands = RegionAllocator(settings.input_arena_bytes)
        self.output_bytes = settings.output_arena_bytes // ALIGNMENT * ALIGNMENT
        self.memory_bytes = memory_bytes
        self._own_memory = own_memory
        self._max_waiting = settings.max_queue_depth

    def compared_millionths(self, demand: Demand) -> int:
        """The part of the operands' memory, or of an output arena if that is more, that a call takes."""
        parts = demand.inputs.nbytes / self.operands.nbytes, demand.outputs.nbytes / max(1, self.output_bytes)
        return 1 + int(1e6 * max(parts))

    def reserve(
        self,
        planned: PlannedCall,
        waiting: int,
        forecast: Forecast,
        now: float,
        device_bytes: int | None = None,
        make_room: Callable[[Sequence[Tenant]], bool] = lambda _: False,
        *,
        drop: Callable[[Sequence[Tenant]], bool] = lambda _: False,
    ) -> tuple[Demand, Region, Prediction]:
        """Reserves operand memory for a call.

        Args:
            planned: The call.
            waiting: Admitted calls that have not started.
            forecast: Predicts when the call would be done.
            now: When it arrived.
            device_bytes: Own memory of the device that has the most; None if unbounded, or not known yet.
            make_room: Called when operand memory is full, with the tenants further over their share; returns
                whether it freed some.
            drop: Called when the queue or operand memory is full, to drop a waiting call of the first of the
                given tenants that has one; returns whether there was one.

        Returns:
            What the call needs, its region of the input arena, and when it is expected to be done.

        Raises:
            CallTooLarge: It can never fit.
            DeadlineExceeded: Its deadline has passed.
            ServerBusy: QUEUE_FULL, the queue or operand memory is full now; QUOTA_EXCEEDED, its tenant's
                quota is used up; WOULD_MISS_DEADLINE, it would be done too late.
        """
        demand = self._fitting(planned, device_bytes)
        operator, options = planned.plan.record.name, planned.options
        prediction = forecast.predict(
            planned.tenant,
            (operator, options.deterministic),
            demand.work,
            now,
            (min(options.priority, planned.tenant.max_priority), options.label),
        )
        if planned.deadline_s is not None and now + prediction.longest_s > planned.deadline_s:
            _check_deadline(planned, demand, prediction, forecast, now)
        self._check_place(planned, demand, prediction, waiting, drop)
        return demand, self._take(planned, demand, prediction, make_room, drop, now), prediction

    def _fitting(self, planned: PlannedCall, device_bytes: int | None) -> Demand:
        """Returns what a call needs, after checking that it can fit."""
        operator, demand = planned.plan.record.name, demand_of(planned, own_memory=self._own_memory)
        check_fits(
            operator,
            demand,
            input_arena_bytes=self.operands.nbytes,
            output_arena_bytes=self.output_bytes,
            memory_bytes=self.memory_bytes,
            device_bytes=device_bytes,
        )
        most = planned.tenant.max_inflight_bytes
        if most is not None and demand.inflight_bytes > most:
            raise CallTooLarge(
                f"{operator}: tenant {planned.tenant.name}: found {demand.inflight_bytes} bytes of operands "
                f"and results; expected at most {most} (its quota max_inflight_bytes)",
                operator=operator,
            )
        return demand

    def _check_place(
        self,
        planned: PlannedCall,
        demand: Demand,
        prediction: Prediction,
        waiting: int,
        drop: Callable[[Sequence[Tenant]], bool],
    ) -> None:
        """Checks the tenant's quota and the place in the queue; arguments and errors as for `reserve`."""
        operator, tenant, quotas = planned.plan.record.name, planned.tenant, self.quotas
        if what := quotas.exceeded(tenant, demand.inflight_bytes):
            raise _busy(operator, what, prediction, "QUOTA_EXCEEDED")
        if waiting >= self._max_waiting and not drop(quotas.over_share_of_places(tenant)):
            what = f"the queue is full: {waiting} calls wait (setting max_queue_depth)"
            raise _busy(operator, what, prediction)

    def _take(
        self,
        planned: PlannedCall,
        demand: Demand,
        prediction: Prediction,
        make_room: Callable[[Sequence[Tenant]], bool],
        drop: Callable[[Sequence[Tenant]], bool],
        now: float,
    ) -> Region:
        """Allocates operand memory, but what is for others; arguments and errors as for `reserve`."""
        operator, tenant, quotas = planned.plan.record.name, planned.tenant, self.quotas
        self._leave_room(planned, demand, now)
        region = self.operands.allocate(demand.inputs.nbytes)
        while region is None:
            over = quotas.over_share_of_memory(tenant, demand.inflight_bytes)
            if not (make_room(over) or drop(over)):
                break
            region = self.operands.allocate(demand.inputs.nbytes)
        if region is None:
            used = f"{self.operands.used_bytes} of {self.operands.nbytes}"
            what = f"no room for {demand.inputs.nbytes} bytes of operands now: {used} bytes are in use"
            raise _busy(operator, what, prediction, retry_after_s=self.turns.retry_after_s(tenant, now))
        self.turns.admitted(tenant, now)
        return region

    def _leave_room(self, planned: PlannedCall, demand: Demand, now: float) -> None:
        """Refuses a call over its tenant's share of operand memory that would take what is for others."""
        tenant, wanted, most = planned.tenant, demand.inputs.nbytes, self.operands.nbytes
        others_bytes, share, left_s = self.turns.of_others(tenant, now)
        use = self.quotas.uses.get(tenant.name)
        held = demand.inflight_bytes + (use.inflight_bytes if use is not None else 0)
        if others_bytes and held > share * most and self.operands.used_bytes + wanted + others_bytes > most:
            operator = planned.plan.record.name
            raise ServerBusy(
                f"{operator}: no room for {wanted} bytes of operands now: tenant {tenant.name} would hold "
                f"more than its share, and {others_bytes} are for others, who found none beside its uploads",
                retry_after_s=left_s,
                operator=operator,
            )


def _busy(
    operator: str,
    what: str,
    prediction: Prediction,
    reason: str = "QUEUE_FULL",
    *,
    retry_after_s: float | None = None,
) -> ServerBusy:
    """Returns an error with a retry delay, by default until the tenant's turn would come."""
    return ServerBusy(
        f"{operator}: {what}",
        reason=reason,
        retry_after_s=retry_after_s or prediction.retry_after_s,
        operator=operator,
    )


def _check_deadline(
    planned: PlannedCall, demand: Demand, prediction: Prediction, forecast: Forecast, now: float
) -> None:
    """Refuses a call whose deadline has passed, or is expected to pass before it is done."""
    left_s = (planned.deadline_s or 0.0) - now
    operator, kind = planned.plan.record.name, (planned.plan.record.name, planned.options.deterministic)
    if left_s <= 0:
        raise DeadlineExceeded(
            f"{operator}: the deadline passed {-left_s:.3g} s before the call arrived",
            operator=operator,
            request_id=planned.request_id,
        )
    if demand.work is not None and prediction.longest_run_s > left_s:
        prediction.is_probe = forecast.probe(kind, demand.work, now)
    if not prediction.is_probe:
        raise ServerBusy(
            f"{operator}: deadline: {prediction}; expected at most the {left_s:.3g} s that are left",
            reason="WOULD_MISS_DEADLINE",
            retry_after_s=min(prediction.wait_s, _MOST_RETRY_S) or None,
            operator=operator,
            request_id=planned.request_id,
        )
