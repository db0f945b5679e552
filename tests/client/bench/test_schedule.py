"""Schedules: the rate asked for, the same from the same seed, and whole however many workers share it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.client.bench.made import GRID, scenario

from npugrad_client.bench.scenario import LoadStage, Scenario, ScenarioError, WeightedWorkload
from npugrad_client.bench.scenario_file import trace_stage
from npugrad_client.bench.schedule import closed_mix, schedule

NORM = WeightedWorkload("group_norm_backward", weight=3)


def starts(made: Scenario, worker: int = 0) -> list[float]:
    return [start for start, _ in schedule(made, worker)]


def test_a_constant_rate_has_equal_intervals() -> None:
    assert starts(scenario(level=50, duration_s=2)) == pytest.approx(np.arange(100) / 50)


def test_the_warm_up_is_before_the_start() -> None:
    found = starts(scenario(level=50, duration_s=1, warm_up_s=0.5))
    assert found == pytest.approx(np.arange(-25, 50) / 50)


def test_a_ramp_has_calls_where_it_is_high() -> None:
    found = np.array(starts(scenario(stages=(LoadStage(0, 100, 10.0),))))
    assert len(found) == 500, "half of the highest rate"
    # After t seconds of a ramp from 0 to r in d: r * t^2 / (2 * d) calls.
    assert found == pytest.approx(np.sqrt(np.arange(500) / 5))


def test_stages_follow_each_other() -> None:
    found = np.array(
        starts(scenario(stages=(LoadStage(10, 10, 2.0), LoadStage(100, 100, 1.0), LoadStage(20, 0, 2.0))))
    )
    assert [int(np.sum((found >= a) & (found < b))) for a, b in ((0, 2), (2, 3), (3, 5))] == [20, 100, 20]


def test_a_long_schedule_goes_on_over_blocks() -> None:
    found = np.diff(starts(scenario(level=10000, duration_s=5)))
    assert len(found) == 49999
    assert np.abs(found - 1e-4).max() < 1e-9


def test_poisson_intervals_follow_the_exponential_distribution() -> None:
    """Kolmogorov-Smirnov: the largest distance from the exponential distribution is that of chance."""
    made = scenario("poisson", level=500, duration_s=40, workers=1)
    gaps = np.diff(starts(made))
    expected = 1 - np.exp(-np.sort(gaps) * 500)
    steps = np.arange(len(gaps) + 1) / len(gaps)
    distance = max(np.abs(steps[1:] - expected).max(), np.abs(expected - steps[:-1]).max())
    assert distance < 1.63 / math.sqrt(len(gaps)), "what 99 % of samples keep"
    lagged = np.corrcoef(gaps[:-1], gaps[1:])
    assert abs(lagged[0, 1]) < 4 / math.sqrt(len(gaps)), "one interval tells nothing of the next"


def test_counts_of_poisson_arrivals_are_as_spread_as_they_are_many() -> None:
    found = np.array(starts(scenario("poisson", level=200, duration_s=100)))
    counts = np.bincount((found * 10).astype(int))[:1000]
    assert counts.mean() == pytest.approx(20, rel=0.05)
    assert counts.var() == pytest.approx(20, rel=0.2)


def test_the_seed_fixes_everything() -> None:
    first, again, other = (list(schedule(scenario("poisson", seed=seed))) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@settings(max_examples=40, deadline=None)
@given(
    workers=st.integers(1, 7),
    arrival=st.sampled_from(["constant", "poisson"]),
    stages=st.lists(
        st.builds(LoadStage, st.floats(0, 300), st.floats(1, 300), st.floats(0.1, 5.0)),
        min_size=1,
        max_size=4,
    ),
    max_calls=st.sampled_from([0, 1, 13, 200]),
    warm_up_s=st.sampled_from([0.0, 0.7]),
)
def test_workers_share_one_schedule(
    workers: int, arrival: str, stages: list[LoadStage], max_calls: int, warm_up_s: float
) -> None:
    common: dict[str, Any] = {
        "stages": tuple(stages),
        "workloads": (GRID, NORM),
        "max_calls": max_calls,
        "warm_up_s": warm_up_s,
    }
    assume(sum((each.start + each.end) / 2 * each.duration_s for each in stages) >= 1)
    whole = list(schedule(scenario(arrival, **common)))
    parts = [list(schedule(scenario(arrival, workers=workers, **common), k)) for k in range(workers)]
    assert sorted(itertools.chain(*parts)) == sorted(whole)
    times = [start for start, _ in whole]
    assert times == sorted(times)
    assert all(-warm_up_s <= t <= sum(s.duration_s for s in stages) + 1e-9 for t in times)
    if max_calls:
        assert len(whole) <= max_calls


def test_the_mix_has_the_weights() -> None:
    made = scenario(level=1000, duration_s=20, workloads=(GRID, NORM))
    drawn = np.array([workload for _, workload in schedule(made)])
    assert drawn.mean() == pytest.approx(0.75, abs=0.02)
    caller = np.array(list(itertools.islice(closed_mix(made, 3), 20000)))
    assert caller.mean() == pytest.approx(0.75, abs=0.02)
    assert caller.tolist() != list(itertools.islice(closed_mix(made, 4), 20000)), "each caller its own order"


def test_a_trace_has_no_warm_up() -> None:
    """Nothing would be sent in it: the trace says when calls start."""
    trace = ((0.0, 0), (1.0, 0))
    with pytest.raises(ScenarioError, match=r"warm_up: found 5\.0; expected none with a trace"):
        scenario("trace", stages=(trace_stage(trace),), trace=trace, warm_up_s=5.0)


def test_a_trace_is_sent_as_it_is() -> None:
    trace = ((0.0, 1), (0.5, 0), (0.5, -1), (2.0, 1))
    stage = trace_stage(trace)
    made = scenario("trace", stages=(stage,), trace=trace, workloads=(GRID, NORM))
    found = list(schedule(made))
    assert [start for start, _ in found] == [0.0, 0.5, 0.5, 2.0]
    assert [found[0][1], found[1][1], found[3][1]] == [1, 0, 1]
    assert made.duration_s > 2.0, "the last call has an interval too"
