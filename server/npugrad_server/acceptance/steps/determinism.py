"""Step 5: the deterministic option does what it promises, and switching it has no lasting effect."""

from __future__ import annotations

from collections.abc import Mapping, Set
from contextlib import nullcontext
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING

from npugrad.call import CallOptions
from npugrad_server.acceptance.job import make_job
from npugrad_server.acceptance.known import known
from npugrad_server.acceptance.shapes import build, float_dtypes
from npugrad_server.acceptance.step import Step
from npugrad_server.worker.protocol import CallDone, CallFailed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npugrad_server.acceptance.job import Job, Ran
    from npugrad_server.acceptance.report import Cell
    from npugrad_server.acceptance.rig import Rig
    from npugrad_server.acceptance.step import StepLog

REPEATS = 10


@dataclass(frozen=True)
class _Round:
    """One pass through all calls, in a process that has run none before.

    Attributes:
        repeats: How often each call is run in each mode.
        order: Whether the option is on, in this order: CANN may keep the mode that it met first.
        values: Whether results are compared with the reference.
    """

    repeats: int
    order: tuple[bool, bool]
    values: bool


_FIRST = _Round(REPEATS, (False, True), values=True)
_SECOND = _Round(3, (True, False), values=False)


@dataclass(frozen=True)
class _Repeated:
    """Results of one call, run repeatedly.

    Attributes:
        failure: Message of the first run without a result; empty if all gave one.
        distinct: Number of results that differ bitwise.
        bits: Digest of the first result.
        wrong: How the first result differs from the reference; empty if it is right or was not compared.
    """

    failure: str
    distinct: int
    bits: bytes
    wrong: str = ""


_Found = Mapping[tuple[str, bool], _Repeated]
"""By name of the call and whether it ran with the option."""


def run(rig: Rig, out: StepLog) -> None:
    """Runs each operator and type: off, then on, in one process; on, then off, in another; and in turns."""
    rig.restart()
    jobs = dict(_jobs(rig))
    able = {name for name, job in jobs.items() if not rig.why_not_deterministic(job.record, job.call)}
    out.progress(0, 3, "off, then on")
    if rig.ready.no_determinism:
        out.note(f"A worker keeps one mode here, so each mode has its own: {rig.ready.no_determinism}.")
    found = _gone_through(rig, jobs, able, _FIRST)
    _check_refused(rig, out, jobs, able)
    out.progress(1, 3, "on, then off, in another process")
    rig.restart()
    again = _gone_through(rig, jobs, able, _SECOND)
    out.progress(2, 3, "in turns")
    for name, job in jobs.items():
        free = found[name, False].failure
        out.check(f"{name}: option off", not free, "a result each time", free or "a result")
        if name in able:
            _check_fixed(out, name, found, again)
            _check_turns(rig, out, job, (name, found))
            _check_values(out, name, found)
    columns = ("call", "different results, on", "different results, off", "first result, on and off")
    rows = [_row(name, found) for name in jobs]
    out.table(f"{REPEATS} repeats with the deterministic option on and off", columns, rows)


def _gone_through(rig: Rig, jobs: Mapping[str, Job], able: Set[str], how: _Round) -> _Found:
    """Runs every call in both modes: one after the other in one process, or each mode in its own."""
    found: dict[tuple[str, bool], _Repeated] = {}
    stages = [(wanted,) for wanted in how.order] if rig.ready.no_determinism else [how.order]
    for modes in stages:
        with rig.deterministic() if modes == (True,) else nullcontext():
            for name, job in jobs.items():
                right = known(name, job) if how.values and name in able else None
                for wanted in modes:
                    if name in able or not wanted:
                        one = replace(job, options=CallOptions(deterministic=wanted))
                        runs = rig.run_many(one for _ in range(how.repeats))
                        wrong = right.complaint(runs[0]) if right is not None else ""
                        found[name, wanted] = replace(_judged(runs), wrong=wrong)
    return found


