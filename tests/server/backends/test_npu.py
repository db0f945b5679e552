"""The NPU backend in a real worker process on the simulated CANN: calls, errors, faults.

Everything here is SIMULATED; torch_npu is the unmodified one.
"""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import Any

import pytest
from tests.operators import GROUP_NORM, MSDA
from tests.server.backends.conftest import ARENA_BYTES, NpuWorker, StartNpuWorker

from npugrad.call import CallOptions
from npugrad.meta import CallMeta, TensorMeta
from npugrad.operator import OpRecord, Sample
from npugrad.ops import OPERATORS
from npugrad.products import Product
from npugrad_server.pool.regions import Region
from npugrad_server.worker.loop import EXIT_DEVICE_LOST
from npugrad_server.worker.protocol import (
    AskMemory,
    AskWorkspace,
    CallDone,
    CallFailed,
    DeviceFailed,
    DeviceReady,
    MemoryFound,
    WorkspaceFound,
)
from npugrad_server.worker.run_again import RunAgain

pytestmark = [pytest.mark.npu_sim, pytest.mark.slow]

NORM = GROUP_NORM.build(n=2, c=6, hxw=64, group=2)
EXPANDED = NORM.with_inputs(grad_out=TensorMeta("float32", (2, 6, 64), strides=(0, 0, 0)))
ARENA, QUARTER = Region(0, ARENA_BYTES), ARENA_BYTES // 4
PLAN_NORM, RUN_NORM = "aclnnGroupNormBackwardGetWorkspaceSize", "aclnnGroupNormBackward"


def refused(worker: NpuWorker, call: CallMeta = NORM, **changes: Any) -> CallFailed:
    """The answer to a call of GroupNorm, which is a refusal."""
    found = worker.ask(GROUP_NORM, call, **changes)
    assert isinstance(found, CallFailed), found
    return found


def lost(worker: NpuWorker, **changes: Any) -> DeviceFailed:
    """What a worker says that has to end for a call."""
    found = worker.ask(GROUP_NORM, NORM, **changes)
    assert isinstance(found, DeviceFailed), found
    return found


# ----------------------------------------------------------------------------------------- what goes well


def test_a_device_tells_what_it_is(start_npu_worker: StartNpuWorker) -> None:
    worker = start_npu_worker("hbm_mb=300", forked=False, ready=False)
    ready = worker.get(DeviceReady)
    assert (ready.backend, ready.simulated, ready.one_mode) == ("npu", True, True)
    assert ready.description == (
        "SIMULATED Ascend910B2, CANN 9.1.0, torch_npu 2.13.0, deterministic on request"
    )
    assert ready.unavailable == {}
    assert ready.memory_bytes is not None
    assert 200 << 20 < ready.memory_bytes <= 300 << 20
    stages = ["opening the device", "loading CANN", "importing torch_npu", "taking the device"]
    last = "comparing first, tiny calls with the reference"
    assert worker.stages == [*stages, *(f"trying {name}" for name in OPERATORS), last]


def _samples(record: OpRecord) -> list[Sample]:
    """Samples of a record; of large ones, for which simulator and reference take long, the first."""
    first, *others = record.samples(Product.ATLAS_A2)
    return [first, *(s for s in others if all(m is None or m.nbytes < 2**18 for m in s.call.inputs.values()))]


@pytest.mark.parametrize("record", OPERATORS.values(), ids=OPERATORS)
def test_every_operator_is_within_tolerance_and_tells_time_and_workspace(
    npu_worker: NpuWorker, record: OpRecord
) -> None:
    call = next(record.samples(Product.ATLAS_A2)).call
    done = npu_worker.check(record, call)
    assert min(done.copy_in_s, done.run_s, done.copy_out_s) > 0
    assert done.workspace_bytes > 0
    # Told without its memory.
    before = npu_worker.report.counters()
    npu_worker.send(AskWorkspace(77, record.name, call))
    assert npu_worker.receive() == WorkspaceFound(77, done.workspace_bytes)
    after = npu_worker.report.counters()
    for name in (record.aclnn_name, "aclrtMemcpyAsync"):
        assert after[f"calls.{name}"] == before[f"calls.{name}"]


