"""Real pools with real worker processes, and small calls for them."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pytest
from tests.calls import cpu_results

from npugrad import Product, get_operator
from npugrad.call import CallOptions
from npugrad.layout import content
from npugrad_server.devices import resolve
from npugrad_server.pool import DevicePool, Outcome, PlannedCall, PoolObserver, PoolSettings

Arrays = Mapping[str, npt.NDArray[Any] | None]

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


@dataclass(frozen=True)
class Job:
    """A planned call with its operands and the results it must have."""

    planned: PlannedCall
    inputs: Arrays

    def golden(self) -> dict[str, npt.NDArray[Any]]:
        """What the CPU backend makes of the operands in this process."""
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
        """Runs it; returns the bytes of the results, and the outcome, whose views are released."""
        with pool.admit(self.planned) as ticket:
            self.write(ticket)
            outcome = await pool.run(ticket)
            return {name: bytes(data) for name, data in outcome.contents.items()}, outcome

    async def check(self, pool: DevicePool) -> Outcome:
        """Runs it and compares every result bit for bit."""
        found, outcome = await self.run(pool)
        golden = self.golden()
        assert found.keys() == golden.keys()
        for name, array in golden.items():
            assert found[name] == array.tobytes(), name
        return outcome


def make_job(
    *,
    seed: int = 0,
    label: str = "",
    priority: int = 0,
    verify: bool = False,
    timeout_s: float | None = None,
    layout: Callable[[npt.NDArray[Any]], npt.NDArray[Any]] | None = None,
    **sizes: Any,
) -> Job:
    """A GroupNorm call with random operands.

    Args:
        seed: Of the operands.
        label: Option of the call.
        priority: Option of the call.
        verify: Option of the call.
        timeout_s: Seconds from now until its deadline.
        layout: Turns each operand into one of another layout.
        sizes: Arguments of the record's `build`.
    """
    record = get_operator("group_norm_backward")
    call = record.build(**sizes)
    inputs = dict(record.make_inputs(call, np.random.default_rng(seed)))
    if layout is not None:
        inputs = {name: None if array is None else layout(array) for name, array in inputs.items()}
        call = call.with_inputs(**{k: None if a is None else content(a)[0] for k, a in inputs.items()})
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    options = CallOptions(priority=priority, label=label, verify=verify)
    planned = PlannedCall.alone(record, call, record.infer(call), options, f"request-{seed}", deadline)
    return Job(planned, inputs)


@pytest.fixture
def job() -> Callable[..., Job]:
    return make_job


class RunPool(Protocol):
    """Runs a scenario with a pool and looks at what is left of it."""

    def __call__(
        self,
        scenario: Callable[[DevicePool], Awaitable[None]],
        devices: str | tuple[str, ...] = "cpu:0",
        observer: PoolObserver | None = None,
        **changes: Any,
    ) -> None: ...


@pytest.fixture
def run_pool() -> RunPool:
    def run(
        scenario: Callable[[DevicePool], Awaitable[None]],
        devices: str | tuple[str, ...] = "cpu:0",
        observer: PoolObserver | None = None,
        **changes: Any,
    ) -> None:
        before = _resources()
        named = resolve(devices) if isinstance(devices, str) else devices
        asyncio.run(_play(scenario, replace(SETTINGS, devices=named, **changes), observer))
        # What an earlier test left to the garbage collector may go meanwhile; nothing may come.
        assert not _resources() - before

    return run


async def _play(
    scenario: Callable[[DevicePool], Awaitable[None]], settings: PoolSettings, observer: PoolObserver | None
) -> None:
    pool = await DevicePool.open(settings, observer)
    try:
        await scenario(pool)
        stats = pool.stats()
        assert (stats.queue_depth, stats.running, stats.uploads) == (0, 0, 0)
        assert (stats.input_arena_used_bytes, stats.output_arena_used_bytes) == (0, 0)
        assert stats.accepted_calls >= stats.finished_calls
    finally:
        await pool.close()
        await pool.close()  # may be called again


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


async def until(condition: Callable[[], object], timeout_s: float = 120.0) -> None:
    """Waits for something that no event announces."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.002)


@pytest.fixture
def eventually() -> Callable[..., Awaitable[None]]:
    return until
