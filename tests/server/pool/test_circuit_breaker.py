"""What becomes of calls like the ones that killed workers: the breaker by itself, and in a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from tests.server.pool.scheduling import SETTINGS, Driven, of, open_scheduler, refused, started

from npugrad_server.backends.base import RestartPolicy
from npugrad_server.pool.call_lifecycle import TRIAL_GRACE_S
from npugrad_server.pool.circuit_breaker import (
    MOST_KEYS,
    OPEN_S,
    PACE,
    TOGETHER_S,
    WINDOW_S,
    CircuitBreaker,
    Death,
    Refusal,
)
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

GRACE_S = SETTINGS.hang_grace_s


@dataclass(frozen=True)
class Plan:
    """All that the scheduler knows of a call's plan."""

    signature: bytes


POISON, GOOD = Plan(b"poison"), Plan(b"good")


def suspect(number: int, plan: Plan = POISON, **facts: Any) -> CallState:
    """A call that runs isolated."""
    return CallState(number, plan=plan, ran_isolated=True, **facts)


def kill(breaker: CircuitBreaker, call: CallState, now: float, death: Death = Death.DIED) -> list[bool]:
    """A device loses its worker under a call; for each circuit that opens whether it is the operator's."""
    return [refusal.whole for _, refusal in breaker.died(0, now, death, [call], now)]


def refusal_of(breaker: CircuitBreaker, now: float, plan: Plan = POISON) -> Refusal | None:
    return breaker.refusal(("", ""), plan, now)


def opened(*deaths: Death) -> CircuitBreaker:
    """A breaker whose circuit of `POISON` opened at 0, by such deaths under calls 1 and so on."""
    breaker, deaths = CircuitBreaker(2), deaths or (Death.DIED, Death.DIED)
    news = [kill(breaker, suspect(number), 0.0, death) for number, death in enumerate(deaths, 1)]
    assert news == [[]] * (len(deaths) - 1) + [[False]]
    return breaker


TOLD = {
    "2 died": (Death.DIED, Death.DIED),
    "1 died, 1 ended by the server after a time-out": (Death.TIMED_OUT, Death.DIED),
    "4 killed from outside or for lack of memory": (Death.KILLED,) * 4,
    "1 died, 2 killed from outside or for lack of memory": (Death.KILLED, Death.DIED, Death.KILLED),
}


@pytest.mark.parametrize("counts", TOLD)
def test_two_deaths_or_four_kills_of_isolated_calls_open_the_circuit_of_their_signature(counts: str) -> None:
    breaker = opened(*TOLD[counts])
    refusal = breaker.enter(suspect(9), 4.0)
    assert refusal is not None
    assert refusal.retry_after_s == OPEN_S - 4.0
    assert refusal.detail == (
        f"found {len(TOLD[counts])} workers lost under isolated calls of this signature within 60 s "
        f"({counts}); expected fewer than 2, or 4 if killed; one may be tried again in 6.0 s"
    )
    assert refusal_of(breaker, 4.0, GOOD) is None
    assert breaker.open_count == 1
    assert kill(breaker, suspect(1), 5.0) == [], "it is open already, and stays so"
    refusal = refusal_of(breaker, 5.0)
    assert refusal is not None
    assert refusal.retry_after_s == OPEN_S


def test_a_death_of_a_call_that_was_not_isolated_makes_suspect_but_opens_nothing() -> None:
    breaker = CircuitBreaker(1)
    for number in range(9):
        assert kill(breaker, CallState(number, plan=POISON), 0.0) == []
    assert breaker.suspects(suspect(1, GOOD)), "the operator's other signatures may be as bad"
    assert not breaker.suspects(suspect(1, operator="another"))
    assert not breaker.suspects(suspect(1, tenant=Tenant("another")))


def test_calls_of_other_signatures_are_refused_after_isolated_deaths_of_several() -> None:
    breaker = opened()
    assert kill(breaker, suspect(3, Plan(b"fresh")), 1.0) == [True]
    refusal = refusal_of(breaker, 1.0, GOOD)
    assert refusal is not None
    assert "under isolated calls of different signatures of this caller and operator within" in refusal.detail
    assert breaker.refusal(("another", ""), GOOD, 1.0) is None


