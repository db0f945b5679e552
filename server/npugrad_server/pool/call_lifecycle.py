"""Life cycle of a call: queued, started, tried again, ended; orphaned if nobody waits for it any more.

The counterpart for workers is `worker_lifecycle`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npugrad_server.pool.circuit_breaker import CircuitBreaker, Death
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
from npugrad_server.pool.quotas import ComparedMemory
from npugrad_server.pool.state import CallStage, CallState, WorkerState
from npugrad_server.worker.protocol import AbandonCall

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npugrad_server.pool.commands import Command
    from npugrad_server.pool.placement import Placement
    from npugrad_server.pool.types import PoolSettings
    from npugrad_server.pool.worker_lifecycle import WorkerLifecycle

TRIAL_GRACE_S = 1.0
"""Longest grace of a circuit breaker's trial, so that a device that it hangs is back soon."""
SUSPECT_ATTEMPTS = 2
"""Worker deaths after which a call under which a device failed is not tried again: it would make every device
fail."""

EXHAUSTION_REASONS = frozenset({"DEVICE_OUT_OF_MEMORY", "DEVICE_BUSY"})
"""Rows of the error table that concern only this device at this moment: its memory, or its streams, events
and tasks, ran out. Operators are pure, so another device may well complete the call. Any other error of a
worker concerns the call, and would be the same elsewhere."""


