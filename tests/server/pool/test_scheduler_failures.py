"""What becomes of calls and devices when a device says that it failed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.server.pool.scheduling import SETTINGS, of, open_scheduler, started

from npugrad_server.backends.base import RestartPolicy
from npugrad_server.pool.commands import (
    Command,
    FailCall,
    Failure,
    KillWorker,
    RequeueCall,
    SpawnWorker,
    StartCall,
    WorkerSpec,
)
from npugrad_server.pool.scheduler import Scheduler
from npugrad_server.pool.state import CallState
from npugrad_server.pool.types import DeviceState


def fail_under(
    scheduler: Scheduler, start: StartCall, now: float = 0, **changes: Any
) -> tuple[list[Command], list[Command]]:
    """The device of a running call fails under it; what follows from the words and what from the end."""
    failure = replace(Failure("run returned 507015", call=start.call, code=507015), **changes)
    said = scheduler.failing(start.worker, start.incarnation, failure, now)
    return said, scheduler.lost(start.worker, start.incarnation, "status 70", now)


def test_a_call_under_which_a_device_failed_is_tried_once_more_elsewhere() -> None:
    scheduler = open_scheduler(2)
    (first,) = of(StartCall, scheduler.submit(CallState(1), 0))
    said, ended = fail_under(scheduler, first)
    assert [kill.worker for kill in of(KillWorker, said)] == [first.worker]
    assert scheduler.workers[first.worker].reason == "run returned 507015"
    assert of(RequeueCall, ended) == [RequeueCall(1, first.worker)]
    (second,) = of(StartCall, ended)
    assert second.worker != first.worker
    _, ended = fail_under(scheduler, second)
    (failed,) = of(FailCall, ended)
    assert (failed.reason, failed.code) == ("WORKER_LOST", 507015)
    assert "at each of 2 tries; last: run returned 507015" in failed.detail


def test_a_call_that_makes_devices_fail_does_not_bring_them_down() -> None:
    scheduler = open_scheduler(2, settings=replace(SETTINGS, max_respawns=0))
    (start,) = of(StartCall, scheduler.submit(CallState(1), 0))
    _, ended = fail_under(scheduler, start)
    assert scheduler.workers[start.worker].state is DeviceState.RESTARTING
    (again,) = of(StartCall, ended)
    _, ended = fail_under(scheduler, again)
    assert of(FailCall, ended)
    assert scheduler.workers[again.worker].state is DeviceState.RESTARTING


def test_calls_beside_the_one_that_failed_are_tried_as_often_as_any() -> None:
    scheduler = open_scheduler(1, streams=2)
    starts = [
        *of(StartCall, scheduler.submit(CallState(1), 0)),
        *of(StartCall, scheduler.submit(CallState(2), 0)),
    ]
    fail_under(scheduler, starts[0])
    for tries in (2, 3):
        scheduler.tick(100.0 * tries)
        incarnation = scheduler.workers[0].incarnation
        commands = scheduler.ready(0, incarnation, 100.0 * tries)
        while (running := scheduler.workers[0].running) and 2 not in running:
            (number,) = running
            commands = scheduler.answered(0, incarnation, number, True, 100.0 * tries)
        assert [c.attempt for c in of(StartCall, commands)] == [tries]
        lost = scheduler.lost(0, incarnation, "signal 9", 100.0 * tries)
    assert [f.call for f in of(FailCall, lost)] == [2]


def test_a_device_that_fails_is_given_no_call_before_its_process_has_ended() -> None:
    scheduler = open_scheduler()
    (start,) = of(StartCall, scheduler.submit(CallState(1), 0))
    scheduler.failing(0, 1, Failure("words", call=1), 0)
    assert started(scheduler.submit(CallState(2), 0)) == []
    assert start.call in scheduler.workers[0].running


def test_a_call_that_ran_too_long_is_not_tried_again_and_the_device_not_blamed() -> None:
    scheduler = open_scheduler()
    (start,) = of(StartCall, scheduler.submit(CallState(1), 0))
    _, ended = fail_under(scheduler, start, code=507046, retry=False, exempt=True)
    (failed,) = of(FailCall, ended)
    assert (failed.reason, failed.code) == ("DEADLINE_EXCEEDED", 507046)
    assert (scheduler.workers[0].state, scheduler.workers[0].failures) == (DeviceState.RESTARTING, 0)


def test_a_damaged_device_is_not_tried_again() -> None:
    scheduler = open_scheduler(2)
    (start,) = of(StartCall, scheduler.submit(CallState(1), 0))
    _, ended = fail_under(scheduler, start, restart_policy=RestartPolicy.NEVER, reason="damaged: words")
    assert scheduler.workers[start.worker].state is DeviceState.DOWN
    assert scheduler.workers[start.worker].reason == "damaged: words"
    (again,) = of(StartCall, ended)
    assert again.worker != start.worker
    assert scheduler.workers[start.worker].alarm is None


def test_a_device_that_needs_time_gets_more_of_it_each_time() -> None:
    scheduler = Scheduler(replace(SETTINGS, max_respawns=9), [WorkerSpec(1, 1024, "host")], {"host": 0})
    scheduler.start(0)
    now, waits = 0.0, []
    for incarnation in range(1, 7):
        assert scheduler.failing(0, incarnation, Failure("no device", RestartPolicy.SLOWLY), now) == []
        scheduler.lost(0, incarnation, "status 1", now)
        alarm = scheduler.next_alarm()
        assert alarm is not None
        waits.append(alarm - now)
        now = alarm
        (spawned,) = of(SpawnWorker, scheduler.tick(now))
        assert spawned.incarnation == incarnation + 1
    assert waits == [5, 10, 20, 40, 60, 60]


@pytest.mark.parametrize("restart_policy", [RestartPolicy.MENDED, RestartPolicy.NEVER])
def test_what_cannot_open_is_down_at_once_and_tried_again_unless_it_is_damaged(
    restart_policy: RestartPolicy,
) -> None:
    scheduler = Scheduler(SETTINGS, [WorkerSpec(1, 1024, "host")], {"host": 0})
    scheduler.start(0)
    scheduler.failing(0, 1, Failure("torch_npu is not installed", restart_policy), 0)
    scheduler.lost(0, 1, "torch_npu is not installed", 0)
    assert (scheduler.workers[0].state, scheduler.all_down) == (DeviceState.DOWN, True)
    (failed,) = of(FailCall, scheduler.submit(CallState(1), 0))
    assert failed.detail == "torch_npu is not installed"
    assert scheduler.next_alarm() == (5 if restart_policy is RestartPolicy.MENDED else None)


def test_the_words_of_a_former_process_are_not_heard() -> None:
    scheduler = open_scheduler()
    assert scheduler.failing(0, 7, Failure("words", RestartPolicy.NEVER), 0) == []
    assert scheduler.workers[0].state is DeviceState.READY