def test_deaths_far_apart_open_nothing_nor_do_any_where_there_is_no_limit() -> None:
    breaker, never = CircuitBreaker(2), CircuitBreaker(0)
    for turn in range(9):
        assert not kill(breaker, suspect(turn), turn * WINDOW_S)
        assert not kill(never, suspect(turn), 0.0)
    assert refusal_of(never, 0.0) is None
    assert never.suspects(suspect(1)), "they are isolated all the same"


@pytest.mark.parametrize("late_s", [0.0, TOGETHER_S])
def test_deaths_of_two_devices_at_once_count_for_nobody(late_s: float) -> None:
    breaker, calls = CircuitBreaker(1), [suspect(1), suspect(2, GOOD)]
    breaker.died(0, 5.0, Death.KILLED, [CallState(0, plan=GOOD)], 4.0)
    assert breaker.died(1, 5.0 + late_s, Death.DIED, calls, 4.9) == []
    assert [call.spared for call in calls] == [1, 1]
    assert breaker.is_serial(calls[0])


@pytest.mark.parametrize(
    ("device", "began_s", "at_s"), [(0, 4.0, 5.5), (1, 5.0, 5.5), (1, 4.0, 5.1 + TOGETHER_S)]
)
def test_deaths_one_after_the_other_or_far_apart_count(device: int, began_s: float, at_s: float) -> None:
    breaker = CircuitBreaker(1)
    breaker.died(0, 5.0, Death.DIED, [], 4.0)
    assert len(breaker.died(device, at_s, Death.DIED, [suspect(1)], began_s)) == 1


def test_a_circuit_is_open_from_when_the_death_is_known() -> None:
    breaker = CircuitBreaker(1)
    breaker.died(0, 5.0, Death.DIED, [suspect(1)], 4.0, 5.0 + OPEN_S)
    refusal = refusal_of(breaker, 6.0 + OPEN_S)
    assert refusal is not None
    assert refusal.retry_after_s == OPEN_S - 1


def test_one_call_at_a_time_is_tried_once_it_is_half_open_and_closes_or_opens_it() -> None:
    breaker = opened()
    assert breaker.enter(suspect(3), OPEN_S) is None
    assert breaker.is_trial(suspect(3))
    refusal = breaker.enter(suspect(4), OPEN_S)
    assert refusal is not None
    assert refusal.retry_after_s > 0
    breaker.left(suspect(4))  # which was none
    assert refusal_of(breaker, OPEN_S) is not None
    breaker.left(suspect(3))
    assert breaker.enter(suspect(5), OPEN_S) is None
    assert kill(breaker, suspect(5), OPEN_S + 1, Death.KILLED) == [False]
    refusal = refusal_of(breaker, OPEN_S + 1)
    assert refusal is not None
    assert (len(refusal.deaths), refusal.retry_after_s) == (3, OPEN_S)
    assert breaker.enter(suspect(6), 2 * OPEN_S + 1) is None
    assert not breaker.answered(suspect(1), 2 * OPEN_S + 1, good=True)  # it began before
    assert breaker.answered(suspect(6), 2 * OPEN_S + 1, good=True) == [False]
    assert len(breaker) == 0
    assert not kill(breaker, suspect(7), 2 * OPEN_S + 2), "all is forgotten"


def test_a_call_that_is_answered_takes_its_deaths_with_it() -> None:
    breaker = CircuitBreaker(2)
    first, second = suspect(1), suspect(2)
    kill(breaker, first, 0.0)
    breaker.answered(first, 1.0, good=False)
    assert not breaker.suspects(first)
    kill(breaker, first, 2.0)
    assert kill(breaker, second, 3.0) == [False]
    assert breaker.answered(second, 4.0, good=True) == [False], "what is left is not enough"


@pytest.mark.parametrize("opening_s", [1.0, 30.0])
def test_what_is_remembered_expires(opening_s: float) -> None:
    breaker = opened()
    breaker.opened(opening_s)
    assert breaker.window_s == max(WINDOW_S, PACE * opening_s)
    breaker.forget(breaker.window_s + OPEN_S - 0.1)
    assert len(breaker) == 1
    breaker.forget(breaker.window_s + OPEN_S)
    assert len(breaker) == 0


