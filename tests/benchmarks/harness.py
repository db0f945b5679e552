"""Comparing contestants: alternation in both orders, ratios with their spread.

How a case is measured: every contestant gets a slot of the same length; a slot's figure is the median
seconds of its calls. Slots alternate, ours first in even repetitions and last in odd ones, so that a drift
of the machine meets all alike. Each repetition gives one ratio per peer, the peer's seconds over ours (above
1: ours is better); what is reported is the median of these ratios, with the lowest and the highest.
Absolute seconds are shown for orientation only: they belong to the machine and the moment.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_FEWEST_REPETITIONS = 3
_MOST_CALLS = 5000


def to_line(fields: Mapping[str, Any]) -> str:
    """An object on one line of JSON, numbers to four digits."""
    return json.dumps(_rounded(fields))


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        repetitions: Ratios taken for each peer.
        slot_s: Seconds that a contestant calls for in each repetition; at least two calls.
        case_s: Seconds after which a case ends early, once there are three repetitions. Bounds a run on a
            machine that is slow or busy; the figures say how many repetitions there were.
        quick: Only the first case, to see that everything runs; the figures mean nothing.
    """

    repetitions: int = 6
    slot_s: float = 0.2
    case_s: float = 12.0
    quick: bool = False

    def calls(self, one_s: float) -> int:
        """Calls that fill a slot when one takes so many seconds."""
        least = 1 if self.quick else 2
        return max(least, min(_MOST_CALLS, math.ceil(self.slot_s / max(one_s, 1e-6))))

    def first(self, cases: Any, count: int = 1) -> list[Any]:
        return list(cases)[: count if self.quick else None]


FULL = Effort()
QUICK = Effort(repetitions=2, slot_s=0.02, quick=True)


@dataclass(frozen=True)
class Row:
    """One result as scripts read it: the median, lowest and highest ratio of a peer's seconds to ours."""

    bench: str
    case: str
    dtype: str
    peer: str
    ratio: float
    low: float
    high: float

    def line(self) -> str:
        return to_line(asdict(self))


@dataclass(frozen=True)
class Result:
    """One case measured.

    Attributes:
        case: What was called.
        dtype: Element type of its data.
        ours: Seconds of our calls, one figure for each repetition; or bytes.
        peers: The same for each peer by name.
        unit: ``"s"`` or ``"bytes"``.
    """

    case: str
    dtype: str
    ours: tuple[float, ...]
    peers: Mapping[str, tuple[float, ...]]
    unit: str = "s"

    def rows(self, bench: str) -> list[Row]:
        found = []
        for peer in self.peers:
            ratios = self.ratios(peer)
            spread = statistics.median(ratios), min(ratios), max(ratios)
            found.append(Row(bench, self.case, self.dtype, peer, *spread))
        return found

    def ratios(self, peer: str) -> list[float]:
        """A peer's figures over ours, one for each repetition."""
        return [theirs / ours for theirs, ours in zip(self.peers[peer], self.ours, strict=True)]


def in_both_orders(names: Sequence[str], repetitions: int) -> Iterator[list[str]]:
    """The order of each repetition: as given, then reversed, and so on."""
    for repetition in range(repetitions):
        yield list(reversed(names)) if repetition % 2 else list(names)


def compare(case: str, dtype: str, slots: Mapping[str, Callable[[], float]], effort: Effort) -> Result:
    """Measures one case: by name, what measures one slot and returns the seconds of a call; first ours."""
    ours, *peers = slots
    seconds: dict[str, list[float]] = {name: [] for name in slots}
    start = time.monotonic()
    for order in in_both_orders(list(slots), effort.repetitions):
        if len(seconds[ours]) >= _FEWEST_REPETITIONS and time.monotonic() - start > effort.case_s:
            break
        for name in order:
            seconds[name].append(slots[name]())
    return Result(case, dtype, tuple(seconds[ours]), {peer: tuple(seconds[peer]) for peer in peers})
