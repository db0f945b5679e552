"""The ticket of an accepted call, from the reservation of its bytes until no worker touches them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from npugrad.call import ExecutionInfo, VerifiedOutput
from npugrad_server.pool.forecast import UNKNOWN_PREDICTION
from npugrad_server.pool.state import CallState
from npugrad_server.pool.types import Outcome
from npugrad_server.worker.protocol import CallDone, RunCall
from npugrad_server.worker.run_again import RunAgain

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable
    from types import TracebackType

    from npugrad.timeline import Mark
    from npugrad_server.pool.admission import Demand
    from npugrad_server.pool.arena import OutputArena
    from npugrad_server.pool.commands import StartCall
    from npugrad_server.pool.forecast import Prediction
    from npugrad_server.pool.process import WorkerProcess
    from npugrad_server.pool.quotas import TenantUse
    from npugrad_server.pool.regions import Region
    from npugrad_server.pool.types import PlannedCall
    from npugrad_server.pool.verification import ResultCheck
    from npugrad_server.worker.protocol import CallFailed, DeviceReady

_MOST_LOST_MARKS = 48
"""Two for each lost start."""


class Ticket:
    """The bytes and the queue place of one accepted call; `close`, or leaving its context, gives them back.

    Attributes:
        planned: The call.
        number: Its number in the pool.
        demand: What it needs.
        prediction: When it was expected to be done.
        operands: Its part of the input arena.
        state: What the scheduler knows about it.
        started: Whether its operands are complete and must not change any more.
        closed: Whether its bytes were given back.
        future: Where the caller waits; None before `DevicePool.run`.
        reported: Whether the observer was told how it ended.
        start: Its last start.
        arena: Output arena of the process it started on.
        answer: That process's answer.
        held: That arena, once its results were handed to the caller.
        marks: When its stages ended, from the first start on.
        use: What its tenant holds, this call included; None before `DevicePool.admit`.
        waits: Whether it has not started and counts as waiting for its tenant.
        inflight_bytes: What it adds to its tenant's bytes in flight.
        is_upload: Whether its operands were still to come when it was admitted.
        check: The comparison of its results with the reference; None for none.
        give_way: Called while its operands or results are in transit, when others need the memory it holds,
            with the seconds after which an upload's rate is judged (infinite unless its tenant is over its
            share); returns whether the memory is given back, at once or soon.
    """

    def __init__(
        self,
        number: int,
        planned: PlannedCall,
        demand: Demand,
        operands: Region,
        memory: memoryview,
        on_close: Callable[[Ticket], None],
        *,
        prediction: Prediction = UNKNOWN_PREDICTION,
    ) -> None:
        """Made by `DevicePool.admit`.

        Args:
            number: Unique number.
            planned: The call.
            demand: What it needs.
            operands: Its part of the input arena.
            memory: View of that part, released once the ticket is closed.
            on_close: Called once, when it is closed.
            prediction: When it is expected to be done.
        """
        options = planned.options
        self.state = CallState(
            id=number,
            priority=min(options.priority, planned.tenant.max_priority),
            label=options.label,
            tenant=planned.tenant,
            plan=planned.plan,
            deterministic=options.deterministic,
            deadline_s=planned.deadline_s,
            output_bytes=demand.outputs.nbytes,
            memory_bytes=demand.memory_bytes,
            device_bytes=demand.device_bytes,
            workspace_key=demand.workspace_key,
            operator=planned.plan.record.name,
            work=demand.work,
            expected_s=prediction.expected_s,
            longest_run_s=prediction.longest_run_s,
            is_probe=prediction.is_probe,
        )
        self.planned, self.number, self.demand, self.operands = planned, number, demand, operands
        self.prediction = prediction
        self.started = self.closed = self.reported = False
        self.future: asyncio.Future[Outcome] | None = None
        self.start: StartCall | None = None
        self.arena: OutputArena | None = None
        self.answer: CallDone | CallFailed | None = None
        self.held: OutputArena | None = None
        self.marks: list[Mark] = []
        self.is_upload, self.waits, self.inflight_bytes = False, True, 0
        self.use: TenantUse | None = None
        self.check: ResultCheck | None = None
        self.give_way: Callable[[float], bool] | None = None
        self._memory, self._on_close = memory, on_close
        self._views = [memory]

    # ---------------------------------------------------------------------------------- what the caller sees

    def view(self, name: str) -> memoryview:
        """Writable memory of an operand's content, exactly its `content_bytes`; errors as in `views`."""
        return self.views((name,))[0]

    def views(self, names: Iterable[str]) -> list[memoryview]:
        """Writable memory of the contents of some operands.

        Raises:
            KeyError: An operand is null, or the operator has none of this name.
            RuntimeError: The ticket was closed, or its call was started: operands must not change any more.
        """
        if self.closed or self.started:
            raise RuntimeError(
                f"{self.planned.plan.record.name}: operands can be written only before the call runs"
            )
        found, offsets = [], self.demand.inputs.offsets
        for name in names:
            meta = self.planned.plan.call.inputs[name]
            if meta is None:
                raise KeyError(f"{self.planned.plan.record.name}: {name} is null")
            start = offsets[name]
            found.append(self._memory[start : start + meta.content_bytes])
        self._views += found
        return found

    def close(self) -> None:
        """Gives every byte back, and cancels a call that still waits or runs. Idempotent.

        Views from `view` and of an outcome are released: using one afterwards raises ValueError instead of
        exposing another call's data.
        """
        if self.closed:
            return
        self.closed = True
        while self._views:
            try:
                self._views.pop().release()
            except BufferError:
                continue  # an array was made from it; using that is the caller's fault
        self._on_close(self)

    def end_check(self) -> None:
        """Ends its comparison, done or not; a closed ticket then gives back what was kept for it."""
        self.check = None
        if self.closed:
            self._on_close(self)

    def __enter__(self) -> Ticket:
        """Returns the ticket; its bytes are already reserved."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes it."""
        self.close()

    # ---------------------------------------------------------------------------- what the pool does with it

    def order(self, start: StartCall, process: WorkerProcess) -> RunCall | RunAgain:
        """Notes where it runs; returns the order for the worker.

        A call that is run again is sent whole, whatever its first worker was sent: what went wrong with it
        must not depend on a kept plan.
        """
        self.start, self.arena, self.answer = start, process.outputs, None
        if self.waits:
            self.stop_waiting()
        self.marks.append(("queued", time.monotonic()))
        planned = self.planned
        if not planned.plan.is_kept or start.attempt > 1:
            return self.whole()
        number, known = process.plans.begin(start.call, planned.plan)
        if not known:
            return self.whole(number)
        return RunAgain(
            start.call,
            number,
            self.operands.offset,
            self.state.region.offset,
            planned.deadline_s,
            start.workspace_bytes,
            planned.options.priority,
            planned.options.label,
        )

    def whole(self, plan: int | None = None) -> RunCall:
        """Returns the complete order for the worker, after `order`.

        Args:
            plan: Number under which the worker is to keep what later calls share with it.

        Raises:
            RuntimeError: It was not started.
        """
        start, planned, demand = self.start, self.planned, self.demand
        operands, results = self.operands.offset, self.state.region.offset
        if start is None:
            raise RuntimeError(f"{planned.plan.record.name}: ordered before its start")
        return RunCall(
            call=start.call,
            operator=planned.plan.record.name,
            meta=planned.plan.call,
            outputs=planned.plan.outputs,
            options=planned.options,
            input_offsets={k: operands + v for k, v in demand.inputs.offsets.items()},
            output_offsets={k: results + v for k, v in demand.outputs.offsets.items()},
            deadline_s=planned.deadline_s,
            workspace_bytes=start.workspace_bytes,
            plan=plan,
        )

    def outcome(self, device: str, ready: DeviceReady) -> Outcome:
        """Returns the worker's results for the caller; their memory is held from now on.

        Args:
            device: Name of the device.
            ready: What its worker said about it.

        Raises:
            RuntimeError: There are no results.
        """
        answer, start, planned = self.answer, self.start, self.planned
        if not isinstance(answer, CallDone) or start is None or self.arena is None:
            raise RuntimeError(f"{planned.plan.record.name}: completed without results")
        self.arena.hold()
        self.held = self.arena
        info = ExecutionInfo(
            backend=answer.backend,
            device=device,
            product=planned.plan.call.product,
            simulated=ready.simulated,
            workspace_bytes=answer.workspace_bytes,
            attempts=start.attempt,
            queued_s=start.queued_s,
            copy_in_s=answer.copy_in_s,
            run_s=answer.run_s,
            copy_out_s=answer.copy_out_s,
            request_id=planned.request_id,
            verification=answer.verification,
            verified=tuple(VerifiedOutput(name, *found) for name, found in answer.verified.items()),
            predicted_wait_s=self.prediction.wait_s,
            predicted_run_s=self.prediction.run_s,
        )
        self._mark_done(answer)
        return Outcome(self._lend(self.arena), info)

    def stop_waiting(self) -> None:
        """Stops counting it among its tenant's waiting calls."""
        if self.waits and self.use is not None:
            self.use.waiting_count -= 1
        self.waits = False

    def give_back(self, nbytes: int) -> None:
        """Stops counting this many bytes as its tenant's."""
        if self.use is not None:
            self.use.inflight_bytes -= nbytes
            self.inflight_bytes -= nbytes

    def mark_lost(self) -> None:
        """Marks the last start as lost; after many, merges it with the one before.

        A device that has no room for a call may give it back any number of times, and the marks travel as
        metadata, which gRPC limits to some kilobytes.
        """
        self.marks.append(("lost", time.monotonic()))
        if len(self.marks) > _MOST_LOST_MARKS:
            del self.marks[-3:-1]

    def mark_failed(self) -> None:
        """Marks the end of a call without results: it waited until now, or its last start was lost."""
        last = self.marks[-1][0] if self.marks else "lost"
        if last:  # else it has results, which nobody waited for
            self.marks.append(("lost" if last == "queued" else "queued", time.monotonic()))

    def _mark_done(self, answer: CallDone) -> None:
        at = answer.begun_s
        self.marks[-1] = ("queued", at)  # until the worker began it
        for stage, seconds in (
            ("copy_in", answer.copy_in_s),
            ("run", answer.run_s),
            ("copy_out", answer.copy_out_s),
            ("verify", answer.verify_s),
        ):
            if seconds:
                at += seconds
                self.marks.append((stage, at))
        self.marks.append(("", time.monotonic()))

    def _lend(self, arena: OutputArena) -> dict[str, memoryview]:
        """Returns views of the results, released once the ticket is closed."""
        region, offsets = self.state.region, self.demand.outputs.offsets
        memory = arena.view(region, 0, region.nbytes)
        found = {
            name: memory[offsets[name] : offsets[name] + meta.nbytes]
            for name, meta in self.planned.plan.outputs.items()
            if meta is not None
        }
        self._views += [memory, *found.values()]
        return found
