"""What went where: counts of one `remote`, and their table."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_HEADER = ("operator", "where", "why", "calls", "MiB", "seconds")


@dataclass(frozen=True)
class SummaryRow:
    """Calls of one operator that went one way for one reason.

    Attributes:
        operator: Name such as ``"group_norm_backward"``.
        is_sent: Whether the service computed them.
        why: Why they stayed here, or ``"as float32"`` where mixed types were sent as such; else empty.
        calls: How many.
        bytes: Bytes of their operands and results, whether or not they travelled.
        seconds: Time they took, travel included.

    Example:
        >>> row = SummaryRow("group_norm_backward", is_sent=True, why="", calls=2, bytes=2**20, seconds=0.5)
        >>> row.bytes // row.calls
        524288
    """

    operator: str
    is_sent: bool
    why: str
    calls: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Summary:
    """What went where since a `remote` was made; printing it gives a table.

    Attributes:
        rows: By operator, what was sent first.

    Example:
        >>> row = SummaryRow("group_norm_backward", is_sent=True, why="", calls=2, bytes=2**20, seconds=0.5)
        >>> print(Summary((row,)))
        operator             where  why  calls   MiB  seconds
        group_norm_backward  sent   -        2  1.00    0.500
        >>> Summary((row,)).sent
        2
    """

    rows: tuple[SummaryRow, ...]

    @property
    def sent(self) -> int:
        """Calls that the service computed."""
        return sum(row.calls for row in self.rows if row.is_sent)

    @property
    def local(self) -> int:
        """Calls that stayed here."""
        return sum(row.calls for row in self.rows if not row.is_sent)

    @property
    def as_float32(self) -> int:
        """Calls of mixed types that were sent as float32 and whose results were cast back."""
        return sum(row.calls for row in self.rows if row.is_sent and row.why)

    @property
    def failed(self) -> int:
        """Calls that were tried at the service, failed there, and then ran here."""
        return sum(row.calls for row in self.rows if row.why.startswith(FAILED))

    def __str__(self) -> str:
        """The table."""
        cells = [_HEADER, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[column]) for line in cells) for column in range(len(_HEADER))]
        return "\n".join(_line(line, widths) for line in cells)


FAILED = "service failed: "
"""How the reason of a call begins that was tried at the service and then ran here."""
_NUMBERS_FROM = 3


def _cells(row: SummaryRow) -> tuple[str, ...]:
    where = "sent" if row.is_sent else "local"
    numbers = (str(row.calls), f"{row.bytes / 2**20:.2f}", f"{row.seconds:.3f}")
    return (row.operator, where, row.why or "-", *numbers)


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    pairs = enumerate(zip(cells, widths, strict=True))
    padded = (cell.rjust(width) if i >= _NUMBERS_FROM else cell.ljust(width) for i, (cell, width) in pairs)
    return "  ".join(padded).rstrip()


class Ledger:
    """Counts calls, and says what is new; any number of threads may use one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[tuple[str, bool, str], tuple[int, int, float]] = {}
        self._said: set[str] = set()

    def add(self, operator: str, *, is_sent: bool, why: str, nbytes: int, seconds: float) -> None:
        """Counts one call."""
        key = (operator, is_sent, why)
        with self._lock:
            calls, total, spent = self._rows.get(key, (0, 0, 0.0))
            self._rows[key] = (calls + 1, total + nbytes, spent + seconds)

    def once(self, kind: str, say: Callable[[], None]) -> None:
        """Says something unless something of this kind was said before."""
        with self._lock:
            if kind in self._said:
                return
            self._said.add(kind)
        say()

    def summary(self) -> Summary:
        """The counts so far."""
        with self._lock:
            rows = [SummaryRow(*key, *counts) for key, counts in self._rows.items()]
        return Summary(tuple(sorted(rows, key=lambda row: (row.operator, not row.is_sent, row.why))))
