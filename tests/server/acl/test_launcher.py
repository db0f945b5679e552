"""Both phases on the simulator, and what is left when any step of them fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
from tests.cann_sim.build import Installation
from tests.operators import FLOYD, GRID_SAMPLER, GROUP_NORM
from tests.server.acl.conftest import Rig

from npugrad.agreement import agreement
from npugrad.meta import CallMeta, TensorMeta
from npugrad.operator import OpRecord
from npugrad.ops import OPERATORS
from npugrad.products import Product
from npugrad_server.acl.faults import Action
from npugrad_server.acl.launcher import Launcher
from npugrad_server.acl.libraries import Cann, Loader, SymbolMissing
from npugrad_server.acl.runtime import AclError
from npugrad_server.acl.tensor import DeviceTensor, Handles

pytestmark = pytest.mark.npu_sim


def run(rig: Rig, record: OpRecord, call: CallMeta) -> dict[str, bytes]:
    """Plans, launches and waits; returns the content of every output that is not null."""
    tensors = rig.tensors(record, call)
    with rig.launcher.plan(record, call.attrs, tensors) as plan:
        workspace = rig.upload(bytes(plan.workspace_bytes)) if plan.workspace_bytes else 0
        plan.launch(workspace, rig.stream)
    rig.runtime.wait(rig.stream, time.monotonic() + 30)
    found = {}
    for param in record.outputs:
        tensor = tensors[param.name]
        if tensor is not None:
            found[param.name] = rig.sim.download(tensor.address, tensor.meta.nbytes)
    return found


@pytest.mark.parametrize("record", OPERATORS.values(), ids=OPERATORS)
def test_every_operator_runs_from_its_record(rig: Rig, record: OpRecord) -> None:
    call = next(record.samples(Product.ATLAS_A2)).call
    found = run(rig, record, call)
    inputs = record.make_inputs(call, np.random.default_rng(1))
    metas = {name: meta for name, meta in record.infer(call).items() if meta is not None}
    results = {n: np.frombuffer(found[n], m.dtype.numpy).reshape(m.shape) for n, m in metas.items()}
    judged = agreement(record, inputs, call.attrs, results)
    assert judged.ok, judged


def test_null_operands_and_null_masks_go_down_as_null(rig: Rig) -> None:
    run(rig, GROUP_NORM, GROUP_NORM.build(with_gamma=False, output_mask=(True, False, False)))
    call = GRID_SAMPLER.build()
    tensors = rig.tensors(GRID_SAMPLER, call)
    with rig.launcher.plan(GRID_SAMPLER, {**call.attrs, "output_mask": None}, tensors) as plan:
        assert plan.workspace_bytes == 0  # the vendor's source: null mask, nothing to do


def test_a_plan_that_is_not_launched_is_destroyed(rig: Rig) -> None:
    call = GROUP_NORM.build()
    with rig.launcher.plan(GROUP_NORM, call.attrs, rig.tensors(GROUP_NORM, call)) as plan:
        assert plan.workspace_bytes > 0
        assert rig.host_objects() == [8, 1, 1]
    assert rig.host_objects() == [0, 0, 0]


def test_what_the_caller_raises_between_the_phases_leaves_nothing(rig: Rig) -> None:
    call = GROUP_NORM.build()
    tensors = rig.tensors(GROUP_NORM, call)
    with (
        pytest.raises(MemoryError, match="no workspace"),
        rig.launcher.plan(GROUP_NORM, call.attrs, tensors),
    ):
        raise MemoryError("no workspace")


def test_a_plan_is_launched_once(rig: Rig) -> None:
    call = GROUP_NORM.build()
    tensors = rig.tensors(GROUP_NORM, call)
    with rig.launcher.plan(GROUP_NORM, call.attrs, tensors) as plan:
        workspace = rig.upload(bytes(plan.workspace_bytes))
        plan.launch(workspace, rig.stream)
        with pytest.raises(RuntimeError, match="not yet launched"):
            plan.launch(workspace, rig.stream)
    rig.runtime.wait(rig.stream, time.monotonic() + 30)


@pytest.mark.parametrize(
    ("plan", "code", "function", "subject"),
    [
        ("aclCreateTensor:1:null", 0, "aclCreateTensor", "grad_out"),
        ("aclCreateTensor:8:null", 0, "aclCreateTensor", "grad_beta"),
        ("aclCreateBoolArray:1:null", 0, "aclCreateBoolArray", "output_mask"),
        (
            "aclnnGroupNormBackwardGetWorkspaceSize:1:561101",
            561101,
            "aclnnGroupNormBackwardGetWorkspaceSize",
            "",
        ),
        ("aclnnGroupNormBackward:1:361001", 361001, "aclnnGroupNormBackward", ""),
    ],
)
def test_a_step_that_fails_leaves_no_handle_and_no_executor(
    rig: Rig, plan: str, code: int, function: str, subject: str
) -> None:
    call = GROUP_NORM.build()
    tensors = rig.tensors(GROUP_NORM, call)
    rig.sim.set_plan(plan)
    with (
        pytest.raises(AclError) as caught,
        rig.launcher.plan(GROUP_NORM, call.attrs, tensors) as planned,
    ):
        planned.launch(rig.upload(bytes(planned.workspace_bytes)), rig.stream)
    assert (caught.value.code, caught.value.function, caught.value.subject) == (code, function, subject)
    assert rig.host_objects() == [0, 0, 0]
    run(rig, GROUP_NORM, call)


def test_a_handle_that_cannot_be_destroyed_is_told_and_the_others_are_destroyed(rig: Rig) -> None:
    tensor = DeviceTensor(TensorMeta("float32", (2, 3)), rig.upload(bytes(24)))
    handles = Handles(rig.runtime, rig.cann.tensors)
    made = [handles.tensor(tensor), handles.tensor(tensor)]
    handles.attribute("bool_array", (True, False))
    rig.sim.set_plan("aclDestroyTensor:1:100000")
    with pytest.raises(AclError, match="aclDestroyTensor returned 100000"):
        handles.close()
    # The last one made is the first to go, and was refused; it is the only one that is left.
    assert rig.host_objects() == [1, 0, 0]
    handles.close()
    rig.sim.call("aclDestroyTensor", made[-1])


def test_a_refusal_has_number_function_and_text(rig: Rig) -> None:
    call = GROUP_NORM.build()
    rig.sim.set_plan("aclnnGroupNormBackwardGetWorkspaceSize:1:561101:msg=no room for it")
    with (
        pytest.raises(AclError, match="no room for it") as caught,
        rig.launcher.plan(GROUP_NORM, call.attrs, rig.tensors(GROUP_NORM, call)),
    ):
        pass
    assert "GetWorkspaceSize returned 561101 (the operator library failed" in str(caught.value)
    assert caught.value.fault.action is Action.INTERNAL


@pytest.mark.parametrize("plan", ["", "aclnnFusedFloydAttentionGradGetWorkspaceSize:1:561002"])
def test_the_executor_of_a_refusal_is_destroyed(rig: Rig, plan: str) -> None:
    """Generated interfaces hand one out before they check anything."""
    call = FLOYD.build()
    tensors = rig.tensors(FLOYD, call)
    if not plan:
        tensors["query"] = None
    rig.sim.set_plan(plan)
    destroyed = rig.sim.counter("calls.aclDestroyAclOpExecutor")
    with (
        pytest.raises(AclError, match="561002" if plan else "query is null"),
        rig.launcher.plan(FLOYD, call.attrs, tensors),
    ):
        pytest.fail("phase 1 refused, yet the block was run")
    assert rig.sim.counter("calls.aclDestroyAclOpExecutor") == destroyed + 1
    assert rig.host_objects() == [0, 0, 0]


def test_an_executor_that_cannot_be_destroyed_is_told_once_and_disturbs_nobody(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    call = GROUP_NORM.build()
    tensors = rig.tensors(GROUP_NORM, call)
    rig.sim.set_plan("aclDestroyAclOpExecutor:1-2:561000")
    leaked = []
    for failure in (nullcontext(), pytest.raises(MemoryError, match="no workspace")):
        with failure as expected, rig.launcher.plan(GROUP_NORM, call.attrs, tensors) as plan:
            leaked.append(plan._executor.value)
            if expected is not None:
                raise MemoryError("no workspace")
    (record,) = caplog.records
    assert "an executor may be leaked: aclDestroyAclOpExecutor returned 561000" in record.message
    assert rig.host_objects() == [0, 0, 2]  # the simulator refused to destroy them
    for handle in leaked:
        rig.sim.call("aclDestroyAclOpExecutor", handle)


def test_what_no_library_has_is_named_with_the_release_that_brings_it(
    rig: Rig, install_cann_sim: Callable[..., Installation]
) -> None:
    old = Cann(Loader([install_cann_sim("split", "8.5.0").libraries]))
    # Only what is asked for is looked at: the process has the newer simulator loaded under the same names.
    del old.libraries["libopapi_transformer.so"]
    launcher = Launcher(old, rig.runtime)
    reason = "aclnnFusedFloydAttentionGradGetWorkspaceSize is not in libopapi_nn.so"
    assert reason in launcher.missing(FLOYD)
    assert "expected CANN 9.0 or newer" in launcher.missing(FLOYD)
    assert launcher.missing(GROUP_NORM) == ""
    call = FLOYD.build()
    with (
        pytest.raises(SymbolMissing, match=r"expected CANN 9\.0"),
        launcher.plan(FLOYD, call.attrs, rig.tensors(FLOYD, call)),
    ):
        pass
