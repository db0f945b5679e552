"""Reports: as JSON, as a well-formed page that needs nothing else and tells the worst first; its charts."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from npugrad_server.acceptance.charts import Bar, bar_chart, line_chart, number, ticks
from npugrad_server.acceptance.columns import CALLS_PER_S, P90, STAGES, TIME
from npugrad_server.acceptance.growth import growth, settled
from npugrad_server.acceptance.html import duration, render
from npugrad_server.acceptance.report import SCHEMA, STEPS_IN_ALL, Report, StepCheck, StepReport, Table

VOID = {"meta", "br"}
GOOD = StepCheck("copies", True, "the same bytes", "the same bytes")
BAD = StepCheck("float16: grad_input", False, "within tolerance", "outside tolerance <&>", "a note")


def step(number: int = 1, *checks: StepCheck, **changes: Any) -> StepReport:
    outcome: Any = "passed" if all(check.ok for check in checks) else "failed"
    return replace(StepReport(number, f"key{number}", f"Title {number}", outcome, 1.5, checks), **changes)


def report(*steps: StepReport, simulated: bool = False) -> Report:
    return Report("1.2.3", "2026-11-21T10:00:00+00:00", simulated, {"chip": "Ascend910B2"}, steps)


def table_of(*arguments: Any) -> Report:
    return report(step(8, GOOD, tables=(Table(*arguments),)))


# ----------------------------------------------------------------------------------------------- JSON

words = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=40)
checks = st.builds(StepCheck, words, st.booleans(), words, words, words)
finite = st.floats(allow_nan=False, allow_infinity=False)
cells = st.one_of(words, st.integers(-(2**53), 2**53), finite, st.booleans(), st.none())


@st.composite
def tables(draw: st.DrawFn) -> Table:
    columns = draw(st.lists(words, min_size=1, max_size=3))
    row = st.tuples(*(cells for _ in columns))
    return Table(draw(words), tuple(columns), tuple(draw(st.lists(row, max_size=3))))


def tuples(elements: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(elements, max_size=3).map(tuple)


outcomes = st.sampled_from(("passed", "failed", "skipped"))
of_checks = (tuples(checks), tuples(tables()), tuples(words), words)
steps = st.builds(StepReport, st.integers(0, 10), words, words, outcomes, st.floats(0, 1e6), *of_checks)
environments = st.dictionaries(words, words, max_size=3)


@given(st.builds(Report, words, words, st.booleans(), environments, tuples(steps), tuples(words)))
def test_json_and_page_have_the_whole_report(made: Report) -> None:
    again = Report.from_json(made.to_json())
    assert again == made
    page = Page(render(made))
    assert render(again) == render(made)
    told = [text for one in made.steps for text in (one.title, one.error, *one.notes)]
    told += [text for one in made.steps for c in one.checks for text in (c.expected, c.found, c.note)]
    assert all(text in page.text for text in (*told, *made.environment, *made.environment.values()))


def test_keys_come_in_their_documented_order() -> None:
    found = json.loads(report(step()).to_json())
    keys = ["schema", "ok", "simulated", "version", "started", "environment", "left_out", "steps"]
    assert list(found) == keys
    of_step = "number key title outcome seconds checks tables notes error"
    assert list(found["steps"][0]) == of_step.split()
    assert found["schema"] == SCHEMA


def test_numbers_that_json_lacks_travel_as_text() -> None:
    made = table_of("errors", ("a", "b"), ((float("inf"), float("nan")),))
    assert Report.from_json(made.to_json()).steps[0].tables[0].rows == (("inf", "nan"),)
    assert Page(render(made)).count("table") >= 1


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
        Report.from_json(json.dumps(json.loads(report(step()).to_json()) | change))


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        (["passed"] * STEPS_IN_ALL, "ACCEPTED"),
        (["passed"], "ACCEPTED IN PART"),
        (["passed"] * 2, "ACCEPTED IN PART"),
        (["passed"] * (STEPS_IN_ALL - 1) + ["skipped"], "NOT ACCEPTED"),
        (["passed", "failed"], "NOT ACCEPTED"),
        (["passed", "skipped"], "NOT ACCEPTED"),
        ([], "NOT ACCEPTED"),
    ],
)
def test_ok_means_that_every_step_passed_and_only_all_are_an_acceptance(
    outcomes: list[str], verdict: str
) -> None:
    made = report(*(step(number, outcome=outcome) for number, outcome in enumerate(outcomes)))
    assert made.verdict == verdict
    assert made.ok is json.loads(made.to_json())["ok"] is (verdict != "NOT ACCEPTED")
    less = replace(made, left_out=("realistic sizes",))
    assert less.verdict == ("ACCEPTED IN PART" if made.ok else "NOT ACCEPTED")


def test_a_report_of_an_older_version_left_nothing_out_and_failures_are_what_is_not_ok() -> None:
    made = report(step(1, GOOD, BAD))
    found = json.loads(made.to_json())
    del found["left_out"]
    assert Report.from_json(json.dumps(found)) == made
    assert made.steps[0].failures == (BAD,)


# ----------------------------------------------------------------------------------------------- page


class Page(HTMLParser):
    """Reads a page; every element has to be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
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
            self.text += data

    def count(self, tag: str, kind: str = "") -> int:
        return sum(1 for name, attrs in self.tags if name == tag and kind in (attrs.get("class") or ""))


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


