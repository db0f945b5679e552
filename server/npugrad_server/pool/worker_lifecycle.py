"""The life cycle of a worker: started, watched while it starts, ended, restarted.

What a loss counts against
    - A process that cannot even be started is the host's problem (descriptors, memory, processes), and counts
      against no device.
    - A death under calls counts against those calls, whatever becomes of them. It also counts against the
      device once another device has completed a call that ran alone there. Until then a death that is the
      fault of a single call (`WorkerState.culprit`) does not even lengthen the wait for the next process.
    - Anything else counts against the device: a start that fails, the death of an idle process.

What follows
    - After more than `max_respawns` consecutive losses that count, or as many consecutive failed spawns, a
      device is down: calls do not wait for it until it has opened again.
    - A device that is down is retried indefinitely, unless it is damaged (`RestartPolicy.NEVER`).
    - The waits between tries grow. They never exceed `respawn_backoff_max_s` after a failed spawn, after the
      death of an idle process, and while nothing counts against the device: the cause may be gone at any
      moment. Otherwise they grow up to `SLOWEST_S`: by a tenth each time if the device only failed, by
      doubling if it asked for time or something has to be fixed.
    - A start that makes no progress, or takes too long in all, is ended. The next one gets twice the time, up
      to `2 ** MAX_TIME_DOUBLINGS` times the first; if that is not enough either, the device is down.
    - At most `STARTS_AT_ONCE` heavy starts begin within `TURN_S`, unless earlier ones are over: vendor
      libraries take minutes of processor time, which all starts would share.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from npugrad_server.backends.base import RestartPolicy
from npugrad_server.pool.circuit_breaker import Death
from npugrad_server.pool.commands import DeviceChanged, KillWorker, SpawnWorker
from npugrad_server.pool.regions import RegionAllocator
from npugrad_server.pool.types import START_LIMIT_FACTOR, DeviceState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from npugrad_server.pool.commands import Command
    from npugrad_server.pool.state import CallState, WorkerState
    from npugrad_server.pool.types import PoolSettings

SLOWEST_S = 60.0
"""Longest wait before a device is tried again, unless `respawn_backoff_max_s` is longer."""
MAX_TIME_DOUBLINGS = 2
"""How often the time for a start is doubled after one that took too long."""
TRIAL_ROUNDS = 3
"""How often the canaries of a quarantined device must be right before it takes calls again."""
STARTS_AT_ONCE, TURN_S = 2, 30.0
_GROWTH = 1.1
_FIRST_STAGE = "starting its process"


class WorkerLifecycle:
    """Changes the states of workers; part of the scheduler, which knows their calls.

    Attributes:
        all_down: Whether no device is ready or about to be.
    """

    def __init__(
        self, settings: PoolSettings, workers: Sequence[WorkerState], on_change: Callable[[], None]
    ) -> None:
        """Starts nothing yet.

        Args:
            settings: Times and limits.
            workers: The devices.
            on_change: Called whenever one of them changes its state.
        """
        self._settings, self._workers, self._on_change = settings, workers, on_change
        self.all_down = not workers

    @property
    def why_down(self) -> str:
        """The reasons of all devices."""
        return "; ".join(Counter(worker.reason for worker in self._workers)) or "no devices"

    # ------------------------------------------------------------------------------------------------- starts

    def begin(self, worker: WorkerState, now: float, out: list[Command]) -> None:
        """Starts the next process of a device, or makes it wait for its turn."""
        worker.alarm = self._turn_s(worker, now)
        if worker.alarm is None:
            self._spawn(worker, now, out)
        elif not worker.waits:
            worker.waits = True
            if not worker.is_out:
                self._change(worker, DeviceState.STARTING, "waiting for other devices to start", out)

    def take_turns(self, now: float, out: list[Command]) -> None:
        """A start is over: begins those that waited for it, devices that are down last."""
        waiting = [worker for worker in self._workers if worker.waits]
        for worker in sorted(waiting, key=lambda worker: worker.is_out):
            self.begin(worker, now, out)

    def _turn_s(self, worker: WorkerState, now: float) -> float | None:
        """When a heavy start may begin; None for at once."""
        if not worker.spec.heavy:
            return None
        starting = [w for w in self._workers if w.spec.heavy and w.alive and not (w.opened or w.ending)]
        turns = sorted(w.spawned_s + TURN_S for w in starting if w.spawned_s + TURN_S > now)
        return turns[-STARTS_AT_ONCE] if len(turns) >= STARTS_AT_ONCE else None

    def _spawn(self, worker: WorkerState, now: float, out: list[Command]) -> None:
        reason = _FIRST_STAGE if worker.waits else worker.reason
        worker.waits = False
        worker.incarnation += 1
        worker.alive, worker.ending, worker.opened, worker.start_timed_out = True, False, False, False
        worker.exempt, worker.ended_for, worker.ended_by, worker.failure = False, "", None, None
        worker.death = Death.DIED
        worker.outputs = RegionAllocator(worker.spec.output_bytes)
        worker.spawned_s, worker.stage = now, _FIRST_STAGE
        worker.alarm = now + self._stage_limit_s(worker)
        rounds = TRIAL_ROUNDS if worker.state is DeviceState.QUARANTINED else 1
        out.append(SpawnWorker(worker.index, worker.incarnation, rounds))
        if not worker.is_out:
            self._change(worker, DeviceState.STARTING, reason, out)

    def progress(self, worker: WorkerState, stage: str, now: float, out: list[Command]) -> None:
        """A process has reached the next stage of its start, which gets as much time as any other."""
        if worker.opened or worker.ending or worker.failure is not None:
            return
        limit_s = self._stage_limit_s(worker)
        worker.stage = stage
        worker.alarm = min(now + limit_s, worker.spawned_s + START_LIMIT_FACTOR * limit_s)
        if worker.state is DeviceState.STARTING:
            self._change(worker, DeviceState.STARTING, stage, out)

    def opened(self, worker: WorkerState, out: list[Command]) -> None:
        """A process has opened its device."""
        worker.opened, worker.alarm, worker.failed_spawns, worker.ended_s = True, None, 0, None
        self._change(worker, DeviceState.READY, "", out)

    def _stage_limit_s(self, worker: WorkerState) -> float:
        return self._settings.worker_start_timeout_s * (1 << min(worker.timeouts, MAX_TIME_DOUBLINGS))

    def overdue(self, worker: WorkerState, now: float, out: list[Command]) -> None:
        """The alarm of a worker is due: its start takes too long, or it is to be started again."""
        if not worker.alive:
            self.begin(worker, now, out)
            return
        limit_s = self._stage_limit_s(worker)
        if now < worker.spawned_s + START_LIMIT_FACTOR * limit_s:
            reason = f"the device did not open: {limit_s:g} s without progress while {worker.stage}"
        else:
            reason = f"the device did not open within {START_LIMIT_FACTOR * limit_s:g} s: {worker.stage}"
        worker.start_timed_out, worker.timeouts = True, worker.timeouts + 1
        self.kill(worker, reason, out, exempt=False)

    # ---------------------------------------------------------------------------------------------- the ends

    def kill(
        self,
        worker: WorkerState,
        reason: str,
        out: list[Command],
        *,
        exempt: bool,
        death: Death = Death.DIED,
    ) -> None:
        """Ends the process of a device, unless it is being ended already."""
        if not worker.alive or worker.ending:
            return
        worker.death = death
        worker.alarm, worker.ending, worker.exempt, worker.ended_for = None, True, exempt, reason
        out.append(KillWorker(worker.index, worker.incarnation, reason))
        if not worker.is_out:
            self._change(worker, DeviceState.RESTARTING, reason, out)

    def quarantine(self, worker: WorkerState, reason: str, out: list[Command], *, lasts: bool = True) -> None:
        """Takes a device that has computed wrongly out of use, and ends its process, if there is one.

        Args:
            worker: The device.
            reason: What it computed, and the figures.
            out: Gets the commands.
            lasts: Whether this quarantine counts; the second one that does is final.
        """
        trust = worker.trust
        trust.quarantines += lasts
        trust.final, trust.reason = trust.quarantines > 1, f"it computes wrong results: {reason}"
        trust.running, trust.alarm, trust.suspected = None, None, False
        self._change(worker, DeviceState.QUARANTINED, trust.reason, out)
        self.kill(worker, trust.reason, out, exempt=True)

    def count_loss(self, worker: WorkerState, *, host: bool, blamed: bool) -> None:
        """Counts the loss of a process whose calls are still on it.

        Args:
            worker: Its device.
            host: Whether it could not even be started.
            blamed: Whether one call caused it.
        """
        if worker.exempt:
            return
        if host:
            worker.failed_spawns += 1
            return
        worker.failed_spawns = 0
        if blamed:
            return
        worker.losses += 1
        if not worker.running:
            worker.failures += 1

    def count_success(self, worker: WorkerState, call: CallState) -> None:
        """Counts a call that a device has completed: so it is not the call that killed workers elsewhere."""
        for index, count in call.solo_losses.items():
            self._workers[index].failures += count
            self._workers[index].losses += count
        worker.failures, worker.losses, worker.exhausted = 0, 0, False

    def restart(self, worker: WorkerState, now: float, out: list[Command], *, idle: bool) -> None:
        """Plans the next process of a device that lost one.

        Args:
            worker: The device.
            now: Current time.
            out: Gets the commands.
            idle: Whether no call was running.
        """
        if worker.state is DeviceState.QUARANTINED:
            worker.damaged = worker.trust.final
            again_s = now + self._delay_s(worker, RestartPolicy.SOON, idle)
            worker.alarm = None if worker.damaged else again_s
            self._change(worker, DeviceState.QUARANTINED, worker.trust.reason, out)
            return
        restart_policy = RestartPolicy.SOON if worker.failure is None else worker.failure.restart_policy
        worker.damaged = restart_policy is RestartPolicy.NEVER
        worker.alarm = None if worker.damaged else now + self._delay_s(worker, restart_policy, idle)
        given_up = max(worker.failures, worker.failed_spawns) > self._settings.max_respawns
        too_late = worker.start_timed_out and worker.timeouts > MAX_TIME_DOUBLINGS
        down = given_up or too_late or restart_policy in (RestartPolicy.MENDED, RestartPolicy.NEVER)
        down = down or worker.state is DeviceState.DOWN
        self._change(worker, DeviceState.DOWN if down else DeviceState.RESTARTING, worker.reason, out)

    def _delay_s(self, worker: WorkerState, restart_policy: RestartPolicy, idle: bool) -> float:
        """Seconds until the next process of a device."""
        longest = self._settings.respawn_backoff_max_s
        slowest = max(longest, SLOWEST_S)
        if restart_policy in (RestartPolicy.SLOWLY, RestartPolicy.MENDED):
            return min(longest * _power(2, worker.failures - 1), slowest)
        losses = worker.failed_spawns or worker.losses
        quick = min(self._settings.respawn_backoff_s * _power(2, losses - 1), longest)
        beyond = worker.failures - self._settings.max_respawns
        if worker.failed_spawns or beyond <= 0 or (worker.opened and idle):
            return quick
        return min(longest * _power(_GROWTH, beyond), slowest)

    def _change(self, worker: WorkerState, state: DeviceState, reason: str, out: list[Command]) -> None:
        """Sets a device's state and reports it, after its other changes were made."""
        worker.state, worker.reason = state, reason
        self.all_down = all(each.is_out for each in self._workers)
        self._on_change()
        out.append(DeviceChanged(worker.index))


def _power(base: float, exponent: int) -> float:
    """A power that neither shrinks nor overflows."""
    return base ** min(max(exponent, 0), 100)
