"""Step 5: the deterministic option does what it promises, and switching it leaves nothing behind."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from npugrad.call import CallOptions
from npugrad_server.acceptance.known import known
from npugrad_server.acceptance.shapes import SIZES, float_dtypes, realistic_job
from npugrad_server.acceptance.step import Step
from npugrad_server.worker.protocol import CallDone, CallFailed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npugrad_server.acceptance.bench import Bench
    from npugrad_server.acceptance.job import Job, Ran
    from npugrad_server.acceptance.report import Cell
    from npugrad_server.acceptance.step import StepLog

REPEATS = 10


@dataclass(frozen=True)
class _Repeated:
    """Results of one call, run again and again.

    Attributes:
        failure: What a run that gave no result said; empty when all gave one.
        distinct: How many different results there were, bit by bit.
        first: The first result.
    """

    failure: str
    distinct: int
    first: Ran


def run(bench: Bench, out: StepLog) -> None:
    """Each operator and type ten times with the option, ten times without, and in turns."""
    rows: list[tuple[Cell, ...]] = []
    jobs = list(_jobs(bench))
    for done, (name, job) in enumerate(jobs):
        out.progress(done, len(jobs), name)
        if job.spec.determinism_check(job.call):
            _check_refused(bench, out, name, job)
            free = _repeat(bench, job, deterministic=False)
            rows.append((name, None, free.distinct, "not offered"))
            out.check(
                f"{name}: option off", not free.failure, "a result each time", free.failure or "a result"
            )
            continue
        fixed, free = (_repeat(bench, job, deterministic=wanted) for wanted in (True, False))
        mixed = _alternate(bench, job)
        rows.append((name, fixed.distinct, free.distinct, _agreement(fixed, free)))
        out.check(
            f"{name}: option on",
            not fixed.failure and fixed.distinct == 1,
            f"the same bits {REPEATS} times",
            fixed.failure or _distinct(fixed.distinct),
        )
        out.check(f"{name}: option off", not free.failure, "a result each time", free.failure or "a result")
        same = not mixed.failure and mixed.distinct == 1 and _bits(mixed.first) == _bits(fixed.first)
        out.check(
            f"{name}: option on and off in turns",
            same,
            "with it the same bits as before",
            mixed.failure or ("the same" if same else "others"),
        )
        right = known(name, job)
        for words, repeated in (("with", fixed), ("without", free)):
            wrong = right.complaint(repeated.first)
            found = wrong or "within tolerance"
            out.check(f"{name}: right {words} the option", not wrong, "within tolerance", found)
    columns = ("call", "different results, on", "different results, off", "first result, on and off")
    out.table(f"{REPEATS} repeats with the deterministic option on and off", columns, rows)


def _jobs(bench: Bench) -> Iterator[tuple[str, Job]]:
    """Large calls, because small ones may have nothing to sum in another order."""
    settings = bench.settings
    for spec in bench.operators:
        for size in SIZES.get(spec.name, ())[:1]:
            for dtype in float_dtypes(spec, settings.product):
                call = size.build(spec, settings.simulated, dtype=dtype, product=settings.product)
                yield f"{spec.name} {dtype} {size.name}", realistic_job(spec, call)


def _check_refused(bench: Bench, out: StepLog, name: str, job: Job) -> None:
    answer = bench.run_job(replace(job, options=CallOptions(deterministic=True))).answer
    reason = answer.reason if isinstance(answer, CallFailed) else type(answer).__name__
    out.check(f"{name}: option on", reason == "DETERMINISM_UNSUPPORTED", "DETERMINISM_UNSUPPORTED", reason)


def _repeat(bench: Bench, job: Job, *, deterministic: bool) -> _Repeated:
    options = CallOptions(deterministic=deterministic)
    return _judged(bench.run_many(replace(job, options=options) for _ in range(REPEATS)))


def _alternate(bench: Bench, job: Job) -> _Repeated:
    """Runs with the option, each after one without."""
    runs = [
        bench.run_job(replace(job, options=CallOptions(deterministic=wanted)))
        for _ in range(REPEATS // 2)
        for wanted in (False, True)
    ]
    return _judged(runs[1::2])


def _judged(runs: list[Ran]) -> _Repeated:
    words = [ran.answer.message for ran in runs if not isinstance(ran.answer, CallDone)]
    return _Repeated(words[0] if words else "", len({_bits(ran) for ran in runs}), runs[0])


def _bits(ran: Ran) -> tuple[bytes, ...]:
    return tuple(array.tobytes() for array in ran.outputs.values())


def _agreement(fixed: _Repeated, free: _Repeated) -> str:
    return "the same bits" if _bits(fixed.first) == _bits(free.first) else "other bits"


def _distinct(count: int) -> str:
    return f"the same bits {REPEATS} times" if count == 1 else f"{count} different results"


STEP = Step(
    5,
    "determinism",
    "Determinism",
    "The same call again and again, with the deterministic option, without it, and in turns.",
    run,
)
