"""Plans and pickers by themselves: what follows on what, on a clock that the test moves."""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npugrad.error_table import ERRORS
from npugrad.errors import InvalidOperand, TransportError, WorkerLost
from npugrad_client import (
    CallTooLarge,
    ConnectError,
    DeadlineExceeded,
    MalformedRequest,
    NpugradError,
    RetryPolicy,
    ServerBusy,
    ServerDraining,
    TlsError,
)
from npugrad_client._picker import Picker
from npugrad_client._retry import Launch, RetryBudget, RetrySchedule, Wait


def schedule(
    policy: RetryPolicy | None = None,
    *,
    servers: int = 1,
    picker: Picker | None = None,
    timeout_s: float | None = None,
    budget: RetryBudget | None = None,
) -> RetrySchedule:
    chosen = policy or RetryPolicy()
    return RetrySchedule(chosen, budget or RetryBudget(chosen), picker or Picker(servers), timeout_s, 0.0)


def launch(made: RetrySchedule, now: float) -> Launch:
    step = made.next(now)
    assert isinstance(step, Launch)
    return step


def wait(made: RetrySchedule, now: float) -> float:
    step = made.next(now)
    assert isinstance(step, Wait)
    assert step.until is not None
    return step.until


# ------------------------------------------------------------------------------------------------ retries


def test_a_call_that_is_answered_is_sent_once() -> None:
    made = schedule(timeout_s=5)
    assert launch(made, 1.0) == Launch(1, 0, 4.0)
    assert made.next(1.5) == Wait(None)
    made.answered(1, 2.0)
    assert made.tries == 1


def test_an_error_that_no_retry_changes_is_raised_at_once() -> None:
    for error in (InvalidOperand("no", code=161002), WorkerLost("no"), TlsError("no"), NpugradError("no")):
        made = schedule(servers=3)
        launch(made, 0)
        made.failed(1, error, 1)
        with pytest.raises(type(error)) as caught:
            made.next(1)
        assert caught.value is error
        assert error.tries == 1


@pytest.mark.parametrize("row", [row for row in ERRORS if row.code is None], ids=lambda row: row.reason)
def test_what_is_retried_is_what_the_error_table_says(row: Any) -> None:
    made = schedule()
    launch(made, 0)
    made.failed(1, NpugradError("no", reason=row.reason), 1)
    if row.retryable and row.reason != "WOULD_MISS_DEADLINE":  # which waiting does not mend
        assert 1 <= wait(made, 0) <= 1.05
    else:
        with pytest.raises(NpugradError):
            made.next(1)


@given(st.integers(1, 8), st.floats(0, 2), st.floats(0, 8))
def test_waits_double_up_to_their_limit_and_tries_end(tries: int, initial: float, limit: float) -> None:
    made = schedule(RetryPolicy(max_tries=tries, initial_backoff_s=initial, max_backoff_s=limit))
    now = 0.0
    for number in range(1, tries + 1):
        assert launch(made, now).number == number
        error = ServerBusy("full")
        made.failed(number, error, now)
        assert error.tries == number
        if number == tries:
            with pytest.raises(ServerBusy):
                made.next(now)
            return
        longest = min(limit, initial * 2 ** (number - 1))
        step = made.next(now - 1)
        assert isinstance(step, Wait)
        assert step.until is not None
        assert now <= step.until <= now + longest
        now = step.until


def test_waits_are_jittered() -> None:
    seen = set()
    for _ in range(20):
        made = schedule()
        launch(made, 0)
        made.failed(1, ServerBusy("full"), 0)
        seen.add(wait(made, -1))
    assert len(seen) > 10


def test_the_wait_that_a_server_asks_for_is_kept() -> None:
    made = schedule()
    launch(made, 0)
    made.failed(1, ServerBusy("full", retry_after_s=3), 10)
    assert 13 <= wait(made, 10) <= 13.05


def test_a_server_that_asks_for_too_long_is_not_waited_for() -> None:
    made = schedule()
    launch(made, 0)
    made.failed(1, ServerBusy("full", retry_after_s=31), 10)
    with pytest.raises(ServerBusy):
        made.next(10)


