"""Calls that share a device's own memory."""

from __future__ import annotations

from typing import Any

import pytest
from tests.server.pool.scheduling import Driven, of, open_scheduler, refused, started, starting_scheduler

from npugrad_server.pool.commands import (
    Command,
    FailCall,
    PostponeCall,
    ReleaseCall,
    StartCall,
    TellWorker,
)
from npugrad_server.pool.placement import MAX_OVERTAKEN
from npugrad_server.worker.protocol import AbandonCall, WorkspaceGranted, WorkspaceRefused

BLOCK = 512
"""What device memory is counted in; a workspace takes 32 bytes more than it has."""


def workspace(blocks: int) -> int:
    return blocks * BLOCK - 32


def needs(number: int, blocks: int, key: str | None = "key", **changes: Any) -> dict[str, Any]:
    return {"label": str(number), "device_bytes": blocks * BLOCK, "workspace_key": key, **changes}


def begin(scheduler: Driven, number: int, blocks: int, *more: str | None) -> StartCall:
    return scheduler.begin(number, **needs(number, blocks, *more))


def put(scheduler: Driven, number: int, blocks: int, *more: str | None, **facts: Any) -> list[int]:
    return scheduler.put(number, **needs(number, blocks, *more, **facts))


def ask(scheduler: Driven, start: StartCall, blocks: int) -> WorkspaceGranted | WorkspaceRefused:
    """A call's first phase wants this much; what the pool says."""
    (told,) = of(
        TellWorker,
        scheduler.need_workspace(start.worker, start.incarnation, start.call, workspace(blocks)),
    )
    assert (told.worker, told.incarnation, told.message.call) == (start.worker, start.incarnation, start.call)
    assert not isinstance(told.message, AbandonCall)
    return told.message


def defer(scheduler: Driven, start: StartCall, blocks: int) -> list[Command]:
    return scheduler.deferred(start.worker, start.incarnation, start.call, workspace(blocks), 0)


def used(scheduler: Driven) -> float:
    return scheduler.workers[0].memory_used_bytes / BLOCK


def test_calls_share_a_devices_own_memory_and_never_exceed_it() -> None:
    scheduler = open_scheduler(streams=3, device=10 * BLOCK)
    first = begin(scheduler, 1, 6)
    assert first.workspace_bytes == 0
    assert put(scheduler, 2, 5) == []
    assert put(scheduler, 3, 4) == [3]
    assert used(scheduler) == 10
    assert started(scheduler.end(first)) == [2]
    assert used(scheduler) == 9
    without = open_scheduler()
    start = begin(without, 1, 10**9)
    assert start.workspace_bytes is None
    assert ask(without, start, 10**9) == WorkspaceGranted(1)
    assert used(without) == 0


def test_workspaces_that_do_not_fit_together_come_one_after_the_other() -> None:
    scheduler = open_scheduler(streams=2, device=10 * BLOCK)
    one, two = begin(scheduler, 1, 2), begin(scheduler, 2, 2)
    assert ask(scheduler, one, 4) == WorkspaceGranted(1)
    assert used(scheduler) == 8
    assert ask(scheduler, two, 4) == WorkspaceRefused(2, False, workspace(8))
    back = defer(scheduler, two, 4)
    assert of(PostponeCall, back) == [PostponeCall(2, 0)]
    assert started(back) == []
    assert used(scheduler) == 6
    (again,) = of(StartCall, scheduler.end(one))
    # It was never tried, and what it needs is set aside now.
    assert (again.call, again.attempt, again.workspace_bytes) == (2, 1, workspace(4))
    assert used(scheduler) == 6


def test_two_calls_that_ask_at_once_where_neither_has_room_do_not_wait_for_each_other() -> None:
    scheduler = open_scheduler(streams=2, device=10 * BLOCK)
    one, two = begin(scheduler, 1, 4), begin(scheduler, 2, 4)
    assert isinstance(ask(scheduler, one, 5), WorkspaceRefused)
    assert isinstance(ask(scheduler, two, 5), WorkspaceRefused)
    (first,) = of(StartCall, defer(scheduler, one, 5) + defer(scheduler, two, 5))
    assert first.workspace_bytes == workspace(5)
    (second,) = of(StartCall, scheduler.end(first))
    assert {first.call, second.call} == {1, 2}


