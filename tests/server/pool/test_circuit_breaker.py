"""What becomes of calls like the ones that killed workers: the breaker by itself, and in a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from tests.server.pool.scheduling import SETTINGS, Driven, of, open_scheduler, refused, started

from npugrad_server.backends.base import RestartPolicy
from npugrad_server.pool.call_lifecycle import TRIAL_GRACE_S
from npugrad_server.pool.circuit_breaker import MOST_KEYS, OPEN_S, WINDOW_S, CircuitBreaker, Death
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
from npugrad_server.pool.state import CallState
from npugrad_server.pool.tenant import Tenant
from npugrad_server.pool.types import DeviceState

KEY, OTHER = ("tenant", b"signature"), ("tenant", b"another")
GRACE_S = SETTINGS.hang_grace_s


def opened(deaths: int = 2) -> CircuitBreaker:
    """A breaker whose circuit of `KEY` opened at 0, by so many deaths under calls 1 and so on."""
    breaker = CircuitBreaker(deaths)
    kinds = (Death.DIED, Death.TIMED_OUT, Death.TIMED_OUT)
    died = [breaker.died(KEY, number, 0.0, kinds[number - 1]) for number in range(1, deaths + 1)]
    assert died == [False] * (deaths - 1) + [True]
    return breaker


@pytest.mark.parametrize("deaths", [2, 3])
def test_as_many_deaths_as_are_said_open_the_circuit_of_their_key_alone(deaths: int) -> None:
    breaker = opened(deaths)
    refusal = breaker.enter(KEY, 9, 4.0)
    assert refusal is not None
    assert refusal.retry_after_s == OPEN_S - 4.0
    assert refusal.detail == (
        f"found {deaths} workers lost under calls of this signature within 60 s (1 died, {deaths - 1} ended "
        f"by the server after a time-out); expected fewer than {deaths}; one may be tried again in 6.0 s"
    )
    assert not breaker.died(OTHER, 10, 4.0)
    assert breaker.enter(OTHER, 11, 4.0) is None
    assert breaker.open_count == 1
    assert not breaker.died(KEY, 1, 5.0), "it is open already, and stays so after a death from before"
    refusal = breaker.refusal(KEY, 5.0)
    assert refusal is not None
    assert refusal.retry_after_s == OPEN_S


def test_deaths_far_apart_open_nothing_nor_do_any_where_there_is_no_limit() -> None:
    breaker, never = CircuitBreaker(2), CircuitBreaker(0)
    for turn in range(9):
        assert not breaker.died(KEY, turn, turn * WINDOW_S)
        assert not never.died(KEY, turn, 0.0)
    assert never.refusal(KEY, 0.0) is None
    assert len(never) == 0


def test_one_call_at_a_time_is_tried_once_it_is_half_open_and_closes_or_opens_it() -> None:
    breaker = opened()
    assert breaker.enter(KEY, 3, OPEN_S) is None
    assert breaker.is_trial(KEY, 3)
    refusal = breaker.enter(KEY, 4, OPEN_S)
    assert refusal is not None
    assert refusal.retry_after_s > 0
    breaker.left(KEY, 4)  # which was none
    assert breaker.refusal(KEY, OPEN_S) is not None
    breaker.left(KEY, 3)
    assert breaker.enter(KEY, 5, OPEN_S) is None
    assert breaker.died(KEY, 5, OPEN_S + 1)
    refusal = breaker.refusal(KEY, OPEN_S + 1)
    assert refusal is not None
    assert (len(refusal.deaths), refusal.retry_after_s) == (3, OPEN_S)
    assert breaker.enter(KEY, 6, 2 * OPEN_S + 1) is None
    assert not breaker.succeeded(KEY, 1)  # it began before
    assert breaker.succeeded(KEY, 6)
    assert len(breaker) == 0
    assert not breaker.died(KEY, 7, 2 * OPEN_S + 2), "all is forgotten"


@pytest.mark.parametrize("deaths", [1, 2])
def test_what_is_remembered_expires(deaths: int) -> None:
    breaker = CircuitBreaker(2)
    for number in range(deaths):
        breaker.died(KEY, number, 0.0)
    breaker.refusal(OTHER, WINDOW_S + OPEN_S - 0.1)
    assert len(breaker) == 1
    breaker.refusal(OTHER, WINDOW_S + OPEN_S)
    assert len(breaker) == 0


def test_memory_is_bounded() -> None:
    breaker = CircuitBreaker(2)
    for number in range(MOST_KEYS + 9):
        breaker.died(number, number, 0.0)
    assert len(breaker) == MOST_KEYS
    assert breaker.died(MOST_KEYS + 8, 0, 0.0)
    assert not breaker.died(0, 0, 0.0), "the oldest was forgotten"


# ---------------------------------------------------------------------------------------- in a scheduler


@dataclass(frozen=True)
class Plan:
    """All that the scheduler knows of a call's plan."""

    signature: bytes


