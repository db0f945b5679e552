"""What starts when, and what becomes of a call: order, deadlines, cancellation, workers that die."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.server.pool.scheduling import SETTINGS, finish, of, open_scheduler, run_all, started

from npugrad_server.pool.commands import (
    CompleteCall,
    FailCall,
    KillWorker,
    ReleaseCall,
    RequeueCall,
    SpawnWorker,
    StartCall,
    TellWorker,
    WorkerSpec,
)
from npugrad_server.pool.placement import MAX_OVERTAKEN
from npugrad_server.pool.scheduler import Scheduler
from npugrad_server.pool.state import CallState
from npugrad_server.pool.tenant import Tenant
from npugrad_server.pool.types import DeviceState
from npugrad_server.worker.protocol import AbandonCall

RUN_LIMIT_S = SETTINGS.run_limit_s + SETTINGS.hang_grace_s
"""From the start of a call until its worker is ended for it."""


def test_a_call_starts_completes_and_is_released_once() -> None:
    scheduler = open_scheduler()
    call = CallState(1, output_bytes=100)
    (start,) = of(StartCall, scheduler.submit(call, 2.0))
    assert (start.attempt, start.queued_s, call.region.nbytes) == (1, 0.0, 128)
    assert of(CompleteCall, scheduler.answered(0, 1, 1, True, 3.0)) == [CompleteCall(1)]
    assert scheduler.output_used_bytes == 128
    assert of(ReleaseCall, scheduler.close(1, 4.0)) == [ReleaseCall(1)]
    assert scheduler.output_used_bytes == 0
    assert scheduler.close(1, 5.0) == []
    assert scheduler.answered(0, 1, 1, True, 5.0) == []


def test_nothing_starts_before_a_worker_is_ready() -> None:
    scheduler = Scheduler(SETTINGS, [WorkerSpec(1, 1024, "host")], {"host": 0})
    scheduler.start(0)
    assert started(scheduler.submit(CallState(1), 0)) == []
    (start,) = of(StartCall, scheduler.ready(0, 1, 7.5))
    assert start.queued_s == 7.5


def test_priority_then_turns_then_first_come() -> None:
    scheduler = open_scheduler()
    first = scheduler.submit(CallState(0), 0)
    for number, priority, label in [(1, 0, "a"), (2, 0, "a"), (3, 0, "b"), (4, 9, "b"), (5, 0, "a")]:
        scheduler.submit(CallState(number, priority, label), 0)
    assert run_all(scheduler, first) == [0, 4, 1, 3, 2, 5]


def test_streams_are_filled_and_idle_devices_come_first() -> None:
    scheduler = open_scheduler(2, streams=2)
    starts = [of(StartCall, scheduler.submit(CallState(i), 0)) for i in range(5)]
    assert [[start.worker for start in found] for found in starts] == [[0], [1], [0], [1], []]
    assert scheduler.queue_depth == 1
    assert scheduler.running == 4


def test_a_deadline_passes_in_the_queue() -> None:
    scheduler = open_scheduler()
    scheduler.submit(CallState(1), 0)
    scheduler.submit(CallState(2, deadline_s=5.0), 0)
    assert scheduler.next_alarm() == 5.0
    assert scheduler.tick(4.9) == []
    (failed,) = of(FailCall, scheduler.tick(5.0))
    assert (failed.call, failed.reason) == (2, "DEADLINE_EXCEEDED")
    assert scheduler.next_alarm() == RUN_LIMIT_S  # of the one that runs


def test_a_call_past_its_deadline_is_not_launched() -> None:
    scheduler = open_scheduler()
    scheduler.submit(CallState(1), 0)
    scheduler.submit(CallState(2, deadline_s=5.0), 0)
    commands = scheduler.answered(0, 1, 1, True, 6.0)
    assert started(commands) == []
    assert [failed.call for failed in of(FailCall, commands)] == [2]


def test_a_running_call_fails_at_its_deadline_and_its_worker_ends_after_the_grace() -> None:
    scheduler = open_scheduler()
    scheduler.submit(CallState(1, deadline_s=5.0, output_bytes=64), 0)
    (failed,) = of(FailCall, scheduler.tick(5.0))
    assert (failed.call, failed.reason) == (1, "DEADLINE_EXCEEDED")
    assert scheduler.close(1, 5.0) == []  # the worker may still write: nothing is released
    assert scheduler.output_used_bytes == 64
    assert scheduler.next_alarm() == 15.0
    assert of(KillWorker, scheduler.tick(14.9)) == []
    assert [kill.worker for kill in of(KillWorker, scheduler.tick(15.0))] == [0]
    assert of(KillWorker, scheduler.tick(16.0)) == []
    commands = scheduler.lost(0, 1, "killed", 17.0)
    assert of(ReleaseCall, commands) == [ReleaseCall(1)]
    assert of(RequeueCall, commands) == []
    assert scheduler.output_used_bytes == 0


def test_a_call_beyond_the_run_limit_fails_with_its_worker_and_is_not_tried_again() -> None:
    scheduler = open_scheduler(streams=2)
    for call in (1, 2):
        scheduler.submit(CallState(call), call)
    assert scheduler.tick(RUN_LIMIT_S) == []
    commands = scheduler.tick(RUN_LIMIT_S + 1)
    (failed,) = of(FailCall, commands)
    assert (failed.call, failed.reason) == (1, "DEADLINE_EXCEEDED")
    assert len(of(KillWorker, commands)) == 1
    assert [call.call for call in of(RequeueCall, scheduler.lost(0, 1, "killed", RUN_LIMIT_S + 1))] == [2]
    assert scheduler.workers[0].failures == 0


def test_a_server_that_stood_still_gives_its_calls_their_grace_again() -> None:
    """A suspended machine: the limit passed long ago, and nobody ran meanwhile."""
    scheduler = open_scheduler()
    scheduler.submit(CallState(1), 0)
    assert scheduler.tick(5000) == []
    assert scheduler.next_alarm() == 5000 + SETTINGS.hang_grace_s
    assert len(of(KillWorker, scheduler.tick(5000 + SETTINGS.hang_grace_s))) == 1


def test_a_call_that_ends_within_the_grace_spares_its_worker() -> None:
    scheduler = open_scheduler()
    scheduler.submit(CallState(1, deadline_s=5.0), 0)
    scheduler.tick(5.0)
    assert scheduler.answered(0, 1, 1, True, 9.0) == []
    assert of(KillWorker, scheduler.tick(15.0)) == []
    assert scheduler.workers[0].state is DeviceState.READY


def test_a_cancelled_running_call_keeps_its_memory_until_its_worker_answers() -> None:
    scheduler = open_scheduler(memory=100)
    scheduler.submit(CallState(1, output_bytes=64, memory_bytes=100), 0)
    assert scheduler.cancel(1, 1.0) == [TellWorker(0, 1, AbandonCall(1))]
    assert scheduler.close(1, 1.0) == []
    assert started(scheduler.submit(CallState(2, memory_bytes=100), 1.0)) == []
    commands = scheduler.answered(0, 1, 1, True, 2.0)
    assert of(CompleteCall, commands) == []
    assert of(ReleaseCall, commands) == [ReleaseCall(1)]
    assert started(commands) == [2]


def test_a_cancelled_call_without_a_deadline_cannot_hold_a_stream_for_ever() -> None:
    scheduler = open_scheduler()
    scheduler.submit(CallState(1), 0)
    scheduler.cancel(1, 3.0)
    assert scheduler.next_alarm() == 13.0
    assert len(of(KillWorker, scheduler.tick(13.0))) == 1


def test_a_cancelled_waiting_call_never_starts() -> None:
    scheduler = open_scheduler()
    first = scheduler.submit(CallState(1), 0)
    scheduler.submit(CallState(2), 0)
    scheduler.submit(CallState(3), 0)
    assert scheduler.cancel(2, 0) == []
    assert of(ReleaseCall, scheduler.close(2, 0)) == [ReleaseCall(2)]
    assert run_all(scheduler, first) == [1, 3]


def test_a_call_whose_worker_died_runs_again_on_another_device_and_first() -> None:
    scheduler = open_scheduler(2)
    scheduler.submit(CallState(1, label="x"), 0)
    scheduler.submit(CallState(2, label="y"), 0)
    scheduler.submit(CallState(3, label="y"), 0)
    commands = scheduler.lost(0, 1, "signal 9", 1.0)
    assert of(RequeueCall, commands) == [RequeueCall(1, 0)]
    (start,) = of(StartCall, scheduler.answered(1, 1, 2, True, 2.0))
    assert (start.call, start.worker, start.attempt, start.queued_s) == (1, 1, 2, 2.0)


def test_a_call_that_kills_every_worker_fails_after_three_tries_and_devices_stay() -> None:
    scheduler = open_scheduler(settings=replace(SETTINGS, max_respawns=3))
    scheduler.submit(CallState(1), 0)
    now = 0.0
    for attempt in (1, 2, 3):
        now += 10
        commands = scheduler.lost(0, attempt, f"death {attempt}", now)
        if attempt < 3:
            assert of(FailCall, commands) == []
            now += 10
            assert of(SpawnWorker, scheduler.tick(now)) == [SpawnWorker(0, attempt + 1)]
            (start,) = of(StartCall, scheduler.ready(0, attempt + 1, now))
            assert start.attempt == attempt + 1
    (failed,) = of(FailCall, commands)
    assert (failed.call, failed.reason) == (1, "WORKER_LOST")
    assert "death 3" in failed.detail
    assert scheduler.workers[0].state is DeviceState.RESTARTING
    assert scheduler.workers[0].failures == 0


def test_a_second_try_runs_alone_so_that_a_bad_call_takes_no_other_with_it() -> None:
    scheduler = open_scheduler(streams=2)
    scheduler.submit(CallState(1, label="bad"), 0)
    scheduler.submit(CallState(2, label="good"), 0)
    scheduler.lost(0, 1, "signal 11", 1.0)
    scheduler.tick(2.0)
    assert started(scheduler.ready(0, 2, 2.0)) == [1]
    assert started(scheduler.submit(CallState(3, label="new"), 2.0)) == []
    commands = scheduler.lost(0, 2, "signal 11", 3.0)
    assert of(RequeueCall, commands) == [RequeueCall(1, 0)]


def test_respawns_back_off_and_a_device_that_keeps_failing_goes_down() -> None:
    scheduler = Scheduler(SETTINGS, [WorkerSpec(1, 64, "host")], {"host": 0})
    scheduler.start(0)
    scheduler.submit(CallState(1), 0)
    now, delays = 0.0, []
    for incarnation in (1, 2, 3):
        scheduler.lost(0, incarnation, "cannot open", now)
        alarm = scheduler.next_alarm()
        assert alarm is not None
        delays.append(alarm - now)
        now = alarm
        assert of(SpawnWorker, scheduler.tick(now)) == [SpawnWorker(0, incarnation + 1)]
    assert delays == [1, 2, 4]
    (failed,) = of(FailCall, scheduler.lost(0, 4, "cannot open", now))
    assert (failed.reason, failed.detail) == ("NO_DEVICE", "cannot open")
    assert scheduler.all_down
    assert [command.reason for command in of(FailCall, scheduler.submit(CallState(2), now))] == ["NO_DEVICE"]


def test_the_delay_has_an_upper_limit_and_success_forgets_failures() -> None:
    scheduler = open_scheduler(settings=replace(SETTINGS, max_respawns=10))
    now = 0.0
    for incarnation in range(1, 6):
        scheduler.lost(0, incarnation, "died", now)
        now = scheduler.next_alarm() or now
        scheduler.tick(now)
    assert scheduler.workers[0].failures == 5
    scheduler.lost(0, 6, "died", now)
    assert scheduler.next_alarm() == now + 5
    now += 5
    scheduler.tick(now)
    scheduler.ready(0, 7, now)
    scheduler.submit(CallState(1), now)
    scheduler.answered(0, 7, 1, False, now)
    assert scheduler.workers[0].failures == 6  # an error is not a success
    scheduler.submit(CallState(2), now)
    scheduler.answered(0, 7, 2, True, now)
    assert scheduler.workers[0].failures == 0


def test_impatient_callers_do_not_bring_a_device_down() -> None:
    scheduler = open_scheduler()
    now = 0.0
    for incarnation in range(1, 20):
        scheduler.submit(CallState(incarnation, deadline_s=now + 1), now)
        scheduler.tick(now + 1)
        assert len(of(KillWorker, scheduler.tick(now + 11))) == 1
        scheduler.lost(0, incarnation, "signal 9", now + 11)
        scheduler.close(incarnation, now + 11)
        now += 20
        scheduler.tick(now)
        scheduler.ready(0, incarnation + 1, now)
    assert scheduler.workers[0].state is DeviceState.READY


def test_a_device_that_does_not_open_in_time_is_killed_and_told_why() -> None:
    scheduler = Scheduler(SETTINGS, [WorkerSpec(1, 64, "host")], {"host": 0})
    scheduler.start(0)
    assert scheduler.next_alarm() == 60
    (kill,) = of(KillWorker, scheduler.tick(60))
    scheduler.lost(0, 1, "signal 9", 61)
    assert (
        scheduler.workers[0].reason
        == kill.reason
        == ("the device did not open: 60 s without progress while starting its process")
    )
    assert scheduler.workers[0].failures == 1


def test_events_of_an_earlier_process_are_ignored() -> None:
    scheduler = open_scheduler()
    scheduler.submit(CallState(1), 0)
    scheduler.lost(0, 1, "died", 0)
    scheduler.tick(1)
    scheduler.ready(0, 2, 1)
    assert scheduler.answered(0, 1, 1, True, 2) == []
    assert scheduler.lost(0, 1, "died", 2) == []
    assert scheduler.ready(0, 1, 2) == []
    assert scheduler.running == 1


def test_a_big_call_is_overtaken_only_so_often() -> None:
    scheduler = open_scheduler(streams=2, output_bytes=256)
    # One small call always runs, so that the big one, which needs the whole arena, never finds it empty.
    running = of(StartCall, scheduler.submit(CallState(0, label="small", output_bytes=64), 0))[0]
    scheduler.submit(CallState(1, label="big", output_bytes=256), 0)
    overtakers = 0
    for number in range(2, 100):
        starts = of(StartCall, scheduler.submit(CallState(number, label="small", output_bytes=64), 0))
        starts += of(StartCall, finish(scheduler, running))
        overtakers += sum(start.call != 1 for start in starts)
        if starts[0].call == 1:
            break
        running = starts[0]
    assert overtakers == MAX_OVERTAKEN
    assert scheduler.queue_depth > 0


def test_other_devices_go_on_while_one_is_kept_for_a_big_call() -> None:
    scheduler = open_scheduler(2, streams=2, output_bytes=256)
    held = [of(StartCall, scheduler.submit(CallState(i, label="s", output_bytes=64), 0))[0] for i in (0, 1)]
    scheduler.submit(CallState(2, label="big", output_bytes=256), 0)
    workers = []
    for number in range(3, 60):
        for start in of(StartCall, scheduler.submit(CallState(number, label="s", output_bytes=64), 0)):
            workers.append(start.worker)
            finish(scheduler, start)
    assert set(workers[:MAX_OVERTAKEN]) == {0, 1}
    assert len(set(workers[MAX_OVERTAKEN:])) == 1
    assert len(workers) == 57
    kept = ({0, 1} - set(workers[MAX_OVERTAKEN:])).pop()
    (last,) = [start for start in held if start.worker == kept]
    assert [(start.call, start.worker) for start in of(StartCall, finish(scheduler, last))] == [(2, kept)]


def test_no_priority_and_no_number_of_labels_beats_the_share_of_another_tenant() -> None:
    scheduler = open_scheduler()
    hog, modest = Tenant("hog"), Tenant("modest")
    scheduler.submit(CallState(0, 100, "x", tenant=hog), 0)
    for number in range(1, 40):
        scheduler.submit(CallState(number, 100, str(number), tenant=hog), 0)
    for number in range(40, 50):
        scheduler.submit(CallState(number, tenant=modest), 0)
    running, order = 0, []
    for second in range(1, 21):
        out = scheduler.answered(0, 1, running, True, second)
        (running,) = started(out)
        order.append(running >= 40)
    assert sum(order) == 10


def test_a_higher_priority_is_not_held_up_by_a_kept_worker() -> None:
    scheduler = open_scheduler(streams=2, output_bytes=256)
    scheduler.submit(CallState(0, label="s", output_bytes=64), 0)
    scheduler.submit(CallState(1, label="big", output_bytes=256), 0)
    for number in range(2, 2 + MAX_OVERTAKEN):
        (start,) = of(StartCall, scheduler.submit(CallState(number, label="s", output_bytes=64), 0))
        finish(scheduler, start)
    assert started(scheduler.submit(CallState(90, label="s", output_bytes=64), 0)) == []
    assert started(scheduler.submit(CallState(91, 5, "urgent", output_bytes=64), 0)) == [91]


def test_results_that_are_not_read_yet_take_room() -> None:
    scheduler = open_scheduler(output_bytes=128)
    scheduler.submit(CallState(1, output_bytes=128), 0)
    scheduler.submit(CallState(2, output_bytes=128), 0)
    assert started(scheduler.answered(0, 1, 1, True, 0)) == []
    assert started(scheduler.close(1, 0)) == [2]


def test_device_memory_is_shared_and_never_exceeded() -> None:
    scheduler = open_scheduler(2, memory=100)
    assert started(scheduler.submit(CallState(1, memory_bytes=60), 0)) == [1]
    assert started(scheduler.submit(CallState(2, label="b", memory_bytes=60), 0)) == []
    assert started(scheduler.submit(CallState(3, label="c", memory_bytes=40), 0)) == [3]
    assert started(scheduler.answered(0, 1, 1, True, 0)) == [2]


@pytest.mark.parametrize(("one_mode", "expected"), [(True, []), (False, [2])])
def test_deterministic_modes_do_not_overlap_where_the_device_has_one_mode(
    one_mode: bool, expected: list[int]
) -> None:
    scheduler = open_scheduler(streams=2, one_mode=one_mode)
    scheduler.submit(CallState(1, deterministic=True), 0)
    assert started(scheduler.submit(CallState(2, label="b"), 0)) == expected
    if one_mode:
        assert started(scheduler.submit(CallState(3, label="c", deterministic=True), 0)) == [3]
        scheduler.answered(0, 1, 1, True, 0)
        assert started(scheduler.answered(0, 1, 3, True, 0)) == [2]


def test_alarms_of_calls_long_done_do_not_pile_up() -> None:
    scheduler = open_scheduler()
    for number in range(5000):
        (start,) = of(StartCall, scheduler.submit(CallState(number, deadline_s=1e6), 0))
        finish(scheduler, start)
    assert len(scheduler._alarms) < 200
