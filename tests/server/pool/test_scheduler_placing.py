"""Which device a call goes to when not every device can run it, or one cannot take it now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from tests.server.pool.scheduling import SETTINGS, of

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
    SpawnWorker,
    StartCall,
    TellWorker,
    WorkerSpec,
)
from npugrad_server.pool.placement import MAX_OVERTAKEN
from npugrad_server.pool.scheduler import Scheduler
from npugrad_server.pool.state import CallState
from npugrad_server.pool.types import DeviceState, PoolSettings
from npugrad_server.worker.protocol import WorkspaceRefused

WHY = "its first try failed"
ONCE = "CANN 8.5.0 reads the option once"
FULL = "DEVICE_OUT_OF_MEMORY"
BLOCK = 512


def make(workers: int, streams: int = 1, settings: PoolSettings = SETTINGS) -> Scheduler:
    """A scheduler whose processes were started; none is ready."""
    scheduler = Scheduler(settings, [WorkerSpec(streams, 1024, "host")] * workers, {"host": 1024})
    scheduler.start(0)
    return scheduler


def be_ready(
    scheduler: Scheduler,
    worker: int,
    unavailable: Mapping[str, str] | None = None,
    now: float = 0,
    memory_bytes: int | None = None,
    *,
    deterministic: bool | None = None,
) -> list[StartCall]:
    commands = scheduler.ready(
        worker,
        scheduler.workers[worker].incarnation,
        now,
        memory_bytes=memory_bytes,
        unavailable=unavailable,
        deterministic=deterministic,
        no_determinism=ONCE if deterministic is False else "",
    )
    return of(StartCall, commands)


def opened(workers: int, streams: int = 1, settings: PoolSettings = SETTINGS) -> Scheduler:
    scheduler = make(workers, streams, settings)
    for worker in range(workers):
        be_ready(scheduler, worker)
    return scheduler


def submit(scheduler: Scheduler, number: int, operator: str = "", **changes: object) -> list[StartCall]:
    request = replace(CallState(number, operator=operator), **changes)  # type: ignore[arg-type]
    return of(StartCall, scheduler.submit(request, 0))


def answer(scheduler: Scheduler, start: StartCall, reason: str = "") -> list[Command]:
    return scheduler.answered(
        start.worker,
        start.incarnation,
        start.call,
        not reason,
        0,
        workspace_bytes=None if reason else 0,
        reason=reason,
    )


# ------------------------------------------------------------------------------ operators that a device lacks


def test_a_call_waits_for_the_device_that_has_its_operator_though_another_is_idle() -> None:
    scheduler = make(2)
    be_ready(scheduler, 0, {"p": WHY})
    be_ready(scheduler, 1)
    (first,) = submit(scheduler, 1, "p")
    assert first.worker == 1
    assert submit(scheduler, 2, "p") == []
    (second,) = of(StartCall, answer(scheduler, first))
    assert (second.call, second.worker) == (2, 1)


def test_a_call_that_no_device_can_run_is_refused_with_the_reasons() -> None:
    scheduler = make(3)
    be_ready(scheduler, 0, {"p": WHY})
    be_ready(scheduler, 1, {"p": "no kernels"})
    be_ready(scheduler, 2, {"p": WHY, "q": WHY})
    assert scheduler.eligibility.why_unavailable("p") == f"{WHY}; no kernels"
    assert scheduler.eligibility.why_unavailable("q") == scheduler.eligibility.why_unavailable("r") == ""
    (failed,) = of(FailCall, scheduler.submit(CallState(1, operator="p"), 0))
    assert (failed.reason, failed.detail) == ("OPERATOR_UNSUPPORTED", f"no device has it: {WHY}; no kernels")


def test_a_call_waits_for_a_device_that_starts_and_is_refused_once_that_lacks_its_operator_too() -> None:
    scheduler = make(2)
    be_ready(scheduler, 0, {"p": WHY})
    assert scheduler.eligibility.why_unavailable("p") == ""
    assert submit(scheduler, 1, "p", deadline_s=5.0) == submit(scheduler, 2, "p") == []
    assert [failed.reason for failed in of(FailCall, scheduler.tick(5.0))] == ["DEADLINE_EXCEEDED"]
    (failed,) = of(FailCall, scheduler.ready(1, 1, 6, unavailable={"p": WHY}))
    assert (failed.call, failed.reason) == (2, "OPERATOR_UNSUPPORTED")


def test_a_call_is_refused_when_the_only_device_that_could_have_run_it_is_down() -> None:
    scheduler = make(2, settings=replace(SETTINGS, max_respawns=0))
    be_ready(scheduler, 0, {"p": WHY})
    be_ready(scheduler, 1)
    (start,) = submit(scheduler, 1, "p")
    assert submit(scheduler, 2, "p") == []
    scheduler.failing(start.worker, 1, Failure("damaged", RestartPolicy.NEVER), 1)
    commands = scheduler.lost(start.worker, 1, "status 70", 1)
    assert scheduler.workers[1].state is DeviceState.DOWN
    assert {(f.call, f.reason) for f in of(FailCall, commands)} == {
        (1, "OPERATOR_UNSUPPORTED"),
        (2, "OPERATOR_UNSUPPORTED"),
    }


def test_a_call_is_to_come_again_when_the_only_device_that_may_run_it_is_down_for_now() -> None:
    scheduler = make(2, settings=replace(SETTINGS, max_respawns=0))
    be_ready(scheduler, 0, {"p": WHY})
    scheduler.lost(1, 1, "signal 9", 0)
    assert scheduler.workers[1].state is DeviceState.DOWN
    assert scheduler.eligibility.why_unavailable("p") == ""
    (failed,) = of(FailCall, scheduler.submit(CallState(1, operator="p"), 0))
    assert failed.reason == "NO_DEVICE"
    scheduler.tick(10)
    be_ready(scheduler, 1, now=10)
    assert [start.worker for start in submit(scheduler, 2, "p")] == [1]


def test_a_new_process_is_asked_again_what_it_lacks() -> None:
    scheduler = make(1)
    be_ready(scheduler, 0, {"p": WHY})
    scheduler.lost(0, 1, "signal 9", 0)
    assert submit(scheduler, 1, "p") == []
    assert of(SpawnWorker, scheduler.tick(1))
    (start,) = be_ready(scheduler, 0, now=2)
    assert start.call == 1


def test_calls_of_other_operators_pass_one_whose_device_is_away_and_those_of_its_own_do_not() -> None:
    scheduler = make(2)
    be_ready(scheduler, 0, {"p": WHY})
    assert submit(scheduler, 1, "p") == submit(scheduler, 2, "p") == []
    (start,) = submit(scheduler, 3, "q")
    assert (start.call, start.worker) == (3, 0)
    (start,) = be_ready(scheduler, 1)
    assert (start.call, start.worker) == (1, 1)


def test_where_every_device_has_every_operator_no_call_passes_another_of_its_label() -> None:
    scheduler = opened(1, streams=2)
    submit(scheduler, 1, "q", output_bytes=1024)
    assert submit(scheduler, 2, "p", output_bytes=1024) == []
    assert submit(scheduler, 3, "q") == []


def test_a_call_is_never_kept_a_device_that_lacks_its_operator() -> None:
    scheduler = make(2)
    be_ready(scheduler, 0, {"p": WHY})
    be_ready(scheduler, 1)
    (held,) = submit(scheduler, 0, "p", output_bytes=64)
    assert submit(scheduler, 1, "p", label="waits") == []
    for number in range(2, 2 + 3 * MAX_OVERTAKEN):
        (start,) = submit(scheduler, number, "q", label="other")
        assert start.worker == 0, "the device that lacks it was reserved"
        assert of(StartCall, answer(scheduler, start)) == []
    (start,) = of(StartCall, answer(scheduler, held))
    assert (start.call, start.worker) == (1, 1)


def test_a_device_that_comes_back_without_the_operator_is_not_kept_any_more() -> None:
    scheduler = make(2, streams=2)
    be_ready(scheduler, 0)
    be_ready(scheduler, 1, {"p": WHY})
    (held,) = submit(scheduler, 0, "p", output_bytes=64)
    assert submit(scheduler, 1, "p", label="big", output_bytes=1024) == []
    for number in range(2, 2 + 2 * MAX_OVERTAKEN):  # until device 0 is kept free for the big call
        for start in submit(scheduler, number, "q", label="s", output_bytes=64):
            answer(scheduler, start)
            scheduler.close(start.call, 0)
    scheduler.lost(held.worker, 1, "signal 9", 0)
    scheduler.tick(1)
    be_ready(scheduler, 0, {"p": WHY}, now=2)
    # Nobody has the operator now: both calls that wanted it are gone, and both devices serve.
    starts = [submit(scheduler, number, "q", label="s")[0].worker for number in (900, 901, 902, 903)]
    assert sorted(starts) == [0, 0, 1, 1]


def test_memory_of_a_device_that_lacks_the_operator_does_not_count() -> None:
    scheduler = make(2, streams=2)
    be_ready(scheduler, 0, memory_bytes=4 * BLOCK)
    be_ready(scheduler, 1, {"p": WHY}, memory_bytes=8 * BLOCK)
    assert (scheduler.eligibility["p", False].most_bytes, scheduler.eligibility["q", False].most_bytes) == (
        4 * BLOCK,
        8 * BLOCK,
    )
    (failed,) = of(FailCall, scheduler.submit(CallState(1, operator="p", device_bytes=5 * BLOCK), 0))
    assert failed.reason == "CALL_TOO_LARGE"
    (start,) = submit(scheduler, 2, "p", device_bytes=2 * BLOCK)
    (told,) = of(TellWorker, scheduler.need_workspace(0, 1, start.call, 5 * BLOCK - 32))
    assert told.message == WorkspaceRefused(2, True, 2 * BLOCK - 32)


# --------------------------------------------------------------------------------- devices that keep one mode


def test_calls_go_to_the_device_that_keeps_their_mode_though_another_is_idle() -> None:
    scheduler = make(2)
    be_ready(scheduler, 0, deterministic=False)
    be_ready(scheduler, 1, deterministic=True)
    for number, wanted in ((1, True), (2, False)):
        (start,) = submit(scheduler, number, "p", deterministic=wanted)
        assert start.worker == wanted
    assert submit(scheduler, 3, "p", deterministic=True) == submit(scheduler, 4, "p", label="b") == []
    (third,) = of(StartCall, answer(scheduler, StartCall(1, 1, 1, 1, 0)))
    assert (third.call, third.worker) == (3, 1)
    (fourth,) = of(StartCall, answer(scheduler, StartCall(2, 0, 1, 1, 0)))
    assert (fourth.call, fourth.worker) == (4, 0)


def test_a_call_of_one_mode_passes_one_of_its_label_that_waits_for_the_other() -> None:
    scheduler = make(2)
    be_ready(scheduler, 0, deterministic=False)
    be_ready(scheduler, 1, deterministic=True)
    submit(scheduler, 1, "p", deterministic=True)
    assert submit(scheduler, 2, "p", deterministic=True) == []
    (start,) = submit(scheduler, 3, "p")
    assert (start.call, start.worker) == (3, 0)
    assert submit(scheduler, 4, "p") == []


def test_a_deterministic_call_that_no_device_can_take_is_refused_with_the_reasons() -> None:
    scheduler = make(2)
    be_ready(scheduler, 0, deterministic=False)
    assert scheduler.eligibility["p", True].refusal is None  # the other one may
    assert submit(scheduler, 1, "p", deterministic=True) == []
    (failed,) = of(FailCall, scheduler.ready(1, 1, 0, deterministic=False, no_determinism="named so"))
    assert (failed.call, failed.reason) == (1, "DETERMINISM_UNSUPPORTED")
    assert failed.detail == (f"deterministic: found True; expected False on these devices: {ONCE}; named so")
    assert scheduler.eligibility["p", True].refusal == (failed.reason, failed.detail)
    assert scheduler.eligibility["p", False].refusal is None
    assert len(submit(scheduler, 2, "p")) == 1


def test_where_every_device_lacks_the_operator_or_the_mode_the_mode_is_what_is_told() -> None:
    scheduler = make(2)
    be_ready(scheduler, 0, {"p": WHY}, deterministic=True)
    be_ready(scheduler, 1, deterministic=False)
    (failed,) = of(FailCall, scheduler.submit(CallState(1, operator="p", deterministic=True), 0))
    assert (failed.reason, WHY in failed.detail, ONCE in failed.detail) == (
        "DETERMINISM_UNSUPPORTED",
        True,
        True,
    )
    (start,) = submit(scheduler, 2, "p")
    assert start.worker == 1


def test_calls_that_ask_for_no_mode_take_a_deterministic_device_where_no_other_is_ready() -> None:
    scheduler = make(2)
    be_ready(scheduler, 1, deterministic=True)
    (first,) = submit(scheduler, 1, "p")
    assert first.worker == 1
    answer(scheduler, first)
    be_ready(scheduler, 0, deterministic=False)
    assert [start.worker for start in submit(scheduler, 2, "p")] == [0]
    assert submit(scheduler, 3, "p") == []


def test_calls_that_ask_for_no_mode_take_a_deterministic_device_where_no_other_has_room_for_them() -> None:
    scheduler = make(2)
    be_ready(scheduler, 0, deterministic=False, memory_bytes=4 * BLOCK)
    assert submit(scheduler, 1, "p", device_bytes=4 * BLOCK)[0].worker == 0
    be_ready(scheduler, 1, deterministic=True, memory_bytes=8 * BLOCK)
    assert [start.worker for start in submit(scheduler, 2, "p", device_bytes=5 * BLOCK)] == [1]
    assert submit(scheduler, 3, "p", device_bytes=4 * BLOCK) == []  # device 0 will do, later


def test_a_device_that_keeps_a_mode_runs_calls_of_both_beside_each_other() -> None:
    scheduler = make(1, streams=2)
    be_ready(scheduler, 0, deterministic=True)
    assert [len(submit(scheduler, number, deterministic=bool(number))) for number in (0, 1)] == [1, 1]


def test_what_a_deterministic_call_can_have_is_what_its_devices_have() -> None:
    scheduler = make(2)
    be_ready(scheduler, 0, deterministic=False, memory_bytes=8 * BLOCK)
    be_ready(scheduler, 1, deterministic=True, memory_bytes=4 * BLOCK)
    assert scheduler.eligibility["p", True].most_bytes == 4 * BLOCK
    assert scheduler.eligibility["p", False].most_bytes == 8 * BLOCK
    large = CallState(1, operator="p", deterministic=True, device_bytes=5 * BLOCK)
    (failed,) = of(FailCall, scheduler.submit(large, 0))
    assert failed.reason == "CALL_TOO_LARGE"


# ------------------------------------------------------------------ a device that cannot take a call now


@pytest.mark.parametrize("reason", sorted(EXHAUSTION_REASONS))
def test_a_call_that_a_device_cannot_take_is_tried_once_on_another_one(reason: str) -> None:
    scheduler = opened(2)
    (first,) = submit(scheduler, 1, output_bytes=64)
    commands = answer(scheduler, first, reason)
    assert of(RedirectCall, commands) == [RedirectCall(1, first.worker, reason)]
    assert not of(RequeueCall, commands)
    assert not of(CompleteCall, commands)
    (second,) = of(StartCall, commands)
    assert (second.worker, second.attempt) == (1 - first.worker, 2)
    assert scheduler.workers[first.worker].outputs.used_bytes == 0
    assert [worker.failures for worker in scheduler.workers] == [0, 0]
    assert of(CompleteCall, answer(scheduler, second)) == [CompleteCall(1)]
    assert of(ReleaseCall, scheduler.close(1, 0)) == [ReleaseCall(1)]


def test_the_second_device_that_says_no_is_believed() -> None:
    scheduler = opened(3)
    (first,) = submit(scheduler, 1)
    (second,) = of(StartCall, answer(scheduler, first, FULL))
    commands = answer(scheduler, second, "DEVICE_BUSY")
    assert of(CompleteCall, commands) == [CompleteCall(1)]
    assert not of(StartCall, commands)
    assert not of(RedirectCall, commands)


@pytest.mark.parametrize("reason", ["INTERNAL", "ACLNN_ERR_PARAM_INVALID", "UNSAFE_LEVELS"])
def test_an_answer_about_the_call_is_its_callers_at_once(reason: str) -> None:
    scheduler = opened(2)
    (first,) = submit(scheduler, 1)
    assert of(CompleteCall, answer(scheduler, first, reason)) == [CompleteCall(1)]
    assert not scheduler.workers[first.worker].exhausted


def test_where_there_is_no_other_device_the_caller_is_told_at_once() -> None:
    alone = opened(1)
    (start,) = submit(alone, 1)
    assert of(CompleteCall, answer(alone, start, FULL)) == [CompleteCall(1)]
    scheduler = make(3)
    be_ready(scheduler, 0)
    be_ready(scheduler, 1, {"p": WHY})  # and device 2 has not opened
    (start,) = submit(scheduler, 1, "p")
    assert of(CompleteCall, answer(scheduler, start, FULL)) == [CompleteCall(1)]


def test_a_device_too_small_for_the_call_is_no_other_one() -> None:
    scheduler = make(2)
    be_ready(scheduler, 0, memory_bytes=8 * BLOCK)
    be_ready(scheduler, 1, memory_bytes=2 * BLOCK)
    (start,) = submit(scheduler, 1, device_bytes=4 * BLOCK)
    assert of(CompleteCall, answer(scheduler, start, FULL)) == [CompleteCall(1)]


def test_a_workspace_that_no_device_has_is_not_looked_for_on_another_one() -> None:
    scheduler = make(2)
    for worker in (0, 1):
        be_ready(scheduler, worker, memory_bytes=8 * BLOCK)
    (start,) = submit(scheduler, 1, device_bytes=2 * BLOCK)
    (told,) = of(TellWorker, scheduler.need_workspace(start.worker, 1, 1, 9 * BLOCK))
    assert isinstance(told.message, WorkspaceRefused)
    assert told.message.final
    assert of(CompleteCall, answer(scheduler, start, FULL)) == [CompleteCall(1)]
    assert not scheduler.workers[start.worker].exhausted, "the device is not to blame"


def test_the_device_a_call_went_back_to_counts_when_its_workspace_is_asked_for() -> None:
    scheduler = make(2, streams=2)
    for worker in (0, 1):
        be_ready(scheduler, worker, memory_bytes=8 * BLOCK)
    (first,) = submit(scheduler, 1, device_bytes=2 * BLOCK)
    full = [submit(scheduler, number, label=f"{number}", device_bytes=7 * BLOCK) for number in (2, 3)]
    assert [start.worker for starts in full for start in starts] == [1]
    assert of(StartCall, answer(scheduler, first, FULL))[0].call == 3
    scheduler.cancel(2, 0)
    commands = scheduler.lost(1, 1, "signal 9", 0)
    assert of(StartCall, commands) == []
    (again,) = of(StartCall, scheduler.answered(0, 1, 3, True, 0))
    (beside,) = submit(scheduler, 4, device_bytes=4 * BLOCK)
    scheduler.tick(1)
    be_ready(scheduler, 1, now=2, memory_bytes=4 * BLOCK)
    assert (again.call, again.worker, beside.worker) == (1, 0, 0)
    (told,) = of(TellWorker, scheduler.need_workspace(0, 1, 1, 4 * BLOCK - 32))
    # It would fit once the other call is done.
    assert told.message == WorkspaceRefused(1, False, 6 * BLOCK - 32)


def test_a_call_nobody_waits_for_goes_nowhere() -> None:
    scheduler = opened(2)
    (start,) = submit(scheduler, 1)
    scheduler.cancel(1, 0)
    scheduler.close(1, 0)
    commands = answer(scheduler, start, FULL)
    assert of(ReleaseCall, commands) == [ReleaseCall(1)]
    assert not of(StartCall, commands)
    assert not of(RedirectCall, commands)
    assert scheduler.workers[start.worker].exhausted


def test_a_call_waits_for_the_other_device_rather_than_go_back() -> None:
    scheduler = opened(2)
    (first,) = submit(scheduler, 1)
    (other,) = submit(scheduler, 2)
    assert of(StartCall, answer(scheduler, first, FULL)) == []
    (again,) = of(StartCall, answer(scheduler, other))
    assert (again.call, again.worker, again.attempt) == (1, other.worker, 2)


def test_a_call_goes_back_when_the_other_device_has_left_meanwhile() -> None:
    scheduler = opened(2)
    (first,) = submit(scheduler, 1)
    (other,) = submit(scheduler, 2)
    assert of(StartCall, answer(scheduler, first, FULL)) == []
    commands = scheduler.lost(other.worker, 1, "signal 9", 1)
    (again,) = of(StartCall, commands)
    assert (again.worker, again.attempt) == (first.worker, 2)
    done = answer(scheduler, again)
    assert {s.call for s in of(StartCall, done)} | {again.call} == {1, 2}


def test_a_new_process_of_the_device_counts_as_another_one() -> None:
    scheduler = opened(2)
    (first,) = submit(scheduler, 1)
    (other,) = submit(scheduler, 2)
    assert of(StartCall, answer(scheduler, first, FULL)) == []
    scheduler.lost(first.worker, 1, "signal 9", 0)
    scheduler.tick(1)
    (again,) = be_ready(scheduler, first.worker, now=2)
    assert (again.call, again.worker) == (1, first.worker)
    assert other.call in scheduler.workers[other.worker].running


def test_an_exhausted_device_comes_last_until_it_has_done_a_call_well() -> None:
    scheduler = opened(2, streams=2)
    (first,) = submit(scheduler, 0)
    sick, well = first.worker, 1 - first.worker
    (moved,) = of(StartCall, answer(scheduler, first, FULL))
    # Idle, and used longest ago, and yet last.
    (beside,) = submit(scheduler, 1)
    assert (moved.worker, beside.worker) == (well, well)
    (trial,) = submit(scheduler, 2)
    assert trial.worker == sick
    assert answer(scheduler, trial, "INTERNAL")
    assert scheduler.workers[sick].exhausted
    (trial,) = submit(scheduler, 3)
    assert answer(scheduler, trial)
    assert not scheduler.workers[sick].exhausted
    assert [submit(scheduler, 4)[0].worker, submit(scheduler, 5)[0].worker] == [sick, sick]


def test_a_new_process_is_not_exhausted() -> None:
    scheduler = opened(1)
    (start,) = submit(scheduler, 1)
    answer(scheduler, start, FULL)
    scheduler.lost(0, 1, "signal 9", 0)
    scheduler.tick(1)
    be_ready(scheduler, 0, now=2)
    assert not scheduler.workers[0].exhausted


def test_mostly_exhausted_devices_lose_no_call() -> None:
    """Two of three devices refuse everything for ever; every call still comes to the third."""
    scheduler = opened(3, streams=2)
    todo = [start for number in range(60) for start in submit(scheduler, number, label=str(number % 3))]
    # What the devices were not known to be exhausted of yet may be declined twice.
    doomed, told, right = 6, [], []
    while todo:
        start = todo.pop(0)
        if start.worker == 2:
            right.append(start.call)
        commands = answer(scheduler, start, "" if start.worker == 2 else FULL)
        if start.worker != 2:
            told += [c.call for c in of(CompleteCall, commands)]
        todo += of(StartCall, commands)
    assert len(told) <= doomed
    assert sorted(right + told) == list(range(60))


def test_a_call_that_was_declined_is_no_suspect_and_shares_its_device() -> None:
    scheduler = opened(2, streams=2)
    (first,) = submit(scheduler, 1)
    (second,) = of(StartCall, answer(scheduler, first, FULL))
    (beside,) = submit(scheduler, 2)
    assert beside.worker == second.worker


def test_declined_tries_count_and_are_told_apart_from_deaths() -> None:
    scheduler = opened(3)
    (first,) = submit(scheduler, 1)
    (second,) = of(StartCall, answer(scheduler, first, FULL))
    (third,) = of(StartCall, scheduler.lost(second.worker, 1, "signal 9", 0))
    assert (third.attempt, third.worker) == (3, ({0, 1, 2} - {first.worker, second.worker}).pop())
    (failed,) = of(FailCall, scheduler.lost(third.worker, 1, "signal 9", 0))
    assert (failed.reason, failed.detail) == (
        "WORKER_LOST",
        "its worker died at 2 of 3 tries; last: signal 9",
    )


def test_a_declined_call_is_tried_once_more_after_its_device_failed_and_a_suspect_goes_nowhere() -> None:
    scheduler = opened(3)
    (first,) = submit(scheduler, 1)
    (second,) = of(StartCall, answer(scheduler, first, FULL))
    scheduler.failing(second.worker, 1, Failure("run returned 507015", call=1, code=507015), 0)
    (third,) = of(StartCall, scheduler.lost(second.worker, 1, "status 70", 0))
    assert third.attempt == 3
    scheduler = opened(3)
    (first,) = submit(scheduler, 1)
    scheduler.failing(first.worker, 1, Failure("run returned 507015", call=1, code=507015), 0)
    (second,) = of(StartCall, scheduler.lost(first.worker, 1, "status 70", 0))
    assert of(CompleteCall, answer(scheduler, second, FULL)) == [CompleteCall(1)]


def test_the_limit_of_tries_holds_for_declined_ones_too() -> None:
    scheduler = opened(2, settings=replace(SETTINGS, max_attempts=1))
    (start,) = submit(scheduler, 1)
    assert of(CompleteCall, answer(scheduler, start, FULL)) == [CompleteCall(1)]
