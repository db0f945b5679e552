"""Mistakes with operands, order, threads and devices; see `scenarios`."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tests.cann_sim.operators import Launch, make_arrays
from tests.cann_sim.rig import SHAPES, Rig, queue_upload
from tests.cann_sim.runtime import DETERMINISTIC, Runtime
from tests.cann_sim.scenarios import KIB, scenario

from npugrad.meta import TensorMeta
from npugrad.ops import get_operator


def void(_: object) -> None:
    """Makes a lambda return nothing."""


def in_another_thread(runtime: Runtime, act: Callable[[], None]) -> None:
    def run() -> None:
        runtime.call("aclrtSetDevice", 0)
        act()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


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
    rig = Rig(runtime)
    rig.replace("mean", 0)
    rig.launch(runtime.stream())


@scenario
def tensor_longer_than_its_memory(runtime: Runtime) -> None:
    rig = Rig(runtime)
    rig.replace("gradOut", runtime.malloc(64))
    rig.launch(runtime.stream())


@scenario
def view_longer_than_its_storage(runtime: Runtime) -> None:
    rig = Rig(runtime)
    rig.replace("mean", rig.addresses["gradOut"], strides=(2, 2), storage=(2,))
    rig.launch(runtime.stream())


@scenario
def two_outputs_at_one_place(runtime: Runtime) -> None:
    rig = Rig(runtime)
    rig.replace("gradBetaOut", rig.addresses["gradGammaOut"])
    rig.launch(runtime.stream())


@scenario
def an_output_over_an_input(runtime: Runtime) -> None:
    rig = Rig(runtime)
    rig.replace("gradInput", rig.addresses["input"])
    rig.launch(runtime.stream())


@scenario
def outputs_without_padding(runtime: Runtime) -> None:
    rig = Rig(runtime)
    block = runtime.malloc(KIB)
    rig.replace("gradGammaOut", block)
    rig.replace("gradBetaOut", block + 4 * SHAPES["gradGammaOut"][0])
    rig.launch(runtime.stream())


@scenario
def workspace_smaller_than_asked_for(runtime: Runtime) -> None:
    size, executor = Rig(runtime).plan()
    runtime.call("aclnnGroupNormBackward", runtime.malloc(size), size - 1, executor, runtime.stream())


@scenario
def workspace_smaller_than_its_size_says(runtime: Runtime) -> None:
    size, executor = Rig(runtime).plan()
    runtime.call("aclnnGroupNormBackward", runtime.malloc(size // 2), size, executor, runtime.stream())


@scenario
def workspace_over_an_operand(runtime: Runtime) -> None:
    rig = Rig(runtime)
    size, executor = rig.plan()
    runtime.call("aclDestroyAclOpExecutor", executor)
    block = runtime.malloc(size)
    rig.replace("mean", block + size // 2 // 32 * 32)
    rig.workspace = block
    rig.launch(runtime.stream())


@scenario
def levels_that_leave_the_keys(runtime: Runtime) -> None:
    record = get_operator("multi_scale_deformable_attention_grad")
    call = record.build()
    arrays = make_arrays(record, call)
    starts = arrays["level_start_index"]
    assert starts is not None
    starts += 1
    Launch(runtime, record, call, arrays).run(runtime.stream())


@scenario
def an_output_shape_that_nobody_checks(runtime: Runtime) -> None:
    record = get_operator("fused_floyd_attention_grad")
    call = record.build()
    broken = call.with_outputs(dq=TensorMeta("float16", (1, 1, 16, 128, 64)))
    Launch(runtime, record, broken, make_arrays(record, call)).run(runtime.stream())


@scenario
def a_dtype_that_nobody_checks(runtime: Runtime) -> None:
    record = get_operator("fused_floyd_attention_grad")
    call = record.build()
    shape = call.tensor("softmax_max").shape
    broken = call.with_inputs(softmax_max=TensorMeta("float16", shape))
    Launch(runtime, record, broken, make_arrays(record, broken)).run(runtime.stream())


# Order, threads, devices


@scenario
def two_streams_use_one_buffer(runtime: Runtime) -> None:
    address = runtime.malloc(64)
    queue_upload(runtime, address, 64, runtime.stream())
    queue_upload(runtime, address, 64, runtime.stream())


@scenario
def host_copies_from_what_a_kernel_still_writes(runtime: Runtime) -> None:
    rig = Rig(runtime)
    rig.launch(runtime.stream())
    runtime.download(rig.addresses["gradInput"], 4)


@scenario
def queue_work_on_a_context_known_to_have_failed(runtime: Runtime) -> None:
    stream, rig = runtime.stream(), Rig(runtime)
    rig.launch(stream)
    assert runtime.status("aclrtSynchronizeStream", stream) == 507015
    queue_upload(runtime, rig.addresses["mean"], 8, stream)


@scenario
def plan_on_a_context_known_to_have_failed(runtime: Runtime) -> None:
    stream, rig = runtime.stream(), Rig(runtime)
    rig.launch(stream)
    assert runtime.status("aclrtSynchronizeStream", stream) == 507015
    rig.plan()


@scenario
def phases_on_two_threads(runtime: Runtime) -> None:
    stream, rig = runtime.stream(), Rig(runtime)
    planned = rig.plan()
    in_another_thread(runtime, lambda: rig.launch(stream, planned))


@scenario
def two_threads_on_one_stream(runtime: Runtime) -> None:
    stream = runtime.stream()
    queue_upload(runtime, runtime.malloc(64), 64, stream)
    in_another_thread(runtime, lambda: void(queue_upload(runtime, runtime.malloc(64), 64, stream)))


@scenario
def operand_on_another_device(runtime: Runtime) -> None:
    rig = Rig(runtime)
    runtime.call("aclrtSetDevice", 1)
    foreign = runtime.malloc(KIB)
    runtime.call("aclrtSetDevice", 0)
    rig.replace("mean", foreign)
    rig.launch(runtime.stream())


@scenario
def copy_to_another_device(runtime: Runtime) -> None:
    runtime.call("aclrtSetDevice", 1)
    foreign = runtime.malloc(64)
    runtime.call("aclrtSetDevice", 0)
    queue_upload(runtime, foreign, 64, runtime.stream())


@scenario
def plan_without_a_device(runtime: Runtime) -> None:
    rig = Rig(runtime)
    thread = threading.Thread(target=lambda: void(rig.plan()))
    thread.start()
    thread.join()


@scenario
def determinism_changes_under_a_kernel(runtime: Runtime) -> None:
    Rig(runtime).launch(runtime.stream())
    runtime.call("aclrtCtxSetSysParamOpt", DETERMINISTIC, 1)


@scenario
def determinism_changes_between_the_phases(runtime: Runtime) -> None:
    Rig(runtime).plan()
    runtime.call("aclrtCtxSetSysParamOpt", DETERMINISTIC, 1)


@scenario
def nothing_wrong(runtime: Runtime) -> None:
    """The control: what all others do right."""
    stream, rig = runtime.stream(), Rig(runtime)
    rig.launch(stream)
    runtime.call("aclrtSynchronizeStream", stream)
    rig.close()
    runtime.call("aclrtDestroyStream", stream)
