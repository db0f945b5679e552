"""Figures against what NumPy says, and claims about chance against many draws."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.client.bench.made import GRID, answer, result, scenario

from npugrad_client.bench.compare import compare
from npugrad_client.bench.record import Record
from npugrad_client.bench.schedule import schedule
from npugrad_client.bench.sketch import Distribution, Sketch

_RANKS = (0.0, 1.0, 50.0, 90.0, 99.0, 99.9, 99.99, 100.0)


@pytest.mark.deep
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 3000),
    median_s=st.floats(1e-4, 10),
    spread=st.floats(0, 2),
)
def test_percentiles_are_those_of_numpy(seed: int, count: int, median_s: float, spread: float) -> None:
    values = median_s * np.exp(np.random.default_rng(seed).normal(0, spread, count))
    distribution, sketch = Distribution(), Sketch()
    for value in values.tolist():
        distribution.add(value)
        sketch.add(value)
    values.sort()
    for percentile in _RANKS:
        # 99.9 % of 3,000 is 2,997 or a rounding above it: the next value either way is as right.
        rank = round(percentile / 100 * (count - 1))
        low, high = float(values[max(rank - 1, 0)]), float(values[min(rank + 1, count - 1)])
        assert low * 0.999 - 2e-6 <= distribution.percentile_s(percentile) <= high * 1.001 + 2e-6
        assert low * 0.994 - 1e-6 <= sketch.percentile_s(percentile) <= high * 1.006 + 1e-6
    assert distribution.mean_s == pytest.approx(values.mean(), rel=1e-3, abs=2e-6)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), workers=st.integers(1, 5))
def test_records_of_several_workers_are_that_of_one(seed: int, workers: int) -> None:
    """Whoever counts a call, the merged record is the same to the last bucket."""
    random = np.random.default_rng(seed)
    whole, parts = Record(0.1), [Record(0.1) for _ in range(workers)]
    for index in range(300):
        at_s, took_s = float(random.uniform(-0.5, 3)), float(random.exponential(0.02))
        server = f"host{index % 2}"
        for record in (whole, parts[index % workers]):
            record.intended(GRID.name, at_s)
            if index % 11 == 0:
                record.dropped(GRID.name, at_s)
                continue
            record.sent(at_s, at_s, server)
            if index % 7 == 0:
                record.failed(GRID.name, at_s, "QUEUE_FULL", server)
            else:
                record.answered(GRID.name, at_s, at_s, at_s + took_s, answer(took_s / 2), server)
    merged = Record(0.1)
    for part in parts:
        merged.merge(Record.from_dict(part.as_dict()))
    _same(merged.as_dict(), whole.as_dict())


def _same(a: Any, b: Any) -> None:
    """Equal, but for the last bits of sums of seconds; histograms by what they hold."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            if key in ("latency", "service", "lateness", "loop_lag") and isinstance(a[key], str):
                one, other = Distribution.decode(a[key]), Distribution.decode(b[key])
                assert one.count == other.count
                assert [one.percentile_s(p) for p in _RANKS] == [other.percentile_s(p) for p in _RANKS]
            else:
                _same(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            _same(one, other)
    else:
        assert a == (pytest.approx(b, rel=1e-9) if isinstance(b, float) else b)


def test_poisson_intervals_follow_the_exponential_distribution() -> None:
    """Kolmogorov-Smirnov: the largest distance from the exponential distribution is that of chance."""
    made = scenario("poisson", level=500, duration_s=40, workers=1)
    gaps = np.sort(np.diff([start for start, _ in schedule(made)]))
    expected = 1 - np.exp(-gaps * 500)
    steps = np.arange(len(gaps) + 1) / len(gaps)
    distance = max(np.abs(steps[1:] - expected).max(), np.abs(expected - steps[:-1]).max())
    assert distance < 1.63 / math.sqrt(len(gaps)), "what 99 % of samples keep"
    lagged = np.corrcoef(
        np.diff([s for s, _ in schedule(made)])[:-1], np.diff([s for s, _ in schedule(made)])[1:]
    )
    assert abs(lagged[0, 1]) < 4 / math.sqrt(len(gaps)), "one interval tells nothing of the next"


def test_counts_of_poisson_arrivals_are_as_spread_as_they_are_many() -> None:
    starts = np.array([start for start, _ in schedule(scenario("poisson", level=200, duration_s=100))])
    counts = np.bincount((starts * 10).astype(int))[:1000]
    assert counts.mean() == pytest.approx(20, rel=0.05)
    assert counts.var() == pytest.approx(20, rel=0.2)


@pytest.mark.deep
@pytest.mark.slow
def test_intervals_cover_what_is_true() -> None:
    """Of two processes whose medians differ by a tenth, nearly every joint 95 % interval holds the tenth."""
    covered, spans = 0, []
    for seed in range(60):
        a, b = (
            result(median, seed=1000 + 2 * seed + index, duration_s=12, rate=50)
            for index, median in enumerate((0.02, 0.022))
        )
        p50 = compare(a, b).differences[0]
        covered += p50.low <= 0.1 <= p50.high
        spans.append(p50.high - p50.low)
    assert covered >= 54, "of 60; fewer have a chance below 1 in 100 at 95 %"
    assert np.mean(spans) < 0.15, "and not because they hold everything"
