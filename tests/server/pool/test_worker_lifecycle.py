"""How a worker lives: which losses count against its device, how long it waits, how long a start may take.

And what becomes of its calls when its device says that it failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.server.pool.scheduling import (
    SETTINGS,
    Driven,
    of,
    open_scheduler,
    refused,
    started,
    starting_scheduler,
)

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
from npugrad_server.pool.state import CallState, WorkerState
from npugrad_server.pool.types import DeviceState
from npugrad_server.pool.worker_lifecycle import SLOWEST_S

QUICKEST, QUICK = SETTINGS.respawn_backoff_s, SETTINGS.respawn_backoff_max_s
MOST = SETTINGS.max_respawns
GRACE_S = SETTINGS.hang_grace_s


def lose(scheduler: Driven, now: float, worker: int = 0, **told: Any) -> float:
    """The process of a device ends, and the next one is started; returns the wait between."""
    record = scheduler.workers[worker]
    scheduler.lose(worker, now, **told)
    assert record.alarm is not None, "it is never tried again"
    again = record.alarm
    assert SpawnWorker(worker, record.incarnation + 1) in scheduler.tick(again)
    return round(again - now, 6)


def down(worker: WorkerState) -> bool:
    return worker.state is DeviceState.DOWN


# ----------------------------------------------------------------------------------- what counts for what


def test_spawns_that_fail_count_against_no_device_and_are_repeated_quickly_for_ever() -> None:
    scheduler, now = starting_scheduler(), 0.0
    (worker,) = scheduler.workers
    for turn in range(1, 30):
        now += lose(scheduler, now, host=True)
        assert worker.failures == 0
        assert down(worker) == (turn > MOST)
    assert lose(scheduler, now, host=True) == QUICK
    # Meanwhile nobody waits for it, and it is back with the first process that can be started.
    assert refused(scheduler.submit(CallState(1), now)) == [(1, "NO_DEVICE")]
    scheduler.be_ready(now=now)
    assert worker.state is DeviceState.READY
    assert scheduler.put(2, now) == [2]


def test_an_idle_worker_may_be_killed_however_often() -> None:
    scheduler, now = open_scheduler(), 0.0
    (worker,) = scheduler.workers
    for turn in range(1, 30):
        wait = lose(scheduler, now)
        assert wait <= QUICK
        assert down(worker) == (turn > MOST)
        now += wait
        scheduler.be_ready(now=now)
        assert worker.state is DeviceState.READY


@pytest.mark.parametrize("end", ["deadline", "grace", "cancelled", "verdict"])
def test_deaths_under_calls_are_not_the_devices_whatever_becomes_of_the_calls(end: str) -> None:
    scheduler, now = open_scheduler(), 0.0
    (worker,) = scheduler.workers
    for number in range(20):
        scheduler.begin(number, now, deadline_s=now + 0.25 if end in ("deadline", "grace") else None)
        while True:
            if end == "cancelled":
                scheduler.cancel(number, now)
            elif end == "grace":
                now += 0.25
                scheduler.tick(now)
                now += GRACE_S
                assert of(KillWorker, scheduler.tick(now))
            wait = lose(scheduler, now)
            assert wait <= QUICK
            now += wait
            assert not down(worker)
            if not started(scheduler.be_ready(now=now)):
                break
        scheduler.close(number, now)
    assert worker.failures == 0


def test_deaths_count_against_the_device_once_another_one_has_done_the_calls() -> None:
    scheduler, now, waits = open_scheduler(2), 0.0, []
    bad, good = scheduler.workers
    for number in range(0, 60, 2):
        # Two, so that one of them goes to the bad device.
        starts = [scheduler.begin(number, now), scheduler.begin(number + 1, now)]
        on_good = next(start.call for start in starts if start.worker == good.index)
        waits.append(lose(scheduler, now))
        assert down(bad) == (len(waits) > MOST + 1)
        for call in (on_good, number + (on_good == number)):
            scheduler.answered(good.index, 1, call, True, now)
            scheduler.close(call, now)
        now += waits[-1]
        scheduler.be_ready(now=now)
        assert bad.state is DeviceState.READY, "it gets another chance each time"
    assert max(waits[: MOST + 1]) <= QUICK
    assert waits == sorted(waits)
    assert 2 * QUICK < waits[-1] <= SLOWEST_S


def test_the_death_of_several_calls_at_once_proves_nothing_against_the_device() -> None:
    scheduler = open_scheduler(2, streams=2)
    for number in (1, 2, 3, 4):
        scheduler.put(number)
    lose(scheduler, 0)
    for number in (2, 4, 1, 3):
        scheduler.answered(1, 1, number, True, 0)
    assert scheduler.queue_depth == scheduler.running == 0
    assert scheduler.workers[0].failures == 0


def test_a_device_that_does_not_open_is_tried_slower_and_slower_until_it_has_done_a_call() -> None:
    scheduler, now, waits = starting_scheduler(), 0.0, []
    (worker,) = scheduler.workers
    for turn in range(1, 40):
        scheduler.failing(0, worker.incarnation, Failure("it does not open"), now)
        waits.append(lose(scheduler, now))
        now += waits[-1]
        assert down(worker) == (turn > MOST)
    assert waits[:MOST] == [QUICKEST, 2 * QUICKEST, 4 * QUICKEST]
    assert waits == sorted(waits)
    assert waits[-1] == SLOWEST_S
    scheduler.be_ready(now=now)
    assert worker.state is DeviceState.READY
    for number, reason, failures in ((1, "INTERNAL", len(waits)), (2, "", 0)):  # an error is no success
        scheduler.end(scheduler.begin(number, now), reason, now)
        assert worker.failures == failures


def test_calls_are_refused_while_a_device_that_is_down_is_tried_and_served_once_it_is_open() -> None:
    scheduler = starting_scheduler(settings=replace(SETTINGS, max_respawns=0))
    scheduler.put(1)
    (worker,) = scheduler.workers
    scheduler.failing(0, 1, Failure("it does not open"), 0)
    (failed,) = of(FailCall, scheduler.lose(why="status 1"))
    assert (failed.call, failed.reason, failed.detail) == (1, "NO_DEVICE", "status 1")
    assert scheduler.all_down
    scheduler.tick(100)
    assert worker.alive
    scheduler.progress(0, worker.incarnation, "importing torch_npu", 100)
    assert (worker.state, worker.reason) == (DeviceState.DOWN, "status 1")
    assert refused(scheduler.submit(CallState(2), 100)) == [(2, "NO_DEVICE")]
    scheduler.be_ready(now=101)
    assert scheduler.put(3, 101) == [3]


# ------------------------------------------------------------------------------ devices that say they failed


def fail_under(
    scheduler: Driven, start: StartCall, now: float = 0, **changes: Any
) -> tuple[list[Command], list[Command]]:
    """The device of a running call fails under it; what follows from the words and what from the end."""
    failure = replace(Failure("run returned 507015", call=start.call, code=507015), **changes)
    said = scheduler.failing(start.worker, start.incarnation, failure, now)
    return said, scheduler.lost(start.worker, start.incarnation, "status 70", now)


def test_a_call_under_which_devices_fail_is_tried_once_more_elsewhere_and_does_not_bring_them_down() -> None:
    scheduler = open_scheduler(2, settings=replace(SETTINGS, max_respawns=0))
    first = scheduler.begin(1)
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
    assert [worker.state for worker in scheduler.workers] == [DeviceState.RESTARTING] * 2


def test_calls_beside_the_one_that_failed_are_tried_as_often_as_any() -> None:
    scheduler = open_scheduler(1, streams=2)
    first, _ = scheduler.begin(1), scheduler.begin(2)
    fail_under(scheduler, first)
    for tries in (2, 3):
        now = 100.0 * tries
        commands = scheduler.be_back(now=now)
        while (running := scheduler.workers[0].running) and 2 not in running:
            (number,) = running
            commands = scheduler.answered(0, scheduler.workers[0].incarnation, number, True, now)
        assert [c.attempt for c in of(StartCall, commands)] == [tries]
        lost = scheduler.lose(now=now)
    assert [call for call, _ in refused(lost)] == [2]


def test_a_call_that_ran_too_long_is_not_tried_again_and_the_device_not_blamed() -> None:
    scheduler = open_scheduler()
    _, ended = fail_under(scheduler, scheduler.begin(1), code=507046, retry=False, exempt=True)
    (failed,) = of(FailCall, ended)
    assert (failed.reason, failed.code) == ("DEADLINE_EXCEEDED", 507046)
    assert (scheduler.workers[0].state, scheduler.workers[0].failures) == (DeviceState.RESTARTING, 0)


def test_a_damaged_device_is_given_no_call_and_not_tried_again() -> None:
    scheduler = open_scheduler(2)
    start = scheduler.begin(1)
    _, ended = fail_under(scheduler, start, restart_policy=RestartPolicy.NEVER, reason="damaged: words")
    worker = scheduler.workers[start.worker]
    assert (worker.state, worker.reason) == (DeviceState.DOWN, "damaged: words")
    (again,) = of(StartCall, ended)
    assert again.worker != start.worker
    assert worker.alarm is None
    scheduler.finish(again)
    assert of(SpawnWorker, scheduler.tick(1e9)) == []
    assert down(worker)


def test_a_device_that_needs_time_gets_more_of_it_each_time() -> None:
    scheduler, now, waits = starting_scheduler(settings=replace(SETTINGS, max_respawns=9)), 0.0, []
    for incarnation in range(1, 7):
        assert scheduler.failing(0, incarnation, Failure("no device", RestartPolicy.SLOWLY), now) == []
        waits.append(lose(scheduler, now))
        now += waits[-1]
    assert waits == [5, 10, 20, 40, 60, 60]


@pytest.mark.parametrize(("policy", "alarm"), [(RestartPolicy.MENDED, 5), (RestartPolicy.NEVER, None)])
def test_what_cannot_open_is_down_at_once_and_tried_again_unless_it_is_damaged(
    policy: RestartPolicy, alarm: float | None
) -> None:
    scheduler = starting_scheduler()
    scheduler.failing(0, 1, Failure("torch_npu is not installed", policy), 0)
    scheduler.lose(why="torch_npu is not installed")
    assert (down(scheduler.workers[0]), scheduler.all_down) == (True, True)
    assert scheduler.next_alarm() == alarm


def test_a_former_process_is_not_heard() -> None:
    scheduler = open_scheduler()
    scheduler.begin(1)
    lose(scheduler, 0)
    alarm = scheduler.next_alarm()
    assert scheduler.progress(0, 1, "importing torch_npu", 2) == []
    assert scheduler.next_alarm() == alarm
    assert scheduler.ready(0, 1, 2) == []
    scheduler.be_ready(now=3)
    alarm = scheduler.next_alarm()
    assert scheduler.answered(0, 1, 1, True, 4) == []
    assert scheduler.lost(0, 1, "died", 4) == []
    assert scheduler.failing(0, 1, Failure("words", RestartPolicy.NEVER), 4) == []
    assert scheduler.progress(0, 2, "importing torch_npu", 4) == [], "it is open"
    assert scheduler.next_alarm() == alarm
    assert scheduler.workers[0].state is DeviceState.READY
    assert scheduler.running == 1


# ----------------------------------------------------------------------------------- how long a start takes


def test_each_stage_of_a_start_has_the_whole_time_and_is_shown() -> None:
    scheduler = starting_scheduler()
    (worker,) = scheduler.workers
    assert scheduler.next_alarm() == 60
    scheduler.progress(0, 1, "importing torch_npu", 50)
    assert (worker.state, worker.reason) == (DeviceState.STARTING, "importing torch_npu")
    assert scheduler.next_alarm() == 110
    assert of(KillWorker, scheduler.tick(109)) == []
    scheduler.progress(0, 1, "taking the device", 100)
    (kill,) = of(KillWorker, scheduler.tick(160))
    assert kill.reason == "the device did not open: 60 s without progress while taking the device"
    scheduler.progress(0, 1, "it got on after all", 161)
    assert scheduler.next_alarm() is None
    scheduler.lose(now=162)
    assert (worker.reason, worker.failures) == (kill.reason, 1)


def test_a_start_that_only_gets_on_ends_all_the_same() -> None:
    scheduler = starting_scheduler()
    for now in range(0, 180, 30):
        assert of(KillWorker, scheduler.tick(now)) == []
        scheduler.progress(0, 1, "trying once more", now)
    (kill,) = of(KillWorker, scheduler.tick(180))
    assert kill.reason == "the device did not open within 180 s: trying once more"


def test_a_start_that_took_too_long_gets_twice_the_time_and_the_device_is_down_when_that_does_not_help() -> (
    None
):
    scheduler, now, limits = starting_scheduler(settings=replace(SETTINGS, max_respawns=99)), 0.0, []
    (worker,) = scheduler.workers
    for turn in range(1, 6):
        alarm = scheduler.next_alarm()
        assert alarm is not None
        limits.append(alarm - now)
        now = alarm
        assert of(KillWorker, scheduler.tick(now))
        now += lose(scheduler, now)
        assert down(worker) == (turn > 2)
    assert limits == [60, 120, 240, 240, 240]
    # What it needed once it may need again.
    scheduler.be_ready(now=now)
    now += lose(scheduler, now)
    assert scheduler.next_alarm() == now + 240
    assert not down(worker)


# ----------------------------------------------------------------------------------- starts that take turns


def heavy_scheduler(count: int, *, heavy: bool = True) -> tuple[Driven, list[int]]:
    """Devices whose starts are heavy, and those of them that were started at once."""
    scheduler = Driven(SETTINGS, [WorkerSpec(1, 1024, "host", heavy=heavy)] * count, {"host": 1024})
    return scheduler, spawned(scheduler.start(0))


def spawned(commands: Sequence[Command]) -> list[int]:
    return [command.worker for command in of(SpawnWorker, commands)]


def test_heavy_starts_take_turns_and_light_ones_do_not_wait() -> None:
    scheduler, first = heavy_scheduler(8)
    assert first == [0, 1]
    waiting = scheduler.workers[2]
    assert (waiting.state, waiting.reason) == (DeviceState.STARTING, "waiting for other devices to start")
    assert spawned(scheduler.ready(0, 1, 10)) == [2]
    assert spawned(scheduler.lost(1, 1, "status 1", 12)) == [3]
    # Those that take long do not hold up the others for longer than a turn.
    assert scheduler.next_alarm() == 13
    # The lost one waits for its turn as well.
    turns = [spawned(scheduler.tick(now)) for now in (13, 39, 40, 42, 71)]
    assert turns == [[], [], [1], [4], [5]]
    assert [worker.state for worker in scheduler.workers[6:]] == [DeviceState.STARTING] * 2
    assert len(heavy_scheduler(8, heavy=False)[1]) == 8


def test_devices_that_are_down_have_their_turn_after_the_others() -> None:
    scheduler, _ = heavy_scheduler(3)
    scheduler.be_ready(0)
    scheduler.failing(1, 1, Failure("nothing there", RestartPolicy.MENDED), 0)
    scheduler.lose(1, why="nothing there")
    scheduler.be_ready(2)
    for worker in (0, 2):
        scheduler.lose(worker)
    assert spawned(scheduler.tick(1)) == [0, 2]
    scheduler.tick(5)
    assert scheduler.workers[1].waits
    assert spawned(scheduler.lose(0, 6)) == [1]
    # The next time it is the other way round.
    scheduler.tick(8)
    assert scheduler.workers[0].waits
    assert down(scheduler.workers[1])
