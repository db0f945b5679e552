"""Batches of calls for both clients: pending calls, results and a progress bar."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from typing import TYPE_CHECKING, Any, Literal

from npugrad.errors import WrongType, WrongValue
from npugrad.usage import require_number
from npugrad_client._arrays import copied

if TYPE_CHECKING:
    from types import TracebackType

OnError = Literal["raise", "return"]
"""What to do with an error: raise it at once, or return it in place of the result."""


class Batch:
    """The calls of one `run_many`, handed out in order, and their results.

    Not thread-safe: hand out calls and store results from a single thread.
    """

    def __init__(
        self,
        calls: object,
        concurrency: int,
        on_error: OnError,
        progress: bool | str,
        *,
        copy: bool,
    ) -> None:
        """Rejects invalid arguments; the calls are not read yet.

        Raises:
            WrongType: `calls` cannot be iterated over, or `concurrency` is no integer.
            WrongValue: `concurrency` is below 1, or `on_error` is neither "raise" nor "return".
        """
        require_number("concurrency", concurrency, "1 or more", lambda number: number >= 1, whole=True)
        if on_error not in ("raise", "return"):
            raise WrongValue(f'on_error: found {on_error!r}; expected "raise" or "return"')
        if not isinstance(calls, Iterable) or isinstance(calls, Mapping):
            raise WrongType(
                f"calls: found {type(calls).__name__}; expected the keyword arguments of several calls"
            )
        self._total = len(calls) if isinstance(calls, Sized) else None
        self._calls = iter(calls)
        self._keeps_errors, self._copies = on_error == "return", copy
        self._results: dict[int, Any] = {}
        self._given = 0
        self._bar = _bar(progress) if progress else None

    def __enter__(self) -> Batch:
        """Shows the bar, if there is one."""
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops the bar, which stays on the screen."""
        if self._bar is not None:
            self._bar.stop()

    def take(self) -> tuple[int, Mapping[str, Any]] | None:
        """Returns place and arguments of the next call; None after the last."""
        try:
            call = next(self._calls)
        except StopIteration:
            if self._bar is not None:
                self._bar.update(self._task, total=self._given)  # now the total is known
            return None
        self._given += 1
        is_copied = self._copies and isinstance(call, Mapping)  # else `arguments` says what is wrong
        return self._given - 1, copied(call) if is_copied else call

    def answered(self, place: int, result: Any) -> None:
        """Stores a result."""
        self._results[place] = result
        if self._bar is not None:
            self._bar.advance(self._task)

    def failed(self, place: int, error: Exception) -> None:
        """Stores an error, or raises it."""
        if not self._keeps_errors:
            raise error
        self.answered(place, error)

    def results(self) -> list[Any]:
        """All results, in the order of the calls."""
        return [self._results[place] for place in range(self._given)]


def arguments(call: object) -> Mapping[str, Any]:
    """Keyword arguments of a call, which has its error like any other."""
    if not isinstance(call, Mapping):
        raise WrongType(f"calls: found {type(call).__name__}; expected the keyword arguments of a call")
    return call


def _bar(progress: bool | str) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    text = progress if isinstance(progress, str) else "calls"
    return Progress(
        TextColumn(text, markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
    )
