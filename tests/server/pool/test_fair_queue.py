from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from npugrad_server.pool.fair_queue import MAX_TENANTS, FairQueue
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


@dataclass
class World:
    """Streams that take calls from a queue, each for its time."""

    streams: int = 1
    queue: FairQueue[Waiting] = field(default_factory=FairQueue)
    now: float = 0.0
    running: list[tuple[float, int, Waiting]] = field(default_factory=list)
    used_s: dict[str, float] = field(default_factory=partial(defaultdict, float))
    order: list[Waiting] = field(default_factory=list)

    def start(self) -> None:
        while len(self.running) < self.streams and self.queue:
            call = next(self.queue.in_turn(lambda _: False))
            self.queue.take(call, self.now)
            self.order.append(call)
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


def backlog(world: World, calls: Sequence[Waiting]) -> Callable[[Waiting], None]:
    """Gives every tenant so many calls that wait, one more for each that ended."""
    for call in calls:
        world.queue.push(call)
    numbers = iter(range(10_000, 10_000_000))

    def again(done: Waiting) -> None:
        world.queue.push(Waiting(next(numbers), done.tenant, done.cost_s, done.expected_s))

    return again


@settings(deadline=None)
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
    world = World(streams)
    waiting = []
    for number, (weight, cost_s, factor) in enumerate(tenants):
        tenant = Tenant(str(number), weight)
        # So many that each has calls waiting, even if all streams are its own.
        waiting += [
            Waiting(100 * number + i, tenant, cost_s, factor * cost_s) for i in range(2 * streams + 2)
        ]
    again = backlog(world, waiting)
    longest_s = max(cost_s for _, cost_s, _ in tenants)
    least = min(weight for weight, _, _ in tenants)
    for _ in range(3):
        world.run(30 * longest_s, again)
        shares = [world.used_s[str(number)] / weight for number, (weight, _, _) in enumerate(tenants)]
        assert max(shares) - min(shares) <= (streams + 1) * 3 * longest_s / least


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("modest", [1, 5])
@pytest.mark.parametrize("hogs", [2, 20, 200])
def test_callers_with_one_call_at_a_time_get_their_shares_beside_any_number_of_calls(
    hogs: int, modest: int, late: bool
) -> None:
    """Their next call comes before the stream takes another one, or after."""
    world, hog = World(), Tenant("hog")
    waiting = [Waiting(i, hog, label=str(i), priority=100) for i in range(hogs)]
    waiting += [Waiting(900 + i, Tenant(str(i))) for i in range(modest)]
    again = backlog(world, waiting)
    for _ in range(100 * (modest + 1)):
        world.start()
        done = world.step()
        if late and done.tenant is not hog:
            world.start()
        again(done)
    assert world.used_s["hog"] <= 110
    assert all(world.used_s[str(i)] >= 95 for i in range(modest))


def test_a_tenant_that_was_away_has_saved_nothing_up() -> None:
    world = World()
    busy, late = Tenant("busy"), Tenant("late")
    again = backlog(world, [Waiting(i, busy) for i in range(3)])
    world.run(100, again)
    for i in range(3):
        world.queue.push(Waiting(100 + i, late))
    before = world.used_s["busy"]
    world.run(20, again)
    assert abs(world.used_s["late"] - (world.used_s["busy"] - before)) <= 2


def test_nobody_pays_later_for_what_no_one_else_wanted() -> None:
    world = World()
    alone, other = Tenant("alone"), Tenant("other")
    world.queue.push(Waiting(1, alone, cost_s=500.0, expected_s=0.001))
    world.run(600)
    world.queue.push(Waiting(2, other))
    world.queue.push(Waiting(3, alone))
    world.queue.push(Waiting(4, other))
    world.run(10)
    assert [call.id for call in world.order] == [1, 3, 2, 4] or [c.id for c in world.order] == [1, 2, 3, 4]


def test_a_tenant_that_waits_has_its_turn_though_new_ones_never_cease() -> None:
    world = World()
    for number in range(200):
        world.queue.push(Waiting(number, Tenant("old")))
    world.start()
    for number in range(1000, 1300):
        world.queue.push(Waiting(number, Tenant(f"new {number}")))
        world.run(1)
    # One more new tenant waits for each call of the old one, so that the n-th of those is one of n + 1.
    assert world.used_s["old"] >= 20


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
            free = [call for call in queue.in_turn(lambda _: True) if call.kind in kinds]
            queue.take(free[0], step)
            taken.append(free[0])
        for call in taken:
            queue.come_off(call, step + 1)
            used[call.tenant.name] += 1
    assert abs(used["late"] - used["confined"]) <= 20


def test_tenants_that_are_gone_are_forgotten() -> None:
    world = World()
    for number in range(4 * MAX_TENANTS):
        world.queue.push(Waiting(2 * number, Tenant("old")))
        world.queue.push(Waiting(2 * number + 1, Tenant(f"new {number}")))
        world.run(2)
    assert len(world.queue._tenants) <= MAX_TENANTS + 2


def test_a_call_that_gives_up_is_charged_to_nobody_and_one_put_back_is_the_next() -> None:
    world = World()
    a, b = Tenant("a"), Tenant("b")
    calls = [Waiting(1, a), Waiting(2, a), Waiting(3, b)]
    for call in calls:
        world.queue.push(call)
    world.queue.remove(calls[0])
    assert len(world.queue) == 2
    assert sorted(call.id for call in world.queue) == [2, 3]
    world.start()
    world.queue.come_off(calls[1], 0.0)
    world.queue.push(calls[1], front=True)
    assert next(world.queue.in_turn(lambda _: False)) is calls[2]
    assert world.queue.count == 2
    assert world.queue.running == 0


def test_the_last_call_of_a_tenant_is_the_newest_of_its_least_priority() -> None:
    queue: FairQueue[Waiting] = FairQueue()
    assert queue.last("a") is None
    calls = [Waiting(n, Tenant("a"), priority=p, label=f"{n}") for n, p in enumerate((5, 0, 0, 5))]
    for call in calls:
        queue.push(call)
    queue.push(Waiting(9, Tenant("b"), priority=-1))
    order = []
    while (last := queue.last("a")) is not None:
        order.append(last.id)
        queue.remove(last)
    assert order == [2, 1, 3, 0]
