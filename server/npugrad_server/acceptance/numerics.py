"""Compares results with the float64 reference, and keeps the largest errors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from npugrad.agreement import agreement
from npugrad_server.worker.protocol import CallDone

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

    from npugrad.agreement import Agreement
    from npugrad.tolerance import Comparison
    from npugrad_server.acceptance.job import Job, Ran
    from npugrad_server.acceptance.report import Cell
    from npugrad_server.acceptance.step import StepLog


def compare_with_reference(job: Job, outputs: Mapping[str, npt.NDArray[Any]]) -> Agreement:
    """Compares a call's outputs with the record's float64 reference, within the record's tolerance."""
    return agreement(job.record, job.arrays, job.call.attrs, outputs)


@dataclass
class Accuracy:
    """Largest errors of many calls, by operator, type, kind of size and output."""

    _worst: dict[tuple[str, str, str, str], _Row] = field(default_factory=dict)

    def check(self, out: StepLog, name: str, kind: str, dtype: str, job: Job, ran: Ran) -> bool:
        """Records whether a call's results are right, and keeps its errors.

        Args:
            out: Receives the check.
            name: Name of the check.
            kind: ``"small"`` or the name of a realistic size.
            dtype: Type of the results.
            job: The call.
            ran: Its outcome.
        """
        if not isinstance(ran.answer, CallDone):
            out.keep_call(name, job, ran)
            return out.check(name, False, "a result", _words(ran))
        found = compare_with_reference(job, ran.outputs)
        for output, comparison in found.comparisons.items():
            row = self._worst.setdefault((job.record.name, dtype, kind, output), _Row())
            row.take(comparison)
        if not found.ok:
            out.keep_call(name, job, ran)
        return out.check(name, found.ok, "within tolerance of the float64 reference", str(found))

    def rows(self) -> Iterator[tuple[Cell, ...]]:
        """Yields operator, type, kind, output, calls, largest relative error, largest share of tolerance."""
        for key, row in self._worst.items():
            yield (*key, row.calls, float(f"{row.error:.3g}"), float(f"{row.worst:.3g}"))


COLUMNS = ("operator", "dtype", "sizes", "output", "calls", "max |e| / max |g|", "share of allowed")
"""Columns of `Accuracy.rows`."""


@dataclass
class _Row:
    calls: int = 0
    error: float = 0.0
    worst: float = 0.0

    def take(self, found: Comparison) -> None:
        self.calls += 1
        self.error = max(self.error, found.max_relative_error)
        self.worst = max(self.worst, found.worst)


def _words(ran: Ran) -> str:
    answer = ran.answer
    return "a result" if isinstance(answer, CallDone) else f"{type(answer).__name__}: {answer.message}"
