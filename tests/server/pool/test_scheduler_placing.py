"""Which device a call goes to when not every device can run it, or one cannot take it now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.server.pool.scheduling import (
    ONCE,
    SETTINGS,
    Driven,
    of,
    open_scheduler,
    refused,
    started,
    starting_scheduler,
)

from npugrad_server.backends.base import RestartPolicy
from npugrad_server.pool.call_lifecycle import EXHAUSTION_REASONS
from npugrad_server.pool.commands import (
    Command,
    CompleteCall,
    FailCall,
    Failure,
    RedirectCall,
    ReleaseCall,
    RequeueCall,
    StartCall,
    TellWorker,
)
from npugrad_server.pool.placement import MAX_OVERTAKEN
from npugrad_server.pool.state import CallState
from npugrad_server.pool.types import DeviceState
from npugrad_server.worker.protocol import WorkspaceRefused

WHY = "its first try failed"
LACKS_P = {"p": WHY}
FULL = "DEVICE_OUT_OF_MEMORY"
BLOCK = 512


def where(commands: Sequence[Command]) -> list[tuple[int, int]]:
    return [(start.call, start.worker) for start in of(StartCall, commands)]


def put(scheduler: Driven, number: int, operator: str = "", **facts: Any) -> list[tuple[int, int]]:
    return where(scheduler.submit(CallState(number, operator=operator, **facts), 0))


def again(commands: Sequence[Command]) -> StartCall:
    (start,) = of(StartCall, commands)
    return start


def two_kinds(first: Any, second: Any) -> Driven:
    """A scheduler of two devices that are ready, each with facts of its own."""
    scheduler = starting_scheduler(2)
    for worker, facts in enumerate((first, second)):
        scheduler.be_ready(worker, **facts)
    return scheduler


# ------------------------------------------------------------------------------ operators that a device lacks


def test_a_call_waits_for_the_device_that_has_its_operator_though_another_is_idle() -> None:
    """Others pass it, but for those of its operator; no device that lacks it is kept for it."""
    scheduler = starting_scheduler(2)
    scheduler.be_ready(0, LACKS_P)
    assert put(scheduler, 1, "p") == put(scheduler, 2, "p") == []
    assert put(scheduler, 3, "q") == [(3, 0)]
    scheduler.finish(StartCall(3, 0, 1, 1, 0))
    assert where(scheduler.be_ready(1)) == [(1, 1)]
    for number in range(4, 4 + 3 * MAX_OVERTAKEN):
        assert put(scheduler, number, "q", label="other") == [(number, 0)], "it was reserved"
        assert where(scheduler.finish(StartCall(number, 0, 1, 1, 0))) == []
    assert where(scheduler.finish(StartCall(1, 1, 1, 1, 0))) == [(2, 1)]


def test_where_every_device_has_every_operator_no_call_passes_another_of_its_label() -> None:
    scheduler = open_scheduler(1, streams=2)
    put(scheduler, 1, "q", output_bytes=1024)
    assert put(scheduler, 2, "p", output_bytes=1024) == put(scheduler, 3, "q") == []


def test_a_call_that_no_device_can_run_is_refused_with_the_reasons() -> None:
    scheduler = starting_scheduler(3)
    scheduler.be_ready(0, LACKS_P)
    scheduler.be_ready(1, {"p": "no kernels"})
    assert scheduler.eligibility.why_unavailable("p") == ""
    assert put(scheduler, 0, "p", deadline_s=5.0) == put(scheduler, 1, "p") == [], "the third one may have it"
    assert refused(scheduler.tick(5.0)) == [(0, "DEADLINE_EXCEEDED")]
    commands = scheduler.be_ready(2, {"p": WHY, "q": WHY}, now=6)
    assert refused(commands) == [(1, "OPERATOR_UNSUPPORTED")]
    assert scheduler.eligibility.why_unavailable("p") == f"{WHY}; no kernels"
    assert scheduler.eligibility.why_unavailable("q") == scheduler.eligibility.why_unavailable("r") == ""
    (failed,) = of(FailCall, scheduler.submit(CallState(2, operator="p"), 6))
    assert (failed.reason, failed.detail) == ("OPERATOR_UNSUPPORTED", f"no device has it: {WHY}; no kernels")


@pytest.mark.parametrize("is_damaged", [True, False])
def test_a_call_is_refused_when_the_only_device_that_could_run_it_is_down(is_damaged: bool) -> None:
    """It is to come again if that is for now only; a new process is asked again what it lacks."""
    scheduler = two_kinds({"unavailable": LACKS_P}, {})
    start = scheduler.begin(1, operator="p")
    assert put(scheduler, 2, "p") == []
    policy = RestartPolicy.NEVER if is_damaged else RestartPolicy.MENDED
    reason = "OPERATOR_UNSUPPORTED" if is_damaged else "NO_DEVICE"
    scheduler.failing(start.worker, 1, Failure("words", policy), 1)
    assert {*refused(scheduler.lose(start.worker, 1))} == {(1, reason), (2, reason)}
    assert scheduler.workers[1].state is DeviceState.DOWN
    assert (scheduler.eligibility.why_unavailable("p") == "") == (not is_damaged)
    assert refused(scheduler.submit(CallState(3, operator="p"), 2)) == [(3, reason)]
    if not is_damaged:
        scheduler.be_back(1, 10)
        assert put(scheduler, 4, "p") == [(4, 1)]
        scheduler.lose(0, 10)
        scheduler.be_back(0, 20)
        assert put(scheduler, 5, "p") == [(5, 0)], "it lacked it before"


def test_a_device_that_comes_back_without_the_operator_is_not_kept_any_more() -> None:
    scheduler = starting_scheduler(2, streams=2)
    scheduler.be_ready(0)
    scheduler.be_ready(1, LACKS_P)
    held = scheduler.begin(0, operator="p", output_bytes=64)
    assert put(scheduler, 1, "p", label="big", output_bytes=1024) == []
    for number in range(2, 2 + 2 * MAX_OVERTAKEN):  # until device 0 is kept free for the big call
        for call, worker in put(scheduler, number, "q", label="s", output_bytes=64):
            scheduler.finish(StartCall(call, worker, 1, 1, 0))
    scheduler.lose(held.worker)
    scheduler.tick(1)
    scheduler.be_ready(0, LACKS_P, now=2)
    # Nobody has the operator now: both calls that wanted it are gone, and both devices serve.
    starts = [scheduler.begin(number, operator="q", label="s").worker for number in (900, 901, 902, 903)]
    assert sorted(starts) == [0, 0, 1, 1]


def test_memory_of_a_device_that_lacks_the_operator_or_the_mode_does_not_count() -> None:
    small, large = {"memory_bytes": 4 * BLOCK}, {"memory_bytes": 8 * BLOCK}
    scheduler = two_kinds(small, {"unavailable": LACKS_P, **large})
    most = scheduler.eligibility
    assert (most["p", False].most_bytes, most["q", False].most_bytes) == (4 * BLOCK, 8 * BLOCK)
    call = CallState(1, operator="p", device_bytes=5 * BLOCK)
    assert refused(scheduler.submit(call, 0)) == [(1, "CALL_TOO_LARGE")]
    start = scheduler.begin(2, operator="p", device_bytes=2 * BLOCK)
    (told,) = of(TellWorker, scheduler.need_workspace(0, 1, start.call, 5 * BLOCK - 32))
    assert told.message == WorkspaceRefused(2, True, 2 * BLOCK - 32)
    scheduler = two_kinds({"deterministic": False, **large}, {"deterministic": True, **small})
    most = scheduler.eligibility
    assert (most["p", True].most_bytes, most["p", False].most_bytes) == (4 * BLOCK, 8 * BLOCK)
    call = replace(call, deterministic=True)
    assert refused(scheduler.submit(call, 0)) == [(1, "CALL_TOO_LARGE")]


# --------------------------------------------------------------------------------- devices that keep one mode


def test_calls_go_to_the_device_that_keeps_their_mode_though_another_is_idle() -> None:
    """And pass those of their label that wait for the other one."""
    scheduler = two_kinds({"deterministic": False}, {"deterministic": True})
    assert put(scheduler, 1, deterministic=True) == [(1, 1)]
    assert put(scheduler, 3, deterministic=True) == []
    assert put(scheduler, 2) == [(2, 0)]
    assert put(scheduler, 4) == []
    assert where(scheduler.finish(StartCall(1, 1, 1, 1, 0))) == [(3, 1)]
    assert where(scheduler.finish(StartCall(2, 0, 1, 1, 0))) == [(4, 0)]


def test_a_deterministic_call_that_no_device_can_take_is_refused_with_the_reasons() -> None:
    scheduler = starting_scheduler(2)
    scheduler.be_ready(0, deterministic=False)
    assert scheduler.eligibility["p", True].refusal is None  # the other one may
    assert put(scheduler, 1, "p", deterministic=True) == []
    (failed,) = of(FailCall, scheduler.ready(1, 1, 0, deterministic=False, no_determinism="named so"))
    assert (failed.call, failed.reason) == (1, "DETERMINISM_UNSUPPORTED")
    assert failed.detail == (f"deterministic: found True; expected False on these devices: {ONCE}; named so")
    assert scheduler.eligibility["p", True].refusal == (failed.reason, failed.detail)
    assert scheduler.eligibility["p", False].refusal is None
    assert len(put(scheduler, 2, "p")) == 1
    # Where every device lacks the operator or the mode, the mode is what is told.
    scheduler = two_kinds({"unavailable": LACKS_P, "deterministic": True}, {"deterministic": False})
    (failed,) = of(FailCall, scheduler.submit(CallState(1, operator="p", deterministic=True), 0))
    assert failed.reason == "DETERMINISM_UNSUPPORTED"
    assert WHY in failed.detail
    assert ONCE in failed.detail
    assert put(scheduler, 2, "p") == [(2, 1)]


def test_calls_that_ask_for_no_mode_take_a_deterministic_device_where_no_other_is_ready_or_has_room() -> None:
    scheduler = starting_scheduler(2)
    scheduler.be_ready(1, deterministic=True, memory_bytes=8 * BLOCK)
    start = scheduler.begin(1)
    assert start.worker == 1
    scheduler.finish(start)
    scheduler.be_ready(0, deterministic=False, memory_bytes=4 * BLOCK)
    assert put(scheduler, 2, device_bytes=4 * BLOCK) == [(2, 0)]
    assert put(scheduler, 3, device_bytes=5 * BLOCK) == [(3, 1)]
    assert put(scheduler, 4, device_bytes=4 * BLOCK) == []  # device 0 will do, later


def test_a_device_that_keeps_a_mode_runs_calls_of_both_beside_each_other() -> None:
    scheduler = starting_scheduler(1, streams=2)
    scheduler.be_ready(0, deterministic=True)
    for number in (0, 1):
        scheduler.begin(number, deterministic=bool(number))


# ------------------------------------------------------------------ a device that cannot take a call now


@pytest.mark.parametrize("reason", sorted(EXHAUSTION_REASONS))
def test_a_call_that_a_device_cannot_take_is_tried_once_on_another_one(reason: str) -> None:
    scheduler = open_scheduler(3, streams=2)
    first = scheduler.begin(1, output_bytes=64)
    commands = scheduler.end(first, reason)
    assert of(RedirectCall, commands) == [RedirectCall(1, first.worker, reason)]
    assert not of(RequeueCall, commands)
    assert not of(CompleteCall, commands)
    second = again(commands)
    assert (second.worker, second.attempt) == (1 - first.worker, 2)
    assert scheduler.workers[first.worker].outputs.used_bytes == 0
    assert [worker.failures for worker in scheduler.workers] == [0, 0, 0]
    assert scheduler.begin(2).worker == 2
    assert scheduler.begin(3).worker == second.worker, "it is no suspect, and shares its device"
    commands = scheduler.end(second, "DEVICE_BUSY")  # which is believed
    assert of(CompleteCall, commands) == [CompleteCall(1)]
    assert not of(StartCall, commands)
    assert not of(RedirectCall, commands)
    assert of(ReleaseCall, scheduler.close(1, 0)) == [ReleaseCall(1)]


@pytest.mark.parametrize("reason", ["INTERNAL", "ACLNN_ERR_PARAM_INVALID", "UNSAFE_LEVELS"])
def test_an_answer_about_the_call_is_its_callers_at_once(reason: str) -> None:
    scheduler = open_scheduler(2)
    first = scheduler.begin(1)
    assert of(CompleteCall, scheduler.end(first, reason)) == [CompleteCall(1)]
    assert not scheduler.workers[first.worker].exhausted


def test_where_there_is_no_other_device_the_caller_is_told_at_once() -> None:
    """One that is too small, lacks the operator or has not opened is no other; nor is a try too many made."""
    elsewhere = starting_scheduler(3)
    elsewhere.be_ready(0)
    elsewhere.be_ready(1, LACKS_P)
    for scheduler in (
        open_scheduler(),
        elsewhere,
        two_kinds({"memory_bytes": 8 * BLOCK}, {"memory_bytes": 2 * BLOCK}),
        open_scheduler(2, settings=replace(SETTINGS, max_attempts=1)),
    ):
        start = scheduler.begin(1, operator="p", device_bytes=4 * BLOCK)
        assert of(CompleteCall, scheduler.end(start, FULL)) == [CompleteCall(1)]


def test_a_workspace_that_no_device_has_is_not_looked_for_on_another_one() -> None:
    scheduler = open_scheduler(2, device=8 * BLOCK)
    start = scheduler.begin(1, device_bytes=2 * BLOCK)
    (told,) = of(TellWorker, scheduler.need_workspace(start.worker, 1, 1, 9 * BLOCK))
    assert isinstance(told.message, WorkspaceRefused)
    assert told.message.final
    assert of(CompleteCall, scheduler.end(start, FULL)) == [CompleteCall(1)]
    assert not scheduler.workers[start.worker].exhausted, "the device is not to blame"


def test_the_device_a_call_went_back_to_counts_when_its_workspace_is_asked_for() -> None:
    scheduler = open_scheduler(2, streams=2, device=8 * BLOCK)
    first = scheduler.begin(1, device_bytes=2 * BLOCK)
    assert put(scheduler, 2, label="2", device_bytes=7 * BLOCK) == [(2, 1)]
    assert put(scheduler, 3, label="3", device_bytes=7 * BLOCK) == []
    third = again(scheduler.end(first, FULL))
    scheduler.cancel(2, 0)
    assert of(StartCall, scheduler.lose(1)) == []
    assert where(scheduler.end(third)) == [(1, 0)]
    assert put(scheduler, 4, device_bytes=4 * BLOCK) == [(4, 0)]
    scheduler.tick(1)
    scheduler.be_ready(1, now=2, memory_bytes=4 * BLOCK)
    (told,) = of(TellWorker, scheduler.need_workspace(0, 1, 1, 4 * BLOCK - 32))
    # It would fit once the other call is done.
    assert told.message == WorkspaceRefused(1, False, 6 * BLOCK - 32)


def test_a_call_nobody_waits_for_goes_nowhere() -> None:
    scheduler = open_scheduler(2)
    start = scheduler.begin(1)
    scheduler.cancel(1, 0)
    scheduler.close(1, 0)
    commands = scheduler.end(start, FULL)
    assert of(ReleaseCall, commands) == [ReleaseCall(1)]
    assert not of(StartCall, commands)
    assert not of(RedirectCall, commands)
    assert scheduler.workers[start.worker].exhausted


@pytest.mark.parametrize("meanwhile", ["the other is done", "the other leaves", "a new process comes"])
def test_a_call_waits_for_the_other_device_rather_than_go_back(meanwhile: str) -> None:
    """Unless that has left; a new process counts as another device."""
    scheduler = open_scheduler(2)
    first, other = scheduler.begin(1), scheduler.begin(2)
    assert of(StartCall, scheduler.end(first, FULL)) == []
    if meanwhile == "the other is done":
        start, expected = again(scheduler.end(other)), other
    elif meanwhile == "the other leaves":
        start, expected = again(scheduler.lose(other.worker, 1)), first
        assert {start.call, *started(scheduler.end(start))} == {1, 2}
    else:
        scheduler.lose(first.worker)
        start, expected = again(scheduler.be_back(first.worker, 1)), first
        assert other.call in scheduler.workers[other.worker].running
    assert (start.worker, start.attempt) == (expected.worker, 2)
    assert start.call == 1 or meanwhile == "the other leaves"


def test_an_exhausted_device_comes_last_until_it_or_a_new_process_has_done_a_call_well() -> None:
    scheduler = open_scheduler(2, streams=2)
    first = scheduler.begin(0)
    sick, well = first.worker, 1 - first.worker
    moved = again(scheduler.end(first, FULL))
    # Idle, and used longest ago, and yet last.
    assert (moved.worker, scheduler.begin(1).worker) == (well, well)
    for number, reason in ((2, "INTERNAL"), (3, "")):
        trial = scheduler.begin(number)
        assert trial.worker == sick
        assert scheduler.end(trial, reason, workspace_bytes=None if reason else 0)
        assert scheduler.workers[sick].exhausted == bool(reason)
    assert [scheduler.begin(number).worker for number in (4, 5)] == [sick, sick]
    scheduler = open_scheduler()
    scheduler.end(scheduler.begin(1), FULL)
    assert scheduler.workers[0].exhausted
    scheduler.lose()
    scheduler.be_back(now=2)
    assert not scheduler.workers[0].exhausted


def test_mostly_exhausted_devices_lose_no_call() -> None:
    """Two of three devices refuse everything for ever; every call still comes to the third."""
    scheduler = open_scheduler(3, streams=2)
    commands = [
        c for number in range(60) for c in scheduler.submit(CallState(number, label=str(number % 3)), 0)
    ]
    todo, told, right = of(StartCall, commands), [], []
    while todo:
        start = todo.pop(0)
        if start.worker == 2:
            right.append(start.call)
        commands = scheduler.end(start, "" if start.worker == 2 else FULL)
        if start.worker != 2:
            told += [c.call for c in of(CompleteCall, commands)]
        todo += of(StartCall, commands)
    # What the devices were not known to be exhausted of yet may be declined twice.
    assert len(told) <= 6
    assert sorted(right + told) == list(range(60))


def test_declined_tries_count_and_are_told_apart_from_deaths() -> None:
    scheduler = open_scheduler(3)
    first = scheduler.begin(1)
    second = again(scheduler.end(first, FULL))
    third = again(scheduler.lose(second.worker))
    assert (third.attempt, third.worker) == (3, ({0, 1, 2} - {first.worker, second.worker}).pop())
    (failed,) = of(FailCall, scheduler.lose(third.worker))
    assert failed.reason == "WORKER_LOST"
    assert failed.detail == "its worker died at 2 of 3 tries; last: signal 9"


def test_a_declined_call_is_tried_once_more_after_its_device_failed_and_a_suspect_goes_nowhere() -> None:
    failure = Failure("run returned 507015", call=1, code=507015)
    scheduler = open_scheduler(3)
    second = again(scheduler.end(scheduler.begin(1), FULL))
    scheduler.failing(second.worker, 1, failure, 0)
    assert again(scheduler.lose(second.worker)).attempt == 3
    scheduler = open_scheduler(3)
    first = scheduler.begin(1)
    scheduler.failing(first.worker, 1, failure, 0)
    second = again(scheduler.lose(first.worker))
    assert of(CompleteCall, scheduler.end(second, FULL)) == [CompleteCall(1)]