def test_a_call_that_would_miss_its_deadline_is_tried_on_another_server_only() -> None:
    late = ServerBusy("late", reason="WOULD_MISS_DEADLINE", retry_after_s=0.1)
    made = schedule(timeout_s=5)
    launch(made, 0)
    made.failed(1, late, 0)
    with pytest.raises(ServerBusy) as caught:
        made.next(0)
    assert caught.value is late
    made = schedule(timeout_s=5, servers=2)
    first = launch(made, 0)
    made.failed(1, late, 0.01)
    second = launch(made, 0.01)
    assert {first.server, second.server} == {0, 1}
    made.failed(2, late, 0.02)
    with pytest.raises(ServerBusy):
        made.next(0.02)


def test_no_wait_goes_beyond_the_deadline() -> None:
    made = schedule(timeout_s=5)
    assert launch(made, 0).timeout_s == 5
    made.failed(1, ServerBusy("full", retry_after_s=3), 2)
    with pytest.raises(ServerBusy):
        made.next(2)


def test_who_wakes_up_after_the_deadline_sends_nothing() -> None:
    made = schedule(timeout_s=5)
    launch(made, 0)
    made.failed(1, ServerBusy("full"), 4.9)
    with pytest.raises(ServerBusy):
        made.next(5.1)
    hedged = schedule(RetryPolicy(hedge_after_s=1), timeout_s=5, servers=2)
    launch(hedged, 0)
    assert hedged.next(5.1) == Wait(None)


@pytest.mark.parametrize(
    ("lost_at", "tried_at", "ended_at", "told"),
    [(4.9, 4.96, 5, "gone"), (4.9, 4.96, 5.3, "gone"), (1, 1.5, 5, "late")],
    ids=["hardly any", "hardly any, and its end was noticed late", "enough"],
)
def test_a_last_try_tells_what_it_saw_only_if_it_had_time(
    lost_at: float, tried_at: float, ended_at: float, told: str
) -> None:
    made = schedule(timeout_s=5)
    launch(made, 0)
    made.failed(1, ConnectError("gone"), lost_at)
    launch(made, tried_at)
    made.failed(2, DeadlineExceeded("late"), ended_at)
    with pytest.raises((ConnectError, DeadlineExceeded), match=told) as caught:
        made.next(ended_at)
    assert caught.value.tries == 2


def test_a_deadline_that_passes_while_a_large_call_is_streamed_is_no_complaint_about_its_size() -> None:
    made = schedule(timeout_s=0.05)
    launch(made, 0)
    too_large = CallTooLarge("larger than max")
    too_large.is_message = True
    made.failed(1, too_large, 0.01)
    launch(made, 0.01)
    made.failed(2, DeadlineExceeded("late"), 0.05)
    with pytest.raises(DeadlineExceeded, match="late"):
        made.next(0.05)


def test_a_try_has_a_deadline_of_its_own() -> None:
    made = schedule(RetryPolicy(try_timeout_s=2, max_tries=3), timeout_s=3, servers=2)
    assert launch(made, 0).timeout_s == 2
    made.failed(1, DeadlineExceeded("late"), 2)
    assert launch(made, 2) == Launch(2, 1, 1.0)
    made.failed(2, DeadlineExceeded("late"), 3)
    with pytest.raises(DeadlineExceeded) as caught:
        made.next(3)
    assert caught.value.tries == 2
    assert pickle.loads(pickle.dumps(caught.value)).tries == 2


def test_a_deadline_of_the_call_is_not_tried_again() -> None:
    made = schedule(timeout_s=2, servers=2)
    launch(made, 0)
    made.failed(1, DeadlineExceeded("late"), 2)
    with pytest.raises(DeadlineExceeded):
        made.next(2)


def test_a_budget_ends_retries_and_answers_refill_it() -> None:
    policy = RetryPolicy(budget=2, budget_refill=0.5, max_tries=10)
    budget = RetryBudget(policy)
    made = schedule(policy, budget=budget)
    now = 0.0
    for number in (1, 2):
        launch(made, now)
        made.failed(number, ServerBusy("full"), now)
        now = wait(made, -1)
    launch(made, now)
    made.failed(3, ServerBusy("full"), now)
    with pytest.raises(ServerBusy):
        made.next(now)
    for _ in range(2):
        other = schedule(policy, budget=budget)
        launch(other, now)
        other.answered(1, now)
    assert budget.left == 1
    for _ in range(10):
        budget.refill()
    assert budget.left == 2


