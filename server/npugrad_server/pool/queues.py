"""The order in which one tenant's calls leave the queue, and the order in which alarms of calls are due.

A tenant's queue is ordered by priority, then by labels taking turns, then first come, first served;
`fair_queue` decides which tenant is next.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator


class Queueable(Protocol):
    """What the queue needs to know about a call."""

    @property
    def id(self) -> int:
        """Unique number of the call."""
        ...

    @property
    def priority(self) -> int:
        """A tenant's calls of higher priority leave first."""
        ...

    @property
    def label(self) -> str:
        """A tenant's calls of one label keep their order; its labels take turns."""
        ...

    @property
    def kind(self) -> Hashable:
        """Calls of one label and kind never pass each other."""
        ...


T = TypeVar("T", bound=Queueable)

MAX_PASSED = 16
"""How many of a tenant's calls of higher priorities may start before a waiting priority gets its turn."""


class _Round(OrderedDict[str, OrderedDict[int, T]]):
    """The calls of one priority: a lane for each label, in the order of the labels' turns.

    Attributes:
        passed: Calls of higher priorities started since the last one of this priority.
    """

    passed = 0


class TenantQueue(Generic[T]):
    """The calls of one tenant, in lanes, one for each priority and label.

    The first call of a lane leaves, or one that it lets pass. After its turn a label goes to the end of its
    priority's round. Priorities age: once `MAX_PASSED` calls of higher priorities have started while one
    waited, its next call is the tenant's next one.

    Attributes:
        weight: The tenant's share, relative to other tenants.
        virtual_s: Virtual time at which its next call starts.
        count: Calls that wait.
        running: Calls on workers.
        seen_s: When a call last came off its worker.
    """

    def __init__(self, virtual_s: float) -> None:
        """Starts empty.

        Args:
            virtual_s: Virtual time at which its first call starts.
        """
        self._rounds: dict[int, _Round[T]] = {}
        self.weight, self.virtual_s, self.seen_s = 1.0, virtual_s, -math.inf
        self.count = self.running = 0

    def __iter__(self) -> Iterator[T]:
        """Every call, in no promised order."""
        for lanes in self._rounds.values():
            for lane in lanes.values():
                yield from lane.values()

    def push(self, call: T, *, front: bool = False) -> None:
        """Adds a call to its lane.

        Args:
            call: The call.
            front: Whether it goes to the front of its lane, and its label's turn is next.
        """
        lanes = self._rounds.get(call.priority)
        if lanes is None:
            lanes = self._rounds[call.priority] = _Round()
        lane = lanes.get(call.label)
        if lane is None:
            lane = lanes[call.label] = OrderedDict()
        lane[call.id] = call
        self.count += 1
        if front:
            lane.move_to_end(call.id, last=False)
            lanes.move_to_end(call.label, last=False)

    def in_turn(self, lets_pass: Callable[[T], bool]) -> Iterator[T]:
        """Yields the calls that may leave, in the order in which they should; invalid once one has left."""
        for priority in self._rounds if len(self._rounds) == 1 else self._ranked():
            for lane in self._rounds[priority].values():
                passed: set[Hashable] = set()
                for call in lane.values():
                    if call.kind in passed:
                        continue
                    yield call
                    if not lets_pass(call):
                        break
                    passed.add(call.kind)

    def _ranked(self) -> list[int]:
        """Returns the priorities in their order: those passed too often first, then the highest."""
        passed = {p: lanes.passed if lanes.passed >= MAX_PASSED else 0 for p, lanes in self._rounds.items()}
        return sorted(self._rounds, key=lambda priority: (passed[priority], priority), reverse=True)

    def take(self, call: T) -> None:
        """Removes a call that starts, which ends its label's turn and lets lower priorities age."""
        lanes = self._rounds[call.priority]
        lanes.passed = 0
        if len(self._rounds) > 1:
            for priority, others in self._rounds.items():
                others.passed += priority < call.priority
        self.remove(call)
        if call.label in lanes:
            lanes.move_to_end(call.label)

    def remove(self, call: T) -> None:
        """Removes a call, wherever it stands in its lane."""
        lanes = self._rounds[call.priority]
        lane = lanes[call.label]
        del lane[call.id]
        self.count -= 1
        if not lane:
            del lanes[call.label]
        if not lanes:
            del self._rounds[call.priority]


class AlarmQueue:
    """The alarms of calls: a heap that drops those of calls that have ended."""

    def __init__(self, is_live: Callable[[int], bool]) -> None:
        """Starts with none.

        Args:
            is_live: Whether the alarms of a call still matter.
        """
        self._is_live = is_live
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, when: float, call: int, calls: int) -> None:
        """Sets an alarm.

        Args:
            when: Its time.
            call: Number of the call.
            calls: How many calls there are.
        """
        heapq.heappush(self._heap, (when, call))
        # Calls usually end long before their deadline; their alarms must not pile up until then.
        if len(self._heap) > 4 * calls + 64:
            self._heap = [alarm for alarm in self._heap if self._is_live(alarm[1])]
            heapq.heapify(self._heap)

    def next(self) -> float | None:
        """Returns the time of the next alarm that still matters."""
        while self._heap and not self._is_live(self._heap[0][1]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> Iterator[int]:
        """Removes and yields, one by one, the calls whose alarms are due."""
        while self._heap and self._heap[0][0] <= now:
            yield heapq.heappop(self._heap)[1]
