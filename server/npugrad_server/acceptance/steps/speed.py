"""Step 9: how fast calls are. Figures are reported, not judged; only the results are checked."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import TYPE_CHECKING

from npugrad_server.acceptance.columns import CALLS_PER_S, P90, STAGES
from npugrad_server.acceptance.job import make_job
from npugrad_server.acceptance.known import in_flight, known, words
from npugrad_server.acceptance.shapes import factor, realistic_calls
from npugrad_server.acceptance.step import Step
from npugrad_server.worker.protocol import CallDone

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from npugrad_server.acceptance.job import Ran
    from npugrad_server.acceptance.known import KnownJob
    from npugrad_server.acceptance.report import Cell
    from npugrad_server.acceptance.rig import Rig
    from npugrad_server.acceptance.step import StepLog

_MOST_CALLS = 200
"""Maximum number of calls for each row of a table, on each stream."""


@dataclass(frozen=True)
class Effort:
    """How long each row of a table is measured.

    Attributes:
        seconds: Time to measure, unless it allows fewer than `least_calls` or more than `_MOST_CALLS`.
        least_calls: Calls to measure, however long they take.
    """

    seconds: float
    least_calls: int


_ON_HARDWARE, _SIMULATED = Effort(2.0, 5), Effort(0.2, 2)


@dataclass
class TimedCall:
    """One timed call.

    Attributes:
        job: The call with its right results.
        operator: Its operator.
        shape: Its size and type, as readable text.
        wrong: What was wrong with the results checked; empty if nothing.
        rates: Calls per second by number of streams.
    """

    job: KnownJob
    operator: str
    shape: str
    wrong: str = ""
    rates: dict[int, float] = field(default_factory=dict)

    def judge(self, ran: Ran) -> None:
        """Checks a result; never called while the clock runs."""
        self.wrong = self.wrong or self.job.complaint(ran)


def run(rig: Rig, out: StepLog) -> None:
    """Times calls one at a time, then as many as one stream takes, then all streams."""
    cases = list(_cases(rig, out))
    streams = sorted({1, rig.settings.streams})
    rig.start(streams_per_device=1)
    rows = []
    rounds = 1 + len(streams)
    for done, case in enumerate(cases):
        out.progress(done, rounds * len(cases), f"one call at a time: {case.operator}, {case.shape}")
        rows.append(_latency(rig, case))
    for index, count in enumerate(streams):
        rig.start(streams_per_device=count)
        for done, case in enumerate(cases):
            what = f"{count} streams: {case.operator}, {case.shape}"
            out.progress((index + 1) * len(cases) + done, rounds * len(cases), what)
            case.rates[count] = _rate(rig, case, count)
    rig.start()
    out.table(
        "One call at a time",
        ("operator", "size", "calls", "median [ms]", P90, *STAGES, "other [ms]", "workspace [MiB]"),
        rows,
    )
    out.table(
        "As many calls as the streams take",
        ("operator", "size", *(_column(count) for count in streams)),
        [(case.operator, case.shape, *(case.rates[count] for count in streams)) for case in cases],
    )
    out.note(
        "A call is timed from operands to results in the caller's memory. Stages are medians measured by the "
        "worker; the rest is the transfer between the processes."
    )
    for case in cases:
        name = f"{case.operator}, {case.shape}"
        out.check(f"{name}: first and last results", not case.wrong, "right", case.wrong or "right")


def _column(streams: int) -> str:
    return f"{CALLS_PER_S} on {streams} stream{'' if streams == 1 else 's'}"


def _cases(rig: Rig, out: StepLog) -> Iterator[TimedCall]:
    settings, smaller = rig.settings, []
    for record in rig.operators:
        seen = set()
        for size, dtype, call in realistic_calls(record, settings.product, settings.simulated):
            if settings.simulated and size.name in seen:
                continue  # the simulation's speed is not worth a second type
            seen.add(size.name)
            out.progress(0, 1, f"right results for {record.name}, {size.name} {dtype}")
            job = known(f"{record.name} {size.name} {dtype}", make_job(record, call))
            yield TimedCall(job, record.name, f"{size.name} {dtype}")
            smaller.append(f"{record.name} {size.name}: 1/{factor(record, size):.0f}")
    if settings.simulated:
        out.note(f"The simulation runs smaller calls, by bytes of the operands: {', '.join(smaller)}.")


def _latency(rig: Rig, case: TimedCall) -> tuple[Cell, ...]:
    """Times calls one after the other; returns a row of the table."""
    case.judge(rig.run_job(case.job.job))  # the first call loads kernels and allocates memory
    walls: list[float] = []
    answers: list[CallDone] = []
    last: Ran | None = None
    effort = _effort(rig)
    end = time.monotonic() + effort.seconds
    while len(walls) < effort.least_calls or (len(walls) < _MOST_CALLS and time.monotonic() < end):
        start = time.perf_counter()
        ran = rig.run_job(case.job.job)
        wall_s = time.perf_counter() - start
        if not isinstance(ran.answer, CallDone):
            case.wrong = case.wrong or words(ran.answer)
            break
        walls.append(wall_s)
        answers.append(ran.answer)
        last = ran
    if last is None:
        return (case.operator, case.shape, 0, *(None for _ in range(7)))
    case.judge(last)
    copy_in, run_s, copy_out = (
        1000 * median(getattr(answer, stage) for answer in answers)
        for stage in ("copy_in_s", "run_s", "copy_out_s")
    )
    middle = 1000 * median(walls)
    stages = (copy_in, run_s, copy_out, max(0.0, middle - copy_in - run_s - copy_out))
    workspace = answers[-1].workspace_bytes / 2**20
    return (case.operator, case.shape, len(walls), middle, 1000 * p90(walls), *stages, workspace)


def p90(values: Sequence[float]) -> float:
    """Returns the 90th percentile; for a single value, the value itself."""
    return quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else values[0]


def _rate(rig: Rig, case: TimedCall, streams: int) -> float:
    """Returns calls per second while more calls are always waiting than the streams can run."""
    window, effort, start = 2 * streams, _effort(rig), time.monotonic()
    end = start + effort.seconds

    def jobs() -> Iterator[KnownJob]:
        for sent in itertools.count():
            late = time.monotonic() >= end or sent >= streams * _MOST_CALLS
            if (sent >= streams * effort.least_calls and late) or not rig.alive:
                return
            yield case.job

    calls, last, done_s = 0, None, start
    for _, ran in in_flight(rig, jobs(), window):
        if not isinstance(ran.answer, CallDone):
            case.wrong = case.wrong or words(ran.answer)
            break
        calls, last, done_s = calls + 1, ran, time.monotonic()
    if last is not None:
        case.judge(last)
    return calls / (done_s - start) if calls else 0.0


def _effort(rig: Rig) -> Effort:
    return _SIMULATED if rig.settings.simulated else _ON_HARDWARE


STEP = Step(
    9,
    "speed",
    "Speed",
    "Time of a call and its stages, and calls in a second, for realistic sizes; figures are not judged.",
    run,
)
"""The step."""
