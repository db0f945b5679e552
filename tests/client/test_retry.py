"""Retries by themselves: what follows on what, and which server gets a try, on a clock of ours."""

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
    Cancelled,
    ConnectError,
    DeadlineExceeded,
    MalformedRequest,
    NpugradError,
    RetryPolicy,
    ServerBusy,
    ServerDraining,
    TlsError,
    WrongType,
    WrongValue,
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


def fail(made: RetrySchedule, now: float, error: NpugradError, at: float | None = None) -> Launch:
    """A try that begins now and fails, at once or later."""
    step = launch(made, now)
    made.failed(step.number, error, now if at is None else at)
    return step


def ended(made: RetrySchedule, now: float, kind: type[NpugradError]) -> NpugradError:
    with pytest.raises(kind) as caught:
        made.next(now)
    return caught.value


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


def busy(**options: Any) -> ServerBusy:
    return ServerBusy("full", **options)


def late() -> ServerBusy:
    return ServerBusy("late", reason="WOULD_MISS_DEADLINE", retry_after_s=0.1)


RAISED, ELSEWHERE = "raised", "elsewhere"
AFTER_ONE: dict[str, tuple[dict[str, Any], NpugradError, float, Any]] = {
    "refused": ({"servers": 3}, InvalidOperand("no", code=161002), 1, RAISED),
    "a lost worker": ({"servers": 3}, WorkerLost("no"), 1, RAISED),
    "not trusted": ({"servers": 3}, TlsError("no"), 1, RAISED),
    "unknown": ({"servers": 3}, NpugradError("no"), 1, RAISED),
    "the wait that a server asks for": ({}, busy(retry_after_s=3), 10, (13, 13.05)),
    "a longer one than anybody waits": ({}, busy(retry_after_s=31), 10, RAISED),
    "one beyond the deadline": ({"timeout_s": 5}, busy(retry_after_s=3), 2, RAISED),
    "noticed after the deadline": ({"timeout_s": 5}, busy(), 5.1, RAISED),
    "the deadline of the call": ({"timeout_s": 2, "servers": 2}, DeadlineExceeded("late"), 2, RAISED),
    "would miss its deadline": ({"timeout_s": 5}, late(), 0, RAISED),
    "would miss its deadline here": ({"timeout_s": 5, "servers": 2}, late(), 0, ELSEWHERE),
    "full": ({"servers": 2, "policy": RetryPolicy(budget=1)}, busy(retry_after_s=5), 1, ELSEWHERE),
    "full, without a budget": ({"servers": 2, "policy": RetryPolicy(budget=0)}, busy(), 1, RAISED),
    "lost, for nothing": ({"servers": 2, "policy": RetryPolicy(budget=0)}, ConnectError("no"), 1, ELSEWHERE),
    "ending, for nothing": (
        {"servers": 2, "policy": RetryPolicy(budget=0)},
        ServerDraining("ends"),
        1,
        ELSEWHERE,
    ),
}


@pytest.mark.parametrize(("options", "error", "at", "expected"), AFTER_ONE.values(), ids=AFTER_ONE)
def test_what_follows_on_one_failure(
    options: dict[str, Any], error: NpugradError, at: float, expected: Any
) -> None:
    made = schedule(**options)
    first = fail(made, 0, error, at)
    if expected == RAISED:
        assert ended(made, at, type(error)) is error
        assert error.tries == 1
    elif expected == ELSEWHERE:
        second = launch(made, at)
        assert second.server != first.server
        made.failed(2, error, at)
        if error.reason == "WOULD_MISS_DEADLINE":
            ended(made, at, ServerBusy)
    else:
        assert expected[0] <= wait(made, at) <= expected[1]


def test_what_is_retried_is_what_the_error_table_says() -> None:
    for row in ERRORS:
        if row.code is None:
            made = schedule()
            fail(made, 0, NpugradError("no", reason=row.reason), 1)
            if row.retryable and row.reason != "WOULD_MISS_DEADLINE":  # which waiting does not mend
                assert 1 <= wait(made, 0) <= 1.05, row
            else:
                ended(made, 1, NpugradError)


@given(st.integers(1, 8), st.floats(0, 2), st.floats(0, 8))
def test_waits_double_up_to_their_limit_and_tries_end(tries: int, initial: float, limit: float) -> None:
    made = schedule(RetryPolicy(max_tries=tries, initial_backoff_s=initial, max_backoff_s=limit))
    now = 0.0
    for number in range(1, tries + 1):
        assert launch(made, now).number == number
        error = busy()
        made.failed(number, error, now)
        assert error.tries == number
        if number == tries:
            ended(made, now, ServerBusy)
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
        fail(made, 0, busy())
        seen.add(wait(made, -1))
    assert len(seen) > 10


def test_who_wakes_up_after_the_deadline_sends_nothing() -> None:
    made = schedule(timeout_s=5)
    assert launch(made, 0).timeout_s == 5
    made.failed(1, busy(), 4.9)
    ended(made, 5.1, ServerBusy)
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
    fail(made, 0, ConnectError("gone"), lost_at)
    fail(made, tried_at, DeadlineExceeded("late"), ended_at)
    error = ended(made, ended_at, NpugradError)
    assert (str(error), error.tries) == (told, 2)


