from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from npugrad_server.acceptance.link import DeviceGone
from npugrad_server.acceptance.runner import run_steps
from npugrad_server.acceptance.step import Step, StepSkipped

if TYPE_CHECKING:
    from collections.abc import Callable

    from npugrad_server.acceptance.bench import Bench
    from npugrad_server.acceptance.report import Check, StepReport
    from npugrad_server.acceptance.step import StepLog

pytestmark = pytest.mark.slow


class Seen:
    """Remembers what it is shown."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def started(self, step: Step) -> None:
        self.told.append(step.key)

    def finished(self, report: StepReport) -> None:
        self.told.append(report)

    def checked(self, check: Check) -> None:
        self.told.append(check.name)

    def progress(self, done: int, total: int, what: str) -> None:
        self.told.append(what)


def step(key: str, run: Callable[[Bench, StepLog], object], *, needs_device: bool = True) -> Step:
    def work(bench: Bench, out: StepLog) -> None:
        run(bench, out)

    return Step(1, key, key.title(), f"{key}.", work, needs_device)


def outcomes(bench: Bench, *steps: Step) -> list[tuple[str, str]]:
    return [(report.outcome, report.error) for report in run_steps(bench, steps, Seen())]


GOOD = step("good", lambda bench, out: out.check("a", True, 1, 1))


def raising(error: BaseException) -> Step:
    def run(bench: Bench, out: StepLog) -> None:
        out.check("before", True, 1, 1)
        raise error

    return step("raising", run)


def test_what_a_step_finds_is_shown_and_reported(bench: Bench) -> None:
    def run(bench: Bench, out: StepLog) -> None:
        out.progress(0, 1, "half way")
        out.check("a", True, 1, 1)
        out.check("b", False, 1, 2)
        out.table("t", ("x",), [(1,)])
        out.note("n")

    seen = Seen()
    (report,) = run_steps(bench, [step("one", run)], seen)
    assert seen.told == ["one", "half way", "a", "b", report]
    assert (report.outcome, report.error, report.notes) == ("failed", "", ("n",))
    assert [check.name for check in report.failures] == ["b"]
    assert report.tables[0].rows == ((1,),)
    assert report.seconds >= 0


def test_a_step_that_checks_nothing_has_not_passed(bench: Bench) -> None:
    idle = step("idle", lambda bench, out: out.note("looked around"))
    (outcome, words), good = outcomes(bench, idle, GOOD)
    assert (outcome, good) == ("failed", ("passed", ""))
    assert "nothing was checked" in words


def test_a_step_that_raises_fails_with_its_last_words_and_the_next_goes_on(bench: Bench) -> None:
    (failed, words), good = outcomes(bench, raising(ZeroDivisionError("one by zero")), GOOD)
    assert failed == "failed"
    assert words.splitlines()[-1] == "ZeroDivisionError: one by zero"
    assert "raise error" in words
    assert good == ("passed", "")


def test_a_step_may_say_that_it_cannot_be_done_here(bench: Bench) -> None:
    assert outcomes(bench, raising(StepSkipped("no memory")), GOOD) == [
        ("skipped", "no memory"),
        ("passed", ""),
    ]


def test_a_step_begins_with_a_worker_of_the_benchs_own_settings(bench: Bench) -> None:
    pids: list[int] = []

    def change(bench: Bench, out: StepLog) -> None:
        bench.start(run_limit_s=50.0)
        pids.append(bench.pid)
        out.check("changed", True, 1, 1)

    def kill(bench: Bench, out: StepLog) -> None:
        pids.append(bench.pid)
        bench.stop(kill=True)
        out.check("killed", not bench.alive, True, bench.alive)

    def look(bench: Bench, out: StepLog) -> None:
        out.check("alive", bench.alive, True, bench.alive)
        pids.append(bench.pid)

    found = outcomes(bench, *(step(run.__name__, run) for run in (change, kill, look)))
    assert found == [("passed", "")] * 3
    assert len(set(pids)) == 3


def test_a_device_that_is_gone_for_one_step_may_be_there_for_the_next(bench: Bench) -> None:
    assert outcomes(bench, raising(DeviceGone("asleep")), GOOD) == [("failed", "asleep"), ("passed", "")]


def test_once_the_device_is_gone_what_needs_it_is_skipped(make_bench: Callable[[str], Bench]) -> None:
    bench = make_bench("npu:0")  # these tests run where there is no CANN
    alone = step("alone", lambda bench, out: out.check("a", True, 1, 1), needs_device=False)
    (first, words), second, third = outcomes(bench, GOOD, GOOD, alone)
    assert first == "failed"
    assert words.startswith("the device is gone: npu:0: ")
    assert second == ("skipped", words)
    assert third == ("passed", "")


def test_an_interrupt_ends_the_step_and_skips_the_rest(bench: Bench) -> None:
    assert outcomes(bench, raising(KeyboardInterrupt()), GOOD) == [
        ("failed", "interrupted"),
        ("skipped", "interrupted"),
    ]
