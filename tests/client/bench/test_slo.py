"""Objectives: read as written, and held against what was measured; and who was the bottleneck."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

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
        ("p99=1ms,p99=2ms", "slo: p99 appears more than once"),
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
    kept = met("p50=30ms,p99=1s,throughput=90/s", made)
    assert kept == dict.fromkeys(("p50", "p99", "throughput", "errors"), True)
    missed = met("p50=10ms,max=15ms,mean=10ms,throughput=200/s", made)
    assert missed == {**dict.fromkeys(("p50", "max", "mean", "throughput"), False), "errors": True}


def failing(answers: int, failures: int, reason: str = "QUEUE_FULL") -> Result:
    """Answers after 10 ms each, and as many calls that failed or were dropped, in turn."""
    made = result(rate=float(answers), duration_s=1.0, latency_s=0.01, spread=0.0)
    for index in range(failures):
        made.record.intended(GRID.name, 0.5)
        if index % 2:
            made.record.dropped(GRID.name, 0.5)
        else:
            made.record.failed(GRID.name, 0.5, reason)
    return made


def test_failed_dropped_and_late_calls_count() -> None:
    made = failing(1000, 10, DEADLINE_REASON)
    assert met("errors=1%,deadline_misses=0.5%", made) == {"errors": True, "deadline_misses": True}
    assert met("errors=0.9%,deadline_misses=0.4%", made) == {"errors": False, "deadline_misses": False}
    told = [str(outcome) for outcome in Slo.parse("errors=0.9%").judge(made)]
    assert "errors: 0.99 % (objective: at most 0.9 %)" in told
    assert DeadlineExceeded("x").reason == DEADLINE_REASON, "that of the client"


@pytest.mark.parametrize(
    ("failures", "kept"),
    [(0, ["p50", "p99", "p99.9", "max"]), (2, ["p50", "p99"]), (12, ["p50"]), (1100, [])],
)
def test_percentiles_count_calls_that_were_not_served_as_infinitely_slow(
    failures: int, kept: list[str]
) -> None:
    found = met("p50=1s,p99=1s,p99.9=1s,max=1s,errors=100%", failing(1000, failures))
    assert [name for name, is_met in found.items() if is_met] == [*kept, "errors"]


def test_a_percentile_among_the_answers_is_that_of_its_rank_among_all_calls() -> None:
    """A tenth of the calls failed, so the 90th percentile is the slowest answer."""
    made = failing(900, 100)
    made.record.latency.add(0.0)  # one answer less than 10 ms, and one of 5 s
    made.record.latency.add(5.0)
    (p89, p90, *_) = Slo.parse("p89=1s,p90.1=1s,errors=100%").judge(made)
    assert p89.measured == pytest.approx(0.01, rel=0.01)
    assert p90.measured == math.inf
    told = "p90.1: no answer, because 10 % of the calls were not served (objective: at most 1.00 s)"
    assert str(p90) == told
    assert p90.as_dict() == {
        **{"name": "p90.1", "limit": 1.0, "measured": None, "verdict": "missed"},
        **{"calls": 1000, "calls_needed": 11},
    }


@pytest.mark.parametrize(("percentile", "needed"), [(0, 1), (50, 2), (90, 10), (99, 100), (99.9, 1000)])
def test_a_percentile_takes_as_many_calls_as_have_one_beyond_it(percentile: float, needed: int) -> None:
    """Of fewer calls, it would be the slowest, however many a long run would have beyond the limit."""
    name = f"p{percentile:g}"
    (enough, _) = Slo.parse(f"{name}=1s").judge(failing(needed, 0))
    assert (enough.verdict, enough.as_dict()["calls_needed"]) == ("met", needed)
    if needed > 1:
        for limit in ("1s", "1ms"):
            (few, errors) = Slo.parse(f"{name}={limit}").judge(failing(needed - 1, 0))
            assert (few.verdict, errors.verdict) == ("not judged", "met")
            values = few.as_dict()
            assert (values["measured"], values["calls"]) == (None, needed - 1)
            assert f"{name}: not known from {needed - 1} answer" in str(few)


def test_calls_that_were_not_served_count_among_those_that_a_percentile_takes() -> None:
    few, known = (Slo.parse("p99=1s,errors=100%").judge(failing(60, count))[0] for count in (39, 40))
    told = "p99: not known from 99 calls, 60 of them answered; it takes 100 (objective: at most 1.00 s)"
    assert (few.verdict, str(few)) == ("not judged", told)
    assert known.verdict == "missed"


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        ({}, []),
        ({"is_interrupted": True}, ["interrupted"]),
        ({"died": "cannot reach it"}, ["died"]),
        ({"died": "a worker died", "is_interrupted": True}, ["died", "interrupted"]),
    ],
)
def test_a_run_that_has_a_flaw_meets_no_objective(change: dict[str, Any], kinds: list[str]) -> None:
    made = replace(result(0.02, slo=Slo.parse("p99=1h,throughput=1/s")), **change)
    values = json.loads(made.as_json())
    assert [each["kind"] for each in values["flaws"]] == kinds
    verdict = "not judged" if kinds else "met"
    assert [each["verdict"] for each in values["objectives"]] == [verdict] * 3
    again = Result.from_dict(values)
    assert (again.died, again.is_interrupted) == (made.died, made.is_interrupted)
    assert [outcome.is_met for outcome in again.outcomes] == [not kinds] * 3


def test_a_client_that_was_the_bottleneck_meets_an_objective_only_where_that_is_allowed() -> None:
    late = result(0.02, late_s=0.1, slo=Slo.parse("p99=1h"))
    assert [each.verdict for each in late.outcomes] == ["not judged"] * 2
    allowed = Result.from_dict(replace(late, is_client_bound_allowed=True).as_dict())
    assert [each.verdict for each in allowed.outcomes] == ["met"] * 2
    assert [each["kind"] for each in allowed.as_dict()["flaws"]] == ["client_bound"]


def test_nothing_answered_keeps_no_latency_promise() -> None:
    made = result(rate=100, duration_s=1)
    empty = Result(made.scenario, type(made.record)(0.1), 1.0)
    (outcome, _) = Slo.parse("p99=1h").judge(empty)
    assert not outcome.is_met
    assert outcome.measured == math.inf


def test_who_is_the_bottleneck() -> None:
    made = result(0.02)
    assert client_bound(made) == (), "a client that keeps up"
    late = client_bound(result(0.02, late_s=0.008))
    assert late[0] == "calls were sent late: by 8.00 ms at p50 (limit: 2.00 ms)"
    busy = Result(made.scenario, made.record, made.elapsed_s, (Cpu(10, 1, 1), Cpu(10, 9.6, 11)))
    assert client_bound(busy) == ("the event loop of worker 1 was busy 96 % of the time (limit: 90 %)",)
    for _ in range(1000):
        made.record.loop_lag.add(0.05)
    assert [reason for reason in client_bound(made) if reason.startswith("answers were read late: by 50")]
