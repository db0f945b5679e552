"""Runs steps one after the other, whatever becomes of each."""

from __future__ import annotations

import time
import traceback
from typing import TYPE_CHECKING, Protocol

from npugrad_server.acceptance.link import DeviceGone
from npugrad_server.acceptance.report import StepReport
from npugrad_server.acceptance.step import Listener, StepLog, StepSkipped

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from npugrad_server.acceptance.bench import Bench
    from npugrad_server.acceptance.report import Outcome
    from npugrad_server.acceptance.step import Step

_TRACE_LINES = 6
"""Last lines of a trace that go into the report."""


class StepListener(Listener, Protocol):
    """Who is shown the steps."""

    def started(self, step: Step) -> None:
        """A step begins."""

    def finished(self, report: StepReport) -> None:
        """A step has ended, or was skipped."""


def run_steps(bench: Bench, steps: Iterable[Step], listener: StepListener) -> Iterator[StepReport]:
    """Runs steps; yields the report of each as soon as it has ended.

    A step begins with a worker that answers, of the bench's own settings. Once the device does not open any
    more, or somebody interrupts, the rest that needs it is skipped.
    """
    gone = ""
    for step in steps:
        listener.started(step)
        log, start = StepLog(listener), time.monotonic()
        if gone and step.needs_device:
            outcome, error = _skipped(gone)
        else:
            try:
                outcome, error = _run(bench, step, log)
            except DeviceGone as lost:
                gone = f"the device is gone: {lost}"
                outcome, error = "failed", gone
            except KeyboardInterrupt:
                gone = "interrupted"
                outcome, error = "failed", gone
        report = StepReport(
            step.number,
            step.key,
            step.title,
            outcome,
            round(time.monotonic() - start, 3),
            tuple(log.checks),
            tuple(log.tables),
            tuple(log.notes),
            error,
        )
        listener.finished(report)
        yield report


def _run(bench: Bench, step: Step, log: StepLog) -> tuple[Outcome, str]:
    if step.needs_device:
        bench.start()
    try:
        step.run(bench, log)
    except StepSkipped as reason:
        return _skipped(str(reason))
    except DeviceGone as error:
        # Perhaps only this step's way of opening it failed.
        log.note(f"opened once more after: {error}")
        bench.restart()
        return "failed", str(error)
    except Exception as error:
        return "failed", _last_lines(error)
    if not log.checks:
        return "failed", "nothing was checked: the device has nothing that this step is about"
    return ("passed" if log.ok else "failed"), ""


def _skipped(reason: str) -> tuple[Outcome, str]:
    return "skipped", reason


def _last_lines(error: Exception) -> str:
    lines = "".join(traceback.format_exception(type(error), error, error.__traceback__)).splitlines()
    return "\n".join(lines[-_TRACE_LINES:])
