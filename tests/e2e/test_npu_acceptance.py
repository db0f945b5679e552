"""The acceptance command on a simulated NPU: it passes, and notices what is broken. All is SIMULATED."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest
from tests.cann_sim.build import Installation
from tests.cann_sim.report import Report as SimulatorReport
from tests.fix_npu import npu_environment

from npugrad.ops import OPERATORS
from npugrad_server.acceptance.report import Report, StepReport
from npugrad_server.acceptance.steps import STEPS

pytestmark = [pytest.mark.npu_sim, pytest.mark.slow, pytest.mark.timeout(900)]

SOAK_S = "20"
TIMEOUT_S = 840


@dataclass(frozen=True)
class Accepted:
    """An acceptance that has ended.

    Attributes:
        status: Its exit code.
        shown: What it printed.
        report: The JSON.
        page: The HTML.
        log: What workers and libraries printed.
        simulator: What the simulator saw.
    """

    status: int
    shown: str
    report: Report
    page: str
    log: str
    simulator: SimulatorReport

    def step(self, key: str) -> StepReport:
        """The report of a step."""
        return next(step for step in self.report.steps if step.key == key)

    def failed(self) -> dict[str, list[str]]:
        """Names of the failed checks by step."""
        return {
            step.key: [check.name for check in step.failures]
            for step in self.report.steps
            if step.outcome != "passed"
        }


class Accept(Protocol):
    """Runs the command on a simulated NPU."""

    def __call__(self, *flags: str, plan: str = "", installation: Installation | None = None) -> Accepted:
        """What came of it."""


@pytest.fixture
def accept(
    install_cann_sim: Callable[..., Installation], cann_sim: Installation, torch_npu: Path, tmp_path: Path
) -> Accept:
    """Give a function that runs the command and reads all that it leaves."""

    def run(*flags: str, plan: str = "", installation: Installation | None = None) -> Accepted:
        environment = {**os.environ, **npu_environment(installation or cann_sim, tmp_path, plan)}
        path = tmp_path / "out.json"
        command = [sys.executable, "-m", "npugrad_server", "acceptance", "--report", str(path), *flags]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=environment
        )
        assert done.returncode in (0, 1), done.stderr
        assert path.exists(), done.stdout + done.stderr
        return Accepted(
            done.returncode,
            done.stdout,
            Report.from_json(path.read_text()),
            path.with_suffix(".html").read_text(),
            path.with_suffix(".log").read_text(),
            SimulatorReport(tmp_path / "report"),
        )

    return run


def test_all_steps_pass_and_say_that_they_are_simulated(accept: Accept) -> None:
    found = accept("--device", "0", "--soak-s", SOAK_S)
    assert (found.status, found.failed()) == (0, {}), found.shown + found.log[-4000:]
    assert [step.key for step in found.report.steps] == [step.key for step in STEPS]
    assert all(step.checks and step.seconds > 0 for step in found.report.steps)
    assert found.report.ok
    assert found.report.simulated
    assert found.shown.count("SIMULATED: CANN is the simulation") == 2
    assert "ACCEPTED, SIMULATED: 11 of 11 steps passed" in found.shown
    assert "SIMULATED" in found.page
    assert all(step.title in found.page for step in STEPS)
    assert found.simulator.violations() == []
    print(*(f"{step.key} {step.seconds:.1f} s, {len(step.checks)} checks" for step in found.report.steps))


def test_a_quick_acceptance_is_one_in_part_and_says_what_it_leaves_out(accept: Accept) -> None:
    found = accept("--quick", "--steps", "0")
    assert (found.status, found.failed()) == (0, {}), found.shown
    assert "ACCEPTED IN PART, SIMULATED: 1 of 1 steps passed" in found.shown
    assert "left out: --quick: steps 1 (environment), 2 (round_trip), " in found.shown
    assert "Left out: --quick: steps 1 (environment)" in found.page
    (rungs,) = found.step("ladder").tables
    assert [row[0] for row in rungs.rows][:4] == [
        "load the runtime",
        "load the operator libraries",
        "aclInit",
        "find the devices",
    ]
    assert {row[1] for row in rungs.rows} == {"done"}
    assert "run fused_floyd_attention_grad" in found.page
    assert found.simulator.violations() == []
    left = ("executors", "tensors", "streams", "device_allocations", "pinned_allocations")
    assert not any(found.simulator.counters()[f"live.{name}"] for name in left)


def test_a_kernel_that_computes_wrongly_is_not_accepted(accept: Accept) -> None:
    plan = "kernel.aclnnGroupNormBackward:*:corrupt"
    found = accept("--steps", "environment,operators", plan=plan)
    assert found.status == 1
    assert not found.report.ok
    assert found.step("environment").outcome == "passed"
    names = found.failed()["operators"]
    # The same wrong kernel computes for the worker, for torch_npu's binding and in other formats.
    assert names
    assert all(name.startswith("group_norm_backward: ") for name in names)
    assert "FAILED  3 Operators" in found.shown
    assert "outside tolerance" in found.shown
    assert "NOT ACCEPTED, SIMULATED: 1 of 2 steps passed" in found.shown


def test_a_kernel_that_differs_once_is_not_deterministic(accept: Accept) -> None:
    # The first is the probe's; ten repeats without the option, and those with it, follow.
    found = accept("--steps", "5", plan="kernel.aclnnGroupNormBackward:15:corrupt:total")
    assert found.status == 1
    names = found.failed()["determinism"]
    assert names[0] == "group_norm_backward float32 diffusion: option on"
    assert all(name.startswith("group_norm_backward float32") for name in names)


def test_kernels_that_sum_in_any_order_pass_and_are_reported(accept: Accept) -> None:
    found = accept("--steps", "5", plan="")
    assert (found.status, found.failed()) == (0, {})
    rows = {row[0]: row for row in found.step("determinism").tables[0].rows}
    fixed, free = rows["grid_sampler_2d_backward float32 warp"][1:3]
    assert fixed == 1
    assert isinstance(free, int)
    assert free > 1


def test_other_codes_of_a_first_phase_are_told_by_constraint(accept: Accept) -> None:
    plan = "aclnnGridSampler2DBackwardGetWorkspaceSize:2+:561112"
    found = accept("--steps", "4", plan=plan)
    assert found.status == 1
    names = found.failed()["refusals"]
    assert "grid_sampler_2d_backward: legal: float16" in names
    assert "grid_sampler_2d_backward: grid.rank" in names
    assert all(name.startswith("grid_sampler_2d_backward: ") for name in names)
    verdicts = {
        row[1]: row[-1] for row in found.step("refusals").tables[0].rows if row[0] == names[0].split(":")[0]
    }
    assert verdicts["grid.rank"] == "DIFFER"


def test_a_first_phase_that_ends_its_process_costs_one_check(accept: Accept) -> None:
    # A worker is asked about fewer calls, so only the process of the first phases comes that far, once.
    found = accept("--steps", "4", plan="aclnnGridSampler2DBackwardGetWorkspaceSize:600:kill")
    assert found.status == 1
    (check,) = found.step("refusals").failures
    assert check.name.startswith("grid_sampler_2d_backward: ")
    assert "no code" in check.found
    assert "ended with status -9" in check.found


def test_a_device_that_does_not_open_fails_the_first_step_and_skips_the_others(accept: Accept) -> None:
    found = accept("--steps", "1,2,4", plan="aclrtSetDevice:*:507033")
    assert found.status == 1
    assert [step.outcome for step in found.report.steps] == ["failed", "skipped", "skipped"]
    assert all("507033" in step.error for step in found.report.steps)
    assert "SKIPPED  4 Refusals" in found.shown


def test_a_copy_that_changes_bytes_is_found(accept: Accept) -> None:
    found = accept("--steps", "2", plan="copy:20:corrupt")
    assert found.status == 1
    assert found.failed() == {"round_trip": found.failed()["round_trip"]}


def test_an_operator_that_an_old_cann_lacks_is_excused(
    accept: Accept, install_cann_sim: Callable[..., Installation]
) -> None:
    found = accept("--steps", "1,5", installation=install_cann_sim(cann="8.5.0", layout="single"))
    step = found.step("environment")
    excused = [check for check in step.checks if "predates the operator" in check.note]
    assert [check.name for check in excused] == [
        "aclnnFusedFloydAttentionGradGetWorkspaceSize is there",
        "aclnnFusedFloydAttentionGrad is there",
    ]
    assert (found.status, found.failed()) == (0, {}), found.shown
    determinism = found.step("determinism")
    assert not any("fused_floyd" in check.name for check in determinism.checks)
    # Each mode had workers of its own.
    assert "CANN 8.5.0 reads the option once" in determinism.notes[0]
    names = [check.name.partition(": ") for check in determinism.checks]
    refused = [name for name, _, what in names if what == "refused by a worker without it"]
    rows = {row[0]: row for row in determinism.tables[0].rows}
    assert (len(refused), len(rows)) == (15, 16)
    assert refused == [name for name, row in rows.items() if row[-1] != "not offered"]
    assert {name.split()[0] for name in refused} == set(OPERATORS) - {"fused_floyd_attention_grad"}
    fixed, free = rows["multi_scale_deformable_attention_grad float32 decoder"][1:3]
    assert fixed == 1
    assert isinstance(free, int)
    assert free > 1
