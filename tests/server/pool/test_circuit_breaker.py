"""A circuit breaker by itself: when it opens, tries again, closes and forgets."""

from __future__ import annotations

import pytest

from npugrad_server.pool.circuit_breaker import MOST_KEYS, OPEN_S, WINDOW_S, CircuitBreaker

KEY, OTHER = ("tenant", b"signature"), ("tenant", b"another")


def opened(now: float = 0.0) -> CircuitBreaker:
    """A breaker whose circuit of `KEY` opened just now, by the death under call 2."""
    breaker = CircuitBreaker(2)
    assert not breaker.died(KEY, 1, now)
    assert breaker.died(KEY, 2, now)
    return breaker


def test_one_death_opens_nothing() -> None:
    breaker = CircuitBreaker(2)
    assert not breaker.died(KEY, 1, 0.0)
    assert breaker.enter(KEY, 2, 1.0) is None
    assert breaker.open_count == 0


def test_a_second_death_opens_the_circuit_of_its_key_alone() -> None:
    breaker = opened()
    refusal = breaker.enter(KEY, 3, 4.0)
    assert refusal is not None
    assert (refusal.deaths, refusal.retry_after_s) == (2, OPEN_S - 4.0)
    assert refusal.detail == (
        "found 2 workers that died under calls of this signature within 60 s; expected fewer than 2; "
        "one may be tried again in 6.0 s"
    )
    assert breaker.enter(OTHER, 4, 4.0) is None
    assert breaker.open_count == 1


def test_deaths_far_apart_open_nothing() -> None:
    breaker = CircuitBreaker(2)
    for turn in range(9):
        assert not breaker.died(KEY, turn, turn * WINDOW_S)


def test_one_call_at_a_time_is_tried_once_it_is_half_open() -> None:
    breaker = opened()
    assert breaker.enter(KEY, 3, OPEN_S) is None
    assert breaker.is_trial(KEY, 3)
    refusal = breaker.enter(KEY, 4, OPEN_S)
    assert refusal is not None
    assert refusal.retry_after_s > 0
    breaker.left(KEY, 4)  # which was none
    assert breaker.refusal(KEY, OPEN_S) is not None
    breaker.left(KEY, 3)
    assert breaker.enter(KEY, 5, OPEN_S) is None


def test_a_trial_that_is_done_closes_it_and_all_is_forgotten() -> None:
    breaker = opened()
    breaker.enter(KEY, 3, OPEN_S)
    assert not breaker.succeeded(KEY, 1)  # it began before
    assert breaker.succeeded(KEY, 3)
    assert len(breaker) == 0
    assert not breaker.died(KEY, 4, OPEN_S + 1)


def test_a_trial_that_kills_its_worker_opens_it_again() -> None:
    breaker = opened()
    breaker.enter(KEY, 3, OPEN_S)
    assert breaker.died(KEY, 3, OPEN_S + 1)
    refusal = breaker.refusal(KEY, OPEN_S + 1)
    assert refusal is not None
    assert (refusal.deaths, refusal.retry_after_s) == (3, OPEN_S)
    assert breaker.enter(KEY, 4, 2 * OPEN_S + 1) is None


def test_a_later_death_of_a_call_from_before_keeps_it_open() -> None:
    breaker = opened()
    assert not breaker.died(KEY, 1, 3.0), "it is open already"
    refusal = breaker.refusal(KEY, 3.0)
    assert refusal is not None
    assert refusal.retry_after_s == OPEN_S


@pytest.mark.parametrize("deaths", [1, 2])
def test_what_is_remembered_expires(deaths: int) -> None:
    breaker = CircuitBreaker(2)
    for number in range(deaths):
        breaker.died(KEY, number, 0.0)
    breaker.refusal(OTHER, WINDOW_S + OPEN_S - 0.1)
    assert len(breaker) == 1
    breaker.refusal(OTHER, WINDOW_S + OPEN_S)
    assert len(breaker) == 0


def test_memory_is_bounded() -> None:
    breaker = CircuitBreaker(2)
    for number in range(MOST_KEYS + 9):
        breaker.died(number, number, 0.0)
    assert len(breaker) == MOST_KEYS
    assert breaker.died(MOST_KEYS + 8, 0, 0.0)
    assert not breaker.died(0, 0, 0.0), "the oldest was forgotten"


def test_a_breaker_of_0_never_opens() -> None:
    breaker = CircuitBreaker(0)
    for number in range(9):
        assert not breaker.died(KEY, number, 0.0)
    assert breaker.refusal(KEY, 0.0) is None
    assert len(breaker) == 0


def test_as_many_deaths_as_are_said_open_a_circuit() -> None:
    breaker = CircuitBreaker(3)
    assert [breaker.died(KEY, number, 0.0) for number in range(3)] == [False, False, True]
    refusal = breaker.refusal(KEY, 0.0)
    assert refusal is not None
    assert refusal.detail.startswith("found 3 workers")
    assert "expected fewer than 3" in refusal.detail
