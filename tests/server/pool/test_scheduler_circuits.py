"""Whose fault the end of a worker is, and what becomes of calls like the one that killed it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from tests.server.pool.scheduling import SETTINGS, finish, of, open_scheduler, started

from npugrad_server.backends.base import RestartPolicy
from npugrad_server.pool.call_lifecycle import TRIAL_GRACE_S
from npugrad_server.pool.circuit_breaker import OPEN_S
from npugrad_server.pool.commands import (
    CircuitChanged,
    Command,
    CompleteCall,
    FailCall,
    Failure,
    KillWorker,
    ReleaseCall,
    RequeueCall,
    StartCall,
)
from npugrad_server.pool.scheduler import Scheduler
from npugrad_server.pool.state import CallState
from npugrad_server.pool.tenant import Tenant
from npugrad_server.pool.types import DeviceState

GRACE_S = SETTINGS.hang_grace_s


@dataclass(frozen=True)
class Plan:
    """All that the scheduler knows of a call's plan."""

    signature: bytes


POISON, GOOD = Plan(b"poison"), Plan(b"good")


def call(number: int, plan: Plan = POISON, **changes: Any) -> CallState:
    return CallState(number, plan=plan, **changes)


def lose(scheduler: Scheduler, start: StartCall, now: float) -> list[Command]:
    return scheduler.lost(start.worker, start.incarnation, "signal 9", now)


def be_back(scheduler: Scheduler, worker: int, now: float) -> list[Command]:
    """The next process of a device is there."""
    scheduler.tick(now)
    return scheduler.ready(worker, scheduler.workers[worker].incarnation, now)


def poisoned(workers: int = 2, now: float = 0.0) -> Scheduler:
    """A scheduler whose circuit was just opened by call 1, with every worker ready."""
    scheduler = open_scheduler(workers)
    (start,) = of(StartCall, scheduler.submit(call(1), now))
    (again,) = of(StartCall, lose(scheduler, start, now) + be_back(scheduler, start.worker, now + 1))
    lose(scheduler, again, now + 1)
    scheduler.close(1, now + 1)
    for worker in range(workers):
        be_back(scheduler, worker, now + 2)
    return scheduler


def reasons(commands: list[Command]) -> list[tuple[int, str]]:
    return [(failed.call, failed.reason) for failed in of(FailCall, commands)]


def test_a_call_that_killed_two_workers_gets_no_third_and_calls_like_it_none() -> None:
    scheduler = open_scheduler(3)
    (start,) = of(StartCall, scheduler.submit(call(1), 0))
    (again,) = of(StartCall, lose(scheduler, start, 1))
    commands = lose(scheduler, again, 2)
    assert reasons(commands) == [(1, "WORKER_LOST")]
    assert of(CircuitChanged, commands) == [CircuitChanged(1, 2)]
    refused = scheduler.submit(call(2), 5)
    assert started(refused) == []
    (failed,) = of(FailCall, refused)
    assert (failed.reason, failed.retry_after_s) == ("CIRCUIT_OPEN", OPEN_S - 3)
    assert of(ReleaseCall, scheduler.close(2, 5)) == [ReleaseCall(2)]


@pytest.mark.parametrize(
    "other", [call(2, GOOD), call(2, tenant=Tenant("another"))], ids=["signature", "tenant"]
)
def test_others_are_served(other: CallState) -> None:
    scheduler = poisoned()
    assert started(scheduler.submit(replace(other), 3)) == [2]


def test_calls_that_wait_are_refused_when_it_opens_and_others_go_on() -> None:
    scheduler = open_scheduler(1)
    (start,) = of(StartCall, scheduler.submit(call(1), 0))
    scheduler.submit(call(2), 0)
    scheduler.submit(call(3, GOOD), 0)
    lose(scheduler, start, 0)
    (again,) = of(StartCall, be_back(scheduler, 0, 1))
    assert again.call == 1
    commands = lose(scheduler, again, 1)
    assert reasons(commands) == [(2, "CIRCUIT_OPEN"), (1, "WORKER_LOST")]
    assert started(be_back(scheduler, 0, 2)) == [3]


