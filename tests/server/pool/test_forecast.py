"""Predictions, on a clock that the test moves."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from tests.server.pool.scheduling import finish, of, open_scheduler, started

from npugrad_server.pool.commands import Command, FailCall, StartCall
from npugrad_server.pool.forecast import Forecast
from npugrad_server.pool.placement import EligibilityTable
from npugrad_server.pool.run_times import STALE_S, WorkSize
from npugrad_server.pool.scheduler import Scheduler
from npugrad_server.pool.state import CallState
from npugrad_server.pool.tenant import Tenant

WORK = WorkSize(("op", "float32", 10), math.log(1000))
KIND = ("op", False)
LIGHT, HEAVY = Tenant("light", 1.0), Tenant("heavy", 4.0)


def taught(scheduler: Scheduler, device: int = 0, seconds: float = 1.0) -> Scheduler:
    """The same, which has seen many calls that took so long."""
    for now in range(200):
        scheduler.forecast.run_times.learn(device, WORK, seconds, now / 200)
    return scheduler


def call(
    number: int,
    tenant: Tenant = LIGHT,
    *,
    expected_s: float = 1.0,
    deadline_s: float | None = None,
    label: str = "",
) -> CallState:
    return CallState(
        number,
        operator="op",
        tenant=tenant,
        work=WORK,
        expected_s=expected_s,
        deadline_s=deadline_s,
        label=label,
    )


def wait_s(scheduler: Scheduler, tenant: Tenant, now: float, label: str = "") -> float:
    return scheduler.forecast.predict(tenant, KIND, WORK, now, (0, label), sent=False).wait_s


def test_who_only_asks_is_not_taken_for_a_sender() -> None:
    scheduler = taught(open_scheduler(streams=1))
    for _ in range(1000):
        assert wait_s(scheduler, HEAVY, 0) == 0
    scheduler.submit(call(1), 0)
    scheduler.submit(call(2), 0)
    assert wait_s(scheduler, LIGHT, 0) == pytest.approx(2)


def test_a_wait_is_known_where_a_call_can_start_or_what_is_ahead_is() -> None:
    scheduler = open_scheduler(streams=1)
    predict = scheduler.forecast.predict
    assert predict(LIGHT, KIND, WORK, 0, sent=False).is_wait_known
    scheduler.submit(call(1, expected_s=0.0), 0)
    assert not predict(LIGHT, KIND, WORK, 0, sent=False).is_wait_known, (
        "nobody knows how long the first one runs"
    )
    scheduler.submit(call(2, expected_s=1.0), 0)
    assert predict(LIGHT, KIND, WORK, 0, sent=False).is_wait_known
    assert not Forecast((), EligibilityTable(())).predict(LIGHT, KIND, WORK, 0).is_wait_known


def test_a_call_that_can_start_does_not_wait() -> None:
    scheduler = taught(open_scheduler(streams=2))
    scheduler.submit(call(1), 0)
    found = scheduler.forecast.predict(LIGHT, KIND, WORK, 0)
    assert found.wait_s == 0
    assert found.expected_s == pytest.approx(1, rel=0.01)
    assert 1 < found.longest_s < 1.2


def test_a_call_waits_for_its_own_tenant_and_what_runs() -> None:
    scheduler = taught(open_scheduler(streams=2))
    for number in range(6):
        scheduler.submit(call(number), 0)
    assert wait_s(scheduler, LIGHT, 0) == pytest.approx((2 + 4) / 2, rel=0.01)
    assert wait_s(scheduler, LIGHT, 0.5) == pytest.approx((2 * 0.5 + 4) / 2, rel=0.01)


def test_an_unknown_call_counts_like_the_average() -> None:
    scheduler = open_scheduler()
    first = scheduler.submit(call(1, expected_s=0.0), 0)
    finish_in(scheduler, first, 2.0)
    for number in (2, 3):
        scheduler.submit(call(number, expected_s=0.0), 2)
    assert wait_s(scheduler, LIGHT, 2) == pytest.approx(4, rel=0.01)


def finish_in(
    scheduler: Scheduler, commands: list[Command], seconds: float, now: float = 2.0
) -> list[Command]:
    (start,) = of(StartCall, commands)
    out = scheduler.answered(start.worker, start.incarnation, start.call, True, now, seconds=seconds)
    return out + scheduler.close(start.call, now)


def test_nothing_is_promised_or_refused_while_no_device_is_ready() -> None:
    scheduler = open_scheduler()
    for number in (1, 2):
        scheduler.submit(call(number), 0)
    assert wait_s(scheduler, LIGHT, 0) > 0
    scheduler.lost(0, 1, "killed", 0)
    assert wait_s(scheduler, LIGHT, 0) == 0


def test_another_tenant_takes_no_more_than_its_share_and_what_it_has() -> None:
    scheduler = taught(open_scheduler())
    for number in range(5):
        scheduler.submit(call(number, LIGHT), 0)
    for number in range(5, 7):
        scheduler.submit(call(number, HEAVY), 0)
    assert wait_s(scheduler, LIGHT, 0) == pytest.approx(1 + 4 + 2, rel=0.01)
    # The heavy one gets four times as much, so that less than all of the light one's is ahead of it.
    assert wait_s(scheduler, HEAVY, 0) == pytest.approx(1 + 2 + (2 + 1) / 4, rel=0.01)


def test_what_another_tenant_goes_on_sending_is_counted_up_to_its_share() -> None:
    """It was not: half of the calls that were let in while a heavier tenant's queue filled up came late."""
    scheduler = taught(open_scheduler(), seconds=0.1)
    for tick in range(200):  # half of what the device can do
        scheduler.forecast.predict(HEAVY, KIND, WORK, tick * 0.2)
    for number in range(6):
        scheduler.submit(call(number, LIGHT, expected_s=0.1), 40)
    assert wait_s(scheduler, LIGHT, 40) == pytest.approx(0.6 / (1 - 1.1 / 2), rel=0.1)
    for tick in range(800):  # twice of what it can do
        scheduler.forecast.predict(HEAVY, KIND, WORK, 40 + tick * 0.05)
    assert wait_s(scheduler, LIGHT, 80) == pytest.approx(0.51 + 0.6 * 4, rel=0.05)