POISON, GOOD = Plan(b"poison"), Plan(b"good")


def begin(scheduler: Driven, number: int, now: float = 0, plan: Plan = POISON, **facts: Any) -> StartCall:
    """A call that starts at once."""
    return scheduler.begin(number, now, plan=plan, **facts)


def call(number: int, plan: Plan = POISON, **changes: Any) -> CallState:
    return CallState(number, plan=plan, **changes)


def again(commands: Sequence[Command]) -> StartCall:
    """The one start that follows."""
    (start,) = of(StartCall, commands)
    return start


def poisoned(workers: int = 2) -> Driven:
    """A scheduler whose circuit was just opened by call 1, at 1, with every worker ready."""
    scheduler = open_scheduler(workers)
    start = begin(scheduler, 1)
    start = again(scheduler.lose(start.worker) + scheduler.be_back(start.worker, 1))
    scheduler.lose(start.worker, 1)
    scheduler.close(1, 1)
    for worker in range(workers):
        scheduler.be_back(worker, 2)
    return scheduler


def test_a_call_that_killed_two_workers_gets_no_third_and_calls_like_it_none() -> None:
    scheduler = open_scheduler(3)
    start = again(scheduler.lose(begin(scheduler, 1).worker, 1))
    commands = scheduler.lose(start.worker, 2)
    assert refused(commands) == [(1, "WORKER_LOST")]
    assert of(CircuitChanged, commands) == [CircuitChanged(1, "2 died")]
    commands = scheduler.submit(call(2), 5)
    assert started(commands) == []
    (failed,) = of(FailCall, commands)
    assert (failed.reason, failed.retry_after_s) == ("CIRCUIT_OPEN", OPEN_S - 3)
    assert of(ReleaseCall, scheduler.close(2, 5)) == [ReleaseCall(2)]
    begin(scheduler, 3, 5, tenant=Tenant("another"))
    scheduler.be_back(0, 6)
    begin(scheduler, 4, 6, GOOD)


def test_calls_that_wait_are_refused_when_it_opens_and_others_go_on() -> None:
    scheduler = open_scheduler()
    begin(scheduler, 1)
    scheduler.submit(call(2), 0)
    scheduler.submit(call(3, GOOD), 0)
    scheduler.lose()
    assert again(scheduler.be_back(now=1)).call == 1
    assert refused(scheduler.lose(now=1)) == [(2, "CIRCUIT_OPEN"), (1, "WORKER_LOST")]
    assert started(scheduler.be_back(now=2)) == [3]


def test_a_death_is_nobodys_fault_once_another_worker_has_done_the_call() -> None:
    """Processes are killed one after the other under calls of one signature: all of them are answered."""
    scheduler, now = open_scheduler(2, settings=replace(SETTINGS, max_respawns=99)), 0.0
    for number in range(20):
        start = begin(scheduler, number, now)
        second = again(scheduler.lose(start.worker, now))
        assert of(CompleteCall, scheduler.finish(second, now)) == [CompleteCall(number)]
        now += SETTINGS.respawn_backoff_max_s
        scheduler.be_back(start.worker, now)
    assert len(scheduler.circuits) == 0


