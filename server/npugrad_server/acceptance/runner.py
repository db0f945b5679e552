"""Runs steps one after the other, however each of them ends."""

from __future__ import annotations

import time
import traceback
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Protocol

from npugrad_server.acceptance.limits import StepTimeout
from npugrad_server.acceptance.link import DeviceGone
from npugrad_server.acceptance.report import StepReport
from npugrad_server.acceptance.step import Listener, StepLog, StepSkipped

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from npugrad_server.acceptance.limits import Limits
    from npugrad_server.acceptance.report import StepOutcome
    from npugrad_server.acceptance.rig import Rig
    from npugrad_server.acceptance.step import Keeper, Step

_NO_TIME = "the time for all steps together ran out"
_TRACE_LINES = 6
"""Last lines of a traceback that go into the report."""


class StepListener(Listener, Protocol):
    """Receives the beginning, progress and end of steps."""

    def started(self, step: Step) -> None:
        """A step begins."""

    def finished(self, report: StepReport) -> None:
        """A step has ended, or was skipped."""


def run_steps(
    rig: Rig,
    steps: Iterable[Step],
    listener: StepListener,
    *,
    limits: Limits | None = None,
    keeper: Keeper | None = None,
    gone: str = "",
) -> Iterator[StepReport]:
    """Runs steps; yields the report of each as soon as it has ended.

    A step that needs the device begins with a responsive worker that has the rig's own settings. Once the
    device no longer opens, the remaining steps that need it are skipped; after an interrupt, all are.

    Args:
        rig: The device.
        steps: Steps to run.
        listener: Receives the progress.
        limits: Limits the time of each step; no limit by default.
        keeper: Keeps the data of failures.
        gone: Why the device cannot be used from the start; empty if it can.
    """
    interrupted = ""
    for step in steps:
        listener.started(step)
        log, start = StepLog(listener, keeper), time.monotonic()
        outcome: StepOutcome = "failed"
        if interrupted or (gone and step.needs_device):
            outcome, error = _skipped(interrupted or gone)
        elif limits is not None and limits.over:
            outcome, error = _skipped(_NO_TIME)
        else:
            try:
                with limits.step(_extra_s(rig, step)) if limits else nullcontext():
                    outcome, error = _run(rig, step, log)
            except DeviceGone as lost:
                gone = error = f"the device is gone: {lost}"
            except (StepTimeout, KeyboardInterrupt) as end:
                error = str(end) or "interrupted"
                interrupted = error if isinstance(end, KeyboardInterrupt) else ""
                if not interrupted and limits is not None and limits.over and log.ok:
                    outcome, error = _skipped(
                        f"cut short: {_NO_TIME}, because the host is slow or something hangs"
                    )
                with suppress(DeviceGone):
                    rig.stop(kill=True)
        report = _report(step, log, outcome, error, time.monotonic() - start)
        listener.finished(report)
        yield report


def _extra_s(rig: Rig, step: Step) -> float:
    """Returns the seconds that a step was asked to take beyond the limit."""
    return rig.settings.soak_s if step.lasts else 0.0


def _report(step: Step, log: StepLog, outcome: StepOutcome, error: str, seconds: float) -> StepReport:
    return StepReport(
        step.number,
        step.key,
        step.title,
        outcome,
        round(seconds, 3),
        tuple(log.checks),
        tuple(log.tables),
        tuple(log.notes),
        error,
    )


def _run(rig: Rig, step: Step, log: StepLog) -> tuple[StepOutcome, str]:
    if step.needs_device:
        rig.start()
    try:
        step.run(rig, log)
    except StepSkipped as reason:
        return _skipped(str(reason))
    except DeviceGone as error:
        # Perhaps only this step's way of opening the device failed.
        log.note(f"opened again after: {error}")
        rig.restart()
        return "failed", str(error)
    except Exception as error:
        return "failed", _last_lines(error)
    if not log.checks:
        return "failed", "nothing was checked: this step does not apply to the device"
    return ("passed" if log.ok else "failed"), ""


def _skipped(reason: str) -> tuple[StepOutcome, str]:
    return "skipped", reason


def _last_lines(error: Exception) -> str:
    lines = "".join(traceback.format_exception(type(error), error, error.__traceback__)).splitlines()
    return "\n".join(lines[-_TRACE_LINES:])