def test_a_deadline_that_passes_while_a_large_call_is_streamed_is_no_complaint_about_its_size() -> None:
    made = schedule(timeout_s=0.05)
    launch(made, 0)
    too_large = CallTooLarge("larger than max")
    too_large.is_message = True
    made.failed(1, too_large, 0.01)
    fail(made, 0.01, DeadlineExceeded("late"), 0.05)
    with pytest.raises(DeadlineExceeded, match="late"):
        made.next(0.05)


def test_a_try_has_a_deadline_of_its_own() -> None:
    made = schedule(RetryPolicy(try_timeout_s=2, max_tries=3), timeout_s=3, servers=2)
    assert launch(made, 0).timeout_s == 2
    made.failed(1, DeadlineExceeded("late"), 2)
    assert launch(made, 2) == Launch(2, 1, 1.0)
    made.failed(2, DeadlineExceeded("late"), 3)
    error = ended(made, 3, DeadlineExceeded)
    assert (error.tries, pickle.loads(pickle.dumps(error)).tries) == (2, 2)


def test_a_budget_ends_retries_and_answers_refill_it() -> None:
    policy = RetryPolicy(budget=2, budget_refill=0.5, max_tries=10)
    budget = RetryBudget(policy)
    made = schedule(policy, budget=budget)
    now = 0.0
    for _ in range(2):
        fail(made, now, busy())
        now = wait(made, -1)
    fail(made, now, busy())
    ended(made, now, ServerBusy)
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
    fail(made, 0, ConnectError("lost in a long call"), 400)
    fail(made, 402, busy(), 425)
    fail(made, 430, ServerDraining("ends"), 440)
    assert 469.5 < lose(made, 441, ConnectError("gone")) < 470


def test_the_deadline_ends_it_sooner_and_is_used_to_its_end() -> None:
    made = schedule(timeout_s=5)
    assert 4.5 < lose(made, 0, ConnectError("gone")) < 5


def test_other_failures_are_counted_among_lost_servers_and_lost_servers_not_among_them() -> None:
    made, now = schedule(RetryPolicy(max_tries=2, retry_for_s=1000)), 0.0
    for number in range(1, 40):
        fail(made, now, busy() if number == 20 else ConnectError("gone"))
        now = wait(made, now)
    launch(made, now)
    made.failed(40, busy(), now)
    ended(made, now, ServerBusy)


def test_who_waits_for_no_server_tries_each_once_and_who_sends_a_call_once_never_sends_it_twice() -> None:
    for error in GONE:
        for policy, servers, tries in (
            (RetryPolicy(max_tries=1), 1, 1),
            (RetryPolicy(max_tries=1), 2, 1),
            (RetryPolicy(retry_for_s=0), 3, 3),
        ):
            made = schedule(policy, servers=servers)
            assert lose(made, 0, error) == 0
            assert made.tries == tries


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


def test_who_gives_up_soon_where_nobody_was_ever_reached_waits_for_a_server_that_was() -> None:
    policy, away = RetryPolicy(reach_for_s=5), ConnectError("nobody there")
    assert 4.5 < lose(schedule(policy), 0, away) < 5
    silent = schedule(policy)
    fail(silent, 0, away, 5)  # a host that does not answer at all
    assert ended(silent, 5, ConnectError) is away
    crashed = ConnectError("lost in a long call")
    crashed.was_connected = True
    for reached in (crashed, ServerDraining("ends")):
        made = schedule(policy)
        fail(made, 0, reached, 400)
        assert 429.5 < lose(made, 401, away) < 430
    picker = Picker(2)
    answered = schedule(policy, picker=picker)
    launch(answered, 1)
    answered.answered(1, 1)
    assert lose(schedule(policy, picker=picker), 2, away) > 29


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
    ended(made, 3, MalformedRequest)


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
    fail(made, 1, InvalidOperand("no", code=161002), 2)
    ended(made, 2, InvalidOperand)


# ----------------------------------------------------------------------------------------------- pickers


def test_calls_go_round() -> None:
    picker = Picker(3)
    found = []
    for now in range(6):
        server = picker.pick(now)
        picker.ended(server, now, now, None)
        found.append(server)
    assert found == [0, 1, 2, 0, 1, 2]


def test_the_server_with_the_fewest_calls_in_flight_is_next() -> None:
    picker = Picker(3)
    assert sorted(picker.pick(0) for _ in range(6)) == [0, 0, 1, 1, 2, 2]
    picker.ended(1, 0, 1, None)
    assert picker.pick(1) == 1


def test_a_lost_server_rests_is_probed_by_one_call_and_comes_back() -> None:
    picker = Picker(2)
    assert picker.pick(0) == 0
    picker.ended(0, 0, 0, ConnectError("gone"))
    for now in (0.0, 0.1, 0.2):
        assert picker.pick(now) == 1
    assert picker.pick(0.6) == 0
    assert picker.pick(0.6) == 1, "one call is enough to find out"
    picker.ended(0, 0.6, 0.7, None)
    assert [picker.pick(0.7) for _ in range(3)] == [0, 0, 0], "it has the fewest again"


