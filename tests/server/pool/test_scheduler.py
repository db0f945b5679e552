from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from npugrad import Product
from npugrad_server.backends.base import Comeback
from npugrad_server.pool.claim import MAX_OVERTAKEN
from npugrad_server.pool.commands import (
    CallRequest,
    CompleteCall,
    FailCall,
    Failure,
    KillWorker,
    PostponeCall,
    ReleaseCall,
    RequeueCall,
    SpawnWorker,
    StartCall,
    TellWorker,
    WorkerSpec,
)
from npugrad_server.pool.scheduler import Scheduler
from npugrad_server.pool.types import DeviceState, PoolSettings
from npugrad_server.worker.protocol import AbandonCall, WorkspaceGranted, WorkspaceRefused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npugrad_server.pool.commands import Command

C = TypeVar("C")

SETTINGS = PoolSettings(
    devices=("cpu:0",),
    product=Product.ATLAS_A2,
    input_arena_bytes=0,
    output_arena_bytes=0,
    prefault_bytes=0,
    max_queue_depth=100,
    streams_per_device=1,
    drain_timeout_s=1,
    hang_grace_s=10,
    worker_start_timeout_s=60,
    respawn_backoff_s=1,
    respawn_backoff_max_s=5,
    max_respawns=3,
)


def of(kind: type[C], commands: Sequence[Command]) -> list[C]:
    return [command for command in commands if isinstance(command, kind)]


def open_scheduler(
    workers: int = 1,
    *,
    streams: int = 1,
    output_bytes: int = 1024,
    memory: int = 1024,
    one_mode: bool = False,
    device: int | None = None,
    settings: PoolSettings = SETTINGS,
) -> Scheduler:
    scheduler = Scheduler(settings, [WorkerSpec(streams, output_bytes, "host")] * workers, {"host": memory})
    spawned = of(SpawnWorker, scheduler.start(0))
    assert [command.worker for command in spawned] == list(range(workers))
    for command in spawned:
        scheduler.ready(command.worker, command.incarnation, 0, one_mode, device)
    return scheduler


def started(commands: Sequence[Command]) -> list[int]:
    return [command.call for command in of(StartCall, commands)]


def finish(scheduler: Scheduler, start: StartCall, now: float = 0) -> list[Command]:
    """Answers a call and closes it."""
    out = scheduler.answered(start.worker, start.incarnation, start.call, True, now)
    return out + scheduler.close(start.call, now)


def run_all(scheduler: Scheduler, first: Sequence[Command]) -> list[int]:
    """Answers and closes every call that starts, in turn; returns the order of the starts."""
    order, todo = [], list(of(StartCall, first))
    while todo:
        start = todo.pop(0)
        order.append(start.call)
        todo += of(StartCall, finish(scheduler, start))
    return order


def test_a_call_starts_completes_and_is_released_once() -> None:
    scheduler = open_scheduler()
    (start,) = of(StartCall, scheduler.submit(CallRequest(1, output_bytes=100), 2.0))
    assert (start.attempt, start.queued_s, start.region.nbytes) == (1, 0.0, 128)
    assert of(CompleteCall, scheduler.answered(0, 1, 1, True, 3.0)) == [CompleteCall(1)]
    assert scheduler.output_used_bytes == 128
    assert of(ReleaseCall, scheduler.close(1, 4.0)) == [ReleaseCall(1)]
    assert scheduler.output_used_bytes == 0
    assert scheduler.close(1, 5.0) == []
    assert scheduler.answered(0, 1, 1, True, 5.0) == []


def test_nothing_starts_before_a_worker_is_ready() -> None:
    scheduler = Scheduler(SETTINGS, [WorkerSpec(1, 1024, "host")], {"host": 0})
    scheduler.start(0)
    assert started(scheduler.submit(CallRequest(1), 0)) == []
    (start,) = of(StartCall, scheduler.ready(0, 1, 7.5))
    assert start.queued_s == 7.5


def test_priority_then_turns_then_first_come() -> None:
    scheduler = open_scheduler()
    first = scheduler.submit(CallRequest(0), 0)
    for number, priority, label in [(1, 0, "a"), (2, 0, "a"), (3, 0, "b"), (4, 9, "b"), (5, 0, "a")]:
        scheduler.submit(CallRequest(number, priority, label), 0)
    assert run_all(scheduler, first) == [0, 4, 1, 3, 2, 5]


