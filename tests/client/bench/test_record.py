"""Records, distributions and results: nothing is lost by merging, nor by JSON."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.client.bench.made import GRID, answer, result

from npugrad_client.bench.record import STAGES, Record
from npugrad_client.bench.result import Result, load_result
from npugrad_client.bench.scenario import ScenarioError
from npugrad_client.bench.sketch import Distribution, Sketch, bucket, bucket_s

SECONDS = st.lists(st.floats(1e-6, 1000.0), min_size=1, max_size=50)


@settings(max_examples=25, deadline=None)
@given(SECONDS)
def test_percentiles_are_near_the_values(values: list[float]) -> None:
    exact, sketch = Distribution(), Sketch()
    for value in values:
        exact.add(value)
        sketch.add(value)
    for percentile in (50.0, 90.0, 100.0):
        rank = max(int(np.ceil(len(values) * percentile / 100 - 1e-9)), 1)
        true = sorted(values)[rank - 1]
        assert exact.percentile_s(percentile) == pytest.approx(true, rel=1e-3, abs=2e-6)
        assert sketch.percentile_s(percentile) == pytest.approx(true, rel=0.006, abs=1.01e-6)


@settings(max_examples=15, deadline=None)
@given(SECONDS, SECONDS)
def test_merging_and_coding_keep_all(left: list[float], right: list[float]) -> None:
    parts, whole = (Distribution(), Distribution()), Distribution()
    for part, values in zip(parts, (left, right), strict=True):
        for value in values:
            part.add(value)
            whole.add(value)
    merged = Distribution.decode(parts[0].encode())
    merged.merge(parts[1])
    assert merged.count == len(left) + len(right)
    assert [merged.percentile_s(p) for p in (1, 50, 90, 100)] == [
        whole.percentile_s(p) for p in (1, 50, 90, 100)
    ]


def test_what_is_out_of_range_is_counted_at_its_end() -> None:
    found = Distribution()
    found.add(0.0)
    found.add(1e9)
    assert found.percentile_s(1) == 1e-6
    assert found.percentile_s(100) == pytest.approx(86400, rel=1e-3)


def test_an_empty_distribution_is_zero() -> None:
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
    assert (record.latency.count, record.lateness.count, record.devices["test:0 (test)"].latency.count) == (
        1,
        1,
        1,
    )
    assert record.windows[-1].tally == record.windows[0].tally, "but kept, for the picture over time"


def test_two_workers_make_one_record() -> None:
    parts = [result(seed=seed).record for seed in (1, 2)]
    merged = Record(parts[0].window_s)
    for part in parts:
        merged.merge(Record.from_dict(json.loads(json.dumps(part.as_dict()))))
    assert merged.total.answered == sum(part.total.answered for part in parts) == merged.latency.count
    assert merged.stage_sums["run"] == pytest.approx(sum(part.stage_sums["run"] for part in parts))
    assert {n: w.completed for n, w in merged.windows.items()} == {
        n: sum(part.windows[n].completed for part in parts) for n in parts[0].windows
    }
    assert merged.workloads[GRID.name].tally.answered == merged.total.answered


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
    assert (values["intended"], values["answered"], values["failed"], values["dropped"]) == (
        1000,
        1000,
        {},
        0,
    )
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
        ("[]", "found format 'list'; expected 'npugrad-bench/1'"),
        ('{"format": "npugrad-bench/1"}', "not a whole report: KeyError 'scenario'"),
        ('{"format": "other"}', "found format 'other'"),
    ],
)
def test_what_is_no_result_is_told(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text, "utf-8")
    with pytest.raises(ScenarioError, match=message):
        load_result(path)


def test_a_result_without_answers_has_figures() -> None:
    record = Record(0.1)
    empty = Result(result().scenario, record, 0.0)
    assert empty.error_share == 1
    assert empty.throughput_per_s == 0
    assert empty.summary()["latency_s"]["mean"] == 0
    assert not empty.succeeded
