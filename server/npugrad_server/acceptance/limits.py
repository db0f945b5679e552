"""Ends a step from outside, by a signal or a time limit: either raises an exception in the main thread.

Steps wait for workers, even in `finally`. So the worker is killed before the exception is raised, which
answers every call that is still waited for.
"""

from __future__ import annotations

import signal
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_AGAIN_S = 90.0
"""Seconds after which a step that is still waiting while it ends is interrupted again."""
_OVER = signal.SIGUSR1
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


class StepTimeout(BaseException):
    """A step exceeded its time limit; a `BaseException`, so that no step catches it as its own error."""


class Limits:
    """A context for the main thread in which signals interrupt as Ctrl-C does and steps have a time limit.

    Attributes:
        step_s: Seconds that a step may take.
        until_s: `time.monotonic()` by which all steps must end; None for no limit.
        abandon: Called before a step is interrupted; must not block.
    """

    def __init__(self, step_s: float, until_s: float | None = None) -> None:
        """Installs no signal handlers yet."""
        self.step_s, self.until_s = step_s, until_s
        self.abandon: Callable[[], None] = lambda: None
        self._before: dict[int, Any] = {}
        self._limit_s = 0.0
        self._running = self._between = self._deaf = False
        self._waiting: KeyboardInterrupt | None = None

    def left_s(self) -> float:
        """Returns the seconds that a step starting now may take."""
        if self.until_s is None:
            return self.step_s
        return min(self.step_s, self.until_s - time.monotonic())

    @property
    def over(self) -> bool:
        """Whether the time for all steps together is up."""
        return self.until_s is not None and time.monotonic() >= self.until_s

    @contextmanager
    def step(self, more_s: float = 0.0) -> Iterator[None]:
        """Runs a step in a block; `more_s` is added to the seconds it may take.

        After `begin`, an interrupt between two steps is raised in the next one, because work done there, such
        as writing a report, must not be interrupted.

        Raises:
            StepTimeout: The time is up.
            KeyboardInterrupt: A signal arrived.
        """
        self._limit_s = max(0.0, self.left_s()) + more_s
        done = threading.Event()
        watch = threading.Thread(target=self._watch, args=(done,), name="step-limit", daemon=True)
        watch.start()
        try:
            self._running = True
            if self._waiting is not None:
                raise self._waiting
            yield
        finally:
            self._running = False
            done.set()
            watch.join()

    def _watch(self, done: threading.Event) -> None:
        main = threading.main_thread().ident
        wait_s = self._limit_s
        while main is not None and not done.wait(wait_s):
            signal.pthread_kill(main, _OVER)
            wait_s = _AGAIN_S

    def begin(self) -> None:
        """Marks that steps follow: an interrupt before or between them waits for the next one."""
        self._between = True

    def ignore(self) -> None:
        """Ignores signals from now on: the remaining work is short and must not be interrupted."""
        self._deaf = True

    def __enter__(self) -> Limits:
        """Installs the signal handlers."""
        for number in (*_INTERRUPTS, _OVER):
            self._before[number] = signal.signal(number, self._signalled)
        return self

    def __exit__(self, *_: object) -> None:
        """Restores the previous signal handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _signalled(self, number: int, frame: object) -> None:
        if self._deaf or (number == _OVER and not self._running):
            return
        interrupt = KeyboardInterrupt(f"interrupted by {signal.Signals(number).name}")
        if self._between and not self._running:
            self._waiting = interrupt
            return
        self.abandon()
        if number == _OVER:
            raise StepTimeout(f"took longer than {self._limit_s:.0f} s")
        raise interrupt
