"""`python -m tests.benchmarks [NAME ...]`: measure, print a table and JSON lines, draw pictures."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from tests.benchmarks import client, frames, kernels, memory, service, transport
from tests.benchmarks.harness import FULL, QUICK, Effort
from tests.benchmarks.kernels import Choice
from tests.benchmarks.processes import ROOT
from tests.benchmarks.report import Bench, report

_BENCHES: dict[str, Any] = {
    "transport": transport,
    "service": service,
    "client": client,
    "kernels": kernels,
    "frames": frames,
    "memory": memory,
}
NAMES = tuple(_BENCHES)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmarks that are named, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all by default")
    parser.add_argument("--quick", action="store_true", help="first cases only; the figures mean nothing")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench", help="folder for pictures")
    parser.add_argument("--whole", action="store_true", help="memory: as many calls as promised; hours")
    _add_choice(parser)
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in NAMES]
    if unknown:
        parser.error(f"found {unknown[0]!r}; expected {', '.join(NAMES)}")
    chosen = ((field.name, getattr(options, field.name)) for field in fields(Choice))
    given = {name: value for name, value in chosen if value}
    if given and options.names != ["kernels"]:
        parser.error(f"found --{next(iter(given))}; expected it with the benchmark kernels alone")
    filled: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    choice = Choice(**filled)
    effort = QUICK if options.quick else FULL
    if "kernels" in options.names and not choice.cases(effort):
        parser.error("no case is left; expected parts of names of operator, case and data type")
    options.output.mkdir(parents=True, exist_ok=True)
    for name in options.names or NAMES:
        report(_bench(name, effort, choice, options.whole), effort, options.output)


def _add_choice(parser: argparse.ArgumentParser) -> None:
    """The options that become a `Choice`."""
    add = parser.add_argument_group("the benchmark kernels alone").add_argument
    add("--operator", help="part of the name of operators to measure")
    add("--case", help="part of the name of cases to measure")
    add("--dtype", help="part of the name of data types to measure")
    add("--part", action="append", choices=kernels.PARTS, dest="parts", help="all by default; again for more")
    add("--variant", help="of the kernels, such as avx2; else the one that fits")
    add("--threads", type=int, help="else one for each processor")
    about = "interpreter of an environment with peers that are not installed here; may be repeated"
    add("--peer-python", action="append", metavar="PATH", dest="peer_pythons", help=about)


def _bench(name: str, effort: Effort, choice: Choice, whole: bool) -> Bench:
    if name == "kernels":
        found = kernels.run(effort, choice)
        return Bench(choice.bench, kernels.TITLE, kernels.subtitle(choice), found, kernels.facts(choice))
    module = _BENCHES[name]
    found = memory.run(effort, whole=whole) if name == "memory" else module.run(effort)
    return Bench(name, module.TITLE, module.SUBTITLE, found, {})


if __name__ == "__main__":
    main()
