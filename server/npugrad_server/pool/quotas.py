"""Quotas: what tenants may hold at once, and who gives way when others need a place or memory.

When the queue or memory is full, the tenants that hold some of it share it by weight. The one that holds the
most for its weight is the furthest over its share. It gives way to a call whose tenant stays less far over.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from npugrad_server.pool.tenant import Tenant

MAX_IDLE = 256
"""Tenants without calls whose counters are kept, so that one call at a time does not recreate them."""


TURN_RETRY_S = 5.0
"""Seconds after which a call that found uploads in its way is to come again."""
_TURN_S = TURN_RETRY_S + 1.0
COMPARED_PART = 0.5
"""Fraction of the arenas that calls may keep until their results have been compared with the reference."""


@dataclass(eq=False)
class TenantUse:
    """What one tenant holds.

    Attributes:
        tenant: The tenant, as given by its newest call.
        call_count: Its admitted calls that are not gone yet.
        waiting_count: Those of them that have not started, uploads included.
        inflight_bytes: Their operands and results, until the memory is given back.
        gave_way_s: When an upload of it last gave way to another tenant, on the monotonic clock.
    """

    tenant: Tenant
    call_count: int = 0
    waiting_count: int = 0
    inflight_bytes: int = 0
    gave_way_s: float = -math.inf


class Quotas:
    """Counts what tenants hold.

    Attributes:
        uses: What each tenant with admitted calls holds, by name.
    """

    def __init__(self) -> None:
        """Starts with nobody."""
        self.uses: dict[str, TenantUse] = {}
        self._idle: dict[str, TenantUse] = {}

    def exceeded(self, tenant: Tenant, nbytes: int) -> str:
        """Tells which quota one more call of a tenant would exceed, with found and expected; empty for none.

        Args:
            tenant: Whose call it is.
            nbytes: Its operands and results.
        """
        use = self.uses.get(tenant.name)
        if use is None:
            return ""
        places, most = tenant.max_queue_depth, tenant.max_inflight_bytes
        if places is not None and use.waiting_count >= places:
            found = f"found {use.waiting_count} calls that have not started; expected fewer than {places}"
            return f"tenant {tenant.name}: {found} (its quota max_queue_depth)"
        if most is not None and use.inflight_bytes + nbytes > most:
            found = f"found {use.inflight_bytes} bytes in flight; expected room for {nbytes} of {most}"
            return f"tenant {tenant.name}: {found} (its quota max_inflight_bytes)"
        return ""

    def enter(self, tenant: Tenant, nbytes: int) -> TenantUse:
        """Counts an admitted call, with its operands and results, until `leave`."""
        use = self.uses.get(tenant.name)
        if use is None:
            use = self._idle.pop(tenant.name) if tenant.name in self._idle else TenantUse(tenant)
            self.uses[tenant.name] = use
        use.tenant = tenant
        use.call_count += 1
        use.waiting_count += 1
        use.inflight_bytes += nbytes
        return use

    def leave(self, use: TenantUse, nbytes: int, *, waits: bool) -> None:
        """A call is gone.

        Args:
            use: What its tenant holds.
            nbytes: Bytes it still held.
            waits: Whether it has not started.
        """
        use.call_count -= 1
        use.waiting_count -= waits
        use.inflight_bytes -= nbytes
        if not use.call_count:
            self._idle[use.tenant.name] = self.uses.pop(use.tenant.name)
            if len(self._idle) > MAX_IDLE:
                del self._idle[next(iter(self._idle))]

    def shown(self) -> dict[str, tuple[int, int]]:
        """Returns calls that have not started and bytes in flight, by the tenant's name in metrics."""
        found: dict[str, tuple[int, int]] = {}
        for use in self.uses.values():
            waiting, nbytes = found.get(use.tenant.shown, (0, 0))
            found[use.tenant.shown] = waiting + use.waiting_count, nbytes + use.inflight_bytes
        return found

    def over_share_of_places(self, tenant: Tenant) -> list[Tenant]:
        """Tenants further over their queue share than this one with one more call, the furthest first."""
        return self._over("waiting_count", tenant, 1)

    def over_share_of_memory(self, tenant: Tenant, nbytes: int) -> list[Tenant]:
        """Tenants further over their memory share than this one with `nbytes` more, the furthest first."""
        return self._over("inflight_bytes", tenant, nbytes)

    def _over(self, held: str, tenant: Tenant, more: int) -> list[Tenant]:
        own = self.uses.get(tenant.name)
        least = ((0 if own is None else getattr(own, held)) + more) / tenant.weight
        by_weight = [(getattr(use, held) / use.tenant.weight, name) for name, use in self.uses.items()]
        found = sorted((pair for pair in by_weight if pair[0] > least), reverse=True)
        return [self.uses[name].tenant for _, name in found if name != tenant.name]


