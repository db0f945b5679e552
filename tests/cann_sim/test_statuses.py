"""What phase 1 returns: the vendor's source as the records know it, and what no record can express."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from ctypes import byref, c_uint64, c_void_p
from typing import Any

import pytest
from tests.cann_sim.build import DEFAULT_CANN, generated_pages
from tests.cann_sim.operators import Arguments
from tests.cann_sim.runtime import SUCCESS, Runtime
from tests.cann_sim.test_operators import SOC
from tests.pages import Facts
from tests.summary import tally_of

from npugrad.dtypes import DType
from npugrad.meta import CallMeta, TensorMeta
from npugrad.operator import Constraint, OpRecord
from npugrad.ops import OPERATORS, get_operator

pytestmark = pytest.mark.npu_sim

FEW = 12
"""Samples of a generated operator: tables know no difference between any two."""
NULL, INVALID, TILING, FIND_KERNEL, INNER_NULL = 161001, 161002, 561002, 561003, 561103


@pytest.fixture
def block(runtime: Runtime) -> Iterator[int]:
    """Give the address of one small block, for every tensor of every call."""
    address = runtime.malloc(64)
    yield address
    runtime.call("aclrtFree", address)


def status(
    runtime: Runtime, record: OpRecord, call: CallMeta, block: int, legal: CallMeta | None = None
) -> int:
    runtime.set_plan(f"soc={SOC[call.product]}")
    return Arguments(runtime, record, call, block, legal).status()


def is_in_tables(page: Facts, record: OpRecord, constraint: Constraint) -> bool:
    """Whether the first phase of a generated operator checks it."""
    operand, _, kind = constraint.id.rpartition(".")
    c_names = {param.name: param.c_name for param in record.params}
    described = [param for param in page.params if param.c_name == c_names.get(operand)]
    return any({"not_null": True, "dtype": p.dtypes, "rank": p.ranks}.get(kind) for p in described)


@pytest.mark.parametrize("record", OPERATORS.values(), ids=OPERATORS)
def test_every_constraint_of_every_record(
    runtime: Runtime, block: int, record: OpRecord, pytestconfig: pytest.Config
) -> None:
    """Of generated operators, what their pages' tables say; by the page's code, not by the source's."""
    page = {page.name: page for page in generated_pages(DEFAULT_CANN)}.get(record.aclnn_name)
    unproved = [c for c in record.constraints if page and not is_in_tables(page, record, c)]
    if page:
        count = f"{len(record.constraints) - len(unproved)} constraints proved, {len(unproved)} unproved"
        tally_of(pytestconfig, "simulated CANN")(f"{record.name}, generated", count)
    for product, constraint in itertools.product(record.products, record.constraints):
        if constraint in unproved:
            continue
        expected, found = {}, {}
        samples = itertools.islice(record.samples(product), FEW if page else None)
        for sample in samples if constraint.applies(product) else ():
            broken = constraint.violate(sample.call)
            if broken is not None and not record.accepts_unchecked(broken):
                expected[sample.name] = constraint.code if page else constraint.vendor_status(broken)
                found[sample.name] = status(runtime, record, broken, block, sample.call)
        assert found == expected, (product, constraint.id)
        assert bool(expected) == constraint.applies(product), (product, constraint.id)
    assert runtime.counter("live.executors") == 0


def plan_status(runtime: Runtime, op: str, *arguments: Any) -> int:
    size, executor = c_uint64(), c_void_p()
    code = runtime.status(f"{op}GetWorkspaceSize", *arguments, byref(size), byref(executor))
    if executor.value:
        runtime.call("aclDestroyAclOpExecutor", executor)
    return code


@pytest.mark.parametrize(
    "name", ["group_norm_backward", "grid_sampler_2d_backward", "fused_floyd_attention_grad"]
)
def test_the_results_of_phase_1_must_not_be_null(runtime: Runtime, block: int, name: str) -> None:
    record = get_operator(name)
    for missing in range(2):
        arguments = Arguments(runtime, record, record.build(), block)
        size, executor = c_uint64(), c_void_p()
        results = [None if missing == place else byref(one) for place, one in enumerate((size, executor))]
        with arguments.handles:
            code = runtime.status(f"{record.aclnn_name}GetWorkspaceSize", *arguments.values(), *results)
        assert code == NULL, missing
        if executor.value:
            runtime.call("aclDestroyAclOpExecutor", executor)


def test_group_norm_takes_a_mask_of_another_length_for_invalid(runtime: Runtime, block: int) -> None:
    record = get_operator("group_norm_backward")
    arguments = Arguments(runtime, record, record.build(), block)
    mask = runtime.bool_array((True, True))
    with arguments.handles:
        values = arguments.values()
        values[9] = mask
        assert plan_status(runtime, record.aclnn_name, *values) == INVALID
    runtime.call("aclDestroyBoolArray", mask)