# ---------------------------------------------------------------------------- servers that are lost or drain

GONE = [ConnectError("gone"), ServerDraining("ends", retry_after_s=60)]


def lose(made: RetrySchedule, now: float, error: NpugradError) -> float:
    """Loses one try after the other until none is left; when that was."""
    while True:
        try:
            step = made.next(now)
        except type(error):
            return now
        if isinstance(step, Launch):
            made.failed(step.number, error, now)
        else:
            assert step.until is not None
            assert now < step.until
            now = step.until


@pytest.mark.parametrize("error", GONE, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("servers", [1, 3])
def test_a_lost_server_is_tried_for_so_long_however_often_that_is(error: NpugradError, servers: int) -> None:
    """And whatever a draining server asks for, as another one may answer at the same address."""
    budget = RetryBudget(RetryPolicy())
    made = schedule(servers=servers, budget=budget)
    assert 29.5 < lose(made, 0, error) < 30
    assert 15 < made.tries < 500
    assert error.tries == made.tries
    assert budget.left == 100, "it costs a lost server nothing"


def test_without_a_wait_a_lost_server_is_not_flooded() -> None:
    made = schedule(RetryPolicy(initial_backoff_s=0, max_backoff_s=0))
    assert 29.5 < lose(made, 0, ConnectError("gone")) < 30
    assert made.tries <= 30 / 0.02 + 1


def test_a_long_life_of_tries_does_not_overflow() -> None:
    made = schedule(RetryPolicy(retry_for_s=1000, max_backoff_s=1))
    lose(made, 0, ConnectError("gone"))
    assert made.tries > 1100


def test_the_time_for_lost_servers_begins_when_the_first_is_lost_and_anew_after_an_answer() -> None:
    made = schedule()
    launch(made, 0)
    made.failed(1, ConnectError("lost in a long call"), 400)
    launch(made, 402)
    made.failed(2, ServerBusy("full"), 425)
    launch(made, 430)
    made.failed(3, ServerDraining("ends"), 440)
    assert 469.5 < lose(made, 441, ConnectError("gone")) < 470


def test_the_deadline_ends_it_sooner_and_is_used_to_its_end() -> None:
    made = schedule(timeout_s=5)
    assert 4.5 < lose(made, 0, ConnectError("gone")) < 5


def test_other_failures_are_counted_among_lost_servers_and_lost_servers_not_among_them() -> None:
    made, now = schedule(RetryPolicy(max_tries=2, retry_for_s=1000)), 0.0
    for number in range(1, 40):
        launch(made, now)
        made.failed(number, ServerBusy("full") if number == 20 else ConnectError("gone"), now)
        now = wait(made, now)
    launch(made, now)
    made.failed(40, ServerBusy("full"), now)
    with pytest.raises(ServerBusy):
        made.next(now)


@pytest.mark.parametrize("error", GONE, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("servers", [1, 2])
def test_who_sends_a_call_once_never_sends_it_twice(error: NpugradError, servers: int) -> None:
    made = schedule(RetryPolicy(max_tries=1), servers=servers)
    assert lose(made, 0, error) == 0
    assert made.tries == 1


def test_who_waits_for_no_server_tries_each_once() -> None:
    made = schedule(RetryPolicy(retry_for_s=0), servers=3)
    assert lose(made, 0, ConnectError("gone")) == 0
    assert made.tries == 3


def test_an_address_that_looks_wrong_is_given_up_soon_until_it_was_right_once() -> None:
    wrong = ConnectError("no such name")
    wrong.is_misconfigured = True
    picker = Picker(1)
    made = schedule(picker=picker)
    assert lose(made, 0, wrong) < 1
    assert made.tries == 4
    good = schedule(picker=picker)
    launch(good, 1)
    good.answered(1, 1)
    assert lose(schedule(picker=picker), 0, wrong) > 29


def test_who_waits_for_lost_servers_is_told_once_for_all_calls(caplog: pytest.LogCaptureFixture) -> None:
    picker = Picker(1)
    lose(schedule(RetryPolicy(retry_for_s=0.9), picker=picker), 0, ConnectError("cannot reach it"))
    assert not caplog.records, "a restart that is over in a moment is no news"
    for _ in range(3):
        lose(schedule(picker=picker), 0, ConnectError("cannot reach it"))
    (record,) = caplog.records
    assert record.name == "npugrad_client"
    assert re.fullmatch(r"cannot reach it; trying again for up to 2\d s", record.getMessage())


# ----------------------------------------------------------------------------------------- several servers


def test_another_server_is_tried_at_once_and_for_nothing_when_one_is_lost() -> None:
    policy = RetryPolicy(budget=0)
    for error in (ConnectError("gone"), ServerDraining("ends")):
        made = schedule(policy, servers=2)
        first = launch(made, 0)
        made.failed(1, error, 1)
        assert launch(made, 1).server != first.server


def test_a_full_server_is_left_for_another_at_the_price_of_one() -> None:
    for budget, is_tried in ((0, False), (1, True)):
        made = schedule(RetryPolicy(budget=budget), servers=2)
        launch(made, 0)
        made.failed(1, ServerBusy("full", retry_after_s=5), 1)
        if is_tried:
            assert launch(made, 1).server == 1
        else:
            with pytest.raises(ServerBusy):
                made.next(1)


def test_a_server_that_hedges_had_to_be_sent_for_rests() -> None:
    picker, policy = Picker(2), RetryPolicy(hedge_after_s=1)
    made = schedule(policy, picker=picker)
    assert launch(made, 0).server == 0
    assert launch(made, 1).server == 1
    made.answered(2, 1.5)
    made.abandon(1.5)
    for now in (1.5, 1.6):
        other = schedule(policy, picker=picker)
        assert launch(other, now).server == 1
        other.answered(1, now)
    assert picker.pick(2.5) == 0, "the loser was not counted as ended"


# ------------------------------------------------------------------------------------------------- hedges


def test_a_slow_call_is_sent_to_another_server_too() -> None:
    made = schedule(RetryPolicy(hedge_after_s=1), servers=2)
    assert launch(made, 0).server == 0
    assert wait(made, 0) == 1
    assert launch(made, 1).server == 1
    made.answered(2, 1.5)
    assert made.tries == 2


def test_a_hedge_costs_and_is_left_out_without_a_budget() -> None:
    made = schedule(RetryPolicy(hedge_after_s=1, budget=0), servers=2)
    launch(made, 0)
    assert made.next(1) == Wait(None)


def test_one_that_fails_leaves_the_other_to_answer() -> None:
    made = schedule(RetryPolicy(hedge_after_s=1, max_tries=2), servers=2)
    launch(made, 0)
    launch(made, 1)
    made.failed(1, ConnectError("gone"), 2)
    assert made.next(2) == Wait(None)
    made.failed(2, MalformedRequest("no"), 3)
    with pytest.raises(MalformedRequest):
        made.next(3)


def test_a_hedge_whose_server_is_lost_may_be_followed_by_another() -> None:
    made = schedule(RetryPolicy(hedge_after_s=1, max_tries=2, initial_backoff_s=0), servers=2)
    launch(made, 0)
    launch(made, 1)
    assert made.next(5) == Wait(None), "two are in flight"
    made.failed(1, ConnectError("gone"), 5)
    made.failed(2, ConnectError("gone"), 5)
    assert launch(made, 6).number == 3
    assert wait(made, 6) == 7
    assert launch(made, 7).number == 4
    assert made.next(9) == Wait(None)


def test_an_error_that_no_retry_changes_ends_a_race() -> None:
    made = schedule(RetryPolicy(hedge_after_s=1), servers=2)
    launch(made, 0)
    launch(made, 1)
    made.failed(2, InvalidOperand("no", code=161002), 2)
    with pytest.raises(InvalidOperand):
        made.next(2)


# ------------------------------------------------------------------------------------------------- policy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tries", 0),
        ("budget", -1),
        ("budget_refill", float("nan")),
        ("initial_backoff_s", -1),
        ("retry_for_s", -1),
        ("hedge_after_s", -0.1),
        ("try_timeout_s", 0),
    ],
)
def test_a_policy_refuses_what_cannot_be_meant(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{field}: found {value}; expected "):
        RetryPolicy(**{field: value})  # type: ignore[arg-type]


def test_every_error_has_its_tries() -> None:
    assert NpugradError("no").tries == 0
    assert TransportError("no").tries == 0
