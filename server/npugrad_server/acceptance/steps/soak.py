"""Step 8: mixed calls on all streams for a long time; memory stays flat, every result is right."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from npugrad_server.acceptance.columns import TIME
from npugrad_server.acceptance.growth import settled
from npugrad_server.acceptance.job import make_job
from npugrad_server.acceptance.known import in_flight, known
from npugrad_server.acceptance.link import DeviceGone
from npugrad_server.acceptance.shapes import build, float_dtypes
from npugrad_server.acceptance.step import Step

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from npugrad.meta import CallMeta
    from npugrad.operator import OpRecord
    from npugrad_server.acceptance.job import Ran
    from npugrad_server.acceptance.known import KnownJob
    from npugrad_server.acceptance.rig import Rig
    from npugrad_server.acceptance.step import StepLog

_MIB = 2**20
_WARM_UP = 0.4
"""Share of the time, at its start, in which allocators may still settle."""
_LEAST = 0.25
"""Share of the time, at its end, in which memory must be flat at the latest."""
_CACHED_CALLS = 10_000
"""Executors that aclnn caches for each thread, 2 to 20 KB each, before it drops any (ACLNN_CACHE_LIMIT)."""
_SAMPLES, _LEAST_SAMPLES = 150, 3
_LONGER = 10
"""With too few samples, the soak takes up to this many times as long as requested."""
_LEAST_PERIOD_S = 0.1
_GROWTH_BYTES, _GROWTH_SHARE = 48 * _MIB, 0.1
"""How much memory may grow after the warm-up: so many bytes, or this share of it if that is more; in
proportion less over a shorter stretch at the end. Allocators keep what calls used, and a new mixture of calls
makes them take some more."""
_LOST_BYTES = 16 * _MIB
"""Device memory that may be missing after everything was released: other processes use the device, too."""
_SEED = 20260101
_MOST_WRONG = 5
"""Number of wrong results shown in full."""


@dataclass(frozen=True)
class SoakSample:
    """Figures of one moment.

    Attributes:
        at_s: Seconds since the start.
        used_bytes: Device memory in use; None if the device has none of its own.
        own_bytes: Private host memory of the worker.
        calls: Calls answered so far.
    """

    at_s: float
    used_bytes: int | None
    own_bytes: int
    calls: int


@dataclass
class SoakTally:
    """Outcomes of the calls.

    Attributes:
        calls: Answered calls by name.
        wrong: Those that went wrong, by name.
        complaints: What was wrong with the first of these.
    """

    calls: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)

    def note(self, out: StepLog, job: KnownJob, ran: Ran) -> None:
        """Counts one answer."""
        self.calls[job.name] += 1
        complaint = job.complaint(ran)
        if complaint:
            out.keep_call(job.name, job.job, ran)
            self.wrong[job.name] += 1
            if len(self.complaints) < _MOST_WRONG:
                self.complaints.append(f"{job.name}: {complaint}")


def run(rig: Rig, out: StepLog) -> None:
    """Keeps all streams busy, checks every result, and samples memory now and then."""
    jobs = list(_jobs(rig, out))
    pid, tally = rig.pid, SoakTally()
    for job, ran in in_flight(rig, jobs, rig.settings.streams):  # loads each kernel
        tally.note(out, job, ran)
    if not rig.alive:
        _check_results(out, tally, rig, pid)
        return
    before = rig.memory(give_back=True).free_bytes
    samples = _soak(rig, out, jobs, tally)
    alive = _check_results(out, tally, rig, pid)
    _show(out, samples, tally)
    if not alive:
        return
    if not _check_growth(out, samples) and tally.calls.total() < _CACHED_CALLS * rig.settings.streams:
        out.note(
            f"aclnn keeps executors of up to {_CACHED_CALLS} calls a thread, and there were only "
            f"{tally.calls.total()} on {rig.settings.streams} streams: memory may level off in a longer soak."
        )
    after = rig.memory(give_back=True).free_bytes
    if before is not None and after is not None:
        _check_lost(out, before, after)


def _jobs(rig: Rig, out: StepLog) -> Iterator[KnownJob]:
    """Yields every small sample, and larger calls in every type, with their right results."""
    for done, record in enumerate(rig.operators):
        out.progress(done, len(rig.operators), f"right results for {record.name}")
        for sample in rig.samples(record):
            if not record.accepts_unchecked(sample.call):  # those have no results to compare
                yield known(record.name, make_job(record, sample.call))
        for call in _larger(rig, record):
            yield known(record.name, make_job(record, call))


def _larger(rig: Rig, record: OpRecord) -> Iterator[CallMeta]:
    """Returns calls in the simulation's sizes, even on hardware: the host must keep up checking results."""
    product = rig.settings.product
    if rig.settings.quick:
        return iter(())
    calls = (
        build(record, workload, True, dtype=dtype, product=product)
        for workload in record.workloads.accepted
        for dtype in float_dtypes(record, product)
    )
    return itertools.islice(calls, 1) if rig.settings.simulated else calls


