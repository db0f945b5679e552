"""Keeps calls out of gRPC while a process forks.

gRPC's own handlers give up where another thread is inside it ("skipping fork() handlers"), and a child is
then born with half of its state: about one in a hundred crashes or hangs. A fork waits here for the calls
that are on their way, and holds new ones back until it is done.
"""

from __future__ import annotations

import os
import threading
import time

WAIT_S = 5.0
"""How long a fork waits for calls of other threads; as long as gRPC waits for threads of its own."""
SETTLE_S = 0.5
"""How long a fork waits after a channel was closed or collected.

gRPC takes it apart on threads of its own, says nowhere when it is done, and a child that is born meanwhile
can hang where it opens a channel (1.85.1: one in four; where the machine is busy, some even 0.1 s later).
"""


class ForkGate:
    """What calls go through, and a fork shuts: ``with gate: call()``.

    Thread safety: for any number of threads, and forks of several at once.
    """

    def __init__(self, wait_s: float = WAIT_S) -> None:
        """An open gate with nobody inside.

        Args:
            wait_s: How long `shut` waits at most, in seconds.
        """
        self._wait_s = wait_s
        self.reset()

    def reset(self) -> None:
        """In a child: the threads that were inside are not there, nor whoever held the lock."""
        self._lock = threading.Lock()  # taken as such where nothing waits: each call does twice
        self._changed = threading.Condition(self._lock)
        self._inside: list[int] = []
        self._forks = 0
        self._settled_at = 0.0

    def note_close(self) -> None:
        """A channel was closed, or is being collected, just now."""
        self._settled_at = time.monotonic() + SETTLE_S

    def shut(self) -> bool:
        """Before a fork: whether nobody else is inside any more."""
        me = threading.get_ident()
        with self._changed:
            self._forks += 1
            is_free = self._changed.wait_for(lambda: all(one == me for one in self._inside), self._wait_s)
        time.sleep(max(0.0, self._settled_at - time.monotonic()))
        return is_free

    def open(self) -> None:
        """In the parent, after the fork."""
        with self._changed:
            self._forks -= 1
            self._changed.notify_all()

    def __enter__(self) -> None:
        with self._lock:
            while self._forks:
                self._changed.wait()
            self._inside.append(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside.remove(threading.get_ident())
            if self._forks:
                self._changed.notify_all()


GATE = ForkGate()
"""The one of this process."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=GATE.shut, after_in_parent=GATE.open, after_in_child=GATE.reset)
