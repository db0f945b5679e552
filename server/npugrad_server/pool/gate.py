"""Whether a call is let in: what it needs against what there is, and what is free now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npugrad.errors import ServerBusy
from npugrad_server.pool.demand import check_fits, demand_of
from npugrad_server.pool.regions import ALIGNMENT, Region, RegionAllocator

if TYPE_CHECKING:
    from npugrad_server.pool.demand import Demand
    from npugrad_server.pool.types import PlannedCall, PoolSettings

_LEAST_RETRY_S, _MOST_RETRY_S = 0.1, 30.0
_SMOOTHING = 0.1
"""Weight of the newest call in the running mean of service times."""


class Gate:
    """Counts operand memory and queue places.

    Attributes:
        operands: Regions of the input arena.
        output_bytes: Size of each output arena, a multiple of `ALIGNMENT`.
        memory_bytes: Host memory for what workers make of operands.
    """

    def __init__(self, settings: PoolSettings, memory_bytes: int, *, own_memory: bool = False) -> None:
        """Starts with everything free.

        Args:
            settings: Sizes and the depth of the queue.
            memory_bytes: Host memory for what workers make of operands.
            own_memory: Whether the devices have memory of their own.
        """
        self.operands = RegionAllocator(settings.input_arena_bytes)
        self.output_bytes = settings.output_arena_bytes // ALIGNMENT * ALIGNMENT
        self.memory_bytes = memory_bytes
        self._own_memory = own_memory
        self._max_waiting = settings.max_queue_depth
        self._streams = len(settings.devices) * settings.streams_per_device
        self._mean_s = 0.0

    def note(self, seconds: float) -> None:
        """Remembers how long a call took on its device, to tell others when to come again."""
        self._mean_s += _SMOOTHING * (seconds - self._mean_s)

    def reserve(
        self, planned: PlannedCall, waiting: int, running: int, device_bytes: int | None = None
    ) -> tuple[Demand, Region]:
        """Takes operand memory for a call.

        Args:
            planned: The call.
            waiting: Calls that were let in and have not started.
            running: Calls that have.
            device_bytes: The roomiest device's own memory; None where nothing bounds it, or not yet.

        Returns:
            What it needs, and its part of the input arena.

        Raises:
            CallTooLarge: It can never fit.
            ServerBusy: QUEUE_FULL, queue or operand memory are full now.
        """
        operator, demand = planned.plan.record.name, demand_of(planned, own_memory=self._own_memory)
        check_fits(
            operator,
            demand,
            input_arena_bytes=self.operands.nbytes,
            output_arena_bytes=self.output_bytes,
            memory_bytes=self.memory_bytes,
            device_bytes=device_bytes,
        )
        if waiting >= self._max_waiting:
            what = f"found {waiting} waiting calls; expected fewer than {self._max_waiting}"
            raise self._busy(operator, what, waiting + running)
        region = self.operands.allocate(demand.inputs.nbytes)
        if region is None:
            used = f"{self.operands.used_bytes} of {self.operands.nbytes}"
            what = f"found {used} bytes of operand memory in use; expected room for {demand.inputs.nbytes}"
            raise self._busy(operator, what, waiting + running)
        return demand, region

    def _busy(self, operator: str, what: str, ahead: int) -> ServerBusy:
        estimate = self._mean_s * (ahead + 1) / self._streams
        return ServerBusy(
            f"{operator}: {what}",
            retry_after_s=min(max(estimate, _LEAST_RETRY_S), _MOST_RETRY_S),
            operator=operator,
        )
