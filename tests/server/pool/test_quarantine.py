"""Canaries, mismatches and quarantine: the scheduler's rules on made-up events, then real devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.server.pool.pools import Seen, in_pool, make_job, until
from tests.server.pool.scheduling import SETTINGS, Driven, of, started, starting_scheduler

from npugrad_server.pool import DevicePool, DeviceState
from npugrad_server.pool.commands import (
    Command,
    CompleteCall,
    DeviceMismatch,
    Failure,
    KillWorker,
    RedirectCall,
    SpawnWorker,
    StartCall,
    StartCanary,
)
from npugrad_server.pool.quarantine import MISMATCH_WINDOW_S
from npugrad_server.pool.worker_lifecycle import TRIAL_ROUNDS
from npugrad_server.worker.canary_messages import CanaryRun

INTERVAL_S = 40.0
CANARIES = 2
PLAN = make_job().planned.plan
OK, MISMATCH, ERROR = "ok", "mismatch", "error"


def watched(workers: int = 1, canary_interval_s: float = INTERVAL_S, **changes: Any) -> Driven:
    """A scheduler whose devices have two canaries each."""
    streams = changes.pop("streams", 1)
    settings = replace(SETTINGS, canary_interval_s=canary_interval_s, **changes)
    scheduler = starting_scheduler(workers, streams, settings=settings)
    for worker in range(workers):
        scheduler.be_ready(worker, canaries=CANARIES)
    return scheduler


def state(scheduler: Driven) -> DeviceState:
    return scheduler.workers[0].state


def canaries(commands: Sequence[Command]) -> list[int]:
    return [command.number for command in of(StartCanary, commands)]


def answer(scheduler: Driven, number: int, result: str, now: float, device: int = 0) -> list[Command]:
    run = CanaryRun(number, f"operator{number}", result, "figures")
    return scheduler.canary(device, scheduler.workers[device].incarnation, run, now)


def quarantined(scheduler: Driven, now: float = INTERVAL_S) -> list[Command]:
    """Has the first device found wrong twice."""
    scheduler.tick(now)
    return answer(scheduler, 0, MISMATCH, now) + answer(scheduler, 0, MISMATCH, now)


def wrong_call(scheduler: Driven, number: int, now: float) -> list[Command]:
    """Has a call done, and found wrong."""
    start = scheduler.begin(number, now, plan=PLAN)
    scheduler.end(start, now=now)
    return scheduler.mismatched(start.worker, start.incarnation, number, "figures", now)


def respawned(scheduler: Driven) -> tuple[SpawnWorker, float]:
    """How the next process is started, and when."""
    alarm = scheduler.next_alarm()
    assert alarm is not None
    (spawn,) = of(SpawnWorker, scheduler.tick(alarm))
    return spawn, alarm


def test_an_idle_device_runs_each_canary_once_in_an_interval_and_a_busy_one_in_two() -> None:
    scheduler = watched()
    assert scheduler.next_alarm() == INTERVAL_S
    assert canaries(scheduler.tick(INTERVAL_S)) == [0]
    assert canaries(answer(scheduler, 0, OK, 41)) == [1]
    assert canaries(answer(scheduler, 1, ERROR, 42)) == []
    assert scheduler.next_alarm() == 42 + INTERVAL_S
    scheduler.begin(1, 50)
    alarms: list[float] = []
    while not alarms or not canaries(scheduler.tick(alarms[-1])):
        alarms.append(scheduler.next_alarm() or 0)
        assert alarms == sorted({*alarms})
        assert 42 + INTERVAL_S <= alarms[-1] <= 42 + 2 * INTERVAL_S
    assert alarms[-1] == 42 + 2 * INTERVAL_S
    assert watched(canary_interval_s=0).next_alarm() is None


def test_after_one_mismatch_a_device_takes_no_call_until_it_was_right() -> None:
    scheduler = watched()
    scheduler.tick(INTERVAL_S)
    told = answer(scheduler, 0, MISMATCH, 41)
    assert canaries(told) == [0]
    assert of(DeviceMismatch, told) == [DeviceMismatch(0, "operator0", "figures")]
    assert scheduler.put(1, 41) == []
    assert started(answer(scheduler, 0, OK, 42)) == [1]
    assert state(scheduler) is DeviceState.READY


def test_two_mismatches_quarantine_a_device_and_move_its_calls() -> None:
    scheduler = watched(2)
    wrong = scheduler.workers[scheduler.begin(1, 1).worker]
    scheduler.tick(2 * INTERVAL_S)
    for _ in range(2):
        told = answer(scheduler, 0, MISMATCH, 81, wrong.index)
    assert [kill.worker for kill in of(KillWorker, told)] == [wrong.index]
    assert wrong.state is DeviceState.QUARANTINED
    assert wrong.reason == "it computes wrong results: operator0: figures"
    late = scheduler.answered(wrong.index, wrong.incarnation, 1, True, 82)
    assert not of(CompleteCall, late), "nothing that it still answers counts"
    told = scheduler.lose(wrong.index, 83)
    assert of(RedirectCall, told) == [RedirectCall(1, wrong.index, "QUARANTINED")]
    (again,) = of(StartCall, told)
    assert (again.worker, again.attempt) == (1 - wrong.index, 1), "the call has not been tried"


def test_one_wrong_call_keeps_a_device_from_nothing() -> None:
    scheduler = watched()
    told = wrong_call(scheduler, 1, 1)
    assert len(of(DeviceMismatch, told)) == 1
    assert canaries(told) == []
    assert scheduler.put(2, 2) == [2]


def test_two_wrong_calls_quarantine_a_device_and_it_is_tried_again() -> None:
    scheduler = watched()
    worker = scheduler.workers[0]
    for turn in range(3):
        now = 100.0 * turn
        wrong_call(scheduler, 10 * turn + 1, now)
        assert state(scheduler) is DeviceState.READY
        assert of(KillWorker, wrong_call(scheduler, 10 * turn + 2, now))
        assert state(scheduler) is DeviceState.QUARANTINED
        scheduler.lose(now=now)
        assert not worker.damaged, "and the device is tried again, however often"
        assert respawned(scheduler)[0].canary_rounds == TRIAL_ROUNDS
        scheduler.be_ready(now=now, canaries=CANARIES)


def test_what_an_earlier_process_computed_or_one_without_canaries_quarantines_nothing() -> None:
    scheduler = watched()
    scheduler.end(scheduler.begin(1, 1), now=1)
    scheduler.lose(now=1)
    scheduler.be_back(now=2)
    for _ in range(3):
        assert scheduler.mismatched(0, 1, 1, "figures", 3) == [DeviceMismatch(0, "", "figures")]
    wrong_call(scheduler, 2, 4)
    wrong_call(scheduler, 3, 4)
    assert state(scheduler) is DeviceState.READY


def test_a_mismatch_long_ago_does_not_count() -> None:
    scheduler = watched()
    for now in (INTERVAL_S, INTERVAL_S + MISMATCH_WINDOW_S + 1):
        scheduler.tick(now)
        answer(scheduler, 0, MISMATCH, now)
        assert state(scheduler) is DeviceState.READY
        answer(scheduler, 0, OK, now)
        answer(scheduler, 1, OK if now == INTERVAL_S else MISMATCH, now)
    assert state(scheduler) is DeviceState.QUARANTINED


def test_a_device_in_quarantine_gets_one_process_which_has_to_be_right_in_every_round() -> None:
    scheduler = watched()
    quarantined(scheduler)
    assert scheduler.all_down
    scheduler.lose(now=41)
    spawn, alarm = respawned(scheduler)
    assert spawn == SpawnWorker(0, 2, TRIAL_ROUNDS)
    # A death that is no mismatch does not end the quarantine, nor make it final.
    scheduler.lose(now=alarm, why="out of memory")
    assert state(scheduler) is DeviceState.QUARANTINED, "until it was right"
    spawn, alarm = respawned(scheduler)
    assert spawn == SpawnWorker(0, 3, TRIAL_ROUNDS)
    scheduler.be_ready(now=alarm, canaries=CANARIES)
    assert state(scheduler) is DeviceState.READY
    quarantined(scheduler, alarm + INTERVAL_S)
    scheduler.lose(now=200)
    assert (state(scheduler), scheduler.workers[0].damaged) == (DeviceState.QUARANTINED, True)
    assert scheduler.next_alarm() is None, "it was right in between, and is not believed again"


def test_a_device_that_is_wrong_from_the_start_is_never_ready() -> None:
    scheduler = starting_scheduler()
    for incarnation in (1, 2):
        told = scheduler.failing(0, incarnation, Failure("op: wrong", wrong="op"), 1)
        told += scheduler.lose(now=1, why="status 1")
        assert of(DeviceMismatch, told) == [DeviceMismatch(0, "op", "wrong")]
        assert state(scheduler) is DeviceState.QUARANTINED
        assert (scheduler.next_alarm() is None) == (incarnation == 2)
        scheduler.tick(scheduler.next_alarm() or 1)


def test_a_canary_that_hangs_ends_its_worker() -> None:
    scheduler = watched(run_limit_s=5, hang_grace_s=1)
    scheduler.tick(INTERVAL_S)
    alarm = scheduler.next_alarm()
    assert alarm is not None
    assert alarm > INTERVAL_S + 6
    (kill,) = of(KillWorker, scheduler.tick(alarm))
    assert "a canary ran for more than" in kill.reason


# ---------------------------------------------------------------------------------- pools of real devices


@pytest.mark.parametrize("wrong", ["any", "layer_norm_backward"])
@in_pool(("test:0?compute=1&wrong={wrong}", "test:1?compute=1"), ready=False)
async def test_a_pool_never_serves_from_a_device_that_is_wrong_from_the_start(
    pool: DevicePool, seen: Seen, wrong: str
) -> None:
    await pool.wait_ready(30)
    await until(lambda: pool.devices()[0].restarts == 1)
    assert pool.devices()[0].state is DeviceState.QUARANTINED
    assert "a canary was wrong twice" in pool.devices()[0].reason
    for seed in range(3):
        assert (await make_job(seed=seed).check(pool)).info.device == "test:1"
    assert ("test:0", DeviceState.READY) not in seen.states
    assert {device for device, _ in seen.mismatches} == {"test:0"}


# The next process is not there before the file is gone.
@in_pool(
    ("test:0?compute=1&wrong=any&wrong_if={tmp_path}/wrong",), canary_interval_s=0.2, respawn_backoff_s=0.5
)
async def test_a_device_that_grows_wrong_is_found_in_one_round_and_trusted_again_once_it_is_right(
    pool: DevicePool, seen: Seen, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong"
    wrong.touch()
    await until(lambda: ("test:0", DeviceState.QUARANTINED) in seen.states)
    wrong.unlink()
    await until(lambda: pool.devices()[0].state is DeviceState.READY)
    assert pool.devices()[0].restarts > 0
    assert (await make_job().check(pool)).info.device == "test:0"
    assert seen.canaries["mismatch"] == len(seen.mismatches) == 2
    assert ("test:0", DeviceState.READY) in seen.states
