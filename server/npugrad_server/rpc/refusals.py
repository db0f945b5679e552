"""Logs one line for each kind of refusal, however many calls are refused.

Each call has a log line, too, but at a level that nobody watches, and among many others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npugrad_server.logs import get_logger

if TYPE_CHECKING:
    from npugrad_server.pool.tenant import Tenant

REFUSALS = frozenset(
    {"TENANT_REFUSED", "QUOTA_EXCEEDED", "QUEUE_FULL", "WOULD_MISS_DEADLINE", "CIRCUIT_OPEN"}
)
"""Reasons of refusals that depend on who calls, how much and when, not on the call itself."""
QUIET_S = 60.0
"""Seconds between two lines of a kind."""


class RefusalLog:
    """Logs refusals: at once, then once in `QUIET_S` for each reason and tenant as named in metrics."""

    def __init__(self) -> None:
        """Starts empty."""
        self._log = get_logger()
        self._kinds: dict[tuple[str, str], tuple[float, int]] = {}

    def note(self, tenant: Tenant, reason: str, error: str, now: float) -> None:
        """A call was refused.

        Args:
            tenant: Its tenant.
            reason: Row of the error table.
            error: What its caller was told.
            now: When, by `time.monotonic()`.
        """
        kind = (tenant.shown, reason)
        quiet_until, count = self._kinds.get(kind, (0.0, 0))
        if now < quiet_until:
            self._kinds[kind] = quiet_until, count + 1
            return
        self._kinds[kind] = now + QUIET_S, 0
        self._log.warning("refused", tenant=tenant.name, reason=reason, error=error, earlier_count=count)
