"""What `make bench-kernels` measures: the workloads of the records that are raced, and what was promised.

In 16 bit torch 2.13 computes positions in the operands' type, which do not tell the pixels of a map of 256
apart, and ends with a segmentation fault or a broken heap there: in 16 bit it is asked for maps of 128 and
less only. Each peer has a process of its own, so that memory it damages is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.benchmarks.goals import Goal, at_least, at_most

from npugrad.operator import OpRecord
from npugrad.ops import OPERATORS
from npugrad.workloads import Workload

Goals = dict[str, Goal]

TORCH = "tests.benchmarks.torch_peer:TorchCall"
JAX = "tests.benchmarks.jax_peer:JaxCall"
DRAM, FMA = "DRAM roofline", "FMA roofline"
ERROR, MEMORY = "largest error", "extra memory"
PEERS = {"torch": TORCH, "jax": JAX}


@dataclass(frozen=True)
class Promise:
    """What is expected of an operator's kernel.

    Attributes:
        tolerances: By type, how far a peer's result may be from ours.
        goals: From workload and type, what was promised.
        compiled: Peers beside torch and JAX, for float32 alone.
    """

    tolerances: Mapping[str, float] = field(
        default_factory=lambda: {"float32": 1e-3, "float16": 1e-2, "bfloat16": 3e-2}
    )
    goals: Callable[[Workload, str], Goals] = lambda workload, dtype: {}
    compiled: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class KernelCase:
    """One call and whom it is measured against.

    Attributes:
        operator: Name of the operator.
        name: Sizes, for a person.
        dtype: Element type of the data.
        sizes: Keywords of the record's `build`.
        pattern: How operands lie that are not drawn as samples are; see `tests.benchmarks.operands`.
        peers: By name, the subject ("module:class") that makes the same call in a process of its own.
        flops: Floating-point operations that the formula needs; 0 where memory is the limit.
        tolerance: How far a peer's result may be from ours; see `tests.benchmarks.contestant.difference`.
        goals: By peer, for the peer's time over ours. By roofline, for our time over the roofline's. `ERROR`:
            for max|e| / max|g| of each result against the float64 reference. `MEMORY`: for torch's extra
            memory over ours. Without the last two, error and memory are not measured.
    """

    operator: str
    name: str
    dtype: str
    sizes: Mapping[str, Any]
    pattern: str = ""
    peers: Mapping[str, str] = field(default_factory=lambda: {"torch": TORCH})
    flops: float = 0.0
    tolerance: float = 1e-3
    goals: Mapping[str, Goal] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.operator} {self.name}"

    @property
    def roofline(self) -> str:
        return FMA if self.flops else DRAM

    @property
    def question(self) -> dict[str, Any]:
        """The case as a contestant is told it."""
        return {
            "operator": self.operator,
            "dtype": self.dtype,
            "sizes": dict(self.sizes),
            "pattern": self.pattern,
            "flops": self.flops,
        }


def _floyd(workload: Workload, dtype: str) -> Goals:
    """Limit: the multipliers. torch runs ten batches of products over tensors of scores, which leave the
    caches; ours computes products that share a factor together. In bfloat16 torch has instructions of twice
    the rate. Expected before the first run: 2.5 to 4 in float32, 1 to 2 in bfloat16.
    """
    is_large = workload.name == "B1 H1 384^3 D32"
    if dtype != "float32":
        return {"torch": at_least(2.0 if is_large else 1.0, 2.0)}
    goals = {"torch": at_least(2.5, 5.0), ERROR: at_most(2e-6)}
    return {**goals, MEMORY: at_least(4.0, 6.0)} if is_large else goals


def _grid_sampler(workload: Workload, dtype: str) -> Goals:
    """Limit: loads and stores at the four corners of each point. torch goes point by point through the
    channels, and takes a thread for each image. Expected before the first run: 4 to 9 with 64 channels and
    more, less with 3, whose points cost as much as their channels.
    """
    if not workload.pattern:
        return {}
    if dtype != "float32":
        return {"torch": at_least(4.0, 8.0)}
    if workload.sizes["c"] == 3:
        goal = at_least(1.5, 3.0)
    else:
        goal = at_least(3.0, 6.0) if workload.sizes["n"] == 1 else at_least(4.0, 8.0)
    return {"torch": goal, ERROR: at_most(5e-7)}


def _grid_sampler_3d(workload: Workload, dtype: str) -> Goals:
    """Limit: memory, which volumes of more voxels than points are read and written through; loads and stores
    at the eight corners of each point. torch goes point by point and channel by channel. Expected before the
    first run: 8 and more; half of that for the nearest voxel, where both mostly write input_grad.
    """
    return {"torch": at_least(8.0, 10.0), ERROR: at_most(5e-7)}


def _group_norm(workload: Workload, dtype: str) -> Goals:
    """Limit: memory. torch reads the operands twice and writes intermediate sums. Small maps lie in the
    caches; what reaches there is shown, but nothing was promised. Expected before the first run: 4 to 5 in
    float32, more in 16 bit, whose sums torch rounds on its way; 0.6 to 0.8 of the roofline, which writes into
    memory that is there, where our fresh result has its pages cleared first.
    """
    is_small = workload.name == "64x64x8x8 G8"
    if dtype != "float32":
        return {} if is_small else {"torch": at_least(4.0, 8.0)}
    if is_small:
        return {ERROR: at_most(1e-6)}
    return {"torch": at_least(4.0, 5.0), DRAM: at_most(1.6, 1.3), ERROR: at_most(1e-6)}


def _layer_norm(workload: Workload, dtype: str) -> Goals:
    """Limit: memory. torch goes through each row several times, in the caches, and into fresh memory."""
    return {"torch": at_least(2.0, 2.5), **({ERROR: at_most(1e-6)} if dtype == "float32" else {})}


_COMPOSED = {"torch": at_least(10.0, 15.0)}
_BY_WORKLOAD = {
    "encoder 2x17821": {**_COMPOSED, "torch-ms-deform-attn": at_least(4.0, 5.0)},
    "BEV 40000": _COMPOSED,
    "decoder 2x300": {"torch-ms-deform-attn": at_least(2.0, 5.0)},
}


def _deformable_attention(workload: Workload, dtype: str) -> Goals:
    """Limit: the way to the caches. torch is the composition of grid_sample that models fall back to on a
    CPU, its backward pass alone; torch-ms-deform-attn has a compiled kernel for float32. Expected before the
    first run: 15 and more against the composition for the large cases, 4 to 6 against the compiled kernel;
    less for the decoder, whose time is mostly that of clearing grad_value.
    """
    if dtype != "float32":
        return {"torch": at_least(4.0, 8.0)}
    return {**_BY_WORKLOAD.get(workload.name, {}), ERROR: at_most(5e-7)}


# Where a gradient jumps, a point within rounding of a pixel falls into the next cell by other formulas than
# ours: a few such points of a large map are some hundredths of the norm. In 16 bit torch rounds positions to
# half a pixel or less: the work is the same, its results are far from ours, which are of widened coordinates.
_JUMPS_IN_16_BIT = {"float16": 0.5, "bfloat16": 1.5}
PROMISES: Mapping[str, Promise] = {
    "fused_floyd_attention_grad": Promise({"float32": 1e-3, "bfloat16": 3e-2}, _floyd),
    "grid_sampler_2d_backward": Promise({"float32": 5e-2, **_JUMPS_IN_16_BIT}, _grid_sampler),
    "grid_sampler_3d_backward": Promise({"float32": 5e-2}, _grid_sampler_3d),
    "group_norm_backward": Promise(goals=_group_norm),
    "layer_norm_backward": Promise(goals=_layer_norm),
    "multi_scale_deformable_attention_grad": Promise(
        {"float32": 1e-2, **_JUMPS_IN_16_BIT},
        _deformable_attention,
        {"torch-ms-deform-attn": "tests.benchmarks.torch_ms_deform_attn_peer:NativeCall"},
    ),
}


def all_cases() -> list[KernelCase]:
    """The cases of every operator, in the order of their names."""
    return [case for name in sorted(OPERATORS) for case in _cases(OPERATORS[name])]


def _cases(record: OpRecord) -> Iterator[KernelCase]:
    promise = PROMISES.get(record.name, Promise())
    flops = record.workloads.flops
    for dtype, tolerance in promise.tolerances.items():
        for workload in record.workloads.named.values():
            if dtype in workload.raced:
                yield KernelCase(
                    record.name,
                    workload.name,
                    dtype,
                    workload.sizes,
                    pattern=workload.pattern,
                    peers={**PEERS, **(promise.compiled if dtype == "float32" else {})},
                    flops=0.0 if flops is None else flops(workload.sizes),
                    tolerance=tolerance,
                    goals=promise.goals(workload, dtype),
                )
