"""The compiled kernels against what a user has otherwise on a CPU, and against the limits of the machine.

What is called
    The CPU backend's kernel in a process of its own against each peer of the case in another process, outputs
    allocated inside the timed call: ours from an output arena, as a call of the service does it, which finds
    the memory of the call before. Both other sides of that are shown: ours into new arrays (`FRESH`), and
    torch with a malloc that keeps what is freed for the next call (`KEPT`). No service, no copies: those are
    in `service`. A peer that is not installed here is looked for in the interpreters of `--peer-python`. A
    peer that dies in a case, as torch does in some, is named and loses that case only.

Rooflines
    DRAM: the same bytes (operands and results once) moved by a triad with non-temporal stores on all threads,
    into memory that is there. FMA, where a case tells its floating-point operations: those, on registers. In
    ratios the roofline's time over ours, 1 would be the limit; as a goal its inverse, the distance.

Besides
    Largest errors against the float64 reference, of our results and of the peers'; extra memory of new
    processes; how long a new process takes to load the kernels and make a first call.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tests.benchmarks.contestant import difference
from tests.benchmarks.goals import Figure, at_most, figure
from tests.benchmarks.harness import Effort, Result, compare
from tests.benchmarks.kernel_cases import DRAM, ERROR, FMA, MEMORY, KernelCase, all_cases
from tests.benchmarks.operands import empty_outputs, made
from tests.benchmarks.processes import Entry, Field, ProcessEnded
from tests.operators import GROUP_NORM

from npugrad.ops import get_operator
from npugrad_server.backends.cpu.backend import THREADS
from npugrad_server.backends.cpu.kernels import SETTING, KernelsUnavailable, find_library

TITLE = "Compiled CPU kernels, each call in process"
OURS = "npugrad"
FRESH = "npugrad, fresh memory"
KEPT = "torch, memory kept"
PARTS = ("speed", "errors", "memory", "start")
_SUBJECTS = "tests.benchmarks.kernel_subjects"
_START = {"operator": GROUP_NORM.name, "dtype": "float32", "sizes": {"n": 2, "c": 32, "hxw": 64, "group": 8}}
_START_MS = at_most(50.0)
_TORCH = "torch"
_CORETYPE = "OPENBLAS_CORETYPE"
_FRESH_PROCESSES = 3
# glibc's malloc then takes blocks of any size from its heap, and gives nothing of that back.
_KEEPING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**62), "MALLOC_TOP_PAD_": str(2**26)}


@dataclass(frozen=True)
class Choice:
    """What of it is measured, and with what; see the options of the command."""

    operator: str = ""
    case: str = ""
    dtype: str = ""
    parts: tuple[str, ...] = PARTS
    variant: str = ""
    threads: int = 0
    peer_pythons: tuple[str, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        threads = str(self.threads or len(os.sched_getaffinity(0)))
        found = {THREADS: threads, "OPENBLAS_NUM_THREADS": threads}
        return {**found, SETTING: self.variant} if self.variant else found

    def has(self, case: KernelCase) -> bool:
        return self.operator in case.operator and self.case in case.name and self.dtype in case.dtype

    @property
    def bench(self) -> str:
        """Name of the benchmark in lines and files; each variant has its own."""
        return f"kernels-{self.variant}" if self.variant else "kernels"

    def cases(self, effort: Effort) -> list[KernelCase]:
        return effort.first(case for case in all_cases() if self.has(case))


def subtitle(choice: Choice) -> str:
    """What computes."""
    try:
        variant = choice.variant or find_library().stem.rpartition("_")[2]
    except KernelsUnavailable as error:
        return f"no kernels: {error}"
    return f"variant {variant}, {choice.environment[THREADS]} threads, outputs allocated inside the call"


def facts(choice: Choice) -> dict[str, str]:
    """Versions of the peers, wherever they are installed, and the settings of the contestants."""
    found, _ = _entries(all_cases(), choice)
    versions = [
        f"{name} {_version(entry, name)}" for name, entry in found.items() if name in _peers(all_cases())
    ]
    settings = ", ".join(f"{name}={value}" for name, value in choice.environment.items())
    return {
        "peers": ", ".join(versions) or "none",
        "contestants' environment": settings,
        _CORETYPE: os.environ.get(_CORETYPE, "not set"),
    }


def run(effort: Effort, choice: Choice) -> Iterator[Result | Figure | str]:
    """Measures what was chosen; a text says what could not be measured."""
    cases = choice.cases(effort)
    entries, missing = _entries(cases, choice)
    yield from missing
    if {"speed", "errors"} & set(choice.parts):
        with Field(effort, entries) as contestants:
            for case in cases:
                yield from _case(case, contestants, effort, choice)
    if "memory" in choice.parts:
        for case in cases:
            if MEMORY in case.goals or effort.quick:
                yield from _memory(case, entries, 1 if effort.quick else _FRESH_PROCESSES)
    if "start" in choice.parts:
        yield _start(choice, 1 if effort.quick else 2 * _FRESH_PROCESSES)


# ------------------------------------------------------------------------------------ contestants


def _peers(cases: Sequence[KernelCase]) -> dict[str, str]:
    return {name: subject for case in cases for name, subject in case.peers.items()}


def _entries(cases: Sequence[KernelCase], choice: Choice) -> tuple[dict[str, Entry], list[str]]:
    """How each contestant is started, and a line for each peer that is nowhere."""
    ours = {OURS: "KernelCall", FRESH: "FreshKernelCall", DRAM: "DramRoofline", FMA: "FmaRoofline"}
    environment = choice.environment
    found = {name: Entry(f"{_SUBJECTS}:{it}", environment=environment) for name, it in ours.items()}
    missing = []
    for name, subject in _peers(cases).items():
        # A peer's module is named after what it needs.
        package = subject.partition(":")[0].rpartition(".")[2].removesuffix("_peer")
        pythons = [python for python in (sys.executable, *choice.peer_pythons) if _has(python, package)]
        if pythons:
            found[name] = Entry(subject, python=pythons[0], environment=environment)
        else:
            missing.append(f"{name} takes no part: {package} is not installed, nor under --peer-python")
    if _TORCH in found:
        found[KEPT] = replace(found[_TORCH], environment={**environment, **_KEEPING})
    return found, missing


def _has(python: str, package: str) -> bool:
    if python == sys.executable:
        return importlib.util.find_spec(package) is not None
    program = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    return subprocess.run([python, "-c", program, package], check=False).returncode == 0


def _version(entry: Entry, package: str) -> str:
    program = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    done = subprocess.run([entry.python, "-c", program, package], check=False, capture_output=True, text=True)
    return done.stdout.strip() or "of an unknown version"


# ---------------------------------------------------------------------------------- speed and errors


def _case(
    case: KernelCase, contestants: Field, effort: Effort, choice: Choice
) -> Iterator[Result | Figure | str]:
    peers: list[str] = []
    for name in (OURS, FRESH, *case.peers, *([KEPT] if _TORCH in case.peers else [])):
        if name in contestants:
            refused = _prepared(case, name, contestants)
            if refused:
                yield refused
            elif name != OURS:
                peers.append(name)
    if "speed" in choice.parts:
        contestants[case.roofline].prepare(case.question)
        names = (OURS, *peers, case.roofline)
        slots = {name: contestants[name].median_s for name in names}
        result = compare(case.label, case.dtype, slots, effort)
        yield result
        yield from _reached(case, result)
    if "errors" in choice.parts and ERROR in case.goals:
        yield from _errors(case, [OURS, *(name for name in peers if name in case.peers)], contestants)


def _prepared(case: KernelCase, name: str, contestants: Field) -> str:
    """Prepares a contestant; if it dies or computes something else, says so and leaves it out."""
    place = f"{case.label} {case.dtype}: {name} takes no part"
    try:
        contestants[name].prepare(case.question)
    except ProcessEnded as error:
        if name == OURS:
            raise
        contestants.end(name)
        return f"{place}: {error}"
    worst = difference(contestants[OURS].fingerprint, contestants[name].fingerprint)
    return "" if worst <= case.tolerance else f"{place}: its results differ from ours by about {worst:.1e}"


def _reached(case: KernelCase, result: Result) -> Iterator[Figure]:
    place = case.label, case.dtype
    for peer in result.peers:
        goal, ratios = case.goals.get(peer), result.ratios(peer)
        if peer == case.roofline:
            yield figure(place, f"our time over the {peer}'s", [1 / ratio for ratio in ratios], goal)
        elif goal or peer == KEPT:
            yield figure(place, f"{peer}'s time over ours", ratios, goal)
        if peer == _TORCH and FRESH in result.peers:
            fresh = [t / f for t, f in zip(result.peers[peer], result.peers[FRESH], strict=True)]
            yield figure(place, f"{peer}'s time over ours in fresh memory", fresh, None)


def _errors(case: KernelCase, names: Sequence[str], contestants: Field) -> Iterator[Figure]:
    """max|e| / max|g| of each result against the reference in float64, ours and the peers'."""
    call, operands = made(case.question)
    with tempfile.TemporaryDirectory(prefix="npugrad-bench-") as folder:
        golden = empty_outputs(case.question, call, np.float64)
        get_operator(case.operator).reference(operands, call.attrs, golden)
        for result, values in golden.items():
            np.save(Path(folder) / f"{result}.npy", values)
        found = {name: contestants[name].errors(Path(folder)) for name in names}
    for result, error in found.pop(OURS).items():
        peers = {name: errors[result] for name, errors in found.items()}
        place, what = (case.label, case.dtype), f"{ERROR} of {result}"
        yield figure(place, what, [error], case.goals[ERROR], peers=peers)


