"""Calls that share a device's own memory."""

from __future__ import annotations

from typing import Any

from tests.server.pool.scheduling import SETTINGS, finish, of, open_scheduler, started

from npugrad_server.pool.commands import (
    Command,
    FailCall,
    PostponeCall,
    ReleaseCall,
    StartCall,
    TellWorker,
    WorkerSpec,
)
from npugrad_server.pool.placement import MAX_OVERTAKEN
from npugrad_server.pool.scheduler import Scheduler
from npugrad_server.pool.state import CallState
from npugrad_server.worker.protocol import AbandonCall, WorkspaceGranted, WorkspaceRefused

BLOCK = 512
"""What device memory is counted in; a workspace takes 32 bytes more than it has."""


def workspace(blocks: int) -> int:
    return blocks * BLOCK - 32


def on_device(number: int, blocks: int, key: str | None = "key", **changes: Any) -> CallState:
    label = changes.pop("label", str(number))
    return CallState(number, label=label, device_bytes=blocks * BLOCK, workspace_key=key, **changes)


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
    scheduler.answered(0, 1, 1, True, 0, workspace_bytes=workspace(3))
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
    assert [scheduler.eligibility["", False].most_bytes] == [None]
    scheduler.submit(on_device(1, 7), 0)
    scheduler.submit(on_device(2, 9), 0)
    assert started(scheduler.ready(0, 1, 0, memory_bytes=4 * BLOCK)) == []
    assert [scheduler.eligibility["", False].most_bytes] == [None]
    commands = scheduler.ready(1, 1, 0, memory_bytes=8 * BLOCK)
    assert scheduler.eligibility["", False].most_bytes == 8 * BLOCK
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
    scheduler.answered(0, 1, 2, True, 0, workspace_bytes=workspace(1))
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
    (again,) = of(StartCall, scheduler.answered(one.worker, 1, 1, True, 0, workspace_bytes=workspace(1)))
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
    scheduler.submit(CallState(1, deadline_s=5.0), 0)
    commands = scheduler.tick(5.0)
    assert [failed.reason for failed in of(FailCall, commands)] == ["DEADLINE_EXCEEDED"]
    assert of(TellWorker, commands) == [TellWorker(0, 1, AbandonCall(1))]
