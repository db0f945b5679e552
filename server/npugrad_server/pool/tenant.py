"""Tenants, for whom calls are counted: a tenant's calls share limits and a place in the queue."""

from __future__ import annotations

from dataclasses import dataclass

OTHERS = "other"
"""Name in metrics of all tenants that are not configured, so that callers cannot add more names."""


@dataclass(frozen=True)
class Tenant:
    """A caller, or several, whose calls are limited and scheduled together.

    Attributes:
        name: Unique among tenants; it appears in logs.
        weight: Share of the devices' time, relative to those of other tenants that have calls waiting.
        max_priority: Highest priority of its calls; higher ones are lowered to it.
        max_queue_depth: Limit on calls that have not started, uploads included; None for no quota.
        max_inflight_bytes: Limit on bytes of operands and results until their memory is given back; None for
            no quota.
        shown: Its name in metrics.
    """

    name: str
    weight: float = 1.0
    max_priority: int = 100
    max_queue_depth: int | None = None
    max_inflight_bytes: int | None = None
    shown: str = OTHERS


NOBODY = Tenant("")
"""The tenant of unidentified calls, such as those of an acceptance."""
