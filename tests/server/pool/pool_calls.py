"""Planned calls of `pool_world`, and what is asked of regions there."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tests.server.pool.scheduler_world import Call

from npugrad_server.pool.admission import Demand
from npugrad_server.pool.regions import ALIGNMENT, Region, aligned
from npugrad_server.pool.tenant import Tenant


@dataclass(frozen=True)
class Plan:
    """All that the pool looks at of a plan: what it needs is counted already."""

    record: Any
    signature: bytes
    demands: dict[bool, Demand]


@dataclass(frozen=True)
class Planned:
    """All that admission control looks at of a planned call."""

    plan: Plan
    options: Any
    tenant: Tenant
    deadline_s: float | None
    request_id: str = ""


def has_gap(regions: Iterable[Region], size: int, nbytes: int) -> bool:
    """Whether so many bytes fit between regions."""
    wanted, end = aligned(nbytes), 0
    taken: list[tuple[int, int]] = []
    for region in regions:
        if region.nbytes:
            insort(taken, (region.offset, region.nbytes))
    for offset, length in [*taken, (size // ALIGNMENT * ALIGNMENT, 0)]:
        if offset - end >= wanted:
            return True
        end = offset + length
    return not wanted


def told(call: Call) -> str:
    request = call.request
    due = "never" if request.deadline_s is None else f"{request.deadline_s:.3f}"
    return (
        f"tenant {request.tenant.name}, priority {request.priority}, label {request.label}, "
        f"operator {request.operator!r}, deterministic {request.deterministic}, due {due}, "
        f"outputs {request.output_bytes}, host {request.memory_bytes}, device {request.device_bytes}"
    )
