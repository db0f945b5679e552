"""`python -m tests.benchmarks [NAME ...]`: measure, print a table and JSON lines, draw pictures."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.benchmarks import client, kernels, service, transport
from tests.benchmarks.environment import environment
from tests.benchmarks.harness import FULL, QUICK, Effort, Result, as_record, show
from tests.benchmarks.picture import svg
from tests.benchmarks.processes import ROOT

if TYPE_CHECKING:
    from types import ModuleType

BENCHES: dict[str, ModuleType] = {
    "transport": transport,
    "service": service,
    "client": client,
    "kernels": kernels,
}


def main() -> None:
    """Runs the benchmarks that are named, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHES)}; all by default")
    parser.add_argument("--quick", action="store_true", help="first cases only; the figures mean nothing")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench", help="folder for pictures")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in BENCHES]
    if unknown:
        parser.error(f"found {unknown[0]!r}; expected {', '.join(BENCHES)}")
    options.output.mkdir(parents=True, exist_ok=True)
    for name in options.names or BENCHES:
        _run(name, QUICK if options.quick else FULL, options.output)


def _run(name: str, effort: Effort, folder: Path) -> None:
    bench, facts, start = BENCHES[name], environment(), time.monotonic()
    results: list[Result] = []
    for result in bench.run(effort):
        results.append(result)
        sys.stderr.write(
            f"{name}: {result.case} {result.dtype}: done after {time.monotonic() - start:.0f} s\n"
        )
    facts["effort"] = (
        f"up to {effort.repetitions} repetitions, slots of {effort.slot_s:g} s, orders alternated"
    )
    for fact, value in facts.items():
        sys.stdout.write(f"{fact}: {value}\n")
    show(name, f"{bench.TITLE}\n{bench.SUBTITLE}", results, sys.stdout)
    rows = [row for result in results for row in result.rows(name)]
    (folder / f"{name}.svg").write_text(svg(bench.TITLE, bench.SUBTITLE, rows))
    (folder / f"{name}.json").write_text(json.dumps(as_record(name, results, facts), indent=1))
    sys.stderr.write(f"{name}: picture and raw figures in {folder / name}.svg and .json\n")


if __name__ == "__main__":
    main()
