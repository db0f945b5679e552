"""Comparisons: alike stays alike, slower is found, and what cannot be told is not told."""

from __future__ import annotations

import json
import math
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.client.bench.made import GRID, answer, result, scenario

from npugrad_client.bench.compare import compare
from npugrad_client.bench.record import Record
from npugrad_client.bench.result import Result
from npugrad_client.bench.scenario import ScenarioError, WeightedWorkload


def test_runs_alike_are_no_difference() -> None:
    found = [compare(result(seed=seed), result(seed=seed + 100)).judgement for seed in range(4)]
    assert found == ["no difference"] * 4


def test_a_fifth_slower_is_found_with_its_interval() -> None:
    covered = 0
    for seed in range(4):
        found = compare(result(0.02, seed=seed), result(0.024, seed=seed + 100))
        assert found.judgement == "slower"
        p50 = found.differences[0]
        assert p50.metric == "p50"
        covered += p50.low < 0.2 < p50.high
        assert 0.12 < p50.low < p50.change < p50.high < 0.28
    assert covered >= 3
    assert str(found).startswith("slower: p50: ")
    assert ", slower by " in str(found)


def test_a_sixth_faster_is_found() -> None:
    assert compare(result(0.024, seed=1), result(0.02, seed=2)).judgement == "faster"


def test_what_is_within_the_margin_is_no_difference_however_sure() -> None:
    found = compare(result(0.02, spread=0.01, seed=1), result(0.0204, spread=0.01, seed=2))
    assert found.judgement == "no difference"
    assert found.differences[0].low > 0, "it is surely slower, by too little to care"
    assert compare(result(0.02, spread=0.01), result(0.0204, spread=0.01), margin=0.005).judgement == "slower"


def test_a_longer_tail_is_shown_and_decides_nothing() -> None:
    slow = result(seed=2)
    for at_s in range(19):
        for _ in range(2):
            slow.record.window(float(at_s)).latency.add(1.0)
    p99 = next(d for d in compare(result(seed=1), slow).differences if d.metric == "p99")
    assert p99.change > 1
    assert not p99.decides


@pytest.mark.parametrize(("answers", "shown"), [(99, ["p50", "p90"]), (100, ["p50", "p90", "p99"])])
def test_a_tail_that_one_of_the_runs_does_not_tell_is_not_shown(answers: int, shown: list[str]) -> None:
    long, short = result(rate=50, duration_s=10), result(rate=answers / 10, duration_s=10)
    short.scenario["load"][0][:] = long.scenario["load"][0]
    found = compare(long, short).differences
    assert [d.metric for d in found if d.metric.startswith("p")] == shown


def test_more_errors_are_worse() -> None:
    failing = result(seed=2)
    for index in range(200):
        failing.record.intended(GRID.name, index / 10)
        failing.record.failed(GRID.name, index / 10, "QUEUE_FULL")
    found = compare(result(seed=1), failing)
    assert found.judgement == "slower"
    assert "errors: 0 % to 9.09 %, more by 9.1 %" in str(found)


def test_a_closed_loop_is_held_against_its_throughput() -> None:
    """As many calls are made as answers allow, so a slower server shows in how many there are."""
    fast, slow = result(seed=1, arrival="closed"), result(seed=2, arrival="closed")
    for window in slow.record.windows.values():
        window.completed = round(window.completed * 0.8)
    throughput = next(d for d in compare(fast, slow).differences if d.metric == "throughput")
    assert throughput.change == pytest.approx(0.25, abs=0.02), "what took 4 takes 5"
    assert throughput.judgement == "slower"


def test_time_in_which_nothing_starts_is_part_of_the_throughput() -> None:
    """Calls longer than a window leave windows without a start, and so does a server that stands still."""
    long: dict[str, Any] = {"duration_s": 60.0, "arrival": "closed", "window_s": 0.1}
    a, b = (result(0.02, rate=rate, seed=rate, **long) for rate in (5, 4))
    b.scenario["load"][0][:] = a.scenario["load"][0]  # of a closed loop these are callers, as many in both
    throughput = next(d for d in compare(a, b).differences if d.metric == "throughput")
    assert [throughput.a, throughput.b] == pytest.approx([5, 4])
    assert throughput.judgement == "slower"


def test_windows_shorter_than_the_time_between_calls_do_not_make_it_surer() -> None:
    """Latencies that drift: calls of the same seconds are alike, in windows of whatever length."""

    def width(window_s: float, seed: int) -> float:
        p50 = compare(drifting(window_s, seed), drifting(window_s, seed + 100)).differences[0]
        return p50.high - p50.low

    usual, short = (sum(width(window_s, seed) for seed in range(3)) for window_s in (0.5, 0.1))
    assert short == pytest.approx(usual, rel=0.15)


def drifting(window_s: float, seed: int) -> Result:
    """Two calls a second, each about as long as the one before."""
    made = scenario("constant", 2, 60.0, window_s=window_s)
    random, record, drift = np.random.default_rng(seed), Record(window_s), 0.0
    for at_s in np.arange(0.0, 60.0, 0.5).tolist():
        drift = 0.9 * drift + random.normal(0.0, 0.1)
        record.intended(GRID.name, at_s)
        record.answered(GRID.name, at_s, at_s, at_s + 0.02 * math.exp(drift), answer(0.01))
    return Result(made.as_dict(), record, 60.0)


