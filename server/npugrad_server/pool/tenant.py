"""Who a call is counted for: its tenant, whose calls share limits and a place in the queue."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tenant:
    """Whose calls are limited and scheduled together.

    Attributes:
        name: Unique among tenants; it appears in logs and metrics.
        weight: Share of the devices' time, relative to those of other tenants that have calls waiting.
    """

    name: str
    weight: float = 1.0


NOBODY = Tenant("")
"""Of calls that nobody identified, such as those of an acceptance."""
