"""Console output of a running acceptance: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from npugrad_server.acceptance.report import STEPS_IN_ALL

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from types import TracebackType

    from rich.progress import TaskID

    from npugrad_server.acceptance.report import Report, StepCheck, StepReport
    from npugrad_server.acceptance.step import Step

_PLAIN_EVERY_S = 10.0
"""Seconds between two lines about one step without a terminal."""
_FILE_COLUMNS = 200
_MOST_FAILURES = 20
_WORDS = {"passed": "PASSED", "failed": "FAILED", "skipped": "SKIPPED"}
_STYLES = {"passed": "green", "failed": "bold red", "skipped": "yellow"}

SIMULATED = r"""
  ####   ####  ##   ##  ##  ##  ##       ###    ######  ######  #####
 ##       ##   ### ###  ##  ##  ##      ## ##     ##    ##      ##  ##
  ####    ##   ## # ##  ##  ##  ##     ##   ##    ##    #####   ##  ##
     ##   ##   ##   ##  ##  ##  ##     #######    ##    ##      ##  ##
  ####   ####  ##   ##   ####   ###### ##   ##    ##    ######  #####

 SIMULATED: CANN is the simulation of the tests. Nothing here is about hardware.
"""
"""The banner."""


class AcceptanceConsole:
    """Shows steps, as a `StepListener`; a context manager that ends the live line on exit."""

    def __init__(self) -> None:
        """Writes to standard output."""
        live = sys.stdout.isatty()
        self._console = Console(width=None if live else _FILE_COLUMNS, highlight=False, markup=False)
        self._progress: Progress | None = None
        if live:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self._progress = Progress(*columns, console=self._console, transient=True)
        self._task: TaskID | None = None
        self._said_s = 0.0

    def __enter__(self) -> AcceptanceConsole:
        """Starts the live line."""
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the live line."""
        if self._progress is not None:
            self._progress.stop()

    # ------------------------------------------------------------------------------------- while steps run

    def started(self, step: Step) -> None:
        """Announces a step."""
        self._said_s = time.monotonic()
        words = f"{step.number:2}  {step.title}"
        if self._progress is None:
            self._say(words)
        else:
            self._task = self._progress.add_task(words, total=None)

    def progress(self, done: int, total: int, what: str) -> None:
        """Shows how much of the step is done."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, total=total, description=f"    {what}")
        elif time.monotonic() - self._said_s >= _PLAIN_EVERY_S:
            self._said_s = time.monotonic()
            self._say(f"      {done} of {total}: {what}")

    def checked(self, check: StepCheck) -> None:
        """Prints a check only if it failed."""
        if not check.ok:
            self._say(f"      NOT OK  {failure_line(check)}", "red")

    def finished(self, report: StepReport) -> None:
        """Prints the outcome of a step."""
        if self._progress is not None and self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None
        good = len(report.checks) - len(report.failures)
        words = _WORDS[report.outcome]
        self._say(
            f"{report.number:2}  {report.title}: {words}, {good} of {len(report.checks)} checks ok, "
            f"{report.seconds:.1f} s",
            _STYLES[report.outcome],
        )
        for line in report.error.splitlines():
            self._say(f"      {line}")

    # ------------------------------------------------------------------------------------ before and after

    def say_simulated(self) -> None:
        """Prints the banner, in large letters."""
        self._say(SIMULATED, "bold yellow")

    def say_problems(self, problems: Iterable[str]) -> None:
        """Prints why the device cannot be used, in the words of `check`."""
        for problem in problems:
            self._say(f"FAIL  {problem}", "bold red")

    def say_environment(self, report: Report) -> None:
        """Prints what is being accepted."""
        for name, text in report.environment.items():
            self._say(f"{name:>12}  {text}")

    def say_end(self, report: Report, written: Iterable[Path]) -> None:
        """Prints the outcome of all steps, and the files written."""
        for step in report.steps:
            if step.outcome != "passed":
                self._say(f"{_WORDS[step.outcome]}  {step.number} {step.title}", _STYLES[step.outcome])
                for check in step.failures[:_MOST_FAILURES]:
                    self._say(f"        {failure_line(check)}")
                more = len(step.failures) - _MOST_FAILURES
                if more > 0:
                    self._say(f"        and {more} more, see the report")
        passed = sum(step.outcome == "passed" for step in report.steps)
        for text in report.left_out:
            self._say(f"left out: {text}", "yellow")
        simulated = ", SIMULATED" if report.simulated else ""
        chosen = f"; a whole acceptance has {STEPS_IN_ALL}" if len(report.steps) < STEPS_IN_ALL else ""
        self._say(
            f"{report.verdict}{simulated}: {passed} of {len(report.steps)} steps passed{chosen}",
            "bold green" if report.ok else "bold red",
        )
        self._say(f"written: {', '.join(map(str, written))}")

    def _say(self, text: str, style: str = "") -> None:
        self._console.print(text, style=style, soft_wrap=True)


def failure_line(check: StepCheck) -> str:
    """Describes a failed check in one line."""
    note = f" ({check.note})" if check.note else ""
    return f"{check.name}: found {check.found}; expected {check.expected}{note}"