def test_streams_are_filled_and_idle_devices_come_first() -> None:
    scheduler = open_scheduler(2, streams=2)
    starts = [of(StartCall, scheduler.submit(CallRequest(i), 0)) for i in range(5)]
    assert [[start.worker for start in found] for found in starts] == [[0], [1], [0], [1], []]
    assert scheduler.queue_depth == 1
    assert scheduler.running == 4


def test_a_deadline_passes_in_the_queue() -> None:
    scheduler = open_scheduler()
    scheduler.submit(CallRequest(1), 0)
    scheduler.submit(CallRequest(2, deadline_s=5.0), 0)
    assert scheduler.next_alarm() == 5.0
    assert scheduler.tick(4.9) == []
    (failed,) = of(FailCall, scheduler.tick(5.0))
    assert (failed.call, failed.reason) == (2, "DEADLINE_EXCEEDED")
    assert scheduler.next_alarm() is None


def test_a_call_past_its_deadline_is_not_launched() -> None:
    scheduler = open_scheduler()
    scheduler.submit(CallRequest(1), 0)
    scheduler.submit(CallRequest(2, deadline_s=5.0), 0)
    commands = scheduler.answered(0, 1, 1, True, 6.0)
    assert started(commands) == []
    assert [failed.call for failed in of(FailCall, commands)] == [2]


def test_a_running_call_fails_at_its_deadline_and_its_worker_ends_after_the_grace() -> None:
    scheduler = open_scheduler()
    scheduler.submit(CallRequest(1, deadline_s=5.0, output_bytes=64), 0)
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


def test_a_call_that_ends_within_the_grace_spares_its_worker() -> None:
    scheduler = open_scheduler()
    scheduler.submit(CallRequest(1, deadline_s=5.0), 0)
    scheduler.tick(5.0)
    assert scheduler.answered(0, 1, 1, True, 9.0) == []
    assert of(KillWorker, scheduler.tick(15.0)) == []
    assert scheduler.workers[0].state is DeviceState.READY


def test_a_cancelled_running_call_keeps_its_memory_until_its_worker_answers() -> None:
    scheduler = open_scheduler(memory=100)
    scheduler.submit(CallRequest(1, output_bytes=64, memory_bytes=100), 0)
    assert scheduler.cancel(1, 1.0) == [TellWorker(0, 1, AbandonCall(1))]
    assert scheduler.close(1, 1.0) == []
    assert started(scheduler.submit(CallRequest(2, memory_bytes=100), 1.0)) == []
    commands = scheduler.answered(0, 1, 1, True, 2.0)
    assert of(CompleteCall, commands) == []
    assert of(ReleaseCall, commands) == [ReleaseCall(1)]
    assert started(commands) == [2]


def test_a_cancelled_call_without_a_deadline_cannot_hold_a_stream_for_ever() -> None:
    scheduler = open_scheduler()
    scheduler.submit(CallRequest(1), 0)
    scheduler.cancel(1, 3.0)
    assert scheduler.next_alarm() == 13.0
    assert len(of(KillWorker, scheduler.tick(13.0))) == 1


def test_a_cancelled_waiting_call_never_starts() -> None:
    scheduler = open_scheduler()
    first = scheduler.submit(CallRequest(1), 0)
    scheduler.submit(CallRequest(2), 0)
    scheduler.submit(CallRequest(3), 0)
    assert scheduler.cancel(2, 0) == []
    assert of(ReleaseCall, scheduler.close(2, 0)) == [ReleaseCall(2)]
    assert run_all(scheduler, first) == [1, 3]


def test_a_call_whose_worker_died_runs_again_on_another_device_and_first() -> None:
    scheduler = open_scheduler(2)
    scheduler.submit(CallRequest(1, label="x"), 0)
    scheduler.submit(CallRequest(2, label="y"), 0)
    scheduler.submit(CallRequest(3, label="y"), 0)
    commands = scheduler.lost(0, 1, "signal 9", 1.0)
    assert of(RequeueCall, commands) == [RequeueCall(1, 0)]
    (start,) = of(StartCall, scheduler.answered(1, 1, 2, True, 2.0))
    assert (start.call, start.worker, start.attempt, start.queued_s) == (1, 1, 2, 2.0)


