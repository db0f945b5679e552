"""What unmodified torch_npu does on the simulator, as JSON: `python -m tests.cann_sim.torch_probes NAME`."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch_npu  # noqa: F401  registers the device
from tests.cann_sim.build import Installation
from tests.cann_sim.rig import OP
from tests.cann_sim.runtime import D2H, H2D, Runtime

Tensor = torch.Tensor
Probe = Callable[[], Any]

PROBES: dict[str, Probe] = {}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
NPU: Any = torch.npu  # type: ignore[attr-defined]
OPS: Any = torch.ops


def probe(function: Probe) -> Probe:
    """Registers a probe under its name."""
    PROBES[function.__name__] = function
    return function


def put(tensor: Tensor) -> Tensor:
    """Copies to the device without running anything there."""
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="npu")
    made.copy_(tensor)
    return made


def errors(found: Sequence[Tensor], golden: Sequence[Tensor]) -> list[float]:
    """Largest error of each output over the largest golden value."""
    return [
        float((one.cpu().double() - other).abs().max() / other.abs().max())
        for one, other in zip(found, golden, strict=True)
    ]


@probe
def devices() -> dict[str, Any]:
    """Count, name, memory."""
    NPU.set_device(1)
    free, total = NPU.mem_get_info(1)
    return {"count": NPU.device_count(), "name": NPU.get_device_name(1), "free": free, "total": total}


@probe
def copies() -> list[bool]:
    """Pageable and pinned, waiting and not, there and back."""
    plain = torch.arange(1000, dtype=torch.int32)
    pinned = torch.empty(1000, dtype=torch.int32, pin_memory=True)
    pinned.copy_(plain)
    there = torch.empty(1000, dtype=torch.int32, device="npu")
    there.copy_(pinned, non_blocking=True)
    back = torch.empty(1000, dtype=torch.int32, pin_memory=True)
    back.copy_(there, non_blocking=True)
    NPU.synchronize()
    return [pinned.is_pinned(), torch.equal(back, plain), torch.equal(put(plain).cpu(), plain)]


@probe
def streams() -> dict[str, Any]:
    """A stream of one's own, and events with timing."""
    stream = NPU.Stream()
    first, last = NPU.Event(enable_timing=True), NPU.Event(enable_timing=True)
    data = torch.empty(1000, pin_memory=True)
    with NPU.stream(stream):
        first.record()
        torch.empty(1000, device="npu").copy_(data, non_blocking=True)
        last.record()
    stream.synchronize()
    return {"handle": stream.npu_stream, "done": last.query(), "ms": first.elapsed_time(last)}


def group_norm_arguments(dtype: torch.dtype, device: Callable[[Tensor], Tensor]) -> list[Any]:
    """Arguments of the backward operator, rounded to `dtype`."""
    torch.manual_seed(0)
    data, weight = torch.randn(2, 6, 3, 4), torch.randn(6)
    _, mean, rstd = torch.native_group_norm(data, weight, None, 2, 6, 12, 3, 1e-5)
    return [device(tensor.to(dtype)) for tensor in (torch.randn(2, 6, 3, 4), data, mean, rstd, weight)]


@probe
def group_norm() -> dict[str, list[float]]:
    """The native operator against itself on the CPU in float64."""
    run = OPS.aten.native_group_norm_backward
    sizes = (2, 6, 12, 3, [True, True, True])
    found = {}
    for name, dtype in DTYPES.items():
        golden = run(*group_norm_arguments(dtype, lambda tensor: tensor.double()), *sizes)
        found[name] = errors(run(*group_norm_arguments(dtype, put), *sizes), golden)
    return found


@probe
def grid_sampler() -> dict[str, list[float]]:
    """The native operator against itself on the CPU in float64, in every mode."""
    run = OPS.aten.grid_sampler_2d_backward
    found = {}
    torch.manual_seed(0)
    data, grid, grad = torch.randn(2, 3, 5, 7), torch.rand(2, 4, 3, 2) * 2.6 - 1.3, torch.randn(2, 3, 4, 3)
    for mode in range(3):
        for padding in range(3):
            for align in (False, True):
                options = (mode, padding, align, [True, True])
                golden = run(grad.double(), data.double(), grid.double(), *options)
                outputs = run(put(grad), put(data), put(grid), *options)
                kept = slice(0, 1) if mode == 1 else slice(0, 2)  # nearest has no gradient by the grid
                found[f"{mode}-{padding}-{align}"] = errors(outputs[kept], golden[kept])
    return found


