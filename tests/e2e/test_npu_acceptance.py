"""The acceptance on a simulated NPU: it passes, and each step notices what it is for. All is SIMULATED."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.cann_sim.build import DEFAULT_CANN, Installation
from tests.cann_sim.fixtures import template
from tests.cann_sim.report import HOST_OBJECTS, write_plan
from tests.cann_sim.report import Report as SimulatorReport
from tests.fix_npu import fork_program, npu_environment
from tests.operators import FLOYD, GRID_SAMPLER, GROUP_NORM, MSDA
from tests.server_program import forked_trials
from tests.worker_forks import forked_workers

from npugrad.operator import OpRecord
from npugrad.ops import OPERATORS
from npugrad.products import Product
from npugrad.releases import CannRelease
from npugrad_server.acceptance.report import Report, StepCheck, StepReport
from npugrad_server.acceptance.rig import BenchSettings, Rig
from npugrad_server.acceptance.runner import run_steps
from npugrad_server.acceptance.step import Step
from npugrad_server.acceptance.steps import (
    STEPS,
    determinism,
    environment,
    memory,
    operators,
    refusals,
    round_trip,
    soak,
    timeout,
)

pytestmark = [pytest.mark.npu_sim, pytest.mark.slow, pytest.mark.timeout(900)]

SOAK_S, TIMEOUT_S = "5", 840
STRICT = "hbm_mb=192;threads=strict;pageable=abort"
"""Room for a call that takes long, and little enough to run out of it soon."""


# ---------------------------------------------------------------------------------------- the command


@dataclass(frozen=True)
class Accepted:
    """An acceptance that has ended: its exit code, what it printed, its reports, and the simulator's."""

    status: int
    shown: str
    report: Report
    page: str
    log: str
    simulator: SimulatorReport


Accept = Callable[..., Accepted]


