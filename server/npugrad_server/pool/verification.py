"""Verification: compares results with the reference, in separate processes, not in the devices' workers.

Guarantees
    - A call with `verify` gets its answer after the comparison, or when its deadline has passed. Its device
      runs other calls meanwhile.
    - A share `verify_sample` of the other calls is compared after they have their answers, so none waits for
      it. Until it is compared, for at most `SAMPLE_LIMIT_S`, such a call's memory stays in the arenas; so
      there is one at a time, it holds at most one part in `SAMPLE_SHARE` of an arena, and none is begun while
      another call waits to be compared.
    - Results that differ from the reference are computed once more, by the CPU's kernels, while the verifier
      has them: at the cost of that call and of no device. They count against the device if these agree with
      the reference. Otherwise they are reported as `tolerance`, and nobody is suspected.
    - No comparison uses memory that was given back: a verifier that still reads it is ended.
    - Tenants share the verifiers' time by weight, as they do the devices'. At most `MOST_VERIFIERS` calls are
      compared at once. A call under which two verifiers ended gets an error.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from npugrad_server.machine import cpu_count
from npugrad_server.pool.commands import FailCall
from npugrad_server.pool.fair_queue import FairQueue
from npugrad_server.pool.process import WorkerProcess
from npugrad_server.worker.protocol import CallDone, CallFailed
from npugrad_server.worker.verifier import JUDGED, NAME, WRONG

if TYPE_CHECKING:
    from collections.abc import Callable

    from npugrad_server.pool.arena import InputArena, OutputArena
    from npugrad_server.pool.completion import Completion
    from npugrad_server.pool.fleet import Fleet
    from npugrad_server.pool.ticket import Ticket
    from npugrad_server.pool.types import PoolObserver, PoolSettings
    from npugrad_server.worker.protocol import Message, RunCall

    OnMismatch = Callable[["ResultCheck", str], None]

_log = logging.getLogger(__name__)

MOST_VERIFIERS = 4
SAMPLE_LIMIT_S = 60.0
SAMPLE_SHARE = 4
_MOST_TRIES = 2
_PAUSE_S = 1.0
"""Seconds before a verifier that did not start, or ended, is replaced."""
_RESTART_S = 2.0
"""Seconds charged to a tenant under whose call a verifier ends, because another one has to start."""


@dataclass(eq=False)
class ResultCheck:
    """A call whose results are to be compared.

    Attributes:
        ticket: The call.
        arena: Arena of its results; held.
        order: The call as sent to a verifier.
        is_sample: Whether its caller has the answer already.
        worker: The device that computed it.
        incarnation: The process that computed it.
        timer: Ends the comparison.
        tries: Verifiers that were given it.
        started_s: When the last of them was.
        charged_s: Seconds that its tenant was charged with then.
    """

    ticket: Ticket
    arena: OutputArena
    order: RunCall
    is_sample: bool
    worker: int
    incarnation: int
    timer: asyncio.TimerHandle | None = None
    tries: int = 0
    started_s: float = 0.0
    charged_s: float = 0.0

    def __post_init__(self) -> None:
        """Takes from the call what the queue goes by; how long a comparison takes is not known."""
        state = self.ticket.state
        self.id, self.tenant, self.priority, self.label = state.id, state.tenant, state.priority, state.label
        self.kind, self.expected_s = None, 0.0


@dataclass(eq=False)
class _Seat:
    """A slot for one verifier: its process, None while it starts, and what it compares."""

    process: WorkerProcess | None = None
    check: ResultCheck | None = None
    is_leaving: bool = False


class Verification:
    """Compares results before or after callers get them. On the pool's event loop."""

    def __init__(
        self,
        settings: PoolSettings,
        fleet: Fleet,
        inputs: InputArena,
        completion: Completion,
        observer: PoolObserver,
        *,
        on_mismatch: OnMismatch,
    ) -> None:
        """Starts no process yet.

        Args:
            settings: The share of calls, and how long one may run.
            fleet: The devices.
            inputs: Arena of the operands.
            completion: Gives callers their answers.
            observer: Told of every comparison.
            on_mismatch: Told of results that only the device can have got wrong, with the figures, before
                their caller is.
        """
        self._settings, self._fleet, self._inputs = settings, fleet, inputs
        self._completion, self._observer, self._on_mismatch = completion, observer, on_mismatch
        self._share = settings.verify_sample
        self._count = max(1, min(MOST_VERIFIERS, cpu_count() // 2))
        self._loop = asyncio.get_running_loop()
        self._seats: list[_Seat] = []
        self._starting: set[asyncio.Future[WorkerProcess]] = set()
        self._waiting: FairQueue[ResultCheck] = FairQueue()
        self._sample: ResultCheck | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._closing = False

    def open(self) -> None:
        """Starts a verifier if calls are sampled."""
        if self._share:
            self._start()

    # ------------------------------------------------------------------------------------ calls that are done

    def complete(self, ticket: Ticket) -> None:
        """A worker has answered a call: its caller gets the answer at once, or after the comparison.

        Raises:
            RuntimeError: The call was not started.
        """
        start, planned = ticket.start, ticket.planned
        if start is None:
            raise RuntimeError(f"{planned.plan.record.name}: completed without a start")
        if planned.options.verify and isinstance(ticket.answer, CallDone) and _has_results(ticket):
            self._verify(ticket)
            return
        device = self._fleet.devices[start.worker]
        self._completion.complete(ticket, device.name.name, device.info)
        if self._share and random.random() < self._share:
            self._begin_sample(ticket)

    def _verify(self, ticket: Ticket) -> None:
        limit_s = time.monotonic() + self._settings.run_limit_s
        deadline_s = ticket.planned.deadline_s
        check = self._make(ticket, limit_s if deadline_s is None else min(limit_s, deadline_s))
        self._waiting.push(check)
        self._seat_waiting()

    def _begin_sample(self, ticket: Ticket) -> None:
        """Has an answered call compared if a verifier is free and the call does not hold too much memory."""
        if not isinstance(ticket.answer, CallDone) or ticket.start is None or not _has_results(ticket):
            return
        info = self._fleet.devices[ticket.start.worker].info
        if info is None or not info.canaries:
            return  # a device without canaries is not expected to compute
        seat = next((s for s in self._seats if s.process and not s.check and not s.is_leaving), None)
        fits = ticket.operands.nbytes * SAMPLE_SHARE <= self._inputs.nbytes and (
            ticket.arena is not None and ticket.state.region.nbytes * SAMPLE_SHARE <= ticket.arena.nbytes
        )
        if seat is None or self._sample is not None or self._waiting or not fits:
            self._tell(ticket, is_sample=True, result="skipped")
            return
        self._sample = self._make(ticket, time.monotonic() + SAMPLE_LIMIT_S, is_sample=True)
        self._give(seat, self._sample)

    def _make(self, ticket: Ticket, give_up_s: float, *, is_sample: bool = False) -> ResultCheck:
        start, arena = ticket.start, ticket.arena
        if start is None or arena is None:
            raise RuntimeError(f"{ticket.planned.plan.record.name}: compared before its start")
        arena.hold()
        check = ResultCheck(ticket, arena, ticket.whole(), is_sample, start.worker, start.incarnation)
        check.timer = self._loop.call_at(give_up_s, self._late, check)
        ticket.check = check
        return check

    def keeps(self, check: ResultCheck) -> bool:
        """The caller is done with a call; returns whether its memory has to stay."""
        if check.is_sample:
            return True  # `Ticket.end_check` follows
        self._leave(check)
        self._end(check)
        return False

    # ----------------------------------------------------------------------------------------------- the ends

    def _late(self, check: ResultCheck) -> None:
        """Gives up a comparison that takes too long."""
        self._leave(check)
        self._tell(check.ticket, is_sample=check.is_sample, result="unfinished")
        self._end(check)
        if not check.is_sample:
            detail = "the comparison of its results with the reference did not finish in time"
            self._completion.fail(check.ticket, FailCall(check.ticket.number, "DEADLINE_EXCEEDED", detail))

    def _leave(self, check: ResultCheck) -> None:
        """Takes a call out of the queue, or ends its verifier, which might go on reading for long."""
        if check in self._waiting:
            self._waiting.remove(check)
        for seat in self._seats:
            if seat.check is check and seat.process is not None:
                seat.is_leaving = True
                self._unseat(seat, check, _RESTART_S)
                seat.process.kill()

    def _end(self, check: ResultCheck) -> None:
        """Releases what a call holds for the comparison."""
        if check.timer is not None:
            check.timer.cancel()
        if check is self._sample:
            self._sample = None
        self._fleet.let_go(check.arena)
        check.ticket.end_check()

    def _finish(self, check: ResultCheck, answer: CallDone | CallFailed) -> None:
        """A verifier has compared a call, or could not."""
        ticket, reason = check.ticket, "" if isinstance(answer, CallDone) else answer.reason
        result = "unfinished" if reason else "ok"
        if isinstance(answer, CallFailed) and reason == "VERIFICATION_FAILED":
            is_wrong = answer.metadata.get(JUDGED) == WRONG
            result = "mismatch" if is_wrong else "tolerance"
            if is_wrong:
                self._on_mismatch(check, answer.message.removeprefix(f"{check.order.operator}: "))
            else:
                _log.error("request %s: tolerance: %s", ticket.planned.request_id, answer.message)
        self._tell(ticket, is_sample=check.is_sample, result=result)
        done = ticket.answer
        if check.is_sample:
            if isinstance(answer, CallFailed):
                _log.error(
                    "request %s: check of a sampled result: %s", ticket.planned.request_id, answer.message
                )
        elif isinstance(answer, CallFailed):
            self._completion.take(ticket, answer)
        elif isinstance(done, CallDone):
            taken_s = time.monotonic() - done.begun_s - done.copy_in_s - done.run_s - done.copy_out_s
            found = answer.verification, answer.verified
            ticket.answer = replace(done, verify_s=taken_s, verification=found[0], verified=found[1])
        if not check.is_sample:
            device = self._fleet.devices[check.worker]
            self._completion.complete(ticket, device.name.name, device.info)
        self._end(check)

    def _tell(self, ticket: Ticket, *, is_sample: bool, result: str) -> None:
        if ticket.start is not None:
            device = self._fleet.names[ticket.start.worker]
            self._observer.results_compared(device, "sample" if is_sample else "verify", result)

    # ---------------------------------------------------------------------------------------------- processes

    def _seat_waiting(self) -> None:
        """Gives waiting calls to free verifiers, and starts more verifiers."""
        for seat in self._seats:
            if self._waiting and seat.process and seat.check is None and not seat.is_leaving:
                check = next(self._waiting.in_turn(lambda _: False))
                self._waiting.take(check, time.monotonic())
                self._give(seat, check)
        starting = sum(seat.process is None for seat in self._seats)
        for _ in range(min(len(self._waiting) - starting, self._count - len(self._seats))):
            self._start()

    def _give(self, seat: _Seat, check: ResultCheck) -> None:
        seat.check = check
        check.tries += 1
        if seat.process is not None:
            seat.process.send(check.order, check.arena.fd)

    def _unseat(self, seat: _Seat, check: ResultCheck, more_s: float = 0.0) -> None:
        """A verifier is done with a call, which took so much more time; a sample is nobody's."""
        seat.check = None
        if not check.is_sample:
            self._waiting.come_off(check, time.monotonic() + more_s)

    def _start(self) -> None:
        if self._closing or self._pause is not None:
            return
        seat = _Seat()
        self._seats.append(seat)
        start = partial(
            WorkerProcess, NAME, 1, self._inputs, 1, max(1, cpu_count() // self._count),
            print_fd=self._settings.print_fd, module=self._settings.worker_module, cann=self._settings.cann,
        )  # fmt: skip
        future = self._fleet.start(start)
        self._starting.add(future)
        future.add_done_callback(partial(self._started, seat))

    def _started(self, seat: _Seat, future: asyncio.Future[WorkerProcess]) -> None:
        self._starting.discard(future)
        try:
            process = future.result()
        except Exception as error:
            self._not_started(seat, error)
            return
        try:
            process.attach(partial(self._received, seat), partial(self._exited, seat))
        except RuntimeError as error:
            process.discard()
            self._not_started(seat, error)
            return
        seat.process = process
        if self._closing:
            process.kill()
            return
        process.open(self._settings)
        self._seat_waiting()

    def _not_started(self, seat: _Seat, error: Exception) -> None:
        """The host was out of descriptors, memory, processes or threads."""
        if not self._closing:
            _log.warning("a verifier did not start: %s", error)
        self._seats.remove(seat)
        self._start_later()

    def _start_later(self) -> None:
        if not self._closing and self._pause is None:
            self._pause = self._loop.call_later(_PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._pause = None
        self._seat_waiting()
        if not self._seats:
            self.open()

    def _received(self, seat: _Seat, message: Message) -> None:
        check = seat.check
        if isinstance(message, (CallDone, CallFailed)) and check is not None:
            self._unseat(seat, check)
            self._finish(check, message)
            self._seat_waiting()

    def _exited(self, seat: _Seat, reason: str) -> None:
        """A verifier has ended and reads no memory any more."""
        check = seat.check
        if check is not None:
            self._unseat(seat, check, _RESTART_S)
        self._seats.remove(seat)
        if seat.process is not None:
            self._fleet.let_go(seat.process.outputs)
        if self._closing:
            return
        if check is None:  # it was ended, or nobody knows why
            if not seat.is_leaving:
                self._start_later()
        else:
            _log.warning("request %s: a verifier ended: %s", check.ticket.planned.request_id, reason)
            if check.is_sample or check.tries >= _MOST_TRIES:
                said = (
                    f"{check.order.operator}: no comparison with the reference: the verifier ended: {reason}"
                )
                self._finish(check, CallFailed(check.ticket.number, "INTERNAL", said))
            else:
                self._waiting.push(check, front=True)
        self._seat_waiting()
        if not self._seats:
            self.open()

    async def close(self) -> None:
        """Ends all verifiers and waits for them; waiting calls have their answers already. Idempotent."""
        self._closing = True
        if self._pause is not None:
            self._pause.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        checks = [*self._waiting, *(seat.check for seat in self._seats if seat.check is not None)]
        self._waiting = FairQueue()
        for seat in self._seats:
            seat.check = None
        seats = list(self._seats)
        for seat in seats:
            if seat.process is not None:
                seat.process.kill()
        await self._fleet.wait_for([seat.process for seat in seats if seat.process is not None])
        for check in checks:
            self._end(check)


def _has_results(ticket: Ticket) -> bool:
    return any(meta is not None for meta in ticket.planned.plan.outputs.values())
