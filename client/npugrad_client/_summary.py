"""Counts of calls by where they ran, and their table."""

from __future__ import annotations

import textwrap
import threading
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

from npugrad.representation import counted, html_table, short_repr, some
from npugrad.timeline import SERVER_STAGES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from npugrad.timeline import Timeline
    from npugrad_client._costs import CostRow

WIDTH = 80
"""Maximum width of the text in columns."""
_MOST_SEEN = 8
_HEADER = ("operator", "where", "why", "calls", "MiB", "seconds")
TRANSPORT = "transport"
"""Key of `SummaryRow.stages` for the time that no stage covers."""
_STAGES = ("pack", "wait", "send", *SERVER_STAGES, "read", "unpack", TRANSPORT)
_STAGES_TITLE = "Time of sent calls by stage, in ms a call; stages below 1 % are left out"
_STAGES_HEADER = ("operator", "why", "ms a call")
_COSTS_TITLE = "Time saved by sending, by operator and kind; negative where sending was slower"
_COSTS_HEADER = ("operator", "kind", "sent", "ms sent", "local", "ms local", "saved s")
_MOST_COSTS = 20
"""Maximum number of kinds with their own line."""
_SHOWN_FROM = 0.01
"""Share of a call's time from which a stage gets a column; that of the operator itself always has one."""


@dataclass(frozen=True)
class SummaryRow:
    """Calls of one operator that ran in one place for one reason.

    Attributes:
        operator: Name such as ``"group_norm_backward"``.
        is_sent: Whether they ran on the service.
        why: Why they ran locally, or ``"as float32"`` if mixed dtypes were sent as float32; else empty.
        calls: Number of calls.
        bytes: Bytes of their operands and results, whether sent or not.
        seconds: Time they took, transport included.
        stages: For calls that were sent, seconds by stage as in a `Timeline`, with ``"transport"`` for time
            outside all stages. The sum may exceed `seconds`, because stages of client and server overlap.

    Example:
        >>> row = SummaryRow("group_norm_backward", is_sent=True, why="", calls=2, bytes=2**20, seconds=0.5)
        >>> row.bytes // row.calls
        524288
    """

    __repr__ = short_repr

    operator: str
    is_sent: bool
    why: str
    calls: int
    bytes: int
    seconds: float
    stages: Mapping[str, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, repr=False)
class Summary:
    """Counts of what ran where since a `remote` or `Policies` was created; prints as a table.

    Attributes:
        rows: Rows by operator, sent calls first.
        costs: Time of calls sent and run locally, by operator and kind, longest first. Local times are known
            for the kinds that ``policy="faster"`` tried locally.
        seen: Autograd nodes that ran inside a `remote` that has not handled any operator yet; None otherwise.

    Example:
        >>> row = SummaryRow("group_norm_backward", is_sent=True, why="", calls=2, bytes=2**20, seconds=0.5)
        >>> print(Summary((row,)))
        operator             where  why  calls   MiB  seconds
        group_norm_backward  sent   -        2  1.00    0.500
        >>> Summary((row,)).sent
        2
    """

    rows: tuple[SummaryRow, ...]
    costs: tuple[CostRow, ...] = ()
    seen: tuple[str, ...] | None = field(default=None, compare=False)

    @property
    def sent(self) -> int:
        """Number of calls that ran on the service."""
        return sum(row.calls for row in self.rows if row.is_sent)

    @property
    def local(self) -> int:
        """Number of calls that ran locally."""
        return sum(row.calls for row in self.rows if not row.is_sent)

    @property
    def as_float32(self) -> int:
        """Number of calls with mixed dtypes that were sent as float32 and cast back."""
        return sum(row.calls for row in self.rows if row.is_sent and row.why)

    @property
    def failed(self) -> int:
        """Number of calls that failed on the service and then ran locally."""
        return sum(row.calls for row in self.rows if row.why.startswith(FAILED))

    @property
    def won_s(self) -> float | None:
        """Seconds saved by sending, over kinds whose local time is known; None if there are none."""
        known = [row.won_s for row in self.costs if row.won_s is not None]
        return sum(known) if known else None

    def __str__(self) -> str:
        """The table, then one of where the time of sent calls went, and one of what sending saved."""
        parts = (self._calls(), _stages_part(self.rows), _costs_part(self))
        return "\n\n".join(part for part in parts if part)

    def _calls(self) -> str:
        if not self.rows:
            return textwrap.fill(_nothing(self.seen), WIDTH)
        return _fitted([_HEADER, *(_cells(row) for row in self.rows)], texts=3)

    def __repr__(self) -> str:
        """How many calls were sent and how many were not; `str` gives the tables."""
        won_s = self.won_s
        won = "" if won_s is None else f", sending saved {won_s:.3f} s"
        return f"Summary({counted(self.sent, 'call')} sent, {self.local} kept local{won})"

    def _repr_html_(self) -> str:
        """The same tables for notebooks."""
        calls = html_table("Calls", _HEADER, map(_cells, self.rows))
        tables = [calls if self.rows else f"<p>{escape(_nothing(self.seen))}</p>"]
        measured = [row for row in self.rows if row.stages]
        if measured:
            columns = _columns(measured)
            cells = (_stage_cells(row, columns) for row in measured)
            tables.append(html_table(_STAGES_TITLE, (*_STAGES_HEADER, *columns), cells))
        if self.costs:
            tables.append(html_table(_COSTS_TITLE, _COSTS_HEADER, map(_cost_cells, self.costs[:_MOST_COSTS])))
            tables += [f"<p>{escape(sentence)}</p>" for sentence in _costs_sentences(self)]
        return "\n".join(tables)


