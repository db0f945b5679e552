"""Real pools with worker processes, small calls for them, and what is left of a pool once it is closed."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.calls import cpu_results
from tests.worker_forks import forked_workers

from npugrad import Product, get_operator
from npugrad.call import CallOptions
from npugrad.layout import content
from npugrad_server.devices import resolve
from npugrad_server.pool import DevicePool, DeviceState, Outcome, PlannedCall, PoolObserver, PoolSettings
from npugrad_server.pool.process import WorkerProcess

Arrays = Mapping[str, npt.NDArray[Any] | None]
Test = Callable[..., Awaitable[None]]

SETTINGS = PoolSettings(
    devices=("cpu:0",),
    product=Product.ATLAS_A2,
    input_arena_bytes=1 << 20,
    output_arena_bytes=1 << 20,
    prefault_bytes=1 << 16,
    max_queue_depth=64,
    streams_per_device=1,
    hang_grace_s=0.2,
    worker_start_timeout_s=30,
    respawn_backoff_s=0.02,
    respawn_backoff_max_s=0.1,
    max_respawns=3,
    device_memory_bytes=1 << 20,
)

_SPAWN = WorkerProcess._spawn
"""How a worker starts where no test has it forked."""


# ---------------------------------------------------------------------------------------------- calls


@dataclass(frozen=True)
class Job:
    """A planned call with its operands and the results it must have."""

    planned: PlannedCall
    inputs: Arrays

    def golden(self) -> dict[str, npt.NDArray[Any]]:
        plan = self.planned.plan
        return cpu_results(plan.record, plan.call, self.inputs, plan.outputs)

    def write(self, ticket: Any) -> None:
        """Writes the operands, in the layout that the metas of the call declare."""
        for name, array in self.inputs.items():
            if array is not None:
                meta, data = content(array)
                assert meta.content_bytes == self.planned.plan.call.tensor(name).content_bytes
                ticket.view(name)[:] = data

    async def run(self, pool: DevicePool) -> tuple[dict[str, bytes], Outcome]:
        with pool.admit(self.planned) as ticket:
            self.write(ticket)
            outcome = await pool.run(ticket)
            return {name: bytes(data) for name, data in outcome.contents.items()}, outcome

    async def check(self, pool: DevicePool) -> Outcome:
        found, outcome = await self.run(pool)
        assert found == {name: array.tobytes() for name, array in self.golden().items()}
        return outcome

    def start(self, pool: DevicePool) -> asyncio.Task[Outcome]:
        """Runs and compares it in a task of its own."""
        return asyncio.create_task(self.check(pool))


def make_job(
    *,
    seed: int = 0,
    label: str = "",
    priority: int = 0,
    verify: bool = False,
    timeout_s: float | None = None,
    layout: Callable[[npt.NDArray[Any]], npt.NDArray[Any]] | None = None,
    operator: str = "group_norm_backward",
    **sizes: Any,
) -> Job:
    """A call with random operands, by default of GroupNorm.

    Args:
        seed: Of the operands.
        label: Option of the call.
        priority: Option of the call.
        verify: Option of the call.
        timeout_s: Seconds from now until its deadline.
        layout: Turns each operand into one of another layout, or with other values.
        operator: Its operator.
        sizes: Arguments of the record's `build`.
    """
    record = get_operator(operator)
    call = record.build(**sizes)
    inputs = dict(record.make_inputs(call, np.random.default_rng(seed)))
    if layout is not None:
        inputs = {name: None if array is None else layout(array) for name, array in inputs.items()}
        call = call.with_inputs(**{k: None if a is None else content(a)[0] for k, a in inputs.items()})
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    options = CallOptions(priority=priority, label=label, verify=verify)
    planned = PlannedCall.alone(record, call, record.infer(call), options, f"request-{seed}", deadline)
    return Job(planned, inputs)


def altered(planned: PlannedCall, **changes: Any) -> PlannedCall:
    """The call with a plan of its own, of which some attributes are others."""
    return replace(planned, plan=replace(planned.plan, **changes))


# ---------------------------------------------------------------------------------------------- pools


class Seen(PoolObserver):
    """Writes down what a pool tells, in order; calls by their labels."""

    def __init__(self) -> None:
        self.accepted: list[str] = []
        self.started: list[tuple[str, str, int]] = []
        self.finished: list[tuple[str, str]] = []
        self.requeued: list[tuple[str, str]] = []
        self.redirected: list[tuple[str, str]] = []
        self.lost: list[tuple[str, str]] = []
        self.states: list[tuple[str, DeviceState]] = []
        self.mismatches: list[tuple[str, str]] = []
        self.postponed = 0
        self.asked, self.canaries, self.compared = Counter[str](), Counter[str](), Counter[tuple[str, str]]()

    @property
    def attempts(self) -> list[int]:
        """Which start of its call each one was."""
        return [attempt for _, _, attempt in self.started]

    def call_accepted(self, planned: PlannedCall) -> None:
        self.accepted.append(planned.options.label)

    def call_started(self, planned: PlannedCall, device: str, attempt: int, queued_s: float) -> None:
        assert queued_s >= 0
        self.started.append((planned.options.label, device, attempt))

    def call_finished(self, planned: PlannedCall, reason: str, seconds: float, info: Any) -> None:
        assert seconds >= 0
        assert (info is not None) == (reason == "OK")
        self.finished.append((planned.options.label, reason))

    def call_requeued(self, planned: PlannedCall, device: str) -> None:
        self.requeued.append((planned.options.label, device))

    def call_redirected(self, planned: PlannedCall, device: str, reason: str) -> None:
        self.redirected.append((device, reason))

    def call_postponed(self, planned: PlannedCall, device: str) -> None:
        self.postponed += 1

    def workspace_asked(self, device: str, answer: str) -> None:
        self.asked[answer] += 1

    def worker_lost(self, device: str, reason: str) -> None:
        self.lost.append((device, reason))

    def device_changed(self, status: Any) -> None:
        self.states.append((status.name, status.state))

    def canaries_run(self, device: str, result: str, count: int) -> None:
        self.canaries[result] += count

    def results_compared(self, device: str, kind: str, result: str) -> None:
        self.compared[kind, result] += 1

    def device_mismatched(self, device: str, operator: str) -> None:
        self.mismatches.append((device, operator))


def in_pool(
    devices: str | tuple[str, ...] = "cpu:0",
    *,
    ready: bool = True,
    forked: bool = True,
    seen: type[Seen] = Seen,
    **changes: Any,
) -> Callable[[Test], Callable[..., None]]:
    """Gives a test a ``pool`` of its own, and what it tells as ``seen``; looks at what is left of it.

    Args:
        devices: As a command line names them, or one by one; parameters of the test may stand in braces.
        ready: Whether a device must be ready when the test begins.
        forked: Whether its workers are forks of one that has imported its program.
        seen: What writes down what the pool tells.
        changes: Settings that are not those of all these tests.
    """

    def decorated(test: Test) -> Callable[..., None]:
        given = inspect.signature(test).parameters.values()

        async def play(settings: PoolSettings, **fixtures: Any) -> None:
            told = seen()
            pool = await DevicePool.open(settings, told)
            mine = {"pool": pool, "seen": told, **fixtures}
            try:
                if ready:
                    await pool.wait_ready(30)
                await test(**{each.name: mine[each.name] for each in given})
                stats = pool.stats()
                assert (stats.queue_depth, stats.running, stats.uploads) == (0, 0, 0)
                assert (stats.input_arena_used_bytes, stats.output_arena_used_bytes) == (0, 0)
                assert stats.accepted_calls >= stats.finished_calls
            finally:
                await pool.close()
                await pool.close()  # may be called again

        @wraps(test)
        def run(**fixtures: Any) -> None:
            names = (devices,) if isinstance(devices, str) else devices
            named = tuple(name.format_map(fixtures) for name in names)
            settings = replace(SETTINGS, devices=resolve(named[0]) if isinstance(devices, str) else named)
            assert forked or WorkerProcess._spawn is _SPAWN, "another test has them forked"
            with forked_workers() if forked else nullcontext():
                before = _resources()
                asyncio.run(play(replace(settings, **changes), **fixtures))
                # What an earlier test left to the garbage collector may go meanwhile; nothing may come.
                assert not _resources() - before

        fixtures = [each for each in given if each.name not in ("pool", "seen")]
        run.__signature__ = inspect.Signature(fixtures)  # type: ignore[attr-defined]
        return run

    return decorated


def _resources() -> Counter[str]:
    """What a pool must not leave behind, and how often: descriptors, children, threads, mappings."""
    descriptors: list[str] = []
    for number in os.listdir("/proc/self/fd"):
        try:
            descriptors.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # the descriptor of the listing itself
            continue
    children = [word for task in Path("/proc/self/task").glob("*/children") for word in _words(task)]
    threads = [thread.name for thread in threading.enumerate() if "asyncio" not in thread.name]
    mappings = ["mapping"] * Path("/proc/self/maps").read_text().count("memfd:npugrad")
    return Counter([*descriptors, *(f"child {pid}" for pid in children), *threads, *mappings])


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:  # the thread has ended meanwhile
        return []


def pid_of(pool: DevicePool, device: int = 0) -> int:
    pid = pool.devices()[device].pid
    assert pid is not None
    return pid


async def until(condition: Callable[[], object], timeout_s: float = 120.0) -> None:
    """Waits for something that no event announces."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.002)
