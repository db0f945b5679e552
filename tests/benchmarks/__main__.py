"""`python -m tests.benchmarks [NAME ...]`: measure, print a table and JSON lines, draw pictures."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from tests.benchmarks import client, frames, kernels, memory, service, transport
from tests.benchmarks.harness import FULL, QUICK, Effort
from tests.benchmarks.kernels import Choice
from tests.benchmarks.processes import ROOT
from tests.benchmarks.report import Bench, report

NAMES = ("transport", "service", "client", "kernels", "frames", "memory")


def main() -> None:
    """Runs the benchmarks that are named, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all by default")
    parser.add_argument("--quick", action="store_true", help="first cases only; the figures mean nothing")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench", help="folder for pictures")
    parser.add_argument("--whole", action="store_true", help="memory: as many calls as promised; hours")
    chosen = _add_choice(parser)
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in NAMES]
    if unknown:
        parser.error(f"found {unknown[0]!r}; expected {', '.join(NAMES)}")
    given: dict[str, Any] = {name: getattr(options, name) for name in chosen if getattr(options, name)}
    if given and options.names != ["kernels"]:
        parser.error(f"found --{next(iter(given))}; expected it with the benchmark kernels alone")
    settings: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    choice = Choice(**settings)
    effort = QUICK if options.quick else FULL
    if "kernels" in options.names and not choice.cases(effort):
        parser.error("no case is left; expected parts of names of operator, case and data type")
    options.output.mkdir(parents=True, exist_ok=True)
    for name in options.names or NAMES:
        report(_bench(name, effort, choice, options.whole), effort, options.output)


def _add_choice(parser: argparse.ArgumentParser) -> tuple[str, ...]:
    """The options that become a `Choice`; returns its fields."""
    kernels_only = parser.add_argument_group("the benchmark kernels alone")
    kernels_only.add_argument("--operator", help="part of the name of operators to measure")
    kernels_only.add_argument("--case", help="part of the name of cases to measure")
    kernels_only.add_argument("--dtype", help="part of the name of data types to measure")
    kernels_only.add_argument(
        "--part", action="append", choices=kernels.PARTS, dest="parts", help="all by default; may be repeated"
    )
    kernels_only.add_argument("--variant", help="of the kernels, such as avx2; else the one that fits")
    kernels_only.add_argument("--threads", type=int, help="else one for each processor")
    kernels_only.add_argument(
        "--peer-python",
        action="append",
        metavar="PATH",
        dest="peer_pythons",
        help="interpreter of an environment with peers that are not installed here; may be repeated",
    )
    return tuple(field.name for field in fields(Choice))


def _bench(name: str, effort: Effort, choice: Choice, whole: bool) -> Bench:
    if name == "kernels":
        found = kernels.run(effort, choice)
        return Bench(choice.bench, kernels.TITLE, kernels.subtitle(choice), found, kernels.facts(choice))
    if name == "frames":
        return Bench(name, frames.TITLE, frames.SUBTITLE, frames.run(), {})
    if name == "memory":
        return Bench(name, memory.TITLE, memory.SUBTITLE, memory.run(effort, whole=whole), {})
    module = {"transport": transport, "service": service, "client": client}[name]
    return Bench(name, module.TITLE, module.SUBTITLE, module.run(effort), {})


if __name__ == "__main__":
    main()
