from __future__ import annotations

import pytest

from npugrad_server.acceptance.report import Check, Table
from npugrad_server.acceptance.step import StepLog
from npugrad_server.acceptance.steps import STEPS, choose


def test_there_are_ten_steps_in_order_with_a_sentence_each() -> None:
    assert [step.number for step in STEPS] == list(range(1, 11))
    assert len({step.key for step in STEPS}) == 10
    for step in STEPS:
        assert step.about.endswith(".")
        assert len(step.about) <= 110
        assert step.title


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("", range(1, 11)), ("3", [3]), ("soak,1", [1, 8]), (" 10 , 2,2", [2, 10]), ("memory", [6])],
)
def test_steps_are_chosen_by_number_or_name(text: str, numbers: list[int]) -> None:
    assert [step.number for step in choose(text)] == list(numbers)


def test_an_unknown_step_is_refused_with_all_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"found step '11', 'sock'; expected some of 1 \(") as caught:
        choose("1,11,sock")
    assert all(step.key in str(caught.value) for step in STEPS)


class Seen:
    def __init__(self) -> None:
        self.told: list[object] = []

    def progress(self, done: int, total: int, what: str) -> None:
        self.told.append((done, total, what))

    def checked(self, check: Check) -> None:
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
    first, second = Check("a", True, "1", "1"), Check("b", False, "1", "None", "why")
    assert (log.checks, log.notes, log.ok) == ([first, second], ["n"], False)
    assert log.tables == [Table("t", ("x", "y"), ((1, 2.5), ("a", None)))]
    assert seen.told == [(1, 2, "half"), first, second]


def test_a_row_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="t: found a row of 1 cells; expected 2"):
        StepLog().table("t", ("x", "y"), [(1,)])
