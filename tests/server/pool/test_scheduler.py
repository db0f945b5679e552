"""What starts when, and what becomes of a call: order, deadlines, cancellation, workers that die."""

from __future__ import annotations

from typing import Any

import pytest
from tests.server.pool.scheduling import SETTINGS, of, open_scheduler, refused, started, starting_scheduler

from npugrad_server.pool.commands import (
    CompleteCall,
    FailCall,
    KillWorker,
    ReleaseCall,
    RequeueCall,
    StartCall,
    TellWorker,
)
from npugrad_server.pool.placement import MAX_OVERTAKEN
from npugrad_server.pool.types import DeviceState
from npugrad_server.worker.protocol import AbandonCall

RUN_LIMIT_S = SETTINGS.run_limit_s + SETTINGS.hang_grace_s
"""From the start of a call until its worker is ended for it."""


def test_a_call_starts_once_a_worker_is_ready_completes_and_is_released_once() -> None:
    scheduler = starting_scheduler()
    assert scheduler.put(1, output_bytes=100) == []
    (start,) = of(StartCall, scheduler.be_ready(now=7.5))
    assert (start.attempt, start.queued_s) == (1, 7.5)
    assert of(CompleteCall, scheduler.end(start, now=8)) == [CompleteCall(1)]
    assert scheduler.output_used_bytes == 128
    assert of(ReleaseCall, scheduler.close(1, 9)) == [ReleaseCall(1)]
    assert scheduler.output_used_bytes == 0
    assert scheduler.close(1, 10) == []
    assert scheduler.end(start, now=10) == []
    assert scheduler.begin(2, 11).queued_s == 0


def test_streams_are_filled_and_idle_devices_come_first() -> None:
    scheduler = open_scheduler(2, streams=2)
    assert [scheduler.begin(number).worker for number in range(4)] == [0, 1, 0, 1]
    assert scheduler.put(4) == []
    assert (scheduler.queue_depth, scheduler.running) == (1, 4)


def test_a_call_past_its_deadline_in_the_queue_is_not_launched() -> None:
    scheduler = open_scheduler()
    first = scheduler.begin(1)
    for number, deadline_s in ((2, 5.0), (3, 6.0)):
        scheduler.put(number, deadline_s=deadline_s)
    assert scheduler.next_alarm() == 5.0
    assert scheduler.tick(4.9) == []
    assert refused(scheduler.tick(5.0)) == [(2, "DEADLINE_EXCEEDED")]
    commands = scheduler.end(first, now=6.0)
    assert (started(commands), refused(commands)) == ([], [(3, "DEADLINE_EXCEEDED")])


def test_a_running_call_fails_at_its_deadline_and_its_worker_ends_after_the_grace() -> None:
    scheduler = open_scheduler()
    spared = scheduler.begin(0, deadline_s=5.0)
    assert refused(scheduler.tick(5.0)) == [(0, "DEADLINE_EXCEEDED")]
    assert scheduler.end(spared, now=9.0) == []
    assert of(KillWorker, scheduler.tick(15.0)) == []
    assert scheduler.workers[0].state is DeviceState.READY
    scheduler.begin(1, 20, deadline_s=25.0, output_bytes=64)
    assert refused(scheduler.tick(25.0)) == [(1, "DEADLINE_EXCEEDED")]
    assert scheduler.close(1, 25.0) == []  # the worker may still write: nothing is released
    assert scheduler.output_used_bytes == 64
    assert scheduler.next_alarm() == 35.0
    assert of(KillWorker, scheduler.tick(34.9)) == []
    assert [kill.worker for kill in of(KillWorker, scheduler.tick(35.0))] == [0]
    assert of(KillWorker, scheduler.tick(36.0)) == []
    commands = scheduler.lose(now=37.0)
    assert of(ReleaseCall, commands) == [ReleaseCall(1)]
    assert of(RequeueCall, commands) == []
    assert scheduler.output_used_bytes == 0


def test_a_call_beyond_the_run_limit_fails_with_its_worker_and_is_not_tried_again() -> None:
    scheduler = open_scheduler(streams=2)
    for number in (1, 2):
        scheduler.put(number, number)
    assert scheduler.tick(RUN_LIMIT_S) == []
    commands = scheduler.tick(RUN_LIMIT_S + 1)
    assert refused(commands) == [(1, "DEADLINE_EXCEEDED")]
    assert len(of(KillWorker, commands)) == 1
    assert [call.call for call in of(RequeueCall, scheduler.lose(now=RUN_LIMIT_S + 1))] == [2]
    assert scheduler.workers[0].failures == 0


def test_a_server_that_stood_still_gives_its_calls_their_grace_again() -> None:
    """A suspended machine: the limit passed long ago, and nobody ran meanwhile."""
    scheduler = open_scheduler()
    scheduler.put(1)
    assert scheduler.tick(5000) == []
    assert scheduler.next_alarm() == 5000 + SETTINGS.hang_grace_s
    assert len(of(KillWorker, scheduler.tick(5000 + SETTINGS.hang_grace_s))) == 1