def test_what_an_operator_asked_for_is_set_aside_for_the_next_call_of_its_kind() -> None:
    """But what a call itself was told counts for more."""
    scheduler = open_scheduler(streams=2, device=10 * BLOCK)
    one = begin(scheduler, 1, 2)
    scheduler.end(one, workspace_bytes=workspace(3))
    two, other = begin(scheduler, 2, 2), begin(scheduler, 3, 2, "other")
    assert (one.workspace_bytes, two.workspace_bytes, other.workspace_bytes) == (0, workspace(3), 0)
    assert ask(scheduler, other, 3) == WorkspaceGranted(3)
    # A call that only asked has told as much as one that was done.
    scheduler.end(other, "INTERNAL")
    assert begin(scheduler, 4, 2, "other").workspace_bytes == workspace(3)
    scheduler = open_scheduler(streams=2, device=10 * BLOCK)
    one, two = begin(scheduler, 1, 2), begin(scheduler, 2, 2)
    assert isinstance(ask(scheduler, two, 7), WorkspaceRefused)
    assert started(defer(scheduler, two, 7)) == []
    (again,) = of(StartCall, scheduler.end(one, workspace_bytes=workspace(1)))
    assert (again.call, again.workspace_bytes) == (2, workspace(7))


def test_a_call_of_a_kind_that_waits_for_room_is_overtaken_by_others_for_a_while_only() -> None:
    scheduler = open_scheduler(streams=2, device=10 * BLOCK)
    running, late = begin(scheduler, 0, 1, "small"), begin(scheduler, 1, 2, "big")
    assert isinstance(ask(scheduler, late, 8), WorkspaceRefused)
    assert started(defer(scheduler, late, 8)) == []
    overtaken = 0
    for number in range(2, 100):
        if not put(scheduler, number, 1, "small"):
            break
        overtaken += 1
        assert not started(scheduler.finish(running))
        running = StartCall(number, 0, 1, 1, 0)
    assert overtaken == MAX_OVERTAKEN
    assert started(scheduler.finish(running)) == [1]


def test_a_call_too_large_for_every_device_fails_and_one_too_large_for_one_waits_for_the_other() -> None:
    scheduler = starting_scheduler(2)
    assert scheduler.eligibility["", False].most_bytes is None
    assert put(scheduler, 1, 7) == put(scheduler, 2, 9) == []
    assert started(scheduler.be_ready(0, memory_bytes=4 * BLOCK)) == []
    assert scheduler.eligibility["", False].most_bytes is None
    commands = scheduler.be_ready(1, memory_bytes=8 * BLOCK)
    assert scheduler.eligibility["", False].most_bytes == 8 * BLOCK
    assert started(commands) == [1]
    (failed,) = of(FailCall, commands)
    assert (failed.call, failed.reason) == (2, "CALL_TOO_LARGE")
    assert f"found {9 * BLOCK} bytes of tensors on the device; expected at most {8 * BLOCK}" in failed.detail
    # One that comes back with less memory fails what can never fit any more.
    scheduler.lose(1)
    scheduler.tick(10)
    assert refused(scheduler.be_ready(1, now=11, memory_bytes=6 * BLOCK)) == [(1, "CALL_TOO_LARGE")]
    assert scheduler.workers[1].memory_used_bytes == 0


def test_a_workspace_no_device_has_is_refused_for_good_and_one_another_has_is_not() -> None:
    scheduler = starting_scheduler(2)
    scheduler.be_ready(0, memory_bytes=6 * BLOCK)
    start = begin(scheduler, 1, 2)
    assert ask(scheduler, start, 9) == WorkspaceRefused(1, False)  # the other device may have room
    scheduler.be_ready(1, memory_bytes=8 * BLOCK)
    assert ask(scheduler, start, 7) == WorkspaceRefused(1, True, workspace(6))
    assert ask(scheduler, start, 6) == WorkspaceRefused(1, False, workspace(6))
    (again,) = of(StartCall, defer(scheduler, start, 6))
    assert (again.worker, again.workspace_bytes) == (1, workspace(6))