@pytest.mark.parametrize("record", OPERATORS.values(), ids=OPERATORS)
def test_a_call_by_number_has_the_results_of_one_brought_whole(
    npu_worker: NpuWorker, record: OpRecord
) -> None:
    for plan, sample in enumerate(_samples(record)):
        # Only then are the bits of one call those of the next.
        deterministic = record.determinism_check(sample.call, None) is None
        options = CallOptions(deterministic=deterministic)
        order, arrays = npu_worker.order(record, sample.call, plan=plan, options=options)
        found = []
        for base in (0, ARENA_BYTES // 2, ARENA_BYTES // 4):
            again = RunAgain(order.call, plan, base, base)
            npu_worker.inputs.view(ARENA, base, QUARTER)[:] = npu_worker.inputs.view(ARENA, 0, QUARTER)
            npu_worker.send(again if base else order)
            npu_worker.get(CallDone)
            moved = {name: base + offset for name, offset in order.output_offsets.items()}
            result = replace(order, output_offsets=moved)
            if all(meta is None or meta.is_contiguous for meta in sample.call.inputs.values()):
                npu_worker.compare(result, record, arrays)  # others were written as if they were
            found.append(npu_worker.contents(result))
        assert not deterministic or found[0] == found[1] == found[2], sample.name
    assert npu_worker.live() == {}


def test_what_is_checked_and_asked_for_is_so_for_a_call_by_number_as_well(npu_worker: NpuWorker) -> None:
    call = next(MSDA.samples(Product.ATLAS_A2)).call
    order, _ = npu_worker.order(MSDA, call, plan=1)
    npu_worker.send(order)
    npu_worker.get(CallDone)
    shapes = call.tensor("spatial_shape")
    levels = npu_worker.inputs.view(ARENA, order.input_offsets["spatial_shape"], shapes.nbytes)
    right = bytes(levels)
    levels[:] = bytes([127]) * shapes.nbytes
    npu_worker.send(RunAgain(2, 1, 0, 0))
    failed = npu_worker.get(CallFailed)
    assert failed.reason == "UNSAFE_LEVELS"
    levels[:] = right
    npu_worker.send(RunAgain(3, 1, 0, 0, deadline_s=time.monotonic()))
    late = npu_worker.get(CallFailed)
    assert late.reason == "DEADLINE_EXCEEDED"
    npu_worker.send(RunAgain(4, 1, 0, 0))
    npu_worker.get(CallDone)


def test_the_stages_are_told_apart(npu_worker: NpuWorker) -> None:
    npu_worker.plan("copy_ms=400;kernel_ms=150")
    for _ in range(3):  # a machine that stands still for a moment can only add time
        done = npu_worker.check(GROUP_NORM, NORM)
        assert done.copy_in_s >= 2.0  # five operands
        assert done.run_s >= 0.15
        assert done.copy_out_s >= 1.2
        if done.run_s < 0.4:
            break
    assert done.run_s < 0.4  # without any copy


def test_each_stream_stays_on_its_thread_and_every_queued_copy_is_pinned(
    start_npu_worker: StartNpuWorker,
) -> None:
    """The simulator's strictest settings, which end the process at the first step beside the rules."""
    worker = start_npu_worker("threads=strict;pageable=abort", streams=2)
    for record in OPERATORS.values():
        for sample in _samples(record):
            # Both streams get it, and both calls lie at the same place of the arenas.
            orders = [worker.order(record, sample.call)[0] for _ in range(2)]
            for order in orders:
                worker.send(order)
            answers = [worker.receive() for _ in orders]
            assert all(isinstance(answer, CallDone) for answer in answers), (sample.name, answers)
    assert worker.report.counters()["pageable_async_copies"] == 0


def test_a_call_larger_than_the_staging_goes_through_in_turns(start_npu_worker: StartNpuWorker) -> None:
    worker = start_npu_worker(env={"NPUGRAD_WORKER_STAGING_BYTES": str(1 << 20)})
    worker.check(GROUP_NORM, GROUP_NORM.build(n=2, c=32, hxw=33_000, group=4))
    counters = worker.report.counters()
    assert counters["calls.aclrtSynchronizeStreamWithTimeout"] > 20


def test_a_failure_in_turns_gives_nothing_back_before_the_stream_is_done(
    start_npu_worker: StartNpuWorker,
) -> None:
    """The simulator aborts when the next call writes pinned memory that a queued copy still reads."""
    worker = start_npu_worker(env={"NPUGRAD_WORKER_STAGING_BYTES": str(1 << 20)})
    worker.plan(f"copy_ms=20;{PLAN_NORM}:1:561000")
    large = GROUP_NORM.build(n=2, c=32, hxw=33_000, group=4)
    refused(worker, large)
    worker.check(GROUP_NORM, large)


def test_a_clock_that_fails_does_not_cost_the_result(npu_worker: NpuWorker) -> None:
    npu_worker.plan("aclrtEventElapsedTime:*:107006")
    done = npu_worker.check(GROUP_NORM, NORM)
    assert min(done.copy_in_s, done.run_s, done.copy_out_s) > 0


def test_an_idle_worker_gives_its_events_back_at_its_end(start_npu_worker: StartNpuWorker) -> None:
    for _ in range(3):  # it has a second for that, which a busy machine may not give it
        worker = start_npu_worker(streams=2)
        assert worker.report.counters()["live.events"] >= 10  # five marks for each stream
        worker.control.close()
        assert worker.process.wait(10) == 0
        left = worker.report.counters()["live.events"]
        if not left:
            break
    assert left == 0


# ------------------------------------------------------------------------------- what the worker survives


@pytest.mark.parametrize(
    ("plan", "reason", "code", "function"),
    [
        (f"{PLAN_NORM}:1:561103:msg=words", "ACLNN_ERR_INNER_NULLPTR", "561103", PLAN_NORM),
        (f"{PLAN_NORM}:1:561112:msg=words", "ACLNN_ERR_INNER_OPP_KERNEL_PKG_NOT_FOUND", "561112", PLAN_NORM),
        (f"{PLAN_NORM}:1:561201:msg=words", "ACLNN_ERR_INNER", "561201", PLAN_NORM),
        (f"{RUN_NORM}:1:361001:msg=words", "ACLNN_ERR_RUNTIME_ERROR", "361001", RUN_NORM),
        ("aclrtMemcpyAsync:3:107000:msg=words", "DEVICE_ERROR", "107000", "mean: aclrtMemcpyAsync"),
        ("aclrtMemcpyAsync:7:107000:msg=words", "DEVICE_ERROR", "107000", "grad_gamma: aclrtMemcpyAsync"),
        (f"{PLAN_NORM}:*:207001:msg=words", "DEVICE_OUT_OF_MEMORY", "207001", PLAN_NORM),
        (f"{RUN_NORM}:*:207018:msg=words", "DEVICE_OUT_OF_MEMORY", "207018", RUN_NORM),
        (f"{RUN_NORM}:*:207005:msg=words", "DEVICE_BUSY", "207005", RUN_NORM),
        ("aclrtMemcpyAsync:*:107019:msg=words", "DEVICE_BUSY", "107019", "grad_out: aclrtMemcpyAsync"),
    ],
)
def test_a_failure_has_number_function_and_text_and_the_next_call_is_right(
    npu_worker: NpuWorker, plan: str, reason: str, code: str, function: str
) -> None:
    npu_worker.check(GROUP_NORM, NORM)
    npu_worker.plan(plan)
    failed = refused(npu_worker)
    assert (failed.reason, failed.metadata["code"]) == (reason, code)
    assert failed.message.startswith(f"group_norm_backward: {function} returned {code} (")
    assert "words" in failed.message
    assert not failed.trace
    npu_worker.plan("")
    npu_worker.check(GROUP_NORM, NORM)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("aclCreateTensor:4:null", "rstd: aclCreateTensor"),
        ("aclCreateTensor:7:null", "grad_gamma: aclCreateTensor"),
        ("aclCreateBoolArray:1:null", "output_mask: aclCreateBoolArray"),
    ],
)
def test_a_null_handle_is_an_error_without_a_number_that_names_the_parameter(
    npu_worker: NpuWorker, plan: str, words: str
) -> None:
    npu_worker.plan(plan)
    failed = refused(npu_worker)
    assert (failed.reason, failed.metadata.get("code")) == ("DEVICE_ERROR", None)
    assert failed.message.startswith(f"group_norm_backward: {words} failed without a number (")
    npu_worker.check(GROUP_NORM, NORM)


