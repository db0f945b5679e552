"""Scenarios and results for tests."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from npugrad.call import ExecutionInfo
from npugrad.products import Product
from npugrad_client.bench.engine import Cpu
from npugrad_client.bench.record import Record
from npugrad_client.bench.result import Result
from npugrad_client.bench.scenario import LoadStage, Scenario, WeightedWorkload

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
    random, record = np.random.default_rng(seed), Record(made.window_s)
    for at_s in np.arange(0.0, duration_s, 1 / rate).tolist():
        took_s = latency_s * float(np.exp(random.normal(0.0, spread)))
        record.intended(GRID.name, at_s)
        record.sent(at_s, at_s + late_s)
        device = f"test:{int(at_s * rate) % 2}"
        record.answered(GRID.name, at_s, at_s + late_s, at_s + took_s, answer(took_s / 2, device))
        record.loop_lag.add(0.0001)
    return Result(made.as_dict(), record, duration_s, (Cpu(duration_s, duration_s / 10, duration_s / 5),))