def test_a_death_is_nobodys_fault_once_another_worker_has_done_the_call() -> None:
    """Processes are killed one after the other under calls of one signature: all of them are answered."""
    scheduler, now = open_scheduler(2, settings=replace(SETTINGS, max_respawns=99)), 0.0
    for number in range(20):
        (start,) = of(StartCall, scheduler.submit(call(number), now))
        (again,) = of(StartCall, lose(scheduler, start, now))
        assert of(CompleteCall, finish(scheduler, again, now)) == [CompleteCall(number)]
        now += SETTINGS.respawn_backoff_max_s
        be_back(scheduler, start.worker, now)
    assert len(scheduler.circuits) == 0


def test_deaths_count_once_their_calls_ended_without_a_result() -> None:
    """Their deadlines pass while they wait for another try."""
    scheduler = open_scheduler(1)
    for number, now in ((1, 0.0), (2, 10.0)):
        (start,) = of(StartCall, scheduler.submit(call(number, deadline_s=now + 0.25), now))
        lose(scheduler, start, now)
        assert scheduler.circuits.open_count == 0
        commands = scheduler.tick(now + 0.25)
        assert reasons(commands) == [(number, "DEADLINE_EXCEEDED")]
        be_back(scheduler, 0, now + 1)
    assert of(CircuitChanged, commands) == [CircuitChanged(2, 2)]


@pytest.mark.parametrize("leaves", ["cancel", "close", "tick"])
def test_a_death_after_the_caller_left_is_the_calls_fault(leaves: str) -> None:
    scheduler = open_scheduler(2)
    for number in (1, 2):
        (start,) = of(StartCall, scheduler.submit(call(number, deadline_s=0.25), 0))
        scheduler.tick(0.25) if leaves == "tick" else getattr(scheduler, leaves)(number, 0.1)
        commands = lose(scheduler, start, 0.3)
        assert of(RequeueCall, commands) == []
    assert of(CircuitChanged, commands) == [CircuitChanged(2, 2)]
    assert [worker.failures for worker in scheduler.workers] == [0, 0]


def test_a_worker_that_is_ended_for_a_call_is_that_calls_fault_and_of_nobody_beside_it() -> None:
    scheduler = open_scheduler(1, streams=2)
    for turn, now in enumerate((0.0, 100.0)):
        scheduler.submit(call(2 * turn, deadline_s=now + 1), now)
        scheduler.submit(call(2 * turn + 1, GOOD), now)
        scheduler.tick(now + 1)
        scheduler.tick(now + 1 + GRACE_S)
        incarnation = scheduler.workers[0].incarnation
        commands = scheduler.lost(0, incarnation, "signal 9", now + 1 + GRACE_S)
        assert of(RequeueCall, commands) == [RequeueCall(2 * turn + 1, 0)]
        assert scheduler.workers[0].failures == 0
        (again,) = of(StartCall, be_back(scheduler, 0, now + 20))
        finish(scheduler, again, now + 20)
    # They were more than a window apart.
    assert (len(scheduler.circuits), scheduler.circuits.open_count) == (1, 0)


def test_a_death_under_several_calls_is_of_the_one_that_the_failure_names() -> None:
    scheduler = open_scheduler(1, streams=2)
    for number, plan in ((1, POISON), (2, GOOD)):
        scheduler.submit(call(number, plan), 0)
    lost = scheduler.lost(0, 1, "signal 9", 0)
    assert len(of(RequeueCall, lost)) == 2
    assert len(scheduler.circuits) == 0, "nobody knows whose fault it was"
    (start,) = of(StartCall, be_back(scheduler, 0, 1))
    assert start.call == 1, "what may kill workers runs alone"
    finish(scheduler, start, 2)
    scheduler.answered(0, 2, 2, True, 2)
    scheduler.close(2, 2)
    for number, plan in ((3, POISON), (4, GOOD)):
        scheduler.submit(call(number, plan), 3)
    scheduler.failing(0, 2, Failure("run returned 507046", call=3, retry=False, exempt=True), 3)
    assert reasons(scheduler.lost(0, 2, "status 70", 3)) == [(3, "DEADLINE_EXCEEDED")]
    assert scheduler.circuits.died(call(3).circuit, 9, 3), "it was its second one"


