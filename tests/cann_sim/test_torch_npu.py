"""The unmodified torch_npu runs on the simulator: bring-up, memory, streams, its own bindings."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from tests.cann_sim.build import Installation
from tests.cann_sim.fixtures import Ended
from tests.cann_sim.report import HOST_OBJECTS

Run = Callable[..., Ended]

pytestmark = [pytest.mark.npu_sim, pytest.mark.slow, pytest.mark.usefixtures("torch_npu")]

TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}
ND, NCHW, NCDHW = 2, 0, 30


def probe(run_on_sim: Run, name: str, **options: Any) -> Ended:
    return run_on_sim("tests.cann_sim.torch_probes", name, with_torch=True, **options)


def answer(ended: Ended) -> Any:
    assert (ended.status, ended.report.violations()) == (0, []), ended
    return json.loads(ended.output.splitlines()[-1])


def arguments(record: dict[str, Any]) -> dict[str, Any]:
    return {argument["name"]: argument["value"] for argument in record["arguments"]}


def test_finds_the_devices(run_on_sim: Run) -> None:
    found = answer(probe(run_on_sim, "devices", plan="ndev=2; hbm_mb=256"))
    assert found == {"count": 2, "name": "Ascend910B2", "free": 256 * 2**20, "total": 256 * 2**20}


def test_copies_both_ways(run_on_sim: Run) -> None:
    assert answer(probe(run_on_sim, "copies")) == [True, True, True]


def test_has_streams_and_events(run_on_sim: Run) -> None:
    found = answer(probe(run_on_sim, "streams", plan="copy_ms=20"))
    assert found["handle"] > 0
    assert found["done"]
    assert found["ms"] >= 20


@pytest.mark.parametrize(("layout", "queue"), [("split", "0"), ("single", "1"), ("split", "2")])
def test_group_norm(
    run_on_sim: Run, install_cann_sim: Callable[..., Installation], layout: str, queue: str
) -> None:
    simulator = install_cann_sim(layout)
    ended = probe(run_on_sim, "group_norm", plan="record=1", installation=simulator, TASK_QUEUE_ENABLE=queue)
    for dtype, errors in answer(ended).items():
        assert max(errors) < TOLERANCE[dtype], (dtype, errors)
    plans = ended.report.records("plan")
    assert [arguments(plan)["gradOut"]["dtype"] for plan in plans] == [0, 1, 27]
    first = arguments(plans[0])
    assert list(first) == [
        *("gradOut", "input", "mean", "rstd", "gamma", "N", "C", "HxW", "group", "outputMask"),
        *("gradInput", "gradGammaOut", "gradBetaOut"),
    ]
    assert [first[name] for name in ("N", "C", "HxW", "group", "outputMask")] == [2, 6, 12, 3, [True] * 3]
    assert (first["gradOut"]["shape"], first["gradOut"]["format"]) == ([2, 6, 3, 4], NCHW)
    assert (first["mean"]["shape"], first["mean"]["format"], first["mean"]["storage"]) == ([2, 3], ND, [6])
    runs, launches = ended.report.records("run"), ended.report.records("launch")
    assert [run["executor"] for run in runs] == [launch["executor"] for launch in launches]
    assert {launch["status"] for launch in launches} == {0}
    counters = ended.report.counters()
    assert counters["plans.aclnnGroupNormBackward"] == counters["kernels.aclnnGroupNormBackward"] == 3
    assert not any(counters[name] for name in HOST_OBJECTS)


def test_grid_sampler_in_every_mode(run_on_sim: Run) -> None:
    ended = probe(run_on_sim, "grid_sampler", plan="record=1", TASK_QUEUE_ENABLE="0")
    found = answer(ended)
    assert len(found) == 18
    assert all(max(errors) < TOLERANCE["float32"] for errors in found.values()), found
    modes = [
        (values["interpolationMode"], values["paddingMode"], values["alignCorners"])
        for values in map(arguments, ended.report.records("plan"))
    ]
    assert modes == [(m, p, a) for m in range(3) for p in range(3) for a in (False, True)]


def test_floyd_hands_its_arguments_down(run_on_sim: Run) -> None:
    ended = probe(run_on_sim, "floyd", plan="record=1", TASK_QUEUE_ENABLE="0")
    shapes = answer(ended)
    assert shapes["dq"] == shapes["dk1"] == shapes["dv1"] == [1, 1, 16, 128, 32]
    assert shapes["dk2"] == shapes["dv2"] == [1, 1, 128, 128, 32]
    (plan,) = ended.report.records("plan")
    values = arguments(plan)
    assert values["attenMaskOptional"] is None
    assert values["scaleValue"] == 0.25
    assert values["query"]["format"] == NCDHW
    assert values["dv1Out"]["shape"] == [1, 1, 16, 128, 32]


def test_floyd_is_missing_before_cann_9(
    run_on_sim: Run, install_cann_sim: Callable[..., Installation]
) -> None:
    ended = probe(run_on_sim, "floyd", installation=install_cann_sim("split", "8.5.0"))
    assert ended.status == 1
    assert "aclnnFusedFloydAttentionGrad" in ended.errors


def test_says_what_phase_1_refused(run_on_sim: Run) -> None:
    text = answer(probe(run_on_sim, "refused_call", TASK_QUEUE_ENABLE="0"))
    assert "call aclnnGroupNormBackward failed" in text
    assert "gradOut has not N*C*HxW elements (error code 161002)" in text


def test_says_that_a_kernel_failed(run_on_sim: Run) -> None:
    ended = probe(run_on_sim, "failed_kernel", plan="kernel:1:507015", TASK_QUEUE_ENABLE="0")
    assert "507015" in ended.output, ended


def test_tells_out_of_memory(run_on_sim: Run) -> None:
    assert answer(probe(run_on_sim, "out_of_memory", plan="hbm_mb=64")) == ["out of memory", 2**20]


def test_recovers_from_one_failed_allocation(run_on_sim: Run) -> None:
    found = answer(probe(run_on_sim, "out_of_memory", plan="malloc:1:207001; hbm_mb=512"))
    assert found == [2**28, 2**20]


def test_its_memory_and_streams_serve_calls_through_ctypes(run_on_sim: Run) -> None:
    """Four threads, ten calls each, as the NPU backend makes them."""
    plan = "threads=strict; pageable=abort; copy_ms=1"
    ended = probe(run_on_sim, "hybrid", plan=plan, TASK_QUEUE_ENABLE="0")
    assert answer(ended) < TOLERANCE["float32"]
    counters = ended.report.counters()
    assert counters["kernels.aclnnGroupNormBackward"] == 40
    assert counters["pageable_async_copies"] == 0
    assert not any(counters[name] for name in HOST_OBJECTS)


@pytest.mark.parametrize(("name", "rule"), [("unmodelled", "trap"), ("host_touch", "host-touch")])
def test_is_held_to_the_rules(run_on_sim: Run, name: str, rule: str) -> None:
    ended = probe(run_on_sim, name)
    assert ended.status == -signal.SIGABRT
    (line,) = ended.report.violations()
    assert line.startswith(f"cann_sim: violation [{rule}]"), line


def test_torch_alone_does_not_start_without_cann() -> None:
    """Why every process sets TORCH_DEVICE_BACKEND_AUTOLOAD: torch loads an installed torch_npu, and fails."""
    environment = {"PATH": os.environ["PATH"], "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
    command = [sys.executable, "-c", "import torch"]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=300, check=False)
    assert done.returncode == 1
    assert b"torch_npu" in done.stderr