def test_labels_of_a_tenant_take_turns() -> None:
    scheduler = taught(open_scheduler())
    for number in range(9):
        scheduler.submit(call(number, label="batch"), 0)
    assert wait_s(scheduler, LIGHT, 0, "batch") == pytest.approx(9, rel=0.01)
    assert wait_s(scheduler, LIGHT, 0, "fresh") == pytest.approx(2, rel=0.01)


def test_what_no_longer_waits_is_not_counted() -> None:
    scheduler = taught(open_scheduler())
    first = scheduler.submit(call(0), 0)
    for number in range(1, 5):
        scheduler.submit(call(number, label=str(number % 2)), 0)
    scheduler.cancel(1, 0)
    scheduler.close(2, 0)
    assert wait_s(scheduler, LIGHT, 0, "0") == pytest.approx(1 + 2, rel=0.01)
    assert scheduler.forecast.queued_s == pytest.approx(2, rel=0.01)
    finish(scheduler, of(StartCall, first)[0], 1.0)
    assert wait_s(scheduler, LIGHT, 1, "0") == pytest.approx(1 + 1, rel=0.01)
    scheduler.lost(0, 1, "killed", 1)
    assert scheduler.forecast._queued == 2  # the one that ran waits again
    for number in (3, 4):
        scheduler.cancel(number, 1)
    assert scheduler.forecast._queued == scheduler.forecast.queued_s == 0


