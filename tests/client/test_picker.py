"""Which of several servers gets a try, on a clock that the test moves."""

from __future__ import annotations

from npugrad.errors import InvalidOperand
from npugrad_client import Cancelled, ConnectError, DeadlineExceeded, ServerBusy, ServerDraining
from npugrad_client._picker import Picker


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
