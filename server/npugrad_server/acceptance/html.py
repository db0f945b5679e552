"""A report as one self-contained HTML page: no network, no script, no other file."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from npugrad_server.acceptance.charts import Bar, bar_chart, line_chart, number
from npugrad_server.acceptance.columns import CALLS_PER_S, P90, STAGES, TIME
from npugrad_server.acceptance.stylesheet import CSS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from npugrad_server.acceptance.report import Cell, Report, StepCheck, StepReport, Table

_SHOWN_CHECKS = 12
"""More passed checks, and longer tables, are folded; they open on a click and print in full."""
_SHOWN_ROWS = 30
_MOST_FAILURES = 25
"""Failed checks of each step listed at the top; the step's section lists all."""
_SIGNS = {"passed": "✓", "failed": "✗", "skipped": "○"}
_CLASSES = {"passed": "good", "failed": "bad", "skipped": "none"}
_MOST_BARS = 40


def render(report: Report) -> str:
    """Renders a report as a page.

    Args:
        report: The report.

    Returns:
        HTML; equal reports give equal text.
    """
    parts = [
        _verdict(report),
        _failures(report),
        _overview(report),
        _environment(report),
        *(_step(step) for step in report.steps),
    ]
    simulated = "SIMULATED: " if report.simulated else ""
    title = f"{simulated}npugrad acceptance, {report.verdict}, {report.started}"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n"
        f"{_banner(report)}<main>\n{''.join(parts)}</main>\n</body>\n</html>\n"
    )


# ------------------------------------------------------------------------------------------- the top


def _banner(report: Report) -> str:
    if not report.simulated:
        return ""
    return (
        '<div class="simulated"><strong>SIMULATED</strong>'
        "No NPU took part. CANN was the simulation of the tests: nothing below is about hardware.</div>\n"
    )


def _verdict(report: Report) -> str:
    steps, checks = report.steps, [check for step in report.steps for check in step.checks]
    words = [
        f"{sum(step.outcome == 'passed' for step in steps)} of {_count(len(steps), 'step')} passed",
        f"{sum(check.ok for check in checks)} of {_count(len(checks), 'check')} ok",
        duration(sum(step.seconds for step in steps)),
    ]
    skipped = sum(step.outcome == "skipped" for step in steps)
    if skipped:
        words.insert(1, f"{skipped} skipped")
    kind = "good" if report.ok else "bad"
    marked = " (simulated)" if report.simulated else ""
    return (
        "<header>\n<h1>npugrad: acceptance of the NPU backend</h1>\n"
        f'<p class="verdict {kind}">{_SIGNS["passed" if report.ok else "failed"]} '
        f"{report.verdict}{marked}</p>\n"
        f"<p>{escape(', '.join(words))}.</p>\n"
        f"{''.join(f'<p>Left out: {escape(text)}</p>{chr(10)}' for text in report.left_out)}"
        f'<p class="faint">Started {escape(report.started)}, npugrad {escape(report.version)}.</p>\n'
        "</header>\n"
    )


def _failures(report: Report) -> str:
    """Renders what readers look for first: every failed check and error in one place."""
    failed = [step for step in report.steps if step.outcome == "failed"]
    if not failed:
        return ""
    parts = ['<section class="failures">\n<h2>What failed</h2>\n']
    for step in failed:
        parts.append(f'<h3><a href="#{_anchor(step)}">{_heading(step)}</a></h3>\n')
        if step.error:
            parts.append(f"<pre>{escape(step.error)}</pre>\n")
        if step.failures:
            parts.append(_check_table(step.failures[:_MOST_FAILURES]))
        more = len(step.failures) - _MOST_FAILURES
        if more > 0:
            parts.append(f"<p>{_count(more, 'more failed check')} in the step.</p>\n")
    parts.append("</section>\n")
    return "".join(parts)


def _overview(report: Report) -> str:
    rows = "".join(
        f'<tr><td class="number">{step.number}</td>'
        f'<td><a href="#{_anchor(step)}">{escape(step.title)}</a></td>'
        f'{_outcome_cell(step)}<td class="number">{_ok_count(step)}</td>'
        f'<td class="number">{duration(step.seconds)}</td></tr>\n'
        for step in report.steps
    )
    head = (
        '<th class="number">Step</th><th></th><th>Outcome</th>'
        '<th class="number">Checks ok</th><th class="number">Time</th>'
    )
    return f"<section>\n<h2>Steps</h2>\n{_table(head, rows)}</section>\n"


def _environment(report: Report) -> str:
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>\n"
        for name, value in report.environment.items()
    )
    if not rows:
        return ""
    return f"<section>\n<h2>Environment</h2>\n{_table('<th>What</th><th>Found</th>', rows)}</section>\n"


# ---------------------------------------------------------------------------------------- the steps


def _step(step: StepReport) -> str:
    kind = _CLASSES[step.outcome]
    parts = [
        f'<section id="{_anchor(step)}">\n<h2>{_heading(step)}</h2>\n'
        f'<p><span class="outcome {kind}">{_SIGNS[step.outcome]} {escape(step.outcome)}</span> '
        f'<span class="faint">{_ok_count(step)} checks ok, {duration(step.seconds)}</span></p>\n'
    ]
    if step.error:
        parts.append(f"<pre>{escape(step.error)}</pre>\n")
    parts += [f"<p>{escape(note)}</p>\n" for note in step.notes]
    parts.append(_checks(step.failures, "failed check", fold=False))
    parts += [_figures(table) for table in step.tables]
    passed = [check for check in step.checks if check.ok]
    parts.append(_checks(passed, "passed check", fold=len(passed) > _SHOWN_CHECKS))
    parts.append("</section>\n")
    return "".join(parts)