@pytest.mark.parametrize(
    ("call", "code"), [(NORM, 161001), (NORM, 161002), (NORM, 161999), (NORM, 561002), (EXPANDED, 161002)]
)
def test_a_refusal_of_what_the_record_allows_is_told_as_ours_with_types_and_shapes(
    npu_worker: NpuWorker, call: CallMeta, code: int
) -> None:
    npu_worker.plan(f"{PLAN_NORM}:*:{code}:msg=words")
    failed = refused(npu_worker, call)
    assert failed.metadata["code"] == str(code)
    head, _, described = failed.message.partition("; the call was ")
    assert head.startswith(f"group_norm_backward: {PLAN_NORM} returned {code} (")
    assert "the device disagrees with npugrad's record of the operator" in head
    assert ": words (error code " in head
    strides = " strides (0, 0, 0)" if call is EXPANDED else ""
    assert described == (
        f"grad_out float32[2, 6, 64]{strides}, input float32[2, 6, 64], mean float32[2, 2], "
        "rstd float32[2, 2], gamma float32[6], n 2, c 6, hxw 64, group 2, output_mask (True, True, True)"
    )
    # The same is told when only the workspace was asked for.
    npu_worker.send(AskWorkspace(76, GROUP_NORM.name, call))
    failed = npu_worker.get(CallFailed)
    assert failed.message.endswith(f"; the call was {described}")


