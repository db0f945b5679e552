"""Signals that end a load test: the first ends it cleanly and writes everything, a second ends it at once."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ENDING = (signal.SIGINT, signal.SIGTERM)
"""Ctrl-C, and the signal of pipelines, service managers and Kubernetes."""


class TooEarly(BaseException):
    """An interrupt came before anything was measured."""


class Interrupts:
    """While entered, makes the first interrupt call `stop`, whatever runs at that time.

    Attributes:
        stop: Stops sending; None before sending starts, when the interrupt raises `TooEarly` instead.
    """

    def __init__(self) -> None:
        self.stop: Callable[[], None] | None = None
        self._has_come = False

    def _on_signal(self, number: int, frame: object) -> None:
        if self._has_come:
            raise KeyboardInterrupt
        self._has_come = True
        if self.stop is None:
            raise TooEarly
        self.stop()

    @contextmanager
    def entered(self) -> Iterator[Interrupts]:
        """Handles the signals in a block; does nothing outside the main thread, which alone gets them."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.signal(number, self._on_signal) for number in ENDING}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Makes SIGTERM act like Ctrl-C in a block of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def held_back() -> Iterator[None]:
    """Blocks interrupts until the block is over; processes started in it never get one."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
