"""The findings of an acceptance: plain data, converted to and from JSON.

The JSON is one object with the keys below, always in this order; a reader checks `schema` first.

    schema       1
    ok           whether every chosen step passed
    simulated    whether CANN was the tests' simulation; if so, nothing here is about hardware
    version      of npugrad
    started      UTC, ISO 8601
    environment  name -> text: device, product, chip, versions
    left_out     [text], what a full acceptance would also have done
    steps        [{number, key, title, outcome, seconds, checks, tables, notes, error}]
                 outcome: passed | failed | skipped; error: the exception that ended it, or why it was skipped
                 checks:  [{name, ok, expected, found, note}]
                 tables:  [{title, columns, rows}], cells are text, numbers, true, false or null
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEMA = 1
"""Version of the JSON; incremented when a reader of the old one would misread the new one."""

STEPS_IN_ALL = 11
"""Number of steps of a full acceptance."""

StepOutcome = Literal["passed", "failed", "skipped"]
Cell = str | int | float | bool | None


@dataclass(frozen=True)
class StepCheck:
    """One check.

    Attributes:
        name: What was checked, such as ``"group_norm_backward float16: grad_input"``.
        ok: Whether the result is as expected.
        expected: What was expected, as readable text.
        found: What was found, likewise.
        note: Anything else that helps to judge it.
    """

    name: str
    ok: bool
    expected: str
    found: str
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A table of figures.

    Attributes:
        title: What it shows.
        columns: Names, with units.
        rows: Cells, one for each column. In JSON, non-finite numbers become text.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class StepReport:
    """The outcome of one step.

    Attributes:
        number: 0 to 10.
        key: Short name, such as ``"round_trip"``.
        title: Readable name.
        outcome: ``"passed"`` if there were checks, all were ok and no exception ended it.
        seconds: How long it took.
        checks: In the order they were made.
        tables: In the order they were made.
        notes: Remarks, one sentence each.
        error: The exception that ended it, or why it was skipped; empty otherwise.
    """

    number: int
    key: str
    title: str
    outcome: StepOutcome
    seconds: float
    checks: tuple[StepCheck, ...] = ()
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()
    error: str = ""

    @property
    def failures(self) -> tuple[StepCheck, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if not check.ok)


@dataclass(frozen=True)
class Report:
    """The findings of an acceptance.

    Attributes:
        version: Version of npugrad.
        started: Start time, UTC, ISO 8601.
        simulated: Whether CANN was the tests' simulation.
        environment: Device, product, chip and versions by name, in the order to show them.
        steps: The chosen steps in order.
        left_out: What was left out of the steps, in sentences; empty for a full acceptance.
    """

    version: str
    started: str
    simulated: bool
    environment: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[StepReport, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there were steps and all passed."""
        return bool(self.steps) and all(step.outcome == "passed" for step in self.steps)

    @property
    def verdict(self) -> str:
        """The verdict as readable text; passing only some of the steps does not accept the device."""
        if not self.ok:
            return "NOT ACCEPTED"
        whole = len(self.steps) == STEPS_IN_ALL and not self.left_out
        return "ACCEPTED" if whole else "ACCEPTED IN PART"

    def to_json(self) -> str:
        """Returns the text of the JSON file; equal reports give equal text."""
        found = {
            "schema": SCHEMA,
            "ok": self.ok,
            "simulated": self.simulated,
            "version": self.version,
            "started": self.started,
            "environment": dict(self.environment),
            "left_out": list(self.left_out),
            "steps": [asdict(step) for step in self.steps],
        }
        return json.dumps(_without_non_finite(found), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: The text is not a report, or has another schema.
        """
        try:
            found = json.loads(text)
            schema = found["schema"]
            if schema != SCHEMA:
                raise ValueError(f"found a report of schema {schema}; expected {SCHEMA}")
            steps = tuple(_step(step) for step in found["steps"])
            environment = {str(name): str(value) for name, value in found["environment"].items()}
            left_out = tuple(map(str, found.get("left_out", ())))  # older reports have none
            return cls(found["version"], found["started"], found["simulated"], environment, steps, left_out)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a report of an acceptance: {error!r}") from error


def _step(found: Mapping[str, Any]) -> StepReport:
    if found["outcome"] not in get_args(StepOutcome):
        raise ValueError(f"found outcome {found['outcome']!r}; expected {', '.join(get_args(StepOutcome))}")
    tables = tuple(
        Table(table["title"], tuple(table["columns"]), tuple(map(tuple, table["rows"])))
        for table in found["tables"]
    )
    return StepReport(
        number=found["number"],
        key=found["key"],
        title=found["title"],
        outcome=cast("StepOutcome", found["outcome"]),
        seconds=found["seconds"],
        checks=tuple(StepCheck(**check) for check in found["checks"]),
        tables=tables,
        notes=tuple(found["notes"]),
        error=found["error"],
    )


def _without_non_finite(value: Any) -> Any:
    """Turns infinities and NaNs into text, since JSON has neither."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: _without_non_finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_non_finite(item) for item in value]
    return value
