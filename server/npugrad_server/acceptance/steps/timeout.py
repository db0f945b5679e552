"""Step 7: a call that takes too long is aborted, its worker is replaced, and the device works on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from npugrad.errors import NpugradError
from npugrad_server.acceptance.extremes import find_long_call
from npugrad_server.acceptance.job import make_job
from npugrad_server.acceptance.known import known, words
from npugrad_server.acceptance.step import Step
from npugrad_server.acceptance.watch import Watch
from npugrad_server.worker.protocol import DeviceFailed

if TYPE_CHECKING:
    from npugrad_server.acceptance.extremes import LongCall
    from npugrad_server.acceptance.known import KnownJob
    from npugrad_server.acceptance.rig import Rig
    from npugrad_server.acceptance.step import StepLog
    from npugrad_server.acceptance.supervised import SupervisedDevice

TIMED_OUT = 507046
"""Code: a stream was not done within the time of a bounded wait."""
_TARGET_S, _LEAST_S = 1.0, 0.05
_SHORT_S = 0.001
_SHARE = 2
"""Under the pool, a call may run for the long call's time divided by this."""
_TOLD_S = 5.0
"""Seconds in which the worker must notice the timeout and end."""


def run(rig: Rig, out: StepLog) -> None:
    """Aborts a long call, first without the pool, then through it."""
    long = find_long_call(rig, out, _TARGET_S, _LEAST_S)
    record = rig.operators[0]
    small = known(record.name, make_job(record, next(rig.samples(record)).call))
    _cut_by_worker(rig, out, long)
    limit_s = long.run_s / _SHARE
    with rig.pool(run_limit_s=limit_s) as device:
        _cut_under_pool(device, out, long, limit_s)
        _check_small(device, out, small)
    rig.start()


def _cut_by_worker(rig: Rig, out: StepLog, long: LongCall) -> None:
    """Gives a much longer call one millisecond: the worker must report this and end by itself."""
    rig.start(run_limit_s=_SHORT_S)
    pid, start = rig.pid, time.monotonic()
    answer = rig.run_job(long.known.job).answer
    told_s = time.monotonic() - start
    code = answer.code if isinstance(answer, DeviceFailed) else 0
    out.check(
        "a call longer than its limit is ended",
        code == TIMED_OUT,
        f"the worker ends with {TIMED_OUT}",
        words(answer),
        f"the call takes {long.run_s:.2g} s, its limit is {_SHORT_S * 1000:g} ms",
    )
    gone = not Path(f"/proc/{pid}").exists()
    out.check(
        "the worker ends by itself, in time",
        gone and told_s <= _TOLD_S,
        f"process {pid} gone within {_TOLD_S:g} s",
        f"process {pid} {'gone' if gone else 'still there'} after {told_s:.3f} s",
    )


def _cut_under_pool(device: SupervisedDevice, out: StepLog, long: LongCall, limit_s: float) -> None:
    """Checks the same through the pool: the caller gets the error, and the device leaves and comes back."""
    watch, start = Watch(device), time.monotonic()
    found, reason = "a result", ""
    try:
        device.run(long.known.job)
    except NpugradError as error:
        reason, found = error.reason, f"{error.reason}: {error}"
    told_s = time.monotonic() - start
    out.check(
        "through the pool, the caller gets the error",
        reason == "DEADLINE_EXCEEDED" and str(TIMED_OUT) in found,
        f"DEADLINE_EXCEEDED, naming {TIMED_OUT}",
        found,
        f"after {told_s:.3f} s; the call takes {long.run_s:.2g} s, its limit is {limit_s:.2g} s",
    )
    if reason:  # otherwise the device never left the pool
        watch.check_back(out, "a call past its limit")


def _check_small(device: SupervisedDevice, out: StepLog, small: KnownJob) -> None:
    try:
        wrong = small.wrong(device.run(small.job)[0])
    except NpugradError as error:
        wrong = f"{error.reason}: {error}"
    out.check("the next call is right", not wrong, "right", wrong or "right", small.name)


STEP = Step(
    7,
    "timeout",
    "A call that takes too long",
    "A call that exceeds its time limit is aborted, its worker is replaced, and the next call is right.",
    run,
)
"""The step."""
