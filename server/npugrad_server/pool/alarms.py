"""When calls want to be looked at again: a heap that forgets the alarms of calls that ended before."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Alarms:
    """Times with the number of a call each."""

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