def test_what_was_not_looked_at_did_not_pass() -> None:
    skipped = step(7, outcome="skipped", error="no call here runs long enough")
    page = Page(render(report(step(1, GOOD), skipped)))
    assert "1 of 2 steps passed, 1 skipped" in page.text
    assert "no call here runs long enough" in page.text
    assert "✗ NOT ACCEPTED" in page.text
    empty = Page(render(report()))
    assert "✗ NOT ACCEPTED" in empty.text
    assert "0 of 0 steps passed" in empty.text


@pytest.mark.parametrize("simulated", [True, False])
def test_simulated_is_written_large_across_the_top(simulated: bool) -> None:
    page = Page(render(report(step(1, GOOD), simulated=simulated)))
    assert page.count("div", "simulated") == simulated
    assert ("SIMULATED" in page.text) == simulated
    if simulated:
        body = page.text[page.text.index("SIMULATED", page.text.index("npugrad acceptance")) :]
        assert body.index("SIMULATED") < body.index("✓ ACCEPTED")


def test_the_page_needs_nothing_else_and_its_links_lead_to_steps() -> None:
    table = Table("rates", ("operator", f"{CALLS_PER_S} on 1 stream"), (("a", 1.0),))
    text = render(report(step(1, GOOD, tables=(table,)), step(8, BAD), simulated=True))
    assert not re.search(r"https?:|//[a-z]|url\(|@import", text)
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object", "embed"} & {tag for tag, _ in page.tags}
    assert not [name for _, attrs in page.tags for name in attrs if name == "src" or name.startswith("on")]
    links = [(tag, attrs["href"]) for tag, attrs in page.tags if "href" in attrs]
    targets = {attrs["id"] for _, attrs in page.tags if "id" in attrs}
    assert {*links} == {("a", f"#{target}") for target in targets}
    assert targets == {"step-1", "step-8"}
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_many_passed_checks_are_folded_and_very_many_failed_ones_told_in_their_step_only() -> None:
    page = Page(render(report(step(1, *[GOOD] * 40, *[BAD] * 20))))
    assert page.count("details") == 1
    assert "40 passed checks" in page.text
    assert page.text.count("float16: grad_input") == 40, "at the top and in the step"
    many = Page(render(report(step(1, *[BAD] * 60))))
    assert "35 more failed checks in the step" in many.text
    assert many.text.count("float16: grad_input") == 85


def test_samples_over_time_become_lines_and_gaps_are_left_out() -> None:
    rows = tuple((float(i), 100.0 + i, None if i == 3 else 50.0, "text") for i in range(6))
    text = render(table_of("Over time", (TIME, "device [MiB]", "worker [MiB]", "state"), rows))
    lines = re.findall(r'<polyline class="line s\d" points="([^"]+)"', text)
    assert [len(line.split()) for line in lines] == [6, 5]


