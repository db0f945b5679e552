"""The device pool: admission, scheduling, worker processes and the memory they share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npugrad_server.pool.types import (
    DeviceState,
    DeviceStatus,
    Outcome,
    PlannedCall,
    PoolObserver,
    PoolSettings,
    PoolStats,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

__all__ = [
    "Admission",
    "DevicePool",
    "DeviceState",
    "DeviceStatus",
    "Outcome",
    "PlannedCall",
    "PoolObserver",
    "PoolSettings",
    "PoolStats",
]


class Admission:
    """The bytes and the queue place of one accepted call; leaving it, or `close`, gives them back."""

    planned: PlannedCall

    def view(self, name: str) -> memoryview:
        """Writable memory of an operand's content, exactly its `content_bytes`.

        Raises:
            KeyError: The operand is null or the operator has none of this name.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Gives every byte back; may be called again. A call that still waits or runs is cancelled."""
        raise NotImplementedError

    def __enter__(self) -> Admission:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class DevicePool:
    """All devices of the server. Everything here is called on the event loop that opened it."""

    on_change: list[Callable[[], None]]

    @classmethod
    async def open(cls, settings: PoolSettings, observer: PoolObserver | None = None) -> DevicePool:
        """Starts a worker for every device and returns before they are ready."""
        raise NotImplementedError

    async def wait_ready(self, timeout_s: float) -> None:
        """Waits until every device is ready or down.

        Raises:
            ServerBusy: NO_DEVICE, none is ready.
        """
        raise NotImplementedError

    def admit(self, planned: PlannedCall) -> Admission:
        """Reserves all bytes and a queue place.

        Raises:
            CallTooLarge: It can never fit.
            ServerBusy: QUEUE_FULL, queue or operand memory are full now; NO_DEVICE, all devices are down.
            ServerDraining: The pool drains.
        """
        raise NotImplementedError

    async def run(self, admission: Admission) -> Outcome:
        """Runs an admitted call whose operands are all written.

        Raises:
            DeadlineExceeded: The deadline passed before the result was there.
            ServerBusy: NO_DEVICE, the last device was marked down.
            ServerDraining: The pool was closed meanwhile.
            WorkerLost: The worker died at every attempt.
            DeviceError: The device or the operator failed there; INTERNAL, VERIFICATION_FAILED or a vendor number.
            DeviceOutOfMemory: The device has no memory for it now.
            RequestError: UNSAFE_LEVELS. OperatorError: DETERMINISM_UNSUPPORTED.
        """
        raise NotImplementedError

    def devices(self) -> tuple[DeviceStatus, ...]:
        """Every device, in the order of the settings."""
        raise NotImplementedError

    def stats(self) -> PoolStats:
        """Figures of this moment."""
        raise NotImplementedError

    def start_draining(self) -> None:
        """Refuses every later call; those admitted go on."""
        raise NotImplementedError

    async def drained(self, timeout_s: float | None = None) -> bool:
        """Whether every admission was closed within the time (`drain_timeout_s` of the settings by default)."""
        raise NotImplementedError

    async def close(self) -> None:
        """Ends all workers and waits for them; calls still inside get `ServerDraining`."""
        raise NotImplementedError
