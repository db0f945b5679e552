"""One call and several at once in the NPU backend, seen from inside a process on the simulated CANN.

Everything here is SIMULATED; torch_npu is the unmodified one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.cann_sim.fixtures import Ended
from tests.cann_sim.report import Report

Run = Callable[..., Ended]

pytestmark = [pytest.mark.npu_sim, pytest.mark.slow, pytest.mark.usefixtures("torch_npu")]

STRICT = "threads=strict;pageable=abort"
PLAN, LAUNCH = "aclnnGroupNormBackwardGetWorkspaceSize", "aclnnGroupNormBackward"
MIB = 2**20


def scenario(run_on_sim: Run, name: str, *, plan: str = STRICT, **variables: str) -> tuple[Any, Report]:
    """What a scenario says, and the simulator of it."""
    ended = run_on_sim("tests.server.backends.npu_scenarios", name, plan=plan, with_torch=True, **variables)
    assert (ended.status, ended.report.violations()) == (0, []), ended.errors[-4000:]
    return json.loads(ended.output.splitlines()[-1]), ended.report


def test_a_call_is_queued_as_a_whole_and_waited_for_once(run_on_sim: Run) -> None:
    workspace_bytes, report = scenario(run_on_sim, "one_call")
    steps = {
        "aclrtMemcpyAsync": "copy",
        PLAN: "plan",
        LAUNCH: "launch",
        "aclrtSynchronizeStreamWithTimeout": "wait",
        "aclrtSynchronizeStream": "other wait",
        "aclrtSynchronizeDevice": "other wait",
        "aclrtSynchronizeEvent": "other wait",
    }
    found = [steps[name] for name in report.trace() if name in steps]
    assert found == [*["copy"] * 5, "plan", "launch", *["copy"] * 3, "wait"]
    assert workspace_bytes > 0


def test_whoever_says_no_in_mid_call_leaves_nothing_behind(run_on_sim: Run) -> None:
    refusals, _ = scenario(run_on_sim, "refusals")
    assert len(refusals) == 6
    assert refusals == {name: {"launches": 0} for name in refusals}


def test_a_large_call_that_nobody_waits_for_stops_at_the_next_turn(run_on_sim: Run) -> None:
    (stopped, whole), _ = scenario(run_on_sim, "refusal_in_turns", NPUGRAD_WORKER_STAGING_BYTES=str(MIB))
    small = 8  # copies of the small call that came after
    assert stopped - small < 5 < 20 < whole


def test_workspace_is_asked_for_once_however_often_a_call_is_tried(run_on_sim: Run) -> None:
    asked, report = scenario(run_on_sim, "reserved_once")
    assert report.counters()["faults.injected"] == 1
    assert len(asked) == 1


def test_stages_are_told_apart_where_cann_has_no_events(run_on_sim: Run) -> None:
    found, report = scenario(run_on_sim, "without_events")
    assert found["copy_in"] >= 2.0  # five operands, 400 ms each
    assert 0.1 <= found["run"] < 0.4  # without any copy
    assert found["copy_out"] >= 1.2
    assert report.counters()["calls.aclrtRecordEvent"] == 0


def test_copies_and_whole_calls_of_one_stream_go_on_beside_the_kernel_of_another(run_on_sim: Run) -> None:
    short_calls, report = scenario(run_on_sim, "overlap")
    tasks = [record for record in report.records() if record["event"] in ("begin", "end")]
    long_kernel = "aclnnGridSampler2DBackward"
    begin, end = (
        next(i for i, task in enumerate(tasks) if (task["event"], task["task"]) == (event, long_kernel))
        for event in ("begin", "end")
    )
    meanwhile = tasks[begin + 1 : end]
    assert {task["stream"] for task in meanwhile}.isdisjoint({tasks[begin]["stream"]})
    done = [task["task"] for task in meanwhile if task["event"] == "end"]
    # Five copies in, the kernel, three copies out: so often, the time of both is less than their sum.
    whole = min(done.count("aclrtMemcpyAsync") // 8, done.count(LAUNCH))
    assert 1 <= whole <= short_calls
    counters = report.counters()
    assert counters["max_concurrent_kernels"] == 2
    assert counters["copies_beside_kernels"] >= 8 * whole


def test_calls_of_different_modes_never_overlap_and_each_runs_under_its_own(run_on_sim: Run) -> None:
    modes, report = scenario(run_on_sim, "mixed_modes", plan="")
    assert sorted(modes.values()).count(True) == len(modes) / 2 == 20
    seen: dict[str, bool] = {}
    in_hand: dict[int, bool] = {}  # by executor, from phase 1 to the end of the kernel
    running: dict[int, int] = {}  # executor by stream
    most = 0
    for record in report.records():
        event = record["event"]
        if event == "end" and record["task"].startswith("aclnn"):
            del in_hand[running.pop(record["stream"])]
        if event not in ("plan", "launch", "run"):
            continue
        executor, mode = record["executor"], bool(record["deterministic"])
        if event == "plan":  # not its launch, which is written once it is queued: its kernel may be over
            in_hand[executor] = mode
            seen[str(record["arguments"][0]["value"]["shape"][0])] = mode
        elif event == "run":
            running[record["stream"]] = executor
        assert set(in_hand.values()) <= {mode}, record
        most = max(most, len(in_hand))
    assert seen == modes
    assert not in_hand
    assert most == 2  # else nothing was shown


def test_the_mode_does_not_change_while_a_first_phase_is_asked_for_its_workspace(run_on_sim: Run) -> None:
    """The simulator aborts when it changes between the first phase and the end of its executor."""
    planned, _ = scenario(run_on_sim, "planned_while_modes_change", plan="")
    assert planned > 5


def test_what_cannot_be_deterministic_is_refused_before_its_first_phase(run_on_sim: Run) -> None:
    found, _ = scenario(run_on_sim, "not_deterministic")
    assert found == {
        "floyd": [
            "DETERMINISM_UNSUPPORTED",
            "fused_floyd_attention_grad: deterministic: found True; expected False, because the operator has "
            "no deterministic mode on an NPU",
            0,
        ],
        "sampler 2049": [
            "DETERMINISM_UNSUPPORTED",
            "grid_sampler_2d_backward: input: found 2049 channels; expected at most 2048 where deterministic "
            "is True on an NPU",
            0,
        ],
        "sampler 2048": ["", "", 1],
    }


def test_nothing_grows_over_hundreds_of_mixed_calls(run_on_sim: Run) -> None:
    found, report = scenario(run_on_sim, "many_calls")
    assert found["kernels"] >= 200
    assert found["after"] == found["before"]
    # Two streams, two directions, sizes in powers of two, and torch_npu keeps the smaller ones it had before.
    assert found["after"]["pinned_bytes"] <= 2 * 2 * 2 * 2 * max(found["largest"], MIB)
    counters = report.counters()
    assert counters["pageable_async_copies"] == 0
    assert counters["calls.aclDestroyAclOpExecutor"] == 0
