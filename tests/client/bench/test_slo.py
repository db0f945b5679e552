"""Objectives: read as written, and held against what was measured; and who was the bottleneck."""

from __future__ import annotations

import math

import pytest
from tests.client.bench.made import GRID, result

from npugrad_client.bench.bottleneck import client_bound
from npugrad_client.bench.engine import Cpu
from npugrad_client.bench.record import DEADLINE_REASON
from npugrad_client.bench.result import Result
from npugrad_client.bench.slo import Slo
from npugrad_client.errors import DeadlineExceeded


@pytest.mark.parametrize(
    "text",
    [
        "p99=50ms,errors=0.1%",
        "p99.9=1000ms,max=2000ms,mean=5ms,errors=0%",
        "throughput=95/s,deadline_misses=1%,errors=2%",
    ],
)
def test_objectives_are_read_as_written(text: str) -> None:
    assert str(Slo.parse(text)) == text


def test_errors_must_be_none_where_nothing_is_said() -> None:
    assert str(Slo.parse("p99=50ms")) == "p99=50ms,errors=0%"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "slo: found nothing; expected p99=50ms"),
        ("fast=1ms", "slo: found 'fast=1ms'; expected p99=50ms"),
        ("p100=1ms", "slo: found 'p100=1ms'; expected"),
        ("p99=0.1%", "slo: p99: found '0.1%'; expected a duration"),
        ("p99=50", "slo: p99: found '50'; expected a duration with its unit, such as 50ms or 50s"),
        ("mean=0.5", "slo: mean: found '0.5'; expected a duration with its unit, such as 0.5ms or 0.5s"),
        ("errors=5ms", "slo: errors: found '5ms'; expected a share"),
        ("p99=1ms,p99=2ms", "slo: found p99 more than once"),
        ("throughput=0", "slo: throughput: found '0'; expected a rate above 0"),
    ],
)
def test_what_is_no_objective_is_told(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Slo.parse(text)


def met(text: str, made: Result) -> dict[str, bool]:
    return {each.objective.name: each.is_met for each in Slo.parse(text).judge(made)}


def test_objectives_are_held_against_a_run() -> None:
    made = result(0.02)
    assert met("p50=30ms,p99=1s,throughput=90/s", made) == {
        "p50": True,
        "p99": True,
        "throughput": True,
        "errors": True,
    }
    assert met("p50=10ms,max=15ms,mean=10ms,throughput=200/s", made) == {
        "p50": False,
        "max": False,
        "mean": False,
        "throughput": False,
        "errors": True,
    }


def test_failed_dropped_and_late_calls_count() -> None:
    made = result(rate=100, duration_s=10)
    for index in range(10):
        made.record.intended(GRID.name, float(index) / 2)
        if index % 2:
            made.record.dropped(GRID.name, float(index) / 2)
        else:
            made.record.failed(GRID.name, float(index) / 2, DEADLINE_REASON)
    assert met("errors=1%,deadline_misses=0.5%", made) == {"errors": True, "deadline_misses": True}
    assert met("errors=0.9%,deadline_misses=0.4%", made) == {"errors": False, "deadline_misses": False}
    assert "errors: found 0.99 %; promised at most 0.9 %" in [
        str(o) for o in Slo.parse("errors=0.9%").judge(made)
    ]


def test_the_reason_of_a_missed_deadline_is_that_of_the_client() -> None:
    assert DeadlineExceeded("x").reason == DEADLINE_REASON


def test_nothing_answered_keeps_no_latency_promise() -> None:
    made = result(rate=100, duration_s=1)
    empty = Result(made.scenario, type(made.record)(0.1), 1.0)
    (outcome, _) = Slo.parse("p99=1h").judge(empty)
    assert not outcome.is_met
    assert outcome.measured == math.inf


def test_a_client_that_keeps_up_is_not_the_bottleneck() -> None:
    assert client_bound(result(0.02)) == ()


def test_a_client_that_sends_late_is() -> None:
    reasons = client_bound(result(0.02, late_s=0.008))
    assert reasons[0] == "calls were sent late: p50 found 8.00 ms; expected at most 2.00 ms"


def test_a_client_that_reads_late_is() -> None:
    made = result(0.02)
    for _ in range(1000):
        made.record.loop_lag.add(0.05)
    assert [
        reason for reason in client_bound(made) if reason.startswith("answers were read late: p99 found 50")
    ]


def test_a_client_without_processor_is() -> None:
    made = result(0.02)
    busy = Result(made.scenario, made.record, made.elapsed_s, (Cpu(10, 1, 1), Cpu(10, 9.6, 11)))
    assert client_bound(busy) == ("worker 1 was busy: found 96 % of the time; expected at most 90 %",)
