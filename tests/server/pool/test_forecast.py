"""Predictions, on a clock that the test moves."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from tests.server.pool.scheduling import Driven, of, open_scheduler, refused, started

from npugrad_server.pool.commands import FailCall, StartCall
from npugrad_server.pool.forecast import Forecast
from npugrad_server.pool.placement import EligibilityTable
from npugrad_server.pool.run_times import STALE_S, WorkSize
from npugrad_server.pool.state import CallState
from npugrad_server.pool.tenant import Tenant

WORK = WorkSize(("op", "float32", 10), math.log(1000))
KIND = ("op", False)
LIGHT, HEAVY = Tenant("light", 1.0), Tenant("heavy", 4.0)


def taught(*seconds: float, workers: int = 0, **facts: Any) -> Driven:
    """A scheduler with devices that have done many calls, each in so long; with some that have done none."""
    scheduler = open_scheduler(max(len(seconds), workers), **facts)
    for device, each in enumerate(seconds):
        for now in range(200):
            scheduler.forecast.run_times.learn(device, WORK, each, now / 200)
    return scheduler


def call(number: int, tenant: Tenant = LIGHT, expected_s: float = 1.0, **facts: Any) -> CallState:
    return CallState(number, operator="op", tenant=tenant, work=WORK, expected_s=expected_s, **facts)


def put(scheduler: Driven, *numbers: int, now: float = 0, **facts: Any) -> list[StartCall]:
    commands = [c for number in numbers for c in scheduler.submit(call(number, **facts), now)]
    return of(StartCall, commands)


def wait_s(scheduler: Driven, tenant: Tenant, now: float, label: str = "") -> float:
    return scheduler.forecast.predict(tenant, KIND, WORK, now, (0, label), sent=False).wait_s


def about(seconds: float, rel: float = 0.01) -> Any:
    return pytest.approx(seconds, rel=rel)


def test_who_only_asks_is_not_taken_for_a_sender() -> None:
    scheduler = taught(1.0)
    for _ in range(1000):
        assert wait_s(scheduler, HEAVY, 0) == 0
    put(scheduler, 1, 2)
    assert wait_s(scheduler, LIGHT, 0) == pytest.approx(2)


def test_a_wait_is_known_where_a_call_can_start_or_what_is_ahead_is() -> None:
    scheduler = open_scheduler()
    predict = scheduler.forecast.predict
    assert predict(LIGHT, KIND, WORK, 0, sent=False).is_wait_known
    put(scheduler, 1, expected_s=0.0)
    known = predict(LIGHT, KIND, WORK, 0, sent=False).is_wait_known
    assert not known, "nobody knows how long the first one runs"
    put(scheduler, 2)
    assert predict(LIGHT, KIND, WORK, 0, sent=False).is_wait_known
    assert not Forecast((), EligibilityTable(())).predict(LIGHT, KIND, WORK, 0).is_wait_known


def test_a_call_waits_for_its_own_tenant_and_what_runs_unless_it_can_start() -> None:
    scheduler = taught(1.0, streams=2)
    put(scheduler, 0)
    found = scheduler.forecast.predict(LIGHT, KIND, WORK, 0, sent=False)
    assert found.wait_s == 0
    assert found.expected_s == about(1)
    assert 1 < found.longest_s < 1.2
    put(scheduler, *range(1, 6))
    assert wait_s(scheduler, LIGHT, 0) == about((2 + 4) / 2)
    assert wait_s(scheduler, LIGHT, 0.5) == about((2 * 0.5 + 4) / 2)


def test_an_unknown_call_counts_like_the_average_and_nothing_is_promised_without_a_device() -> None:
    scheduler = open_scheduler()
    (first,) = put(scheduler, 1, expected_s=0.0)
    scheduler.finish(first, 2.0, seconds=2.0)
    put(scheduler, 2, 3, now=2, expected_s=0.0)
    assert wait_s(scheduler, LIGHT, 2) == about(4)
    scheduler.lose(now=2)
    assert wait_s(scheduler, LIGHT, 2) == 0


def test_another_tenant_takes_no_more_than_its_share_and_what_it_has() -> None:
    scheduler = taught(1.0)
    put(scheduler, *range(5))
    put(scheduler, 5, 6, tenant=HEAVY)
    assert wait_s(scheduler, LIGHT, 0) == about(1 + 4 + 2)
    # The heavy one gets four times as much, so that less than all of the light one's is ahead of it.
    assert wait_s(scheduler, HEAVY, 0) == about(1 + 2 + (2 + 1) / 4)


def test_what_another_tenant_goes_on_sending_is_counted_up_to_its_share() -> None:
    """It was not: half of the calls that were let in while a heavier tenant's queue filled up came late."""
    scheduler = taught(0.1)
    for tick in range(200):  # half of what the device can do
        scheduler.forecast.predict(HEAVY, KIND, WORK, tick * 0.2)
    put(scheduler, *range(6), now=40, expected_s=0.1)
    assert wait_s(scheduler, LIGHT, 40) == about(0.6 / (1 - 1.1 / 2), 0.1)
    for tick in range(800):  # twice of what it can do
        scheduler.forecast.predict(HEAVY, KIND, WORK, 40 + tick * 0.05)
    assert wait_s(scheduler, LIGHT, 80) == about(0.51 + 0.6 * 4, 0.05)