@probe
def floyd() -> dict[str, list[int]]:
    """The binding of the Floyd operator; its numbers are compared elsewhere."""
    shapes = {"dq": (1, 1, 16, 128, 32), "k1": (1, 1, 16, 128, 32), "k2": (1, 1, 128, 128, 32)}
    q, k1, k2 = (put(torch.zeros(shape, dtype=torch.float16)) for shape in shapes.values())
    statistics = put(torch.ones(1, 1, 16, 128, 8))
    run = OPS.npu.npu_fused_floyd_attention_backward
    outputs = run(q, q, k1, k1, k2, k2, q, statistics, statistics, scale_value=0.25)
    NPU.synchronize()
    return {
        name: list(output.shape)
        for name, output in zip(("dq", "dk1", "dv1", "dk2", "dv2"), outputs, strict=True)
    }


@probe
def refused_call() -> str:
    """What torch_npu says when phase 1 refuses."""
    try:
        OPS.aten.native_group_norm_backward(
            *group_norm_arguments(torch.float32, put), 2, 6, 99, 3, [True] * 3
        )
    except RuntimeError as error:
        return str(error)
    return ""


@probe
def failed_kernel() -> str:
    """What torch_npu says when a kernel fails, and that the process can still end."""
    OPS.aten.native_group_norm_backward(*group_norm_arguments(torch.float32, put), 2, 6, 12, 3, [True] * 3)
    try:
        NPU.synchronize()
    except RuntimeError as error:
        return str(error)
    return ""


@probe
def out_of_memory() -> list[Any]:
    """An allocation too large, then one that fits."""
    seen: list[Any] = []
    for size in (2**28, 2**20):
        try:
            seen.append(torch.empty(size, dtype=torch.uint8, device="npu").numel())
        except torch.OutOfMemoryError:
            seen.append("out of memory")
    return seen


def hybrid_job(runtime: Runtime, raw: int, seed: int) -> float:
    """One GroupNorm call: memory and stream of torch_npu, everything that is queued through ctypes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"grad": (2, 6, 5), "data": (2, 6, 5), "mean": (2, 3), "rstd": (2, 3), "gamma": (6,)}
    host = {name: torch.rand(shape, generator=generator) + 0.5 for name, shape in sizes.items()}
    golden = OPS.aten.native_group_norm_backward(
        *(tensor.double() for tensor in host.values()), 2, 6, 5, 3, [True, True, True]
    )
    staged = {name: torch.empty(shape, pin_memory=True) for name, shape in sizes.items()}
    results = [torch.empty(tensor.shape, pin_memory=True) for tensor in golden]
    inputs = {name: torch.empty(shape, device="npu") for name, shape in sizes.items()}
    outputs = [torch.empty(tensor.shape, device="npu") for tensor in golden]
    for name, tensor in host.items():
        staged[name].copy_(tensor)
        size = 4 * tensor.numel()
        there = inputs[name].data_ptr()
        runtime.call("aclrtMemcpyAsync", there, size, staged[name].data_ptr(), size, H2D, raw)
    tensors = [runtime.tensor(0, tensor.shape, tensor.data_ptr()) for tensor in (*inputs.values(), *outputs)]
    mask = runtime.bool_array((True, True, True))
    size, executor = runtime.plan(OP, *tensors[:5], 2, 6, 5, 3, mask, *tensors[5:])
    workspace = torch.empty(size, dtype=torch.uint8, device="npu")
    runtime.call(OP, workspace.data_ptr(), size, executor, raw)
    for handle in tensors:
        runtime.call("aclDestroyTensor", handle)
    runtime.call("aclDestroyBoolArray", mask)
    for output, result in zip(outputs, results, strict=True):
        size = 4 * output.numel()
        runtime.call("aclrtMemcpyAsync", result.data_ptr(), size, output.data_ptr(), size, D2H, raw)
    runtime.call("aclrtSynchronizeStreamWithTimeout", raw, 10000)
    return max(errors(results, golden))


@probe
def hybrid() -> float:
    """Largest error of four threads that run such calls at once."""
    NPU.set_device(0)
    runtime = Runtime(Installation(Path(os.environ["ASCEND_HOME_PATH"])))
    found: list[float] = []

    def work(thread: int) -> None:
        NPU.set_device(0)
        stream = NPU.Stream()  # one for the thread: they come from a pool, in turn
        found.extend(hybrid_job(runtime, stream.npu_stream, 100 * thread + job) for job in range(10))

    threads = [threading.Thread(target=work, args=[thread]) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 40
    return max(found)


@probe
def unmodelled() -> float:
    """Arithmetic on the device, which nobody simulates."""
    data = put(torch.ones(4))
    return float((data + data).cpu().sum())


@probe
def host_touch() -> int:
    """Python reads device memory by its address."""
    import ctypes

    return ctypes.string_at(torch.empty(4, device="npu").data_ptr(), 1)[0]


if __name__ == "__main__":
    print(json.dumps(PROBES[sys.argv[1]]()))
