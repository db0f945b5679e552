"""One timer for all waits of a task, one after the other."""

from __future__ import annotations

import asyncio


class IdleTimer:
    """Cancels a task's wait that takes too long.

    `asyncio.wait_for` costs a task for each wait up to Python 3.11, and a timer in all versions, and a stream
    has thousands of waits. Here a wait only notes when it will be too long, and a single timer checks that
    when it fires.

        timer.start(timeout_s)
        try:
            await something
        except asyncio.CancelledError:
            if timer.is_cause():
                ...  # it took too long
            raise
        finally:
            timer.stop()

    Concurrency: used by the task that creates it, for one wait at a time.
    """

    def __init__(self) -> None:
        """Creates the timer of the current task; no wait has begun.

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
        """Begins a wait, which may take this long."""
        self._begun = begun = self._loop.time()
        self._late_at = late_at = begun + timeout_s
        if self._alarm is None:
            self._alarm = self._loop.call_at(late_at, self._look)
        elif self._alarm.when() > late_at:
            self._alarm.cancel()
            self._alarm = self._loop.call_at(late_at, self._look)

    def stop(self) -> float:
        """Ends the wait and returns its seconds; the alarm stays set, because the next wait will need it."""
        self._late_at = None
        return self._loop.time() - self._begun

    @property
    def waiting_s(self) -> float:
        """Seconds of the current wait so far; 0 if there is none."""
        return 0.0 if self._late_at is None else self._loop.time() - self._begun

    def ring(self) -> None:
        """Ends the current wait as too long, whatever its limit."""
        self._has_rung = True
        self._task.cancel()

    def close(self) -> None:
        """Cancels the alarm; no wait may follow."""
        if self._alarm is not None:
            self._alarm.cancel()

    def is_cause(self) -> bool:
        """Whether the timer, and nobody else, cancelled the wait; to be asked once per cancellation."""
        has_rung, self._has_rung = self._has_rung, False
        # From Python 3.11 on, a task counts its cancellations, and ours must be taken back.
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
