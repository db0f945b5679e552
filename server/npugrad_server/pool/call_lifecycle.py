"""Life cycle of a call: queued, started, tried again, ended; orphaned if nobody waits for it any more.

The counterpart for workers is `worker_lifecycle`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from npugrad_server.pool.circuit_breaker import Death
from npugrad_server.pool.commands import (
    CircuitChanged,
    FailCall,
    RedirectCall,
    ReleaseCall,
    RequeueCall,
    StartCall,
    TellWorker,
)
from npugrad_server.pool.queues import AlarmQueue
from npugrad_server.pool.quotas import ComparedMemory
from npugrad_server.pool.state import CallStage, CallState, WorkerState
from npugrad_server.pool.types import DeviceState
from npugrad_server.worker.protocol import AbandonCall

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npugrad_server.pool.circuit_breaker import Refusal
    from npugrad_server.pool.commands import Command
    from npugrad_server.pool.isolation import Isolation
    from npugrad_server.pool.placement import Placement
    from npugrad_server.pool.types import PoolSettings
    from npugrad_server.pool.worker_lifecycle import WorkerLifecycle

_WAITED_ALONE = "; it waited for a device of its own, because a worker died under it or calls like it"
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
        isolation: Isolation,
    ) -> None:
        """Starts with no calls.

        Args:
            settings: Times and limits.
            workers: The devices.
            placement: Counts what calls hold.
            worker_lifecycle: Ends the worker of a call that runs too long.
            isolation: Says which calls run isolated; has the queue and the circuits.
        """
        self._settings, self._workers = settings, workers
        self._placement, self._worker_lifecycle = placement, worker_lifecycle
        self.calls: dict[int, CallState] = {}
        self.queue, self.circuits, self._isolation = isolation.queue, isolation.circuits, isolation
        self.alarms = AlarmQueue(self._is_live)
        self.compared = ComparedMemory()

    def enter(self, call: CallState, now: float, out: list[Command]) -> bool:
        """Lets a call in, or fails it if its circuit is open; returns whether it was let in."""
        if not len(self.circuits) or (refusal := self.circuits.enter(call, now)) is None:
            return True
        self.fail(call, "CIRCUIT_OPEN", refusal.detail, now, out, retry_after_s=refusal.retry_after_s)
        return False

    def start(self, call: CallState, worker: WorkerState, now: float, out: list[Command]) -> None:
        """Hands a placed call to its worker."""
        self.queue.take(call, now)
        if call.queued_s is not None:
            self._placement.forecast.unqueued(call)
        call.stage, call.attempts = CallStage.RUNNING, call.attempts + 1
        call.ran_isolated = self._isolation.isolates(call)
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

    def give_up(
        self,
        call: CallState,
        reason: str,
        detail: str,
        now: float,
        out: list[Command],
        *,
        retry_after_s: float | None = None,
    ) -> None:
        """Fails a queued call."""
        self._unqueue(call)
        if reason == "DEADLINE_EXCEEDED" and self._isolation.isolates(call):
            detail += _WAITED_ALONE
        self.fail(call, reason, detail, now, out, retry_after_s=retry_after_s)

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
        if len(self.circuits):
            self.circuits.left(call)
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

    def blame(self, worker: WorkerState, now: float, out: list[Command]) -> None:
        """Suspects the calls under which a worker died, and fails calls whose circuits that opens."""
        if not worker.opened or worker.state is DeviceState.QUARANTINED:
            return
        began_s = min((call.started_s for call in worker.running.values()), default=-math.inf)
        died_s = now if worker.ended_s is None else worker.ended_s
        opened = self.circuits.died(worker.index, died_s, worker.death, worker.suspects(), began_s, now)
        for call, refusal in opened:
            out.append(CircuitChanged(call.id, refusal.counts, refusal.whole))
            self._refuse_waiting(call, refusal, now, out)

    def _refuse_waiting(self, call: CallState, refusal: Refusal, now: float, out: list[Command]) -> None:
        """Fails the waiting calls that a circuit refuses."""
        for other in [other for other in self.queue if other.owner == call.owner]:
            if other.plan is not None and (
                refusal.whole or (call.plan and other.plan.signature == call.plan.signature)
            ):
                self.give_up(
                    other, "CIRCUIT_OPEN", refusal.detail, now, out, retry_after_s=refusal.retry_after_s
                )

    def clear(self, call: CallState, now: float, out: list[Command], *, good: bool) -> None:
        """Clears a call that a worker has answered: it was not the cause of earlier deaths."""
        if len(self.circuits):
            for whole in self.circuits.answered(call, now, good=good):
                out.append(CircuitChanged(call.id, "", whole))

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
        is_trial = len(self.circuits) and self.circuits.is_trial(call)
        return min(grace, TRIAL_GRACE_S) if is_trial else grace

    def _may_redirect(self, call: CallState) -> bool:
        """Whether a call that its device could not take may try another one: once, unless it is suspect."""
        wanted = not call.orphaned and not call.suspect
        return wanted and call.declined_by is None and call.tries < self._settings.max_attempts

    def _may_retry(self, call: CallState, now: float) -> bool:
        """Whether a call whose worker died may be tried again."""
        suspected = call.suspect and call.deaths >= SUSPECT_ATTEMPTS
        if suspected or call.tries >= self._settings.max_attempts:
            return False
        return not len(self.circuits) or self.circuits.enter(call, now) is None

    def _is_live(self, number: int) -> bool:
        call = self.calls.get(number)
        return call is not None and call.stage is not CallStage.SETTLED