def test_a_server_rests_after_a_call_that_would_miss_its_deadline_only_if_it_asks_to() -> None:
    for retry_after_s, expected in ((None, [0, 1]), (0.5, [1, 1])):
        picker = Picker(2)
        assert picker.pick(0) == 0
        error = ServerBusy("late", reason="WOULD_MISS_DEADLINE", retry_after_s=retry_after_s)
        picker.ended(0, 0, 0, error)
        assert sorted(picker.pick(0.1) for _ in range(2)) == expected


def test_a_server_that_stays_lost_rests_longer() -> None:
    picker, now, rests = Picker(2), 0.0, []
    for _ in range(4):
        start = now
        while picker.pick(now) != 0:
            picker.ended(1, now, now, None)
            now += 0.01
        rests.append(now - start)
        picker.ended(0, now, now, ConnectError("gone"))
    assert rests[1] < rests[2] * 1.05 < rests[3] * 1.1
    assert rests[3] > 0.9


def test_many_calls_that_see_one_loss_count_as_one() -> None:
    picker = Picker(2)
    for _ in range(200):
        picker.pick(0)
    for _ in range(100):
        picker.ended(0, 0, 1, ConnectError("gone"))
        picker.ended(1, 0, 1, None)
    assert picker.pick(1.2) == 1
    assert picker.pick(1.6) == 0


def test_a_draining_server_stays_at_rest_when_its_last_calls_are_answered() -> None:
    picker = Picker(2)
    assert [picker.pick(0), picker.pick(0)] == [0, 1]
    assert picker.pick(0.5) == 0
    picker.ended(0, 0.5, 1, ServerDraining("ends"))
    picker.ended(0, 0, 1.1, None)
    assert picker.pick(1.2) == 1


def test_a_server_that_answers_nothing_is_lost_and_one_that_is_slow_is_not() -> None:
    for answers, expected in ((False, 1), (True, 0)):
        picker = Picker(2)
        assert [picker.pick(0), picker.pick(0), picker.pick(0)] == [0, 1, 0]
        if answers:
            picker.ended(0, 0, 1, InvalidOperand("no", code=161002))
        picker.ended(1, 0, 1, None)
        picker.ended(0, 0, 3, DeadlineExceeded("late"))
        picker.pick(3)
        picker.ended(1, 3, 3, None)
        assert [picker.pick(3.1) for _ in range(2)].count(0) == 1 - expected


def test_a_deadline_that_the_server_itself_tells_of_is_no_loss() -> None:
    picker = Picker(2)
    picker.pick(0)
    picker.ended(0, 0, 3, DeadlineExceeded("late", request_id="abc"))
    assert sorted([picker.pick(3), picker.pick(3)]) == [0, 1]


def test_a_call_that_its_caller_cancels_tells_nothing_of_a_lost_server() -> None:
    picker = Picker(2)
    picker.pick(0)
    picker.ended(0, 0, 0, ConnectError("gone"))
    assert picker.pick(0.6) == 1
    assert picker.pick(0.6) == 0
    picker.ended(0, 0.6, 0.7, Cancelled("no more"))
    assert picker.pick(0.7) == 0
    assert [picker.pick(0.7) for _ in range(3)] == [1, 1, 1], "still one call at a time for the lost one"


def test_calls_are_spread_where_all_servers_are_being_probed() -> None:
    picker = Picker(2)
    for server in (0, 1):
        assert picker.pick(0) == server
    for server in (0, 1):
        picker.ended(server, 0, 0, ConnectError("gone"))
    assert sorted(picker.pick(100) for _ in range(10)) == [0] * 5 + [1] * 5


def test_when_all_rest_the_first_to_be_awake_is_tried() -> None:
    picker = Picker(2)
    for server in (0, 1):
        assert picker.pick(0) == server
    picker.ended(0, 0, 0, ServerBusy("full", retry_after_s=9))
    picker.ended(1, 0, 0, ServerBusy("full", retry_after_s=5))
    assert picker.pick(1) == 1


# ------------------------------------------------------------------------------------------------- policy


def test_a_policy_refuses_what_cannot_be_meant() -> None:
    wrong = {
        "max_tries": 0,
        "budget": -1,
        "budget_refill": float("nan"),
        "initial_backoff_s": -1,
        "retry_for_s": -1,
        "reach_for_s": -1,
        "hedge_after_s": -0.1,
        "try_timeout_s": 0,
    }
    for field, value in wrong.items():
        with pytest.raises(WrongValue, match=f"^{field}: found {value}; expected "):
            RetryPolicy(**{field: value})  # type: ignore[arg-type]
        with pytest.raises(WrongType, match=rf"^{field}: found '5' \(str\); expected "):
            RetryPolicy(**{field: "5"})  # type: ignore[arg-type]
    for error in (NpugradError("no"), TransportError("no")):
        assert error.tries == 0, "it is no answer to a call"