def _check_fixed(out: StepLog, name: str, found: _Found, again: _Found) -> None:
    fixed, other = found[name, True], again[name, True]
    out.check(
        f"{name}: option on",
        not fixed.failure and fixed.distinct == 1,
        f"the same bits {REPEATS} times",
        fixed.failure or _distinct(fixed.distinct),
    )
    same = not other.failure and other.distinct == 1 and other.bits == fixed.bits
    out.check(
        f"{name}: option on first",
        same,
        "the same bits in a process that ran nothing without it before",
        other.failure or _same(same),
    )


def _check_turns(rig: Rig, out: StepLog, job: Job, of: tuple[str, _Found]) -> None:
    """Checks runs with the option, each after one without; skipped where no worker does both."""
    if rig.ready.no_determinism:
        return
    name, found = of
    jobs = [replace(job, options=CallOptions(deterministic=wanted)) for wanted in (False, True)]
    mixed = _judged([rig.run_job(one) for _ in range(REPEATS // 2) for one in jobs][1::2])
    same = not mixed.failure and mixed.distinct == 1 and mixed.bits == found[name, True].bits
    out.check(
        f"{name}: option on and off in turns",
        same,
        "with it the same bits as before",
        mixed.failure or _same(same),
    )


def _check_values(out: StepLog, name: str, found: _Found) -> None:
    for words, wanted in (("with", True), ("without", False)):
        wrong = found[name, wanted].wrong
        out.check(
            f"{name}: right {words} the option", not wrong, "within tolerance", wrong or "within tolerance"
        )


def _check_refused(rig: Rig, out: StepLog, jobs: Mapping[str, Job], able: Set[str]) -> None:
    """Checks that workers refuse the option for lack of kernels, or because they keep the other mode."""
    for name, job in jobs.items():
        if name not in able or rig.ready.no_determinism:
            answer = rig.run_job(replace(job, options=CallOptions(deterministic=True))).answer
            reason = answer.reason if isinstance(answer, CallFailed) else type(answer).__name__
            refused = reason == "DETERMINISM_UNSUPPORTED"
            title = "refused by a worker without it" if name in able else "option on"
            out.check(f"{name}: {title}", refused, "DETERMINISM_UNSUPPORTED", reason)


def _row(name: str, found: _Found) -> tuple[Cell, ...]:
    free, fixed = found[name, False], found.get((name, True))
    if fixed is None:
        return name, None, free.distinct, "not offered"
    agreement = "the same bits" if fixed.bits == free.bits else "other bits"
    return name, fixed.distinct, free.distinct, agreement


def _jobs(rig: Rig) -> Iterator[tuple[str, Job]]:
    """Yields large calls, because small ones may have nothing to sum in another order."""
    settings = rig.settings
    for record in rig.operators:
        for workload in record.workloads.accepted[:1]:
            for dtype in float_dtypes(record, settings.product):
                call = build(record, workload, settings.simulated, dtype=dtype, product=settings.product)
                yield f"{record.name} {dtype} {workload.name}", make_job(record, call)


def _judged(runs: list[Ran]) -> _Repeated:
    words = [ran.answer.message for ran in runs if not isinstance(ran.answer, CallDone)]
    bits = [_digest(ran) for ran in runs]
    return _Repeated(words[0] if words else "", len(set(bits)), bits[0])


def _digest(ran: Ran) -> bytes:
    found = blake2b()
    for array in ran.outputs.values():
        found.update(array.tobytes())
    return found.digest()


def _distinct(count: int) -> str:
    return f"the same bits {REPEATS} times" if count == 1 else f"{count} different results"


def _same(same: bool) -> str:
    return "the same" if same else "different bits"


STEP = Step(
    5,
    "determinism",
    "Determinism",
    "Repeats the same call with and without the deterministic option, in either order and alternating.",
    run,
)
