"""Records, distributions and results: right as NumPy says, and nothing is lost by merging, nor by JSON."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.client.bench.made import GRID, answer, result

from npugrad_client.bench.record import STAGES, Record
from npugrad_client.bench.result import load_result
from npugrad_client.bench.scenario import ScenarioError
from npugrad_client.bench.sketch import Distribution, Sketch, bucket, bucket_s

RANKS = (0.0, 1.0, 50.0, 90.0, 99.0, 99.9, 99.99, 100.0)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 1500),
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
    for percentile in RANKS:
        # 99.9 % of 1,000 is 999 or a rounding above it: the next value either way is as right.
        rank = round(percentile / 100 * (count - 1))
        low, high = float(values[max(rank - 1, 0)]), float(values[min(rank + 1, count - 1)])
        assert low * 0.999 - 2e-6 <= distribution.percentile_s(percentile) <= high * 1.001 + 2e-6
        assert low * 0.994 - 1e-6 <= sketch.percentile_s(percentile) <= high * 1.006 + 1e-6
    assert distribution.mean_s == pytest.approx(values.mean(), rel=1e-3, abs=2e-6)


@settings(max_examples=8, deadline=None)
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
        merged.merge(Record.from_dict(json.loads(json.dumps(part.as_dict()))))
    _same(merged.as_dict(), whole.as_dict())


def _same(a: Any, b: Any) -> None:
    """Equal, but for the last bits of sums of seconds; histograms by what they hold."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            if key in ("latency", "service", "lateness", "loop_lag") and isinstance(a[key], str):
                one, other = Distribution.decode(a[key]), Distribution.decode(b[key])
                assert one.count == other.count
                assert [one.percentile_s(p) for p in RANKS] == [other.percentile_s(p) for p in RANKS]
            else:
                _same(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            _same(one, other)
    else:
        assert a == (pytest.approx(b, rel=1e-9) if isinstance(b, float) else b)


def test_what_is_out_of_range_is_counted_at_its_end_and_nothing_is_zero() -> None:
    found = Distribution()
    found.add(0.0)
    found.add(1e9)
    assert found.percentile_s(1) == 1e-6
    assert found.percentile_s(100) == pytest.approx(86400, rel=1e-3)
    assert (Distribution().percentile_s(99), Distribution().mean_s, Sketch().percentile_s(99)) == (0, 0, 0)


@pytest.mark.parametrize("text", ["", "AAAA", "not base64!", "HISTFAAAACF4nJNpmSzMwMDAxQABzFCaEUzOmNZg"])
def test_what_is_no_histogram_is_told(text: str) -> None:
    with pytest.raises(ValueError, match="not an HDR histogram"):
        Distribution.decode(text)


def test_buckets_are_one_percent_wide() -> None:
    assert bucket_s(bucket(0.02)) == pytest.approx(0.02, rel=0.005)
    assert bucket(0.02 * 1.01) == bucket(0.02) + 1
    assert bucket(0.0) == 0


def test_latency_counts_from_the_intended_start() -> None:
    record = Record(0.5)
    record.intended("w", 1.0)
    record.sent(1.0, 1.4)
    record.answered("w", 1.0, 1.4, 1.5, answer(0.05))
    assert record.latency.percentile_s(50) == pytest.approx(0.5, rel=1e-3)
    assert record.service.percentile_s(50) == pytest.approx(0.1, rel=1e-3)
    assert record.lateness.percentile_s(50) == pytest.approx(0.4, rel=1e-3)
    assert record.window(1.0).tally.answered == 1
    assert record.window(1.0).completed == 0
    assert record.window(1.5).completed == 1
    assert record.stage_sums["elsewhere"] == pytest.approx(0.1 - 0.05 - 0.005)
    assert record.devices["test:0 (test)"].run_s == pytest.approx(0.05)


def test_the_warm_up_is_not_measured() -> None:
    record = Record(0.5)
    for at_s in (-0.2, 0.2):
        record.intended("w", at_s)
        record.sent(at_s, at_s)
        record.answered("w", at_s, at_s, at_s + 0.1, answer(0.05))
        record.intended("w", at_s)
        record.failed("w", at_s, "QUEUE_FULL")
        record.intended("w", at_s)
        record.dropped("w", at_s)
    total = record.total
    assert (total.intended, total.answered, total.dropped, total.failed) == (3, 1, 1, {"QUEUE_FULL": 1})
    assert record.latency.count == record.lateness.count == 1
    assert record.devices["test:0 (test)"].latency.count == 1
    assert record.windows[-1].tally == record.windows[0].tally, "but kept, for the picture over time"


def test_a_result_is_the_same_from_its_json(tmp_path: Path) -> None:
    made = result()
    path = tmp_path / "a.json"
    path.write_text(made.as_json(), "utf-8")
    again = load_result(path)
    assert again.as_dict() == made.as_dict()
    assert again.summary() == made.summary()


def test_the_summary_adds_up() -> None:
    made = result(0.02, rate=100, duration_s=10)
    values = made.summary()
    counts = [values[key] for key in ("intended", "answered", "failed", "dropped")]
    assert counts == [1000, 1000, {}, 0]
    assert values["offered_per_s"] == pytest.approx(100)
    assert values["throughput_per_s"] == pytest.approx(100, rel=0.01)
    assert values["latency_s"]["p50"] == pytest.approx(0.02, rel=0.05)
    assert sum(values["stages_mean_s"].values()) == pytest.approx(values["service_s"]["mean"], rel=0.02)
    assert values["devices"] == {"test:0 (test)": 499, "test:1 (test)": 501}, "rounding"
    assert list(values["stages_mean_s"]) == list(STAGES)


def test_a_spreadsheet_has_a_row_for_each_window() -> None:
    made = result(duration_s=10)
    rows = list(csv.DictReader(io.StringIO(made.as_csv())))
    assert len(rows) == len(made.record.windows)
    assert sum(int(row["answered"]) for row in rows) == made.answered
    assert float(rows[3]["p50_s"]) == pytest.approx(0.02, rel=0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting property name"),
        ("[]", "found format 'list'; expected 'npugrad-bench/2'"),
        ('{"format": "npugrad-bench/2"}', "not a whole report: KeyError 'scenario'"),
        (
            '{"format": "npugrad-bench/1"}',
            "found format 'npugrad-bench/1'; expected 'npugrad-bench/2'. Measure again: rates were",
        ),
        ('{"format": "other"}', "found format 'other'"),
        ('{"capacity_per_s": 78}', "This is what --find-capacity found; give a run with --rate"),
    ],
)
def test_what_is_no_result_is_told(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text, "utf-8")
    with pytest.raises(ScenarioError, match=message):
        load_result(path)
