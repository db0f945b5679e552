"""What was to be reached, and what was: figures with their limits."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from tests.benchmarks.harness import Result, to_line


@dataclass(frozen=True)
class Goal:
    """A limit of a figure: what has to be reached, and what one would like to reach, if more is of use."""

    must: float
    stretch: float | None = None
    at_most: bool = False

    def reached(self, value: float) -> str:
        """``"stretch"``, ``"must"`` or ``"NOT REACHED"``."""
        if self.stretch is not None and self._meets(value, self.stretch):
            return "stretch"
        return "must" if self._meets(value, self.must) else "NOT REACHED"

    def _meets(self, value: float, limit: float) -> bool:
        return value <= limit if self.at_most else value >= limit


def at_least(must: float, stretch: float | None = None) -> Goal:
    return Goal(must, stretch)


def at_most(must: float, stretch: float | None = None) -> Goal:
    return Goal(must, stretch, at_most=True)


@dataclass(frozen=True)
class Figure:
    """The median, lowest and highest of what was measured, in a unit that is empty for a ratio.

    Attributes:
        case: What was called.
        goal: What was to be reached; None where it is shown for comparison.
        peers: The same figure of others, by name.
    """

    case: str
    dtype: str
    what: str
    value: float
    low: float
    high: float
    unit: str = ""
    goal: Goal | None = None
    peers: Mapping[str, float] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """Which limit was reached; empty without a goal."""
        return self.goal.reached(self.value) if self.goal else ""

    def line(self, bench: str) -> str:
        names = ("case", "dtype", "what", "unit", "value", "low", "high")
        found = {"bench": bench, **{name: getattr(self, name) for name in names}}
        limits = {name: getattr(self.goal, name, None) for name in ("must", "stretch")}
        return to_line({**found, **limits, "verdict": self.verdict or None, "peers": self.peers})

    def record(self) -> dict[str, object]:
        return {**asdict(self), "verdict": self.verdict}


def figure(
    place: tuple[str, str],
    what: str,
    seen: Sequence[float],
    goal: Goal | None,
    *,
    unit: str = "",
    peers: Mapping[str, float] | None = None,
) -> Figure:
    """What was seen of a case and data type, one number for each repetition."""
    return Figure(*place, what, statistics.median(seen), min(seen), max(seen), unit, goal, peers or {})


def promised(result: Result, goals: Mapping[str, Goal]) -> Iterator[Figure]:
    """The figures of a comparison that were to be reached, by peer: the peer's over ours.

    Those of peers that took no part are passed over.
    """
    for peer in result.peers:
        if peer in goals:
            place, what = (result.case, result.dtype), f"{peer}'s time over ours"
            yield figure(place, what, result.ratios(peer), goals[peer])
