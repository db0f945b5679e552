"""Charts as inline SVG: lines over time, and bars. Colours and fonts come from the page's style sheet."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_WIDTH = 860
_LEFT, _RIGHT = 64, 12
_LEAST_SPAN = 1e-300
"""A smaller range counts as none: its steps would be indistinguishable from 0."""
_LEAST_SHARE = 0.02
"""Minimum span of an axis, as a share of its largest value, so that noise does not look like growth."""

_PANEL = 150
_PANEL_TOP, _PANEL_BOTTOM = 24, 26

_BAR, _BAR_STEP = 14, 22
_BAR_LEFT, _BAR_RIGHT = 330, 76
_LEGEND = 24
_CHARACTER = 6.6
"""Approximate width of a character of the small font."""


@dataclass(frozen=True)
class Bar:
    """One bar of a chart, with one part or several in a row.

    Attributes:
        label: What it shows.
        parts: Length of each part.
        mark: Value that a stroke across the bar marks, such as a percentile; None for none.
    """

    label: str
    parts: tuple[float, ...]
    mark: float | None = None

    @property
    def total(self) -> float:
        """Length of the whole bar."""
        return sum(self.parts)


def line_chart(title: str, x_name: str, xs: Sequence[float], ys: Sequence[float], series: int = 0) -> str:
    """Draws one line in its own panel.

    Args:
        title: What is shown, with its unit.
        x_name: What the horizontal axis shows, with its unit.
        xs: Horizontal positions of the points, ascending.
        ys: Their values.
        series: Index of its colour among the page's, from 0.

    Returns:
        An SVG element; empty for fewer than two points.
    """
    if len(xs) < 2:
        return ""
    x_ticks, y_ticks = ticks(xs[0], xs[-1], 8), ticks(*_span(ys), 4)
    right, top, bottom = _WIDTH - _RIGHT, _PANEL_TOP, _PANEL - _PANEL_BOTTOM
    low, high = min(y_ticks[0], *ys), max(y_ticks[-1], *ys)

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - xs[0]) / ((xs[-1] - xs[0]) or 1)
        up = (y - low) / ((high - low) or 1)
        return _LEFT + across * (right - _LEFT), bottom - up * (bottom - top)

    parts = [_text(0, 12, title, "title")]
    for y in y_ticks:
        height = at(xs[0], y)[1]
        parts.append(_line(_LEFT, height, right, height, "grid"))
        parts.append(_text(_LEFT - 6, height + 4, number(y), "end"))
    for x in x_ticks:
        if xs[0] <= x <= xs[-1]:
            parts.append(_text(at(x, low)[0], bottom + 15, number(x), "middle"))
    parts.append(_text(right, _PANEL - 1, x_name, "end"))
    path = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y in zip(xs, ys, strict=True))
    parts.append(f'<polyline class="line s{series}" points="{path}"/>')
    what = (
        f"{title}: from {number(ys[0])} to {number(ys[-1])}, least {number(min(ys))}, most {number(max(ys))}"
    )
    return _svg(_PANEL, what, parts)


def bar_chart(title: str, legend: Sequence[str], bars: Sequence[Bar], mark: str = "") -> str:
    """Draws horizontal bars, each with its length as a number.

    Args:
        title: What is shown, with its unit.
        legend: Names of the parts; not drawn if there is only one.
        bars: The bars, from the top.
        mark: What the strokes across bars mark.

    Returns:
        An SVG element; empty without bars.
    """
    longest = max((max(bar.total, bar.mark or 0.0) for bar in bars), default=0.0)
    if longest <= 0:
        return ""
    names = [*(legend if len(legend) > 1 else ()), *([mark] if mark else ())]
    top = 20 + (_LEGEND if names else 0)
    scale = (_WIDTH - _BAR_LEFT - _BAR_RIGHT) / longest
    parts = [_text(0, 12, title, "title"), *_legend(legend if len(legend) > 1 else (), mark)]
    for index, bar in enumerate(bars):
        y = top + index * _BAR_STEP
        parts += _bar(bar, y, scale)
    what = f"{title}: " + "; ".join(f"{bar.label} {number(bar.total)}" for bar in bars)
    return _svg(top + len(bars) * _BAR_STEP, what, parts)


def _bar(bar: Bar, y: float, scale: float) -> Iterable[str]:
    label = bar.label if len(bar.label) * _CHARACTER < _BAR_LEFT else _shortened(bar.label)
    yield _text(_BAR_LEFT - 8, y + _BAR - 3, label, "end")
    x = float(_BAR_LEFT)
    for series, part in enumerate(bar.parts):
        yield f'<rect class="s{series}" x="{x:.1f}" y="{y}" width="{part * scale:.1f}" height="{_BAR}"/>'
        x += part * scale
    if bar.mark is not None:
        at = _BAR_LEFT + bar.mark * scale
        yield _line(at, y - 2, at, y + _BAR + 2, "mark")
        x = max(x, at)
    yield _text(x + 6, y + _BAR - 3, number(bar.total), "figure")


def _shortened(label: str) -> str:
    """Cuts the middle: operator names are long, and what distinguishes bars is at the end."""
    room = int(_BAR_LEFT / _CHARACTER) - 2
    return f"{label[: room // 2]}…{label[room // 2 - room :]}"


def _legend(legend: Sequence[str], mark: str) -> Iterable[str]:
    x = float(_BAR_LEFT)
    for series, name in enumerate(legend):
        yield f'<rect class="s{series}" x="{x:.1f}" y="22" width="10" height="10"/>'
        yield _text(x + 14, 31, name, "")
        x += 14 + (len(name) + 3) * _CHARACTER
    if mark:
        yield _line(x + 4, 20, x + 4, 34, "mark")
        yield _text(x + 12, 31, mark, "")


def ticks(low: float, high: float, most: int) -> list[float]:
    """Returns at least two round numbers that cover a range, ascending.

    Args:
        low: Start of the range.
        high: Its end.
        most: Approximate maximum number of steps.
    """
    span = high - low
    if span < _LEAST_SPAN:  # too small to divide into steps
        span = max(abs(high), 1.0)
    power: float = 10.0 ** math.floor(math.log10(span / most))
    step = next(factor * power for factor in (1, 2, 5, 10) if span / (factor * power) <= most)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


def number(value: float) -> str:
    """Formats a number: four significant digits, thousands separated, no exponent unless it is tiny."""
    if not math.isfinite(value):
        return str(value)
    if value and abs(value) < 1e-3:
        return f"{value:.2e}"
    digits = 0 if not value else max(0, 3 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _span(ys: Sequence[float]) -> tuple[float, float]:
    """Returns the range of values, widened to at least `_LEAST_SHARE` of the largest one."""
    low, high = min(ys), max(ys)
    lacking = _LEAST_SHARE * max(abs(low), abs(high)) - (high - low)
    if lacking <= 0:
        return low, high
    # Memory and rates are never negative.
    return max(low - lacking / 2, 0.0 if low >= 0 else -math.inf), high + lacking / 2


def _svg(height: float, description: str, parts: Iterable[str]) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height:g}" role="img" aria-label="{escape(description)}">'
        f"<title>{escape(description)}</title>{''.join(parts)}</svg>"
    )


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