# ---------------------------------------------------------------------------------- new processes


def _memory(
    case: KernelCase, entries: Mapping[str, Entry], repetitions: int
) -> Iterator[Result | Figure | str]:
    if _TORCH not in entries:
        return
    seen: dict[str, list[float]] = {OURS: [], _TORCH: []}
    for _ in range(repetitions):
        for name, found in seen.items():
            found.append(_asked_once(entries[name], "memory", case.question)["extra_bytes"])
    label = f"{case.label}, {MEMORY}"
    result = Result(label, case.dtype, tuple(seen[OURS]), {_TORCH: tuple(seen[_TORCH])}, unit="bytes")
    yield result
    what = f"{_TORCH}'s {MEMORY} over ours"
    yield figure((label, case.dtype), what, result.ratios(_TORCH), case.goals.get(MEMORY))


def _start(choice: Choice, repetitions: int) -> Figure:
    nobody = Entry("builtins:object", environment=choice.environment)
    found = [_asked_once(nobody, "start", _START) for _ in range(repetitions)]
    milliseconds = [sum(each.values()) * 1e3 for each in found]
    what = "loading and first call, over NumPy"
    return figure(("any operator", str(_START["dtype"])), what, milliseconds, _START_MS, unit="ms")


def _asked_once(entry: Entry, what: str, case: Mapping[str, object]) -> dict[str, float]:
    with entry.process() as process:
        answer: dict[str, float] = process.ask({"do": what, "case": case})
        return answer