@pytest.mark.parametrize(
    "plan",
    [
        f"{PLAN_NORM}:1:207001",
        f"{RUN_NORM}:1:207018",
        f"{RUN_NORM}:1:207007",
        "aclrtMemcpyAsync:4:107019",
        "aclrtMemcpyAsync:7:107019",
        "aclrtRecordEvent:4:107019",
    ],
)
def test_what_may_be_tried_again_is_tried_once_more_and_nobody_notices(
    npu_worker: NpuWorker, plan: str
) -> None:
    npu_worker.plan(plan)
    npu_worker.check(GROUP_NORM, NORM)
    assert npu_worker.report.counters()["faults.injected"] > 0


def test_a_full_device_gives_back_what_it_cached_and_goes_on(start_npu_worker: StartNpuWorker) -> None:
    """Blocks cached for one shape fill the device; the next shape needs others."""
    worker = start_npu_worker("hbm_mb=80")
    for hxw in (200_000, 140_000, 250_000):
        worker.check(GROUP_NORM, GROUP_NORM.build(n=2, c=8, hxw=hxw, group=2))


def test_a_call_that_does_not_fit_is_refused_and_the_next_one_is_right(
    start_npu_worker: StartNpuWorker,
) -> None:
    worker = start_npu_worker("hbm_mb=60")
    failed = refused(worker, GROUP_NORM.build(n=2, c=8, hxw=500_000, group=2))
    assert (failed.reason, failed.metadata["code"]) == ("DEVICE_OUT_OF_MEMORY", "207001")
    words = (
        "(32000000 bytes): torch_npu's allocator returned 207001 (out of memory): NPU out of memory. Tried to"
    )
    assert failed.message.startswith(f"group_norm_backward: input {words} allocate ")
    assert "60.00 MiB total capacity" in failed.message
    assert "max_split_size_mb" not in failed.message  # nobody can set it here
    worker.check(GROUP_NORM, NORM)
    assert worker.live() == {}


def test_a_workspace_that_does_not_fit_destroys_the_executor(start_npu_worker: StartNpuWorker) -> None:
    worker = start_npu_worker("hbm_mb=64")
    worker.plan("hbm_mb=64;workspace_mb=200")
    failed = refused(worker)
    assert failed.reason == "DEVICE_OUT_OF_MEMORY"
    assert re.match(r"group_norm_backward: workspace \(2\d{8} bytes\): torch_npu's allocator", failed.message)
    assert worker.live() == {}
    worker.plan("hbm_mb=64")
    worker.check(GROUP_NORM, NORM)


def test_a_call_without_pinned_memory_is_refused_and_the_next_one_is_right(
    start_npu_worker: StartNpuWorker,
) -> None:
    """CANN has no more; torch_npu does not tell, and gives a tensor without an address."""
    worker = start_npu_worker()
    worker.plan("aclrtMallocHost:*:207001")
    failed = refused(worker, GROUP_NORM.build(n=2, c=8, hxw=100_000, group=2))
    assert (failed.reason, failed.metadata["code"]) == ("DEVICE_OUT_OF_MEMORY", "207001")
    subject = "pinned memory for copies (16777216 bytes)"
    assert failed.message.startswith(
        f"group_norm_backward: {subject}: torch_npu's allocator of pinned memory"
    )
    worker.plan("")
    worker.check(GROUP_NORM, GROUP_NORM.build(n=2, c=8, hxw=100_000, group=2))
    assert worker.live() == {}


