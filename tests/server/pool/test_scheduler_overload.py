"""Admission and scheduler under five times what the devices can do, on a clock that the test moves."""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.server.pool.scheduling import SETTINGS, open_scheduler

from npugrad.call import CallOptions
from npugrad.errors import ServerBusy
from npugrad_server.pool.admission import AdmissionControl, Demand, RegionLayout
from npugrad_server.pool.commands import Command, FailCall, StartCall
from npugrad_server.pool.run_times import WorkSize
from npugrad_server.pool.state import CallState
from npugrad_server.pool.tenant import Tenant

DEVICES, RUN_S, OVERLOAD, DEADLINE_S = 2, 0.04, 5.0, 2.0
TENANTS = tuple(Tenant(name, weight) for name, weight in (("light", 1.0), ("middle", 2.0), ("heavy", 4.0)))
FROM_S, UNTIL_S = 5.0, 20.0
"""What is counted: before, queues fill and rates are learned."""
WORK = WorkSize(("op", "float32", 10), math.log(1000))
DEMAND = Demand(RegionLayout({}, 0), RegionLayout({}, 0), 0, work=WORK)
PLAN: Any = SimpleNamespace(record=SimpleNamespace(name="op"), demands={False: DEMAND}, signature=b"")


class Crowd:
    """Tenants that send at random times, and devices whose calls take about as long as each other.

    Now and then everything is slower for a while, as it is on a host that has other work.

    Attributes:
        busy_s: Seconds of devices by tenant.
        counts: Calls that were admitted, launched, in time and so on.
    """

    def __init__(self, seed: int, demands: Sequence[float], spread: float, slow: float = 1.0) -> None:
        self._rng, self._spread = random.Random(seed), spread
        self._slow, self._is_slow, self._turns_s = slow, True, 0.0
        self._scheduler = open_scheduler(DEVICES, settings=SETTINGS)
        self._admission = AdmissionControl(replace(SETTINGS, max_queue_depth=100_000), 1024)
        self._calls: dict[int, CallState] = {}
        rate = OVERLOAD * DEVICES / RUN_S / sum(demands)
        self._rates = {tenant.name: rate * demand for tenant, demand in zip(TENANTS, demands, strict=True)}
        self._events: list[tuple[float, int, Any]] = []
        self._numbers = iter(range(10**9))
        self.busy_s: defaultdict[str, float] = defaultdict(float)
        self.counts = Counter[str]()

    def run(self) -> None:
        for tenant in TENANTS:
            self._later(self._rng.expovariate(self._rates[tenant.name]), tenant)
        while self._events[0][0] < UNTIL_S:
            now, _, event = heapq.heappop(self._events)
            alarm = self._scheduler.next_alarm()
            if alarm is not None and alarm <= now:
                self._obey(self._scheduler.tick(now), now)
            if isinstance(event, Tenant):
                self._later(now + self._rng.expovariate(self._rates[event.name]), event)
                self._send(event, now)
            else:
                start, seconds = event
                self._answer(start, seconds, now)

    def _later(self, at: float, event: Any) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), event))

    def _count(self, what: str, now: float) -> None:
        self.counts[what] += now >= FROM_S

    def _send(self, tenant: Tenant, now: float) -> None:
        planned: Any = SimpleNamespace(
            plan=PLAN, options=CallOptions(), tenant=tenant, deadline_s=now + DEADLINE_S, request_id=""
        )
        scheduler = self._scheduler
        try:
            _, _, found = self._admission.reserve(planned, scheduler.queue_depth, scheduler.forecast, now)
        except ServerBusy as error:
            self._count(f"refused {error.reason}", now)
            return
        self._count("admitted", now)
        number = next(self._numbers)
        call = self._calls[number] = CallState(
            number,
            operator="op",
            tenant=tenant,
            work=WORK,
            deadline_s=planned.deadline_s,
            plan=PLAN,
            expected_s=found.expected_s,
            longest_run_s=found.longest_run_s,
            is_probe=found.is_probe,
        )
        self._obey(scheduler.submit(call, now), now)

    def _answer(self, start: StartCall, seconds: float, now: float) -> None:
        call = self._calls[start.call]
        self._count("in time" if now <= (call.deadline_s or 0.0) else "late", now)
        out = self._scheduler.answered(
            start.worker, start.incarnation, start.call, True, now, seconds=seconds
        )
        self._obey(out, now)
        self._obey(self._scheduler.close(start.call, now), now)

    def _slowness(self, now: float) -> float:
        """How many times longer a call takes that starts now."""
        while now >= self._turns_s:
            self._is_slow = not self._is_slow
            self._turns_s += self._rng.uniform(0.5, 2.0) if self._is_slow else self._rng.uniform(2.0, 6.0)
        return self._slow if self._is_slow else 1.0

    def _obey(self, commands: Iterable[Command], now: float) -> None:
        for command in commands:
            if isinstance(command, StartCall):
                seconds = RUN_S * self._rng.lognormvariate(0, self._spread) * self._slowness(now)
                self._count("launched", now)
                counted_s = min(now + seconds, UNTIL_S) - max(now, FROM_S)
                self.busy_s[self._calls[command.call].tenant.name] += max(counted_s, 0.0)
                self._later(now + seconds, (command, seconds))
            elif isinstance(command, FailCall):
                self._count(f"failed {command.reason}", now)
                self._obey(self._scheduler.close(command.call, now), now)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("demands", "spread", "slow"),
    [
        pytest.param((3, 2, 1), 0.3, 1.0, id="against-the-weights"),
        pytest.param((20, 3, 4), 0.05, 1.0, id="one-hog"),
        pytest.param((1, 1, 1), 0.05, 1.25, id="slow-spells"),
    ],
)
def test_overload_costs_neither_throughput_nor_shares_nor_deadlines(
    demands: Sequence[float], spread: float, slow: float
) -> None:
    crowd = Crowd(1, demands, spread, slow)
    crowd.run()
    counts = crowd.counts
    assert counts["refused WOULD_MISS_DEADLINE"] > 3 * counts["admitted"]
    assert sum(crowd.busy_s.values()) >= 0.99 * DEVICES * (UNTIL_S - FROM_S)
    shares = [crowd.busy_s[tenant.name] / tenant.weight for tenant in TENANTS]
    assert sum(shares) ** 2 / len(shares) / sum(share**2 for share in shares) >= 0.99
    failed = sum(count for what, count in counts.items() if what.startswith("failed"))
    assert counts["in time"] >= 0.99 * (counts["in time"] + counts["late"] + failed)
    assert counts["late"] <= 0.01 * counts["launched"]