FAILED = "service failed: "
"""Start of the reason of a call that failed on the service and then ran here."""


def _cells(row: SummaryRow) -> tuple[str, ...]:
    where = "sent" if row.is_sent else "local"
    numbers = (str(row.calls), f"{row.bytes / 2**20:.2f}", f"{row.seconds:.3f}")
    return (row.operator, where, row.why or "-", *numbers)


def _nothing(seen: tuple[str, ...] | None) -> str:
    """Why no operator of the service ran, in a sentence."""
    if seen is None:
        return "No call was sent or run locally yet; calls that raised an error are not counted."
    if not seen:
        return "Nothing was sent: no backward pass ran inside. Call backward() inside `with remote(...)`."
    return (
        "Nothing was sent: this `remote` handled none of the backward operators that ran inside: "
        f"{some(seen, _MOST_SEEN, '.seen')}. `npugrad ops` lists the operators of the service."
    )


def _columns(measured: Sequence[SummaryRow]) -> list[str]:
    return [stage for stage in _STAGES if any(_is_shown(stage, row) for row in measured)]


def _stages_part(rows: Sequence[SummaryRow]) -> str:
    measured = [row for row in rows if row.stages]
    if not measured:
        return ""
    header = (*_STAGES_HEADER, *_columns(measured))
    lines = [_stage_cells(row, header[len(_STAGES_HEADER) :]) for row in measured]
    table = _table([header, *lines], texts=2)
    if _width(table) > WIDTH:
        table = "\n".join(_stage_sentence(header, cells) for cells in lines)
    return f"{_STAGES_TITLE}\n{table}"


def _stage_sentence(header: tuple[str, ...], cells: tuple[str, ...]) -> str:
    """Formats a row of a table that is too wide: the operator, and its stages below."""
    operator, why, whole, *stages = cells
    reason = "" if why == "-" else f", {why}"
    named = ", ".join(f"{name} {cell}" for name, cell in zip(header[3:], stages, strict=True))
    return f"{operator}{reason}: {whole}\n{_below(named)}"


def _costs_part(summary: Summary) -> str:
    """Formats what sending saved, by kind and in a sentence."""
    costs = summary.costs
    if not costs:
        return ""
    lines = [_COSTS_HEADER, *(_cost_cells(row) for row in costs[:_MOST_COSTS])]
    parts = [_COSTS_TITLE, _fitted(lines, texts=2)]
    return "\n".join([*parts, *(textwrap.fill(each, WIDTH) for each in _costs_sentences(summary))])


