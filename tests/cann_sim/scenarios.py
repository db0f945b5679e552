"""Mistakes, one function each: `python -m tests.cann_sim.scenarios NAME` makes it, and must not live to tell.

The simulator is the one of ASCEND_HOME_PATH; device 0 is set. A function that returns was not caught.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tests.cann_sim.bench import SHAPES, Bench, queue_upload
from tests.cann_sim.build import Installation
from tests.cann_sim.operators import Launch, make_arrays
from tests.cann_sim.runtime import D2H, DETERMINISTIC, H2D, Runtime

from npugrad.ops import get_operator
from npugrad.spec import TensorMeta

if TYPE_CHECKING:
    from collections.abc import Callable

    Scenario = Callable[[Runtime], None]

SCENARIOS: dict[str, Scenario] = {}
KIB = 1024


def scenario(function: Scenario) -> Scenario:
    """Registers a mistake under its name."""
    SCENARIOS[function.__name__] = function
    return function


def in_another_thread(runtime: Runtime, act: Callable[[], None]) -> None:
    def run() -> None:
        runtime.call("aclrtSetDevice", 0)
        act()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


# Memory


@scenario
def host_reads_device_memory(runtime: Runtime) -> None:
    ctypes.string_at(runtime.malloc(64), 1)


@scenario
def host_writes_device_memory(runtime: Runtime) -> None:
    ctypes.memset(runtime.malloc(64), 0, 64)


@scenario
def host_looks_into_a_handle(runtime: Runtime) -> None:
    ctypes.string_at(runtime.stream(), 8)


@scenario
def host_uses_pinned_memory_it_freed(runtime: Runtime) -> None:
    memory = runtime.pinned(64)
    runtime.call("aclrtFreeHost", memory.ctypes.data)
    memory[0] = 1


@scenario
def host_runs_over_the_end_of_pinned_memory(runtime: Runtime) -> None:
    ctypes.memset(runtime.pinned(64).ctypes.data, 0, 4 * KIB + 1)


@scenario
def copy_runs_over_the_end(runtime: Runtime) -> None:
    source = np.zeros(200, np.uint8)
    runtime.call("aclrtMemcpy", runtime.malloc(64), 200, source.ctypes.data, 200, H2D)


@scenario
def copy_to_freed_memory(runtime: Runtime) -> None:
    address = runtime.upload(bytes(64))
    runtime.call("aclrtFree", address)
    runtime.download(address, 64)


@scenario
def copy_with_the_wrong_kind(runtime: Runtime) -> None:
    source = np.zeros(64, np.uint8)
    runtime.call("aclrtMemcpy", runtime.malloc(64), 64, source.ctypes.data, 64, D2H)


@scenario
def queued_copy_from_pageable_memory(runtime: Runtime) -> None:
    source = np.zeros(64, np.uint8)
    runtime.call("aclrtMemcpyAsync", runtime.malloc(64), 64, source.ctypes.data, 64, H2D, runtime.stream())


@scenario
def free_twice(runtime: Runtime) -> None:
    address = runtime.malloc(64)
    runtime.call("aclrtFree", address)
    runtime.call("aclrtFree", address)


@scenario
def free_the_middle(runtime: Runtime) -> None:
    runtime.call("aclrtFree", runtime.malloc(64) + 32)


@scenario
def free_under_a_queued_copy(runtime: Runtime) -> None:
    address, stream = runtime.malloc(64), runtime.stream()
    queue_upload(runtime, address, 64, stream)
    runtime.call("aclrtFree", address)
    runtime.call("aclrtSynchronizeStream", stream)


@scenario
def free_pinned_memory_under_a_queued_copy(runtime: Runtime) -> None:
    stream = runtime.stream()
    runtime.call("aclrtFreeHost", queue_upload(runtime, runtime.malloc(64), 64, stream))


@scenario
def free_under_a_kernel_after_a_sync_that_timed_out(runtime: Runtime) -> None:
    stream, bench = runtime.stream(), Bench(runtime)
    bench.launch(stream)
    assert runtime.status("aclrtSynchronizeStreamWithTimeout", stream, 10) == 507046
    bench.close()


@scenario
def kernel_writes_behind_its_output(runtime: Runtime) -> None:
    stream, bench = runtime.stream(), Bench(runtime)
    bench.launch(stream)
    runtime.call("aclrtSynchronizeStream", stream)


# Handles


@scenario
def destroy_a_tensor_twice(runtime: Runtime) -> None:
    handle = runtime.tensor(0, (4,), runtime.malloc(64))
    runtime.call("aclDestroyTensor", handle)
    runtime.call("aclDestroyTensor", handle)


@scenario
def destroy_a_bool_array_twice(runtime: Runtime) -> None:
    handle = runtime.bool_array((True,))
    runtime.call("aclDestroyBoolArray", handle)
    runtime.call("aclDestroyBoolArray", handle)


@scenario
def destroy_a_stream_twice(runtime: Runtime) -> None:
    handle = runtime.stream()
    runtime.call("aclrtDestroyStream", handle)
    runtime.call("aclrtDestroyStream", handle)


@scenario
def destroy_an_event_twice(runtime: Runtime) -> None:
    handle = runtime.pointer("aclrtCreateEvent")
    runtime.call("aclrtDestroyEvent", handle)
    runtime.call("aclrtDestroyEvent", handle)


@scenario
def destroy_an_executor_after_its_launch(runtime: Runtime) -> None:
    stream, bench = runtime.stream(), Bench(runtime)
    planned = bench.plan()
    bench.launch(stream, planned)
    runtime.call("aclDestroyAclOpExecutor", planned[1])


@scenario
def use_a_destroyed_stream(runtime: Runtime) -> None:
    handle = runtime.stream()
    runtime.call("aclrtDestroyStream", handle)
    runtime.call("aclrtSynchronizeStream", handle)


@scenario
def plan_with_a_destroyed_tensor(runtime: Runtime) -> None:
    bench = Bench(runtime)
    runtime.call("aclDestroyTensor", bench.tensors["mean"])
    bench.plan()


@scenario
def destroy_a_tensor_between_the_phases(runtime: Runtime) -> None:
    bench = Bench(runtime)
    planned = bench.plan()
    runtime.call("aclDestroyTensor", bench.tensors["mean"])
    bench.launch(runtime.stream(), planned)


@scenario
def launch_twice(runtime: Runtime) -> None:
    stream, bench = runtime.stream(), Bench(runtime)
    planned = bench.plan()
    bench.launch(stream, planned)
    runtime.call("aclrtSynchronizeStream", stream)
    bench.launch(stream, planned)


@scenario
def launch_with_the_executor_of_another_operator(runtime: Runtime) -> None:
    size, executor = Bench(runtime).plan()
    runtime.call("aclnnGridSampler2DBackward", runtime.malloc(size), size, executor, runtime.stream())


@scenario
def use_what_is_no_handle(runtime: Runtime) -> None:
    runtime.call("aclrtSynchronizeStream", 4096)


@scenario
def register_host_memory_twice(runtime: Runtime) -> None:
    data = np.zeros(64, np.uint8)
    for _ in range(2):
        runtime.call("aclrtHostRegisterV2", data.ctypes.data, data.nbytes, 0)


# Operands


@scenario
def tensor_with_a_negative_stride(runtime: Runtime) -> None:
    runtime.tensor(0, (4,), runtime.malloc(64), strides=(-1,))


@scenario
def tensor_at_an_odd_address(runtime: Runtime) -> None:
    runtime.tensor(0, (4,), runtime.malloc(64) + 16)


@scenario
def tensor_at_a_host_address(runtime: Runtime) -> None:
    runtime.tensor(0, (4,), runtime.pinned(64).ctypes.data)


@scenario
def tensor_without_an_address(runtime: Runtime) -> None:
    bench = Bench(runtime)
    bench.replace("mean", 0)
    bench.launch(runtime.stream())


@scenario
def tensor_longer_than_its_memory(runtime: Runtime) -> None:
    bench = Bench(runtime)
    bench.replace("gradOut", runtime.malloc(64))
    bench.launch(runtime.stream())


@scenario
def view_longer_than_its_storage(runtime: Runtime) -> None:
    bench = Bench(runtime)
    bench.replace("mean", bench.addresses["gradOut"], strides=(2, 2), storage=(2,))
    bench.launch(runtime.stream())


@scenario
def two_outputs_at_one_place(runtime: Runtime) -> None:
    bench = Bench(runtime)
    bench.replace("gradBetaOut", bench.addresses["gradGammaOut"])
    bench.launch(runtime.stream())


@scenario
def an_output_over_an_input(runtime: Runtime) -> None:
    bench = Bench(runtime)
    bench.replace("gradInput", bench.addresses["input"])
    bench.launch(runtime.stream())


@scenario
def outputs_without_padding(runtime: Runtime) -> None:
    bench = Bench(runtime)
    block = runtime.malloc(KIB)
    bench.replace("gradGammaOut", block)
    bench.replace("gradBetaOut", block + 4 * SHAPES["gradGammaOut"][0])
    bench.launch(runtime.stream())


@scenario
def workspace_smaller_than_asked_for(runtime: Runtime) -> None:
    size, executor = Bench(runtime).plan()
    runtime.call("aclnnGroupNormBackward", runtime.malloc(size), size - 1, executor, runtime.stream())


@scenario
def workspace_smaller_than_its_size_says(runtime: Runtime) -> None:
    size, executor = Bench(runtime).plan()
    runtime.call("aclnnGroupNormBackward", runtime.malloc(size // 2), size, executor, runtime.stream())


@scenario
def workspace_over_an_operand(runtime: Runtime) -> None:
    bench = Bench(runtime)
    size, executor = bench.plan()
    runtime.call("aclDestroyAclOpExecutor", executor)
    block = runtime.malloc(size)
    bench.replace("mean", block + size // 2 // 32 * 32)
    bench.workspace = block
    bench.launch(runtime.stream())


@scenario
def levels_that_leave_the_keys(runtime: Runtime) -> None:
    spec = get_operator("multi_scale_deformable_attention_grad")
    call = spec.build()
    arrays = make_arrays(spec, call)
    starts = arrays["level_start_index"]
    assert starts is not None
    starts += 1
    Launch(runtime, spec, call, arrays).run(runtime.stream())


@scenario
def an_output_shape_that_nobody_checks(runtime: Runtime) -> None:
    spec = get_operator("fused_floyd_attention_grad")
    call = spec.build()
    broken = call.with_outputs(dq=TensorMeta("float16", (1, 1, 16, 128, 64)))
    Launch(runtime, spec, broken, make_arrays(spec, call)).run(runtime.stream())


@scenario
def a_dtype_that_nobody_checks(runtime: Runtime) -> None:
    spec = get_operator("fused_floyd_attention_grad")
    call = spec.build()
    shape = call.tensor("softmax_max").shape
    broken = call.with_inputs(softmax_max=TensorMeta("float16", shape))
    Launch(runtime, spec, broken, make_arrays(spec, broken)).run(runtime.stream())


# Order, threads, devices


@scenario
def two_streams_use_one_buffer(runtime: Runtime) -> None:
    address = runtime.malloc(64)
    queue_upload(runtime, address, 64, runtime.stream())
    queue_upload(runtime, address, 64, runtime.stream())


@scenario
def host_copies_from_what_a_kernel_still_writes(runtime: Runtime) -> None:
    bench = Bench(runtime)
    bench.launch(runtime.stream())
    runtime.download(bench.addresses["gradInput"], 4)


@scenario
def queue_work_on_a_context_known_to_have_failed(runtime: Runtime) -> None:
    stream, bench = runtime.stream(), Bench(runtime)
    bench.launch(stream)
    assert runtime.status("aclrtSynchronizeStream", stream) == 507015
    queue_upload(runtime, bench.addresses["mean"], 8, stream)


@scenario
def plan_on_a_context_known_to_have_failed(runtime: Runtime) -> None:
    stream, bench = runtime.stream(), Bench(runtime)
    bench.launch(stream)
    assert runtime.status("aclrtSynchronizeStream", stream) == 507015
    bench.plan()


@scenario
def phases_on_two_threads(runtime: Runtime) -> None:
    stream, bench = runtime.stream(), Bench(runtime)
    planned = bench.plan()
    in_another_thread(runtime, lambda: bench.launch(stream, planned))


@scenario
def two_threads_on_one_stream(runtime: Runtime) -> None:
    stream = runtime.stream()
    queue_upload(runtime, runtime.malloc(64), 64, stream)
    in_another_thread(runtime, lambda: void(queue_upload(runtime, runtime.malloc(64), 64, stream)))


@scenario
def operand_on_another_device(runtime: Runtime) -> None:
    bench = Bench(runtime)
    runtime.call("aclrtSetDevice", 1)
    foreign = runtime.malloc(KIB)
    runtime.call("aclrtSetDevice", 0)
    bench.replace("mean", foreign)
    bench.launch(runtime.stream())


@scenario
def copy_to_another_device(runtime: Runtime) -> None:
    runtime.call("aclrtSetDevice", 1)
    foreign = runtime.malloc(64)
    runtime.call("aclrtSetDevice", 0)
    queue_upload(runtime, foreign, 64, runtime.stream())


@scenario
def plan_without_a_device(runtime: Runtime) -> None:
    bench = Bench(runtime)
    thread = threading.Thread(target=lambda: void(bench.plan()))
    thread.start()
    thread.join()


@scenario
def determinism_changes_under_a_kernel(runtime: Runtime) -> None:
    Bench(runtime).launch(runtime.stream())
    runtime.call("aclrtCtxSetSysParamOpt", DETERMINISTIC, 1)


@scenario
def determinism_changes_between_the_phases(runtime: Runtime) -> None:
    Bench(runtime).plan()
    runtime.call("aclrtCtxSetSysParamOpt", DETERMINISTIC, 1)


@scenario
def nothing_wrong(runtime: Runtime) -> None:
    """The control: what all others do right."""
    stream, bench = runtime.stream(), Bench(runtime)
    bench.launch(stream)
    runtime.call("aclrtSynchronizeStream", stream)
    bench.close()
    runtime.call("aclrtDestroyStream", stream)


def void(_: object) -> None:
    """Makes a lambda return nothing."""


def main(name: str) -> None:
    """Makes one mistake."""
    runtime = Runtime(Installation(Path(os.environ["ASCEND_HOME_PATH"])))
    runtime.call("aclInit", None)
    runtime.call("aclrtSetDevice", 0)
    SCENARIOS[name](runtime)


if __name__ == "__main__":
    main(sys.argv[1])
