"""Runs the demo's calls and shows the results in a table."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from npugrad.agreement import agreement

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from npugrad.call import ExecutionInfo
    from npugrad.workloads import Filled
    from npugrad_client import Client
    from npugrad_client.demo._cases import Case


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        case: What was called.
        shapes: Shapes of the leading operands.
        info: What produced the results.
        wall_s: Seconds the whole call took for the caller.
        error: Largest error over the largest reference value, worst output.
        used: Largest share of the tolerance that an output used; at most 1 when all is well.
        explanation: How pixel edges explain the results; empty if there is nothing to explain.
        official: Whether the results equal the official example's values; None if there are none.
        is_right: Whether the results are within all tolerances.
    """

    case: Case
    shapes: str
    info: ExecutionInfo
    wall_s: float
    error: float
    used: float
    explanation: str
    official: bool | None
    is_right: bool


def run_case(client: Client, case: Case) -> Row:
    """Calls the service and compares every result with the float64 reference, computed here."""
    inputs = case.make()
    start = time.perf_counter()
    answer = getattr(client, case.record.name)(**inputs.operands, **inputs.attrs, label="demo")
    wall_s = time.perf_counter() - start
    results = {p.name: getattr(answer, p.name) for p in case.record.outputs}
    wanted = {name: array for name, array in results.items() if array is not None}
    found = agreement(case.record, inputs.operands, inputs.attrs, wanted)
    official = _official(inputs, results)
    return Row(
        case=case,
        shapes=_shapes(case, inputs),
        info=answer.info,
        wall_s=wall_s,
        error=max(c.max_relative_error for c in found.comparisons.values()),
        used=max(c.worst for c in found.comparisons.values()),
        explanation=found.explanation,
        official=official,
        is_right=found.ok and official is not False,
    )


def _official(inputs: Filled, results: dict[str, npt.NDArray[Any] | None]) -> bool | None:
    if not inputs.expected:
        return None
    return all(
        np.allclose(np.asarray(results[name], np.float64), values, rtol=1e-6, atol=inputs.expected_atol)
        for name, values in inputs.expected.items()
    )


def _shapes(case: Case, inputs: Filled) -> str:
    first = [p.name for p in case.record.inputs][:2]
    arrays = [inputs.operands[name] for name in first]
    return ", ".join("x".join(map(str, a.shape)) for a in arrays if a is not None)


_VERDICTS = {None: "", True: " = official values", False: ", OFFICIAL VALUES DIFFER"}
_TEXT_COLUMNS = ("case", "dtype", "shapes of the first operands", "device")
_NUMBER_COLUMNS = ("error", "of tolerance", "queued s", "run s", "transfer s")


def tables(rows: list[Row]) -> Iterator[Table]:
    """The rows as one table for each operator."""
    for record in dict.fromkeys(row.case.record for row in rows):
        result = Table(title=f"{record.name} ({record.aclnn_name})", title_justify="left", title_style="bold")
        for column in _TEXT_COLUMNS:
            result.add_column(column, overflow="fold")
        for column in _NUMBER_COLUMNS:
            result.add_column(column, justify="right", no_wrap=True)
        result.add_column("result", overflow="fold")
        for row in rows:
            if row.case.record is record:
                result.add_row(*_cells(row), style="" if row.is_right else "bold red")
        yield result


def _verdict(row: Row) -> str:
    return ("right" if row.is_right else "WRONG") + _VERDICTS[row.official]


def _cells(row: Row) -> list[str]:
    info = row.info
    simulated = ", SIMULATED" if info.simulated else ""
    return [
        row.case.title,
        str(row.case.dtype),
        row.shapes,
        f"{info.device} ({info.backend}{simulated})",
        f"{row.error:.1e}",
        f"{row.used:.0%}",
        f"{info.queued_s:.3f}",
        f"{info.run_s:.3f}",
        f"{max(row.wall_s - info.queued_s - info.run_s, 0.0):.3f}",
        ", ".join(filter(None, (_verdict(row), row.explanation))),
    ]