def test_what_no_row_has_is_not_drawn_and_other_tables_are_only_tables() -> None:
    assert "<svg" not in render(table_of("Over time", (TIME, "device [MiB]"), ((0.0, None), (1.0, None))))
    page = Page(render(table_of("Symbols", ("symbol", "address"), (("aclInit", 7),))))
    assert page.count("svg") == 0
    assert "aclInit" in page.text


def test_stages_and_rates_become_bars() -> None:
    columns = ("operator", "size", "median [ms]", P90, *STAGES, f"{CALLS_PER_S} on 2 streams")
    rows = (("a", "small", 3.0, 4.0, 1.0, 1.5, 0.5, 300.0), ("a", "large", None, None, None, None, None, 2.0))
    text = render(table_of("Speed", columns, rows))
    assert text.count("<svg") == 2
    stages, rates = re.findall(r"<svg.*?</svg>", text)
    assert stages.count('height="14"') == 3, "three stages of the one row that has them"
    assert rates.count('height="14"') == 2
    assert 'class="mark"' in stages
    assert ">a small<" in stages


def test_durations_and_numbers_are_for_people() -> None:
    durations = {0: "0.0 s", 59.9: "59.9 s", 59.99: "1 min 00 s", 725: "12 min 05 s", 7260: "2 h 01 min"}
    assert {seconds: duration(seconds) for seconds in durations} == durations
    numbers = {0: "0", 7: "7", 1234567: "1,234,567", 12.345678: "12.35", 0.5: "0.5", -3.25: "-3.25"}
    numbers |= {0.00001234: "1.23e-05", math.inf: "inf"}
    assert {value: number(value) for value in numbers} == numbers


# --------------------------------------------------------------------------------------------- charts


def parsed(svg: str) -> ET.Element:
    return ET.fromstring(svg)


def points(svg: str) -> list[tuple[float, float]]:
    (line,) = parsed(svg).iter("polyline")
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in line.attrib["points"].split())]


def size(svg: str) -> tuple[float, float]:
    _, _, width, height = map(float, parsed(svg).attrib["viewBox"].split())
    return width, height


level = st.floats(-1e12, 1e12, allow_nan=False)


@given(low=level, share=st.floats(1e-6, 1e3), most=st.integers(1, 12))
@example(low=5, share=0, most=4)
@example(low=0, share=0, most=4)
def test_ticks_are_few_ascend_and_cover_the_range(low: float, share: float, most: int) -> None:
    high = low + share * max(abs(low), 1)
    found = ticks(low, high, most)
    assert 2 <= len(found) <= most + 2
    assert found == sorted(set(found))
    slack = 1e-9 * max(abs(low), abs(high))
    assert found[0] <= low + slack
    assert found[-1] >= high - slack


@given(st.lists(level, min_size=2, max_size=50))
@example([0.0, 5e-324])
def test_a_line_stays_in_its_panel(ys: list[float]) -> None:
    chart = line_chart("memory [MiB]", "time [s]", list(map(float, range(len(ys)))), ys)
    width, height = size(chart)
    assert all(0 <= x <= width and 0 <= y <= height for x, y in points(chart))


def test_a_larger_value_is_higher_and_a_later_one_further_right() -> None:
    (x0, y0), (x1, y1), (x2, y2) = points(line_chart("rate", "time [s]", [0, 1, 3], [10, 30, 20]))
    assert x0 < x1 < x2
    assert (x2 - x1) == pytest.approx(2 * (x1 - x0), abs=0.2)
    assert y1 < y2 < y0, "down is up in SVG"


def test_noise_does_not_look_like_growth() -> None:
    """An axis covers at least some part of the level, so a hundredth of a percent stays a flat line."""
    flat = points(line_chart("memory", "time [s]", [0, 1, 2], [10_000, 10_001, 10_000]))
    assert max(y for _, y in flat) - min(y for _, y in flat) < 5
    grown = points(line_chart("memory", "time [s]", [0, 1, 2], [10_000, 11_000, 12_000]))
    assert max(y for _, y in grown) - min(y for _, y in grown) > 50


