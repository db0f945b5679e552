from __future__ import annotations

import pytest

from npugrad_server.acceptance.report import STEPS_IN_ALL, StepCheck, Table
from npugrad_server.acceptance.step import StepLog
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


class Seen:
    def __init__(self) -> None:
        self.told: list[object] = []

    def progress(self, done: int, total: int, what: str) -> None:
        self.told.append((done, total, what))

    def checked(self, check: StepCheck) -> None:
        self.told.append(check)


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


def test_a_row_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="t: found a row of 1 cells; expected 2"):
        StepLog().table("t", ("x", "y"), [(1,)])
