"""How a worker lives: which losses count against its device, how long it waits, how long a start may take."""

from __future__ import annotations

from collections.abc import Sequence
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
    SpawnWorker,
    StartCall,
    WorkerSpec,
)
from npugrad_server.pool.scheduler import Scheduler
from npugrad_server.pool.state import CallState, WorkerState
from npugrad_server.pool.types import DeviceState
from npugrad_server.pool.worker_lifecycle import SLOWEST_S

QUICKEST, QUICK = SETTINGS.respawn_backoff_s, SETTINGS.respawn_backoff_max_s
MOST = SETTINGS.max_respawns


def started_scheduler(**changes: Any) -> Scheduler:
    """One device whose first process was started."""
    scheduler = Scheduler(replace(SETTINGS, **changes), [WorkerSpec(1, 1024, "host")], {"host": 1024})
    scheduler.start(0)
    return scheduler


def lose(scheduler: Scheduler, now: float, *, host: bool = False, worker: int = 0) -> float:
    """The process of a device ends, and the next one is started; returns the wait between."""
    record = scheduler.workers[worker]
    scheduler.lost(worker, record.incarnation, "signal 9", now, host=host)
    assert record.alarm is not None, "it is never tried again"
    again = record.alarm
    assert SpawnWorker(worker, record.incarnation + 1) in scheduler.tick(again)
    return round(again - now, 6)


def be_ready(scheduler: Scheduler, now: float, worker: int = 0) -> list[StartCall]:
    return of(StartCall, scheduler.ready(worker, scheduler.workers[worker].incarnation, now))


def down(worker: WorkerState) -> bool:
    return worker.state is DeviceState.DOWN


# ----------------------------------------------------------------------------------- what counts for what


def test_spawns_that_fail_count_against_no_device_and_are_repeated_quickly_for_ever() -> None:
    scheduler, now = started_scheduler(), 0.0
    (worker,) = scheduler.workers
    for turn in range(1, 100):
        now += lose(scheduler, now, host=True)
        assert worker.failures == 0
        assert down(worker) == (turn > MOST)
    assert lose(scheduler, now, host=True) == QUICK
    # Meanwhile nobody waits for it, and it is back with the first process that can be started.
    assert [failed.reason for failed in of(FailCall, scheduler.submit(CallState(1), now))] == ["NO_DEVICE"]
    be_ready(scheduler, now)
    assert worker.state is DeviceState.READY
    assert started(scheduler.submit(CallState(2), now)) == [2]


def test_an_idle_worker_may_be_killed_however_often() -> None:
    scheduler, now = open_scheduler(), 0.0
    (worker,) = scheduler.workers
    for turn in range(1, 100):
        wait = lose(scheduler, now)
        assert wait <= QUICK
        assert down(worker) == (turn > MOST)
        now += wait
        be_ready(scheduler, now)
        assert worker.state is DeviceState.READY


@pytest.mark.parametrize("end", ["deadline", "cancelled", "verdict"])
def test_deaths_under_calls_are_not_the_devices_whatever_becomes_of_the_calls(end: str) -> None:
    scheduler, now = open_scheduler(), 0.0
    (worker,) = scheduler.workers
    for number in range(20):
        request = CallState(number, deadline_s=now + 0.25 if end == "deadline" else None)
        assert started(scheduler.submit(request, now)) == [number]
        while True:
            if end == "cancelled":
                scheduler.cancel(number, now)
            wait = lose(scheduler, now)
            assert wait <= QUICK
            now += wait
            assert not down(worker)
            if not be_ready(scheduler, now):
                break
        scheduler.close(number, now)
    assert worker.failures == 0


def test_deaths_count_against_the_device_once_another_one_has_done_the_calls() -> None:
    scheduler, now, waits = open_scheduler(2), 0.0, []
    bad, good = scheduler.workers
    for number in range(0, 60, 2):
        # Two, so that one of them goes to the bad device.
        starts = of(StartCall, scheduler.submit(CallState(number), now))
        starts += of(StartCall, scheduler.submit(CallState(number + 1), now))
        on_good = next(start.call for start in starts if start.worker == good.index)
        waits.append(lose(scheduler, now))
        assert down(bad) == (len(waits) > MOST + 1)
        for call in (on_good, number + (on_good == number)):
            scheduler.answered(good.index, 1, call, True, now)
            scheduler.close(call, now)
        now += waits[-1]
        be_ready(scheduler, now)
        assert bad.state is DeviceState.READY, "it gets another chance each time"
    assert max(waits[: MOST + 1]) <= QUICK
    assert waits == sorted(waits)
    assert waits[-1] > 2 * QUICK
    assert max(waits) <= SLOWEST_S


def test_the_death_of_several_calls_at_once_proves_nothing_against_the_device() -> None:
    scheduler = open_scheduler(2, streams=2)
    for number in (1, 2, 3, 4):
        scheduler.submit(CallState(number), 0)
    lose(scheduler, 0)
    for number in (2, 4, 1, 3):
        scheduler.answered(1, 1, number, True, 0)
    assert scheduler.queue_depth == scheduler.running == 0
    assert scheduler.workers[0].failures == 0


def test_a_device_that_does_not_open_is_tried_slower_and_slower_without_end() -> None:
    scheduler, now, waits = started_scheduler(), 0.0, []
    (worker,) = scheduler.workers
    for turn in range(1, 200):
        scheduler.failing(0, worker.incarnation, Failure("it does not open"), now)
        waits.append(lose(scheduler, now))
        now += waits[-1]
        assert down(worker) == (turn > MOST)
    assert waits[:MOST] == [QUICKEST, 2 * QUICKEST, 4 * QUICKEST]
    assert waits == sorted(waits)
    assert waits[-1] == SLOWEST_S
    be_ready(scheduler, now)
    assert worker.state is DeviceState.READY