def test_a_call_that_kills_every_worker_fails_after_three_tries_and_devices_stay() -> None:
    scheduler = open_scheduler(settings=replace(SETTINGS, max_respawns=3))
    scheduler.submit(CallRequest(1), 0)
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
    scheduler.submit(CallRequest(1, label="bad"), 0)
    scheduler.submit(CallRequest(2, label="good"), 0)
    scheduler.lost(0, 1, "signal 11", 1.0)
    scheduler.tick(2.0)
    assert started(scheduler.ready(0, 2, 2.0)) == [1]
    assert started(scheduler.submit(CallRequest(3, label="new"), 2.0)) == []
    commands = scheduler.lost(0, 2, "signal 11", 3.0)
    assert of(RequeueCall, commands) == [RequeueCall(1, 0)]


def test_respawns_back_off_and_a_device_that_keeps_failing_goes_down() -> None:
    scheduler = Scheduler(SETTINGS, [WorkerSpec(1, 64, "host")], {"host": 0})
    scheduler.start(0)
    scheduler.submit(CallRequest(1), 0)
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
    assert scheduler.next_alarm() is None
    assert [command.reason for command in of(FailCall, scheduler.submit(CallRequest(2), now))] == [
        "NO_DEVICE"
    ]


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
    scheduler.submit(CallRequest(1), now)
    scheduler.answered(0, 7, 1, False, now)
    assert scheduler.workers[0].failures == 6  # an error is not a success
    scheduler.submit(CallRequest(2), now)
    scheduler.answered(0, 7, 2, True, now)
    assert scheduler.workers[0].failures == 0


def test_impatient_callers_do_not_bring_a_device_down() -> None:
    scheduler = open_scheduler()
    now = 0.0
    for incarnation in range(1, 20):
        scheduler.submit(CallRequest(incarnation, deadline_s=now + 1), now)
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
    assert scheduler.workers[0].reason == kill.reason == "the device was not open within 60 s"
    assert scheduler.workers[0].failures == 1


def test_events_of_an_earlier_process_are_ignored() -> None:
    scheduler = open_scheduler()
    scheduler.submit(CallRequest(1), 0)
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
    running = of(StartCall, scheduler.submit(CallRequest(0, label="small", output_bytes=64), 0))[0]
    scheduler.submit(CallRequest(1, label="big", output_bytes=256), 0)
    overtakers = 0
    for number in range(2, 100):
        starts = of(StartCall, scheduler.submit(CallRequest(number, label="small", output_bytes=64), 0))
        starts += of(StartCall, finish(scheduler, running))
        overtakers += sum(start.call != 1 for start in starts)
        if starts[0].call == 1:
            break
        running = starts[0]
    assert overtakers == MAX_OVERTAKEN
    assert scheduler.queue_depth > 0


def test_other_devices_go_on_while_one_is_kept_for_a_big_call() -> None:
    scheduler = open_scheduler(2, streams=2, output_bytes=256)
    held = [of(StartCall, scheduler.submit(CallRequest(i, label="s", output_bytes=64), 0))[0] for i in (0, 1)]
    scheduler.submit(CallRequest(2, label="big", output_bytes=256), 0)
    workers = []
    for number in range(3, 60):
        for start in of(StartCall, scheduler.submit(CallRequest(number, label="s", output_bytes=64), 0)):
            workers.append(start.worker)
            finish(scheduler, start)
    assert set(workers[:MAX_OVERTAKEN]) == {0, 1}
    assert len(set(workers[MAX_OVERTAKEN:])) == 1
    assert len(workers) == 57
    kept = ({0, 1} - set(workers[MAX_OVERTAKEN:])).pop()
    (last,) = [start for start in held if start.worker == kept]
    assert [(start.call, start.worker) for start in of(StartCall, finish(scheduler, last))] == [(2, kept)]