def test_very_many_windows_take_no_gigabytes() -> None:
    a, b, many_a, many_b = (
        result(seed=seed, rate=10, duration_s=20, window_s=window_s)
        for window_s in (0.2, 0.001)
        for seed in (1, 2)
    )
    told = compare(a, b)
    tracemalloc.start()
    try:
        same = compare(many_a, many_b)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 500 * 2**20
    assert [d.judgement for d in told.differences] == [d.judgement for d in same.differences]
    assert [d.a for d in told.differences] == pytest.approx([d.a for d in same.differences])


def test_unsteady_runs_are_inconclusive() -> None:
    found = compare(result(spread=2.5, rate=10, seed=1), result(spread=2.5, rate=10, seed=2))
    assert found.judgement == "inconclusive"


@pytest.mark.parametrize(("change", "key"), [({"rate": 50.0}, "load"), ({"arrival": "poisson"}, "arrival")])
def test_only_the_same_load_is_compared(change: dict[str, Any], key: str) -> None:
    with pytest.raises(ScenarioError, match=f"B: {key}: found .*; expected that of A"):
        compare(result(), result(**change))


def test_a_run_too_short_is_refused() -> None:
    with pytest.raises(ScenarioError, match="A: windows with answers: found 5; expected 10 or more"):
        compare(result(duration_s=0.5), result(duration_s=0.5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"is_interrupted": True}, "Interrupted: this is what was measured until then."),
        ({"died": "a worker died"}, "The run died: a worker died."),
        ({"late_s": 0.1}, "The client was the bottleneck: calls were sent late: by 100 ms at p50 "),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_run_that_has_a_flaw_is_refused_unless_told(
    change: dict[str, Any], message: str, is_first: bool
) -> None:
    late = {"late_s": change["late_s"]} if "late_s" in change else {}
    flawed = replace(result(seed=2, **late), **({} if late else change))
    a, b = (flawed, result(seed=1)) if is_first else (result(seed=1), flawed)
    with pytest.raises(ScenarioError) as caught:
        compare(a, b)
    assert str(caught.value).startswith(f"{'A' if is_first else 'B'}: {message}")
    assert str(caught.value).endswith("Compare runs without flaws, or use --allow-flawed.")
    allowed = compare(a, b, allow_flawed=True)
    (told,) = allowed.as_dict()["flaws"]
    assert message in told
    assert allowed.judgement == "no difference"


def test_runs_of_other_inputs_are_not_compared() -> None:
    """What travels and what the server makes are two tests, and the message says no more than that."""
    made = WeightedWorkload(GRID.operator, inputs="recipe", name="both")
    sent = WeightedWorkload(GRID.operator, name="both")
    proven = WeightedWorkload(GRID.operator, inputs="recipe", digest=True, name="both")
    a, b, c = (result(workloads=(each,)) for each in (sent, made, proven))
    with pytest.raises(ScenarioError) as caught:
        compare(a, b)
    assert str(caught.value) == "B: workloads[0].inputs: found 'recipe'; expected that of A, 'data'"
    message = r"B: workloads\[0\].digest: found True; expected that of A, False"
    with pytest.raises(ScenarioError, match=message):
        compare(b, c)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"deterministic": True}, "deterministic"),
        ({"sizes": {**GRID.keywords, "align_corners": True}}, r"sizes\.align_corners"),
    ],
)
def test_runs_of_calls_that_differ_in_no_byte_are_not_compared(change: dict[str, Any], key: str) -> None:
    """As many bytes, and a name of their own: the calls are others all the same."""
    usual, other = (
        result(workloads=(WeightedWorkload(GRID.operator, name="grid", **each),)) for each in ({}, change)
    )
    assert compare(usual, usual).judgement == "no difference"
    with pytest.raises(ScenarioError, match=rf"B: workloads\[0\].{key}: found .*; expected that of A"):
        compare(usual, other)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_report_that_does_not_say_what_it_sent_is_not_compared(is_first: bool) -> None:
    """As one of a version that kept less."""
    whole, less = result(seed=1), result(seed=2)
    del less.scenario["workloads"][0]["sizes"]
    with pytest.raises(ScenarioError, match=r"B: workloads\[0\]\.sizes: found "):
        compare(*((less, whole) if is_first else (whole, less)))


def test_a_comparison_without_bounds_is_json_all_the_same() -> None:
    a, b = result(seed=1, arrival="closed"), result(seed=2, arrival="closed")
    for window in b.record.windows.values():
        window.completed = 0
    text = json.dumps(compare(a, b).as_dict(), allow_nan=False)
    assert text == json.dumps(compare(a, b).as_dict()), "the same two runs give the same"
    throughput = next(d for d in json.loads(text)["differences"] if d["metric"] == "throughput")
    assert throughput["change"] is None


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