def test_a_call_whose_deadline_its_run_would_pass_is_not_started() -> None:
    scheduler = taught(open_scheduler())
    first = scheduler.submit(call(1), 0)
    scheduler.submit(call(2, deadline_s=1.5), 0)
    scheduler.submit(call(3, deadline_s=9), 0)
    out = finish(scheduler, of(StartCall, first)[0], 1.0)
    (failed,) = of(FailCall, out)
    assert (failed.call, failed.reason) == (2, "WOULD_MISS_DEADLINE")
    assert "of running predicted when its turn came; expected at most 0.5 s" in failed.detail
    assert started(out) == [3]


def test_a_call_is_placed_where_it_is_done_first() -> None:
    scheduler = open_scheduler(2)
    taught(scheduler, 0, 4.0)
    taught(scheduler, 1, 1.0)
    (start,) = of(StartCall, scheduler.submit(call(1), 0))
    assert start.worker == 1
    assert [c.worker for c in of(StartCall, scheduler.submit(call(2, deadline_s=3), 0))] == []
    assert [c.worker for c in of(StartCall, scheduler.submit(call(3, deadline_s=9), 0))] == []


def run_alone(scheduler: Scheduler, seconds: dict[int, float], calls: int, now: float = 2.0) -> Counter[int]:
    """How many of some calls, one after another, each device got; each takes its device's seconds."""
    got: Counter[int] = Counter()
    for number in range(calls):
        commands = scheduler.submit(call(number), now)
        (start,) = of(StartCall, commands)
        got[start.worker] += 1
        now += seconds[start.worker]
        finish_in(scheduler, commands, seconds[start.worker], now)
    return got


def test_devices_that_are_nearly_alike_take_turns() -> None:
    """The one that was quicker by a hair got every call."""
    scheduler = open_scheduler(2)
    taught(scheduler, 0, 0.010)
    taught(scheduler, 1, 0.011)
    assert run_alone(scheduler, {0: 0.010, 1: 0.011}, 40) == {0: 20, 1: 20}


def test_a_device_is_not_given_up_for_a_first_call_that_was_slow() -> None:
    scheduler = open_scheduler(2)
    taught(scheduler, 0, 0.01)
    scheduler.forecast.run_times.learn(1, WORK, 0.4, 2.0)
    assert run_alone(scheduler, {0: 0.01, 1: 0.01}, 40)[1] >= 19


def test_a_slow_device_gets_less_and_is_tried_again() -> None:
    scheduler = open_scheduler(2)
    taught(scheduler, 0, 0.01)
    taught(scheduler, 1, 0.04)
    assert run_alone(scheduler, {0: 0.01, 1: 0.04}, 52) == {0: 49, 1: 3}
    # Its times are old by now: it shows what it can do, and has become as quick as the other one.
    assert run_alone(scheduler, {0: 0.01, 1: 0.01}, 1, now=4 + STALE_S)[1] == 1
    assert run_alone(scheduler, {0: 0.01, 1: 0.04}, 16, now=4 + STALE_S)[0] == 16


def test_a_device_that_was_measured_on_a_busy_host_is_not_left_idle() -> None:
    """It got no call for a minute, though it was as quick as the other one."""
    scheduler = open_scheduler(2)
    taught(scheduler, 0, 0.01)
    taught(scheduler, 1, 0.05)
    got = run_alone(scheduler, {0: 0.01, 1: 0.01}, 2000)
    assert got[1] > 500


def test_a_device_that_a_call_does_not_fit_into_does_not_have_it_given_up() -> None:
    scheduler = taught(open_scheduler(2, device=4096))
    scheduler.workers[0].memory_bytes = 512
    scheduler.lost(1, scheduler.workers[1].incarnation, "gone", 0)
    waiting = call(1, deadline_s=1.5)
    waiting.device_bytes = 1024
    assert not of(FailCall, scheduler.submit(waiting, 0))
    assert not of(FailCall, scheduler.tick(1.0)), "it waits for the other device, which may be quick"
    assert of(FailCall, scheduler.tick(1.5))[0].reason == "DEADLINE_EXCEEDED"
