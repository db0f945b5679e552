"""What becomes of a benchmark: table, goals, JSON lines, pictures, a file with everything."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks import goals
from tests.benchmarks.environment import environment
from tests.benchmarks.goals import Figure, show_figures
from tests.benchmarks.harness import Effort, Result, Row, as_record, show
from tests.benchmarks.picture import svg

_ROOFLINE = "roofline"
_LIMITS = "How far from the limits of the machine"


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
    """Measures, prints, and writes pictures and figures.

    Args:
        bench: What is measured.
        effort: How long.
        folder: For pictures and figures; it is there.
    """
    facts, start = {**environment(), **bench.facts}, time.monotonic()
    results: list[Result] = []
    figures: list[Figure] = []
    notes: list[str] = []
    for each in bench.found:
        if isinstance(each, str):
            notes.append(each)
            said = each
        elif isinstance(each, Figure):
            figures.append(each)
            continue
        else:
            results.append(each)
            said = f"{each.case} {each.dtype}: done after {time.monotonic() - start:.0f} s"
        sys.stderr.write(f"{bench.name}: {said}\n")
    facts["effort"] = (
        f"up to {effort.repetitions} repetitions, slots of {effort.slot_s:g} s, orders alternated"
    )
    for fact, value in facts.items():
        sys.stdout.write(f"{fact}: {value}\n")
    show(bench.name, f"{bench.title}\n{bench.subtitle}", results, sys.stdout)
    show_figures(bench.name, figures, sys.stdout)
    for note in notes:
        sys.stdout.write(f"note: {note}\n")
    for name, picture in _pictures(bench, results, figures).items():
        (folder / f"{name}.svg").write_text(picture)
    record = {**as_record(bench.name, results, facts), "figures": goals.as_record(figures), "notes": notes}
    (folder / f"{bench.name}.json").write_text(json.dumps(record, indent=1))
    sys.stderr.write(f"{bench.name}: pictures and raw figures in {folder}\n")


def _pictures(bench: Bench, results: list[Result], figures: list[Figure]) -> dict[str, str]:
    """By file name: ratios to peers; distances to rooflines, where there are any."""
    rows = [row for result in results for row in result.rows(bench.name)]
    limits = {(f.case, f.dtype, f.what): f.goal for f in figures if f.goal}
    peers = [row for row in rows if not row.peer.endswith(_ROOFLINE)]
    pictures = {}
    if peers:
        wanted = {
            (row.case, row.dtype, row.peer): goal
            for row in peers
            for (case, dtype, what), goal in limits.items()
            if (case, dtype) == (row.case, row.dtype) and what.startswith(f"{row.peer}'s ")
        }
        pictures[bench.name] = svg(bench.title, bench.subtitle, peers, wanted)
    distances = [
        Row(bench.name, row.case, row.dtype, row.peer, 1 / row.ratio, 1 / row.high, 1 / row.low)
        for row in rows
        if row.peer.endswith(_ROOFLINE)
    ]
    if distances:
        wanted = {
            (row.case, row.dtype, row.peer): goal
            for row in distances
            if (goal := limits.get((row.case, row.dtype, f"our time over the {row.peer}'s")))
        }
        pictures[f"{bench.name}-rooflines"] = svg(
            _LIMITS, bench.subtitle, distances, wanted, axis="our time / the limit's: 1 is the limit"
        )
    return pictures
