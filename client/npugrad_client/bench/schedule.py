"""Intended start times of calls: one schedule per run, of which each worker sends its part.

A load that changes over time is made by mapping unit-rate arrivals (0, 1, 2, ... or a Poisson process)
through the inverse of the expected number of calls so far. Every worker makes the same schedule from the same
seed and takes every n-th call, so the total load is as requested for any number of workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from npugrad_client.bench.scenario import LoadStage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npugrad_client.bench.scenario import Scenario

    Floats = npt.NDArray[np.float64]
    Ints = npt.NDArray[np.int64]

_BLOCK = 16384


def schedule(scenario: Scenario, worker: int = 0) -> Iterator[tuple[float, int]]:
    """The calls of one worker of an open loop, in order.

    Args:
        scenario: What is sent.
        worker: Index of the worker.

    Yields:
        Intended start in seconds, negative in the warm-up, and the index of the workload.
    """
    first = 0
    for starts, workloads in _blocks(scenario):
        if scenario.max_calls:
            starts = starts[: scenario.max_calls - first]
            workloads = workloads[: scenario.max_calls - first]
        mine = slice((worker - first) % scenario.workers, None, scenario.workers)
        yield from zip(starts[mine].tolist(), workloads[mine].tolist(), strict=True)
        first += len(starts)
        if first == scenario.max_calls:
            return


def planned_end_s(scenario: Scenario) -> float:
    """When the measured part is to end: with its duration, or where an open loop has no calls left."""
    left = scenario.max_calls
    for starts, _ in _blocks(scenario) if left and not scenario.is_closed else ():
        if left < len(starts):
            return max(float(starts[left]), 0.0)
        left -= len(starts)
    return scenario.duration_s


def closed_mix(scenario: Scenario, caller: int) -> Iterator[int]:
    """Endless workload indices for one caller of a closed loop."""
    random = np.random.default_rng((scenario.seed, caller))
    while True:
        yield from _mixed(scenario, random, _BLOCK).tolist()


def _blocks(scenario: Scenario) -> Iterator[tuple[Floats, Ints]]:
    mix, intervals = (np.random.default_rng((scenario.seed, stream)) for stream in (1, 2))
    if scenario.arrival == "trace":
        yield from _trace_blocks(scenario, mix)
        return
    stages = _with_warm_up(scenario)
    knots = _expected_calls(stages)
    reached = 0.0
    while reached < knots[-1]:
        if scenario.arrival == "poisson":
            units = reached + np.cumsum(intervals.exponential(size=_BLOCK))
            reached = float(units[-1])
        else:
            units = reached + np.arange(_BLOCK, dtype=np.float64)
            reached += _BLOCK
        starts = _times(stages, knots, units[units < knots[-1]]) - scenario.warm_up_s
        yield starts, _mixed(scenario, mix, len(starts))


def _trace_blocks(scenario: Scenario, mix: np.random.Generator) -> Iterator[tuple[Floats, Ints]]:
    for first in range(0, len(scenario.trace), _BLOCK):
        block = scenario.trace[first : first + _BLOCK]
        starts = np.array([start for start, _ in block], np.float64)
        named = np.array([workload for _, workload in block], np.int64)
        yield starts, np.where(named < 0, _mixed(scenario, mix, len(block)), named)


def _mixed(scenario: Scenario, random: np.random.Generator, count: int) -> Ints:
    weights = np.array([each.weight for each in scenario.workloads])
    return np.searchsorted(np.cumsum(weights / weights.sum())[:-1], random.random(count), side="right")


def _with_warm_up(scenario: Scenario) -> tuple[LoadStage, ...]:
    if not scenario.warm_up_s:
        return scenario.stages
    level = scenario.level(-1.0)
    return (LoadStage(level, level, scenario.warm_up_s), *scenario.stages)


def _expected_calls(stages: tuple[LoadStage, ...]) -> Floats:
    """Expected number of calls before each stage, and at the end."""
    areas = [(stage.start + stage.end) / 2 * stage.duration_s for stage in stages]
    return np.cumsum([0.0, *areas])


def _times(stages: tuple[LoadStage, ...], knots: Floats, units: Floats) -> Floats:
    """When the expected number of calls reaches each of `units`."""
    which = np.searchsorted(knots, units, side="right") - 1
    begins = np.cumsum([0.0, *(stage.duration_s for stage in stages)])
    rates = np.array([stage.start for stage in stages])
    slopes = np.array([(stage.end - stage.start) / stage.duration_s for stage in stages])
    area, rate, slope = units - knots[which], rates[which], slopes[which]
    # The root of rate * t + slope * t^2 / 2 = area, in a form that also works without a slope.
    root = np.sqrt(np.maximum(rate * rate + 2 * slope * area, 0.0))
    within = np.divide(2 * area, rate + root, out=np.zeros_like(area), where=rate + root > 0)
    times: Floats = begins[which] + within
    return times
