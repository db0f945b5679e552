"""The NPU backend brought up in a real worker process on the simulated CANN: what is found, tried and told.

Everything here is SIMULATED; torch_npu is the unmodified one.
"""

from __future__ import annotations

import pytest
from tests.operators import GRID_SAMPLER, GROUP_NORM
from tests.server.backends.conftest import StartNpuWorker

from npugrad.ops import OPERATORS
from npugrad_server.worker.protocol import CallFailed, DeviceReady, OpenFailed

pytestmark = [pytest.mark.npu_sim, pytest.mark.slow]

NORM = GROUP_NORM.build(n=2, c=6, hxw=64, group=2)
PLAN_NORM, RUN_NORM = "aclnnGroupNormBackwardGetWorkspaceSize", "aclnnGroupNormBackward"


MISSING = ";".join(f"{record.aclnn_name}GetWorkspaceSize:*:561112" for record in OPERATORS.values())
UNOPENED = [
    ("aclrtSetDevice:*:507033", "cannot be taken: torch_npu returned 507033", "slowly"),
    ("aclrtSetDevice:*:507033:msg=driver", "[Error]: Failed to start the device. EE9999: ", "slowly"),
    ("aclrtSetDevice:*:507033:msg=driver", "aclrtSetDevice: driver", "slowly"),
    ("ndev=1", "found 1 NPU for torch_npu; expected npu:3 to be among them", "slowly"),
    ("soc=Ascend910_9589", "'Ascend910_9589', which is of the Ascend 950 family, which is not", "mended"),
    ("soc=Ascend910B", "chip 'Ascend910B', which is atlas-training; expected atlas-a2", "mended"),
    ("soc=Ascend910_9391", "which is atlas-a3; expected atlas-a2", "mended"),
    ("aclrtSetDevice:*:507054", "cannot be taken: torch_npu returned 507054", "never"),
    ("kernel:*:507015", "returned 507015", "soon"),
    (f"{PLAN_NORM}:*:207005", f"group_norm_backward: {PLAN_NORM} returned 207005", "slowly"),
    (f"{PLAN_NORM}:*:561000", "a tiny first call failed 2 times", "slowly"),
    (f"{RUN_NORM}:*:207001", f"group_norm_backward: {RUN_NORM} returned 207001", "slowly"),
    (MISSING, "no operator runs on this device: multi_scale_deformable_attention_grad: acl", "mended"),
    (MISSING, "aclnnMultiScaleDeformableAttentionGradGetWorkspaceSize returned 561112", "mended"),
]


@pytest.mark.parametrize(("plan", "words", "restart_policy"), UNOPENED)
def test_a_device_that_does_not_open_says_why(
    start_npu_worker: StartNpuWorker, plan: str, words: str, restart_policy: str
) -> None:
    worker = start_npu_worker(plan, ready=False, device="npu:3" if "npu:3" in words else "npu:0")
    said = worker.get(OpenFailed)
    assert words in said.message
    assert said.restart_policy == restart_policy
    assert not said.message.startswith("npu:")  # whoever tells it has the name before it
    assert worker.process.wait(10) == 1


@pytest.mark.parametrize("plan", [f"{PLAN_NORM}:1:561000", f"{RUN_NORM}:1-2:207005"])
def test_a_failure_that_passes_takes_no_operator_away(start_npu_worker: StartNpuWorker, plan: str) -> None:
    worker = start_npu_worker(plan, ready=False)
    ready = worker.get(DeviceReady)
    assert ready.unavailable == {}
    worker.check(GROUP_NORM, NORM)


def test_an_operator_whose_kernels_are_missing_is_not_available(start_npu_worker: StartNpuWorker) -> None:
    worker = start_npu_worker(f"{PLAN_NORM}:*:561112:msg=no package", ready=False)
    ready = worker.get(DeviceReady)
    assert list(ready.unavailable) == ["group_norm_backward"]
    reason = ready.unavailable["group_norm_backward"]
    assert reason.startswith(f"{PLAN_NORM} returned 561112 (")
    assert "no package" in reason
    failed = worker.ask(GROUP_NORM, NORM)
    assert isinstance(failed, CallFailed)
    assert failed.reason == "OPERATOR_UNSUPPORTED"
    assert failed.message == f"group_norm_backward: not available on this node: {reason}"
    worker.check(GRID_SAMPLER, GRID_SAMPLER.build())


def test_without_cann_what_was_tried_is_told(start_npu_worker: StartNpuWorker) -> None:
    nothing = {"ASCEND_HOME_PATH": "", "ASCEND_OPP_PATH": "", "LD_LIBRARY_PATH": ""}
    worker = start_npu_worker(ready=False, env=nothing)
    said = worker.get(OpenFailed)
    assert "libascendcl.so cannot be loaded, so there is no usable CANN here. Tried" in said.message
    assert said.restart_policy == "mended"


def test_a_torch_npu_that_does_not_load_is_told(
    start_npu_worker: StartNpuWorker,
) -> None:
    worker = start_npu_worker(ready=False, env={"ASCEND_OPP_PATH": "/nonexistent"})
    said = worker.get(OpenFailed)
    assert "torch_npu cannot be imported" in said.message
    assert "ASCEND_OPP_PATH=/nonexistent" in said.message
    assert said.restart_policy == "mended"


@pytest.mark.parametrize(("mode", "starts"), [("", False), ("1", False), ("0", True)])
def test_the_graph_engine_is_not_started_unless_the_user_says_so(
    start_npu_worker: StartNpuWorker, mode: str, starts: bool
) -> None:
    """torch_npu by itself starts it on this chip; it then sets options of the operator compiler."""
    worker = start_npu_worker(
        "soc=Ascend910A", product="atlas-training", env={"ACL_OP_INIT_MODE": mode} if mode else {}
    )
    assert (worker.report.counters()["calls.aclSetCompileopt"] > 0) is starts