def test_memory_is_bounded() -> None:
    breaker = CircuitBreaker(2)
    for number in range(MOST_KEYS + 9):
        kill(breaker, suspect(number, operator=str(number)), number / 100)
    assert len(breaker) == MOST_KEYS
    assert not breaker.suspects(suspect(0, operator="0")), "the oldest was forgotten"


# ---------------------------------------------------------------------------------------- in a scheduler


def begin(scheduler: Driven, number: int, now: float = 0, plan: Plan = POISON, **facts: Any) -> StartCall:
    return scheduler.begin(number, now, plan=plan, **facts)


def call(number: int, plan: Plan = POISON, **changes: Any) -> CallState:
    return CallState(number, plan=plan, **changes)


def again(commands: Sequence[Command]) -> StartCall:
    (start,) = of(StartCall, commands)
    return start


def poisoned(workers: int = 2) -> Driven:
    """A scheduler whose circuit was just opened by call 1, at 4, with every worker ready."""
    scheduler = open_scheduler(workers)
    start = begin(scheduler, 1)
    for now in (0, 2):
        commands = scheduler.lose(start.worker, now)
        for worker in range(workers):
            commands += scheduler.be_back(worker, now + 1)
        start = again(commands)
    scheduler.lose(start.worker, 4)
    scheduler.close(1, 4)
    for worker in range(workers):
        scheduler.be_back(worker, 5)
    return scheduler


def test_a_call_under_which_two_isolated_tries_died_gets_no_other_and_calls_like_it_none() -> None:
    scheduler = open_scheduler(4, settings=replace(SETTINGS, max_attempts=9))
    start = begin(scheduler, 1)
    for now in (1, 2):
        start = again(scheduler.lose(start.worker, now))
    commands = scheduler.lose(start.worker, 3)
    assert refused(commands) == [(1, "WORKER_LOST")]
    assert of(CircuitChanged, commands) == [CircuitChanged(1, "2 died")]
    commands = scheduler.submit(call(2), 5)
    assert started(commands) == []
    (failed,) = of(FailCall, commands)
    assert (failed.reason, failed.retry_after_s) == ("CIRCUIT_OPEN", OPEN_S - 2)
    assert of(ReleaseCall, scheduler.close(2, 5)) == [ReleaseCall(2)]
    begin(scheduler, 3, 5, tenant=Tenant("another"))
    scheduler.be_back(0, 6)
    begin(scheduler, 4, 6, GOOD)


def test_calls_that_wait_are_refused_when_it_opens_and_others_go_on() -> None:
    scheduler = open_scheduler()
    begin(scheduler, 1)
    scheduler.submit(call(2), 0)
    scheduler.submit(call(3, GOOD), 0)
    for now in (1, 3):
        scheduler.lose(now=now)
        assert again(scheduler.be_back(now=now + 1)).call == 1
    assert refused(scheduler.lose(now=5)) == [(2, "CIRCUIT_OPEN"), (1, "WORKER_LOST")]
    assert started(scheduler.be_back(now=6)) == [3]


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


def kill_worker(scheduler: Driven, worker: int, now: float) -> list[Command]:
    """Somebody sends SIGKILL to the process of a device."""
    incarnation = scheduler.workers[worker].incarnation
    return scheduler.failing(worker, incarnation, Failure("SIGKILL", killed=True), now) + scheduler.lose(
        worker, now
    )


def test_a_call_whose_worker_is_killed_from_outside_is_tried_until_its_deadline() -> None:
    scheduler = open_scheduler(settings=replace(SETTINGS, max_respawns=99, circuit_deaths=0))
    start, now = begin(scheduler, 1, deadline_s=500), 0.0
    while now < 480:
        assert of(FailCall, kill_worker(scheduler, start.worker, now)) == []
        now += 20
        start = again(scheduler.be_back(now=now))
    assert start.attempt == 25
    (failed,) = of(FailCall, kill_worker(scheduler, 0, now) + scheduler.tick(500))
    assert failed.reason == "DEADLINE_EXCEEDED"
    assert failed.detail.endswith(
        "it waited for a device of its own, because a worker died under it or calls like it"
    )