@pytest.fixture
def accept(cann_sim: Installation, torch_npu: Path, tmp_path: Path) -> Accept:
    """Give a function that runs the command, forked or as on hardware, and reads all that it leaves."""

    def run(*flags: str, plan: str = "", forked: bool = True) -> Accepted:
        environment, path = npu_environment(cann_sim, tmp_path, plan), tmp_path / "out.json"
        arguments = ["acceptance", "--report", str(path), *flags]
        with (tmp_path / "errors").open("w") as errors:
            process: Any = (
                fork_program(cann_sim, arguments, errors, environment)
                if forked
                else subprocess.Popen(
                    [sys.executable, "-m", "npugrad_server", *arguments],
                    env={**os.environ, **environment},
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
            )
            with process.stdout as stdout:
                shown = stdout.read()
            status = process.wait(TIMEOUT_S)
        assert status in (0, 1), (tmp_path / "errors").read_text()
        report, page, log = (path.with_suffix(end).read_text() for end in (".json", ".html", ".log"))
        return Accepted(
            status, shown, Report.from_json(report), page, log, SimulatorReport(tmp_path / "report")
        )

    return run


def failed(*reports: StepReport) -> dict[str, list[str]]:
    """Names of the failed checks, by step that did not pass."""
    return {one.key: [check.name for check in one.failures] for one in reports if one.outcome != "passed"}


@pytest.mark.long
def test_all_steps_pass_and_say_that_they_are_simulated(accept: Accept) -> None:
    found = accept("--device", "0", "--soak-s", SOAK_S)
    assert (found.status, failed(*found.report.steps)) == (0, {}), found.shown + found.log[-4000:]
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
    found = accept("--quick", "--steps", "0", forked=False)
    assert (found.status, failed(*found.report.steps)) == (0, {}), found.shown
    assert "ACCEPTED IN PART, SIMULATED: 1 of 1 steps passed" in found.shown
    assert "left out: --quick: steps 1 (environment), 2 (round_trip), " in found.shown
    assert "Left out: --quick: steps 1 (environment)" in found.page
    (rungs,) = found.report.steps[0].tables
    first = ["load the runtime", "load the operator libraries", "aclInit", "find the devices"]
    assert [row[0] for row in rungs.rows][:4] == first
    assert {row[1] for row in rungs.rows} == {"done"}
    assert "run fused_floyd_attention_grad" in found.page
    assert found.simulator.violations() == []
    left = ("executors", "tensors", "streams", "device_allocations", "pinned_allocations")
    assert not any(found.simulator.counters()[f"live.{name}"] for name in left)


def test_a_device_that_does_not_open_fails_the_first_step_and_skips_the_others(accept: Accept) -> None:
    found = accept("--steps", "1,2,4", plan="aclrtSetDevice:*:507033")
    assert found.status == 1
    assert [step.outcome for step in found.report.steps] == ["failed", "skipped", "skipped"]
    assert all("507033" in step.error for step in found.report.steps)
    assert "SKIPPED  4 Refusals" in found.shown


# ------------------------------------------------------------------------------------ single steps


class Saboteur:
    """Listens to a step, and puts a plan into force when the step comes to a point."""

    def __init__(self, plan_path: Path) -> None:
        self.plan_path = plan_path
        self.triggers: list[tuple[re.Pattern[str], str]] = []

    def when(self, point: str, plan: str) -> None:
        """At the first check or progress whose words match `point`."""
        self.triggers.append((re.compile(point), plan))

    def _look(self, text: str) -> None:
        for point, plan in list(self.triggers):
            if point.search(text):
                self.triggers.remove((point, plan))
                write_plan(self.plan_path, f"{STRICT};{plan}")

    def checked(self, check: StepCheck) -> None:
        self._look(check.name)

    def progress(self, done: int, total: int, what: str) -> None:
        self._look(what)

    def started(self, step: Step) -> None: ...

    def finished(self, report: StepReport) -> None: ...


class SomeOperators(Rig):
    """A rig whose product has some operators only."""

    def __init__(self, settings: BenchSettings, records: tuple[OpRecord, ...]) -> None:
        super().__init__(settings)
        self._records = records

    @property
    def offered(self) -> tuple[OpRecord, ...]:
        return self._records


class SimulatedNode:
    """A node with one simulated NPU.

    Attributes:
        saboteur: What goes wrong, and when.
        simulator: What the simulator says.
    """

    def __init__(self, folder: Path, cann: str) -> None:
        self.saboteur = Saboteur(folder / "plan")
        self.simulator = SimulatorReport(folder / "report")
        self._release = CannRelease.parse(cann)

    def report_of(self, step: Step, *records: OpRecord, plan: str = STRICT) -> StepReport:
        """Runs a step with some operators, or all; afterwards no rule of the simulator is broken."""
        write_plan(self.saboteur.plan_path, plan)
        settings = BenchSettings(
            "npu:0",
            Product.ATLAS_A2,
            release=self._release,
            soak_s=4.0,
            simulated=True,
            start_timeout_s=60.0,
            arena_bytes=512 << 20,
        )
        with SomeOperators(settings, records or tuple(OPERATORS.values())) as rig:
            (report,) = run_steps(rig, [step], self.saboteur)
        assert self.simulator.violations() == []
        assert not self.saboteur.triggers, "the step never came to the point"
        return report

    def left(self) -> dict[str, int]:
        """Objects of CANN that a process which ended in an orderly way still had."""
        counters = self.simulator.counters()
        return {name: counters[name] for name in HOST_OBJECTS if counters[name]}


@pytest.fixture
def cann() -> str:
    """Return the version of CANN; tests may have another."""
    return DEFAULT_CANN


@pytest.fixture
def node(
    install_cann_sim: Callable[..., Installation], torch_npu: Path, tmp_path: Path, cann: str
) -> Iterator[SimulatedNode]:
    layout = "split" if cann == DEFAULT_CANN else "single"
    installation = install_cann_sim(layout, cann)
    parent = template(installation, True)
    with pytest.MonkeyPatch.context() as patch, forked_workers(parent), forked_trials(parent):
        for name, value in npu_environment(installation, tmp_path).items():
            patch.setenv(name, value)
        yield SimulatedNode(tmp_path, cann)


def test_a_kernel_that_computes_wrongly_is_not_accepted(node: SimulatedNode) -> None:
    found = node.report_of(operators.STEP, GROUP_NORM, MSDA, plan="kernel.aclnnGroupNormBackward:*:corrupt")
    names = failed(found)["operators"]
    # The same wrong kernel computes for the worker, for torch_npu's binding and in other formats.
    assert names
    assert all(name.startswith("group_norm_backward: ") for name in names)
    assert any("outside tolerance" in check.found for check in found.failures)


def test_a_kernel_that_differs_once_is_not_deterministic(node: SimulatedNode) -> None:
    # The first is the probe's; ten repeats without the option, and those with it, follow.
    plan = "kernel.aclnnGroupNormBackward:15:corrupt:total"
    names = failed(node.report_of(determinism.STEP, GROUP_NORM, MSDA, plan=plan))["determinism"]
    assert names[0] == "group_norm_backward float32 diffusion: option on"
    assert all(name.startswith("group_norm_backward float32") for name in names)


def test_kernels_that_sum_in_any_order_pass_and_are_reported(node: SimulatedNode) -> None:
    found = node.report_of(determinism.STEP, GRID_SAMPLER, plan="")
    assert failed(found) == {}
    rows = {row[0]: row for row in found.tables[0].rows}
    fixed, free = rows["grid_sampler_2d_backward float32 warp"][1:3]
    assert fixed == 1
    assert isinstance(free, int)
    assert free > 1


def test_other_codes_of_a_first_phase_are_told_by_constraint(node: SimulatedNode) -> None:
    plan = "aclnnGridSampler2DBackwardGetWorkspaceSize:2+:561112"
    silu = OPERATORS["silu_backward"]  # generated: of it the simulator knows the page's tables
    found = node.report_of(refusals.STEP, GRID_SAMPLER, GROUP_NORM, silu, plan=plan)
    names = failed(found)["refusals"]
    assert "grid_sampler_2d_backward: legal: float16" in names
    assert "grid_sampler_2d_backward: grid.rank" in names
    assert all(name.startswith("grid_sampler_2d_backward: ") for name in names)
    verdicts = {row[:2]: row[-1] for row in found.tables[0].rows}
    assert verdicts[GRID_SAMPLER.name, "grid.rank"] == "DIFFER"
    assert verdicts[silu.name, "grad_output.dtype"] == "agree"
    assert verdicts[silu.name, "input.shape"] == "unproved"


def test_a_first_phase_that_ends_its_process_costs_one_check(node: SimulatedNode) -> None:
    # A worker is asked about fewer calls, so only the process of the first phases comes that far, once.
    plan = "aclnnGridSampler2DBackwardGetWorkspaceSize:600:kill"
    (check,) = node.report_of(refusals.STEP, GRID_SAMPLER, GROUP_NORM, plan=plan).failures
    assert check.name.startswith("grid_sampler_2d_backward: ")
    assert "no code" in check.found
    assert "ended with status -9" in check.found


def test_a_copy_that_changes_bytes_is_found(node: SimulatedNode) -> None:
    assert failed(node.report_of(round_trip.STEP, GROUP_NORM, plan="copy:20:corrupt"))["round_trip"]


@pytest.mark.parametrize("cann", ["8.5.0"])
def test_an_operator_that_an_old_cann_lacks_is_excused(node: SimulatedNode) -> None:
    step = node.report_of(environment.STEP, plan="")
    excused = [check for check in step.checks if "predates the operator" in check.note]
    assert [check.name for check in excused] == [
        "aclnnFusedFloydAttentionGradGetWorkspaceSize is there",
        "aclnnFusedFloydAttentionGrad is there",
    ]
    found = node.report_of(determinism.STEP, FLOYD, MSDA, plan="")
    assert failed(step, found) == {}
    assert not any("fused_floyd" in check.name for check in found.checks)
    # Each mode had workers of its own.
    assert "CANN 8.5.0 reads the option once" in found.notes[0]
    names = [check.name.partition(": ") for check in found.checks]
    refused = [name for name, _, what in names if what == "refused by a worker without it"]
    rows = {row[0]: row for row in found.tables[0].rows}
    assert refused == [name for name, row in rows.items() if row[-1] != "not offered"]
    assert {name.split()[0] for name in refused} == {MSDA.name}
    fixed, free = rows["multi_scale_deformable_attention_grad float32 decoder"][1:3]
    assert fixed == 1
    assert isinstance(free, int)
    assert free > 1


@pytest.mark.parametrize("cann", ["8.3.RC1"])
def test_operators_newer_than_cann_are_excused_although_it_has_their_functions(node: SimulatedNode) -> None:
    step = node.report_of(environment.STEP, plan="")
    assert failed(step) == {}
    assert any("expected CANN 8.5 to 9.2" in note for note in step.notes)


def test_what_cann_forks_neither_holds_up_the_ladder_nor_keeps_the_device(
    accept: Accept, tmp_path: Path
) -> None:
    # Not forked: what CANN forks is known by the environment that its process began with.
    found = accept("--steps", "0,2", plan=f"{STRICT};hbm_mb=384;helpers=1", forked=False)
    assert failed(*found.report.steps) == {}, found.shown
    assert found.simulator.violations() == []


def test_a_device_without_memory_for_a_call_says_so_and_loses_nothing(node: SimulatedNode) -> None:
    report = node.report_of(memory.STEP, GRID_SAMPLER)
    assert report.outcome == "passed", report
    assert node.simulator.counters()["errors.207001"] >= 4
    assert node.left() == {}
    (grown,) = report.tables
    assert [row[2] == "a result" for row in grown.rows] == [True] * (len(grown.rows) - 1) + [False]


def test_memory_that_does_not_come_back_is_noticed(node: SimulatedNode) -> None:
    node.saboteur.when("it is refused every time", "hbm_mb=128")
    report = node.report_of(memory.STEP, GRID_SAMPLER)
    assert failed(report) == {"memory": ["no device memory is lost"]}
    assert "64.0 MiB less than before" in report.failures[0].found


def test_a_device_that_fails_instead_of_refusing_is_noticed(node: SimulatedNode) -> None:
    node.saboteur.when("a call that needs", "malloc:*:507899")
    report = node.report_of(memory.STEP, GRID_SAMPLER)
    expected = ["a call that the device has no memory for is refused", "the worker keeps running"]
    assert failed(report) == {"memory": expected}
    assert "507899" in report.failures[0].found


def test_wrong_results_in_a_soak_are_found(node: SimulatedNode) -> None:
    node.saboteur.when(r"^\d+ calls$", "kernel:*:corrupt")  # one bit each: not always visible
    report = node.report_of(soak.STEP, GROUP_NORM, GRID_SAMPLER)
    assert failed(report) == {"soak": ["every result is right"]}
    assert ", 0 wrong" not in report.failures[0].found
    assert "tolerance" in report.failures[0].note


def test_a_device_that_fails_in_a_soak_ends_it(node: SimulatedNode) -> None:
    node.saboteur.when(r"^\d+ calls$", "kernel:3:507015")
    report = node.report_of(soak.STEP, GROUP_NORM, GRID_SAMPLER)
    assert failed(report) == {"soak": ["every result is right", "one worker for all calls"]}
    assert "507015" in report.failures[0].note


def test_a_long_call_is_cut_with_the_vendors_number(node: SimulatedNode) -> None:
    # Long enough that the small call after it has time under the same limit.
    node.saboteur.when(r"^growing a call", f"kernel.{GRID_SAMPLER.aclnn_name}:*:slow=1500")
    report = node.report_of(timeout.STEP, GROUP_NORM, GRID_SAMPLER)
    assert report.outcome == "passed", report
    (cut,) = [check for check in report.checks if check.name == "a call longer than its limit is ended"]
    assert "aclrtSynchronizeStreamWithTimeout returned 507046" in cut.found