def test_one_point_is_no_line_and_nothing_no_bar() -> None:
    assert line_chart("memory", "time [s]", [0], [1]) == ""
    assert bar_chart("rate", ("rate",), []) == ""
    assert bar_chart("rate", ("rate",), [Bar("a", (0.0,))]) == ""


def test_parts_of_a_bar_follow_each_other_to_scale() -> None:
    chart = bar_chart("time [ms]", ("in", "run"), [Bar("a", (1, 3), 5), Bar("b", (2, 2))], "p90 [ms]")
    rects = [r for r in parsed(chart).iter("rect") if r.attrib["height"] == "14"]
    widths = [float(r.attrib["width"]) for r in rects]
    assert widths[1] == pytest.approx(3 * widths[0], rel=0.01)
    assert widths[2] == pytest.approx(widths[3])
    assert float(rects[1].attrib["x"]) == pytest.approx(float(rects[0].attrib["x"]) + widths[0], abs=0.11)
    texts = [t.text for t in parsed(chart).iter("text")]
    assert {"in", "run", "p90 [ms]", "4"} <= set(texts), "legend, and the length of the whole bar"
    width, _ = size(chart)
    assert all(0 <= float(m.attrib["x1"]) <= width for m in parsed(chart).iter("line"))


def test_labels_are_escaped_and_long_ones_lose_their_middle() -> None:
    chart = bar_chart("<&>", ("x",), [Bar("multi_scale_" + "x" * 60 + " float16 <&>", (1,))])
    (label,) = [t.text for t in parsed(chart).iter("text") if t.text and "…" in t.text]
    assert re.fullmatch(r"multi_scale_x+…x+ float16 <&>", label)
    assert len(label) < 60


# --------------------------------------------------------------------------------------------- growth


@given(slope=st.floats(-1e6, 1e6), start=st.floats(0, 1e9), count=st.integers(10, 200))
def test_the_slope_of_a_line_is_found(slope: float, start: float, count: int) -> None:
    times = [0.5 * i for i in range(count)]
    found = growth(times, [start + slope * t for t in times], 0.25)
    assert found.slope == pytest.approx(slope, rel=1e-6, abs=1e-3)
    assert found.total == pytest.approx(found.slope * found.seconds)
    assert found.seconds <= 0.75 * times[-1] + 0.5


TIMES = [float(i) for i in range(200)]


def test_neither_the_warm_up_nor_noise_is_growth() -> None:
    values = [min(i, 30) * 1000.0 for i in range(100)]
    assert growth(TIMES[:100], values, 0.3).slope == pytest.approx(0, abs=1e-6)
    assert growth(TIMES[:100], values, 0.0).slope > 50
    noise = growth(TIMES, [500.0 + (-1) ** i * 20 for i in range(200)], 0.25)
    assert abs(noise.total) < 5
    assert noise.level == pytest.approx(500, abs=20)


def test_what_fills_up_first_is_judged_on_its_plateau() -> None:
    found = settled(TIMES, [min(t, 140.0) * 1e6 for t in TIMES], 0.4, 0.25)
    assert found.slope == pytest.approx(0, abs=1)
    assert found.since >= 140
    assert found.seconds >= 0.25 * 199 - 1


@given(slope=st.floats(1, 1e6), share=st.floats(0, 1))
def test_what_never_ends_to_grow_has_no_plateau(slope: float, share: float) -> None:
    """Also when it grows in steps, the tenth part of the time each."""
    stairs = [slope * (20 * (i // 20) * share + i * (1 - share)) for i in range(200)]
    assert settled(TIMES, stairs, 0.4, 0.25).slope > 0.5 * slope


@pytest.mark.parametrize("count", [0, 1, 2])
def test_too_few_samples_tell_nothing_and_few_are_taken_as_far_as_they_go(count: int) -> None:
    with pytest.raises(ValueError, match=f"found {count} samples"):
        growth(TIMES[:count], [1.0] * count, 0.0)
    with pytest.raises(ValueError, match=f"found {count} samples"):
        settled(TIMES[:count], TIMES[:count], 0.0, 0.25)
    for enough in (3, 5):
        assert settled(TIMES[:enough], TIMES[:enough], 0.0, 0.25).slope == pytest.approx(1)
