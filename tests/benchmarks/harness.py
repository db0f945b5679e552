"""Comparing contestants: alternation in both orders, ratios with their spread, table and JSON lines.

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
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

_TABLE_COLUMNS = 190
_FEWEST_REPETITIONS = 3
_MOST_CALLS = 5000
_SHOWN = {"s": (1e3, "ms"), "bytes": (2.0**-20, "MiB")}


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
        return max(2, min(_MOST_CALLS, math.ceil(self.slot_s / max(one_s, 1e-6))))


FULL = Effort()
QUICK = Effort(repetitions=2, slot_s=0.02, quick=True)


@dataclass(frozen=True)
class Row:
    """One result as scripts read it: a line of JSON.

    Attributes:
        bench: Name of the benchmark.
        case: What was called.
        dtype: Element type of its data.
        peer: Who ours is compared with.
        ratio: Median over the repetitions of the peer's seconds over ours; above 1: ours is better.
        low: Lowest of these ratios.
        high: Highest.
    """

    bench: str
    case: str
    dtype: str
    peer: str
    ratio: float
    low: float
    high: float

    def line(self) -> str:
        """The object on one line, numbers to four digits."""
        fields = asdict(self).items()
        return json.dumps({k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in fields})


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
        """The ratio of each peer, with its spread."""
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


def compare(case: str, dtype: str, contestants: Mapping[str, Callable[[], float]], effort: Effort) -> Result:
    """Measures one case.

    Args:
        case: What is called.
        dtype: Element type of its data.
        contestants: By name, what measures one slot and returns the seconds of a call; the first is ours.
        effort: How long to measure.
    """
    ours, *peers = contestants
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    start = time.monotonic()
    for order in in_both_orders(list(contestants), effort.repetitions):
        if len(seconds[ours]) >= _FEWEST_REPETITIONS and time.monotonic() - start > effort.case_s:
            break
        for name in order:
            seconds[name].append(contestants[name]())
    return Result(case, dtype, tuple(seconds[ours]), {peer: tuple(seconds[peer]) for peer in peers})


def show(bench: str, title: str, results: Sequence[Result], stream: TextIO) -> None:
    """Prints the table for people, then one JSON object a line."""
    # A fixed width: the table must not depend on where standard output goes.
    console = Console(file=stream, width=_TABLE_COLUMNS, highlight=False, markup=False)
    console.print(f"\n{title}\n")
    table = Table(box=None, padding=(0, 2, 0, 0))
    peers = list(dict.fromkeys(peer for result in results for peer in result.peers))
    for name in ("case", "dtype"):
        table.add_column(name)
    table.add_column("ours", justify="right")
    for peer in peers:
        table.add_column(f"x {peer}", justify="right")
    for result in results:
        rows = {row.peer: row for row in result.rows(bench)}
        cells = [f"{r.ratio:.3g} [{r.low:.2g}, {r.high:.2g}]" if (r := rows.get(p)) else "" for p in peers]
        factor, unit = _SHOWN[result.unit]
        ours = f"{statistics.median(result.ours) * factor:.2f} {unit}"
        # As text: in a markup the brackets would be a style.
        table.add_row(result.case, result.dtype, ours, *(Text(cell) for cell in cells))
    console.print(table)
    console.print(
        "\nx: a peer's time (or bytes) over ours, median [lowest, highest]; above 1 ours is better.\n"
    )
    for result in results:
        for row in result.rows(bench):
            stream.write(row.line() + "\n")
    stream.flush()


def as_record(bench: str, results: Sequence[Result], environment: Mapping[str, Any]) -> dict[str, Any]:
    """Everything measured, each repetition's figure included, for whoever wants other statistics."""
    return {
        "bench": bench,
        "environment": dict(environment),
        "results": [asdict(result) for result in results],
        "rows": [asdict(row) for result in results for row in result.rows(bench)],
    }
