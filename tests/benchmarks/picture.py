"""A picture of ratios as SVG: one line per case and peer, a point with its spread, on a logarithmic axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO
from statistics import mean

from tests.benchmarks.goals import Goal
from tests.benchmarks.harness import Row

Place = tuple[str, str, str]
"""Case, data type and peer."""

# Told apart also by people who see colours differently (Okabe and Ito), and by shape.
_STYLES = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "D"), ("#CC79A7", "^"))
_STEP, _GAP, _AROUND, _WIDTH = 0.2, 0.7, 1.6, 11.0


def svg(
    title: str,
    subtitle: str,
    rows: Sequence[Row],
    goals: Mapping[Place, Goal],
    axis: str = "peer's time / ours: right of 1 ours is faster",
) -> str:
    """The picture of one benchmark; rows of one case come one behind the other."""
    # Here, because every process that collects the tests imports this module.
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    peers = list(dict.fromkeys(row.peer for row in rows))
    cases = list(dict.fromkeys((row.case, row.dtype) for row in rows))
    # Lines from the top, those of a case together.
    points = [(row, at + _GAP * cases.index((row.case, row.dtype))) for at, row in enumerate(rows)]
    bottom = points[-1][1] + 1
    with rc_context({"svg.fonttype": "none", "font.size": 9}):
        drawn = Figure(figsize=(_WIDTH, _AROUND + _STEP * bottom), layout="constrained")
        axes = drawn.subplots()
        for number, peer in enumerate(peers):
            colour, marker = _STYLES[number % len(_STYLES)]
            own, ys = zip(*((row, y) for row, y in points if row.peer == peer), strict=True)
            axes.hlines(ys, [row.low for row in own], [row.high for row in own], color=colour)
            ratios = [row.ratio for row in own]
            axes.scatter(ratios, ys, color=colour, marker=marker, label=f"against {peer}", gid=peer)
        for name, size in (("must", 150), ("stretch", 50)):
            wanted = ((goals.get((row.case, row.dtype, row.peer)), y) for row, y in points)
            limits = [(limit, y) for goal, y in wanted if (limit := getattr(goal, name, None)) is not None]
            if limits:
                xs, ys = zip(*limits, strict=True)
                axes.scatter(xs, ys, size, "#555555", marker="|", label=name)
        middles = [mean(y for row, y in points if (row.case, row.dtype) == case) for case in cases]
        axes.set_yticks(middles, ["  ".join(case) for case in cases])
        axes.set(xscale="log", xlabel=axis, ylim=(bottom, -1))
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        axes.axvline(1, color="black", linewidth=1)
        axes.grid(axis="x", color="#dddddd")
        drawn.suptitle(title, fontweight="bold")
        axes.set_title(subtitle, fontsize=9, color="#444444")
        drawn.legend(loc="outside lower center", ncols=len(peers) + 2)
        text = StringIO()
        drawn.savefig(text, format="svg")
    return text.getvalue()
