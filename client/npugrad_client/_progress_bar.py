"""Progress bars on standard error: one line per call in flight, removed when it ends."""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, TextColumn
from rich.progress import Progress as Lines
from rich.table import Column
from rich.text import Text

from npugrad_client._attempt import bytes_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.progress import Task, TaskID

    from npugrad_client._progress import Progress

_WAITING = "waiting for the result"
_FIGURES_WIDTH = 64
"""Terminal columns reserved for the rest of the line after the title."""


class _Figures(ProgressColumn):
    """Bytes, rate and time left; elapsed time while no bytes are transferred."""

    max_refresh = None

    def render(self, task: Task) -> Text:
        if not task.started:
            return Text(_clock(time.monotonic() - task.fields["since_s"]))
        text = f"{bytes_text(int(task.completed))} of {bytes_text(int(task.total or 0))}"
        if task.speed:
            text += f", {task.speed / 2**20:.1f} MiB/s"
        if task.time_remaining is not None:
            text += f", {_clock(task.time_remaining)} left"
        return Text(text)


def _shortened(title: str, width: int) -> str:
    width = max(width, 16)
    return title if len(title) <= width else f"{title[: width - 1]}…"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}"


class _Screen:
    """The lines of all calls in flight: a terminal has room for only one live display."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._lines: Lines | None = None

    @contextmanager
    def line(self, title: str, console: Console) -> Iterator[tuple[Lines, TaskID]]:
        with self._lock:
            if self._lines is None:
                lines = _lines(console)
                lines.start()
                self._lines = lines
            lines = self._lines
            self._count += 1
            task = lines.add_task(
                _shortened(title, console.width - _FIGURES_WIDTH),
                start=False,
                at="sending",
                since_s=time.monotonic(),
            )
        try:
            yield lines, task
        finally:
            with self._lock:
                lines.remove_task(task)
                self._count -= 1
                if self._count == 0:
                    lines.stop()
                    self._lines = None  # the next call checks standard error anew


_SCREENS: dict[int, _Screen] = {}
"""By process, because a fork may leave the lock of its parent's screen held."""


def _lines(console: Console) -> Lines:
    return Lines(
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[at]}", markup=False, table_column=Column(no_wrap=True)),
        BarColumn(bar_width=20),  # shrinks on a narrow terminal
        _Figures(table_column=Column(no_wrap=True)),
        console=console,
        transient=True,
        redirect_stdout=False,  # the caller's own output there stays untouched
        redirect_stderr=False,
    )


def _can_move(console: Console) -> bool:
    """Whether the console can redraw lines."""
    if console.is_jupyter:
        return find_spec("ipywidgets") is not None  # without it, rich warns instead
    return console.is_terminal and not console.is_dumb_terminal


@contextmanager
def bar(title: str) -> Iterator[Callable[[Progress], None] | None]:
    """Shows the progress of a call in a block; yields the callable to report to.

    Yields None if standard error is neither a terminal nor a notebook, to keep logs free of progress.
    """
    console = Console(stderr=True)
    if not _can_move(console):
        yield None
        return
    with _SCREENS.setdefault(os.getpid(), _Screen()).line(title, console) as (lines, task):
        shown: tuple[int, str] | None = None

        def tell(progress: Progress) -> None:
            nonlocal shown
            if progress.stage == "done":
                return  # the line is about to be removed
            if shown != (progress.try_number, progress.stage):
                shown = progress.try_number, progress.stage
                lines.reset(task, start=False, at=_at(progress), since_s=time.monotonic())
            done, total = _bytes(progress)
            if total:
                lines.start_task(task)
                lines.update(task, completed=done, total=total)

        yield tell


def _at(progress: Progress) -> str:
    stage = _WAITING if progress.stage == "waiting" else progress.stage
    return stage if progress.try_number == 1 else f"try {progress.try_number}: {stage}"


def _bytes(progress: Progress) -> tuple[int, int]:
    """Bytes transferred in this stage, and their total."""
    if progress.stage == "sending":
        return progress.sent_bytes, progress.bytes_to_send
    if progress.stage == "waiting":
        return 0, 0
    return progress.received_bytes, progress.bytes_to_receive
