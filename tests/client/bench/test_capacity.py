"""The search: finds the edge of a server that the test invents, through noise, and says how sure it is."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.client.bench.made import GRID, result, scenario

from npugrad_client.bench.capacity import (
    UNLIMITED,
    Capacity,
    CapacityTrial,
    Interrupted,
    Search,
    TooShort,
    at_rate,
    backlog_growth,
    first_guess,
    judge,
)
from npugrad_client.bench.scenario import MAX_RATE, ScenarioError
from npugrad_client.bench.slo import Slo


def trial(rate: float, is_met: bool) -> CapacityTrial:
    return CapacityTrial(rate, () if is_met else ("p99: found too much",), throughput_per_s=rate)


@settings(max_examples=100, deadline=None)
@given(edge=st.floats(0.5, 5000), start=st.floats(0.5, 5000))
def test_a_sharp_edge_is_found_from_anywhere(edge: float, start: float) -> None:
    found = Search(lambda rate: trial(rate, rate <= edge)).run(start)
    assert found.is_settled
    assert edge / 1.021 <= found.rate <= edge
    assert edge < found.above <= found.rate * 1.021
    assert found.tried(found.rate) == (3, 3)


def test_it_says_how_sure_it_is() -> None:
    found = Search(lambda rate: trial(rate, rate <= 100)).run(90)
    text = str(found)
    assert text.startswith(f"capacity {found.rate:.4g}/s: met in 3 of 3 trials")
    assert "(95 % confidence: in at least 37% of them)" in text
    assert f"at {found.above:.4g}/s missed in 1 of 1" in text
    assert json.loads(json.dumps(found.as_dict()))["met_of_trials"] == [3, 3]


def test_a_noisy_edge_is_found_within_its_noise() -> None:
    """Near the edge, a trial is met by chance; repeats see through it."""
    rates = []
    for seed in range(20):
        random = np.random.default_rng(seed)
        found = Search(lambda rate, r=random: trial(rate, r.normal(100, 3) > rate)).run(60)  # type: ignore[misc]
        assert found.is_settled
        rates.append(found.rate)
    assert np.mean(rates) == pytest.approx(98, abs=4)
    assert max(abs(rate - 100) for rate in rates) < 12


def test_no_rate_at_all() -> None:
    found = Search(lambda rate: trial(rate, False)).run(10)
    assert found.rate == Capacity().rate == 0
    assert str(found) == "No rate was found that meets the objectives."
    found = Search(lambda rate: trial(rate, False), most_trials=3).run(100)
    assert (found.rate, found.is_settled) == (0, False)
    assert str(found) == "No rate was found: the server is too unsteady, or the trials too short."
    lucky = iter([True, False, True])  # at 100, 115 and 107; then the server becomes slow
    found = Search(lambda rate: trial(rate, next(lucky, rate <= 50))).run(100)
    assert found.is_settled
    assert (found.rate <= 50 < found.above, found.tried(found.rate)) == (True, (3, 3))
    met = iter([True, False] * 100)
    found = Search(lambda rate: trial(rate, next(met)), most_trials=12).run(100)
    assert len(found.trials) <= 12, "it ends where nothing is steady"


def test_a_client_that_cannot_send_more_is_told() -> None:
    def measure(rate: float) -> CapacityTrial:
        return CapacityTrial(rate, (), ("worker 0 was busy",) if rate > 150 else ())

    found = Search(measure).run(100)
    assert found.is_client_limited
    assert 100 <= found.rate <= 150
    assert "the client cannot send more, so the server's capacity is at least that" in str(found)


def test_a_moment_of_a_busy_client_is_tried_again() -> None:
    busy = [True]

    def measure(rate: float) -> CapacityTrial:
        was_busy, busy[0] = busy[0], False
        return CapacityTrial(rate, () if rate <= 100 else ("too much",), ("busy",) if was_busy else ())

    found = Search(measure).run(90)
    assert not found.is_client_limited
    assert found.rate == pytest.approx(99, abs=2)


@pytest.mark.parametrize("change", [{"precision": 0.0}, {"confirm": 0}])
def test_settings_are_checked(change: dict[str, float]) -> None:
    with pytest.raises(ScenarioError, match="found 0"):
        Search(lambda rate: trial(rate, True), **change)  # type: ignore[arg-type]


def test_a_queue_that_grows_is_no_rate_to_carry() -> None:
    steady = result(0.02, rate=100, duration_s=10)
    assert backlog_growth(steady) <= 5
    assert judge(steady, 100, UNLIMITED).is_met
    growing = result(0.02, rate=100, duration_s=10)
    for window in growing.record.windows.values():
        window.completed = round(window.completed * 0.9)
    told = judge(growing, 100, UNLIMITED)
    assert not told.is_met
    assert told.complaints[0].startswith("the queue grew by ")


def test_objectives_are_part_of_the_judgement() -> None:
    (told, *_) = judge(result(0.02), 100, Slo.parse("p50=10ms")).complaints
    assert told.startswith("p50: 19.9 ms (objective: at most 10.0 ms)")
    failing = result(0.02)
    failing.record.intended(GRID.name, 0.0)
    failing.record.failed(GRID.name, 0.0, "QUEUE_FULL")
    assert judge(failing, 100, UNLIMITED).complaints == ("errors: 0.05 % (objective: at most 0 %)",)


def test_a_trial_with_too_few_calls_is_neither_met_nor_missed() -> None:
    few = result(0.02, rate=5, duration_s=10)
    told = judge(few, 5, Slo.parse("p99=1s"))
    message = (
        "at 5/s, p99: not known from 50 answers, it takes 100 (objective: at most 1.00 s); use a duration of "
        "at least 20 s"
    )
    assert (told.unjudged, told.complaints, told.is_met) == (message, (), False)
    found = Search(lambda rate: told).run(5)
    assert (str(found), found.is_settled) == (f"No rate was found: {message}", False)
    missed = judge(few, 5, Slo.parse("p99=1s,mean=1ms"))
    assert missed.complaints[0].startswith("mean: ")
    assert Search(lambda rate: missed, most_trials=3).run(5).too_short == "", "another objective decides"


def test_trials_keep_all_of_the_scenario_but_the_rate() -> None:
    made = scenario("poisson", 50, 4.0, workers=2, seed=9)
    tried = at_rate(made, 77)
    kept = [tried.level(1), tried.arrival, tried.duration_s, tried.workers, tried.seed]
    assert kept == [77, "poisson", 4, 2, 9]
    from_closed = at_rate(scenario("closed", 1, 0.5), 7)
    assert (from_closed.arrival, from_closed.level(0.1)) == ("constant", 7)
    guess = first_guess(made, 6)
    assert (guess.is_closed, guess.level(1), guess.duration_s) == (True, 6, 2)


def test_an_interrupt_ends_the_search_with_what_it_has() -> None:
    def measure(rate: float) -> CapacityTrial:
        if rate > 150:
            raise Interrupted
        return trial(rate, True)

    found = Search(measure).run(100)
    assert found.is_interrupted
    assert not found.is_settled
    assert 100 <= found.rate <= 150
    assert str(found).endswith("; interrupted: the capacity may be higher, and was not confirmed")
    assert found.as_dict()["interrupted"] is True


def test_a_trial_too_short_for_its_rate_ends_the_search_and_says_so() -> None:
    def measure(rate: float) -> CapacityTrial:
        if not 60 < rate < 110:
            raise TooShort("a trial has 3 calls.")
        return trial(rate, rate < 80)

    found = Search(measure).run(50)
    assert str(found) == "No rate was found: a trial has 3 calls."
    assert (found.as_dict()["too_short"], found.as_dict()["settled"]) == ("a trial has 3 calls.", False)
    assert Search(measure).run(70).is_settled
    found = Search(lambda rate: replace(measure(rate), complaints=())).run(100)
    assert str(found).endswith("; not confirmed: a trial has 3 calls.")
    assert found.rate == 100


def test_a_server_without_end_is_searched_up_to_what_can_be_asked_for() -> None:
    found = Search(lambda rate: trial(rate, True)).run(1000)
    assert found.is_client_limited
    assert MAX_RATE / 2 <= found.rate <= MAX_RATE
