"""What the devices have for calls of one operator and mode: found once, and anew when a device changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from npugrad_server.pool.types import DeviceState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npugrad_server.pool.ledger import WorkerRecord


@dataclass(frozen=True)
class Offer:
    """What the devices have for calls of one operator and mode, as long as none of them changes.

    Attributes:
        refused: Row of the error table and why no device runs such calls; None when one does, or may once
            ready.
        most_bytes: The most of a device's own memory that such a call can have; None where it has no bound,
            or not yet.
        able: Devices that run such calls, or may once they are ready.
        fitting: Those of them that such calls go to: any mode will do for a call that asks for none.
        is_confined: Whether some device that is ready is not one of those.
        is_bounded: Whether one of them has memory of its own.
    """

    refused: tuple[str, str] | None
    most_bytes: int | None
    able: tuple[WorkerRecord, ...]
    fitting: tuple[WorkerRecord, ...]
    is_confined: bool
    is_bounded: bool


class Offers(dict[tuple[str, bool], Offer]):
    """The offers of the devices as they are, by operator and mode; `clear` belongs to every change of one.

    There are as many as operators and modes that calls have come with.
    """

    def __init__(self, workers: Sequence[WorkerRecord]) -> None:
        """Knows none yet.

        Args:
            workers: The devices.
        """
        super().__init__()
        self._workers = workers

    def __missing__(self, kind: tuple[str, bool]) -> Offer:
        """The offer for calls of an operator and mode that nobody has asked for since."""
        self[kind] = found = self.fresh(*kind)
        return found

    def fresh(self, operator: str, deterministic: bool) -> Offer:
        """The offer, found anew."""
        able = tuple(worker for worker in self._workers if worker.runs(operator, deterministic))
        suiting = tuple(worker for worker in able if worker.deterministic in (None, deterministic))
        is_ready = any(worker.state is DeviceState.READY for worker in suiting)
        fitting = suiting if is_ready else able
        ready = [worker for worker in self._workers if worker.state is DeviceState.READY]
        return Offer(
            refused=self._why_refused(operator, deterministic),
            most_bytes=most_bytes([w for w in self._coming() if not w.why_refuses(operator, deterministic)]),
            able=able,
            fitting=fitting,
            is_confined=not all(worker in fitting for worker in ready),
            is_bounded=any(worker.memory_bytes is not None for worker in self._workers),
        )

    def why_lacking(self, operator: str) -> str:
        """Why no device can run an operator; empty when one can, or may once it is ready."""
        reasons = [worker.why_lacks(operator) for worker in self._coming()]
        return "; ".join(dict.fromkeys(reasons)) if all(reasons) else ""

    def _why_refused(self, operator: str, deterministic: bool) -> tuple[str, str] | None:
        lacking = self.why_lacking(operator)
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

    def _coming(self) -> list[WorkerRecord]:
        """Devices that are ready, or may be one day."""
        return [worker for worker in self._workers if not worker.gone]


def most_bytes(workers: Sequence[WorkerRecord]) -> int | None:
    """The most memory of its own that one of them has; None when one has no bound, or none yet."""
    found = [worker.memory_bytes for worker in workers if worker.memory_bytes is not None]
    return max(found, default=0) if len(found) == len(workers) else None