def test_a_stale_text_is_not_told(npu_worker: NpuWorker) -> None:
    npu_worker.plan("aclrtMemcpyAsync:1:stale:msg=an old story")
    npu_worker.check(GROUP_NORM, NORM)
    npu_worker.plan(f"{PLAN_NORM}:1:561000:msg=the new one")
    failed = refused(npu_worker)
    assert "the new one" in failed.message
    assert "an old story" not in failed.message


@pytest.mark.parametrize("function", [PLAN_NORM, RUN_NORM])
def test_a_stale_text_of_the_same_call_is_not_told(npu_worker: NpuWorker, function: str) -> None:
    npu_worker.plan(f"aclrtMemcpyAsync:*:stale:msg=an old story;{function}:1:561000:msg=another one")
    failed = refused(npu_worker)
    assert "another one" in failed.message
    assert "an old story" not in failed.message


def test_a_deadline_that_passed_before_the_launch_launches_nothing(npu_worker: NpuWorker) -> None:
    npu_worker.plan(f"{PLAN_NORM}:1:slow=400")
    before = npu_worker.report.counters()[f"calls.{RUN_NORM}"]
    failed = refused(npu_worker, deadline_s=time.monotonic() + 0.2)
    assert failed.reason == "DEADLINE_EXCEEDED"
    assert npu_worker.report.counters()[f"calls.{RUN_NORM}"] == before
    npu_worker.plan("")
    npu_worker.check(GROUP_NORM, NORM)


def _memory(worker: NpuWorker, *, give_back: bool) -> MemoryFound:
    worker.send(AskMemory(9, give_back))
    found = worker.get(MemoryFound)
    return found


def test_a_device_tells_how_its_memory_stands(start_npu_worker: StartNpuWorker) -> None:
    worker = start_npu_worker("hbm_mb=300")
    before = _memory(worker, give_back=True)
    assert before.total_bytes == 300 << 20
    worker.check(GROUP_NORM, GROUP_NORM.build(n=8, c=64, hxw=4096, group=8))  # 8 MiB for each tensor
    kept, after = _memory(worker, give_back=False), _memory(worker, give_back=True)
    assert kept.free_bytes is not None
    assert before.free_bytes is not None
    assert before.free_bytes - kept.free_bytes >= 24 << 20, "torch_npu's allocator keeps what calls used"
    assert after == before


def test_a_device_that_does_not_tell_its_memory_says_why(npu_worker: NpuWorker) -> None:
    npu_worker.plan("aclrtGetMemInfo:1:107000")
    npu_worker.send(AskMemory(9, give_back=False))
    answer = npu_worker.get(CallFailed)
    assert "aclrtGetMemInfo returned 107000" in answer.message


def test_the_workspace_of_a_call_that_would_never_fit_is_told(npu_worker: NpuWorker) -> None:
    huge = GROUP_NORM.build(n=2**20, c=64, hxw=2**20, group=2)
    npu_worker.send(AskWorkspace(78, GROUP_NORM.name, huge))
    planned = npu_worker.get(WorkspaceFound)
    assert planned.workspace_bytes
    npu_worker.plan(f"{PLAN_NORM}:1:561103")
    npu_worker.send(AskWorkspace(79, GROUP_NORM.name, NORM))
    failed = npu_worker.get(CallFailed)
    assert failed.metadata["code"] == "561103"


def test_the_option_of_determinism_is_set_only_when_it_changes(npu_worker: NpuWorker) -> None:
    def changes() -> list[int]:
        counters = npu_worker.report.counters()
        return [counters[f"calls.{name}"] for name in ("aclrtCtxSetSysParamOpt", "aclrtSetSysParamOpt")]

    npu_worker.check(GROUP_NORM, NORM)
    before = changes()
    for deterministic in (False, True, True, True, False, False):
        npu_worker.check(GROUP_NORM, NORM, options=CallOptions(deterministic=deterministic))
    assert changes() == [count + 2 for count in before]


