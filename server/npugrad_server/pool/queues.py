"""The orders of calls: in which they leave the queue, and in which their times come.

The queue goes by priority, then turn by turn between labels, then first come.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator


class Queueable(Protocol):
    """What the queue looks at."""

    @property
    def id(self) -> int:
        """Unique number of the call."""
        ...

    @property
    def priority(self) -> int:
        """Calls of higher priority leave first."""
        ...

    @property
    def label(self) -> str:
        """Calls of one label keep their order; labels take turns."""
        ...

    @property
    def kind(self) -> Hashable:
        """Calls of one label and kind never pass each other."""
        ...


T = TypeVar("T", bound=Queueable)


class FairQueue(Generic[T]):
    """Calls in lanes, one for each priority and label; the first of a lane leaves, or one it lets pass.

    A label that has had its turn goes to the end of its priority's round.

    Attributes:
        count: How many there are.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self._rounds: dict[int, OrderedDict[str, OrderedDict[int, T]]] = {}
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[T]:
        """Every call, in no promised order."""
        for lanes in self._rounds.values():
            for lane in lanes.values():
                yield from lane.values()

    def push(self, call: T) -> None:
        """Appends a call to its lane."""
        self._lane(call)[call.id] = call
        self.count += 1

    def restore(self, call: T) -> None:
        """Puts a call that had left back to the very front of its lane and its label's turn with it."""
        lane = self._lane(call)
        lane[call.id] = call
        lane.move_to_end(call.id, last=False)
        self._rounds[call.priority].move_to_end(call.label, last=False)
        self.count += 1

    def _lane(self, call: T) -> OrderedDict[int, T]:
        return self._rounds.setdefault(call.priority, OrderedDict()).setdefault(call.label, OrderedDict())

    def in_turn(self, lets_pass: Callable[[T], bool]) -> Iterator[T]:
        """The calls that may leave, in the order in which they should; of no use once one has left.

        Args:
            lets_pass: Whether calls of other kinds need not wait behind a call that cannot leave.
        """
        for priority in sorted(self._rounds, reverse=True):
            for lane in self._rounds[priority].values():
                passed: set[Hashable] = set()
                for call in lane.values():
                    if call.kind in passed:
                        continue
                    yield call
                    if not lets_pass(call):
                        break
                    passed.add(call.kind)

    def take(self, call: T) -> None:
        """Removes a call that starts, which ends its label's turn."""
        self.remove(call)
        lanes = self._rounds.get(call.priority)
        if lanes is not None and call.label in lanes:
            lanes.move_to_end(call.label)

    def remove(self, call: T) -> None:
        """Removes a call that gives up, wherever it stands in its lane."""
        lanes = self._rounds[call.priority]
        lane = lanes[call.label]
        del lane[call.id]
        self.count -= 1
        if not lane:
            del lanes[call.label]
        if not lanes:
            del self._rounds[call.priority]


class AlarmQueue:
    """When calls want to be looked at again: a heap that forgets the alarms of calls that ended before."""

    def __init__(self, is_live: Callable[[int], bool]) -> None:
        """Starts with none.

        Args:
            is_live: Whether the alarms of a call still mean anything.
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
        """The time of the next one that means anything."""
        while self._heap and not self._is_live(self._heap[0][1]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> Iterator[int]:
        """Takes out, one by one, the calls whose time has come."""
        while self._heap and self._heap[0][0] <= now:
            yield heapq.heappop(self._heap)[1]
