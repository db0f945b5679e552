"""Logs one line for each kind of warning, however many calls it is about.

Each call has a log line, too, but at a level that nobody watches, and among many others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npugrad_server.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Hashable

    from npugrad_server.pool.tenant import Tenant

REFUSALS = frozenset(
    {"TENANT_REFUSED", "QUOTA_EXCEEDED", "QUEUE_FULL", "WOULD_MISS_DEADLINE", "CIRCUIT_OPEN"}
)
"""Reasons of refusals that depend on who calls, how much and when, not on the call itself."""
QUIET_S = 60.0
"""Seconds between two lines of a kind."""


class RareLog:
    """Logs warnings: at once, then once in `QUIET_S` for each kind, with how many there were in between."""

    def __init__(self) -> None:
        """Starts empty."""
        self._log = get_logger()
        self._kinds: dict[Hashable, tuple[float, int]] = {}

    def warn(self, kind: Hashable, event: str, now: float, **fields: object) -> None:
        """Something happened again.

        Args:
            kind: What counts as the same; there may not be many.
            event: Name of the line.
            now: When, by `time.monotonic()`.
            fields: Of the line.
        """
        quiet_until, count = self._kinds.get(kind, (0.0, 0))
        if now < quiet_until:
            self._kinds[kind] = quiet_until, count + 1
            return
        self._kinds[kind] = now + QUIET_S, 0
        self._log.warning(event, **fields, earlier_count=count)


class RefusalLog(RareLog):
    """Logs refusals; a kind is a reason and a tenant as named in metrics."""

    def note(self, tenant: Tenant, reason: str, error: str, now: float) -> None:
        """A call was refused.

        Args:
            tenant: Its tenant.
            reason: Row of the error table.
            error: What its caller was told.
            now: When, by `time.monotonic()`.
        """
        self.warn((tenant.shown, reason), "refused", now, tenant=tenant.name, reason=reason, error=error)