@dataclass(eq=False)
class _Turn:
    """Room that a tenant's calls found none of, since when and until when, on the monotonic clock.

    It ends some seconds after the last refusal; once a call was admitted, after as long as they found none.
    """

    weight: float
    nbytes: int
    since_s: float
    until_s: float
    is_served: bool = False


class Turns:
    """Operand memory that tenants over their share leave free: others found none beside their uploads.

    An upload that is over in some seconds is left to finish. But one after the other would keep others out
    for ever: so their tenant and those that it kept out take turns of the same length.
    """

    def __init__(self) -> None:
        """Starts without any."""
        self._turns: dict[str, _Turn] = {}

    def refused(self, tenant: Tenant, nbytes: int, now: float) -> None:
        """A call found no room, but uploads of a tenant that is further over its share."""
        turn = self._turns.get(tenant.name)
        if turn is None or turn.is_served or now >= turn.until_s:
            turn = self._turns[tenant.name] = _Turn(tenant.weight, nbytes, now, now)
        turn.nbytes, turn.until_s = max(turn.nbytes, nbytes), now + _TURN_S

    def retry_after_s(self, tenant: Tenant, now: float) -> float | None:
        """When a refused call is to come again; None if no upload was in its way."""
        turn = self._turns.get(tenant.name)
        return TURN_RETRY_S if turn is not None and not turn.is_served and now < turn.until_s else None

    def admitted(self, tenant: Tenant, now: float) -> None:
        """A call found room."""
        turn = self._turns.get(tenant.name)
        if turn is not None and not turn.is_served:
            turn.is_served, turn.until_s = True, 2 * now - turn.since_s

    def of_others(self, tenant: Tenant, now: float) -> tuple[int, float, float]:
        """What is for others: bytes, the tenant's share beside them, and seconds until they do not."""
        self._turns = {name: turn for name, turn in self._turns.items() if now < turn.until_s}
        others = [turn for name, turn in self._turns.items() if name != tenant.name]
        share = tenant.weight / (tenant.weight + sum(turn.weight for turn in others))
        left_s = max((turn.until_s - now for turn in others), default=0.0)
        return sum(turn.nbytes for turn in others), share, left_s


@dataclass(eq=False)
class ComparedMemory:
    """What tenants' calls keep until their results have been compared with the reference.

    They keep operands and results for much longer than they run. Tenants that do so share a part of the
    arenas by weight, so that others find room; one that keeps nothing may always take some.
    """

    _millionths: Counter[str] = field(default_factory=Counter)
    _weights: dict[str, float] = field(default_factory=dict)

    def has_room(self, tenant: Tenant, millionths: int) -> bool:
        """Whether a tenant may take so much of the arenas now."""
        held = self._millionths[tenant.name]
        if not held or not millionths:
            return True
        return held + millionths <= 1e6 * COMPARED_PART * tenant.weight / sum(self._weights.values())

    def take(self, tenant: Tenant, millionths: int) -> None:
        """A call starts that keeps so much."""
        self._millionths[tenant.name] += millionths
        self._weights[tenant.name] = tenant.weight

    def give_back(self, tenant: Tenant, millionths: int) -> None:
        """A call keeps it no longer."""
        self._millionths[tenant.name] -= millionths
        if not self._millionths[tenant.name]:
            del self._millionths[tenant.name], self._weights[tenant.name]
