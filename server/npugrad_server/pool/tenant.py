"""Who a call is counted for: its tenant, whose calls share limits and a place in the queue."""

from __future__ import annotations

from dataclasses import dataclass

OTHERS = "other"
"""What metrics call all tenants that nobody listed, so that callers cannot make more of them."""


@dataclass(frozen=True)
class Tenant:
    """Whose calls are limited and scheduled together.

    Attributes:
        name: Unique among tenants; it appears in logs.
        weight: Share of the devices' time, relative to those of other tenants that have calls waiting.
        max_priority: What higher priorities of its calls are lowered to.
        max_queue_depth: Its calls that have not started, uploads included; None for no quota.
        max_inflight_bytes: Operands and results of its calls, until the memory is given back; None likewise.
        shown: Its name in metrics.
    """

    name: str
    weight: float = 1.0
    max_priority: int = 100
    max_queue_depth: int | None = None
    max_inflight_bytes: int | None = None
    shown: str = OTHERS


NOBODY = Tenant("")
"""Of calls that nobody identified, such as those of an acceptance."""
