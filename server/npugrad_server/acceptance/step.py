"""The definition of a step, and the log to which it writes its findings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from npugrad_server.acceptance.report import StepCheck, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy.typing as npt

    from npugrad_server.acceptance.job import Job, Ran
    from npugrad_server.acceptance.report import Cell
    from npugrad_server.acceptance.rig import Rig


class StepSkipped(Exception):
    """A step cannot run here, which is not a failure; the message says why."""


@dataclass(frozen=True)
class Step:
    """One step of the acceptance.

    Attributes:
        number: 0 to 10; steps run in this order.
        key: Short name for files and options.
        title: A few words.
        about: One sentence: what it shows.
        run: Runs the step and logs its findings. An exception fails the step; the next one still runs.
        needs_device: Whether it is pointless if the device does not open.
        lasts: Whether the rig's `soak_s` is added to the time it may take.
    """

    number: int
    key: str
    title: str
    about: str
    run: Callable[[Rig, StepLog], None]
    needs_device: bool = True
    lasts: bool = False


class Listener(Protocol):
    """Receives the progress of a running step."""

    def progress(self, done: int, total: int, what: str) -> None:
        """`done` of `total` parts of the step are done; `what` comes next."""

    def checked(self, check: StepCheck) -> None:
        """A check was made."""


class Keeper(Protocol):
    """Keeps the data of failures."""

    def keep(self, name: str, arrays: Mapping[str, npt.NDArray[Any] | None]) -> None:
        """Keeps arrays by name, if there is room left."""


class StepLog:
    """The findings of one step.

    Attributes:
        checks: In the order they were made.
        tables: In the order they were made.
        notes: Remarks, one sentence each.
    """

    def __init__(self, listener: Listener | None = None, keeper: Keeper | None = None) -> None:
        """Creates an empty log.

        Args:
            listener: Receives progress and checks; none by default.
            keeper: Keeps the data of failures; none by default.
        """
        self.checks: list[StepCheck] = []
        self.tables: list[Table] = []
        self.notes: list[str] = []
        self._listener, self._keeper = listener, keeper

    @property
    def ok(self) -> bool:
        """Whether every check so far is ok."""
        return all(check.ok for check in self.checks)

    def check(self, name: str, ok: bool, expected: object, found: object, note: str = "") -> bool:
        """Records a check, and returns whether it is ok."""
        check = StepCheck(name, bool(ok), str(expected), str(found), note)
        self.checks.append(check)
        if self._listener is not None:
            self._listener.checked(check)
        return check.ok

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> None:
        """Records a table.

        Raises:
            ValueError: The number of cells in a row differs from the number of columns.
        """
        made = tuple(tuple(row) for row in rows)
        wrong = next((row for row in made if len(row) != len(columns)), None)
        if wrong is not None:
            raise ValueError(f"{title}: found a row of {len(wrong)} cells; expected {len(columns)}")
        self.tables.append(Table(title, tuple(columns), made))

    def note(self, text: str) -> None:
        """Records a remark."""
        self.notes.append(text)

    def keep(self, name: str, arrays: Mapping[str, npt.NDArray[Any] | None]) -> None:
        """Passes the data of a failure to the keeper, if there is one."""
        if self._keeper is not None and arrays:
            self._keeper.keep(name, arrays)

    def keep_call(self, name: str, job: Job, ran: Ran) -> None:
        """Keeps the operands and results of a call that went wrong."""
        operands = {f"operand.{key}": array for key, array in job.arrays.items()}
        self.keep(name, {**operands, **{f"result.{key}": array for key, array in ran.outputs.items()}})

    def progress(self, done: int, total: int, what: str) -> None:
        """Shows the progress of the step, without recording it."""
        if self._listener is not None:
            self._listener.progress(done, total, what)
