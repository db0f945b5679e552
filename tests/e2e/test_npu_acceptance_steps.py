"""Steps of the acceptance against NPUs that misbehave: each has to notice what it is there for. SIMULATED."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.cann_sim.build import Installation
from tests.cann_sim.report import HOST_OBJECTS, write_plan
from tests.cann_sim.report import Report as SimulatorReport
from tests.fix_npu import npu_environment
from tests.operators import GRID_SAMPLER

from npugrad.products import Product
from npugrad_server.acceptance.report import StepCheck, StepReport
from npugrad_server.acceptance.rig import BenchSettings, Rig
from npugrad_server.acceptance.runner import run_steps
from npugrad_server.acceptance.step import Step
from npugrad_server.acceptance.steps import ladder, memory, round_trip, soak, timeout

pytestmark = [pytest.mark.npu_sim, pytest.mark.slow]

STRICT = "hbm_mb=192;threads=strict;pageable=abort"
"""Room for a call that takes long, and little enough to run out of it soon."""


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


class SimulatedNode:
    """A node with one simulated NPU.

    Attributes:
        saboteur: What goes wrong, and when.
        simulator: What the simulator says.
    """

    def __init__(self, folder: Path) -> None:
        self.saboteur = Saboteur(folder / "plan")
        self.simulator = SimulatorReport(folder / "report")

    def report_of(self, step: Step) -> StepReport:
        """Runs a step; afterwards no rule of the simulator may have been broken."""
        settings = BenchSettings(
            "npu:0", Product.ATLAS_A2, soak_s=4.0, simulated=True, start_timeout_s=60.0, arena_bytes=512 << 20
        )
        with Rig(settings) as rig:
            (report,) = run_steps(rig, [step], self.saboteur)
        assert self.simulator.violations() == []
        assert not self.saboteur.triggers, "the step never came to the point"
        return report

    def left(self) -> dict[str, int]:
        """Objects of CANN that a process which ended in an orderly way still had."""
        counters = self.simulator.counters()
        return {name: counters[name] for name in HOST_OBJECTS if counters[name]}


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


@pytest.fixture
def node(cann_sim: Installation, torch_npu: Path, tmp_path: Path) -> Iterator[SimulatedNode]:
    with _environment(npu_environment(cann_sim, tmp_path, STRICT)):
        yield SimulatedNode(tmp_path)


def failed(report: StepReport) -> list[str]:
    return [check.name for check in report.failures]


def test_what_cann_forks_neither_holds_up_the_ladder_nor_keeps_the_device(node: SimulatedNode) -> None:
    write_plan(node.saboteur.plan_path, f"{STRICT};helpers=1")
    for step in (ladder.STEP, round_trip.STEP):
        report = node.report_of(step)
        assert report.outcome == "passed", report


def test_a_device_without_memory_for_a_call_says_so_and_loses_nothing(node: SimulatedNode) -> None:
    report = node.report_of(memory.STEP)
    assert report.outcome == "passed", report
    assert node.simulator.counters()["errors.207001"] >= 4
    assert node.left() == {}
    (grown,) = report.tables
    assert [row[2] == "a result" for row in grown.rows] == [True] * (len(grown.rows) - 1) + [False]


def test_memory_that_does_not_come_back_is_noticed(node: SimulatedNode) -> None:
    node.saboteur.when("it is refused every time", "hbm_mb=128")
    report = node.report_of(memory.STEP)
    assert failed(report) == ["no device memory is lost"]
    assert "64.0 MiB less than before" in report.failures[0].found


def test_a_device_that_fails_instead_of_refusing_is_noticed(node: SimulatedNode) -> None:
    node.saboteur.when("a call that needs", "malloc:*:507899")
    report = node.report_of(memory.STEP)
    assert failed(report) == [
        "a call that the device has no memory for is refused",
        "the worker keeps running",
    ]
    assert "507899" in report.failures[0].found


def test_wrong_results_in_a_soak_are_found(node: SimulatedNode) -> None:
    node.saboteur.when(r"^\d+ calls$", "kernel:*:corrupt")  # one bit each: not always visible
    report = node.report_of(soak.STEP)
    assert failed(report) == ["every result is right"]
    assert ", 0 wrong" not in report.failures[0].found
    assert "tolerance" in report.failures[0].note


def test_a_device_that_fails_in_a_soak_ends_it(node: SimulatedNode) -> None:
    node.saboteur.when(r"^\d+ calls$", "kernel:3:507015")
    report = node.report_of(soak.STEP)
    assert failed(report) == ["every result is right", "one worker for all calls"]
    assert "507015" in report.failures[0].note


def test_a_long_call_is_cut_with_the_vendors_number(node: SimulatedNode) -> None:
    # Long enough that the small call after it has time under the same limit.
    node.saboteur.when(r"^growing a call", f"kernel.{GRID_SAMPLER.aclnn_name}:*:slow=2000")
    report = node.report_of(timeout.STEP)
    assert report.outcome == "passed", report
    (cut,) = [check for check in report.checks if check.name == "a call longer than its limit is ended"]
    assert "aclrtSynchronizeStreamWithTimeout returned 507046" in cut.found
