"""Steps: which there are, what their logs keep, and that they run one after the other however each ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
from tests.server.acceptance.conftest import Seen

from npugrad import get_operator
from npugrad_server.acceptance.job import make_job
from npugrad_server.acceptance.limits import Limits
from npugrad_server.acceptance.link import DeviceGone
from npugrad_server.acceptance.report import STEPS_IN_ALL, StepCheck, Table
from npugrad_server.acceptance.rig import Rig
from npugrad_server.acceptance.runner import run_steps
from npugrad_server.acceptance.step import Step, StepLog, StepSkipped
from npugrad_server.acceptance.steps import STEPS, choose, select_steps


def test_there_are_eleven_steps_in_order_with_a_sentence_each() -> None:
    assert [step.number for step in STEPS] == list(range(11))
    assert len({step.key for step in STEPS}) == len(STEPS) == STEPS_IN_ALL
    for step in STEPS:
        assert step.about.endswith(".")
        assert len(step.about) <= 110
        assert step.title


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("", range(11)), ("3", [3]), ("soak,1", [1, 8]), (" 10 , 2,2", [2, 10]), ("memory", [6])],
)
def test_steps_are_chosen_by_number_or_name(text: str, numbers: list[int]) -> None:
    assert [step.number for step in choose(text)] == list(numbers)


def test_an_unknown_step_is_refused_with_all_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"found step '11', 'sock'; expected some of 0 \(") as caught:
        choose("1,11,sock")
    assert all(step.key in str(caught.value) for step in STEPS)


def test_a_quick_acceptance_says_what_it_leaves_out() -> None:
    whole = select_steps("", quick=False, soak_s=600)
    assert (whole.steps, whole.soak_s) == (STEPS, 600)
    assert not whole.left_out
    quick = select_steps("", quick=True, soak_s=600)
    assert {"ladder", "environment", "operators"} <= {step.key for step in quick.steps}
    assert quick.soak_s < 60
    steps, others = quick.left_out
    for step in STEPS:
        assert (f"{step.number} ({step.key})" in steps) is (step not in quick.steps)
    assert "realistic sizes" in others
    chosen = select_steps("soak", quick=True, soak_s=5)
    assert ([step.key for step in chosen.steps], chosen.soak_s) == (["soak"], 5)


def test_a_log_keeps_what_it_is_told_and_shows_it_at_once() -> None:
    seen = Seen()
    log = StepLog(seen)
    assert log.ok
    log.progress(1, 2, "half")
    assert log.check("a", True, 1, 1)
    assert not log.check("b", False, 1, None, "why")
    log.table("t", ["x", "y"], [[1, 2.5], ("a", None)])
    log.note("n")
    first, second = StepCheck("a", True, "1", "1"), StepCheck("b", False, "1", "None", "why")
    assert (log.checks, log.notes, log.ok) == ([first, second], ["n"], False)
    assert log.tables == [Table("t", ("x", "y"), ((1, 2.5), ("a", None)))]
    assert seen.told == [(1, 2, "half"), first, second]
    with pytest.raises(ValueError, match="t: found a row of 1 cells; expected 2"):
        log.table("t", ("x", "y"), [(1,)])


# ---------------------------------------------------------------------------------------- one by one


def step(key: str, run: Callable[[Rig, StepLog], object], *, needs_device: bool = True) -> Step:
    def work(rig: Rig, out: StepLog) -> None:
        run(rig, out)

    return Step(1, key, key.title(), f"{key}.", work, needs_device)


def outcomes(rig: Rig, *steps: Step, gone: str = "") -> list[tuple[str, str]]:
    return [(report.outcome, report.error) for report in run_steps(rig, steps, Seen(), gone=gone)]


def pass_(rig: Rig, out: StepLog) -> None:
    out.check("a", True, 1, 1)


GOOD, ALONE = step("good", pass_), step("alone", pass_, needs_device=False)
PASSED = ("passed", "")


def raising(error: BaseException) -> Step:
    def run(rig: Rig, out: StepLog) -> None:
        out.check("before", True, 1, 1)
        raise error

    return step("raising", run)


def test_what_a_step_finds_is_shown_and_reported(rig: Rig) -> None:
    def run(rig: Rig, out: StepLog) -> None:
        out.progress(0, 1, "half way")
        out.check("a", True, 1, 1)
        out.check("b", False, 1, 2)
        out.table("t", ("x",), [(1,)])
        out.note("n")

    seen = Seen()
    (report,) = run_steps(rig, [step("one", run)], seen)
    assert seen.told == ["one", (0, 1, "half way"), *report.checks, report]
    assert (report.outcome, report.error, report.notes) == ("failed", "", ("n",))
    assert [(check.name, check.ok) for check in report.checks] == [("a", True), ("b", False)]
    assert report.tables[0].rows == ((1,),)
    assert report.seconds >= 0


def test_a_step_that_checks_nothing_has_not_passed(rig: Rig) -> None:
    (outcome, words), good = outcomes(rig, step("idle", lambda rig, out: out.note("looked around")), GOOD)
    assert (outcome, good) == ("failed", PASSED)
    assert "nothing was checked" in words


def test_a_step_that_raises_fails_with_its_last_words_and_the_next_goes_on(rig: Rig) -> None:
    (failed, words), good = outcomes(rig, raising(ZeroDivisionError("one by zero")), GOOD)
    assert (failed, good) == ("failed", PASSED)
    assert words.splitlines()[-1] == "ZeroDivisionError: one by zero"
    assert "raise error" in words


def test_a_step_may_say_that_it_cannot_be_done_here(rig: Rig) -> None:
    assert outcomes(rig, raising(StepSkipped("no memory")), GOOD) == [("skipped", "no memory"), PASSED]


def test_a_step_begins_with_a_worker_of_the_benchs_own_settings(rig: Rig) -> None:
    pids: list[int] = []

    def change(rig: Rig, out: StepLog) -> None:
        rig.start(run_limit_s=50.0)
        pids.append(rig.pid)
        out.check("changed", True, 1, 1)

    def kill(rig: Rig, out: StepLog) -> None:
        pids.append(rig.pid)
        rig.stop(kill=True)
        out.check("killed", not rig.alive, True, rig.alive)

    def look(rig: Rig, out: StepLog) -> None:
        out.check("alive", rig.alive, True, rig.alive)
        pids.append(rig.pid)

    assert outcomes(rig, *(step(run.__name__, run) for run in (change, kill, look))) == [PASSED] * 3
    assert len(set(pids)) == 3


def test_a_device_that_is_gone_for_one_step_may_be_there_for_the_next(rig: Rig) -> None:
    assert outcomes(rig, raising(DeviceGone("asleep")), GOOD) == [("failed", "asleep"), PASSED]


def test_once_the_device_is_gone_what_needs_it_is_skipped(absent: Rig) -> None:
    (first, words), *others = outcomes(absent, GOOD, GOOD, ALONE)
    assert first == "failed"
    assert words.startswith("the device is gone: npu:0: ")
    assert others == [("skipped", words), PASSED]
    assert outcomes(absent, ALONE, GOOD, gone="no driver") == [PASSED, ("skipped", "no driver")]


def test_an_interrupt_ends_the_step_and_skips_all_of_the_rest(rig: Rig) -> None:
    found = outcomes(rig, raising(KeyboardInterrupt()), GOOD, ALONE)
    assert found == [("failed", "interrupted"), *[("skipped", "interrupted")] * 2]


def waiting_for_a_worker(rig: Rig, out: StepLog) -> None:
    """Waits for an answer that does not come, and for it again while it ends."""
    record = get_operator("group_norm_backward")
    pid = rig.pid
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    pending = rig.submit(make_job(record, record.build()))
    out.progress(0, 1, "waiting")
    try:
        pending()
    finally:
        pending()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGTERM, "interrupted by SIGTERM"),
        (signal.SIGINT, "interrupted by SIGINT"),
        (None, "took longer"),
    ],
)
def test_a_step_that_waits_for_ever_is_ended_by_a_signal_or_its_time(
    rig: Rig, number: signal.Signals | None, words: str
) -> None:
    """Whoever waits for the worker, even on the way out, gets an answer: the worker is killed first."""

    class Impatient(Seen):
        def progress(self, done: int, total: int, what: str) -> None:
            if number is not None:
                signal.raise_signal(number)

    rig.start()
    with Limits(step_s=1.0 if number is None else 600.0) as limits:
        limits.abandon = rig.abandon
        steps = [step("waiting", waiting_for_a_worker), GOOD]
        reports = run_steps(rig, steps, Impatient(), limits=limits)
        first = next(reports)
        limits.step_s = 600.0
        second = next(reports)
    assert first.outcome == "failed"
    assert words in first.error
    assert second.outcome == ("passed" if number is None else "skipped"), second.error


def test_an_interrupt_between_two_steps_ends_the_next_one(rig: Rig) -> None:
    class Interrupting(Seen):
        def started(self, step: Step) -> None:
            signal.raise_signal(signal.SIGTERM)

    with Limits(step_s=600.0) as limits:
        limits.begin()
        found = list(run_steps(rig, [GOOD, GOOD], Interrupting(), limits=limits))
    words = "interrupted by SIGTERM"
    assert [(one.outcome, one.error) for one in found] == [("failed", words), ("skipped", words)]


def test_when_all_the_time_is_over_nothing_more_begins(rig: Rig) -> None:
    with Limits(step_s=600.0, until_s=time.monotonic()) as limits:
        (report,) = run_steps(rig, [GOOD], Seen(), limits=limits)
    assert (report.outcome, report.error) == ("skipped", "the time for all steps together ran out")


@pytest.mark.parametrize(("ok", "outcome"), [(True, "skipped"), (False, "failed")])
def test_a_step_for_which_the_time_does_not_suffice_has_failed_by_its_checks_only(
    rig: Rig, ok: bool, outcome: str
) -> None:
    def look(rig: Rig, out: StepLog) -> None:
        out.check("a", ok, 1, 2)
        limits.until_s = time.monotonic()
        signal.raise_signal(signal.SIGUSR1)  # as whoever watches the time does

    with Limits(step_s=600.0, until_s=time.monotonic() + 600) as limits:
        (report,) = run_steps(rig, [step("slow", look)], Seen(), limits=limits)
    assert report.outcome == outcome
    assert ("cut short: the time for all steps" in report.error) is ok
    assert len(report.checks) == 1


def test_signals_are_given_back_and_can_be_ignored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Limits(step_s=1.0) as limits:
        with pytest.raises(KeyboardInterrupt, match="interrupted by SIGTERM"):
            signal.raise_signal(signal.SIGTERM)
        limits.ignore()
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
