"""Mistakes, one function each: `python -m tests.cann_sim NAME` makes it, and must not live to tell.

The simulator is the one of ASCEND_HOME_PATH; device 0 is set. A function that returns was not caught.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tests.cann_sim.build import Installation
from tests.cann_sim.rig import Rig, queue_upload
from tests.cann_sim.runtime import D2H, H2D, Runtime

Scenario = Callable[[Runtime], None]

SCENARIOS: dict[str, Scenario] = {}
KIB = 1024


def scenario(function: Scenario) -> Scenario:
    """Registers a mistake under its name."""
    SCENARIOS[function.__name__] = function
    return function


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
def host_fills_a_staging_buffer_again_too_early(runtime: Runtime) -> None:
    address, stream, staging = runtime.malloc(64), runtime.stream(), runtime.pinned(64)
    runtime.call("aclrtMemcpyAsync", address, 64, staging.ctypes.data, 64, H2D, stream)
    assert staging[0] == 255  # to read it is no mistake
    staging[0] = 1


@scenario
def host_reads_a_result_before_it_was_told(runtime: Runtime) -> None:
    address, stream, result = runtime.upload(bytes(64)), runtime.stream(), runtime.pinned(64)
    runtime.call("aclrtMemcpyAsync", result.ctypes.data, 64, address, 64, D2H, stream)
    other = runtime.stream()
    runtime.call("aclrtSynchronizeStream", other)
    result.tobytes()


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
    stream, rig = runtime.stream(), Rig(runtime)
    rig.launch(stream)
    assert runtime.status("aclrtSynchronizeStreamWithTimeout", stream, 10) == 507046
    rig.close()


@scenario
def kernel_writes_behind_its_output(runtime: Runtime) -> None:
    stream, rig = runtime.stream(), Rig(runtime)
    rig.launch(stream)
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
    stream, rig = runtime.stream(), Rig(runtime)
    planned = rig.plan()
    rig.launch(stream, planned)
    runtime.call("aclDestroyAclOpExecutor", planned[1])


@scenario
def use_a_destroyed_stream(runtime: Runtime) -> None:
    handle = runtime.stream()
    runtime.call("aclrtDestroyStream", handle)
    runtime.call("aclrtSynchronizeStream", handle)


@scenario
def plan_with_a_destroyed_tensor(runtime: Runtime) -> None:
    rig = Rig(runtime)
    runtime.call("aclDestroyTensor", rig.tensors["mean"])
    rig.plan()


@scenario
def destroy_a_tensor_between_the_phases(runtime: Runtime) -> None:
    rig = Rig(runtime)
    planned = rig.plan()
    runtime.call("aclDestroyTensor", rig.tensors["mean"])
    rig.launch(runtime.stream(), planned)


@scenario
def launch_twice(runtime: Runtime) -> None:
    stream, rig = runtime.stream(), Rig(runtime)
    planned = rig.plan()
    rig.launch(stream, planned)
    runtime.call("aclrtSynchronizeStream", stream)
    rig.launch(stream, planned)


@scenario
def launch_with_the_executor_of_another_operator(runtime: Runtime) -> None:
    size, executor = Rig(runtime).plan()
    runtime.call("aclnnGridSampler2DBackward", runtime.malloc(size), size, executor, runtime.stream())


@scenario
def use_what_is_no_handle(runtime: Runtime) -> None:
    runtime.call("aclrtSynchronizeStream", 4096)


@scenario
def register_host_memory_twice(runtime: Runtime) -> None:
    data = np.zeros(64, np.uint8)
    for _ in range(2):
        runtime.call("aclrtHostRegisterV2", data.ctypes.data, data.nbytes, 0)


def main(name: str) -> None:
    """Makes one mistake."""
    runtime = Runtime(Installation(Path(os.environ["ASCEND_HOME_PATH"])))
    runtime.call("aclInit", None)
    runtime.call("aclrtSetDevice", 0)
    SCENARIOS[name](runtime)
