"""One admitted call as the pool carries it: from the reservation of its bytes to what the caller gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from npugrad.call import ExecutionInfo
from npugrad_server.pool.answers import error_from_answer
from npugrad_server.pool.commands import CallRequest
from npugrad_server.pool.types import Outcome
from npugrad_server.worker.protocol import CallDone, CallFailed, RunAgain, RunCall

if TYPE_CHECKING:
    import asyncio

    from npugrad_server.pool.admission import Admission
    from npugrad_server.pool.arena import OutputArena
    from npugrad_server.pool.commands import StartCall
    from npugrad_server.pool.demand import Demand
    from npugrad_server.pool.process import WorkerProcess
    from npugrad_server.pool.regions import Region
    from npugrad_server.pool.types import PlannedCall
    from npugrad_server.worker.protocol import DeviceReady


@dataclass
class Entry:
    """An admitted call, until no worker touches its memory any more.

    Attributes:
        admission: The caller's hold on it.
        planned: The call.
        demand: What it needs.
        operands: Its part of the input arena.
        future: Where the caller waits; None before `DevicePool.run`.
        submitted_s: When the operands were complete.
        reported: Whether the observer was told how it ended.
        start: The last start of it.
        arena: Output arena of the process it started on.
        answer: That process's answer.
        held: That arena, once its results are the caller's.
    """

    admission: Admission
    planned: PlannedCall
    demand: Demand
    operands: Region
    future: asyncio.Future[Outcome] | None = None
    submitted_s: float = 0.0
    reported: bool = False
    start: StartCall | None = None
    arena: OutputArena | None = None
    answer: CallDone | CallFailed | None = None
    held: OutputArena | None = None

    def request(self) -> CallRequest:
        """What the scheduler has to know of it."""
        planned = self.planned
        return CallRequest(
            id=self.admission.number,
            priority=planned.options.priority,
            label=planned.options.label,
            deterministic=planned.options.deterministic,
            deadline_s=planned.deadline_s,
            output_bytes=self.demand.outputs.nbytes,
            memory_bytes=self.demand.memory_bytes,
            device_bytes=self.demand.device_bytes,
            workspace_key=self.demand.workspace_key,
            operator=planned.record.name,
        )

    def started(self, start: StartCall, process: WorkerProcess) -> RunCall | RunAgain:
        """Notes where it runs; returns the order for the worker.

        A call that has to be run again is brought whole, whatever its first worker was brought: what went
        wrong with it must not depend on what was kept.
        """
        self.start, self.arena, self.answer = start, process.outputs, None
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
            start.region.offset,
            planned.deadline_s,
            start.workspace_bytes,
            planned.options.priority,
            planned.options.label,
        )

    def whole(self, plan: int | None = None) -> RunCall:
        """The order for the worker with all that there is to say, after `started`.

        Args:
            plan: Number under which the worker is to keep what later calls share with it.

        Raises:
            RuntimeError: It was not started.
        """
        start, planned = self.start, self.planned
        if start is None:
            raise RuntimeError(f"{planned.record.name}: ordered before its start")
        return RunCall(
            call=start.call,
            operator=planned.record.name,
            meta=planned.call,
            outputs=planned.outputs,
            options=planned.options,
            input_offsets={k: self.operands.offset + v for k, v in self.demand.inputs.offsets.items()},
            output_offsets={k: start.region.offset + v for k, v in self.demand.outputs.offsets.items()},
            deadline_s=planned.deadline_s,
            workspace_bytes=start.workspace_bytes,
            plan=plan,
        )

    def outcome(self, device: str, ready: DeviceReady) -> Outcome:
        """What the worker's answer means to the caller; its results are held from now on.

        Args:
            device: Name of the device.
            ready: What its worker said of it.

        Raises:
            NpugradError: The worker answered with an error.
            RuntimeError: There is no answer.
        """
        if isinstance(self.answer, CallFailed):
            raise error_from_answer(self.planned, self.answer)
        if self.answer is None or self.start is None or self.arena is None:
            raise RuntimeError(f"{self.planned.record.name}: completed without an answer")
        self.arena.hold()
        self.held = self.arena
        return Outcome(self._contents(self.start.region, self.arena), self._info(device, ready))

    def _contents(self, region: Region, arena: OutputArena) -> dict[str, memoryview]:
        parts = []
        for name, meta in self.planned.outputs.items():
            if meta is not None:
                parts.append((name, self.demand.outputs.offsets[name], meta.nbytes))
        return self.admission.lend(arena.view(region, 0, region.nbytes), parts)

    def _info(self, device: str, ready: DeviceReady) -> ExecutionInfo:
        answer, start = self.answer, self.start
        if not isinstance(answer, CallDone) or start is None:
            raise RuntimeError(f"{self.planned.record.name}: completed without a result")
        return ExecutionInfo(
            backend=answer.backend,
            device=device,
            product=self.planned.call.product,
            simulated=ready.simulated,
            workspace_bytes=answer.workspace_bytes,
            attempts=start.attempt,
            queued_s=start.queued_s,
            copy_in_s=answer.copy_in_s,
            run_s=answer.run_s,
            copy_out_s=answer.copy_out_s,
            request_id=self.planned.request_id,
        )
