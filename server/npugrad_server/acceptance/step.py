"""What a step is, and what it writes its findings to."""

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
    """A step cannot be done here, and that is nobody's fault; the message says why."""


@dataclass(frozen=True)
class Step:
    """One step of the acceptance.

    Attributes:
        number: 0 to 10; steps run in this order.
        key: Short name for files and options.
        title: A few words.
        about: One sentence: what it shows.
        run: Does it, and writes what it finds. What it raises fails the step, and the next one goes on.
        needs_device: Whether it makes no sense while the device does not open.
        lasts: Whether it takes as long as the rig's `soak_s` asks, beyond what a step may take.
    """

    number: int
    key: str
    title: str
    about: str
    run: Callable[[Rig, StepLog], None]
    needs_device: bool = True
    lasts: bool = False


class Listener(Protocol):
    """Who is shown what a step does, while it does it."""

    def progress(self, done: int, total: int, what: str) -> None:
        """So much of the step is done; `what` comes next."""

    def checked(self, check: StepCheck) -> None:
        """A check was made."""


class Keeper(Protocol):
    """Who keeps the data of what failed."""

    def keep(self, name: str, arrays: Mapping[str, npt.NDArray[Any] | None]) -> None:
        """Keeps arrays by name, or does not when there is no room left."""


class StepLog:
    """The findings of one step.

    Attributes:
        checks: In the order they were made.
        tables: In the order they were made.
        notes: Sentences.
    """

    def __init__(self, listener: Listener | None = None, keeper: Keeper | None = None) -> None:
        """Is empty.

        Args:
            listener: Who is shown; nobody by default.
            keeper: Who keeps data of failures; nobody by default.
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
        """Writes down a check, and returns whether it is ok."""
        check = StepCheck(name, bool(ok), str(expected), str(found), note)
        self.checks.append(check)
        if self._listener is not None:
            self._listener.checked(check)
        return check.ok

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> None:
        """Writes down a table.

        Raises:
            ValueError: A row has not as many cells as there are columns.
        """
        made = tuple(tuple(row) for row in rows)
        wrong = next((row for row in made if len(row) != len(columns)), None)
        if wrong is not None:
            raise ValueError(f"{title}: found a row of {len(wrong)} cells; expected {len(columns)}")
        self.tables.append(Table(title, tuple(columns), made))

    def note(self, text: str) -> None:
        """Writes down a sentence."""
        self.notes.append(text)

    def keep(self, name: str, arrays: Mapping[str, npt.NDArray[Any] | None]) -> None:
        """Keeps the data of something that failed, where anybody wants it."""
        if self._keeper is not None and arrays:
            self._keeper.keep(name, arrays)

    def keep_call(self, name: str, job: Job, ran: Ran) -> None:
        """Keeps operands and results of a call that came out wrong."""
        operands = {f"operand.{key}": array for key, array in job.arrays.items()}
        self.keep(name, {**operands, **{f"result.{key}": array for key, array in ran.outputs.items()}})

    def progress(self, done: int, total: int, what: str) -> None:
        """Shows how far the step is; nothing of it is kept."""
        if self._listener is not None:
            self._listener.progress(done, total, what)