def test_a_figure_that_was_learned_does_not_refuse_a_call_by_itself() -> None:
    scheduler = open_scheduler(streams=2, device=8 * BLOCK)
    one = begin(scheduler, 1, 2)
    assert ask(scheduler, one, 100) == WorkspaceRefused(1, True, workspace(6))
    scheduler.end(one, "DEVICE_OUT_OF_MEMORY")
    two = begin(scheduler, 2, 2)
    assert two.workspace_bytes == workspace(6)
    assert used(scheduler) == 8
    scheduler.end(two, workspace_bytes=workspace(1))
    assert begin(scheduler, 3, 2).workspace_bytes == workspace(1)


def test_what_a_call_holds_goes_back_when_its_worker_dies() -> None:
    scheduler = open_scheduler(device=8 * BLOCK)
    assert ask(scheduler, begin(scheduler, 1, 2), 5) == WorkspaceGranted(1)
    scheduler.lose()
    assert used(scheduler) == 0
    (again,) = of(StartCall, scheduler.be_back(now=11, memory_bytes=8 * BLOCK))
    # What the device said before it died still holds.
    assert (again.attempt, again.workspace_bytes) == (2, workspace(5))
    assert scheduler.need_workspace(0, 1, 1, workspace(9)) == []
    assert scheduler.deferred(0, 1, 1, workspace(9), 12) == []


def test_a_postponed_call_whose_worker_died_before_is_still_alone() -> None:
    scheduler = open_scheduler(2, streams=2, device=8 * BLOCK)
    (again,) = of(StartCall, scheduler.lose(begin(scheduler, 1, 2, None).worker))
    assert again.attempt == 2
    assert put(scheduler, 2, 1, None) == []
    assert ask(scheduler, again, 3) == WorkspaceGranted(1)
    (third,) = of(StartCall, defer(scheduler, again, 3))  # a worker that did not wait for the answer
    assert (third.call, third.attempt, third.workspace_bytes) == (1, 2, workspace(3))


def test_a_call_is_kept_a_device_that_has_enough_memory_for_it() -> None:
    scheduler = starting_scheduler(2, streams=2)
    for worker, blocks in enumerate((4, 8)):
        scheduler.be_ready(worker, memory_bytes=blocks * BLOCK)
    running = [begin(scheduler, number, 1, None) for number in range(4)]
    assert [start.worker for start in running] == [0, 1, 0, 1]
    assert put(scheduler, 50, 8, None, label="large") == []
    # Whichever place gets free, a small call takes it, until the large one is kept the larger device.
    for number in range(100, 200):
        put(scheduler, number, 1, None, label="small")
        running += of(StartCall, scheduler.finish(running.pop(0)))
        if any(start.call == 50 for start in running):
            break
    (large,) = [start for start in running if start.call == 50]
    assert large.worker == 1


@pytest.mark.parametrize("goes", ["cancels", "comes to its deadline"])
def test_a_call_nobody_waits_for_gets_no_workspace_and_is_told_so(goes: str) -> None:
    scheduler = open_scheduler(device=8 * BLOCK)
    start = scheduler.begin(1, **needs(1, 2, deadline_s=5.0))
    gone = scheduler.cancel(1, 1.0) if goes == "cancels" else scheduler.tick(5.0)
    assert of(TellWorker, gone) == [TellWorker(0, 1, AbandonCall(1))]
    assert refused(gone) == [(1, "DEADLINE_EXCEEDED")] * (goes != "cancels")
    assert of(TellWorker, scheduler.cancel(1, 5.5)) == []
    assert ask(scheduler, start, 3) == WorkspaceRefused(1, False, workspace(6))
    assert of(ReleaseCall, defer(scheduler, start, 3)) == []
    assert of(ReleaseCall, scheduler.close(1, 6.0)) == [ReleaseCall(1)]
    assert used(scheduler) == 0