def test_calls_are_refused_while_a_device_that_is_down_is_tried_and_served_once_it_is_open() -> None:
    scheduler = started_scheduler(max_respawns=0)
    scheduler.submit(CallState(1), 0)
    (worker,) = scheduler.workers
    scheduler.failing(0, 1, Failure("it does not open"), 0)
    assert [failed.call for failed in of(FailCall, scheduler.lost(0, 1, "status 1", 0))] == [1]
    scheduler.tick(100)
    assert worker.alive
    scheduler.progress(0, worker.incarnation, "importing torch_npu", 100)
    assert (worker.state, worker.reason) == (DeviceState.DOWN, "status 1")
    assert [failed.call for failed in of(FailCall, scheduler.submit(CallState(2), 100))] == [2]
    be_ready(scheduler, 101)
    assert started(scheduler.submit(CallState(3), 101)) == [3]


# ----------------------------------------------------------------------------------- how long a start takes


def test_each_stage_of_a_start_has_the_whole_time_and_is_shown() -> None:
    scheduler = started_scheduler()
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


def test_a_start_that_only_gets_on_ends_all_the_same() -> None:
    scheduler = started_scheduler()
    for now in range(0, 180, 30):
        assert of(KillWorker, scheduler.tick(now)) == []
        scheduler.progress(0, 1, "trying once more", now)
    (kill,) = of(KillWorker, scheduler.tick(180))
    assert kill.reason == "the device did not open within 180 s: trying once more"


def test_a_start_that_took_too_long_gets_twice_the_time_and_the_device_is_down_when_that_does_not_help() -> (
    None
):
    scheduler, now, limits = started_scheduler(max_respawns=99), 0.0, []
    (worker,) = scheduler.workers
    for turn in range(1, 8):
        alarm = scheduler.next_alarm()
        assert alarm is not None
        limits.append(alarm - now)
        now = alarm
        assert of(KillWorker, scheduler.tick(now))
        now += lose(scheduler, now)
        assert down(worker) == (turn > 2)
    assert limits == [60, 120, 240, 240, 240, 240, 240]
    # What it needed once it may need again.
    be_ready(scheduler, now)
    now += lose(scheduler, now)
    assert scheduler.next_alarm() == now + 240
    assert not down(worker)


def test_stages_of_a_former_process_are_not_heard() -> None:
    scheduler = started_scheduler()
    lose(scheduler, 0)
    alarm = scheduler.next_alarm()
    assert scheduler.progress(0, 1, "importing torch_npu", 2) == []
    assert scheduler.next_alarm() == alarm
    be_ready(scheduler, 3)
    assert scheduler.progress(0, 2, "importing torch_npu", 4) == []
    assert scheduler.next_alarm() is None


def test_a_damaged_device_stays_down_whatever_its_last_words_were() -> None:
    scheduler = open_scheduler()
    scheduler.failing(0, 1, Failure("quarantined", RestartPolicy.NEVER), 0)
    scheduler.lost(0, 1, "status 70", 0)
    assert scheduler.next_alarm() is None
    assert scheduler.tick(1e9) == []
    assert down(scheduler.workers[0])


# ----------------------------------------------------------------------------------- starts that take turns


def heavy_scheduler(count: int) -> tuple[Scheduler, list[int]]:
    """Devices whose starts are heavy, and those of them that were started at once."""
    scheduler = Scheduler(SETTINGS, [WorkerSpec(1, 1024, "host", heavy=True)] * count, {"host": 1024})
    return scheduler, spawned(scheduler.start(0))


def spawned(commands: Sequence[Command]) -> list[int]:
    return [command.worker for command in of(SpawnWorker, commands)]


def test_heavy_starts_take_turns() -> None:
    scheduler, first = heavy_scheduler(8)
    assert first == [0, 1]
    waiting = scheduler.workers[2]
    assert (waiting.state, waiting.reason) == (DeviceState.STARTING, "waiting for other devices to start")
    assert spawned(scheduler.ready(0, 1, 10)) == [2]
    assert spawned(scheduler.lost(1, 1, "status 1", 12)) == [3]
    # Those that take long do not hold up the others for longer than a turn.
    assert scheduler.next_alarm() == 13
    assert spawned(scheduler.tick(13)) == []  # the lost one waits for its turn as well
    assert spawned(scheduler.tick(39)) == []
    assert spawned(scheduler.tick(40)) == [1]
    assert spawned(scheduler.tick(42)) == [4]
    assert spawned(scheduler.tick(71)) == [5]
    assert [worker.state for worker in scheduler.workers[6:]] == [DeviceState.STARTING] * 2


def test_devices_that_are_down_have_their_turn_after_the_others() -> None:
    scheduler, now = heavy_scheduler(3)[0], 0.0
    scheduler.ready(0, 1, now)
    scheduler.failing(1, 1, Failure("nothing there", RestartPolicy.MENDED), now)
    scheduler.lost(1, 1, "nothing there", now)
    scheduler.ready(2, 1, now)
    for worker in (0, 2):
        scheduler.lost(worker, 1, "signal 9", now)
    assert spawned(scheduler.tick(1)) == [0, 2]
    scheduler.tick(5)
    assert scheduler.workers[1].waits
    lost = scheduler.lost(0, 2, "signal 9", 6)
    assert spawned(lost) == [1]
    # The next time it is the other way round.
    scheduler.tick(8)
    assert scheduler.workers[0].waits
    assert down(scheduler.workers[1])


def test_light_starts_do_not_wait_for_each_other() -> None:
    scheduler = Scheduler(SETTINGS, [WorkerSpec(1, 1024, "host")] * 8, {"host": 1024})
    assert len(spawned(scheduler.start(0))) == 8