def test_deaths_count_once_their_calls_ended_without_a_result() -> None:
    """Their deadlines pass while they wait for another try."""
    scheduler = open_scheduler()
    for number, now in ((1, 0.0), (2, 10.0)):
        begin(scheduler, number, now, deadline_s=now + 0.25)
        scheduler.lose(now=now)
        assert scheduler.circuits.open_count == 0
        commands = scheduler.tick(now + 0.25)
        assert refused(commands) == [(number, "DEADLINE_EXCEEDED")]
        scheduler.be_back(now=now + 1)
    assert of(CircuitChanged, commands) == [CircuitChanged(2, "2 died")]


@pytest.mark.parametrize("leaves", ["cancel", "close", "tick"])
def test_a_death_after_the_caller_left_is_the_calls_fault(leaves: str) -> None:
    scheduler = open_scheduler(2)
    for number in (1, 2):
        start = begin(scheduler, number, deadline_s=0.25)
        scheduler.tick(0.25) if leaves == "tick" else getattr(scheduler, leaves)(number, 0.1)
        commands = scheduler.lose(start.worker, 0.3)
        assert of(RequeueCall, commands) == []
    assert of(CircuitChanged, commands) == [CircuitChanged(2, "2 died")]
    assert [worker.failures for worker in scheduler.workers] == [0, 0]


def test_a_worker_that_is_ended_for_a_call_is_that_calls_fault_and_of_nobody_beside_it() -> None:
    scheduler = open_scheduler(streams=2)
    for turn, now in enumerate((0.0, 100.0)):
        begin(scheduler, 2 * turn, now, deadline_s=now + 1)
        begin(scheduler, 2 * turn + 1, now, GOOD)
        scheduler.tick(now + 1)
        scheduler.tick(now + 1 + GRACE_S)
        commands = scheduler.lose(now=now + 1 + GRACE_S)
        assert of(RequeueCall, commands) == [RequeueCall(2 * turn + 1, 0)]
        assert scheduler.workers[0].failures == 0
        scheduler.finish(again(scheduler.be_back(now=now + 20)), now + 20)
    # They were more than a window apart.
    assert (len(scheduler.circuits), scheduler.circuits.open_count) == (1, 0)


def test_a_death_under_several_calls_is_of_the_one_that_the_failure_names() -> None:
    scheduler = open_scheduler(streams=2)
    for number, plan in ((1, POISON), (2, GOOD)):
        begin(scheduler, number, plan=plan)
    assert len(of(RequeueCall, scheduler.lose())) == 2
    assert len(scheduler.circuits) == 0, "nobody knows whose fault it was"
    start = again(scheduler.be_back(now=1))
    assert start.call == 1, "what may kill workers runs alone"
    scheduler.finish(again(scheduler.finish(start, 2)), 2)
    for number, plan in ((3, POISON), (4, GOOD)):
        begin(scheduler, number, 3, plan)
    scheduler.failing(0, 2, Failure("run returned 507046", call=3, retry=False, exempt=True), 3)
    assert refused(scheduler.lose(now=3)) == [(3, "DEADLINE_EXCEEDED")]
    assert scheduler.circuits.died(call(3).circuit, 9, 3), "it was its second one"


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (Failure("run returned 507015", call=1), "died"),
        (Failure("wait returned 507046", call=1, exempt=True), "ended by the server after a time-out"),
        (Failure("the worker did not answer for 30 s", silent=True), "ended by the server after a time-out"),
    ],
)
def test_who_ended_a_worker_is_told(failure: Failure, told: str) -> None:
    scheduler = open_scheduler(settings=replace(SETTINGS, circuit_deaths=1))
    begin(scheduler, 1)
    scheduler.cancel(1, 0)
    scheduler.failing(0, 1, failure, 0)
    assert of(CircuitChanged, scheduler.lose()) == [CircuitChanged(1, f"1 {told}")]


