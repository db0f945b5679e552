"""What an acceptance found: plain data, as JSON and back.

The JSON has one object with the keys below, always in this order; a reader checks `schema` first.

    schema       1
    ok           whether every chosen step passed
    simulated    whether CANN was the simulation of the tests: then nothing here is about hardware
    version      of npugrad
    started      UTC, ISO 8601
    environment  name -> text: device, product, chip, versions
    left_out     [text], what an acceptance of all would have done beside
    steps        [{number, key, title, outcome, seconds, checks, tables, notes, error}]
                 outcome: passed | failed | skipped; error: why it failed by an exception, or was skipped
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
"""Version of the JSON; raised when a reader of the old one would misread the new one."""

STEPS_IN_ALL = 11
"""Steps of a whole acceptance."""

StepOutcome = Literal["passed", "failed", "skipped"]
Cell = str | int | float | bool | None


@dataclass(frozen=True)
class StepCheck:
    """One thing that was looked at.

    Attributes:
        name: What, such as ``"group_norm_backward float16: grad_input"``.
        ok: Whether it is as expected.
        expected: What was expected, for a person.
        found: What was found.
        note: What else helps to judge it.
    """

    name: str
    ok: bool
    expected: str
    found: str
    note: str = ""


@dataclass(frozen=True)
class Table:
    """Figures side by side.

    Attributes:
        title: What they are.
        columns: Names, with units.
        rows: Cells, as many in each row as there are columns. A number that is not finite travels as text.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class StepReport:
    """What became of one step.

    Attributes:
        number: 0 to 10.
        key: Short name, such as ``"round_trip"``.
        title: For a person.
        outcome: ``"passed"`` when there were checks, every one was ok and nothing raised.
        seconds: How long it took.
        checks: In the order they were made.
        tables: In the order they were made.
        notes: Sentences.
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
        """The checks that are not ok."""
        return tuple(check for check in self.checks if not check.ok)


@dataclass(frozen=True)
class Report:
    """What an acceptance found.

    Attributes:
        version: Of npugrad.
        started: When, UTC, ISO 8601.
        simulated: Whether CANN was the simulation of the tests.
        environment: Device, product, chip and versions by name, in the order to show them.
        steps: The chosen steps in order.
        left_out: What was left out of the steps, in sentences; empty for a whole acceptance.
    """

    version: str
    started: str
    simulated: bool
    environment: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[StepReport, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there were steps and every one passed."""
        return bool(self.steps) and all(step.outcome == "passed" for step in self.steps)

    @property
    def verdict(self) -> str:
        """In a word, for a person; some chosen steps that pass are no acceptance of the device."""
        if not self.ok:
            return "NOT ACCEPTED"
        whole = len(self.steps) == STEPS_IN_ALL and not self.left_out
        return "ACCEPTED" if whole else "ACCEPTED IN PART"

    def to_json(self) -> str:
        """The text of the file; equal reports give equal text."""
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
            ValueError: It is no report, or of another schema.
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
    """JSON has no infinity and no NaN: they become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: _without_non_finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_non_finite(item) for item in value]
    return value
