"""Both sides of each operator, run once a session, and the counts that the summary shows."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest
from tests.cann_sim.build import Installation
from tests.cann_sim.fixtures import REPOSITORY, inherited
from tests.cann_sim.report import HOST_OBJECTS, Report, leaks
from tests.congruence.combinations import Combination, combinations
from tests.summary import Tally, tally_of

from npugrad.ops import get_operator

TIMEOUT_S = 540
PLAN = "record=1; threads=strict; hbm_mb=4096; cann=9.2.0-beta.2; sums=ordered"


@dataclass(frozen=True)
class Answer:
    """What one side made of one combination.

    Attributes:
        case: The combination.
        plans: Records of phase 1, in order.
        error: What went wrong; empty when nothing did.
        digests: Digest of every wanted output.
    """

    case: Combination
    plans: Sequence[Mapping[str, Any]]
    error: str
    digests: Mapping[str, str]


class RunSides(Protocol):
    """Runs sides; see `run_sides`."""

    def __call__(self, operator: str, *sides: str) -> Mapping[str, Sequence[Answer]]:
        """The answers of each side, in the order of the combinations."""


@pytest.fixture(scope="session")
def run_sides(cann_sim: Installation, torch_npu: Path, tmp_path_factory: pytest.TempPathFactory) -> RunSides:
    """Give a function that runs all combinations of an operator on both sides at once, each in a process."""
    made: dict[tuple[str, ...], Mapping[str, Sequence[Answer]]] = {}

    def run(operator: str, *sides: str) -> Mapping[str, Sequence[Answer]]:
        key = (operator, *sides)
        if key not in made:
            made[key] = _run(cann_sim, tmp_path_factory.mktemp("congruence"), operator, sides)
        return made[key]

    return run


def _run(
    installation: Installation, folder: Path, operator: str, sides: Sequence[str]
) -> Mapping[str, Sequence[Answer]]:
    answers = {}
    with ExitStack() as stack:
        running = {side: _start(stack, installation, folder / side, side, operator) for side in sides}
        for side, process in running.items():
            status = process.wait(TIMEOUT_S)
            report = Report(folder / side / "report")
            errors = (folder / side / "errors").read_text()
            assert (status, report.violations()) == (0, []), errors[-4000:]
            left = leaks(report.counters())
            assert not any(name in left for name in HOST_OBJECTS), left
            answers[side] = _answers(folder / side / "output", report, operator)
    return answers


def _start(
    stack: ExitStack, installation: Installation, folder: Path, side: str, operator: str
) -> subprocess.Popen[bytes]:
    (folder / "report").mkdir(parents=True)
    environment = {
        **inherited(),
        **installation.environment({}),
        "CANN_SIM_PLAN": PLAN,
        "CANN_SIM_REPORT_DIR": str(folder / "report"),
        "TASK_QUEUE_ENABLE": "0",  # both phases on the calling thread, as the service has them
    }
    output = stack.enter_context((folder / "output").open("wb"))
    errors = stack.enter_context((folder / "errors").open("wb"))
    command = [sys.executable, "-m", "tests.congruence.sides", side, operator]
    process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=output, stderr=errors)
    stack.callback(process.wait, 10)
    stack.callback(process.kill)
    return process


def _answers(output: Path, report: Report, operator: str) -> Sequence[Answer]:
    op = get_operator(operator).aclnn_name
    plans = [plan for plan in report.records("plan") if plan["op"] == op]
    refused = [plan for plan in plans if plan["status"]]
    assert not refused, refused[0]
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    cases = list(combinations(operator))
    assert [line["name"] for line in lines] == [case.name for case in cases]
    assert not [name for name, times in Counter(case.name for case in cases).items() if times > 1]
    return [
        Answer(case, plans[slice(*line["plans"])], line["error"], line["digests"])
        for case, line in zip(cases, lines, strict=True)
    ]


@pytest.fixture(scope="session")
def tally(pytestconfig: pytest.Config) -> Tally:
    """Counts for the summary of the run."""
    return tally_of(pytestconfig, "congruence (SIMULATED)")