def _soak(rig: Rig, out: StepLog, jobs: Sequence[KnownJob], tally: SoakTally) -> list[SoakSample]:
    """Runs shuffled calls until the time is up; samples memory about 150 times.

    If calls take so long that there are too few samples, it goes on for some more.
    """
    start, soak_s = time.monotonic(), rig.settings.soak_s
    period_s = max(soak_s / _SAMPLES, _LEAST_PERIOD_S)
    samples = [_sample(rig, start, tally)]

    def goes_on() -> bool:
        past_s = time.monotonic() - start
        return past_s < soak_s or (past_s < _LONGER * soak_s and not _tell_enough(samples))

    def endless() -> Iterator[KnownJob]:
        shuffled, order = list(jobs), random.Random(_SEED)
        while True:
            order.shuffle(shuffled)
            yield from itertools.takewhile(lambda _: goes_on(), shuffled)
            if not goes_on() or not rig.alive:
                return

    for job, ran in in_flight(rig, endless(), 2 * rig.settings.streams):
        tally.note(out, job, ran)
        if time.monotonic() - start - samples[-1].at_s >= period_s:
            # If the worker fails meanwhile, the call under which it failed says so.
            with contextlib.suppress(DeviceGone, OSError):
                samples.append(_sample(rig, start, tally))
            out.progress(int(samples[-1].at_s), int(soak_s), f"{samples[-1].calls} calls")
    return samples


def _tell_enough(samples: Sequence[SoakSample]) -> bool:
    """Whether there are enough samples after the warm-up to fit a line."""
    return sum(sample.at_s >= _WARM_UP * samples[-1].at_s for sample in samples) > _LEAST_SAMPLES


def _sample(rig: Rig, start: float, tally: SoakTally) -> SoakSample:
    found = rig.memory(give_back=False)
    used = None
    if found.free_bytes is not None and found.total_bytes is not None:
        used = found.total_bytes - found.free_bytes
    return SoakSample(time.monotonic() - start, used, private_bytes(rig.pid), tally.calls.total())


def private_bytes(pid: int) -> int:
    """Returns a process's private resident memory; the arenas are shared, so they do not count.

    Raises:
        OSError: There is no such process, or it is ending.
        ValueError: The kernel does not report it.
    """
    lines = (line.partition(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    status = {name: value for name, _, value in lines}
    if "RssAnon" in status:
        return int(status["RssAnon"].split()[0]) * 1024
    if "VmRSS" not in status:  # it is ending: its memory is gone, though it may not be a zombie yet
        raise ProcessLookupError(f"process {pid} has ended")
    raise ValueError(f"/proc/{pid}/status: found no RssAnon; expected Linux 4.5 or newer")


def _check_results(out: StepLog, tally: SoakTally, rig: Rig, pid: int) -> bool:
    """Checks results and worker; returns whether the worker is still there."""
    calls, wrong = tally.calls.total(), tally.wrong.total()
    out.check(
        "every result is right",
        calls > 0 and not wrong,
        "some calls, 0 wrong",
        f"{calls} calls, {wrong} wrong",
        "; ".join(tally.complaints),
    )
    alive = rig.alive and rig.pid == pid
    found = f"process {pid}" if alive else "it ended"
    return out.check("one worker for all calls", alive, f"process {pid}", found)


def _show(out: StepLog, samples: Sequence[SoakSample], tally: SoakTally) -> None:
    columns = (TIME, "device memory in use [MiB]", "worker's own memory [MiB]", "calls/s")
    rows = []
    for last, now in itertools.pairwise(samples):
        rate = (now.calls - last.calls) / (now.at_s - last.at_s)
        used = None if now.used_bytes is None else now.used_bytes / _MIB
        rows.append((now.at_s, used, now.own_bytes / _MIB, rate))
    out.table("Over time", columns, rows)
    calls = [(name, tally.calls[name], tally.wrong[name]) for name in tally.calls]
    out.table("Calls", ("operator", "calls", "wrong"), calls)


def _check_growth(out: StepLog, samples: Sequence[SoakSample]) -> bool:
    device = [(s.at_s, s.used_bytes) for s in samples if s.used_bytes is not None]
    own = [(s.at_s, s.own_bytes) for s in samples]
    quantities = (("device memory in use", device), ("the worker's own memory", own))
    return all([check_flat(out, name, points) for name, points in quantities if points])


def check_flat(out: StepLog, name: str, points: Sequence[tuple[float, int]]) -> bool:
    """Checks that a quantity in bytes levels off.

    Args:
        out: Receives the check.
        name: Name of the quantity.
        points: Pairs of seconds and bytes, ordered by time.
    """
    times, values = [x for x, _ in points], [y for _, y in points]
    try:
        found = settled(times, values, _WARM_UP, _LEAST)
    except ValueError as error:
        return out.check(f"{name} is flat", False, "enough samples to tell", str(error))
    whole_s = (1 - _WARM_UP) * (times[-1] - times[0])
    limit = max(_GROWTH_BYTES, _GROWTH_SHARE * found.level) * min(1.0, found.seconds / whole_s)
    return out.check(
        f"{name} is flat",
        found.total <= limit,
        f"grows by at most {limit / _MIB:,.1f} MiB in the last {found.seconds:.0f} s",
        f"{found.total / _MIB:+,.2f} MiB in {found.seconds:.0f} s, at {found.level / _MIB:,.0f} MiB; "
        f"{(values[-1] - values[0]) / _MIB:+,.2f} MiB in all",
        f"least squares from {found.since:.0f} s on, where it is flattest; at least the last {_LEAST:.0%}",
    )


def _check_lost(out: StepLog, before: int, after: int) -> None:
    lost = before - after
    out.check(
        "no device memory is lost",
        lost <= _LOST_BYTES,
        f"at most {_LOST_BYTES // _MIB} MiB less free than before",
        f"{lost / _MIB:,.1f} MiB less",
        "after the worker freed what it keeps for later calls",
    )


STEP = Step(
    8,
    "soak",
    "Soak",
    "Mixed calls on all streams for a long time: every result right, memory flat.",
    run,
    lasts=True,
)
"""The step."""
