"""Who is next: among the calls of one tenant, and among tenants."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from npugrad_server.pool.fair_queue import MAX_TENANTS, FairQueue
from npugrad_server.pool.queues import MAX_PASSED, AlarmQueue, TenantQueue
from npugrad_server.pool.tenant import NOBODY, Tenant


@dataclass
class Waiting:
    id: int
    tenant: Tenant = NOBODY
    cost_s: float = 1.0
    expected_s: float = 0.0
    priority: int = 0
    label: str = ""
    kind: str = ""
    started_s: float = 0.0
    charged_s: float = 0.0


# ------------------------------------------------------------------------------------------- of one tenant


def filled(*calls: Waiting) -> TenantQueue[Waiting]:
    queue: TenantQueue[Waiting] = TenantQueue(0.0)
    for call in calls:
        queue.push(call)
    return queue


def in_turn(queue: TenantQueue[Waiting], passes: Iterable[str] = ()) -> list[int]:
    """Who could be next, where calls of some kinds let others pass."""
    return [call.id for call in queue.in_turn(lambda call: call.kind in passes)]


def drain(queue: TenantQueue[Waiting]) -> list[int]:
    order = []
    while queue.count:
        call = next(queue.in_turn(lambda _: False))
        queue.take(call)
        order.append(call.id)
    return order


def test_higher_priorities_leave_first_and_labels_take_turns_and_keep_their_own_order() -> None:
    calls = [Waiting(number, label="greedy") for number in range(4)]
    calls += [Waiting(10, label="x"), Waiting(11, label="x")]
    calls += [Waiting(20, priority=-5), Waiting(21, priority=5), Waiting(22, priority=5)]
    assert drain(filled(*calls)) == [21, 22, 0, 10, 1, 11, 2, 3, 20]


def test_a_priority_that_was_passed_often_enough_is_next_once() -> None:
    calls = [Waiting(i, priority=100) for i in range(3 * MAX_PASSED)]
    order = drain(filled(*calls, Waiting(1000), Waiting(1001), Waiting(2000, priority=-100)))
    assert [order.index(i) for i in (1000, 2000, 1001)] == [MAX_PASSED, MAX_PASSED + 1, 2 * MAX_PASSED + 2]


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=120))
def test_no_priority_waits_for_more_than_its_share_of_starts(priorities: list[int]) -> None:
    order = [
        priorities[i] for i in drain(filled(*(Waiting(i, priority=p) for i, p in enumerate(priorities))))
    ]
    assert sorted(order) == sorted(priorities)
    for priority in set(priorities):
        turns = [-1, *(place for place, found in enumerate(order) if found == priority)]
        assert all(b - a <= MAX_PASSED + len(set(priorities)) for a, b in pairwise(turns))


@given(st.lists(st.sampled_from("abcd"), max_size=60))
def test_no_label_that_waits_is_more_than_a_round_behind(labels: list[str]) -> None:
    order = [labels[i] for i in drain(filled(*(Waiting(i, label=label) for i, label in enumerate(labels))))]
    remaining = Counter(labels)
    while remaining:
        turn, order = order[: len(remaining)], order[len(remaining) :]
        assert sorted(turn) == sorted(remaining)
        remaining -= Counter([*remaining])
    assert not order


def test_a_restored_call_is_the_next_of_its_priority_and_one_can_give_up_anywhere() -> None:
    calls = [*(Waiting(number, label="a") for number in (1, 2, 3)), Waiting(4, label="b")]
    queue = filled(*calls)
    queue.take(calls[0])
    queue.push(calls[0], front=True)
    queue.remove(calls[1])
    assert queue.count == 3
    assert sorted(call.id for call in queue) == [1, 3, 4]
    assert drain(queue) == [1, 4, 3]
    assert in_turn(queue) == []


def test_calls_of_other_kinds_pass_one_that_lets_them_and_none_of_its_own() -> None:
    queue = filled(*(Waiting(n, kind=kind) for n, kind in enumerate("xxyz")), Waiting(5, label="b", kind="x"))
    assert in_turn(queue) == [0, 5]
    assert in_turn(queue, "x") == [0, 2, 5]
    assert in_turn(queue, "xyz") == [0, 2, 3, 5]


def test_alarms_come_in_order_and_those_of_ended_calls_not_at_all() -> None:
    live = {1, 2, 3, 4}
    alarms = AlarmQueue(live.__contains__)
    for when, call in ((3.0, 1), (1.0, 2), (2.0, 3)):
        alarms.set(when, call, 3)
    assert alarms.next() == 1.0
    live.discard(2)
    assert alarms.next() == 2.0
    seen = []
    for call in alarms.due(2.5):
        seen.append(call)
        if call == 3:  # set while others are due
            alarms.set(2.5, 4, 3)
            alarms.set(4.0, 4, 3)
    assert seen == [3, 4]
    assert alarms.next() == 3.0
    assert list(alarms.due(9.0)) == [1, 4]
    assert alarms.next() is None


# ------------------------------------------------------------------------------------------- among tenants


@dataclass
class World:
    """Streams that take calls from a queue, each for its time."""

    streams: int = 1
    queue: FairQueue[Waiting] = field(default_factory=FairQueue)
    now: float = 0.0
    running: list[tuple[float, int, Waiting]] = field(default_factory=list)
    used_s: dict[str, float] = field(default_factory=partial(defaultdict, float))
    order: list[int] = field(default_factory=list)

    def push(self, *calls: Waiting) -> None:
        for call in calls:
            self.queue.push(call)

    def start(self) -> None:
        while len(self.running) < self.streams and self.queue:
            call = next(self.queue.in_turn(lambda _: False))
            self.queue.take(call, self.now)
            self.order.append(call.id)
            heapq.heappush(self.running, (self.now + call.cost_s, call.id, call))

    def step(self) -> Waiting:
        """Until the next call has ended."""
        self.now, _, call = heapq.heappop(self.running)
        self.queue.come_off(call, self.now)
        self.used_s[call.tenant.name] += call.cost_s
        return call

    def run(self, seconds: float, after: Callable[[Waiting], None] = lambda _: None) -> None:
        """Runs for so long, with `after` called for each call that ended."""
        end = self.now + seconds
        self.start()
        while self.running and self.now < end:
            after(self.step())
            self.start()

    def backlog(self, calls: Sequence[Waiting]) -> Callable[[Waiting], None]:
        """Gives every tenant so many calls that wait, one more for each that ended."""
        self.push(*calls)
        numbers = iter(range(10_000, 10_000_000))
        return lambda done: self.push(Waiting(next(numbers), done.tenant, done.cost_s, done.expected_s))


@given(
    streams=st.integers(1, 4),
    tenants=st.lists(
        st.tuples(st.sampled_from([0.5, 1, 2, 4]), st.floats(0.01, 3), st.sampled_from([0.0, 0.1, 1.0, 3.0])),
        min_size=2,
        max_size=5,
    ),
)
@example(4, [(0.5, 2.0, 0.0), (0.5, 0.01171875, 0.0)]).via("short calls that wait for long ones")
def test_device_seconds_go_by_weight_however_wrong_what_is_expected(
    streams: int, tenants: list[tuple[float, float, float]]
) -> None:
    world, waiting = World(streams), []
    for number, (weight, cost_s, factor) in enumerate(tenants):
        tenant = Tenant(str(number), weight)
        # So many that each has calls waiting, even if all streams are its own.
        waiting += [
            Waiting(100 * number + i, tenant, cost_s, factor * cost_s) for i in range(2 * streams + 2)
        ]
    again = world.backlog(waiting)
    longest_s = max(cost_s for _, cost_s, _ in tenants)
    least = min(weight for weight, _, _ in tenants)
    for _ in range(3):
        world.run(30 * longest_s, again)
        shares = [world.used_s[str(number)] / weight for number, (weight, _, _) in enumerate(tenants)]
        assert max(shares) - min(shares) <= (streams + 1) * 3 * longest_s / least


@pytest.mark.parametrize(("hogs", "modest", "late"), [(2, 5, True), (200, 1, True), (200, 5, False)])
def test_callers_with_one_call_at_a_time_get_their_shares_beside_any_number_of_calls(
    hogs: int, modest: int, late: bool
) -> None:
    """Their next call comes before the stream takes another one, or after."""
    world, hog = World(), Tenant("hog")
    waiting = [Waiting(i, hog, label=str(i), priority=100) for i in range(hogs)]
    again = world.backlog(waiting + [Waiting(900 + i, Tenant(str(i))) for i in range(modest)])
    for _ in range(100 * (modest + 1)):
        world.start()
        done = world.step()
        if late and done.tenant is not hog:
            world.start()
        again(done)
    assert world.used_s["hog"] <= 110
    assert all(world.used_s[str(i)] >= 95 for i in range(modest))


def test_a_tenant_that_was_away_has_saved_nothing_up() -> None:
    world, late = World(), Tenant("late")
    again = world.backlog([Waiting(i, Tenant("busy")) for i in range(3)])
    world.run(100, again)
    world.push(*(Waiting(100 + i, late) for i in range(3)))
    before = world.used_s["busy"]
    world.run(20, again)
    assert abs(world.used_s["late"] - (world.used_s["busy"] - before)) <= 2


def test_nobody_pays_later_for_what_no_one_else_wanted() -> None:
    world, alone, other = World(), Tenant("alone"), Tenant("other")
    world.push(Waiting(1, alone, cost_s=500.0, expected_s=0.001))
    world.run(600)
    world.push(Waiting(2, other), Waiting(3, alone), Waiting(4, other))
    world.run(10)
    assert world.order in ([1, 3, 2, 4], [1, 2, 3, 4])


def test_a_tenant_that_waits_has_its_turn_though_new_ones_never_cease_and_are_forgotten() -> None:
    world = World()
    world.push(*(Waiting(number, Tenant("old")) for number in range(200)))
    world.start()
    for number in range(1000, 1000 + max(300, 4 * MAX_TENANTS)):
        world.push(Waiting(number, Tenant(f"new {number}")))
        world.run(1)
        if number == 1300:
            # One more new one waits for each call of the old one: the n-th of those is one of n + 1.
            assert world.used_s["old"] >= 20
    world.run(10_000)
    world.push(*(Waiting(10_000 + number, Tenant(f"late {number}")) for number in range(4)))
    assert len(world.queue._tenants) <= MAX_TENANTS + 2


def test_devices_that_others_have_alone_are_no_credit_on_shared_ones() -> None:
    """Calls of one kind can leave through one stream only; another tenant's use all the others."""
    queue: FairQueue[Waiting] = FairQueue()
    confined, wide, late = Tenant("confined"), Tenant("wide"), Tenant("late")
    numbers = iter(range(1_000_000))
    used: Counter[str] = Counter()
    for step in range(300):
        if step == 200:
            used.clear()
        for tenant in (confined, wide, late)[: 3 if step >= 200 else 2]:
            while sum(call.tenant is tenant for call in queue) < 4:
                queue.push(Waiting(next(numbers), tenant, kind="" if tenant is wide else "confined"))
        taken: list[Waiting] = []
        for kinds in ({"confined", ""}, {""}, {""}, {""}):
            free = next(call for call in queue.in_turn(lambda _: True) if call.kind in kinds)
            queue.take(free, step)
            taken.append(free)
        for call in taken:
            queue.come_off(call, step + 1)
            used[call.tenant.name] += 1
    assert abs(used["late"] - used["confined"]) <= 20


def test_a_call_that_gives_up_is_charged_to_nobody_and_one_put_back_is_the_next() -> None:
    world, a, b = World(), Tenant("a"), Tenant("b")
    calls = [Waiting(1, a), Waiting(2, a), Waiting(3, b)]
    world.push(*calls)
    world.queue.remove(calls[0])
    assert len(world.queue) == 2
    assert sorted(call.id for call in world.queue) == [2, 3]
    world.start()
    world.queue.come_off(calls[1], 0.0)
    world.queue.push(calls[1], front=True)
    assert next(world.queue.in_turn(lambda _: False)) is calls[2]
    assert (world.queue.count, world.queue.running) == (2, 0)


def test_the_last_call_of_a_tenant_is_the_newest_of_its_least_priority() -> None:
    queue: FairQueue[Waiting] = FairQueue()
    assert queue.last("a") is None
    for number, priority in enumerate((5, 0, 0, 5)):
        queue.push(Waiting(number, Tenant("a"), priority=priority, label=f"{number}"))
    queue.push(Waiting(9, Tenant("b"), priority=-1))
    order = []
    while (last := queue.last("a")) is not None:
        order.append(last.id)
        queue.remove(last)
    assert order == [2, 1, 3, 0]
