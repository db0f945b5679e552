"""Every rule of the simulator is broken once, and ends the process with a sentence that names it."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cann_sim import scenarios_launch  # noqa: F401  registers its mistakes
from tests.cann_sim.build import SOURCES
from tests.cann_sim.fixtures import Ended
from tests.cann_sim.scenarios import SCENARIOS

Run = Callable[..., Ended]

pytestmark = pytest.mark.npu_sim

SLOW = "kernel_ms=20000; copy_ms=20000"  # queued work is still there when the mistake is made
LATE = "copy_ms=1000; free_check=execution"
FAULT = "kernel:1:507015"
MISTAKES = {
    "host_reads_device_memory": ("", "host-touch", "the host touched memory of device 0 at 0x"),
    "host_writes_device_memory": ("", "host-touch", "the host touched memory of device 0 at 0x"),
    "host_looks_into_a_handle": ("", "host-touch", "the host touched an opaque handle"),
    "host_uses_pinned_memory_it_freed": ("", "host-touch", "pinned memory that was freed"),
    "host_runs_over_the_end_of_pinned_memory": ("", "host-touch", "the page behind pinned memory"),
    "host_fills_a_staging_buffer_again_too_early": ("", "host-touch", "pinned memory that queued work uses"),
    "host_reads_a_result_before_it_was_told": ("", "host-touch", "pinned memory that queued work uses"),
    "copy_runs_over_the_end": (
        "",
        "out-of-bounds",
        "aclrtMemcpy: the destination needs 200 bytes .* 96 are left",
    ),
    "copy_to_freed_memory": (
        "",
        "use-after-free",
        "aclrtMemcpy: the source .* which was freed: device allocation",
    ),
    "copy_with_the_wrong_kind": ("", "copy-kind", "kind 2, but the destination .* is device memory"),
    "queued_copy_from_pageable_memory": ("pageable=abort", "pageable", "host memory is not pinned"),
    "free_twice": ("", "double-free", "aclrtFree: device allocation 1 of 64 bytes"),
    "free_the_middle": ("", "unknown-memory", "is not the start of a device allocation"),
    "free_under_a_queued_copy": (SLOW, "freed-in-use", "the destination of unfinished aclrtMemcpyAsync"),
    "free_pinned_memory_under_a_queued_copy": (
        SLOW,
        "freed-in-use",
        "aclrtFreeHost: the source of unfinished",
    ),
    "free_under_a_kernel_after_a_sync_that_timed_out": (
        SLOW,
        "freed-in-use",
        "aclrtFree: gradOut of unfinished",
    ),
    "kernel_writes_behind_its_output": ("kernel:1:overrun", "redzone", "something wrote at byte"),
    "destroy_a_tensor_twice": ("", "double-destroy", "aclDestroyTensor: tensor .* was destroyed before"),
    "destroy_a_bool_array_twice": ("", "double-destroy", "aclDestroyBoolArray: bool_array"),
    "destroy_a_stream_twice": ("", "use-after-destroy", "stream .* was destroyed before"),
    "destroy_an_event_twice": ("", "double-destroy", "aclrtDestroyEvent: event"),
    "destroy_an_executor_after_its_launch": ("", "executor-reused", "was used up or destroyed before"),
    "use_a_destroyed_stream": ("", "use-after-destroy", "aclrtSynchronizeStream: stream"),
    "plan_with_a_destroyed_tensor": ("", "use-after-destroy", "aclnnGroupNormBackward: tensor"),
    "destroy_a_tensor_between_the_phases": (
        "",
        "destroyed-before-launch",
        "mean was destroyed before phase 2",
    ),
    "launch_twice": ("", "executor-reused", "was used up or destroyed before"),
    "launch_with_the_executor_of_another_operator": (
        "",
        "wrong-executor",
        "the executor of aclnnGroupNormBackward",
    ),
    "use_what_is_no_handle": ("", "unknown-handle", "0x1000 is not a stream"),
    "register_host_memory_twice": ("", "double-register", "host memory is registered already"),
    "tensor_with_a_negative_stride": ("", "strides", "a stride is negative"),
    "a_dtype_that_nobody_checks": ("", "undefined", "the dtype of softmaxMax is wrong"),
    "tensor_at_an_odd_address": ("", "alignment", "is not a multiple of 32"),
    "tensor_at_a_host_address": ("", "host-pointer", "is no device address"),
    "tensor_without_an_address": ("", "null-data", "mean has elements but no address"),
    "tensor_longer_than_its_memory": ("", "out-of-bounds", "gradOut needs 512 bytes"),
    "view_longer_than_its_storage": ("", "storage", "the view of mean reaches element 3, its storage has 2"),
    "two_outputs_at_one_place": ("", "overlap", "gradGammaOut and gradBetaOut share memory"),
    "an_output_over_an_input": ("", "overlap", "gradInput and input share memory"),
    "outputs_without_padding": ("", "padding", "gradBetaOut begins in the 32 bytes behind gradGammaOut"),
    "workspace_smaller_than_asked_for": ("", "workspace", "phase 1 asked for"),
    "workspace_smaller_than_its_size_says": ("", "out-of-bounds", "the workspace needs"),
    "workspace_over_an_operand": ("", "overlap", "the workspace and mean share memory"),
    "levels_that_leave_the_keys": ("", "unsafe-levels", "a level reaches key 16 of 16"),
    "an_output_shape_that_nobody_checks": ("", "undefined", "the shape of dqOut is wrong"),
    "two_streams_use_one_buffer": (
        SLOW,
        "race",
        "aclrtMemcpyAsync writes the destination .* while aclrtMemcpyAsync",
    ),
    "host_copies_from_what_a_kernel_still_writes": (
        SLOW,
        "race",
        "reads the source .* writes it as gradInput",
    ),
    "queue_work_on_a_context_known_to_have_failed": (
        FAULT,
        "poisoned",
        "aclrtMemcpyAsync on a context that failed",
    ),
    "plan_on_a_context_known_to_have_failed": (
        FAULT,
        "poisoned",
        "aclnnGroupNormBackward on a context that failed",
    ),
    "phases_on_two_threads": ("threads=strict", "wrong-thread", "phase 1 ran on another thread"),
    "two_threads_on_one_stream": ("threads=strict", "wrong-thread", "another thread queued work on stream"),
    "operand_on_another_device": ("ndev=2", "wrong-device", "mean is on device 1, the context on 0"),
    "copy_to_another_device": ("ndev=2", "wrong-device", "the destination is on device 1, the context on 0"),
    "plan_without_a_device": ("", "no-context", "phase 1 without a device"),
    "determinism_changes_under_a_kernel": (SLOW, "determinism", "changes under queued work"),
    "determinism_changes_between_the_phases": ("", "determinism", "changes between the phases of a launch"),
}


def violation(ended: Ended) -> tuple[str, str]:
    """Rule and sentence of the violation that ended a process."""
    assert ended.status == -signal.SIGABRT, ended
    lines = ended.report.violations()
    assert len(lines) == 1, ended
    assert lines[0] in ended.errors
    found = re.fullmatch(r"cann_sim: violation \[([a-z-]+)\]: (.*)", lines[0])
    assert found, lines
    return found[1], found[2]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_the_process(run_on_sim: Run, mistake: str) -> None:
    plan, rule, sentence = MISTAKES[mistake]
    found = violation(run_on_sim("tests.cann_sim", mistake, plan=plan))
    assert found[0] == rule, found
    assert re.search(sentence, found[1]), found


def test_every_rule_is_broken_and_described() -> None:
    text = "".join(path.read_text() for path in SOURCES.glob("*/*.cpp"))
    text += (SOURCES / "model" / "handles.h").read_text()
    computed = {"out-of-bounds", "use-after-free", "double-destroy", "unknown-handle"}
    rules = set(re.findall(r'violation\(\s*"([a-z-]+)"', text)) | computed
    internal = {"kernel", "dtype"}  # mistakes of the simulator itself
    elsewhere = {"plan", "trap"}  # broken by other tests
    assert {rule for _, rule, _ in MISTAKES.values()} == rules - internal - elsewhere
    table = (
        (Path(__file__).parent / "README.md").read_text().partition("## Rules")[2].partition("## The plan")[0]
    )
    rows = re.findall(r"^\| ([a-z, -]+) \|", table, re.MULTILINE)
    assert {rule for row in rows for rule in row.split(", ")} - {"rule", "---"} == rules - internal


def test_every_mistake_is_made() -> None:
    assert set(MISTAKES) == set(SCENARIOS) - {"nothing_wrong"}


@pytest.mark.parametrize(
    "plan", ["", "threads=strict; pageable=abort", "ndev=2; kernel_ms=20; copy_ms=5; call_us=50"]
)
def test_what_is_right_passes(run_on_sim: Run, plan: str) -> None:
    ended = run_on_sim("tests.cann_sim", "nothing_wrong", plan=plan)
    assert (ended.status, ended.report.violations()) == (0, []), ended


def test_freed_memory_is_found_when_the_task_runs(run_on_sim: Run) -> None:
    ended = run_on_sim("tests.cann_sim", "free_under_a_queued_copy", plan=LATE)
    rule, sentence = violation(ended)
    assert rule == "use-after-free"
    assert re.search("the destination was freed before the task ran", sentence)


def test_pinned_memory_may_be_left_unguarded(run_on_sim: Run) -> None:
    mistake = "host_reads_a_result_before_it_was_told"
    ended = run_on_sim("tests.cann_sim", mistake, plan="pinned=real")
    assert (ended.status, ended.report.violations()) == (0, []), ended


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ("kernal_ms=5", 'there is no setting "kernal_ms"'),
        ("kernel_ms=fast", '"fast" is not a number'),
        ("kernels:1:507015", "neither an interface function nor malloc"),
        ("kernel:0:507015", "calls are counted from 1"),
        ("kernel:3-2:507015", "calls are counted from 1"),
        ("kernel:1:0", "0 is no error code"),
        ("kernel:1:explode", "is not a number"),
        ("kernel:1", "expected name=value or target:when:action"),
        ("kernel:1:hang:device=1", 'there is no option "device=1"'),
        ("kernel:1:507015:total", "total needs CANN_SIM_STATE"),
        ("threads=some", "expected strict or real"),
        ("ndev=17", "at most 16 devices"),
    ],
)
def test_a_plan_with_a_mistake_is_refused(run_on_sim: Run, plan: str, why: str) -> None:
    rule, sentence = violation(run_on_sim("tests.cann_sim", "nothing_wrong", plan=plan))
    assert rule == "plan"
    assert why in sentence