def _checks(checks: Sequence[StepCheck], what: str, *, fold: bool) -> str:
    if not checks:
        return ""
    heading, table = _count(len(checks), what), _check_table(checks)
    return _folded(heading, table) if fold else f"<h3>{heading}</h3>\n{table}"


def _check_table(checks: Sequence[StepCheck]) -> str:
    rows = "".join(
        f'<tr{"" if check.ok else " class=failed"}><td class="sign {"good" if check.ok else "bad"}">'
        f"{_SIGNS['passed' if check.ok else 'failed']}</td><td>{escape(check.name)}</td>"
        f"<td>{escape(check.expected)}</td><td>{escape(check.found)}{_note(check)}</td></tr>\n"
        for check in checks
    )
    head = '<th class="sign"></th><th class="what">Check</th><th class="expected">Expected</th><th>Found</th>'
    return _table(head, rows, "checks")


def _note(check: StepCheck) -> str:
    return f'<br><span class="faint">{escape(check.note)}</span>' if check.note else ""


# ------------------------------------------------------------------------------- tables and charts


def _figures(table: Table) -> str:
    """Renders a table, and above it the charts of the columns that have one."""
    numeric = [_is_numeric(table, index) for index in range(len(table.columns))]
    head = "".join(
        f"<th{_align(right)}>{escape(name)}</th>" for name, right in zip(table.columns, numeric, strict=True)
    )
    rows = "".join(
        "<tr>"
        + "".join(f"<td{_align(right)}>{_cell(c)}</td>" for c, right in zip(row, numeric, strict=True))
        + "</tr>\n"
        for row in table.rows
    )
    shown = _table(head, rows, "figures")
    if len(table.rows) > _SHOWN_ROWS:
        shown = _folded(_count(len(table.rows), "row"), shown)
    return f"<h3>{escape(table.title)}</h3>\n{_charts(table)}{shown}"


def _charts(table: Table) -> str:
    if table.columns and table.columns[0] == TIME:
        return "".join(_lines(table))
    parts = []
    if all(name in table.columns for name in STAGES):
        mark = P90 if P90 in table.columns else ""
        parts.append(bar_chart("Time of a call, median [ms]", STAGES, _bars(table, STAGES, mark), mark))
    for name in table.columns:
        if name.startswith(CALLS_PER_S):
            parts.append(bar_chart(name, (name,), _bars(table, (name,), "")))
    return "".join(parts)


def _lines(table: Table) -> Iterable[str]:
    drawn = 0
    for index, name in enumerate(table.columns[1:], 1):
        points = [
            (x, y)
            for x, y in ((_finite(row[0]), _finite(row[index])) for row in table.rows)
            if x is not None and y is not None
        ]
        if len(points) > 1:
            yield line_chart(name, TIME, [x for x, _ in points], [y for _, y in points], drawn % 4)
            drawn += 1


def _bars(table: Table, parts: Sequence[str], mark: str) -> list[Bar]:
    """Returns a bar for each row that has a number for every part, labelled with the row's text."""
    places = [table.columns.index(name) for name in parts]
    found = []
    for row in table.rows[:_MOST_BARS]:
        lengths = [_finite(row[place]) for place in places]
        whole = [length for length in lengths if length is not None]
        if len(whole) == len(lengths):
            label = " ".join(cell for cell in row if isinstance(cell, str))
            found.append(Bar(label, tuple(whole), _finite(row[table.columns.index(mark)]) if mark else None))
    return found


def _finite(cell: Cell) -> float | None:
    """Returns the number in a cell, None if there is none; non-finite numbers are text after JSON."""
    if isinstance(cell, bool) or not isinstance(cell, (int, float)) or not math.isfinite(cell):
        return None
    return float(cell)


def _is_numeric(table: Table, index: int) -> bool:
    cells = [row[index] for row in table.rows if row[index] is not None]
    return bool(cells) and all(isinstance(c, (int, float)) and not isinstance(c, bool) for c in cells)


def _cell(cell: Cell) -> str:
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return escape(cell if isinstance(cell, str) else number(cell))


# ------------------------------------------------------------------------------------ small pieces


def _table(head: str, rows: str, kind: str = "plain") -> str:
    return (
        f'<div class="wide"><table class="{kind}">\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{rows}</tbody>\n</table></div>\n"
    )


def _folded(summary: str, content: str) -> str:
    return f"<details>\n<summary>{escape(summary)}</summary>\n{content}</details>\n"


def _align(right: bool) -> str:
    return ' class="number"' if right else ""


def _anchor(step: StepReport) -> str:
    return f"step-{step.number}"


def _heading(step: StepReport) -> str:
    return escape(f"{step.number}. {step.title}")


def _outcome_cell(step: StepReport) -> str:
    return f'<td class="outcome {_CLASSES[step.outcome]}">{_SIGNS[step.outcome]} {escape(step.outcome)}</td>'


def _ok_count(step: StepReport) -> str:
    return f"{len(step.checks) - len(step.failures)} of {len(step.checks)}"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """Formats a time, such as ``"8.2 s"`` or ``"12 min 05 s"``."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