def test_a_damaged_device_is_no_calls_fault() -> None:
    scheduler = open_scheduler()
    begin(scheduler, 1)
    scheduler.failing(0, 1, Failure("quarantined", RestartPolicy.NEVER, call=1), 0)
    scheduler.lose()
    assert len(scheduler.circuits) == 0


def test_one_trial_is_run_on_one_worker_and_closes_or_opens_it() -> None:
    scheduler, now = poisoned(), 1 + OPEN_S
    trial = begin(scheduler, 2, now)
    assert refused(scheduler.submit(call(3), now)) == [(3, "CIRCUIT_OPEN")]
    commands = scheduler.lose(trial.worker, now)
    assert refused(commands) == [(2, "WORKER_LOST")]
    assert of(CircuitChanged, commands) == [CircuitChanged(2, "3 died")]
    now += OPEN_S
    scheduler.be_back(trial.worker, now)
    trial = begin(scheduler, 4, now)
    assert CircuitChanged(4, "") in scheduler.end(trial, now=now)
    assert len(scheduler.circuits) == 0
    begin(scheduler, 5, now)


def test_a_trial_that_hangs_is_ended_soon() -> None:
    scheduler, now = poisoned(), 1 + OPEN_S
    trial = begin(scheduler, 2, now, deadline_s=now + 0.25)
    scheduler.tick(now + 0.25)
    (kill,) = of(KillWorker, scheduler.tick(now + 0.25 + TRIAL_GRACE_S))
    assert (kill.worker, kill.reason) == (
        trial.worker,
        f"a call ran for {TRIAL_GRACE_S:g} s after its caller stopped waiting",
    )
    told = "2 died, 1 ended by the server after a time-out"
    assert of(CircuitChanged, scheduler.lose(trial.worker, now + 2)) == [CircuitChanged(2, told)]


@pytest.mark.parametrize("end", ["cancelled", "refused by its operator"])
def test_a_trial_that_tells_nothing_makes_room_for_another(end: str) -> None:
    scheduler, now = poisoned(), 1 + OPEN_S
    trial = begin(scheduler, 2, now)
    if end == "cancelled":
        scheduler.cancel(2, now)
    scheduler.answered(trial.worker, trial.incarnation, 2, False, now)
    assert scheduler.circuits.open_count == 1
    begin(scheduler, 3, now)


def test_calls_that_kill_workers_neither_bring_devices_down_nor_delay_their_return() -> None:
    """No two are alike, so that each finds its circuit closed."""
    scheduler = open_scheduler(2, settings=replace(SETTINGS, max_respawns=0))
    for number in range(20):
        now = 10.0 * number
        start = begin(scheduler, number, now, Plan(b"%d" % number))
        start = again(scheduler.lose(start.worker, now))
        assert refused(scheduler.lose(start.worker, now)) == [(number, "WORKER_LOST")]
        assert {worker.alarm for worker in scheduler.workers} == {now + SETTINGS.respawn_backoff_s}
        for worker in scheduler.workers:
            scheduler.be_back(worker.index, now + 1)
            assert worker.state is DeviceState.READY


def test_a_death_that_counts_late_does_not_refuse_calls_that_wait_long_after_it() -> None:
    """The circuit that it opens may be half-open by then."""
    scheduler = open_scheduler(2)
    for worker in [begin(scheduler, number, deadline_s=OPEN_S + 5).worker for number in (1, 2)]:
        scheduler.lose(worker, 1.0)
    scheduler.submit(call(3), 2.0)
    assert {*refused(scheduler.tick(OPEN_S + 5))} == {(1, "DEADLINE_EXCEEDED"), (2, "DEADLINE_EXCEEDED")}
