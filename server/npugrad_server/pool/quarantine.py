"""Detects devices that compute wrongly: periodic canaries, mismatches, quarantine. Part of the scheduler.

Guarantees
    - A device is ready only after its process has compared the canaries and found them right; those that a
      backend defers come with the first round.
    - From then on it runs each canary once per interval: while it is idle, or alongside its calls if it has
      not been idle for another interval.
    - After a canary mismatch it takes no calls until that canary is right. Two mismatches within
      `MISMATCH_WINDOW_S`, of canaries or of calls that the CPU path computes rightly, quarantine it: its
      process is ended, its later answers are ignored, and its calls go elsewhere.
    - A quarantined device gets one more process, which must find every canary right
      `worker_lifecycle.TRIAL_ROUNDS` times. A mismatch there, or a second quarantine, is final: the device
      stays out until the server is restarted.
    - A quarantine for mismatches in calls alone is never final: calls may be beyond what a device can do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npugrad_server.backends.canary import LIMIT_S, CanaryResult
from npugrad_server.pool.circuit_breaker import Death
from npugrad_server.pool.commands import DeviceMismatch, StartCanary
from npugrad_server.pool.types import DeviceState

if TYPE_CHECKING:
    from npugrad_server.pool.commands import Command
    from npugrad_server.pool.state import WorkerState
    from npugrad_server.pool.types import PoolSettings
    from npugrad_server.pool.worker_lifecycle import WorkerLifecycle
    from npugrad_server.worker.canary_messages import CanaryRun

MISMATCH_WINDOW_S = 600.0
"""Seconds within which a second mismatch quarantines a device."""
MOST_MISMATCHES = 2
_LOOKS = 8
"""How often per interval a busy device is checked again."""


class Quarantine:
    """Runs the devices' canaries, and takes devices that compute wrongly out of use."""

    def __init__(self, settings: PoolSettings, lifecycle: WorkerLifecycle) -> None:
        """Trusts every device that opens.

        Args:
            settings: The interval, and how long calls may run.
            lifecycle: Ends processes.
        """
        self._interval_s = settings.canary_interval_s
        # A canary may queue behind a call on its stream, whose own limit ends the worker first.
        self._limit_s = settings.run_limit_s + settings.hang_grace_s + LIMIT_S
        self._lifecycle = lifecycle

    def opened(self, worker: WorkerState, canaries: int, now: float) -> None:
        """A process has opened its device and found this many canaries right."""
        trust = worker.trust
        trust.canaries, trust.running, trust.suspected = canaries, None, False
        trust.canary_was_wrong = False
        trust.mismatches.clear()
        self._plan(worker, now)

    def _plan(self, worker: WorkerState, now: float) -> None:
        """Sets when the next round is due."""
        has_any = self._interval_s and worker.trust.canaries
        worker.trust.due_s = worker.trust.alarm = now + self._interval_s if has_any else None

    def overdue(self, worker: WorkerState, now: float, out: list[Command]) -> None:
        """A round is due, or a canary takes too long."""
        trust = worker.trust
        if worker.state is not DeviceState.READY or trust.due_s is None:
            trust.alarm = None
        elif trust.running is not None:
            trust.alarm = None
            why = f"a canary ran for more than {self._limit_s:g} s"
            self._lifecycle.kill(worker, why, out, exempt=False, death=Death.TIMED_OUT)
        elif worker.running and now < trust.due_s + self._interval_s:
            trust.alarm = now + self._interval_s / _LOOKS
        else:
            self._begin(worker, now, out)

    def _begin(self, worker: WorkerState, now: float, out: list[Command]) -> None:
        worker.trust.left = worker.trust.canaries
        self._send(worker, 0, now, out)

    def _send(self, worker: WorkerState, number: int, now: float, out: list[Command]) -> None:
        trust = worker.trust
        trust.running, trust.due_s, trust.alarm = number, now, now + self._limit_s
        out.append(StartCanary(worker.index, worker.incarnation, number))

    def answered(self, worker: WorkerState, answer: CanaryRun, now: float, out: list[Command]) -> None:
        """A process has run a canary."""
        trust = worker.trust
        if worker.state is not DeviceState.READY or trust.running != answer.number:
            return
        if answer.result == CanaryResult.MISMATCH:
            trust.canary_was_wrong = True
            self._note(worker, answer.operator, answer.detail, now, out)
            if worker.state is DeviceState.READY:
                trust.suspected = True
                self._send(worker, answer.number, now, out)
            return
        trust.left -= 1
        if trust.left > 0:
            trust.suspected = False
            self._send(worker, (answer.number + 1) % trust.canaries, now, out)
        else:
            trust.running, trust.suspected = None, False
            self._plan(worker, now)

    def computed(
        self,
        worker: WorkerState,
        incarnation: int,
        operator: str,
        detail: str,
        now: float,
        out: list[Command],
    ) -> None:
        """A call has shown that a device computes wrongly.

        Args:
            worker: The device.
            incarnation: The process that ran the call.
            operator: Operator of the call.
            detail: The figures.
            now: Current time.
            out: Gets the commands.
        """
        is_current = worker.is_current(incarnation) and worker.state is DeviceState.READY
        if is_current and worker.trust.canaries:
            self._note(worker, operator, detail, now, out)
        else:  # another process, or not expected to compute
            out.append(DeviceMismatch(worker.index, operator, detail))

    def _note(self, worker: WorkerState, operator: str, detail: str, now: float, out: list[Command]) -> None:
        """Records a mismatch, and quarantines a device that had too many."""
        trust = worker.trust
        out.append(DeviceMismatch(worker.index, operator, detail))
        trust.mismatches = [at for at in trust.mismatches if at > now - MISMATCH_WINDOW_S] + [now]
        if len(trust.mismatches) >= MOST_MISMATCHES:
            self._lifecycle.quarantine(worker, f"{operator}: {detail}", out, lasts=trust.canary_was_wrong)

    def failed_start(self, worker: WorkerState, out: list[Command]) -> None:
        """A process has found a canary wrong twice in a row before its device was ready, and has ended."""
        failure = worker.failure
        if failure is None or not failure.wrong:
            return
        detail = failure.reason.removeprefix(f"{failure.wrong}: ")
        out.append(DeviceMismatch(worker.index, failure.wrong, detail))
        if worker.state is DeviceState.QUARANTINED:
            worker.trust.final = True
        else:
            self._lifecycle.quarantine(worker, failure.reason, out)
