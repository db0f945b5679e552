from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from npugrad_server.pool.queues import MAX_PASSED, AlarmQueue, TenantQueue


@dataclass(frozen=True)
class Waiting:
    id: int
    priority: int = 0
    label: str = ""
    kind: str = ""


def first_of(queue: TenantQueue[Waiting]) -> Waiting:
    return next(queue.in_turn(lambda _: False))


def drain(queue: TenantQueue[Waiting]) -> list[int]:
    order = []
    while queue.count:
        call = first_of(queue)
        queue.take(call)
        order.append(call.id)
    return order


def filled(*calls: Waiting) -> TenantQueue[Waiting]:
    queue: TenantQueue[Waiting] = TenantQueue(0.0)
    for call in calls:
        queue.push(call)
    return queue


def test_labels_take_turns_and_keep_their_own_order() -> None:
    queue = filled(
        *(Waiting(i, label="greedy") for i in range(4)), Waiting(10, label="x"), Waiting(11, label="x")
    )
    assert drain(queue) == [0, 10, 1, 11, 2, 3]


def test_a_higher_priority_leaves_first() -> None:
    queue = filled(Waiting(1), Waiting(2, priority=5), Waiting(3, priority=-5), Waiting(4, priority=5))
    assert drain(queue) == [2, 4, 1, 3]


def test_a_priority_that_was_passed_often_enough_is_next_once() -> None:
    queue = filled(*(Waiting(i, priority=100) for i in range(3 * MAX_PASSED)), Waiting(1000), Waiting(1001))
    queue.push(Waiting(2000, priority=-100))
    order = drain(queue)
    assert [order.index(i) for i in (1000, 2000, 1001)] == [MAX_PASSED, MAX_PASSED + 1, 2 * MAX_PASSED + 2]


@settings(deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=120))
def test_no_priority_waits_for_more_than_its_share_of_starts(priorities: list[int]) -> None:
    queue = filled(*(Waiting(i, priority=p) for i, p in enumerate(priorities)))
    order = [priorities[i] for i in drain(queue)]
    assert sorted(order) == sorted(priorities)
    for priority in set(priorities):
        turns = [-1, *(place for place, found in enumerate(order) if found == priority)]
        assert all(b - a <= MAX_PASSED + len(set(priorities)) for a, b in pairwise(turns))


def test_a_restored_call_is_the_next_of_its_priority() -> None:
    queue = filled(Waiting(1, label="a"), Waiting(2, label="a"), Waiting(3, label="b"))
    first = first_of(queue)
    queue.take(first)
    queue.push(first, front=True)
    assert drain(queue) == [1, 3, 2]


def test_a_call_can_give_up_anywhere_in_its_lane() -> None:
    calls = [Waiting(1), Waiting(2), Waiting(3)]
    queue = filled(*calls)
    queue.remove(calls[1])
    assert queue.count == 2
    assert sorted(call.id for call in queue) == [1, 3]
    assert drain(queue) == [1, 3]
    assert list(queue.in_turn(lambda _: True)) == []


def test_calls_of_other_kinds_pass_one_that_lets_them_and_none_of_its_own() -> None:
    calls = [Waiting(1, kind="x"), Waiting(2, kind="x"), Waiting(3, kind="y"), Waiting(4, kind="z")]
    queue = filled(*calls, Waiting(5, label="b", kind="x"))
    assert [call.id for call in queue.in_turn(lambda _: False)] == [1, 5]
    assert [call.id for call in queue.in_turn(lambda call: call.kind == "x")] == [1, 3, 5]
    assert [call.id for call in queue.in_turn(lambda _: True)] == [1, 3, 4, 5]


@settings(deadline=None)
@given(st.lists(st.sampled_from("abcd"), max_size=60))
def test_no_label_that_waits_is_more_than_a_round_behind(labels: list[str]) -> None:
    queue = filled(*(Waiting(i, label=label) for i, label in enumerate(labels)))
    order = [labels[i] for i in drain(queue)]
    assert sorted(order) == sorted(labels)
    remaining = {label: labels.count(label) for label in set(labels)}
    while remaining:
        turn, order = order[: len(remaining)], order[len(remaining) :]
        assert sorted(turn) == sorted(remaining)
        remaining = {label: count - 1 for label, count in remaining.items() if count > 1}


def test_alarms_come_in_order_and_those_of_ended_calls_not_at_all() -> None:
    live = {1, 2, 3}
    alarms = AlarmQueue(live.__contains__)
    for when, call in ((3.0, 1), (1.0, 2), (2.0, 3)):
        alarms.set(when, call, 3)
    assert alarms.next() == 1.0
    live.discard(2)
    assert alarms.next() == 2.0
    assert list(alarms.due(2.5)) == [3]
    assert alarms.next() == 3.0
    assert list(alarms.due(9.0)) == [1]
    assert alarms.next() is None


def test_an_alarm_set_while_others_are_due_is_not_lost() -> None:
    alarms = AlarmQueue(lambda _: True)
    alarms.set(1.0, 1, 1)
    seen = []
    for call in alarms.due(2.0):
        seen.append(call)
        if call == 1:
            alarms.set(2.0, 2, 1)
            alarms.set(3.0, 3, 1)
    assert seen == [1, 2]
    assert alarms.next() == 3.0
