"""What was to be reached, and what was: figures with their limits, for people and for scripts."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tests.benchmarks.harness import Result

_TABLE_COLUMNS = 190


@dataclass(frozen=True)
class Goal:
    """A limit of a figure.

    Attributes:
        must: What has to be reached.
        stretch: What one would like to reach; None where more is of no use.
        at_most: Whether less is better.
    """

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
    """A goal for a figure of which more is better."""
    return Goal(must, stretch)


def at_most(must: float, stretch: float | None = None) -> Goal:
    """A goal for a figure of which less is better."""
    return Goal(must, stretch, at_most=True)


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        case: What was called.
        dtype: Element type of its data.
        what: What was measured.
        value: Its median.
        low: Lowest of what was seen.
        high: Highest.
        unit: Of the three; empty for a ratio.
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
        """The object on one line, numbers to four digits."""
        goal = self.goal
        found = {
            "bench": bench,
            "case": self.case,
            "dtype": self.dtype,
            "what": self.what,
            "unit": self.unit,
            **{name: float(f"{getattr(self, name):.4g}") for name in ("value", "low", "high")},
            "must": goal.must if goal else None,
            "stretch": goal.stretch if goal else None,
            "verdict": self.verdict or None,
            "peers": {name: float(f"{value:.4g}") for name, value in self.peers.items()},
        }
        return json.dumps(found)


def figure(
    place: tuple[str, str],
    what: str,
    seen: Sequence[float],
    goal: Goal | None,
    *,
    unit: str = "",
    peers: Mapping[str, float] | None = None,
) -> Figure:
    """The median of what was seen, with its spread.

    Args:
        place: Case and data type.
        what: What was measured.
        seen: One figure for each repetition.
        goal: What was to be reached, if anything.
        unit: Of the figures; empty for a ratio.
        peers: The same figure of others, by name.
    """
    return Figure(*place, what, statistics.median(seen), min(seen), max(seen), unit, goal, peers or {})


def promised(result: Result, goals: Mapping[str, Goal]) -> Iterator[Figure]:
    """The figures of a comparison that were to be reached.

    Args:
        result: What was measured.
        goals: By peer, for the peer's figure over ours. Those of peers that took no part are passed over.
    """
    for peer in result.peers:
        if peer in goals:
            place, what = (result.case, result.dtype), f"{peer}'s time over ours"
            yield figure(place, what, result.ratios(peer), goals[peer])


def show_figures(bench: str, figures: Sequence[Figure], stream: TextIO) -> None:
    """Prints the table of goals, that of the other figures, then one JSON object a line."""
    console = Console(file=stream, width=_TABLE_COLUMNS, highlight=False, markup=False)
    for title, chosen in (
        ("Goals", [each for each in figures if each.goal]),
        ("For comparison", [each for each in figures if not each.goal]),
    ):
        if chosen:
            console.print(f"\n{title}\n")
            console.print(_table(chosen))
    missed = [each for each in figures if each.verdict == "NOT REACHED"]
    if figures:
        console.print(f"\n{len(missed)} of {sum(bool(each.goal) for each in figures)} goals not reached\n")
    for each in figures:
        stream.write(each.line(bench) + "\n")
    stream.flush()


def _table(figures: Sequence[Figure]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("case", "dtype", "what"):
        table.add_column(name)
    for name in ("found", "must", "stretch"):
        table.add_column(name, justify="right")
    table.add_column("reached")
    table.add_column("peers")
    for each in figures:
        goal, unit = each.goal, each.unit and f" {each.unit}"
        sign = "" if goal is None else "<= " if goal.at_most else ">= "
        limits = [
            "" if g is None else f"{sign}{g:.3g}{unit}" for g in (goal and goal.must, goal and goal.stretch)
        ]
        spread = "" if each.low == each.high else f" [{each.low:.3g}, {each.high:.3g}]"
        # As text: in a markup the brackets would be a style.
        found = Text(f"{each.value:.3g}{unit}{spread}")
        table.add_row(
            each.case,
            each.dtype,
            each.what,
            found,
            *limits,
            each.verdict,
            ", ".join(f"{name} {value:.3g}" for name, value in each.peers.items()),
        )
    return table


def as_record(figures: Sequence[Figure]) -> list[dict[str, object]]:
    """The figures for a file."""
    return [{**asdict(each), "verdict": each.verdict} for each in figures]
