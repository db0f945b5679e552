"""The earlier version's client against this server, and the reverse: `make prove-skew`.

Every operator in every type, with every sample of its record and all that its calls may vary, as one message
and as a stream, results against the float64 reference; each call is validated as well. The earlier version
is unpacked from the repository's history, and runs in processes of its own, on the libraries that are
installed. Its CPU kernels are not built, so that its server computes with its own reference: what is tried
here is how the two talk.
"""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fix_server import SERVER_PYTHON, run_server
from tests.proofs.proof import Table, run
from tests.proofs.skew_script import Answered, Asked, answers

from npugrad import OPERATORS
from npugrad.operator import OpRecord
from npugrad.products import Product
from npugrad_server.acceptance.cases import small_calls
from npugrad_server.acceptance.job import make_job
from npugrad_server.acceptance.known import KnownJob, known

EARLIER = "84db1ce"
"""The version before this one: a commit until there is a release, then the tag of the latest one."""
ROOT = Path(__file__).resolve().parents[2]
_TOOL_S, _CALLS_S = 60, 900
_SERVE = """
import runpy, npugrad_server
assert npugrad_server.__file__.startswith({folder!r}), npugrad_server.__file__
runpy.run_module("npugrad_server", run_name="__main__", alter_sys=True)
"""
_CALL = "from tests.proofs.skew_script import main; main()"


class Missing(Exception):
    """The earlier version is not to be had here."""


def unpacked(folder: Path) -> Path:
    """Writes the earlier version's packages into a folder; raises Missing if it is not to be had."""
    try:
        done = subprocess.run(
            ["git", "archive", EARLIER, "protos", "server", "client"],
            cwd=ROOT, capture_output=True, timeout=_TOOL_S, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise Missing("git is not installed, so the earlier version cannot be had") from None
    if done.returncode:
        raise Missing(
            f"the history here lacks the earlier version, {EARLIER}: git fetch --unshallow "
            f"({done.stderr.decode(errors='replace').strip()})"
        )
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def path_of(earlier: Path) -> dict[str, str]:
    """The environment in which Python finds the earlier version's packages first."""
    return {"PYTHONPATH": os.pathsep.join(str(earlier / name) for name in ("protos", "server", "client"))}


# --------------------------------------------------------------------------------------------- calls


@dataclass(frozen=True)
class Case:
    """A call with its right results, and as it is sent."""

    known: KnownJob
    dtype: str
    asked: Asked

    def wrong(self, results: Any) -> str:
        """What is wrong with what came of it; empty when nothing is."""
        if isinstance(results, str):
            return results
        metas = self.known.job.planned().plan.outputs
        for name, array in results.items():
            meta = metas.get(name)
            if meta is None or (array.dtype, array.shape) != (meta.dtype.numpy, meta.shape):
                return f"{name}: found {array.dtype}{array.shape}; expected {meta}"
        return self.known.wrong(results)


def cases_of(record: OpRecord, step: int = 1) -> list[Case]:
    """Every call of an operator, or every one in `step`, and the first of each type."""
    found, seen = list[Case](), set[str]()
    for place, small in enumerate(small_calls(record, Product.ATLAS_A2, simulated=True)):
        dtype = str(small.dtype)
        if place % step and dtype in seen:
            continue
        seen.add(dtype)
        call = small.call
        contiguous = {name: None if meta is None else meta.contiguous() for name, meta in call.inputs.items()}
        call = call.with_inputs(**contiguous)
        job = make_job(record, call)
        names = tuple(param.name for param in record.outputs)
        asked = Asked(record.name, job.arrays, dict(call.attrs), contiguous, dict(call.outputs), names)
        found.append(Case(known(small.name, job), dtype, asked))
    return found


def records(earlier: Path) -> list[OpRecord]:
    """The operators that both versions have."""
    folder = earlier / "protos" / "npugrad" / "ops"
    return [record for name, record in OPERATORS.items() if (folder / f"{name}.py").exists()]


# ---------------------------------------------------------------------------------------- directions


@dataclass
class Row:
    direction: str
    operator: str
    dtypes: set[str] = field(default_factory=set)
    right: Counter[str] = field(default_factory=Counter)
    failed: list[tuple[str, str]] = field(default_factory=list)

    def note(self, case: Case, answered: Answered) -> None:
        self.dtypes.add(case.dtype)
        ways = {
            "unary": case.wrong(answered.unary),
            "streamed": case.wrong(answered.streamed),
            "validated": "" if answered.status == 0 else f"status {answered.status}; expected 0",
        }
        for way, problem in ways.items():
            self.right[way] += not problem
            if problem:
                self.failed.append((way, f"{self.operator} {case.known.name}: {problem}"))

    def cells(self) -> tuple[object, ...]:
        lost = Counter(way for way, _ in self.failed)
        counts = (f"{self.right[way]} / {lost[way]}" for way in ("unary", "streamed", "validated"))
        return (self.direction, self.operator, len(self.dtypes), *counts)


def tried(folder: Path, step: int = 1) -> Iterator[Row]:
    """Has each version's client call the other's server, with one call in `step`; raises Missing."""
    earlier = unpacked(folder / "earlier")
    cases = [case for record in records(earlier) for case in cases_of(record, step)]
    calls = [case.asked for case in cases]
    with run_server(folder / "this.log") as running:
        answered = earlier_answers(earlier, running.address, calls)
        yield from _rows(f"client {EARLIER} -> this", cases, answered)
    program = ("-c", _SERVE.format(folder=str(earlier)))
    with run_server(folder / "earlier.log", env=path_of(earlier), program=program) as running:
        yield from _rows(f"this client -> {EARLIER}", cases, answers(running.address, calls))


def earlier_answers(earlier: Path, address: str, calls: Sequence[Asked]) -> list[Answered]:
    """What the earlier version's client is answered, in a process of its own."""
    done = subprocess.run(
        [SERVER_PYTHON, "-c", _CALL, address],
        cwd=ROOT,
        input=pickle.dumps(calls),
        env={**os.environ, **path_of(earlier)},
        stdout=subprocess.PIPE,
        timeout=_CALLS_S,
        check=True,
    )
    client, answered = pickle.loads(done.stdout)
    if not client.startswith(str(earlier)):
        raise RuntimeError(f"found the client {client}; expected that below {earlier}")
    return list(answered)


def _rows(direction: str, cases: Sequence[Case], answered: Sequence[Answered]) -> Iterator[Row]:
    rows = dict[str, Row]()
    for case, answer in zip(cases, answered, strict=True):
        operator = case.asked.operator
        rows.setdefault(operator, Row(direction, operator)).note(case, answer)
    return iter(rows.values())


def main(given: Any, folder: Path) -> bool:
    failed = list[tuple[str, str]]()
    table = Table(who_calls_whom=30, operator=40, types=5, unary=14, streamed=14, validated=14)
    try:
        for row in tried(folder, given.step):
            table.row(*row.cells())
            failed += row.failed
    except Missing as missing:
        print(f"skipped: {missing}")
    for way, text in failed:
        print(f"{way}: {text}")
    return not failed


if __name__ == "__main__":
    run(main, __doc__, step=(1, "one call in so many is tried, 1 for all"))
