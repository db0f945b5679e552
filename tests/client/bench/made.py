"""Scenarios and results for tests."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import multiprocessing
import selectors
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from npugrad.call import ExecutionInfo
from npugrad.products import Product
from npugrad_client.bench.engine import Cpu, Engine
from npugrad_client.bench.record import Record
from npugrad_client.bench.result import Result
from npugrad_client.bench.scenario import LoadStage, Scenario, WeightedWorkload
from npugrad_client.bench.schedule import planned_end_s
from npugrad_client.bench.show import show_result

GRID = WeightedWorkload("grid_sampler_2d_backward")
SPAWNING = multiprocessing.get_context
"""How workers are started outside of tests."""


@pytest.fixture(scope="module", autouse=True)
def forked_workers() -> Iterator[None]:
    """Fork workers from a process that has imported theirs: the imports take most of a second each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["npugrad_client.bench.worker"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", lambda method: context)
        yield


def scenario(
    arrival: Any = "constant", level: float = 50.0, duration_s: float = 2.0, **other: Any
) -> Scenario:
    workloads = other.pop("workloads", (GRID,))
    stages = other.pop("stages", (LoadStage(level, level, duration_s),))
    return Scenario(workloads, stages, arrival=arrival, **other)


def answer(run_s: float, device: str = "test:0") -> ExecutionInfo:
    return ExecutionInfo("test", device, Product.ATLAS_A2, queued_s=run_s / 10, run_s=run_s)


def record_of(made: Scenario) -> Record:
    return Record(made.window_s, is_closed=made.is_closed, end_s=planned_end_s(made))


def result(
    latency_s: float = 0.02,
    *,
    seed: int = 1,
    rate: float = 100.0,
    duration_s: float = 20.0,
    spread: float = 0.2,
    arrival: Any = "constant",
    late_s: float = 0.0002,
    **other: Any,
) -> Result:
    """A run whose latencies are log-normal about `latency_s`."""
    made = scenario(arrival, rate, duration_s, **other)
    random, record = np.random.default_rng(seed), record_of(made)
    for at_s in np.arange(0.0, duration_s, 1 / rate).tolist():
        took_s = latency_s * float(np.exp(random.normal(0.0, spread)))
        record.intended(GRID.name, at_s)
        record.sent(at_s, at_s + late_s)
        device = f"test:{int(at_s * rate) % 2}"
        record.answered(GRID.name, at_s, at_s + late_s, at_s + took_s, answer(took_s / 2, device))
        record.loop_lag.add(0.0001)
    record.close()
    return Result(made.as_dict(), record, duration_s, (Cpu(duration_s, duration_s / 10, duration_s / 5),))


def printed(show: Any, what: Any, width: int = 200) -> str:
    file = io.StringIO()
    show(Console(file=file, width=width), what)
    return file.getvalue()


shown = partial(printed, show_result)


class _Clock(selectors.SelectSelector):
    """Waits no time, and lets its own pass instead."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now_s += timeout or 0.0
        return super().select(0)


class _VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes at once, and exactly as its timers say."""

    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s


def virtual_run(made: Scenario, seconds: Sequence[float], devices: int = 0, stop_s: float = 0.0) -> Result:
    """A run against a server whose calls take these seconds in turn, in virtual time.

    Args:
        made: What is sent.
        seconds: How long calls run; those after the last again as long as the first.
        devices: How many run at once, and the others wait; 0 for any number.
        stop_s: When sending is stopped; 0 for never.
    """
    took = itertools.cycle(seconds)

    async def work() -> tuple[list[Engine], float]:
        free = asyncio.Semaphore(devices or 10**6)

        async def send(workload: int, server: int) -> ExecutionInfo:
            async with free:
                run_s = next(took)
                await asyncio.sleep(run_s)
            return answer(run_s)

        loop = asyncio.get_running_loop()
        epoch_s = loop.time() + made.warm_up_s
        engines = [Engine(made, worker, send, record_of(made), epoch_s) for worker in range(made.workers)]
        if stop_s:
            for engine in engines:
                loop.call_at(epoch_s + stop_s, engine.stop)
        await asyncio.gather(*(engine.run() for engine in engines))
        return engines, max(engine.ended_s for engine in engines)

    loop = _VirtualLoop()
    try:
        engines, elapsed_s = loop.run_until_complete(work())
    finally:
        loop.close()
    record = Record(made.window_s)
    for engine in engines:
        record.merge(Record.from_dict(json.loads(json.dumps(engine.record.as_dict()))))
    return Result(made.as_dict(), record, elapsed_s, is_interrupted=bool(stop_s))
