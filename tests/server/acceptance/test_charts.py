from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from npugrad_server.acceptance.charts import Bar, bar_chart, line_chart, number, ticks

finite = st.floats(-1e12, 1e12, allow_nan=False)


def parsed(svg: str) -> ET.Element:
    return ET.fromstring(svg)


def points(svg: str) -> list[tuple[float, float]]:
    (line,) = parsed(svg).iter("polyline")
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in line.attrib["points"].split())]


def size(svg: str) -> tuple[float, float]:
    _, _, width, height = map(float, parsed(svg).attrib["viewBox"].split())
    return width, height


@given(low=finite, share=st.floats(1e-6, 1e3), most=st.integers(1, 12))
def test_ticks_are_few_ascend_and_cover_the_range(low: float, share: float, most: int) -> None:
    high = low + share * max(abs(low), 1)
    found = ticks(low, high, most)
    assert 2 <= len(found) <= most + 2
    assert found == sorted(set(found))
    slack = 1e-9 * max(abs(low), abs(high))
    assert found[0] <= low + slack
    assert found[-1] >= high - slack


def test_ticks_of_a_range_without_length_are_two() -> None:
    assert len(ticks(5, 5, 4)) >= 2
    assert len(ticks(0, 0, 4)) >= 2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (7, "7"),
        (1234567, "1,234,567"),
        (12.345678, "12.35"),
        (0.5, "0.5"),
        (-3.25, "-3.25"),
        (0.00001234, "1.23e-05"),
        (math.inf, "inf"),
    ],
)
def test_numbers_are_for_people(value: float, text: str) -> None:
    assert number(value) == text


@given(st.lists(finite, min_size=2, max_size=50))
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


def test_one_point_is_no_line() -> None:
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
