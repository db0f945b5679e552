"""Every rule of the simulator is broken once, and ends the process with a sentence that names it."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cann_sim.build import SOURCES
from tests.cann_sim.fixtures import Ended
from tests.cann_sim.scenarios import MISTAKES

Run = Callable[..., Ended]

pytestmark = pytest.mark.npu_sim

LATE = "copy_ms=1000; free_check=execution"


def violation(ended: Ended) -> tuple[str, str]:
    """Rule and sentence of the violation that ended a process."""
    assert ended.status == -signal.SIGABRT, ended
    lines = ended.report.violations()
    assert len(lines) == 1, ended
    assert lines[0] in ended.errors
    found = re.fullmatch(r"cann_sim: violation \[([a-z-]+)\]: (.*)", lines[0])
    assert found, lines
    return found[1], found[2]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_ends_the_process(run_on_sim: Run, name: str) -> None:
    mistake = MISTAKES[name]
    rule, sentence = violation(run_on_sim("tests.cann_sim", name, plan=mistake.plan))
    assert rule == mistake.rule, sentence
    assert re.search(mistake.sentence, sentence), sentence


def test_every_rule_is_broken_and_described() -> None:
    text = "".join(path.read_text() for path in SOURCES.glob("*/*.cpp"))
    text += (SOURCES / "model" / "handles.h").read_text()
    computed = {"out-of-bounds", "use-after-free", "double-destroy", "unknown-handle"}
    rules = set(re.findall(r'violation\(\s*"([a-z-]+)"', text)) | computed
    internal = {"kernel", "dtype"}  # mistakes of the simulator itself
    elsewhere = {"plan", "trap"}  # broken by other tests
    assert {mistake.rule for mistake in MISTAKES.values()} == rules - internal - elsewhere
    table = (
        (Path(__file__).parent / "README.md").read_text().partition("## Rules")[2].partition("## The plan")[0]
    )
    rows = re.findall(r"^\| ([a-z, -]+) \|", table, re.MULTILINE)
    assert {rule for row in rows for rule in row.split(", ")} - {"rule", "---"} == rules - internal


@pytest.mark.parametrize(
    "plan", ["", "threads=strict; pageable=abort", "ndev=2; kernel_ms=20; copy_ms=5; call_us=50"]
)
def test_what_is_right_passes(run_on_sim: Run, plan: str) -> None:
    ended = run_on_sim("tests.cann_sim", "nothing_wrong", plan=plan)
    assert (ended.status, ended.report.violations()) == (0, []), ended


def test_freed_memory_is_found_when_the_task_runs(run_on_sim: Run) -> None:
    ended = run_on_sim("tests.cann_sim", "free_under_a_queued_copy", plan=LATE)
    rule, sentence = violation(ended)
    assert rule == "use-after-free"
    assert re.search("the destination was freed before the task ran", sentence)


def test_pinned_memory_may_be_left_unguarded(run_on_sim: Run) -> None:
    mistake = "host_reads_a_result_before_it_was_told"
    ended = run_on_sim("tests.cann_sim", mistake, plan="pinned=real")
    assert (ended.status, ended.report.violations()) == (0, []), ended


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ("kernal_ms=5", 'there is no setting "kernal_ms"'),
        ("kernel_ms=fast", '"fast" is not a number'),
        ("kernels:1:507015", "neither an interface function nor malloc"),
        ("kernel:0:507015", "calls are counted from 1"),
        ("kernel:3-2:507015", "calls are counted from 1"),
        ("kernel:1:0", "0 is no error code"),
        ("kernel:1:explode", "is not a number"),
        ("kernel:1", "expected name=value or target:when:action"),
        ("kernel:1:hang:device=1", 'there is no option "device=1"'),
        ("kernel:1:507015:total", "total needs CANN_SIM_STATE"),
        ("threads=some", "expected strict or real"),
        ("ndev=17", "at most 16 devices"),
    ],
)
def test_a_plan_with_a_mistake_is_refused(run_on_sim: Run, plan: str, why: str) -> None:
    rule, sentence = violation(run_on_sim("tests.cann_sim", "nothing_wrong", plan=plan))
    assert rule == "plan"
    assert why in sentence
