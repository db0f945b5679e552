"""What becomes of a benchmark: table, goals, JSON lines, pictures, a file with everything."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tests.benchmarks.environment import environment
from tests.benchmarks.goals import Figure
from tests.benchmarks.harness import Effort, Result, Row
from tests.benchmarks.picture import svg

_ROOFLINE = "roofline"
_LIMITS = "How far from the limits of the machine"
_TABLE_COLUMNS = 190
_SHOWN = {"s": (1e3, "ms"), "bytes": (2.0**-20, "MiB")}


@dataclass(frozen=True)
class Bench:
    """A benchmark on its way.

    Attributes:
        name: In lines and file names.
        title: What is measured.
        subtitle: With what.
        found: Results, figures, and texts that say what could not be measured, as they come.
        facts: What its figures depend on, beside what `environment` finds.
    """

    name: str
    title: str
    subtitle: str
    found: Iterator[Result | Figure | str]
    facts: Mapping[str, str]


def report(bench: Bench, effort: Effort, folder: Path) -> None:
    """Measures, prints, and writes pictures and figures into a folder that is there."""
    facts, start = {**environment(), **bench.facts}, time.monotonic()
    results: list[Result] = []
    figures: list[Figure] = []
    notes: list[str] = []
    for each in bench.found:
        if isinstance(each, Figure):
            figures.append(each)
            continue
        if isinstance(each, str):
            notes.append(each)
            said = each
        else:
            results.append(each)
            said = f"{each.case} {each.dtype}: done after {time.monotonic() - start:.0f} s"
        sys.stderr.write(f"{bench.name}: {said}\n")
    facts["effort"] = (
        f"up to {effort.repetitions} repetitions, slots of {effort.slot_s:g} s, orders alternated"
    )
    for fact, value in facts.items():
        sys.stdout.write(f"{fact}: {value}\n")
    rows = [row for result in results for row in result.rows(bench.name)]
    show(f"{bench.title}\n{bench.subtitle}", results, rows, sys.stdout)
    show_figures(bench.name, figures, sys.stdout)
    for note in notes:
        sys.stdout.write(f"note: {note}\n")
    for name, picture in _pictures(bench, rows, figures).items():
        (folder / f"{name}.svg").write_text(picture)
    record = {
        "bench": bench.name,
        "environment": facts,
        "results": [asdict(result) for result in results],
        "rows": [asdict(row) for row in rows],
        "figures": [each.record() for each in figures],
        "notes": notes,
    }
    (folder / f"{bench.name}.json").write_text(json.dumps(record, indent=1))
    sys.stderr.write(f"{bench.name}: pictures and raw figures in {folder}\n")


# --------------------------------------------------------------------------------------------- tables


def _table(left: Sequence[str], right: Sequence[str], more: Sequence[str] = ()) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in (*left, *right, *more):
        table.add_column(name, justify="right" if name in right else "left")
    return table


def _console(stream: TextIO) -> Console:
    """Of a fixed width: the table must not depend on where standard output goes."""
    return Console(file=stream, width=_TABLE_COLUMNS, highlight=False, markup=False)


def show(title: str, results: Sequence[Result], rows: Sequence[Row], stream: TextIO) -> None:
    """Prints the table for people, then one JSON object a line."""
    peers = list(dict.fromkeys(row.peer for row in rows))
    table = _table(("case", "dtype"), ("ours", *(f"x {peer}" for peer in peers)))
    for result in results:
        own = {row.peer: row for row in result.rows("")}
        cells = [f"{r.ratio:.3g} [{r.low:.2g}, {r.high:.2g}]" if (r := own.get(p)) else "" for p in peers]
        factor, unit = _SHOWN[result.unit]
        ours = f"{statistics.median(result.ours) * factor:.2f} {unit}"
        # As text: in a markup the brackets would be a style.
        table.add_row(result.case, result.dtype, ours, *(Text(cell) for cell in cells))
    console = _console(stream)
    console.print(f"\n{title}\n")
    console.print(table)
    console.print(
        "\nx: a peer's time (or bytes) over ours, median [lowest, highest]; above 1 ours is better.\n"
    )
    stream.writelines(f"{row.line()}\n" for row in rows)
    stream.flush()


def show_figures(bench: str, figures: Sequence[Figure], stream: TextIO) -> None:
    """Prints the table of goals, that of the other figures, then one JSON object a line."""
    console = _console(stream)
    goals, others = ([each for each in figures if bool(each.goal) is held] for held in (True, False))
    for title, chosen in (("Goals", goals), ("For comparison", others)):
        if chosen:
            console.print(f"\n{title}\n")
            console.print(_figures(chosen))
    if figures:
        missed = sum(each.verdict == "NOT REACHED" for each in figures)
        console.print(f"\n{missed} of {len(goals)} goals not reached\n")
    stream.writelines(f"{each.line(bench)}\n" for each in figures)
    stream.flush()


def _figures(figures: Sequence[Figure]) -> Table:
    table = _table(("case", "dtype", "what"), ("found", "must", "stretch"), ("reached", "peers"))
    for each in figures:
        goal, unit = each.goal, each.unit and f" {each.unit}"
        sign = "<= " if goal and goal.at_most else ">= "
        limits = (goal and goal.must, goal and goal.stretch)
        spread = "" if each.low == each.high else f" [{each.low:.3g}, {each.high:.3g}]"
        table.add_row(
            each.case,
            each.dtype,
            each.what,
            Text(f"{each.value:.3g}{unit}{spread}"),
            *("" if limit is None else f"{sign}{limit:.3g}{unit}" for limit in limits),
            each.verdict,
            ", ".join(f"{name} {value:.3g}" for name, value in each.peers.items()),
        )
    return table


# ------------------------------------------------------------------------------------------- pictures


def _pictures(bench: Bench, rows: Sequence[Row], figures: Sequence[Figure]) -> dict[str, str]:
    """By file name: ratios to peers; distances to rooflines, where there are any."""
    peers = [row for row in rows if not row.peer.endswith(_ROOFLINE)]
    distances = [
        Row(bench.name, row.case, row.dtype, row.peer, 1 / row.ratio, 1 / row.high, 1 / row.low)
        for row in rows
        if row.peer.endswith(_ROOFLINE)
    ]
    goals = {
        (row.case, row.dtype, row.peer): each.goal
        for row in rows
        for each in figures
        if each.goal
        and (each.case, each.dtype) == (row.case, row.dtype)
        and each.what.startswith((f"{row.peer}'s ", f"our time over the {row.peer}'s"))
    }
    pictures = {}
    if peers:
        pictures[bench.name] = svg(bench.title, bench.subtitle, peers, goals)
    if distances:
        pictures[f"{bench.name}-rooflines"] = svg(
            _LIMITS, bench.subtitle, distances, goals, axis="our time / the limit's: 1 is the limit"
        )
    return pictures
