"""Weighted fair queueing: which tenant's call leaves the queue next.

This is start-time fair queueing in device seconds. Each tenant has a virtual time, at which its next call
starts; a call advances it by the call's seconds on the device, divided by the tenant's weight. The tenant
with the lowest virtual time is next. So tenants with calls waiting get device time in proportion to their
weights, whatever the number, labels and priorities of their calls. A call is charged its expected seconds
when it starts; once it is off its worker, this is corrected to the seconds it took. A tenant without calls
saves up no credit: it comes back at the queue's virtual time, which is that of the last start.

Guarantees
    - Work conserving: if any call may leave, one does.
    - While two tenants whose calls could run anywhere both have calls waiting, the device seconds per weight
      that they get differ by at most those of one call on each stream, plus one call.
    - Tenants that come and go, however many, cannot starve a tenant that waits.
    - A tenant's calls leave in the order of its `TenantQueue`.
"""

from __future__ import annotations

from collections import OrderedDict
from operator import attrgetter
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from npugrad_server.pool.queues import Queueable, TenantQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from npugrad_server.pool.tenant import Tenant

NOMINAL_S = 1e-3
"""Seconds that a call is expected to take before any has been measured."""
MAX_CREDIT_CALLS = 16
"""How far a tenant may fall behind the queue, in calls as long as its next one or, if those are longer, as
those of others that it waits for. Device time that it could not use, because no device ran its calls, is not
made up for later at the cost of others."""
MAX_TENANTS = 256
"""Tenants kept at most; beyond this, those without calls are forgotten, and with them what they owe."""
_SMOOTHING = 0.1
"""Weight of the newest call in the running mean of seconds."""
_KEPT = 0.99
"""Factor by which the longest seconds decay with each call that comes off its worker."""

_waits, _virtual_time = attrgetter("count"), attrgetter("virtual_s")


def _rank(call: Queueable) -> tuple[int, int]:
    return call.priority, -call.id


class Chargeable(Queueable, Protocol):
    """A tenant's call, and what the queue records about it."""

    started_s: float
    """When it left the queue."""
    charged_s: float
    """Device seconds that its tenant was charged with then."""

    @property
    def tenant(self) -> Tenant:
        """Whose call it is."""
        ...

    @property
    def expected_s(self) -> float:
        """Device seconds it is expected to take; 0 if unknown."""
        ...


T = TypeVar("T", bound=Chargeable)


class FairQueue(Generic[T]):
    """Calls that wait for a worker, by tenant; and what tenants with calls on workers were charged.

    Attributes:
        count: How many calls wait.
        running: How many left and are still on their workers.
    """

    def __init__(self) -> None:
        """Starts empty."""
        # The least recently served tenant comes first.
        self._tenants: OrderedDict[str, TenantQueue[T]] = OrderedDict()
        self._virtual_s = self._last_s = 0.0
        self._mean_s = self._longest_s = NOMINAL_S
        self.count = self.running = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[T]:
        """Yields every call that waits, in no particular order."""
        for queue in self._tenants.values():
            yield from queue

    def push(self, call: T, *, front: bool = False) -> None:
        """Adds a call at the end of its lane or, if it had left before (`front`), at the front."""
        queue = self._tenants.get(call.tenant.name)
        if queue is None:
            queue = self._join(call)
        queue.weight = call.tenant.weight
        if not queue.count:
            queue.virtual_s = max(queue.virtual_s, self._virtual_s)
        queue.push(call, front=front)
        self.count += 1

    def _join(self, call: T) -> TenantQueue[T]:
        """Adds a new tenant's queue: one call behind, so that new tenants cannot starve the others."""
        if len(self._tenants) >= MAX_TENANTS:
            self._forget()
        cost_s = (call.expected_s or self._mean_s) / call.tenant.weight
        queue = self._tenants[call.tenant.name] = TenantQueue(self._virtual_s + cost_s)
        return queue

    def _forget(self) -> None:
        """Forgets tenants without calls: those that owe nothing, else the least recently served one."""
        idle = [name for name, queue in self._tenants.items() if not (queue.count or queue.running)]
        settled = [name for name in idle if self._tenants[name].virtual_s <= self._virtual_s]
        for name in settled or idle[:1]:
            del self._tenants[name]

    def in_turn(self, lets_pass: Callable[[T], bool]) -> Iterator[T]:
        """Yields the calls that may leave, in the order in which they should; invalid once one has left.

        Args:
            lets_pass: Returns whether calls of other kinds may pass a call that cannot leave.
        """
        queues = filter(_waits, self._tenants.values())
        for queue in sorted(queues, key=_virtual_time):
            yield from queue.in_turn(lets_pass)

    def take(self, call: T, now: float) -> None:
        """Removes a call that starts, and charges its tenant its expected seconds."""
        name = call.tenant.name
        queue = self._tenants[name]
        queue.take(call)
        self._tenants.move_to_end(name)
        queue.running += 1
        self.count -= 1
        self.running += 1
        call.started_s, call.charged_s = now, call.expected_s or self._mean_s
        cost_s = call.charged_s / queue.weight
        credit_s = MAX_CREDIT_CALLS * max(call.charged_s, self._longest_s) / queue.weight
        start_s = max(queue.virtual_s, self._virtual_s - credit_s)
        queue.virtual_s = start_s + cost_s
        self._last_s = max(self._last_s, queue.virtual_s)
        self._virtual_s = max(self._virtual_s, start_s)

    def come_off(self, call: T, now: float) -> None:
        """Corrects the charge for a call that came off its worker, however it ended, to what it took."""
        queue = self._tenants[call.tenant.name]
        queue.seen_s = now
        queue.running -= 1
        self.running -= 1
        used_s = max(0.0, now - call.started_s)
        queue.virtual_s += (used_s - call.charged_s) / queue.weight
        self._last_s = max(self._last_s, queue.virtual_s)
        self._mean_s += _SMOOTHING * (used_s - self._mean_s)
        self._longest_s = max(used_s, _KEPT * self._longest_s)
        if not (self.count or self.running):
            self._virtual_s = self._last_s  # debts lapse: nobody waits who is owed time

    def seen(self, now: float) -> Iterator[tuple[str, float]]:
        """Yields the tenants, and when each last had a call that waited or ran."""
        for name, queue in self._tenants.items():
            yield name, now if queue.count or queue.running else queue.seen_s

    def last(self, tenant: str) -> T | None:
        """Returns the call of a tenant that would leave last: the newest one of its lowest priority."""
        queue = self._tenants.get(tenant)
        return min(queue, key=_rank, default=None) if queue is not None else None

    def remove(self, call: T) -> None:
        """Removes a call that gives up, wherever it stands in its lane."""
        self._tenants[call.tenant.name].remove(call)
        self.count -= 1
