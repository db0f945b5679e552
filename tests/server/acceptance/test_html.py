"""The page of a report: well-formed, alone in the world, and telling the worst first."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npugrad_server.acceptance.columns import CALLS_PER_S, P90, STAGES, TIME
from npugrad_server.acceptance.html import duration, render
from npugrad_server.acceptance.report import Report, StepCheck, StepReport, Table

VOID = {"meta", "br"}


class Page(HTMLParser):
    """Reads a page; every element has to be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def count(self, tag: str, kind: str = "") -> int:
        return sum(1 for name, attrs in self.tags if name == tag and kind in (attrs.get("class") or ""))


GOOD = StepCheck("copies", True, "the same bytes", "the same bytes")
BAD = StepCheck("float16: grad_input", False, "within tolerance", "outside tolerance <&>", "a note")


def step(number: int = 1, *checks: StepCheck, **changes: object) -> StepReport:
    outcome = "passed" if all(check.ok for check in checks) else "failed"
    made = StepReport(number, f"key{number}", f"Title {number}", outcome, 1.5, checks)  # type: ignore[arg-type]
    return replace(made, **changes)  # type: ignore[arg-type]


def report(*steps: StepReport, simulated: bool = False) -> Report:
    return Report("1.2.3", "2026-11-21T10:00:00+00:00", simulated, {"chip": "Ascend910B2"}, steps)


def test_a_passed_report_says_so_once_at_the_top() -> None:
    page = Page(render(report(step(1, GOOD), step(2, GOOD))))
    assert "✓ ACCEPTED" in page.text
    assert "NOT ACCEPTED" not in page.text
    assert "2 of 2 steps passed, 2 of 2 checks ok, 3.0 s" in page.text
    assert page.text.index("✓ ACCEPTED") < page.text.index("Ascend910B2")
    assert "What failed" not in page.text


def test_a_failed_report_tells_what_failed_before_anything_else() -> None:
    page = Page(render(report(step(1, GOOD), step(2, GOOD, BAD, GOOD), step(3, error="RuntimeError: x"))))
    assert "✗ NOT ACCEPTED" in page.text
    first = page.text.index("outside tolerance <&>")
    assert page.text.index("✗ NOT ACCEPTED") < first < page.text.index("Environment")
    section = page.text[page.text.rindex("2. Title 2") :]
    assert section.index("float16: grad_input") < section.index("copies"), "failed checks first"


def test_a_skipped_step_is_neither_passed_nor_failed() -> None:
    skipped = step(7, outcome="skipped", error="no call here runs long enough")
    page = Page(render(report(step(1, GOOD), skipped)))
    assert "1 of 2 steps passed, 1 skipped" in page.text
    assert "no call here runs long enough" in page.text
    assert "✗ NOT ACCEPTED" in page.text, "what was not looked at did not pass"


@pytest.mark.parametrize("simulated", [True, False])
def test_simulated_is_written_large_across_the_top(simulated: bool) -> None:
    page = Page(render(report(step(1, GOOD), simulated=simulated)))
    assert page.count("div", "simulated") == simulated
    assert ("SIMULATED" in page.text) == simulated
    if simulated:
        body = page.text[page.text.index("SIMULATED", page.text.index("npugrad acceptance")) :]
        assert body.index("SIMULATED") < body.index("✓ ACCEPTED")


def test_the_page_needs_nothing_else() -> None:
    table = Table("rates", ("operator", f"{CALLS_PER_S} on 1 stream"), (("a", 1.0),))
    text = render(report(step(1, GOOD, tables=(table,)), simulated=True))
    assert not re.search(r"https?:|//[a-z]|url\(|@import", text)
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object", "embed"} & {tag for tag, _ in page.tags}
    for tag, attrs in page.tags:
        assert not [name for name in attrs if name == "src" or name.startswith("on")]
        if "href" in attrs:
            assert tag == "a"
            assert (attrs["href"] or "").startswith("#step-")
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_links_lead_to_steps() -> None:
    page = Page(render(report(step(1, GOOD), step(8, BAD))))
    targets = {attrs["id"] for _, attrs in page.tags if "id" in attrs}
    assert {f"#{target}" for target in targets} == {a["href"] for _, a in page.tags if "href" in a}


words = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=40)
checks = st.builds(StepCheck, words, st.booleans(), words, words, words)
cells = st.one_of(words, st.integers(), st.floats(), st.booleans(), st.none())


@given(name=words, check=checks, cell=cells, note=words, error=words)
def test_whatever_is_found_is_shown_and_breaks_nothing(
    name: str, check: StepCheck, cell: str | float | bool | None, note: str, error: str
) -> None:
    table = Table(name, (name, "x"), ((cell, "y"),))
    made = step(1, check, title=name, notes=(note,), error=error, tables=(table,))
    page = Page(render(replace(report(made), environment={name: note})))
    for text in (name, check.expected, check.found, check.note, note, error):
        assert text in page.text


def test_many_passed_checks_are_folded_and_failed_ones_never() -> None:
    page = Page(render(report(step(1, *[GOOD] * 40, *[BAD] * 20))))
    assert page.count("details") == 1
    assert "40 passed checks" in page.text
    assert page.text.count("float16: grad_input") == 40, "at the top and in the step"


def test_very_many_failures_are_told_in_full_only_in_their_step() -> None:
    page = Page(render(report(step(1, *[BAD] * 60))))
    assert "35 more failed checks in the step" in page.text
    assert page.text.count("float16: grad_input") == 85


def test_samples_over_time_become_lines_and_gaps_are_left_out() -> None:
    rows = tuple((float(i), 100.0 + i, None if i == 3 else 50.0, "text") for i in range(6))
    table = Table("Over time", (TIME, "device [MiB]", "worker [MiB]", "state"), rows)
    text = render(report(step(8, GOOD, tables=(table,))))
    lines = re.findall(r'<polyline class="line s\d" points="([^"]+)"', text)
    assert [len(line.split()) for line in lines] == [6, 5]


def test_a_quantity_that_no_row_has_is_not_drawn() -> None:
    table = Table("Over time", (TIME, "device [MiB]"), ((0.0, None), (1.0, None)))
    assert "<svg" not in render(report(step(8, GOOD, tables=(table,))))


def test_stages_and_rates_become_bars() -> None:
    columns = ("operator", "size", "median [ms]", P90, *STAGES, f"{CALLS_PER_S} on 2 streams")
    rows = (("a", "small", 3.0, 4.0, 1.0, 1.5, 0.5, 300.0), ("a", "large", None, None, None, None, None, 2.0))
    text = render(report(step(9, GOOD, tables=(Table("Speed", columns, rows),))))
    assert text.count("<svg") == 2
    stages, rates = re.findall(r"<svg.*?</svg>", text)
    assert stages.count('height="14"') == 3, "three stages of the one row that has them"
    assert rates.count('height="14"') == 2
    assert 'class="mark"' in stages
    assert ">a small<" in stages


def test_a_table_without_such_columns_is_only_a_table() -> None:
    table = Table("Symbols", ("symbol", "address"), (("aclInit", 7),))
    page = Page(render(report(step(1, GOOD, tables=(table,)))))
    assert page.count("svg") == 0
    assert "aclInit" in page.text


def test_an_empty_report_did_not_pass() -> None:
    page = Page(render(Report("1", "now", False)))
    assert "✗ NOT ACCEPTED" in page.text
    assert "0 of 0 steps passed" in page.text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (59.9, "59.9 s"), (59.99, "1 min 00 s"), (725, "12 min 05 s"), (7260, "2 h 01 min")],
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_equal_reports_give_equal_pages_also_through_json() -> None:
    made = report(step(1, GOOD, BAD), simulated=True)
    assert render(made) == render(Report.from_json(made.to_json()))