def test_labels_of_a_tenant_take_turns() -> None:
    scheduler = taught(1.0)
    put(scheduler, *range(9), label="batch")
    assert wait_s(scheduler, LIGHT, 0, "batch") == about(9)
    assert wait_s(scheduler, LIGHT, 0, "fresh") == about(2)


def test_what_no_longer_waits_is_not_counted() -> None:
    scheduler = taught(1.0)
    (first,) = put(scheduler, 0)
    for number in range(1, 5):
        put(scheduler, number, label=str(number % 2))
    scheduler.cancel(1, 0)
    scheduler.close(2, 0)
    assert wait_s(scheduler, LIGHT, 0, "0") == about(1 + 2)
    assert scheduler.forecast.queued_s == about(2)
    scheduler.finish(first, 1.0)
    assert wait_s(scheduler, LIGHT, 1, "0") == about(1 + 1)
    scheduler.lose(now=1)
    assert scheduler.forecast._queued == 2  # the one that ran waits again
    for number in (3, 4):
        scheduler.cancel(number, 1)
    assert scheduler.forecast._queued == scheduler.forecast.queued_s == 0


# --------------------------------------------------------------------------------------- what calls become


def test_a_call_whose_deadline_its_run_would_pass_is_not_started() -> None:
    scheduler = taught(1.0)
    (first,) = put(scheduler, 1)
    put(scheduler, 2, deadline_s=1.5)
    put(scheduler, 3, deadline_s=9.0)
    out = scheduler.finish(first, 1.0)
    (failed,) = of(FailCall, out)
    assert (failed.call, failed.reason) == (2, "WOULD_MISS_DEADLINE")
    assert "of running predicted when its turn came; expected at most 0.5 s" in failed.detail
    assert started(out) == [3]


def test_a_call_is_placed_where_it_is_done_first() -> None:
    scheduler = taught(4.0, 1.0)
    assert [start.worker for start in put(scheduler, 1)] == [1]
    assert put(scheduler, 2, deadline_s=3.0) == put(scheduler, 3, deadline_s=9.0) == []


def test_a_device_that_a_call_does_not_fit_into_does_not_have_it_given_up() -> None:
    scheduler = taught(1.0, workers=2, device=4096)
    scheduler.workers[0].memory_bytes = 512
    scheduler.lose(1)
    assert not refused(scheduler.submit(call(1, deadline_s=1.5, device_bytes=1024), 0))
    assert not refused(scheduler.tick(1.0)), "it waits for the other device, which may be quick"
    assert refused(scheduler.tick(1.5)) == [(1, "DEADLINE_EXCEEDED")]


def run_alone(scheduler: Driven, first_s: float, second_s: float, calls: int, now: float = 2.0) -> list[int]:
    """How many of some calls, one after another, each device got; each takes its device's seconds."""
    got: Counter[int] = Counter()
    for number in range(calls):
        (start,) = put(scheduler, number, now=now)
        got[start.worker] += 1
        took_s = (first_s, second_s)[start.worker]
        now += took_s
        scheduler.finish(start, now, seconds=took_s)
    return [got[0], got[1]]


def test_devices_that_are_nearly_alike_take_turns() -> None:
    """The one that was quicker by a hair got every call."""
    assert run_alone(taught(0.010, 0.011), 0.010, 0.011, 40) == [20, 20]


def test_a_device_is_not_given_up_for_a_first_call_that_was_slow() -> None:
    scheduler = taught(0.01, workers=2)
    scheduler.forecast.run_times.learn(1, WORK, 0.4, 2.0)
    assert run_alone(scheduler, 0.01, 0.01, 40)[1] >= 19


def test_a_slow_device_gets_less_and_is_tried_again() -> None:
    scheduler = taught(0.01, 0.04)
    assert run_alone(scheduler, 0.01, 0.04, 52) == [49, 3]
    # Its times are old by now: it shows what it can do, and has become as quick as the other one.
    assert run_alone(scheduler, 0.01, 0.01, 1, now=4 + STALE_S)[1] == 1
    assert run_alone(scheduler, 0.01, 0.04, 16, now=4 + STALE_S)[0] == 16


def test_a_device_that_was_measured_on_a_busy_host_is_not_left_idle() -> None:
    """It got no call for a minute, though it was as quick as the other one."""
    assert run_alone(taught(0.01, 0.05), 0.01, 0.01, 2000)[1] > 500
