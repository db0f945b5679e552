"""Step 10: the worker is killed during a call; the pool runs the call again or reports what happened."""

from __future__ import annotations

import os
import resource
import signal
import time
from concurrent.futures import TimeoutError as FutureTimeout  # not the builtin before Python 3.11
from typing import TYPE_CHECKING

from npugrad.errors import NpugradError
from npugrad_server.acceptance.extremes import find_long_call
from npugrad_server.acceptance.job import make_job
from npugrad_server.acceptance.known import known
from npugrad_server.acceptance.step import Step
from npugrad_server.acceptance.watch import Watch

if TYPE_CHECKING:
    from concurrent.futures import Future

    from npugrad.call import ExecutionInfo
    from npugrad_server.acceptance.extremes import LongCall
    from npugrad_server.acceptance.known import KnownJob
    from npugrad_server.acceptance.rig import Rig
    from npugrad_server.acceptance.step import StepLog
    from npugrad_server.acceptance.supervised import Outputs, SupervisedDevice

    Running = Future[tuple[Outputs, ExecutionInfo]]

_TARGET_S, _LEAST_S = 1.0, 0.02
_SHARE = 5
"""The worker is killed after the long call's time divided by this."""
_ANSWER_S = 60.0
"""Seconds to wait for each answer, beyond what replacing a worker may take."""


def run(rig: Rig, out: StepLog) -> None:
    """Kills the worker twice: once when calls may be run again, and once when they may not."""
    long = find_long_call(rig, out, _TARGET_S, _LEAST_S)
    small = [known(record.name, make_job(record, next(rig.samples(record)).call)) for record in rig.operators]
    with rig.pool() as device:
        _killed_and_run_again(device, out, long, small)
    with rig.pool(max_attempts=1) as device:
        _killed_and_told(device, out, long, small)
    rig.start()


def _killed_and_run_again(
    device: SupervisedDevice, out: StepLog, long: LongCall, small: list[KnownJob]
) -> None:
    watch, limit_s = Watch(device), device.start_limit_s
    running = device.submit(long.known.job)
    waiting = [(job, device.submit(job.job)) for job in small]
    _kill_in_the_middle(device, out, long, "once")
    wrong, info = _outcome(running, long.known, limit_s)
    attempts = info.attempts if info is not None else 0
    out.check(
        "the call under which the worker died is run again",
        not wrong and attempts == 2,
        "its right result, at the second try",
        wrong or f"its right result, at try {attempts}",
    )
    for job, future in waiting:
        wrong, _ = _outcome(future, job, limit_s)
        out.check(f"a call waiting at the same time: {job.name}", not wrong, "right", wrong or "right")
    watch.check_back(out, "killed during a call")
    _check_next(device, out, small, "killed during a call")


def _killed_and_told(device: SupervisedDevice, out: StepLog, long: LongCall, small: list[KnownJob]) -> None:
    watch, limit_s = Watch(device), device.start_limit_s
    running = device.submit(long.known.job)
    # SIGKILL, which anybody may send, would use up no try.
    _kill_in_the_middle(device, out, long, "with one try for each call", signal.SIGABRT)
    wrong, _ = _outcome(running, long.known, limit_s)
    out.check(
        "a call that may not be run again gets the documented error",
        wrong.startswith("WORKER_LOST"),
        "WORKER_LOST",
        wrong or "a result",
    )
    watch.check_back(out, "killed, with one try for each call")
    _check_next(device, out, small, "killed, with one try for each call")


def _kill_in_the_middle(
    device: SupervisedDevice,
    out: StepLog,
    long: LongCall,
    what: str,
    number: signal.Signals = signal.SIGKILL,
) -> None:
    time.sleep(long.run_s / _SHARE)
    status = device.status()
    calls = device.on_loop(lambda: device.pool.stats().running)
    out.check(
        f"a call runs when the worker is killed, {what}",
        status.pid is not None and calls > 0,
        "a process with a call",
        f"process {status.pid} with {calls} calls",
        f"{long.run_s / _SHARE:.2g} s into a call that takes {long.run_s:.2g} s",
    )
    if status.pid is not None:
        resource.prlimit(status.pid, resource.RLIMIT_CORE, (0, 0))
        os.kill(status.pid, number)


def _outcome(future: Running, job: KnownJob, limit_s: float) -> tuple[str, ExecutionInfo | None]:
    """Returns what is wrong with a call's outcome, empty if nothing, and how the call was executed."""
    try:
        outputs, info = future.result(limit_s + _ANSWER_S)
    except NpugradError as error:
        return f"{error.reason}: {error}", None
    except FutureTimeout:
        return f"no answer within {limit_s + _ANSWER_S:g} s", None
    return job.wrong(outputs), info


def _check_next(device: SupervisedDevice, out: StepLog, small: list[KnownJob], name: str) -> None:
    for job in small:
        wrong, _ = _outcome(device.submit(job.job), job, 0.0)
        out.check(f"{name}: the next call is right: {job.name}", not wrong, "right", wrong or "right")


STEP = Step(
    10,
    "crash",
    "A worker killed during a call",
    "A worker that is killed is replaced; its calls are run again or fail with the documented error.",
    run,
)
"""The step."""