# ------------------------------------------------------------------------------ what the worker must end for


@pytest.mark.parametrize(
    ("plan", "code", "restart_policy", "words"),
    [
        ("kernel:1:507015", 507015, "soon", "exception, timeout or trap of a core"),
        (f"{RUN_NORM}:1:507018", 507018, "soon", f"{RUN_NORM} returned 507018"),
        (f"{PLAN_NORM}:1:361001:last=507011", 361001, "soon", "the runtime's last error is 507011"),
        ("copy:2:507899", 507899, "slowly", "driver error"),
        ("kernel:1:507054", 507054, "never", "damaged, not tried again: group_norm_backward: "),
        ("aclrtMemcpyAsync:1:107020", 107020, "soon", "aborted"),
        ("aclrtEventElapsedTime:1:507001", 507001, "soon", "aclrtEventElapsedTime"),
        ("aclrtSynchronizeStreamWithTimeout:1:507010", 507010, "soon", "heartbeat lost"),
    ],
)
def test_a_device_that_fails_ends_its_worker_with_the_reason(
    start_npu_worker: StartNpuWorker, plan: str, code: int, restart_policy: str, words: str
) -> None:
    worker = start_npu_worker()
    worker.check(GROUP_NORM, NORM)
    worker.plan(plan)
    order, _ = worker.order(GROUP_NORM, NORM)
    worker.send(order)
    said = worker.get(DeviceFailed)
    assert (said.call, said.code, said.restart_policy, said.retry) == (order.call, code, restart_policy, True)
    assert f"returned {code}" in said.message
    assert words in said.message
    assert worker.process.wait(10) == EXIT_DEVICE_LOST


def wait_ms(lost: DeviceFailed) -> int:
    """How long the worker was going to wait for a stream, in the simulator's words.

    Seen from here it takes longer on a busy machine.
    """
    found = re.search(r"was not done after (\d+) ms", lost.message)
    assert found, lost.message
    return int(found[1])


def test_a_hang_is_cut_by_the_bounded_wait(start_npu_worker: StartNpuWorker) -> None:
    worker = start_npu_worker(hang_grace_s=4.0)
    worker.plan("kernel:1:hang")
    start = time.monotonic()
    said = lost(worker, deadline_s=start + 6.0)
    took = time.monotonic() - start
    assert (said.code, said.retry, said.exempt) == (507046, False, True)
    assert "aclrtSynchronizeStreamWithTimeout returned 507046" in said.message
    assert took > 6.0
    assert wait_ms(said) <= 9_000  # a second before the pool would end it
    assert worker.process.wait(10) == EXIT_DEVICE_LOST


def test_a_hang_without_a_deadline_is_cut_at_the_limit(start_npu_worker: StartNpuWorker) -> None:
    worker = start_npu_worker(run_limit_s=0.7)
    worker.plan("kernel:1:hang")
    start = time.monotonic()
    said = lost(worker)
    assert said.code == 507046
    assert time.monotonic() - start > 0.7
    assert wait_ms(said) <= 700


def test_a_failure_that_cannot_be_cleared_up_ends_the_worker(start_npu_worker: StartNpuWorker) -> None:
    """A harmless error of one call, but the wait that would make its memory free fails as well."""
    worker = start_npu_worker()
    worker.plan(f"{PLAN_NORM}:1:561000;aclrtSynchronizeStreamWithTimeout:1:107003")
    said = lost(worker)
    assert f"{PLAN_NORM} returned 561000" in said.message
    assert "then aclrtSynchronizeStreamWithTimeout returned 107003" in said.message
    assert worker.process.wait(10) == EXIT_DEVICE_LOST


def test_calls_on_other_streams_end_with_their_device(start_npu_worker: StartNpuWorker) -> None:
    """One report, then the end: no answer may come from a device that failed."""
    worker = start_npu_worker(streams=2)
    # The other kernel never ends; otherwise it might end before the device has failed.
    worker.plan("kernel_ms=200;kernel:1:507015;kernel:2:hang")
    for _ in range(2):
        worker.send(worker.order(GROUP_NORM, NORM)[0])
    worker.get(DeviceFailed)
    assert worker.control.recv(1000) == b""
    assert worker.process.wait(10) == EXIT_DEVICE_LOST
