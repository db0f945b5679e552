"""What ends a step from outside: a signal, or its time. Either becomes an exception of the main thread.

A step waits for workers, also in `finally`. So before the exception is raised the worker is killed, which
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
"""Seconds after which a step that goes on waiting, while it ends, is disturbed once more."""
_OVER = signal.SIGUSR1
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


class StepTimeout(BaseException):
    """A step took longer than it may; no step may take it for an error of its own."""


class Limits:
    """A context of the main thread, in which signals interrupt as Ctrl-C does and steps have an end.

    Attributes:
        step_s: Seconds that a step may take.
        until_s: `time.monotonic()` at which every step ends; None for never.
        abandon: Called first when a step is to end; must not wait.
    """

    def __init__(self, step_s: float, until_s: float | None = None) -> None:
        """Changes nothing yet."""
        self.step_s, self.until_s = step_s, until_s
        self.abandon: Callable[[], None] = lambda: None
        self._before: dict[int, Any] = {}
        self._limit_s = 0.0
        self._running = self._between = self._deaf = False
        self._waiting: KeyboardInterrupt | None = None

    def left_s(self) -> float:
        """Seconds that a step which begins now may take."""
        if self.until_s is None:
            return self.step_s
        return min(self.step_s, self.until_s - time.monotonic())

    @property
    def over(self) -> bool:
        """Whether the time of all steps together is over."""
        return self.until_s is not None and time.monotonic() >= self.until_s

    @contextmanager
    def step(self, more_s: float = 0.0) -> Iterator[None]:
        """A step; `more_s` is added to the seconds it may take.

        After `begin` an interrupt that comes between two steps is raised in the next one: what is done there,
        such as writing a report, must not be cut.

        Raises:
            StepTimeout: The seconds are over.
            KeyboardInterrupt: A signal came.
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
        """Steps follow: an interrupt waits for the first."""
        self._between = True

    def ignore(self) -> None:
        """From now on signals are ignored: what is left takes a moment, and must not be cut."""
        self._deaf = True

    def __enter__(self) -> Limits:
        """Takes the signals."""
        for number in (*_INTERRUPTS, _OVER):
            self._before[number] = signal.signal(number, self._signalled)
        return self

    def __exit__(self, *_: object) -> None:
        """Gives the signals back."""
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
