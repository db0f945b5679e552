"""A picture of ratios as SVG: one line per case and peer, a point with its spread, on a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from xml.sax.saxutils import escape

from tests.benchmarks.goals import Goal
from tests.benchmarks.harness import Row

Place = tuple[str, str, str]

# Told apart also by people who see colours differently (Okabe and Ito), and by shape.
_STYLES = (("#0072B2", "circle"), ("#D55E00", "square"), ("#009E73", "diamond"), ("#CC79A7", "triangle"))
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 1080, 480, 40, 94, 46
_STEP, _GAP, _RADIUS = 18, 14, 5
_MUST, _STRETCH = 8, 4
_TICKS = (1, 2, 5)


def svg(
    title: str,
    subtitle: str,
    rows: Sequence[Row],
    goals: Mapping[Place, Goal] | None = None,
    axis: str = "peer's time / ours: right of 1 ours is faster",
) -> str:
    """The picture of one benchmark.

    Args:
        title: Above the picture.
        subtitle: Below the title.
        rows: Its results, those of one case one behind the other.
        goals: By case, data type and peer, what was to be reached: a long mark, and a short one for what one
            would like to reach.
        axis: What the axis shows.
    """
    wanted = goals or {}
    limits = [limit for goal in wanted.values() for limit in (goal.must, goal.stretch) if limit is not None]
    peers = list(dict.fromkeys(row.peer for row in rows))
    cases = list(dict.fromkeys((row.case, row.dtype) for row in rows))
    scale = _Axis(
        min(1.0, *(row.low for row in rows), *limits), max(1.0, *(row.high for row in rows), *limits)
    )
    height = _TOP + _BOTTOM + len(rows) * _STEP + len(cases) * _GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'height="{height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        *_heading(title, subtitle, peers, bool(limits)),
        *_grid(scale, height, axis),
    ]
    y = float(_TOP)
    for case, dtype in cases:
        found = [row for row in rows if (row.case, row.dtype) == (case, dtype)]
        y += _GAP
        parts.append(_text(_LEFT - 12, y + len(found) * _STEP / 2 + 4, f"{case}  {dtype}", "end"))
        for row in found:
            goal = wanted.get((case, dtype, row.peer))
            parts += _marks(scale, y + _STEP / 2, goal)
            parts += _point(scale, y + _STEP / 2, row, *_STYLES[peers.index(row.peer) % len(_STYLES)])
            y += _STEP
    return "\n".join([*parts, "</svg>\n"])


class _Axis:
    """Ratios to pixels, logarithmic, from one tick to another."""

    def __init__(self, low: float, high: float) -> None:
        ticks = [tick * 10.0**power for power in range(-6, 7) for tick in _TICKS]
        first = max((t for t in ticks if t <= low), default=ticks[0])
        last = min((t for t in ticks if t >= high), default=ticks[-1])
        self.ticks = [t for t in ticks if first <= t <= last]
        self._first, self._last = math.log(first), math.log(max(last, first * 1.01))

    def x(self, ratio: float) -> float:
        """Where a ratio lies."""
        share = (math.log(max(ratio, 1e-6)) - self._first) / (self._last - self._first)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _heading(title: str, subtitle: str, peers: Sequence[str], limits: bool) -> Iterator[str]:
    yield _text(12, 24, title, "start", "font-weight='bold'")
    yield _text(12, 44, subtitle, "start", "fill='#444444'")
    x = 12.0
    for peer, (colour, shape) in zip(peers, _STYLES * len(peers), strict=False):
        yield _mark(x + _RADIUS, 68, colour, shape)
        yield _text(x + 16, 73, f"against {peer}", "start")
        x += 40 + 7.2 * len(f"against {peer}")
    if limits:
        yield _limit(x, 68, _MUST)
        yield _text(x + 8, 73, "must", "start")
        yield _limit(x + 62, 68, _STRETCH)
        yield _text(x + 70, 73, "stretch", "start")


def _grid(axis: _Axis, height: int, text: str) -> Iterator[str]:
    bottom = height - _BOTTOM + 8
    for tick in axis.ticks:
        x, stroke = axis.x(tick), "black" if tick == 1 else "#dddddd"
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}" stroke="{stroke}"/>'
        yield _text(x, bottom + 16, f"{tick:g}", "middle")
    yield _text(12, bottom + 16, text, "start")


def _marks(axis: _Axis, y: float, goal: Goal | None) -> Iterator[str]:
    if goal is not None:
        yield _limit(axis.x(goal.must), y, _MUST)
        if goal.stretch is not None:
            yield _limit(axis.x(goal.stretch), y, _STRETCH)


def _limit(x: float, y: float, half: int) -> str:
    return (
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - half}" y2="{y + half}" stroke="#555555" stroke-width="2"/>'
    )


def _point(axis: _Axis, y: float, row: Row, colour: str, shape: str) -> Iterator[str]:
    low, high = axis.x(row.low), axis.x(row.high)
    ends = f'x1="{low:.1f}" x2="{high:.1f}" y1="{y:.1f}" y2="{y:.1f}"'
    yield f'<line {ends} stroke="{colour}" stroke-width="3"/>'
    yield _mark(axis.x(row.ratio), y, colour, shape)


def _mark(x: float, y: float, colour: str, shape: str) -> str:
    r = _RADIUS
    corners = {
        "square": ((-r, -r), (r, -r), (r, r), (-r, r)),
        "diamond": ((0, -r - 2), (r + 2, 0), (0, r + 2), (-r - 2, 0)),
        "triangle": ((0, -r - 1), (r + 1, r), (-r - 1, r)),
    }
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r}" fill="{colour}" stroke="white"/>'
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners[shape])
    return f'<polygon points="{points}" fill="{colour}" stroke="white"/>'


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'
