"""Calls per second over time, for a chart.

A window may contain one call or none, so counts per window jump up and down even if the load is steady.
Windows are therefore joined until each contains some calls. Intended calls are computed from the load, not
counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from npugrad_client.bench.record import Window
from npugrad_client.bench.throughput import expected_calls

if TYPE_CHECKING:
    from npugrad_client.bench.result import Result

_LEAST_CALLS, _LEAST_BINS = 10, 20


@dataclass(frozen=True)
class Bin:
    """Several neighbouring windows, joined.

    Attributes:
        start_s: Its start, in seconds from that of the measured part.
        end_s: Its end.
        window: What happened in it.
        intended_per_s: Intended calls per second in it.
    """

    start_s: float
    end_s: float
    window: Window
    intended_per_s: float

    @property
    def middle_s(self) -> float:
        """Its middle, where a chart shows it."""
        return (self.start_s + self.end_s) / 2

    def per_s(self, count: float) -> float:
        """A count in it as a rate."""
        return count / (self.end_s - self.start_s)


def bins(result: Result) -> list[Bin]:
    """Returns the bins of a run in order, warm-up first, including those in which nothing happened."""
    window_s, scenario = result.record.window_s, result.scenario
    last = math.ceil(result.duration_s / window_s - 1e-9)
    kept = {number: window for number, window in result.record.windows.items() if number < last}
    if not kept:
        return []
    joined = _joined(result, last)
    span_s, merged = joined * window_s, dict[int, Window]()
    for number, window in kept.items():
        merged.setdefault(number // joined, Window()).merge(window)
    found = []
    for index in range(min(merged), max(merged) + 1):
        start_s = max(index * span_s, -scenario["warm_up_s"])
        end_s = min((index + 1) * span_s, result.duration_s if index >= 0 else 0.0)
        window = merged.get(index, Window())
        if end_s - start_s > 1e-9:
            found.append(Bin(start_s, end_s, window, _intended(result, start_s, end_s, window)))
    return found


def _joined(result: Result, windows: int) -> int:
    """Number of windows per bin: some calls in each, but not so few bins that the shape is lost."""
    calls = result.intended / max(windows, 1)
    wanted = math.ceil(_LEAST_CALLS / calls) if calls else windows
    return max(1, min(wanted, windows // _LEAST_BINS))


def _intended(result: Result, start_s: float, end_s: float, window: Window) -> float:
    if result.is_closed or result.scenario["arrival"] == "trace":  # the only rate is that of the calls
        return window.tally.intended / (end_s - start_s)
    load = result.scenario["load"]
    return round((expected_calls(load, end_s) - expected_calls(load, start_s)) / (end_s - start_s), 9)
