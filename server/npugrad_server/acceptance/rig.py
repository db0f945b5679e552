"""The rig that steps drive: a real worker process of the device, below the validator, call by call.

    rig.run(record, call, arrays)       one call: its outputs and the worker's own answer
    rig.run_many(jobs)                  many calls, enough at once to keep all streams busy
    rig.plan(record, call)              the first phase alone
    rig.restart(run_limit_s=0.001)      another process, with other settings if wanted
    with rig.deterministic(): ...       another process, if each keeps one mode
    with rig.pool() as pool: ...        the device under the service's own pool, which restarts workers
    with rig.trial("phases") as trial:  a separate process that reaches the device without a worker

The rig validates nothing: illegal calls reach the device unchanged.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from npugrad.call import CallOptions
from npugrad.layout import view
from npugrad.ops import OPERATORS
from npugrad_server.acceptance.job import Job, Ran
from npugrad_server.acceptance.link import DeviceGone, WorkerLink
from npugrad_server.acceptance.loop import LoopThread
from npugrad_server.acceptance.supervised import SupervisedDevice
from npugrad_server.acceptance.trial import open_trial
from npugrad_server.devices import DETERMINISTIC, parse_device
from npugrad_server.pool import PoolSettings
from npugrad_server.pool.admission import demand_of
from npugrad_server.pool.arena import InputArena
from npugrad_server.pool.regions import RegionAllocator
from npugrad_server.worker.protocol import (
    AskMemory,
    AskWorkspace,
    CallDone,
    CallFailed,
    DeviceFailed,
    MemoryFound,
    RunCall,
    WorkspaceFound,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from concurrent.futures import Future

    import numpy.typing as npt

    from npugrad.meta import CallMeta
    from npugrad.operator import OpRecord, Sample
    from npugrad.products import Product
    from npugrad.releases import CannRelease
    from npugrad_server.acceptance.job import Arrays
    from npugrad_server.acceptance.trial import Trial
    from npugrad_server.pool import PlannedCall
    from npugrad_server.pool.admission import Demand
    from npugrad_server.pool.regions import Region
    from npugrad_server.worker.protocol import DeviceReady

_ARENA_BYTES = 2 * 2**30
"""Address space for operands, and as much for results; only the part in use takes memory."""


@dataclass(frozen=True)
class BenchSettings:
    """Settings of a rig.

    Attributes:
        device: Such as ``"npu:0"``.
        product: Product of its chip.
        streams: Calls that run at once.
        release: Release of its CANN; None if unknown.
        soak_s: Seconds of the soak.
        simulated: Whether CANN is the tests' simulation, whose kernels are plain loops.
        run_limit_s: Seconds a call may run.
        hang_grace_s: Seconds a launched call may outlive its deadline.
        start_timeout_s: Seconds a worker has to open the device.
        arena_bytes: Maximum bytes of operands, and of results, of the calls in flight.
        rung_limit_s: Seconds that each rung of the ladder may take; a first start of CANN takes minutes.
        quick: Whether to skip what takes long.
    """

    device: str
    product: Product
    streams: int = 2
    release: CannRelease | None = None
    soak_s: float = 600.0
    simulated: bool = False
    run_limit_s: float = 540.0
    hang_grace_s: float = 10.0
    start_timeout_s: float = 180.0
    arena_bytes: int = _ARENA_BYTES
    rung_limit_s: float = 180.0
    quick: bool = False

    @property
    def index(self) -> int:
        """Number of the device."""
        return parse_device(self.device).index

    def pool_settings(self, **changes: Any) -> PoolSettings:
        """Returns settings for the service's pool; `changes` are fields of `PoolSettings`."""
        made = PoolSettings(
            devices=(self.device,),
            product=self.product,
            input_arena_bytes=self.arena_bytes,
            output_arena_bytes=self.arena_bytes,
            prefault_bytes=0,
            max_queue_depth=1024,
            streams_per_device=self.streams,
            hang_grace_s=self.hang_grace_s,
            worker_start_timeout_s=self.start_timeout_s,
            respawn_backoff_s=0.1,
            respawn_backoff_max_s=5.0,
            max_respawns=5,
            run_limit_s=self.run_limit_s,
        )
        return replace(made, **changes)


