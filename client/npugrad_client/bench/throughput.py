"""The rate of a run, which only this module defines: answers per second of the measured part.

The measured part ends with the load: after the duration, when the calls have run out, or when sending is
stopped. If answers counted until then only, calls under way at the end would be lost, and the rate would be
too low by the time of a call over the duration. So each answer stands for the seconds before it, as many as
the fastest call took; what another call took longer, it may have spent in a queue.

- In a closed loop, an answer counts by the share of these seconds that lies in the measured part.
- In an open loop, whose calls do not wait for each other, it counts if they begin in the measured part.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_LEAST_S = 1e-6


class AnswerCounter:
    """The answers to one worker's calls. Times are seconds from the start of the measured part.

    Args:
        window_s: Length of a window.
        is_closed: Whether the calls are those of a closed loop.
        end_s: When the measured part is to end.

    Attributes:
        end_s: When the measured part ends.
    """

    def __init__(self, window_s: float, is_closed: bool, end_s: float) -> None:
        self.end_s = end_s
        self._window_s, self._is_closed = window_s, is_closed
        self._fastest_s = math.inf
        self._counted = 0.0
        # Of a closed loop: how the rate changes in a window, and from a window on.
        self._within: defaultdict[int, float] = defaultdict(float)
        self._onwards: defaultdict[int, float] = defaultdict(float)

    def add(self, started_s: float, ended_s: float) -> None:
        """Counts a call that was sent, and answered, at these times."""
        self._fastest_s = min(self._fastest_s, max(ended_s - started_s, _LEAST_S))
        begun_s = ended_s - self._fastest_s
        if not self._is_closed:
            self._counted += 0 <= begun_s < self.end_s
            return
        until_s = min(ended_s, self.end_s)
        if until_s > begun_s:
            self._counted += max(0.0, until_s - max(begun_s, 0.0)) / self._fastest_s
            self._change(begun_s, 1 / self._fastest_s)
            self._change(until_s, -1 / self._fastest_s)

    def _change(self, at_s: float, per_s: float) -> None:
        """Notes that the rate changes: in the rest of a window, and in all windows after it."""
        number = window_number(at_s, self._window_s)
        self._within[number] += per_s * ((number + 1) * self._window_s - at_s)
        self._onwards[number + 1] += per_s * self._window_s

    @property
    def per_s(self) -> float:
        """The rate; 0 if the measured part has no length."""
        return self._counted / self.end_s if self.end_s > 0 else 0.0

    def by_window(self) -> Iterator[tuple[int, float]]:
        """Number of each window, and how many calls of a closed loop count in it."""
        level = 0.0
        for number in range(min(self._within, default=0), max(self._onwards, default=0)):
            level += self._onwards[number]
            if counted := round(self._within[number] + level, 9):
                yield number, counted


def window_number(at_s: float, window_s: float) -> int:
    """Number of the window that contains a time; negative in the warm-up."""
    # Quotients are slightly off: 0.3 / 0.1 is below 3. But no time before 0 is in the measured part.
    number = math.floor(at_s / window_s + 1e-9)
    return min(number, -1) if at_s < 0 else number


def expected_calls(load: Sequence[Sequence[float]], at_s: float) -> float:
    """How many calls are meant to start from 0 to a time; negative in the warm-up."""
    if at_s < 0:
        return at_s * (load[0][0] or load[0][1])
    calls = 0.0
    for start, end, lasts_s in load:
        within_s = min(at_s, lasts_s)
        calls += (start + (end - start) * within_s / lasts_s / 2) * within_s
        at_s -= within_s
    return calls


def evenness(scenario: Mapping[str, Any], intended: int, duration_s: float) -> float:
    """By what calls at a constant rate are to be multiplied; 1 for other loads.

    Almost a call more or less may start than the duration has room for: 2 at 50/s in 21 ms.
    """
    expected = expected_calls(scenario["load"], duration_s)
    is_off = scenario["arrival"] == "constant" and intended and abs(expected - intended) < 1
    return expected / intended if is_off else 1.0
