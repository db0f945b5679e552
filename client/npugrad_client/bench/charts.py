"""Charts as inline SVG; colours and fonts come from the page's style sheet, and no script is needed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_WIDTH, _HEIGHT = 900, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 34, 34
_CHARACTER = 6.7
_TINY = 1e-12


@dataclass(frozen=True)
class Series:
    """One line, or one layer of a stack.

    Attributes:
        name: Name in the legend.
        ys: Its values, one for each x; None where there is none.
        color: Number of its colour in the style sheet.
        dashed: Whether the line is dashed.
    """

    name: str
    ys: Sequence[float | None]
    color: int
    dashed: bool = False


@dataclass(frozen=True)
class Axes:
    """Maps values to positions in the picture.

    Attributes:
        x_range: Ends of the horizontal axis.
        y_range: Ends of the vertical axis.
    """

    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def at(self, x: float, y: float) -> tuple[float, float]:
        """The position of a value."""
        across = (x - self.x_range[0]) / max(self.x_range[1] - self.x_range[0], _TINY)
        up = (y - self.y_range[0]) / max(self.y_range[1] - self.y_range[0], _TINY)
        return (
            _LEFT + across * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM),
        )


def line_chart(
    title: str,
    x_name: str,
    xs: Sequence[float],
    series: Sequence[Series],
    *,
    shade_below: float | None = None,
    limit: tuple[str, float] | None = None,
    x_ticks: Sequence[tuple[float, str]] | None = None,
    is_log: bool = False,
    describe: Callable[[float], str] | None = None,
) -> str:
    """Lines over a common horizontal axis.

    Args:
        title: What is shown, with its unit.
        x_name: What the horizontal axis is, with its unit.
        xs: Positions of the points, ascending.
        series: The lines.
        shade_below: The area left of this x, the warm-up, is shaded.
        limit: Name and value of a horizontal line that marks an objective.
        x_ticks: Positions and labels of ticks; round numbers by default.
        is_log: Whether the vertical axis is logarithmic.
        describe: Text of an x for tooltips; the number by default.

    Returns:
        An SVG element; a line of text if there are fewer than two points.
    """
    values = [y for each in series for y in each.ys if y is not None and (y > 0 or not is_log)]
    if len(xs) < 2 or not values:
        return f'<p class="faint">{escape(title)}: too little was measured for a picture.</p>'
    marks = _log_ticks(values) if is_log else ticks(0.0, max([*values, *([limit[1]] if limit else [])]), 4)
    place = math.log10 if is_log else float
    axes = Axes((xs[0], xs[-1]), (place(marks[0]), place(marks[-1])))
    parts = [*_frame(title, x_name, axes, [(place(y), number(y)) for y in marks], x_ticks)]
    if shade_below is not None and shade_below > xs[0]:
        parts.insert(0, _shade(axes, shade_below))
    if limit is not None and axes.y_range[0] <= place(max(limit[1], _TINY)) <= axes.y_range[1]:
        parts += _limit(axes, limit[0], place(limit[1]))
    for each in series:
        points = [(x, y) for x, y in zip(xs, each.ys, strict=True) if y is not None and (y > 0 or not is_log)]
        parts += _line(axes, each, [(x, place(y), y) for x, y in points], describe or number)
    parts += _legend(series)
    return _svg(title, parts)


def stack_chart(
    title: str, x_name: str, xs: Sequence[float], layers: Sequence[Series], shade_below: float | None = None
) -> str:
    """Layers on top of each other over a common horizontal axis; arguments as for `line_chart`."""
    totals = [sum(each.ys[index] or 0.0 for each in layers) for index in range(len(xs))]
    if len(xs) < 2 or max(totals, default=0.0) <= 0:
        return f'<p class="faint">{escape(title)}: too little was measured for a picture.</p>'
    marks = ticks(0.0, max(totals), 4)
    axes = Axes((xs[0], xs[-1]), (0.0, marks[-1]))
    parts = [*_frame(title, x_name, axes, [(y, number(y)) for y in marks], None)]
    if shade_below is not None and shade_below > xs[0]:
        parts.insert(0, _shade(axes, shade_below))
    below = [0.0] * len(xs)
    for each in layers:
        above = [low + (y or 0.0) for low, y in zip(below, each.ys, strict=True)]
        outline = [*zip(xs, above, strict=True), *reversed(list(zip(xs, below, strict=True)))]
        points = " ".join("{:.1f},{:.1f}".format(*axes.at(x, y)) for x, y in outline)
        name = f"<title>{escape(each.name)}</title>"
        parts.append(f'<polygon class="fill s{each.color}" points="{points}">{name}</polygon>')
        below = above
    return _svg(title, [*parts, *_legend(layers)])


def bar_chart(title: str, bars: Sequence[tuple[str, float, str]]) -> str:
    """Horizontal bars: label, length, and the text at its end; empty without bars."""
    longest = max((length for _, length, _ in bars), default=0.0)
    if longest <= 0:
        return ""
    left, right, step = 330, 150, 24
    parts = [_text(0, 14, title, "title")]
    for index, (label, length, text) in enumerate(bars):
        y = 28 + index * step
        width = length / longest * (_WIDTH - left - right)
        parts.append(_text(left - 8, y + 12, _shortened(label, left), "end"))
        parts.append(f'<rect class="fill s0" x="{left}" y="{y}" width="{width:.1f}" height="16"/>')
        parts.append(_text(left + width + 6, y + 12, text, "figure"))
    return _svg(title, parts, 34 + len(bars) * step)


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers that cover a range, ascending; at least two."""
    span = max(high - low, _TINY)
    power: float = 10.0 ** math.floor(math.log10(span / most))
    step = next(factor * power for factor in (1, 2, 5, 10) if span / (factor * power) <= most + 1e-9)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


