"""Decides which call runs where and when: events in, commands out.

No clock, no thread, no socket: time comes with the event, and `next_alarm` says when `tick` is due. The
driver carries the commands out in order.

Guarantees
    - A call gets exactly one `CompleteCall` or `FailCall`, unless the caller cancelled or closed it first.
    - `ReleaseCall` comes exactly once for every call, after it was closed and no worker touches its memory.
    - A call that runs for longer than `run_limit_s` and its grace costs its worker, and is not tried again.
    - A call starts at most `max_attempts` times, never past its deadline, never on a device that lacks its
      operator or its mode, and alone once a worker died under it; no more after `attempts.SUSPECT_ATTEMPTS`
      such deaths once a device failed under it.
    - A call that a device cannot take now (`attempts.ELSEWHERE`) is tried on another one, if there is one,
      once; the second answer is its caller's. That device comes last until it has done a call well.
    - A call that waits for room is overtaken by at most `claim.MAX_OVERTAKEN` calls of its priority or below
      for want of room; then a worker is kept free for it.
    - Calls of one label start in their order, but for those of another operator or mode behind one that has
      to wait for the devices that have its own.
    - Calls never hold more of a device's own memory than it has, workspaces included, from the moment their
      size is known; what a call holds goes back once.
    - A call whose workspace found no room has not been tried: it waits in front of its lane, and starts again
      where there is room for what it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npugrad_server.pool.alarms import Alarms
from npugrad_server.pool.attempts import ELSEWHERE, may_go_elsewhere, may_run_again, words_of_loss
from npugrad_server.pool.commands import (
    CompleteCall,
    FailCall,
    PostponeCall,
    RedirectCall,
    ReleaseCall,
    RequeueCall,
    StartCall,
    TellWorker,
)
from npugrad_server.pool.fair_queue import FairQueue
from npugrad_server.pool.ledger import CallRecord, Stage, WorkerRecord
from npugrad_server.pool.lifecycle import Lifecycle
from npugrad_server.pool.placement import Placement
from npugrad_server.pool.regions import RegionAllocator
from npugrad_server.pool.types import DeviceState
from npugrad_server.worker.protocol import AbandonCall

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from npugrad_server.pool.commands import Command, Failure, WorkerSpec
    from npugrad_server.pool.types import PoolSettings


class Scheduler:
    """The state of all calls and workers; every event is a method that returns the commands that follow.

    Attributes:
        workers: The devices.
        offers: What they have for calls, by operator and mode.
    """

    def __init__(
        self, settings: PoolSettings, workers: Sequence[WorkerSpec], memory: Mapping[str, int]
    ) -> None:
        """Starts with no process.

        Args:
            settings: Times and limits.
            workers: The devices.
            memory: Bytes of each host memory that the devices name.
        """
        self._settings = settings
        self.workers = [WorkerRecord(index, spec) for index, spec in enumerate(workers)]
        self._placement = Placement(self.workers, memory)
        self.offers = self._placement.offers
        self._lifecycle = Lifecycle(settings, self.workers, self._placement.worker_changed)
        self._calls: dict[int, CallRecord] = {}
        self._queue: FairQueue[CallRecord] = FairQueue()
        self._alarms = Alarms(self._is_live)

    # ------------------------------------------------------------------------------ what is seen from outside

    @property
    def queue_depth(self) -> int:
        """Calls that wait for a worker."""
        return self._queue.count

    @property
    def running(self) -> int:
        """Calls on workers, those that nobody waits for included."""
        return self._placement.running

    @property
    def output_used_bytes(self) -> int:
        """Bytes of all regions that calls hold, also in arenas of processes that are gone."""
        return sum(call.region.nbytes for call in self._calls.values())

    @property
    def all_down(self) -> bool:
        """Whether no device is ready or about to be."""
        return self._lifecycle.all_down

    def next_alarm(self) -> float | None:
        """When `tick` is due; None when only an event can change anything."""
        first = self._alarms.next()
        for worker in self.workers:
            if worker.alarm is not None and (first is None or worker.alarm < first):
                first = worker.alarm
        return first

    # ------------------------------------------------------------------------------------------------- events

    def start(self, now: float) -> list[Command]:
        """The pool opens: every device gets a process, at once or in its turn."""
        out: list[Command] = []
        for worker in self.workers:
            self._lifecycle.begin(worker, now, out)
        return out

    def submit(self, call: CallRecord, now: float) -> list[Command]:
        """A call's operands are all there."""
        out: list[Command] = []
        call.submitted_s = now
        self._calls[call.id] = call
        if self._lifecycle.all_down:
            self._fail(call, "NO_DEVICE", self._lifecycle.why_down, out)
            return out
        self._queue.push(call)
        if call.deadline_s is not None:
            self._alarms.set(call.deadline_s, call.id, len(self._calls))
        self._dispatch(now, out)
        return out

    def ready(
        self,
        worker: int,
        incarnation: int,
        now: float,
        one_mode: bool = False,
        memory_bytes: int | None = None,
        lacks: Mapping[str, str] | None = None,
        deterministic: bool | None = None,
        no_determinism: str = "",
    ) -> list[Command]:
        """A process has opened its device.

        Args:
            worker: Which device.
            incarnation: Which process.
            now: When.
            one_mode: Whether calls of different deterministic modes must not overlap on it.
            memory_bytes: What calls may have of its own memory; None for a device without.
            lacks: Operators that it cannot run, with the reason.
            deterministic: Mode that it keeps for every call; None where each call chooses.
            no_determinism: Why none of its calls is deterministic; empty where they can be.
        """
        out: list[Command] = []
        record = self.workers[worker]
        if not record.is_current(incarnation) or record.opened or record.ending:
            return out
        if record.failure is not None:
            return out  # it said that the device did not open, so its end is near
        record.one_mode, record.memory_bytes = one_mode, memory_bytes
        record.lacks, record.short = dict(lacks or {}), False
        record.deterministic, record.no_determinism = deterministic, no_determinism
        self._lifecycle.opened(record, out)
        self._lifecycle.take_turns(now, out)
        self._dispatch(now, out)
        return out

    def progress(self, worker: int, incarnation: int, stage: str, now: float) -> list[Command]:
        """A process has come to another stage of opening its device."""
        out: list[Command] = []
        if self.workers[worker].is_current(incarnation):
            self._lifecycle.progress(self.workers[worker], stage, now, out)
        return out

    def answered(
        self,
        worker: int,
        incarnation: int,
        call: int,
        good: bool,
        now: float,
        workspace_bytes: int | None = None,
        reason: str = "",
    ) -> list[Command]:
        """A process has done a call, or has survived an error in it.

        Args:
            worker: Which device.
            incarnation: Which process.
            call: Which call.
            good: Whether there are results.
            now: When.
            workspace_bytes: Workspace its operator asked for; None when that is not known.
            reason: Row of the error table, when there are none.
        """
        out: list[Command] = []
        record = self.workers[worker]
        if not record.is_current(incarnation) or call not in record.running:
            return out
        if workspace_bytes is not None and record.memory_bytes is not None:
            self._placement.learn(record.running[call], workspace_bytes)
        done = self._placement.take_off(call, record)
        if good:
            self._lifecycle.count_success(record, done)
        if good or not self._send_elsewhere(done, record, reason, out):
            if not done.void:
                out.append(CompleteCall(call))
            self._settle(done, out)
        self._dispatch(now, out)
        return out

    def need_workspace(self, worker: int, incarnation: int, call: int, nbytes: int) -> list[Command]:
        """A running call needs this much workspace, which is more than is set aside for it."""
        record = self.workers[worker]
        if not record.is_current(incarnation) or call not in record.running:
            return []
        reply = self._placement.extend(record.running[call], record, nbytes)
        return [TellWorker(worker, incarnation, reply)]

    def deferred(self, worker: int, incarnation: int, call: int, nbytes: int, now: float) -> list[Command]:
        """A process has given a call back, because its workspace, so many bytes, was refused for now."""
        out: list[Command] = []
        record = self.workers[worker]
        if not record.is_current(incarnation) or call not in record.running:
            return out
        back = self._placement.take_off(call, record)
        if back.void:
            self._settle(back, out)
        else:
            back.free_region()
            back.workspace_bytes = nbytes
            back.attempts -= 1
            self._put_back(back)
            out.append(PostponeCall(call, worker))
        self._dispatch(now, out)
        return out

    def failing(self, worker: int, incarnation: int, failure: Failure, now: float) -> list[Command]:
        """A process has said that its device failed, and ends; `lost` follows."""
        out: list[Command] = []
        record = self.workers[worker]
        if not record.is_current(incarnation):
            return out
        record.failure = failure
        if record.state is DeviceState.READY:
            self._lifecycle.kill(record, failure.reason, out, blameless=failure.blameless)
            self._dispatch(now, out)
        return out

    def lost(
        self, worker: int, incarnation: int, reason: str, now: float, *, host: bool = False
    ) -> list[Command]:
        """A process has ended and was waited for: it cannot write any more.

        Args:
            worker: Which device.
            incarnation: Which process.
            reason: How it ended, for a person.
            now: When.
            host: Whether it could not even be started.
        """
        out: list[Command] = []
        record = self.workers[worker]
        if not record.is_current(incarnation):
            return out
        record.alive = False
        record.reason = record.ended_for or reason
        self._lifecycle.count_loss(record, host=host)
        died_under = list(record.running)
        # The last one started goes back first, so that the first one started is in front at the end.
        for number in reversed(died_under):
            call = self._placement.take_off(number, record)
            call.note_loss(record, sole=len(died_under) == 1)
            self._retry(record, call, out)
        record.outputs = RegionAllocator(0)
        self._lifecycle.restart(record, now, out, idle=not died_under)
        self._lifecycle.take_turns(now, out)
        if self.all_down:
            for waiting in list(self._queue):
                self._give_up(waiting, "NO_DEVICE", self._lifecycle.why_down, out)
        self._dispatch(now, out)
        return out

    def cancel(self, call: int, now: float) -> list[Command]:
        """The caller does not want the answer any more."""
        out: list[Command] = []
        record = self._calls.get(call)
        if record is not None:
            self._void(record, now, out)
            self._dispatch(now, out)
        return out

    def close(self, call: int, now: float) -> list[Command]:
        """The caller is done with operands and results."""
        out: list[Command] = []
        record = self._calls.get(call)
        if record is None or record.closed:
            return out
        record.closed = True
        if record.stage is Stage.SETTLED:
            self._forget(record, out)
        else:
            self._void(record, now, out)
        self._dispatch(now, out)
        return out

    def tick(self, now: float) -> list[Command]:
        """Time has passed."""
        out: list[Command] = []
        for call in self._alarms.due(now):
            record = self._calls.get(call)
            if record is not None:
                self._overdue(record, now, out)
        for worker in self.workers:
            if worker.alarm is not None and worker.alarm <= now:
                self._lifecycle.overdue(worker, now, out)
        self._dispatch(now, out)
        return out

    # -------------------------------------------------------------------------------------------- dispatching

    def _dispatch(self, now: float, out: list[Command]) -> None:
        while self._queue.count and self._has_stream() and self._start_one(now, out):
            pass

    def _has_stream(self) -> bool:
        """Whether some device could take one more call."""
        for worker in self.workers:
            if worker.state is DeviceState.READY and len(worker.running) < worker.spec.streams:
                return True
        return False

    def _start_one(self, now: float, out: list[Command]) -> bool:
        """Starts the first call that can; returns whether there was one."""
        blocked: list[CallRecord] = []
        for call in self._queue.in_turn(self._placement.is_confined):
            deadline = call.deadline_s
            if deadline is not None and deadline <= now:
                self._give_up(call, "DEADLINE_EXCEEDED", "the deadline passed in the queue", out)
                return True  # its lane has changed
            why_never = self._placement.why_never(call)
            if why_never is not None:
                self._give_up(call, *why_never, out)
                return True
            worker = self._placement.place(call)
            if worker is not None:
                self._launch(call, worker, now, out)
                for other in blocked:
                    other.overtaken += 1
                return True
            self._placement.wait(call)
            blocked.append(call)
        return False

    def _launch(self, call: CallRecord, worker: WorkerRecord, now: float, out: list[Command]) -> None:
        self._queue.take(call)
        call.stage, call.attempts = Stage.RUNNING, call.attempts + 1
        # Later than a worker that can tell by itself, whose report has the vendor's number.
        call.kill_at = now + self._settings.run_limit_s + self._settings.hang_grace_s
        self._alarms.set(call.kill_at, call.id, len(self._calls))
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

    # -------------------------------------------------------------------------------------- how a call ends

    def _void(self, call: CallRecord, now: float, out: list[Command]) -> None:
        """Nobody waits for the call any more."""
        if call.stage is Stage.QUEUED:
            self._unqueue(call)
            self._settle(call, out)
        elif call.stage is Stage.RUNNING and not call.void:
            call.void = True
            call.kill_at = min(call.kill_at, now + self._settings.hang_grace_s)
            self._alarms.set(call.kill_at, call.id, len(self._calls))
            worker = self._worker_of(call)
            out.append(TellWorker(worker.index, worker.incarnation, AbandonCall(call.id)))

    def _worker_of(self, call: CallRecord) -> WorkerRecord:
        return next(worker for worker in self.workers if call.id in worker.running)

    def _give_up(self, call: CallRecord, reason: str, detail: str, out: list[Command]) -> None:
        self._unqueue(call)
        self._fail(call, reason, detail, out)

    def _unqueue(self, call: CallRecord) -> None:
        self._queue.remove(call)
        self._placement.claim.drop(call)

    def _fail(
        self, call: CallRecord, reason: str, detail: str, out: list[Command], code: int | None = None
    ) -> None:
        out.append(FailCall(call.id, reason, detail, code))
        self._settle(call, out)

    def _settle(self, call: CallRecord, out: list[Command]) -> None:
        call.stage = Stage.SETTLED
        if call.closed:
            self._forget(call, out)

    def _forget(self, call: CallRecord, out: list[Command]) -> None:
        call.free_region()
        del self._calls[call.id]
        out.append(ReleaseCall(call.id))

    def _retry(self, worker: WorkerRecord, call: CallRecord, out: list[Command]) -> None:
        """The worker of a running call is gone: another try, or the verdict."""
        if call.void:
            self._settle(call, out)
            return
        call.free_region()
        failure = worker.failure
        if failure is not None and failure.call == call.id and not failure.retry:
            self._fail(call, "DEADLINE_EXCEEDED", failure.reason, out, failure.code)
            return
        if may_run_again(call, self._settings.max_attempts):
            self._put_back(call)
            out.append(RequeueCall(call.id, worker.index))
            return
        what = words_of_loss(call, call.last_reason or worker.reason)
        self._fail(call, "WORKER_LOST", what, out, call.last_code)

    def _send_elsewhere(
        self, call: CallRecord, worker: WorkerRecord, reason: str, out: list[Command]
    ) -> bool:
        """Puts a call back that its device could not take, if another one could; returns whether it did."""
        if reason not in ELSEWHERE or call.too_large:
            return False
        worker.short = True
        if not may_go_elsewhere(call, self._settings.max_attempts):
            return False
        call.declined_by = (worker.index, worker.incarnation)
        if not self._placement.has_other(call):
            return False
        call.free_region()
        self._put_back(call)
        out.append(RedirectCall(call.id, worker.index, reason))
        return True

    def _put_back(self, call: CallRecord) -> None:
        """A call that ran waits again, in front of its lane."""
        call.stage = Stage.QUEUED
        self._queue.restore(call)

    def _overdue(self, call: CallRecord, now: float, out: list[Command]) -> None:
        """An alarm of a call has come: its deadline, or the end of its grace."""
        deadline = call.deadline_s
        if call.stage is Stage.RUNNING and call.kill_at <= now:
            self._end_for(call, now, out)
        elif call.void or deadline is None or deadline > now:
            return
        elif call.stage is Stage.QUEUED:
            self._give_up(call, "DEADLINE_EXCEEDED", "the deadline passed in the queue", out)
        elif call.stage is Stage.RUNNING:
            out.append(FailCall(call.id, "DEADLINE_EXCEEDED", "the deadline passed while the call ran"))
            self._void(call, deadline, out)

    def _end_for(self, call: CallRecord, now: float, out: list[Command]) -> None:
        """Ends the worker of a call that runs too long."""
        grace = self._settings.hang_grace_s
        if now > call.kill_at + grace:
            # Nobody looked for so long: the server stood still, and its workers may have as well.
            call.kill_at = now + grace
            self._alarms.set(call.kill_at, call.id, len(self._calls))
            return
        why = f"a call ran on for {grace:g} s after nobody waited for it"
        if not call.void:
            why = f"a call ran for more than {self._settings.run_limit_s:g} s, the limit of the server"
            out.append(FailCall(call.id, "DEADLINE_EXCEEDED", why))
            call.void = True
        # An impatient caller must not bring a slow device down: if the device really hangs, opening it
        # again fails, and that counts.
        self._lifecycle.kill(self._worker_of(call), why, out, blameless=True)

    def _is_live(self, call: int) -> bool:
        record = self._calls.get(call)
        return record is not None and record.stage is not Stage.SETTLED