def test_a_higher_priority_is_not_held_up_by_a_kept_worker() -> None:
    scheduler = open_scheduler(streams=2, output_bytes=256)
    scheduler.submit(CallRequest(0, label="s", output_bytes=64), 0)
    scheduler.submit(CallRequest(1, label="big", output_bytes=256), 0)
    for number in range(2, 2 + MAX_OVERTAKEN):
        (start,) = of(StartCall, scheduler.submit(CallRequest(number, label="s", output_bytes=64), 0))
        finish(scheduler, start)
    assert started(scheduler.submit(CallRequest(90, label="s", output_bytes=64), 0)) == []
    assert started(scheduler.submit(CallRequest(91, 5, "urgent", output_bytes=64), 0)) == [91]


def test_results_that_are_not_read_yet_take_room() -> None:
    scheduler = open_scheduler(output_bytes=128)
    scheduler.submit(CallRequest(1, output_bytes=128), 0)
    scheduler.submit(CallRequest(2, output_bytes=128), 0)
    assert started(scheduler.answered(0, 1, 1, True, 0)) == []
    assert started(scheduler.close(1, 0)) == [2]


def test_device_memory_is_shared_and_never_exceeded() -> None:
    scheduler = open_scheduler(2, memory=100)
    assert started(scheduler.submit(CallRequest(1, memory_bytes=60), 0)) == [1]
    assert started(scheduler.submit(CallRequest(2, label="b", memory_bytes=60), 0)) == []
    assert started(scheduler.submit(CallRequest(3, label="c", memory_bytes=40), 0)) == [3]
    assert started(scheduler.answered(0, 1, 1, True, 0)) == [2]


@pytest.mark.parametrize(("one_mode", "expected"), [(True, []), (False, [2])])
def test_deterministic_modes_do_not_overlap_where_the_device_has_one_mode(
    one_mode: bool, expected: list[int]
) -> None:
    scheduler = open_scheduler(streams=2, one_mode=one_mode)
    scheduler.submit(CallRequest(1, deterministic=True), 0)
    assert started(scheduler.submit(CallRequest(2, label="b"), 0)) == expected
    if one_mode:
        assert started(scheduler.submit(CallRequest(3, label="c", deterministic=True), 0)) == [3]
        scheduler.answered(0, 1, 1, True, 0)
        assert started(scheduler.answered(0, 1, 3, True, 0)) == [2]


def test_alarms_of_calls_long_done_do_not_pile_up() -> None:
    scheduler = open_scheduler()
    for number in range(5000):
        (start,) = of(StartCall, scheduler.submit(CallRequest(number, deadline_s=1e6), 0))
        finish(scheduler, start)
    assert len(scheduler._alarms) < 200


# ------------------------------------------------------------------------------- a device says that it failed


def fail_under(
    scheduler: Scheduler, start: StartCall, now: float = 0, **changes: Any
) -> tuple[list[Command], list[Command]]:
    """The device of a running call fails under it; what follows from the words and what from the end."""
    failure = replace(Failure("run returned 507015", call=start.call, code=507015), **changes)
    said = scheduler.failing(start.worker, start.incarnation, failure, now)
    return said, scheduler.lost(start.worker, start.incarnation, "status 70", now)


def test_a_call_under_which_a_device_failed_is_tried_once_more_elsewhere() -> None:
    scheduler = open_scheduler(2)
    (first,) = of(StartCall, scheduler.submit(CallRequest(1), 0))
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
    (start,) = of(StartCall, scheduler.submit(CallRequest(1), 0))
    _, ended = fail_under(scheduler, start)
    assert scheduler.workers[start.worker].state is DeviceState.DOWN
    (again,) = of(StartCall, ended)
    _, ended = fail_under(scheduler, again)
    assert of(FailCall, ended)
    assert scheduler.workers[again.worker].state is DeviceState.RESTARTING