def test_four_kills_of_isolated_tries_are_taken_for_the_calls_own() -> None:
    scheduler, now = open_scheduler(settings=replace(SETTINGS, max_respawns=99)), 0.0
    begin(scheduler, 1)
    for _ in range(4):
        assert refused(kill_worker(scheduler, 0, now)) == []
        now += 2
        scheduler.be_back(now=now)
    commands = kill_worker(scheduler, 0, now)
    assert of(CircuitChanged, commands) == [CircuitChanged(1, "4 killed from outside or for lack of memory")]
    assert refused(commands) == [(1, "WORKER_LOST")]


def test_devices_that_die_at_once_are_no_calls_fault_and_their_calls_run_one_after_the_other() -> None:
    scheduler, now = open_scheduler(2, settings=replace(SETTINGS, max_respawns=99)), 0.0
    for number, plan in ((1, POISON), (2, GOOD)):
        begin(scheduler, number, now, plan)
    for worker in (0, 1):
        scheduler.lose(worker, now + 1)
    first = [start for worker in (0, 1) for start in of(StartCall, scheduler.be_back(worker, now + 9))]
    assert len(first) == 1, "they might die together again"
    assert len(of(StartCall, scheduler.finish(first[0], now + 9))) == 1
    assert scheduler.circuits.open_count == 0


@pytest.mark.parametrize("leaves", ["cancel", "close", "tick"])
def test_deaths_after_the_caller_left_are_the_calls_fault_from_the_second_on(leaves: str) -> None:
    scheduler = open_scheduler(3)
    for number in (1, 2, 3):
        now = 10.0 * number
        start = begin(scheduler, number, now, deadline_s=now + 0.25)
        scheduler.tick(now + 0.25) if leaves == "tick" else getattr(scheduler, leaves)(number, now + 0.1)
        commands = scheduler.lose(start.worker, now + 0.3)
        assert of(RequeueCall, commands) == []
    assert of(CircuitChanged, commands) == [CircuitChanged(3, "2 died")]
    assert [worker.failures for worker in scheduler.workers] == [0, 0, 0]


def test_a_worker_that_is_ended_for_a_call_is_that_calls_fault_and_of_nobody_beside_it() -> None:
    scheduler = open_scheduler(streams=2)
    begin(scheduler, 1, deadline_s=1)
    begin(scheduler, 2, 0, GOOD, tenant=Tenant("another"))
    scheduler.tick(1)
    scheduler.tick(1 + GRACE_S)
    commands = scheduler.lose(now=1 + GRACE_S)
    assert of(RequeueCall, commands) == [RequeueCall(2, 0)]
    assert scheduler.workers[0].failures == 0
    assert scheduler.circuits.suspects(call(9))
    assert not scheduler.circuits.suspects(call(9, tenant=Tenant("another")))


def test_a_death_under_several_calls_is_of_the_one_that_the_failure_names() -> None:
    scheduler = open_scheduler(streams=2)
    for number, plan in ((1, POISON), (2, GOOD)):
        begin(scheduler, number, plan=plan, operator=str(number))
    assert len(of(RequeueCall, scheduler.lose())) == 2
    assert len(scheduler.circuits) == 2, "nobody knows whose fault it was"
    start = again(scheduler.be_back(now=1))
    assert start.call == 1, "what may kill workers runs alone"
    scheduler.finish(again(scheduler.finish(start, 2)), 2)
    assert len(scheduler.circuits) == 0
    for number, plan in ((3, POISON), (4, GOOD)):
        begin(scheduler, number, 3, plan, operator=str(number))
    scheduler.failing(0, 2, Failure("run returned 507046", call=3, retry=False, exempt=True), 3)
    assert refused(scheduler.lose(now=3)) == [(3, "DEADLINE_EXCEEDED")]
    assert [scheduler.circuits.suspects(call(9, operator=name)) for name in "34"] == [True, False]


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (Failure("run returned 507015", call=2), "died"),
        (Failure("wait returned 507046", call=2, exempt=True), "ended by the server after a time-out"),
        (Failure("the worker did not answer for 30 s", silent=True), "ended by the server after a time-out"),
    ],
)
def test_who_ended_a_worker_is_told(failure: Failure, told: str) -> None:
    scheduler = open_scheduler(settings=replace(SETTINGS, circuit_deaths=1))
    begin(scheduler, 1)
    scheduler.cancel(1, 0)
    assert of(CircuitChanged, scheduler.lose()) == []
    scheduler.be_back(now=5)
    begin(scheduler, 2, 5)
    scheduler.cancel(2, 5)
    scheduler.failing(0, 2, failure, 5)
    assert of(CircuitChanged, scheduler.lose(now=5)) == [CircuitChanged(2, f"1 {told}")]