class CallLifecycle:
    """Changes the stages of calls; part of the scheduler, which decides where and when they start.

    Attributes:
        calls: All calls by number, until their memory is freed.
        queue: Calls that wait for a worker.
        alarms: When deadlines of calls pass, or their workers must be ended.
        circuits: Circuit breaker for calls that kill workers.
        compared: What calls keep until their results have been compared.
    """

    def __init__(
        self,
        settings: PoolSettings,
        workers: Sequence[WorkerState],
        placement: Placement,
        worker_lifecycle: WorkerLifecycle,
    ) -> None:
        """Starts with no calls.

        Args:
            settings: Times and limits.
            workers: The devices.
            placement: Counts what calls hold.
            worker_lifecycle: Ends the worker of a call that runs too long.
        """
        self._settings, self._workers = settings, workers
        self._placement, self._worker_lifecycle = placement, worker_lifecycle
        self.calls: dict[int, CallState] = {}
        self.queue: FairQueue[CallState] = FairQueue()
        self.alarms = AlarmQueue(self._is_live)
        self.circuits = CircuitBreaker(settings.circuit_deaths)
        self.compared = ComparedMemory()

    def enter(self, call: CallState, now: float, out: list[Command]) -> bool:
        """Lets a call in, or fails it if its circuit is open; returns whether it was let in."""
        if not len(self.circuits) or (refusal := self.circuits.enter(call.circuit, call.id, now)) is None:
            return True
        self.fail(call, "CIRCUIT_OPEN", refusal.detail, now, out, retry_after_s=refusal.retry_after_s)
        return False

    def start(self, call: CallState, worker: WorkerState, now: float, out: list[Command]) -> None:
        """Hands a placed call to its worker."""
        self.queue.take(call, now)
        if call.queued_s is not None:
            self._placement.forecast.unqueued(call)
        call.stage, call.attempts = CallStage.RUNNING, call.attempts + 1
        if call.compared_millionths:
            call.is_kept = True
            self.compared.take(call.tenant, call.compared_millionths)
        # Later than a worker's own limit, if it can enforce one: its report has the vendor's number.
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
        """Gives up a call that nobody waits for any more: settles a queued one, orphans a running one."""
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
        """Fails a queued call."""
        self._unqueue(call)
        self.fail(call, reason, detail, now, out)

    def drop(self, call: CallState, now: float, out: list[Command]) -> None:
        """Fails a queued call to give its place or memory to a call of a tenant that has less of them."""
        self._unqueue(call)
        lane = call.priority, call.label
        turn = self._placement.forecast.predict(call.tenant, call.kind, call.work, now, lane, sent=False)
        detail = (
            f"dropped from the queue: tenant {call.tenant.name} holds more than its share, and another "
            "tenant needs the place or the memory"
        )
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
        """Fails a call that is neither queued nor running."""
        out.append(FailCall(call.id, reason, detail, code, retry_after_s))
        self.settle(call, now, out)

    def settle(self, call: CallState, now: float, out: list[Command]) -> None:
        """Settles a call whose memory no worker touches any more."""
        call.stage = CallStage.SETTLED
        if call.faults:
            self._count_faults(call, now, out)
        if len(self.circuits):
            self.circuits.left(call.circuit, call.id)
        if call.closed:
            self.forget(call, out)

    def forget(self, call: CallState, out: list[Command]) -> None:
        """Forgets a settled call that was closed, and frees its memory."""
        call.free_region()
        self._keep_no_longer(call)
        del self.calls[call.id]
        out.append(ReleaseCall(call.id))

    def _keep_no_longer(self, call: CallState) -> None:
        if call.is_kept:
            call.is_kept = False
            self.compared.give_back(call.tenant, call.compared_millionths)

    # ------------------------------------------------------------------------------------- blame and retries

    def blame(
        self, call: CallState, death: Death, now: float, out: list[Command], *, at_once: bool = False
    ) -> None:
        """Blames a call for a worker's death, until another worker completes that very call.

        So the first death counts only once the call has ended without a result, or caused a second death. It
        counts at once if no other worker gets the call.
        """
        call.blamed += 1
        call.faults.append((now, death))
        if at_once or call.orphaned or call.blamed > 1 or self.circuits.is_trial(call.circuit, call.id):
            self._count_faults(call, now, out)

    def clear(self, call: CallState, out: list[Command]) -> None:
        """Clears a completed call: it was not the cause of earlier deaths."""
        call.faults.clear()
        if len(self.circuits) and self.circuits.succeeded(call.circuit, call.id):
            out.append(CircuitChanged(call.id, ""))

    def _count_faults(self, call: CallState, now: float, out: list[Command]) -> None:
        faults, call.faults = call.faults, []
        if call.plan is None or not any(
            [self.circuits.died(call.circuit, call.id, *each) for each in faults]
        ):
            return
        refusal = self.circuits.refusal(call.circuit, now)
        if refusal is None:
            return
        out.append(CircuitChanged(call.id, refusal.counts))
        for other in list(self.queue):
            if (other.tenant.name, other.operator) == (call.tenant.name, call.operator) and (
                other.circuit == call.circuit and other.stage is CallStage.QUEUED
            ):
                self._unqueue(other)
                self.fail(
                    other, "CIRCUIT_OPEN", refusal.detail, now, out, retry_after_s=refusal.retry_after_s
                )

    def retry(self, worker: WorkerState, call: CallState, now: float, out: list[Command]) -> None:
        """Requeues or fails a running call whose worker is gone."""
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
        """Requeues a call that its device could not take if another one could; returns whether it did."""
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
        """Requeues a running call whose device computed wrongly; the attempt does not count."""
        if call.orphaned:
            self.settle(call, now, out)
            return
        call.free_region()
        call.attempts -= 1
        self.put_back(call)
        out.append(RedirectCall(call.id, worker.index, "QUARANTINED"))

    def put_back(self, call: CallState) -> None:
        """Requeues a call that ran, at the front of its lane."""
        self._keep_no_longer(call)
        call.stage = CallStage.QUEUED
        self.queue.push(call, front=True)
        self._placement.forecast.queued(call)

    def overdue(self, call: CallState, now: float, out: list[Command]) -> None:
        """Handles a call's alarm: its deadline has passed, or its grace has ended."""
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
            # The alarm is this late because the server was suspended; its workers may have been as well.
            call.kill_at = now + grace
            self.alarms.set(call.kill_at, call.id, len(self.calls))
            return
        why = f"a call ran for {grace:g} s after its caller stopped waiting"
        if not call.orphaned:
            why = f"a call ran for more than {self._settings.run_limit_s:g} s, the limit of the server"
            out.append(FailCall(call.id, "DEADLINE_EXCEEDED", why))
            call.orphaned = True
        # Exempt, so that impatient callers cannot take a slow device down: if it really hangs, opening it
        # again fails, and that counts.
        worker = self._worker_of(call)
        if not worker.ending:
            worker.ended_by = call.id
        self._worker_lifecycle.kill(worker, why, out, exempt=True, death=Death.TIMED_OUT)

    def _grace_s(self, call: CallState) -> float:
        """Returns the seconds that an orphaned call may run on; few for a circuit breaker's trial."""
        grace = self._settings.hang_grace_s
        is_trial = len(self.circuits) and self.circuits.is_trial(call.circuit, call.id)
        return min(grace, TRIAL_GRACE_S) if is_trial else grace

    def _may_redirect(self, call: CallState) -> bool:
        """Whether a call that its device could not take may try another one: once, unless it is suspect."""
        wanted = not call.orphaned and not call.suspect
        return wanted and call.declined_by is None and call.attempts < self._settings.max_attempts

    def _may_retry(self, call: CallState, now: float) -> bool:
        """Whether a call whose worker died may be tried again."""
        suspected = call.suspect and call.deaths >= SUSPECT_ATTEMPTS
        if len(self.circuits) and self.circuits.refusal(call.circuit, now) is not None:
            return False
        return call.attempts < self._settings.max_attempts and not suspected

    def _is_live(self, number: int) -> bool:
        call = self.calls.get(number)
        return call is not None and call.stage is not CallStage.SETTLED