def _log_ticks(values: Sequence[float]) -> list[float]:
    """1, 2 and 5 of each power of ten that cover the values, or the powers where they are many."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) + 1e-9)
    factors = (1, 2, 5) if high - low <= 2 else (1,)
    every = [factor * 10.0**power for power in range(low, high + 1) for factor in factors]
    first = max((index for index, tick in enumerate(every) if tick <= min(values)), default=0)
    last = min((index for index, tick in enumerate(every) if tick >= max(values)), default=len(every) - 1)
    return every[first : max(last, first + 1) + 1]


def number(value: float) -> str:
    """A number for people: four significant digits, no exponent unless it is tiny."""
    if value and abs(value) < 1e-3:
        return f"{value:.2e}"
    digits = 0 if not value else max(0, 3 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _frame(
    title: str,
    x_name: str,
    axes: Axes,
    y_ticks: Sequence[tuple[float, str]],
    x_ticks: Sequence[tuple[float, str]] | None,
) -> Iterable[str]:
    yield _text(0, 14, title, "title")
    bottom = _HEIGHT - _BOTTOM
    for y, text in y_ticks:
        height = axes.at(axes.x_range[0], y)[1]
        yield _stroke(_LEFT, height, _WIDTH - _RIGHT, height, "grid")
        yield _text(_LEFT - 6, height + 4, text, "end")
    low, high = axes.x_range
    for x, text in x_ticks if x_ticks is not None else [(x, number(x)) for x in ticks(low, high, 8)]:
        if low <= x <= high:
            yield _text(axes.at(x, axes.y_range[0])[0], bottom + 15, text, "middle")
    yield _text(_WIDTH - _RIGHT, _HEIGHT - 4, x_name, "end")


def _line(
    axes: Axes, series: Series, points: Sequence[tuple[float, float, float]], describe: Callable[[float], str]
) -> Iterable[str]:
    """The line, and a dot for each of its points, with its value as tooltip."""
    path = " ".join("{:.1f},{:.1f}".format(*axes.at(x, y)) for x, y, _ in points)
    dashed = " dashed" if series.dashed else ""
    yield f'<polyline class="line s{series.color}{dashed}" points="{path}"/>'
    for x, y, value in points:
        across, up = axes.at(x, y)
        label = escape(f"{series.name}, {describe(x)}: {number(value)}")
        place = f'cx="{across:.1f}" cy="{up:.1f}" r="4"'
        yield f'<circle class="spot s{series.color}" {place}><title>{label}</title></circle>'


def _shade(axes: Axes, below: float) -> str:
    right = axes.at(min(below, axes.x_range[1]), axes.y_range[0])[0]
    height = _HEIGHT - _TOP - _BOTTOM
    return (
        f'<rect class="shade" x="{_LEFT}" y="{_TOP}" width="{right - _LEFT:.1f}" height="{height}">'
        "<title>warm-up, not measured</title></rect>"
    )


def _limit(axes: Axes, name: str, y: float) -> Iterable[str]:
    height = axes.at(axes.x_range[0], y)[1]
    yield _stroke(_LEFT, height, _WIDTH - _RIGHT, height, "limit")
    yield _text(_WIDTH - _RIGHT - 4, height - 4, name, "end limit")


def _legend(series: Sequence[Series]) -> Iterable[str]:
    x = float(_WIDTH - _RIGHT)
    for each in reversed(series):
        x -= len(each.name) * _CHARACTER + 24
        yield f'<rect class="fill s{each.color}" x="{x:.1f}" y="5" width="10" height="10"/>'
        yield _text(x + 14, 14, each.name, "")


def _shortened(label: str, width: float) -> str:
    room = int(width / _CHARACTER) - 2
    return label if len(label) <= room else f"{label[: room // 2]}…{label[len(label) - room // 2 :]}"


def _svg(description: str, parts: Iterable[str], height: float = _HEIGHT) -> str:
    label = escape(description)
    return f'<svg viewBox="0 0 {_WIDTH} {height:g}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _stroke(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
