"""Mistakes, one function each: `python -m tests.cann_sim NAME` makes it, and must not live to tell.

The simulator is the one of ASCEND_HOME_PATH; device 0 is set. A function that returns was not caught.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tests.cann_sim.build import Installation
from tests.cann_sim.operators import Launch, make_arrays
from tests.cann_sim.rig import SHAPES, Rig, launch_generated, queue_upload
from tests.cann_sim.runtime import D2H, DETERMINISTIC, H2D, Runtime
from tests.operators import FLOYD, MSDA

from npugrad.meta import TensorMeta

KIB = 1024
SLOW = "kernel_ms=20000; copy_ms=20000"  # queued work is still there when the mistake is made
FAULT = "kernel:1:507015"


@dataclass(frozen=True)
class Mistake:
    """One mistake, and what the simulator says of it.

    Attributes:
        make: Makes it.
        rule: The rule it breaks.
        sentence: Part of the message, a regular expression.
        plan: Plan of the simulator.
    """

    make: Callable[[Runtime], None]
    rule: str
    sentence: str
    plan: str


MISTAKES: dict[str, Mistake] = {}


def mistake(
    rule: str, sentence: str, plan: str = ""
) -> Callable[[Callable[[Runtime], None]], Callable[[Runtime], None]]:
    """Registers a mistake under the name of its function."""

    def register(make: Callable[[Runtime], None]) -> Callable[[Runtime], None]:
        MISTAKES[make.__name__] = Mistake(make, rule, sentence, plan)
        return make

    return register


def void(_: object) -> None:
    """Makes a lambda return nothing."""


def in_another_thread(runtime: Runtime, act: Callable[[], None]) -> None:
    def run() -> None:
        runtime.call("aclrtSetDevice", 0)
        act()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


# Memory


@mistake("host-touch", "the host touched memory of device 0 at 0x")
def host_reads_device_memory(runtime: Runtime) -> None:
    ctypes.string_at(runtime.malloc(64), 1)


@mistake("host-touch", "the host touched memory of device 0 at 0x")
def host_writes_device_memory(runtime: Runtime) -> None:
    ctypes.memset(runtime.malloc(64), 0, 64)


@mistake("host-touch", "the host touched an opaque handle")
def host_looks_into_a_handle(runtime: Runtime) -> None:
    ctypes.string_at(runtime.stream(), 8)


@mistake("host-touch", "pinned memory that was freed")
def host_uses_pinned_memory_it_freed(runtime: Runtime) -> None:
    memory = runtime.pinned(64)
    runtime.call("aclrtFreeHost", memory.ctypes.data)
    memory[0] = 1


@mistake("host-touch", "the page behind pinned memory")
def host_runs_over_the_end_of_pinned_memory(runtime: Runtime) -> None:
    ctypes.memset(runtime.pinned(64).ctypes.data, 0, 4 * KIB + 1)


@mistake("host-touch", "pinned memory that queued work uses")
def host_fills_a_staging_buffer_again_too_early(runtime: Runtime) -> None:
    address, stream, staging = runtime.malloc(64), runtime.stream(), runtime.pinned(64)
    runtime.call("aclrtMemcpyAsync", address, 64, staging.ctypes.data, 64, H2D, stream)
    assert staging[0] == 255  # to read it is no mistake
    staging[0] = 1


@mistake("host-touch", "pinned memory that queued work uses")
def host_reads_a_result_before_it_was_told(runtime: Runtime) -> None:
    address, stream, result = runtime.upload(bytes(64)), runtime.stream(), runtime.pinned(64)
    runtime.call("aclrtMemcpyAsync", result.ctypes.data, 64, address, 64, D2H, stream)
    other = runtime.stream()
    runtime.call("aclrtSynchronizeStream", other)
    result.tobytes()


@mistake("out-of-bounds", "aclrtMemcpy: the destination needs 200 bytes .* 96 are left")
def copy_runs_over_the_end(runtime: Runtime) -> None:
    source = np.zeros(200, np.uint8)
    runtime.call("aclrtMemcpy", runtime.malloc(64), 200, source.ctypes.data, 200, H2D)


@mistake("use-after-free", "aclrtMemcpy: the source .* which was freed: device allocation")
def copy_to_freed_memory(runtime: Runtime) -> None:
    address = runtime.upload(bytes(64))
    runtime.call("aclrtFree", address)
    runtime.download(address, 64)


@mistake("copy-kind", "kind 2, but the destination .* is device memory")
def copy_with_the_wrong_kind(runtime: Runtime) -> None:
    source = np.zeros(64, np.uint8)
    runtime.call("aclrtMemcpy", runtime.malloc(64), 64, source.ctypes.data, 64, D2H)


@mistake("pageable", "host memory is not pinned", "pageable=abort")
def queued_copy_from_pageable_memory(runtime: Runtime) -> None:
    source = np.zeros(64, np.uint8)
    runtime.call("aclrtMemcpyAsync", runtime.malloc(64), 64, source.ctypes.data, 64, H2D, runtime.stream())


@mistake("double-free", "aclrtFree: device allocation 1 of 64 bytes")
def free_twice(runtime: Runtime) -> None:
    address = runtime.malloc(64)
    runtime.call("aclrtFree", address)
    runtime.call("aclrtFree", address)


@mistake("unknown-memory", "is not the start of a device allocation")
def free_the_middle(runtime: Runtime) -> None:
    runtime.call("aclrtFree", runtime.malloc(64) + 32)


@mistake("freed-in-use", "the destination of unfinished aclrtMemcpyAsync", SLOW)
def free_under_a_queued_copy(runtime: Runtime) -> None:
    address, stream = runtime.malloc(64), runtime.stream()
    queue_upload(runtime, address, 64, stream)
    runtime.call("aclrtFree", address)
    runtime.call("aclrtSynchronizeStream", stream)


@mistake("freed-in-use", "aclrtFreeHost: the source of unfinished", SLOW)
def free_pinned_memory_under_a_queued_copy(runtime: Runtime) -> None:
    stream = runtime.stream()
    runtime.call("aclrtFreeHost", queue_upload(runtime, runtime.malloc(64), 64, stream))


@mistake("freed-in-use", "aclrtFree: gradOut of unfinished", SLOW)
def free_under_a_kernel_after_a_sync_that_timed_out(runtime: Runtime) -> None:
    stream, rig = runtime.stream(), Rig(runtime)
    rig.launch(stream)
    assert runtime.status("aclrtSynchronizeStreamWithTimeout", stream, 10) == 507046
    rig.close()


@mistake("redzone", "something wrote at byte", "kernel:1:overrun")
def kernel_writes_behind_its_output(runtime: Runtime) -> None:
    stream, rig = runtime.stream(), Rig(runtime)
    rig.launch(stream)
    runtime.call("aclrtSynchronizeStream", stream)


# Handles


@mistake("double-destroy", "aclDestroyTensor: tensor .* was destroyed before")
def destroy_a_tensor_twice(runtime: Runtime) -> None:
    handle = runtime.tensor(0, (4,), runtime.malloc(64))
    runtime.call("aclDestroyTensor", handle)
    runtime.call("aclDestroyTensor", handle)


@mistake("double-destroy", "aclDestroyBoolArray: bool_array")
def destroy_a_bool_array_twice(runtime: Runtime) -> None:
    handle = runtime.bool_array((True,))
    runtime.call("aclDestroyBoolArray", handle)
    runtime.call("aclDestroyBoolArray", handle)


@mistake("use-after-destroy", "stream .* was destroyed before")
def destroy_a_stream_twice(runtime: Runtime) -> None:
    handle = runtime.stream()
    runtime.call("aclrtDestroyStream", handle)
    runtime.call("aclrtDestroyStream", handle)


@mistake("double-destroy", "aclrtDestroyEvent: event")
def destroy_an_event_twice(runtime: Runtime) -> None:
    handle = runtime.pointer("aclrtCreateEvent")
    runtime.call("aclrtDestroyEvent", handle)
    runtime.call("aclrtDestroyEvent", handle)


@mistake("executor-reused", "was used up or destroyed before")
def destroy_an_executor_after_its_launch(runtime: Runtime) -> None:
    stream, rig = runtime.stream(), Rig(runtime)
    planned = rig.plan()
    rig.launch(stream, planned)
    runtime.call("aclDestroyAclOpExecutor", planned[1])


@mistake("use-after-destroy", "aclrtSynchronizeStream: stream")
def use_a_destroyed_stream(runtime: Runtime) -> None:
    handle = runtime.stream()
    runtime.call("aclrtDestroyStream", handle)
    runtime.call("aclrtSynchronizeStream", handle)


@mistake("use-after-destroy", "aclnnGroupNormBackward: tensor")
def plan_with_a_destroyed_tensor(runtime: Runtime) -> None:
    rig = Rig(runtime)
    runtime.call("aclDestroyTensor", rig.tensors["mean"])
    rig.plan()


@mistake("destroyed-before-launch", "mean was destroyed before phase 2")
def destroy_a_tensor_between_the_phases(runtime: Runtime) -> None:
    rig = Rig(runtime)
    planned = rig.plan()
    runtime.call("aclDestroyTensor", rig.tensors["mean"])
    rig.launch(runtime.stream(), planned)


@mistake("executor-reused", "was used up or destroyed before")
def launch_twice(runtime: Runtime) -> None:
    stream, rig = runtime.stream(), Rig(runtime)
    planned = rig.plan()
    rig.launch(stream, planned)
    runtime.call("aclrtSynchronizeStream", stream)
    rig.launch(stream, planned)


@mistake("wrong-executor", "the executor of aclnnGroupNormBackward")
def launch_with_the_executor_of_another_operator(runtime: Runtime) -> None:
    size, executor = Rig(runtime).plan()
    runtime.call("aclnnGridSampler2DBackward", runtime.malloc(size), size, executor, runtime.stream())


@mistake("unknown-handle", "0x1000 is not a stream")
def use_what_is_no_handle(runtime: Runtime) -> None:
    runtime.call("aclrtSynchronizeStream", 4096)


@mistake("double-register", "host memory is registered already")
def register_host_memory_twice(runtime: Runtime) -> None:
    data = np.zeros(64, np.uint8)
    for _ in range(2):
        runtime.call("aclrtHostRegisterV2", data.ctypes.data, data.nbytes, 0)


# Operands


@mistake("strides", "a stride is negative")
def tensor_with_a_negative_stride(runtime: Runtime) -> None:
    runtime.tensor(0, (4,), runtime.malloc(64), strides=(-1,))


@mistake("alignment", "is not a multiple of 32")
def tensor_at_an_odd_address(runtime: Runtime) -> None:
    runtime.tensor(0, (4,), runtime.malloc(64) + 16)


@mistake("host-pointer", "is no device address")
def tensor_at_a_host_address(runtime: Runtime) -> None:
    runtime.tensor(0, (4,), runtime.pinned(64).ctypes.data)


@mistake("null-data", "mean has elements but no address")
def tensor_without_an_address(runtime: Runtime) -> None:
    rig = Rig(runtime)
    rig.replace("mean", 0)
    rig.launch(runtime.stream())


@mistake("out-of-bounds", "gradOut needs 512 bytes")
def tensor_longer_than_its_memory(runtime: Runtime) -> None:
    rig = Rig(runtime)
    rig.replace("gradOut", runtime.malloc(64))
    rig.launch(runtime.stream())


@mistake("storage", "the view of mean reaches element 3, its storage has 2")
def view_longer_than_its_storage(runtime: Runtime) -> None:
    rig = Rig(runtime)
    rig.replace("mean", rig.addresses["gradOut"], strides=(2, 2), storage=(2,))
    rig.launch(runtime.stream())


@mistake("overlap", "gradGammaOut and gradBetaOut share memory")
def two_outputs_at_one_place(runtime: Runtime) -> None:
    rig = Rig(runtime)
    rig.replace("gradBetaOut", rig.addresses["gradGammaOut"])
    rig.launch(runtime.stream())


@mistake("overlap", "gradInput and input share memory")
def an_output_over_an_input(runtime: Runtime) -> None:
    rig = Rig(runtime)
    rig.replace("gradInput", rig.addresses["input"])
    rig.launch(runtime.stream())


@mistake("overlap", "aclnnSiluBackward: gradInput and self share memory")
def a_generated_operator_over_its_input(runtime: Runtime) -> None:
    block = runtime.malloc(KIB)
    launch_generated(runtime, [runtime.malloc(KIB), block, block], runtime.stream())


@mistake("padding", "gradBetaOut begins in the 32 bytes behind gradGammaOut")
def outputs_without_padding(runtime: Runtime) -> None:
    rig = Rig(runtime)
    block = runtime.malloc(KIB)
    rig.replace("gradGammaOut", block)
    rig.replace("gradBetaOut", block + 4 * SHAPES["gradGammaOut"][0])
    rig.launch(runtime.stream())


@mistake("workspace", "phase 1 asked for")
def workspace_smaller_than_asked_for(runtime: Runtime) -> None:
    size, executor = Rig(runtime).plan()
    runtime.call("aclnnGroupNormBackward", runtime.malloc(size), size - 1, executor, runtime.stream())


@mistake("out-of-bounds", "the workspace needs")
def workspace_smaller_than_its_size_says(runtime: Runtime) -> None:
    size, executor = Rig(runtime).plan()
    runtime.call("aclnnGroupNormBackward", runtime.malloc(size // 2), size, executor, runtime.stream())


@mistake("overlap", "the workspace and mean share memory")
def workspace_over_an_operand(runtime: Runtime) -> None:
    rig = Rig(runtime)
    size, executor = rig.plan()
    runtime.call("aclDestroyAclOpExecutor", executor)
    block = runtime.malloc(size)
    rig.replace("mean", block + size // 2 // 32 * 32)
    rig.workspace = block
    rig.launch(runtime.stream())


@mistake("unsafe-levels", "a level reaches key 16 of 16")
def levels_that_leave_the_keys(runtime: Runtime) -> None:
    call = MSDA.build()
    arrays = make_arrays(MSDA, call)
    starts = arrays["level_start_index"]
    assert starts is not None
    starts += 1
    Launch(runtime, MSDA, call, arrays).run(runtime.stream())


@mistake("undefined", "the shape of dqOut is wrong")
def an_output_shape_that_nobody_checks(runtime: Runtime) -> None:
    call = FLOYD.build()
    broken = call.with_outputs(dq=TensorMeta("float16", (1, 1, 16, 128, 64)))
    Launch(runtime, FLOYD, broken, make_arrays(FLOYD, call)).run(runtime.stream())


@mistake("undefined", "the dtype of softmaxMax is wrong")
def a_dtype_that_nobody_checks(runtime: Runtime) -> None:
    call = FLOYD.build()
    shape = call.tensor("softmax_max").shape
    broken = call.with_inputs(softmax_max=TensorMeta("float16", shape))
    Launch(runtime, FLOYD, broken, make_arrays(FLOYD, broken)).run(runtime.stream())


# Order, threads, devices


@mistake("race", "aclrtMemcpyAsync writes the destination .* while aclrtMemcpyAsync", SLOW)
def two_streams_use_one_buffer(runtime: Runtime) -> None:
    address = runtime.malloc(64)
    queue_upload(runtime, address, 64, runtime.stream())
    queue_upload(runtime, address, 64, runtime.stream())


@mistake("race", "reads the source .* writes it as gradInput", SLOW)
def host_copies_from_what_a_kernel_still_writes(runtime: Runtime) -> None:
    rig = Rig(runtime)
    rig.launch(runtime.stream())
    runtime.download(rig.addresses["gradInput"], 4)


@mistake("poisoned", "aclrtMemcpyAsync on a context that failed", FAULT)
def queue_work_on_a_context_known_to_have_failed(runtime: Runtime) -> None:
    stream, rig = runtime.stream(), Rig(runtime)
    rig.launch(stream)
    assert runtime.status("aclrtSynchronizeStream", stream) == 507015
    queue_upload(runtime, rig.addresses["mean"], 8, stream)


@mistake("poisoned", "aclnnGroupNormBackward on a context that failed", FAULT)
def plan_on_a_context_known_to_have_failed(runtime: Runtime) -> None:
    stream, rig = runtime.stream(), Rig(runtime)
    rig.launch(stream)
    assert runtime.status("aclrtSynchronizeStream", stream) == 507015
    rig.plan()


@mistake("wrong-thread", "phase 1 ran on another thread", "threads=strict")
def phases_on_two_threads(runtime: Runtime) -> None:
    stream, rig = runtime.stream(), Rig(runtime)
    planned = rig.plan()
    in_another_thread(runtime, lambda: rig.launch(stream, planned))


@mistake("wrong-thread", "another thread queued work on stream", "threads=strict")
def two_threads_on_one_stream(runtime: Runtime) -> None:
    stream = runtime.stream()
    queue_upload(runtime, runtime.malloc(64), 64, stream)
    in_another_thread(runtime, lambda: void(queue_upload(runtime, runtime.malloc(64), 64, stream)))


@mistake("wrong-device", "mean is on device 1, the context on 0", "ndev=2")
def operand_on_another_device(runtime: Runtime) -> None:
    rig = Rig(runtime)
    runtime.call("aclrtSetDevice", 1)
    foreign = runtime.malloc(KIB)
    runtime.call("aclrtSetDevice", 0)
    rig.replace("mean", foreign)
    rig.launch(runtime.stream())


@mistake("wrong-device", "the destination is on device 1, the context on 0", "ndev=2")
def copy_to_another_device(runtime: Runtime) -> None:
    runtime.call("aclrtSetDevice", 1)
    foreign = runtime.malloc(64)
    runtime.call("aclrtSetDevice", 0)
    queue_upload(runtime, foreign, 64, runtime.stream())


@mistake("no-context", "phase 1 without a device")
def plan_without_a_device(runtime: Runtime) -> None:
    rig = Rig(runtime)
    thread = threading.Thread(target=lambda: void(rig.plan()))
    thread.start()
    thread.join()


@mistake("determinism", "changes under queued work", SLOW)
def determinism_changes_under_a_kernel(runtime: Runtime) -> None:
    Rig(runtime).launch(runtime.stream())
    runtime.call("aclrtCtxSetSysParamOpt", DETERMINISTIC, 1)


@mistake("determinism", "changes between the phases of a launch")
def determinism_changes_between_the_phases(runtime: Runtime) -> None:
    Rig(runtime).plan()
    runtime.call("aclrtCtxSetSysParamOpt", DETERMINISTIC, 1)


def nothing_wrong(runtime: Runtime) -> None:
    """The control: what all others do right."""
    stream, rig = runtime.stream(), Rig(runtime)
    rig.launch(stream)
    runtime.call("aclrtSynchronizeStream", stream)
    rig.close()
    runtime.call("aclrtDestroyStream", stream)


def main(name: str) -> None:
    """Makes one mistake, or none."""
    runtime = Runtime(Installation(Path(os.environ["ASCEND_HOME_PATH"])))
    runtime.call("aclInit", None)
    runtime.call("aclrtSetDevice", 0)
    (MISTAKES[name].make if name in MISTAKES else nothing_wrong)(runtime)