def _costs_sentences(summary: Summary) -> list[str]:
    """States what the table of costs leaves out, the total, and what is unknown."""
    costs, parts = summary.costs, []
    if len(costs) > _MOST_COSTS:
        parts.append(f"and {len(costs) - _MOST_COSTS} more kinds, which took less, in summary().costs")
    won_s, unknown = summary.won_s, sum(row.sent for row in costs if row.won_s is None)
    if won_s is not None:
        parts.append(f"Sending saved {won_s:.3f} s." if won_s >= 0 else f"Sending cost {-won_s:.3f} s.")
    if unknown:
        parts.append(
            f"How long {counted(unknown, 'sent call')} would have taken here is unknown; "
            'to find out, use remote(..., policy="faster") or `npugrad advise`.'
        )
    return parts


def _cost_cells(row: CostRow) -> tuple[str, ...]:
    sent, local = (_ms(seconds) for seconds in (row.sent_s, row.local_s))
    won = "-" if row.won_s is None else f"{row.won_s:.3f}"
    return (row.operator, row.kind, str(row.sent), sent, str(row.local), local, won if row.sent else "-")


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"


def _is_shown(stage: str, row: SummaryRow) -> bool:
    return stage == "run" or row.stages.get(stage, 0.0) >= row.seconds * _SHOWN_FROM


def _stage_cells(row: SummaryRow, stages: Sequence[str]) -> tuple[str, ...]:
    seconds = (row.seconds, *(row.stages.get(stage, 0.0) for stage in stages))
    return (row.operator, row.why or "-", *(f"{each / row.calls * 1e3:.1f}" for each in seconds))


def _table(lines: Sequence[tuple[str, ...]], texts: int) -> str:
    """Formats lines of cells; the first `texts` cells are texts, the others numbers."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(_line(line, widths, texts) for line in lines)


def _fitted(lines: Sequence[tuple[str, ...]], texts: int) -> str:
    """Formats a table; if it is too wide, moves the last text column to separate lines."""
    table = _table(lines, texts)
    if _width(table) <= WIDTH:
        return table
    moved, kept = texts - 1, [(*cells[: texts - 1], *cells[texts:]) for cells in lines]
    header, *rows = _table(kept, texts - 1).splitlines()
    told = ("" if cells[moved] == "-" else f"\n{_below(cells[moved])}" for cells in lines[1:])
    return "\n".join([header, *(row + text for row, text in zip(rows, told, strict=True))])


def _below(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="    ", subsequent_indent="    ")


def _width(table: str) -> int:
    return max(map(len, table.splitlines()))


def _line(cells: tuple[str, ...], widths: Sequence[int], texts: int) -> str:
    pairs = enumerate(zip(cells, widths, strict=True))
    padded = (cell.ljust(width) if i < texts else cell.rjust(width) for i, (cell, width) in pairs)
    return "  ".join(padded).rstrip()


class Ledger:
    """Counts calls, and reports each kind once; any number of threads may use one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[tuple[str, bool, str], tuple[int, int, float]] = {}
        self._stages: dict[tuple[str, bool, str], dict[str, float]] = {}
        self._said: set[str] = set()

    def add(
        self,
        operator: str,
        *,
        is_sent: bool,
        why: str,
        nbytes: int,
        seconds: float,
        timeline: Timeline | None = None,
    ) -> None:
        """Counts one call."""
        key = (operator, is_sent, why)
        spent = {} if timeline is None else {**timeline.by_stage, TRANSPORT: timeline.transport_s}
        with self._lock:
            calls, total, so_far_s = self._rows.get(key, (0, 0, 0.0))
            self._rows[key] = (calls + 1, total + nbytes, so_far_s + seconds)
            stages = self._stages.setdefault(key, {})
            for stage, stage_s in spent.items():
                stages[stage] = stages.get(stage, 0.0) + stage_s

    def once(self, kind: str, say: Callable[[], None]) -> None:
        """Calls `say` unless this was done for the same kind before."""
        with self._lock:
            if kind in self._said:
                return
            self._said.add(kind)
        say()

    def summary(self, costs: Sequence[CostRow] = ()) -> Summary:
        """Returns the counts so far, with the known costs."""
        with self._lock:
            rows = [SummaryRow(*key, *counts, {**self._stages[key]}) for key, counts in self._rows.items()]
        rows.sort(key=lambda row: (row.operator, not row.is_sent, row.why))
        return Summary(tuple(rows), tuple(costs))