def test_calls_beside_the_one_that_failed_are_tried_as_often_as_any() -> None:
    scheduler = open_scheduler(1, streams=2)
    starts = [
        *of(StartCall, scheduler.submit(CallRequest(1), 0)),
        *of(StartCall, scheduler.submit(CallRequest(2), 0)),
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
    (start,) = of(StartCall, scheduler.submit(CallRequest(1), 0))
    scheduler.failing(0, 1, Failure("words", call=1), 0)
    assert started(scheduler.submit(CallRequest(2), 0)) == []
    assert start.call in scheduler.workers[0].running


def test_a_call_that_ran_too_long_is_not_tried_again_and_the_device_not_blamed() -> None:
    scheduler = open_scheduler()
    (start,) = of(StartCall, scheduler.submit(CallRequest(1), 0))
    _, ended = fail_under(scheduler, start, code=507046, retry=False, blameless=True)
    (failed,) = of(FailCall, ended)
    assert (failed.reason, failed.code) == ("DEADLINE_EXCEEDED", 507046)
    assert (scheduler.workers[0].state, scheduler.workers[0].failures) == (DeviceState.RESTARTING, 0)


def test_a_damaged_device_is_not_tried_again() -> None:
    scheduler = open_scheduler(2)
    (start,) = of(StartCall, scheduler.submit(CallRequest(1), 0))
    _, ended = fail_under(scheduler, start, comeback=Comeback.NEVER, reason="quarantined: words")
    assert scheduler.workers[start.worker].state is DeviceState.DOWN
    assert scheduler.workers[start.worker].reason == "quarantined: words"
    (again,) = of(StartCall, ended)
    assert again.worker != start.worker
    assert scheduler.next_alarm() is None


def test_a_device_that_needs_time_gets_more_of_it_each_time() -> None:
    scheduler = Scheduler(replace(SETTINGS, max_respawns=9), [WorkerSpec(1, 1024, "host")], {"host": 0})
    scheduler.start(0)
    now, waits = 0.0, []
    for incarnation in range(1, 7):
        assert scheduler.failing(0, incarnation, Failure("no device", Comeback.SLOWLY), now) == []
        scheduler.lost(0, incarnation, "status 1", now)
        alarm = scheduler.next_alarm()
        assert alarm is not None
        waits.append(alarm - now)
        now = alarm
        (spawned,) = of(SpawnWorker, scheduler.tick(now))
        assert spawned.incarnation == incarnation + 1
    assert waits == [5, 10, 20, 40, 40, 40]


def test_what_can_never_open_is_down_at_once() -> None:
    scheduler = Scheduler(SETTINGS, [WorkerSpec(1, 1024, "host")], {"host": 0})
    scheduler.start(0)
    scheduler.failing(0, 1, Failure("torch_npu is not installed", Comeback.NEVER), 0)
    scheduler.lost(0, 1, "torch_npu is not installed", 0)
    assert (scheduler.workers[0].state, scheduler.all_down) == (DeviceState.DOWN, True)
    (failed,) = of(FailCall, scheduler.submit(CallRequest(1), 0))
    assert failed.detail == "torch_npu is not installed"


def test_the_words_of_a_former_process_are_not_heard() -> None:
    scheduler = open_scheduler()
    assert scheduler.failing(0, 7, Failure("words", Comeback.NEVER), 0) == []
    assert scheduler.workers[0].state is DeviceState.READY


# ----------------------------------------------------------------------------------- memory of a device's own

BLOCK = 512
"""What device memory is counted in; a workspace takes 32 bytes more than it has."""


def workspace(blocks: int) -> int:
    return blocks * BLOCK - 32


def on_device(number: int, blocks: int, key: str | None = "key", **changes: Any) -> CallRequest:
    label = changes.pop("label", str(number))
    return CallRequest(number, label=label, device_bytes=blocks * BLOCK, workspace_key=key, **changes)


def ask(scheduler: Scheduler, start: StartCall, blocks: int) -> WorkspaceGranted | WorkspaceRefused:
    """A call's first phase wants this much; what the pool says."""
    (told,) = of(
        TellWorker,
        scheduler.need_workspace(start.worker, start.incarnation, start.call, workspace(blocks)),
    )
    assert (told.worker, told.incarnation, told.message.call) == (start.worker, start.incarnation, start.call)
    assert not isinstance(told.message, AbandonCall)
    return told.message


def defer(scheduler: Scheduler, start: StartCall, blocks: int) -> list[Command]:
    return scheduler.deferred(start.worker, start.incarnation, start.call, workspace(blocks), 0)


def test_calls_share_a_devices_own_memory_and_never_exceed_it() -> None:
    scheduler = open_scheduler(streams=3, device=10 * BLOCK)
    (first,) = of(StartCall, scheduler.submit(on_device(1, 6), 0))
    assert first.workspace_bytes == 0
    assert started(scheduler.submit(on_device(2, 5), 0)) == []
    assert started(scheduler.submit(on_device(3, 4), 0)) == [3]
    assert scheduler.workers[0].memory_used_bytes == 10 * BLOCK
    assert started(scheduler.answered(0, 1, 1, True, 0)) == [2]
    assert scheduler.workers[0].memory_used_bytes == 9 * BLOCK


def test_a_device_without_memory_of_its_own_counts_none() -> None:
    scheduler = open_scheduler()
    (start,) = of(StartCall, scheduler.submit(on_device(1, 10**9), 0))
    assert start.workspace_bytes is None
    assert ask(scheduler, start, 10**9) == WorkspaceGranted(1)
    assert scheduler.workers[0].memory_used_bytes == 0


def test_workspaces_that_do_not_fit_together_come_one_after_the_other() -> None:
    scheduler = open_scheduler(streams=2, device=10 * BLOCK)
    (one,) = of(StartCall, scheduler.submit(on_device(1, 2), 0))
    (two,) = of(StartCall, scheduler.submit(on_device(2, 2), 0))
    assert ask(scheduler, one, 4) == WorkspaceGranted(1)
    assert scheduler.workers[0].memory_used_bytes == 8 * BLOCK
    assert ask(scheduler, two, 4) == WorkspaceRefused(2, False, workspace(8))
    back = defer(scheduler, two, 4)
    assert of(PostponeCall, back) == [PostponeCall(2, 0)]
    assert started(back) == []
    assert scheduler.workers[0].memory_used_bytes == 6 * BLOCK
    (again,) = of(StartCall, scheduler.answered(0, 1, 1, True, 0))
    # It was never tried, and what it needs is set aside now.
    assert (again.call, again.attempt, again.workspace_bytes) == (2, 1, workspace(4))
    assert scheduler.workers[0].memory_used_bytes == 6 * BLOCK


def test_two_calls_that_ask_at_once_where_neither_has_room_do_not_wait_for_each_other() -> None:
    scheduler = open_scheduler(streams=2, device=10 * BLOCK)
    (one,) = of(StartCall, scheduler.submit(on_device(1, 4), 0))
    (two,) = of(StartCall, scheduler.submit(on_device(2, 4), 0))
    assert isinstance(ask(scheduler, one, 5), WorkspaceRefused)
    assert isinstance(ask(scheduler, two, 5), WorkspaceRefused)
    (first,) = of(StartCall, defer(scheduler, one, 5) + defer(scheduler, two, 5))
    assert first.workspace_bytes == workspace(5)
    (second,) = of(StartCall, scheduler.answered(0, 1, first.call, True, 0))
    assert {first.call, second.call} == {1, 2}


def test_what_an_operator_asked_for_is_set_aside_for_the_next_call_of_its_kind() -> None:
    scheduler = open_scheduler(streams=2, device=10 * BLOCK)
    (one,) = of(StartCall, scheduler.submit(on_device(1, 2), 0))
    scheduler.answered(0, 1, 1, True, 0, workspace(3))
    (two,) = of(StartCall, scheduler.submit(on_device(2, 2), 0))
    (other,) = of(StartCall, scheduler.submit(on_device(3, 2, "other"), 0))
    assert (one.workspace_bytes, two.workspace_bytes, other.workspace_bytes) == (0, workspace(3), 0)
    assert ask(scheduler, other, 3) == WorkspaceGranted(3)
    # A call that only asked has told as much as one that was done.
    scheduler.answered(0, 1, 3, False, 0)
    (next_one,) = of(StartCall, scheduler.submit(on_device(4, 2, "other"), 0))
    assert next_one.workspace_bytes == workspace(3)


def test_a_call_of_a_kind_that_waits_for_room_is_overtaken_by_others_for_a_while_only() -> None:
    scheduler = open_scheduler(streams=2, device=10 * BLOCK)
    (holder,) = of(StartCall, scheduler.submit(on_device(0, 1, "small"), 0))
    (late,) = of(StartCall, scheduler.submit(on_device(1, 2, "big"), 0))
    assert isinstance(ask(scheduler, late, 8), WorkspaceRefused)
    assert started(defer(scheduler, late, 8)) == []
    overtaken = 0
    running = holder
    for number in range(2, 100):
        fresh = of(StartCall, scheduler.submit(on_device(number, 1, "small"), 0))
        if not fresh:
            break
        overtaken += 1
        assert not started(finish(scheduler, running))
        running = fresh[0]
    assert overtaken == MAX_OVERTAKEN
    assert started(finish(scheduler, running)) == [1]


def test_a_call_too_large_for_every_device_fails_and_one_too_large_for_one_waits_for_the_other() -> None:
    scheduler = Scheduler(SETTINGS, [WorkerSpec(1, 1024, "host")] * 2, {"host": 0})
    scheduler.start(0)
    assert [scheduler.most_device_bytes()] == [None]
    scheduler.submit(on_device(1, 7), 0)
    scheduler.submit(on_device(2, 9), 0)
    assert started(scheduler.ready(0, 1, 0, memory_bytes=4 * BLOCK)) == []
    assert [scheduler.most_device_bytes()] == [None]
    commands = scheduler.ready(1, 1, 0, memory_bytes=8 * BLOCK)
    assert scheduler.most_device_bytes() == 8 * BLOCK
    assert started(commands) == [1]
    (failed,) = of(FailCall, commands)
    assert (failed.call, failed.reason) == (2, "CALL_TOO_LARGE")
    assert f"found {9 * BLOCK} bytes of tensors on the device; expected at most {8 * BLOCK}" in failed.detail


def test_a_device_that_comes_back_with_less_memory_fails_what_can_never_fit() -> None:
    scheduler = open_scheduler(device=8 * BLOCK)
    scheduler.submit(on_device(1, 7), 0)
    scheduler.lost(0, 1, "signal 9", 0)
    scheduler.tick(10)
    (failed,) = of(FailCall, scheduler.ready(0, 2, 11, memory_bytes=6 * BLOCK))
    assert failed.reason == "CALL_TOO_LARGE"
    assert scheduler.workers[0].memory_used_bytes == 0


def test_a_workspace_no_device_has_is_refused_for_good_and_one_another_has_is_not() -> None:
    scheduler = Scheduler(SETTINGS, [WorkerSpec(1, 1024, "host")] * 2, {"host": 0})
    scheduler.start(0)
    scheduler.ready(0, 1, 0, memory_bytes=6 * BLOCK)
    (start,) = of(StartCall, scheduler.submit(on_device(1, 2), 0))
    assert ask(scheduler, start, 9) == WorkspaceRefused(1, False)  # the other device may have room
    scheduler.ready(1, 1, 0, memory_bytes=8 * BLOCK)
    assert ask(scheduler, start, 7) == WorkspaceRefused(1, True, workspace(6))
    assert ask(scheduler, start, 6) == WorkspaceRefused(1, False, workspace(6))
    (again,) = of(StartCall, defer(scheduler, start, 6))
    assert (again.worker, again.workspace_bytes) == (1, workspace(6))


def test_a_figure_that_was_learned_does_not_refuse_a_call_by_itself() -> None:
    scheduler = open_scheduler(streams=2, device=8 * BLOCK)
    (one,) = of(StartCall, scheduler.submit(on_device(1, 2), 0))
    assert ask(scheduler, one, 100) == WorkspaceRefused(1, True, workspace(6))
    scheduler.answered(0, 1, 1, False, 0)
    (two,) = of(StartCall, scheduler.submit(on_device(2, 2), 0))
    assert two.workspace_bytes == workspace(6)
    assert scheduler.workers[0].memory_used_bytes == 8 * BLOCK
    scheduler.answered(0, 1, 2, True, 0, workspace(1))
    (three,) = of(StartCall, scheduler.submit(on_device(3, 2), 0))
    assert three.workspace_bytes == workspace(1)


def test_what_a_call_holds_goes_back_when_its_worker_dies() -> None:
    scheduler = open_scheduler(device=8 * BLOCK)
    (start,) = of(StartCall, scheduler.submit(on_device(1, 2), 0))
    assert ask(scheduler, start, 5) == WorkspaceGranted(1)
    scheduler.lost(0, 1, "signal 9", 0)
    assert scheduler.workers[0].memory_used_bytes == 0
    scheduler.tick(10)
    (again,) = of(StartCall, scheduler.ready(0, 2, 11, memory_bytes=8 * BLOCK))
    # What the device said before it died still holds.
    assert (again.attempt, again.workspace_bytes) == (2, workspace(5))
    assert scheduler.need_workspace(0, 1, 1, workspace(9)) == []
    assert scheduler.deferred(0, 1, 1, workspace(9), 12) == []


def test_a_postponed_call_whose_worker_died_before_is_still_alone() -> None:
    scheduler = open_scheduler(2, streams=2, device=8 * BLOCK)
    (start,) = of(StartCall, scheduler.submit(on_device(1, 2, None), 0))
    (again,) = of(StartCall, scheduler.lost(start.worker, 1, "signal 9", 0))
    assert again.attempt == 2
    assert started(scheduler.submit(on_device(2, 1, None), 0)) == []
    assert ask(scheduler, again, 3) == WorkspaceGranted(1)
    (third,) = of(StartCall, defer(scheduler, again, 3))  # a worker that did not wait for the answer
    assert (third.call, third.attempt, third.workspace_bytes) == (1, 2, workspace(3))


def test_what_a_call_was_told_counts_more_than_what_others_of_its_kind_were() -> None:
    scheduler = open_scheduler(streams=2, device=10 * BLOCK)
    (one,) = of(StartCall, scheduler.submit(on_device(1, 2), 0))
    (two,) = of(StartCall, scheduler.submit(on_device(2, 2), 0))
    assert isinstance(ask(scheduler, two, 7), WorkspaceRefused)
    assert started(defer(scheduler, two, 7)) == []
    (again,) = of(StartCall, scheduler.answered(one.worker, 1, 1, True, 0, workspace(1)))
    assert (again.call, again.workspace_bytes) == (2, workspace(7))


def test_a_call_is_kept_a_device_that_has_enough_memory_for_it() -> None:
    scheduler = Scheduler(SETTINGS, [WorkerSpec(2, 1024, "host")] * 2, {"host": 0})
    scheduler.start(0)
    scheduler.ready(0, 1, 0, memory_bytes=4 * BLOCK)
    scheduler.ready(1, 1, 0, memory_bytes=8 * BLOCK)
    running = [
        start
        for number in range(4)
        for start in of(StartCall, scheduler.submit(on_device(number, 1, None), 0))
    ]
    assert [start.worker for start in running] == [0, 1, 0, 1]
    assert started(scheduler.submit(on_device(50, 8, None, label="large"), 0)) == []
    # Whichever place gets free, a small call takes it, until the large one is kept the larger device.
    for number in range(100, 200):
        scheduler.submit(on_device(number, 1, None, label="small"), 0)
        running += of(StartCall, finish(scheduler, running.pop(0)))
        if any(start.call == 50 for start in running):
            break
    (large,) = [start for start in running if start.call == 50]
    assert large.worker == 1


def test_a_call_nobody_waits_for_gets_no_workspace_and_is_told_so() -> None:
    scheduler = open_scheduler(device=8 * BLOCK)
    (start,) = of(StartCall, scheduler.submit(on_device(1, 2), 0))
    assert of(TellWorker, scheduler.cancel(1, 1.0)) == [TellWorker(0, 1, AbandonCall(1))]
    assert scheduler.cancel(1, 1.5) == []
    assert ask(scheduler, start, 3) == WorkspaceRefused(1, False, workspace(6))
    assert of(ReleaseCall, defer(scheduler, start, 3)) == []
    assert of(ReleaseCall, scheduler.close(1, 2.0)) == [ReleaseCall(1)]
    assert scheduler.workers[0].memory_used_bytes == 0


def test_a_deadline_that_passes_while_a_call_runs_is_told_to_its_worker() -> None:
    scheduler = open_scheduler()
    scheduler.submit(CallRequest(1, deadline_s=5.0), 0)
    commands = scheduler.tick(5.0)
    assert [failed.reason for failed in of(FailCall, commands)] == ["DEADLINE_EXCEEDED"]
    assert of(TellWorker, commands) == [TellWorker(0, 1, AbandonCall(1))]
