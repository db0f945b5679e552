"""How a call lives: queued, started, tried again, ended; orphaned when nobody waits for it any more.

The counterpart for workers is `worker_lifecycle`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npugrad_server.pool.circuit_breaker import CircuitBreaker
from npugrad_server.pool.commands import (
    CircuitChanged,
    FailCall,
    RedirectCall,
    ReleaseCall,
    RequeueCall,
    StartCall,
    TellWorker,
)
from npugrad_server.pool.fair_queue import FairQueue
from npugrad_server.pool.queues import AlarmQueue
from npugrad_server.pool.state import CallStage, CallState, WorkerState
from npugrad_server.worker.protocol import AbandonCall

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npugrad_server.pool.commands import Command
    from npugrad_server.pool.placement import Placement
    from npugrad_server.pool.types import PoolSettings
    from npugrad_server.pool.worker_lifecycle import WorkerLifecycle

TRIAL_GRACE_S = 1.0
"""Longest grace of the trial of a circuit breaker, so that a device which it hangs is soon back."""
SUSPECT_ATTEMPTS = 2
"""Tries of a call that end with a worker once a device failed under it: what it makes devices fail with, it
would do everywhere."""

EXHAUSTION_REASONS = frozenset({"DEVICE_OUT_OF_MEMORY", "DEVICE_BUSY"})
"""Rows of the error table that tell of this device at this moment, and of nothing else: its memory, or its
streams, events and tasks, ran out. The operators are pure, so that another device may well have the result.
Every other answer of a worker is about the call, and would be the same elsewhere."""


class CallLifecycle:
    """Changes the stages of calls; part of the scheduler, which decides where and when they start.

    Attributes:
        calls: All of them by number, until their memory is given back.
        queue: Those that wait for a worker.
        alarms: When their deadlines pass, or their workers are to be ended.
        circuits: Of calls that killed workers.
    """

    def __init__(
        self,
        settings: PoolSettings,
        workers: Sequence[WorkerState],
        placement: Placement,
        worker_lifecycle: WorkerLifecycle,
    ) -> None:
        """Starts with no call.

        Args:
            settings: Times and limits.
            workers: The devices.
            placement: What calls hold.
            worker_lifecycle: Ends the worker of a call that runs too long.
        """
        self._settings, self._workers = settings, workers
        self._placement, self._worker_lifecycle = placement, worker_lifecycle
        self.calls: dict[int, CallState] = {}
        self.queue: FairQueue[CallState] = FairQueue()
        self.alarms = AlarmQueue(self._is_live)
        self.circuits = CircuitBreaker(settings.circuit_deaths)

    def enter(self, call: CallState, now: float, out: list[Command]) -> bool:
        """Lets a call in, or fails it because its circuit is open; returns whether it did."""
        if not len(self.circuits) or (refusal := self.circuits.enter(call.circuit, call.id, now)) is None:
            return True
        self.fail(call, "CIRCUIT_OPEN", refusal.detail, now, out, retry_after_s=refusal.retry_after_s)
        return False

    def start(self, call: CallState, worker: WorkerState, now: float, out: list[Command]) -> None:
        """Hands a call that has its place to its worker."""
        self.queue.take(call, now)
        if call.queued_s is not None:
            self._placement.forecast.unqueued(call)
        call.stage, call.attempts = CallStage.RUNNING, call.attempts + 1
        # Later than a worker that can tell by itself, whose report has the vendor's number.
        call.kill_at = now + self._settings.run_limit_s + self._settings.hang_grace_s
        self.alarms.set(call.kill_at, call.id, len(self.calls))
        waited = max(0.0, now - call.submitted_s)
        out.append(
            StartCall(
                call.id,
                worker.index,
                worker.incarnation,
                call.attempts,
                waited,
                call.set_aside_bytes,
            )
        )

    # -------------------------------------------------------------------------------------------------- ends

    def orphan(self, call: CallState, now: float, out: list[Command]) -> None:
        """Nobody waits for the call any more."""
        if call.stage is CallStage.QUEUED:
            self._unqueue(call)
            self.settle(call, now, out)
        elif call.stage is CallStage.RUNNING and not call.orphaned:
            call.orphaned = True
            call.kill_at = min(call.kill_at, now + self._grace_s(call))
            self.alarms.set(call.kill_at, call.id, len(self.calls))
            worker = self._worker_of(call)
            out.append(TellWorker(worker.index, worker.incarnation, AbandonCall(call.id)))

    def _worker_of(self, call: CallState) -> WorkerState:
        return next(worker for worker in self._workers if call.id in worker.running)

    def give_up(self, call: CallState, reason: str, detail: str, now: float, out: list[Command]) -> None:
        """A call that waits gets an error."""
        self._unqueue(call)
        self.fail(call, reason, detail, now, out)

    def drop(self, call: CallState, now: float, out: list[Command]) -> None:
        """A call that waits gives its place or its memory to one of a tenant that has less of them."""
        self._unqueue(call)
        lane = call.priority, call.label
        turn = self._placement.forecast.predict(call.tenant, call.kind, call.work, now, lane, sent=False)
        found = f"tenant {call.tenant.name}: found it the furthest over its share"
        detail = f"{found} when another tenant's call found the queue or the memory full; expected its share"
        self.fail(call, "QUEUE_FULL", detail, now, out, retry_after_s=turn.retry_after_s)

    def _unqueue(self, call: CallState) -> None:
        self.queue.remove(call)
        self._placement.forecast.unqueued(call)
        self._placement.reservation.release(call)

    def fail(
        self,
        call: CallState,
        reason: str,
        detail: str,
        now: float,
        out: list[Command],
        *,
        code: int | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """A call that neither waits nor runs gets an error."""
        out.append(FailCall(call.id, reason, detail, code, retry_after_s))
        self.settle(call, now, out)

    def settle(self, call: CallState, now: float, out: list[Command]) -> None:
        """No worker touches the memory of a call any more."""
        call.stage = CallStage.SETTLED
        if call.faults:
            self._count_faults(call, now, out)
        if len(self.circuits):
            self.circuits.left(call.circuit, call.id)
        if call.closed:
            self.forget(call, out)

    def forget(self, call: CallState, out: list[Command]) -> None:
        """A settled call was closed: its memory goes back."""
        call.free_region()
        del self.calls[call.id]
        out.append(ReleaseCall(call.id))

    # ------------------------------------------------------------------------------------ whose fault it was

    def blame(self, call: CallState, now: float, out: list[Command], *, at_once: bool = False) -> None:
        """A worker died by the fault of a call, unless another one does that very call.

        So the first death counts once the call has ended without a result, or with its second one; at once
        where no other worker gets it.
        """
        call.blamed += 1
        call.faults.append(now)
        if at_once or call.orphaned or call.blamed > 1 or self.circuits.is_trial(call.circuit, call.id):
            self._count_faults(call, now, out)

    def clear(self, call: CallState, out: list[Command]) -> None:
        """A worker has done a call: it was not that call which killed others."""
        call.faults.clear()
        if len(self.circuits) and self.circuits.succeeded(call.circuit, call.id):
            out.append(CircuitChanged(call.id, 0))

    def _count_faults(self, call: CallState, now: float, out: list[Command]) -> None:
        faults, call.faults = call.faults, []
        if call.plan is None or not any([self.circuits.died(call.circuit, call.id, at) for at in faults]):
            return
        refusal = self.circuits.refusal(call.circuit, now)
        if refusal is None:
            return
        out.append(CircuitChanged(call.id, refusal.deaths))
        for other in list(self.queue):
            if (other.tenant.name, other.operator) == (call.tenant.name, call.operator) and (
                other.circuit == call.circuit and other.stage is CallStage.QUEUED
            ):
                self._unqueue(other)
                self.fail(
                    other, "CIRCUIT_OPEN", refusal.detail, now, out, retry_after_s=refusal.retry_after_s
                )

    def retry(self, worker: WorkerState, call: CallState, now: float, out: list[Command]) -> None:
        """The worker of a running call is gone: another try, or an error."""
        if call.orphaned:
            self.settle(call, now, out)
            return
        call.free_region()
        failure = worker.failure
        if failure is not None and failure.call == call.id and not failure.retry:
            self.fail(call, "DEADLINE_EXCEEDED", failure.reason, now, out, code=failure.code)
            return
        if self._may_retry(call, now):
            self.put_back(call)
            out.append(RequeueCall(call.id, worker.index))
            return
        tries = "each" if call.deaths == call.attempts else str(call.deaths)
        last = call.last_reason or worker.reason
        what = f"its worker died at {tries} of {call.attempts} tries; last: {last}"
        self.fail(call, "WORKER_LOST", what, now, out, code=call.last_code)

    def redirect(self, call: CallState, worker: WorkerState, reason: str, out: list[Command]) -> bool:
        """Puts a call back that its device could not take, if another one could; returns whether it did."""
        if reason not in EXHAUSTION_REASONS or call.too_large:
            return False
        worker.exhausted = True
        if not self._may_redirect(call):
            return False
        call.declined_by = (worker.index, worker.incarnation)
        if not self._placement.has_other(call):
            return False
        call.free_region()
        self.put_back(call)
        out.append(RedirectCall(call.id, worker.index, reason))
        return True

    def move(self, call: CallState, worker: WorkerState, now: float, out: list[Command]) -> None:
        """The device of a running call has computed wrongly: the call has not been tried."""
        if call.orphaned:
            self.settle(call, now, out)
            return
        call.free_region()
        call.attempts -= 1
        self.put_back(call)
        out.append(RedirectCall(call.id, worker.index, "QUARANTINED"))

    def put_back(self, call: CallState) -> None:
        """A call that ran waits again, in front of its lane."""
        call.stage = CallStage.QUEUED
        self.queue.push(call, front=True)
        self._placement.forecast.queued(call)

    def overdue(self, call: CallState, now: float, out: list[Command]) -> None:
        """An alarm of a call has come: its deadline, or the end of its grace."""
        deadline = call.deadline_s
        if call.stage is CallStage.RUNNING and call.kill_at <= now:
            self._end_for(call, now, out)
        elif call.orphaned or deadline is None or deadline > now:
            return
        elif call.stage is CallStage.QUEUED:
            self.give_up(call, "DEADLINE_EXCEEDED", "the deadline passed in the queue", now, out)
        elif call.stage is CallStage.RUNNING:
            out.append(FailCall(call.id, "DEADLINE_EXCEEDED", "the deadline passed while the call ran"))
            self.orphan(call, deadline, out)

    def _end_for(self, call: CallState, now: float, out: list[Command]) -> None:
        """Ends the worker of a call that runs too long."""
        grace = self._grace_s(call)
        if now > call.kill_at + grace:
            # Nobody looked for so long: the server stood still, and its workers may have as well.
            call.kill_at = now + grace
            self.alarms.set(call.kill_at, call.id, len(self.calls))
            return
        why = f"a call ran on for {grace:g} s after nobody waited for it"
        if not call.orphaned:
            why = f"a call ran for more than {self._settings.run_limit_s:g} s, the limit of the server"
            out.append(FailCall(call.id, "DEADLINE_EXCEEDED", why))
            call.orphaned = True
        # An impatient caller must not bring a slow device down: if the device really hangs, opening it
        # again fails, and that counts.
        worker = self._worker_of(call)
        if not worker.ending:
            worker.ended_by = call.id
        self._worker_lifecycle.kill(worker, why, out, exempt=True)

    def _grace_s(self, call: CallState) -> float:
        """Seconds that a call may run on when nobody waits for it; few for one whose like did not end."""
        grace = self._settings.hang_grace_s
        is_trial = len(self.circuits) and self.circuits.is_trial(call.circuit, call.id)
        return min(grace, TRIAL_GRACE_S) if is_trial else grace

    def _may_redirect(self, call: CallState) -> bool:
        """Whether a call that its device could not take may be tried on another one: once, and no suspect."""
        wanted = not call.orphaned and not call.suspect
        return wanted and call.declined_by is None and call.attempts < self._settings.max_attempts

    def _may_retry(self, call: CallState, now: float) -> bool:
        """Whether a call whose worker died under it may be tried again."""
        suspected = call.suspect and call.deaths >= SUSPECT_ATTEMPTS
        if len(self.circuits) and self.circuits.refusal(call.circuit, now) is not None:
            return False
        return call.attempts < self._settings.max_attempts and not suspected

    def _is_live(self, number: int) -> bool:
        call = self.calls.get(number)
        return call is not None and call.stage is not CallStage.SETTLED
