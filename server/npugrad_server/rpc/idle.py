"""One timer for all that a task waits for, one thing after the other."""

from __future__ import annotations

import asyncio


class IdleTimer:
    """Cancels what a task waits for once that takes too long.

    `asyncio.wait_for` costs a task for each wait up to Python 3.11, and a timer in all versions: a stream has
    thousands. Here a wait notes when it is too long, and the one timer looks at that when it is due.

        timer.start(timeout_s)
        try:
            await something
        except asyncio.CancelledError:
            if timer.is_cause():
                ...  # it took too long
            raise
        finally:
            timer.stop()

    Concurrency: used by the task that makes it, for one wait at a time.
    """

    def __init__(self) -> None:
        """A timer of the current task; nothing is waited for yet.

        Raises:
            RuntimeError: There is no current task.
        """
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("found no task; expected one to cancel")
        self._task, self._loop = task, asyncio.get_running_loop()
        self._alarm: asyncio.TimerHandle | None = None
        self._late_at: float | None = None
        self._begun = 0.0
        self._has_rung = False

    def start(self, timeout_s: float) -> None:
        """A wait begins, which may take this long."""
        self._begun = begun = self._loop.time()
        self._late_at = late_at = begun + timeout_s
        if self._alarm is None:
            self._alarm = self._loop.call_at(late_at, self._look)
        elif self._alarm.when() > late_at:
            self._alarm.cancel()
            self._alarm = self._loop.call_at(late_at, self._look)

    def stop(self) -> float:
        """The wait is over, after so many seconds; the alarm stays set, as the next wait will need it."""
        self._late_at = None
        return self._loop.time() - self._begun

    @property
    def waiting_s(self) -> float:
        """Seconds of the present wait; 0 where there is none."""
        return 0.0 if self._late_at is None else self._loop.time() - self._begun

    def ring(self) -> None:
        """The present wait has taken too long, whatever it was given."""
        self._has_rung = True
        self._task.cancel()

    def close(self) -> None:
        """Nothing will be waited for any more."""
        if self._alarm is not None:
            self._alarm.cancel()

    def is_cause(self) -> bool:
        """Asked once when the wait was cancelled: whether the timer did so, and nobody else as well."""
        has_rung, self._has_rung = self._has_rung, False
        # From Python 3.11 on a task counts who cancelled it, and ours is to be taken back.
        uncancel = getattr(self._task, "uncancel", None)
        others = uncancel() if has_rung and uncancel is not None else 0
        return has_rung and not others

    def _look(self) -> None:
        self._alarm = None
        if self._late_at is None:
            return
        if self._loop.time() < self._late_at:
            self._alarm = self._loop.call_at(self._late_at, self._look)
            return
        self.ring()
