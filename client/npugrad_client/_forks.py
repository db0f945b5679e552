"""Keeps calls out of gRPC while a process forks.

gRPC's own handlers give up if another thread is inside gRPC ("skipping fork() handlers"). The child then
starts with inconsistent state, and about one in a hundred crashes or hangs. Therefore a fork waits here for
calls in flight, and holds new ones back until it is done.
"""

from __future__ import annotations

import os
import threading
import time

WAIT_S = 5.0
"""How long a fork waits for calls of other threads; as long as gRPC waits for its own threads."""
SETTLE_S = 0.5
"""How long a fork waits after a channel was closed or collected.

gRPC takes it apart on its own threads and does not report when it is done; a child forked meanwhile can hang
when it opens a channel (1.85.1: one in four; on a busy machine, some even 0.1 s later).
"""


class ForkGate:
    """A gate that calls go through and a fork shuts: ``with gate: call()``.

    Thread safety: any number of threads may use it, and several may fork at once.
    """

    def __init__(self, wait_s: float = WAIT_S) -> None:
        """Creates an open gate with no thread inside.

        Args:
            wait_s: Maximum time that `shut` waits, in seconds.
        """
        self._wait_s = wait_s
        self.reset()

    def reset(self) -> None:
        """Resets the gate in a child, which lacks the threads that were inside or held the lock."""
        self._lock = threading.Lock()  # taken directly where nothing waits, as each call does so twice
        self._changed = threading.Condition(self._lock)
        self._inside: list[int] = []
        self._forks = 0
        self._settled_at = 0.0

    def note_close(self) -> None:
        """Records that a channel was just closed or is being collected."""
        self._settled_at = time.monotonic() + SETTLE_S

    def shut(self) -> bool:
        """Shuts the gate before a fork; returns whether no other thread is inside any more."""
        me = threading.get_ident()
        with self._changed:
            self._forks += 1
            is_free = self._changed.wait_for(lambda: all(one == me for one in self._inside), self._wait_s)
        time.sleep(max(0.0, self._settled_at - time.monotonic()))
        return is_free

    def open(self) -> None:
        """Opens the gate in the parent, after the fork."""
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
"""The gate of this process."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=GATE.shut, after_in_parent=GATE.open, after_in_child=GATE.reset)