class Rig:
    """One device with one worker process at a time; for use by one thread.

    Attributes:
        settings: The settings it was opened with.
    """

    def __init__(self, settings: BenchSettings) -> None:
        """Creates the arena; the first use starts the worker."""
        self.settings = settings
        self._loop = LoopThread()
        self._inputs = InputArena(settings.arena_bytes)
        self._operands = RegionAllocator(self._inputs.nbytes)
        self._results = RegionAllocator(settings.arena_bytes)
        self._numbers, self._incarnations = itertools.count(1), itertools.count(1)
        self._link: WorkerLink | None = None
        self._changes: dict[str, Any] = {}
        self._ready: DeviceReady | None = None

    # ------------------------------------------------------------------------------------------- the worker

    def start(self, **changes: Any) -> float:
        """Starts a worker unless one with these changes is running, and waits until its device is open.

        Args:
            **changes: Fields of `PoolSettings` that differ for this worker, such as ``run_limit_s=0.001``.

        Returns:
            Seconds it took.

        Raises:
            DeviceGone: The device does not open.
        """
        if self.alive and self._changes == changes:
            return 0.0
        self.stop()
        start = time.monotonic()
        settings, self._changes = self.settings.pool_settings(**changes), changes
        self._link = WorkerLink(self._loop, self._inputs, settings, next(self._incarnations))
        try:
            self._ready = self._link.wait_ready(settings.start_limit_s)
        except BaseException:
            self.stop(kill=True)
            raise
        return time.monotonic() - start

    def stop(self, *, kill: bool = False) -> str:
        """Ends the worker, waits for it and returns how it ended, in words; empty if there was none."""
        link, self._link = self._link, None
        return "" if link is None else link.close(kill=kill)

    def abandon(self) -> None:
        """Has the worker killed without waiting; for signal handlers."""
        if self._link is not None:
            self._link.abandon()

    def restart(self, **changes: Any) -> float:
        """Stops the worker, starts one with the changes, and returns the seconds the start took."""
        self.stop()
        return self.start(**changes)

    @property
    def alive(self) -> bool:
        """Whether there is a worker whose device has not failed."""
        return self._link is not None and self._link.alive

    @property
    def pid(self) -> int:
        """Process number of the worker, which is started if there is none."""
        return self._worker().pid

    @property
    def ready(self) -> DeviceReady:
        """What the worker reported after opening its device; the worker is started if there is none."""
        self._worker()
        if self._ready is None:
            raise DeviceGone(f"{self.settings.device} is not open")
        return self._ready

    def _worker(self) -> WorkerLink:
        if self._link is None:
            self.start()
        if self._link is None:
            raise DeviceGone(f"{self.settings.device} is not open")
        return self._link

    # ------------------------------------------------------------------------------------------------ calls

    @property
    def offered(self) -> tuple[OpRecord, ...]:
        """The operators of the product, whether or not the device can run them."""
        return tuple(s for s in OPERATORS.values() if self.settings.product in s.products)

    @property
    def operators(self) -> tuple[OpRecord, ...]:
        """The operators of the product that the device can run."""
        return tuple(s for s in self.offered if s.name not in self.ready.unavailable)

    def samples(self, record: OpRecord) -> Iterator[Sample]:
        """Returns the record's own small calls for the device's product."""
        return record.samples(self.settings.product)

    def why_not_deterministic(self, record: OpRecord, call: CallMeta) -> str | None:
        """Returns why the device's CANN cannot run a call deterministically; None if it can."""
        return record.determinism_check(call, self.settings.release)

    @contextmanager
    def deterministic(self) -> Iterator[None]:
        """Honours the deterministic option in a block, with another worker if each worker keeps one mode.

        Raises:
            DeviceGone: The device does not open.
        """
        if not self.ready.no_determinism:
            yield
            return
        self.start(devices=(f"{self.settings.device}?{DETERMINISTIC}=1",))
        try:
            yield
        finally:
            self.stop()

    def run(
        self,
        record: OpRecord,
        call: CallMeta,
        arrays: Arrays,
        options: CallOptions | None = None,
        *,
        deadline_s: float | None = None,
    ) -> Ran:
        """Runs a call and waits for the worker's answer.

        After a worker has ended, every call gets the `DeviceFailed` it ended with, until `start`.
        """
        return self.run_job(Job(record, call, arrays, options or CallOptions(), deadline_s))

    def run_job(self, job: Job) -> Ran:
        """Runs a job, as `run` does."""
        return self.submit(job)()

    def run_many(self, jobs: Iterable[Job]) -> list[Ran]:
        """Runs jobs, enough at once to keep all streams busy; returns the answers in the jobs' order."""
        window, flying, found = 2 * self.settings.streams, deque[Pending](), list[Ran]()
        for job in jobs:
            if len(flying) == window:
                found.append(flying.popleft()())
            flying.append(self.submit(job))
        return found + [pending() for pending in flying]

    def submit(self, job: Job) -> Pending:
        """Sends a job and returns at once; call the returned `Pending` to wait for the outcome.

        Raises:
            MemoryError: The jobs in flight leave no room in the arenas.
        """
        link, planned = self._worker(), job.planned()
        demand = demand_of(planned)
        operands = self._operands.allocate(demand.inputs.nbytes)
        results = self._results.allocate(demand.outputs.nbytes)
        if operands is None or results is None:
            for allocator, region in ((self._operands, operands), (self._results, results)):
                if region is not None:
                    allocator.free(region)
            raise MemoryError(f"{job.record.name}: found no room for {demand}; expected it in the arenas")
        for name, offset in demand.inputs.offsets.items():
            meta = job.call.tensor(name)
            job.write(name, self._inputs.view(operands, offset, meta.content_bytes))
        message = RunCall(
            call=next(self._numbers),
            operator=job.record.name,
            meta=job.call,
            outputs=planned.plan.outputs,
            options=job.options,
            input_offsets={name: operands.offset + at for name, at in demand.inputs.offsets.items()},
            output_offsets={name: results.offset + at for name, at in demand.outputs.offsets.items()},
            deadline_s=job.deadline_s,
        )
        return Pending(
            self, link, planned, demand=demand, operands=operands, results=results, answer=link.ask(message)
        )

    def settle(self, pending: Pending) -> Ran:
        """Waits for a pending call and frees its memory; for `Pending`."""
        answer = pending.answer.result(self._patience_s())
        if isinstance(answer, (WorkspaceFound, MemoryFound)):
            raise TypeError(f"found {answer}; expected the answer to a call")
        outputs = {}
        if isinstance(answer, CallDone):
            outputs = pending.outputs()
        self._operands.free(pending.operands)
        self._results.free(pending.results)
        return Ran(outputs, answer)

    def _patience_s(self) -> float:
        return self.settings.run_limit_s + self.settings.hang_grace_s + self.settings.start_timeout_s

    def plan(self, record: OpRecord, call: CallMeta) -> WorkspaceFound | CallFailed | DeviceFailed:
        """Runs only the operator's first phase, without operands and without a launch."""
        order = AskWorkspace(next(self._numbers), record.name, call)
        answer = self._worker().ask(order).result(self._patience_s())
        if isinstance(answer, (CallDone, MemoryFound)):
            raise TypeError(f"found {answer}; expected what the first phase said")
        return answer

    def memory(self, *, give_back: bool) -> MemoryFound:
        """Queries the device's memory; calls in flight run first, or count as memory in use.

        Args:
            give_back: Whether the worker first releases memory that it only caches for later calls.

        Raises:
            DeviceGone: The worker does not report it.
        """
        answer = self._worker().ask(AskMemory(next(self._numbers), give_back)).result(self._patience_s())
        if not isinstance(answer, MemoryFound):
            raise DeviceGone(f"{self.settings.device}: {answer}")
        return answer

    # ---------------------------------------------------------------------------- instead of the rig's worker

    @contextmanager
    def pool(self, **changes: Any) -> Iterator[SupervisedDevice]:
        """Runs the device under the service's own pool in a block; the rig's worker ends first.

        Args:
            **changes: Fields of `PoolSettings` that differ, such as ``max_attempts=1``.

        Raises:
            DeviceGone: The device does not open.
        """
        self.stop()
        settings = self.settings.pool_settings(**changes)
        supervised = SupervisedDevice(self._loop, settings)
        try:
            supervised.wait_ready()
            yield supervised
        finally:
            supervised.close()

    @contextmanager
    def trial(self, name: str) -> Iterator[Trial]:
        """Yields a process that reaches the device without a worker; the rig's worker ends first.

        Args:
            name: Module of `npugrad_server.backends.npu.trials`.
        """
        self.stop()
        with open_trial(name) as trial:
            yield trial

    def close(self) -> None:
        """Ends the worker and the loop, and frees the arena."""
        self.stop()
        self._loop.close()
        self._inputs.close()

    def __enter__(self) -> Rig:
        """Does nothing: the first use starts the worker."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the rig."""
        self.close()


class Pending:
    """A call in flight."""

    def __init__(
        self,
        rig: Rig,
        link: WorkerLink,
        planned: PlannedCall,
        *,
        demand: Demand,
        operands: Region,
        results: Region,
        answer: Future[Any],
    ) -> None:
        """Created by `Rig.submit`."""
        self.operands, self.results, self.answer = operands, results, answer
        self._bench, self._link, self._planned, self._demand = rig, link, planned, demand
        self._ran: Ran | None = None

    def __call__(self) -> Ran:
        """Waits for the outcome; may be called again."""
        if self._ran is None:
            self._ran = self._bench.settle(self)
        return self._ran

    def outputs(self) -> dict[str, npt.NDArray[Any]]:
        """Returns copies of the results, once they are there."""
        arena, found = self._link.outputs, {}
        for name, offset in self._demand.outputs.offsets.items():
            meta = self._planned.plan.outputs[name]
            if meta is not None:
                found[name] = view(meta, arena.view(self.results, offset, meta.nbytes)).copy()
        return found