def test_a_damaged_device_is_no_calls_fault() -> None:
    scheduler = open_scheduler(1)
    scheduler.submit(call(1), 0)
    scheduler.failing(0, 1, Failure("quarantined", RestartPolicy.NEVER, call=1), 0)
    scheduler.lost(0, 1, "status 70", 0)
    assert len(scheduler.circuits) == 0


def test_one_trial_is_run_on_one_worker_and_closes_or_opens_it() -> None:
    scheduler = poisoned()
    now = 1 + OPEN_S
    (trial,) = of(StartCall, scheduler.submit(call(2), now))
    assert reasons(scheduler.submit(call(3), now)) == [(3, "CIRCUIT_OPEN")]
    commands = lose(scheduler, trial, now)
    assert reasons(commands) == [(2, "WORKER_LOST")]
    assert of(CircuitChanged, commands) == [CircuitChanged(2, 3)]
    now += OPEN_S
    be_back(scheduler, trial.worker, now)
    (trial,) = of(StartCall, scheduler.submit(call(4), now))
    assert CircuitChanged(4, 0) in scheduler.answered(trial.worker, trial.incarnation, 4, True, now)
    assert len(scheduler.circuits) == 0
    assert len(started(scheduler.submit(call(5), now))) == 1


def test_a_trial_that_hangs_is_ended_soon() -> None:
    scheduler, now = poisoned(), 1 + OPEN_S
    (trial,) = of(StartCall, scheduler.submit(call(2, deadline_s=now + 0.25), now))
    scheduler.tick(now + 0.25)
    (kill,) = of(KillWorker, scheduler.tick(now + 0.25 + TRIAL_GRACE_S))
    assert (kill.worker, kill.reason) == (
        trial.worker,
        f"a call ran for {TRIAL_GRACE_S:g} s after its caller stopped waiting",
    )
    assert of(CircuitChanged, lose(scheduler, trial, now + 2)) == [CircuitChanged(2, 3)]


@pytest.mark.parametrize("end", ["cancelled", "refused by its operator"])
def test_a_trial_that_tells_nothing_makes_room_for_another(end: str) -> None:
    scheduler = poisoned()
    (trial,) = of(StartCall, scheduler.submit(call(2), 1 + OPEN_S))
    if end == "cancelled":
        scheduler.cancel(2, 1 + OPEN_S)
    scheduler.answered(trial.worker, trial.incarnation, 2, False, 1 + OPEN_S)
    assert scheduler.circuits.open_count == 1
    assert started(scheduler.submit(call(3), 1 + OPEN_S)) == [3]


def test_calls_that_kill_workers_neither_bring_devices_down_nor_delay_their_return() -> None:
    """No two are alike, so that each finds its circuit closed."""
    scheduler = open_scheduler(2, settings=replace(SETTINGS, max_respawns=0))
    for number in range(100):
        now = 10.0 * number
        (start,) = of(StartCall, scheduler.submit(call(number, Plan(b"%d" % number)), now))
        (again,) = of(StartCall, lose(scheduler, start, now))
        assert reasons(lose(scheduler, again, now)) == [(number, "WORKER_LOST")]
        assert {worker.alarm for worker in scheduler.workers} == {now + SETTINGS.respawn_backoff_s}
        for worker in scheduler.workers:
            be_back(scheduler, worker.index, now + 1)
            assert worker.state is DeviceState.READY


def test_a_death_that_counts_late_does_not_refuse_calls_that_wait_long_after_it() -> None:
    """The circuit that it opens may be half-open by then."""
    scheduler = open_scheduler(2)
    one, two = (of(StartCall, scheduler.submit(call(n, deadline_s=OPEN_S + 5), 0.0))[0] for n in (1, 2))
    lose(scheduler, one, 1.0)
    lose(scheduler, two, 1.0)
    scheduler.submit(call(3), 2.0)
    failed = of(FailCall, scheduler.tick(OPEN_S + 5))
    assert {(each.call, each.reason) for each in failed} == {
        (1, "DEADLINE_EXCEEDED"),
        (2, "DEADLINE_EXCEEDED"),
    }