def test_a_cancelled_running_call_keeps_its_memory_until_its_worker_answers_or_is_ended() -> None:
    scheduler = open_scheduler(memory=100)
    start = scheduler.begin(1, output_bytes=64, memory_bytes=100)
    assert scheduler.cancel(1, 1.0) == [TellWorker(0, 1, AbandonCall(1))]
    assert scheduler.close(1, 1.0) == []
    for number in (2, 3, 4):
        assert scheduler.put(number, 1.0, memory_bytes=100) == []
    assert scheduler.cancel(2, 1.0) == []
    assert of(ReleaseCall, scheduler.close(2, 1.0)) == [ReleaseCall(2)], "one that waits never starts"
    commands = scheduler.end(start, now=2.0)
    assert of(CompleteCall, commands) == []
    assert of(ReleaseCall, commands) == [ReleaseCall(1)]
    assert started(commands) == [3]
    scheduler.cancel(3, 3.0)
    assert scheduler.next_alarm() == 13.0
    assert len(of(KillWorker, scheduler.tick(13.0))) == 1


def test_a_call_whose_worker_died_runs_again_on_another_device_and_first() -> None:
    scheduler = open_scheduler(2)
    scheduler.put(1, label="x")
    other = scheduler.begin(2, label="y")
    scheduler.put(3, label="y")
    assert of(RequeueCall, scheduler.lose(0, 1.0)) == [RequeueCall(1, 0)]
    (start,) = of(StartCall, scheduler.end(other, now=2.0))
    assert (start.call, start.worker, start.attempt, start.queued_s) == (1, 1, 2, 2.0)


def test_a_call_that_kills_every_worker_runs_alone_and_fails_after_three_tries_and_devices_stay() -> None:
    scheduler = open_scheduler(streams=2)
    scheduler.put(1, label="bad")
    scheduler.put(2, label="good")
    scheduler.lose(why="death 1")
    for attempt in (2, 3):
        (start,) = of(StartCall, scheduler.be_back(now=10.0 * attempt))
        assert (start.call, start.attempt) == (1, attempt)
        assert scheduler.put(attempt + 1, 10.0 * attempt, label="new") == []
        commands = scheduler.lose(why=f"death {attempt}", now=10.0 * attempt)
        assert of(RequeueCall, commands) == [RequeueCall(1, 0)] * (attempt == 2)
    (failed,) = of(FailCall, commands)
    assert (failed.call, failed.reason) == (1, "WORKER_LOST")
    assert "death 3" in failed.detail
    assert scheduler.workers[0].state is DeviceState.RESTARTING
    assert scheduler.workers[0].failures == 0


# -------------------------------------------------------------------------- large calls and others in a queue

SMALL: dict[str, Any] = {"label": "s", "output_bytes": 64}
BIG: dict[str, Any] = {"label": "big", "output_bytes": 256}


def test_a_big_call_is_overtaken_only_so_often() -> None:
    scheduler = open_scheduler(streams=2, output_bytes=256)
    # One small call always runs, so that the big one, which needs the whole arena, never finds it empty.
    running = scheduler.begin(0, **SMALL)
    scheduler.put(1, **BIG)
    overtakers = 0
    for number in range(2, 100):
        starts = [*scheduler.put(number, **SMALL)]
        commands = scheduler.finish(running)
        starts += started(commands)
        overtakers += sum(call != 1 for call in starts)
        if starts[0] == 1:
            break
        running = StartCall(starts[0], 0, 1, 1, 0.0)
    assert overtakers == MAX_OVERTAKEN
    assert scheduler.queue_depth > 0


def test_other_devices_and_higher_priorities_go_on_while_one_is_kept_for_a_big_call() -> None:
    scheduler = open_scheduler(2, streams=2, output_bytes=256)
    held = [scheduler.begin(number, **SMALL) for number in (0, 1)]
    scheduler.put(2, **BIG)
    workers = []
    for number in range(3, 60):
        start = scheduler.begin(number, **SMALL)
        workers.append(start.worker)
        scheduler.finish(start)
    assert set(workers[:MAX_OVERTAKEN]) == {0, 1}
    (other,) = set(workers[MAX_OVERTAKEN:])
    scheduler.begin(60, **SMALL)
    assert scheduler.put(61, **SMALL) == []
    assert scheduler.begin(62, priority=5, **SMALL).worker == 1 - other
    scheduler.finish(StartCall(62, 1 - other, 1, 1, 0.0))
    (last,) = [start for start in held if start.worker != other]
    starts = of(StartCall, scheduler.finish(last))
    assert (starts[0].call, starts[0].worker) == (2, 1 - other)


@pytest.mark.parametrize(("one_mode", "expected"), [(True, []), (False, [2])])
def test_deterministic_modes_do_not_overlap_where_the_device_has_one_mode(
    one_mode: bool, expected: list[int]
) -> None:
    scheduler = open_scheduler(streams=2, one_mode=one_mode)
    first = scheduler.begin(1, deterministic=True)
    assert scheduler.put(2, label="b") == expected
    if one_mode:
        third = scheduler.begin(3, label="c", deterministic=True)
        scheduler.end(first)
        assert started(scheduler.end(third)) == [2]


def test_alarms_of_calls_long_done_do_not_pile_up() -> None:
    scheduler = open_scheduler()
    for number in range(1000):
        scheduler.finish(scheduler.begin(number, deadline_s=1e6))
    assert len(scheduler._alarms) < 200