def test_grid_sampler_looks_at_nothing_without_a_mask(runtime: Runtime) -> None:
    nothing = (None, None, None, 99, -1, False, None, None, None)
    runtime.call("aclrtSetDevice", 0)
    assert plan_status(runtime, "aclnnGridSampler2DBackward", *nothing) == SUCCESS
    runtime.call("aclrtResetDevice", 0)


def test_grid_sampler_takes_bicubic_and_double_as_the_source_does(runtime: Runtime, block: int) -> None:
    record = get_operator("grid_sampler_2d_backward")
    bicubic = record.build().with_attrs(interpolation_mode=2)
    assert status(runtime, record, bicubic, block) == SUCCESS
    double = {
        name: TensorMeta(DType.FLOAT64, meta.shape) for name, meta in record.build().inputs.items() if meta
    }
    assert status(runtime, record, record.build().with_inputs(**double), block) == SUCCESS


def test_floyd_has_no_float_kernel(runtime: Runtime, block: int) -> None:
    record = get_operator("fused_floyd_attention_grad")
    call = record.build()
    floats = {name: TensorMeta(DType.FLOAT32, meta.shape) for name, meta in call.inputs.items() if meta}
    assert status(runtime, record, call.with_inputs(**floats), block) == FIND_KERNEL


def test_floyd_skips_when_every_output_is_empty(runtime: Runtime, block: int) -> None:
    record = get_operator("fused_floyd_attention_grad")
    call = record.build()
    empty = {param.name: TensorMeta(DType.FLOAT16, (0,)) for param in record.outputs}
    assert status(runtime, record, call.with_inputs(softmax_max=None).with_outputs(**empty), block) == SUCCESS
    some = {"dq": TensorMeta(DType.FLOAT16, (0,))}
    assert status(runtime, record, call.with_inputs(softmax_max=None).with_outputs(**some), block) == TILING


@pytest.mark.parametrize(
    ("name", "expected"),
    [("fused_floyd_attention_grad", FIND_KERNEL), ("multi_scale_deformable_attention_grad", INNER_NULL)],
)
def test_products_without_a_kernel(runtime: Runtime, block: int, name: str, expected: int) -> None:
    record = get_operator(name)
    runtime.set_plan("soc=Ascend910A")
    assert Arguments(runtime, record, record.build(), block).status() == expected
    assert "no kernel" in runtime.message()
    assert runtime.message() == ""


def test_group_norm_refuses_two_negative_sizes_late(runtime: Runtime, block: int) -> None:
    record = get_operator("group_norm_backward")
    call = record.build(n=1, c=4, hxw=3, group=1, with_gamma=False, output_mask=(True, False, False))
    negative = call.with_attrs(c=-4, hxw=-3)
    assert status(runtime, record, negative, block, call) == INNER_NULL


def test_a_workspace_is_wanted_unless_there_is_nothing_to_do(runtime: Runtime, block: int) -> None:
    for record in OPERATORS.values():
        arguments = Arguments(runtime, record, record.build(), block)
        with arguments.handles:
            size, executor = runtime.plan(record.aclnn_name, *arguments.values())
        assert size > 16 * 2**20, record.name
        runtime.call("aclDestroyAclOpExecutor", executor)


def test_an_empty_call_wants_no_workspace_and_runs_without(runtime: Runtime, block: int) -> None:
    record = get_operator("group_norm_backward")
    arguments = Arguments(runtime, record, record.build(n=0), block)
    stream = runtime.stream()
    with arguments.handles:
        size, executor = runtime.plan(record.aclnn_name, *arguments.values())
        assert size == 0
        before = runtime.counter("kernels.aclnnGroupNormBackward")
        runtime.call(record.aclnn_name, None, 0, executor, stream)
    runtime.call("aclrtSynchronizeStream", stream)
    assert runtime.counter("kernels.aclnnGroupNormBackward") == before
    runtime.call("aclrtDestroyStream", stream)


def test_phase_2_needs_an_executor_and_a_workspace(runtime: Runtime, block: int) -> None:
    record = get_operator("fused_floyd_attention_grad")
    stream = runtime.stream()
    assert runtime.status(record.aclnn_name, None, 0, None, stream) == NULL
    for size, expected in ((1, NULL), (0, INVALID)):  # the size is checked by this operator alone
        arguments = Arguments(runtime, record, record.build(), block)
        with arguments.handles:
            _, executor = runtime.plan(record.aclnn_name, *arguments.values())
            assert runtime.status(record.aclnn_name, None, size, executor, stream) == expected
        assert runtime.counter("live.executors") == 0  # consumed by the failure
    runtime.call("aclrtDestroyStream", stream)
