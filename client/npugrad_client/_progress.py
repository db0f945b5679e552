"""Progress of a call: reports on its tries while it runs.

The code that sends and receives frames only counts bytes. A thread, or a task of the same event loop, reads
these counts and reports; calls without `progress` have neither.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args

from npugrad.errors import WrongType
from npugrad.representation import short_repr

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from contextlib import AbstractContextManager

    from npugrad_client._attempt import Attempt
    from npugrad_client._rpcs import Call

    Tell = Callable[["Progress"], None]

T = TypeVar("T")

ProgressStage = Literal["sending", "waiting", "receiving", "done"]
"""Stages of a call; a try goes through them once, in this order."""
_STAGES: tuple[ProgressStage, ...] = get_args(ProgressStage)
_EVERY_S = 0.1
"""Seconds between two reads of the counts."""


@dataclass(frozen=True)
class Progress:
    """State of a call, as passed to a ``progress`` callable.

    Calls below 2 MiB travel as one message: they have stages but no byte counts. In streamed calls, operands
    below 64 KiB travel in the first message and are not counted.

    Example:
        >>> def show(progress: Progress) -> None:
        ...     print(progress.stage, progress.sent_bytes, "of", progress.bytes_to_send)
        >>> grads = client.group_norm_backward(**call, progress=show)
        sending 0 of 0
        ...
        done 0 of 0

    Attributes:
        stage: ``"sending"``, ``"waiting"`` for the result, ``"receiving"`` or ``"done"``.
        sent_bytes: Bytes of operands handed to the connection so far.
        bytes_to_send: Total bytes of operands to send; 0 until known.
        received_bytes: Bytes of results received so far.
        bytes_to_receive: Total bytes of results to receive; 0 until known.
        try_number: Number of the try, from 1. Counts start again with each try; of several tries in flight,
            the most advanced is reported.
    """

    __repr__ = short_repr

    stage: ProgressStage
    sent_bytes: int = 0
    bytes_to_send: int = 0
    received_bytes: int = 0
    bytes_to_receive: int = 0
    try_number: int = 1


class ProgressReport:
    """The tries of one call, and what was reported of them."""

    def __init__(self, tell: Tell, call: Call) -> None:
        """Creates a report of a call for the callable `tell`."""
        self._tell, self._attempts = tell, call.clock.attempts
        self._next: dict[int, int] = {}
        """For each try, the first stage not yet reported."""

    def look(self) -> None:
        """Reports how far the call is."""
        if self._attempts:
            self._advance(self._furthest())

    def end(self) -> None:
        """Reports that the call is answered, after any stages not seen so far."""
        answered = min(
            (each for each in list(self._attempts) if each.received_s and not each.error),
            key=lambda each: each.received_s,
        )
        self._advance(replace(self._of(answered), stage="done"))

    def _furthest(self) -> Progress:
        """Progress of the most advanced try in flight; if there is none, of the last one."""
        attempts = list(self._attempts)
        alive = [each for each in attempts if not each.error] or attempts[-1:]
        return max(map(self._of, alive), key=_how_far)

    def _of(self, attempt: Attempt) -> Progress:
        stage: ProgressStage = "waiting"  # read before the bytes: those of finished stages are complete
        if attempt.download_bytes is not None:
            stage = "receiving"
        elif attempt.is_streamed and not attempt.sent_s:
            stage = "sending"
        received = attempt.received_bytes, attempt.download_bytes or 0
        return Progress(stage, attempt.sent_bytes, attempt.upload_bytes, *received, attempt.number)

    def _advance(self, found: Progress) -> None:
        """Reports progress, after any stages that the try went through since the last report."""
        reached = _STAGES.index(found.stage)
        for stage in _STAGES[self._next.get(found.try_number, 0) : reached]:
            self._tell(_at(stage, found))
        self._next[found.try_number] = reached + 1
        self._tell(found)


def _how_far(progress: Progress) -> tuple[int, int, int, int]:
    return (
        _STAGES.index(progress.stage),
        progress.received_bytes,
        progress.sent_bytes,
        -progress.try_number,
    )


def _at(stage: ProgressStage, later: Progress) -> Progress:
    """Progress of a call at an earlier stage, from its later progress."""
    if stage in ("sending", "waiting"):
        return replace(later, stage=stage, received_bytes=0, bytes_to_receive=0)
    return replace(later, stage=stage)


def _listener(progress: Any, operator: str) -> AbstractContextManager[Tell | None]:
    """Returns the callable to report to; None if a bar could not be seen."""
    if callable(progress):
        return nullcontext(cast("Tell", progress))
    if not isinstance(progress, (bool, str)):
        found = type(progress).__name__
        raise WrongType(f"{operator}: progress: found {found}; expected a bool, a title or a callable")
    from npugrad_client._progress_bar import bar  # here, because most calls need none

    return bar(progress if isinstance(progress, str) else operator)


@contextmanager
def reported(call: Call, progress: Any, cancel: Callable[[], Any]) -> Iterator[None]:
    """Reports, from a thread, on a call that is made in the block.

    Args:
        call: The call.
        progress: The caller's argument.
        cancel: Cancels the call, from any thread.

    Raises:
        WrongType: `progress` has the wrong type.
        BaseException: The callable's exception, instead of the error of the call cancelled because of it.
    """
    with _listener(progress, call.what) as tell:
        if tell is None:
            yield
            return
        report = ProgressReport(tell, call)
        follower = _Follower(report, cancel)
        try:
            yield
        finally:
            follower.stop()
        report.end()


class _Follower:
    """The thread that reports on a call."""

    def __init__(self, report: ProgressReport, cancel: Callable[[], Any]) -> None:
        self._report, self._cancel = report, cancel
        self._error: BaseException | None = None
        self._over = threading.Event()
        # In the call's context, so that the callable sees its variables.
        self._thread = threading.Thread(target=copy_context().run, args=(self._work,), daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            while not self._over.wait(_EVERY_S):
                self._report.look()
        except BaseException as error:
            self._error = error
            self._cancel()

    def stop(self) -> None:
        """Ends the thread; raises the callable's exception, if any."""
        self._over.set()
        self._thread.join()
        if self._error is not None:
            raise self._error from None


async def reported_async(call: Call, progress: Any, run: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Reports on a call from another task of its loop; errors as in `reported`.

    Args:
        call: The call.
        progress: The caller's argument.
        run: Makes the call.
    """
    with _listener(progress, call.what) as tell:
        if tell is None:
            return await run()
        report = ProgressReport(tell, call)
        answer, looking = asyncio.ensure_future(run()), asyncio.ensure_future(_look_on(report))
        try:
            await asyncio.wait((answer, looking), return_when=asyncio.FIRST_COMPLETED)
            if looking.done():
                looking.result()
            answer.result()
        finally:
            answer.cancel()
            looking.cancel()
            await asyncio.gather(answer, looking, return_exceptions=True)
        report.end()
        return answer.result()


async def _look_on(report: ProgressReport) -> None:
    while True:
        await asyncio.sleep(_EVERY_S)
        report.look()