def test_a_damaged_device_is_no_calls_fault() -> None:
    scheduler = open_scheduler()
    begin(scheduler, 1)
    scheduler.failing(0, 1, Failure("quarantined", RestartPolicy.NEVER, call=1), 0)
    scheduler.lose()
    assert len(scheduler.circuits) == 0


def test_one_trial_is_run_on_one_worker_and_closes_or_opens_it() -> None:
    scheduler, now = poisoned(), 4 + OPEN_S
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
    scheduler, now = poisoned(), 4 + OPEN_S
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
    scheduler, now = poisoned(), 4 + OPEN_S
    trial = begin(scheduler, 2, now)
    if end == "cancelled":
        scheduler.cancel(2, now)
    scheduler.answered(trial.worker, trial.incarnation, 2, False, now)
    assert scheduler.circuits.open_count == 1
    begin(scheduler, 3, now)


def test_calls_that_kill_workers_neither_bring_devices_down_nor_delay_their_return() -> None:
    """No two are alike, so that each finds its circuit closed."""
    scheduler = open_scheduler(2, settings=replace(SETTINGS, max_respawns=0, max_attempts=2))
    for number in range(20):
        now = 10.0 * number
        start = begin(scheduler, number, now, operator=str(number))
        start = again(scheduler.lose(start.worker, now))
        assert refused(scheduler.lose(start.worker, now)) == [(number, "WORKER_LOST")]
        assert {worker.alarm for worker in scheduler.workers} == {now + SETTINGS.respawn_backoff_s}
        for worker in scheduler.workers:
            scheduler.be_back(worker.index, now + 1)
            assert worker.state is DeviceState.READY


def be_poisoned(scheduler: Driven, now: float) -> None:
    """The process of device 0 dies under a call of tenant "bad" whose caller has gone, and is ready again."""
    begin(scheduler, 1, now, tenant=BAD)
    scheduler.close(1, now)
    scheduler.lose(0, now)
    scheduler.be_back(0, now + SETTINGS.respawn_backoff_s)


BAD = Tenant("bad")
NEIGHBOUR = Tenant("neighbour")


def test_suspects_leave_a_device_to_a_neighbour_even_between_two_of_its_calls() -> None:
    scheduler = open_scheduler(3)
    be_poisoned(scheduler, 0)
    scheduler.finish(begin(scheduler, 2, 1, GOOD, tenant=NEIGHBOUR), 1)
    for number in (3, 4):
        begin(scheduler, number, 2, Plan(b"%d" % number), tenant=BAD)
    assert started(scheduler.submit(call(5, tenant=BAD), 2)) == []
    assert scheduler.put(6, 2, plan=GOOD, tenant=BAD, operator="another") == [6], "this is not suspect"
    alarm = scheduler.next_alarm()
    assert alarm is not None
    assert alarm <= 1 + WINDOW_S


@pytest.mark.parametrize("opening_s", [2.0, 30.0])
def test_suspects_cost_the_only_device_one_start_in_the_time_of_ten(opening_s: float) -> None:
    scheduler = open_scheduler(settings=replace(SETTINGS, respawn_backoff_s=opening_s))
    begin(scheduler, 1, 0, tenant=BAD)
    scheduler.close(1, 0)
    scheduler.lose(0, 0)
    scheduler.be_back(0, opening_s)
    scheduler.finish(begin(scheduler, 9, opening_s, tenant=NEIGHBOUR), opening_s)
    assert scheduler.put(2, opening_s + 1, plan=GOOD, tenant=BAD) == []
    again_s = PACE * opening_s
    assert started(scheduler.tick(again_s - 0.1)) == []
    assert scheduler.next_alarm() == again_s
    assert started(scheduler.tick(again_s)) == [2]
