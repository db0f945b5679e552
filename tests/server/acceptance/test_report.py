from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npugrad_server.acceptance.report import (
    SCHEMA,
    STEPS_IN_ALL,
    Report,
    StepCheck,
    StepOutcome,
    StepReport,
    Table,
)
from npugrad_server.acceptance.steps import STEPS

text = st.text(max_size=20)
checks = st.builds(StepCheck, text, st.booleans(), text, text, text)
cells = st.one_of(text, st.integers(-(2**53), 2**53), st.floats(allow_nan=False), st.booleans(), st.none())


@st.composite
def tables(draw: st.DrawFn) -> Table:
    columns = draw(st.lists(text, min_size=1, max_size=3))
    row = st.tuples(*(cells for _ in columns))
    return Table(draw(text), tuple(columns), tuple(draw(st.lists(row, max_size=3))))


def tuples(elements: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(elements, max_size=3).map(tuple)


steps = st.builds(
    StepReport,
    st.integers(0, 10),
    text,
    text,
    st.sampled_from(("passed", "failed", "skipped")),
    st.floats(0, 1e6),
    tuples(checks),
    tuples(tables()),
    tuples(text),
    text,
)
reports = st.builds(
    Report, text, text, st.booleans(), st.dictionaries(text, text, max_size=3), tuples(steps), tuples(text)
)

PASSED = StepReport(1, "one", "One", "passed", 0.5)
REPORT = Report("0.1.0", "2026-01-02T03:04:05+00:00", True, {"chip": "Ascend910B2"}, (PASSED,))


def is_finite(report: Report) -> bool:
    rows = [row for step in report.steps for table in step.tables for row in table.rows]
    return "inf" not in json.dumps(rows).lower()


@given(reports.filter(is_finite))
def test_json_has_the_whole_report(report: Report) -> None:
    assert Report.from_json(report.to_json()) == report


def test_keys_come_in_their_documented_order() -> None:
    found = json.loads(REPORT.to_json())
    keys = ["schema", "ok", "simulated", "version", "started", "environment", "left_out", "steps"]
    assert list(found) == keys
    assert list(found["steps"][0]) == [
        "number",
        "key",
        "title",
        "outcome",
        "seconds",
        "checks",
        "tables",
        "notes",
        "error",
    ]
    assert found["schema"] == SCHEMA


def test_numbers_that_json_lacks_travel_as_text() -> None:
    table = Table("errors", ("a", "b"), ((float("inf"), float("nan")),))
    report = replace(REPORT, steps=(replace(PASSED, tables=(table,)),))
    assert Report.from_json(report.to_json()).steps[0].tables[0].rows == (("inf", "nan"),)


@pytest.mark.parametrize(
    ("outcomes", "ok"),
    [
        ((), False),
        (("passed",), True),
        (("passed", "failed"), False),
        (("passed", "skipped"), False),
        (("passed", "passed"), True),
    ],
)
def test_ok_means_that_every_step_passed(outcomes: tuple[StepOutcome, ...], ok: bool) -> None:
    made = replace(REPORT, steps=tuple(replace(PASSED, outcome=outcome) for outcome in outcomes))
    assert made.ok is ok
    assert json.loads(made.to_json())["ok"] is ok


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"schema": 2}, "found a report of schema 2; expected 1"),
        ({"steps": None}, "not a report"),
        ({"environment": []}, "not a report"),
        ({"steps": [{"outcome": "fine"}]}, "found outcome 'fine'"),
    ],
)
def test_what_is_no_report_is_refused(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Report.from_json(json.dumps(json.loads(REPORT.to_json()) | change))


def test_failures_are_the_checks_that_are_not_ok() -> None:
    good, bad = StepCheck("a", True, "1", "1"), StepCheck("b", False, "1", "2")
    assert replace(PASSED, checks=(good, bad)).failures == (bad,)


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        (["passed"] * STEPS_IN_ALL, "ACCEPTED"),
        (["passed"], "ACCEPTED IN PART"),
        (["passed"] * (STEPS_IN_ALL - 1) + ["skipped"], "NOT ACCEPTED"),
        (["passed", "failed"], "NOT ACCEPTED"),
        ([], "NOT ACCEPTED"),
    ],
)
def test_only_all_the_steps_are_an_acceptance(outcomes: list[StepOutcome], verdict: str) -> None:
    steps = tuple(replace(PASSED, number=number, outcome=word) for number, word in enumerate(outcomes))
    report = replace(REPORT, steps=steps)
    assert report.verdict == verdict
    less = replace(report, left_out=("realistic sizes",))
    assert less.verdict == ("ACCEPTED IN PART" if report.ok else "NOT ACCEPTED")


def test_a_report_of_an_older_version_left_nothing_out() -> None:
    found = json.loads(REPORT.to_json())
    del found["left_out"]
    assert Report.from_json(json.dumps(found)) == REPORT


def test_there_are_as_many_steps_as_said() -> None:
    assert len(STEPS) == STEPS_IN_ALL
