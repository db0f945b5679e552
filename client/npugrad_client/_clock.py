"""Measures a call in the client, and builds its timeline on request."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from npugrad.timeline import Interval, Timeline, Try, parse_stages, placed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from opentelemetry.trace import TracerProvider

    from npugrad.call import ExecutionInfo
    from npugrad_client._attempt import Attempt
    from npugrad_client._call import Prepared
    from npugrad_client._tracing import CallTrace, Tracing


class Sink(Protocol):
    """Is notified of every call that ends."""

    def ended(self, clock: CallClock) -> None:
        """Called when a call has ended, successfully or not; must be quick and raise nothing."""
        ...


class CallClock:
    """Times of the steps of one call, on `time.monotonic`; a context manager around the call.

    Attributes:
        operator: Name of the operator.
        begun_s: When the call was made.
        packed_s: When it was ready to be sent.
        ended_s: When its results or its error were available.
        attempts: Its tries.
        prepared: What was sent. This and the attributes below are for the sinks and then cleared, because
            an `ExecutionInfo` keeps its clock and may be copied or sent to another process.
        info: What produced the results; None without results.
        error: Its error; None for results.
        trace: Its spans; None for none.
    """

    __slots__ = ("_made", "_sinks", "attempts", "begun_s", "ended_s", "error", "info", "operator",
                 "packed_s", "prepared", "trace")  # fmt: skip

    def __init__(self, operator: str, sinks: Sequence[Sink] = (), tracing: Tracing | None = None) -> None:
        """Starts the clock of a call; the sinks are notified when it ends."""
        self.operator, self._sinks = operator, sinks
        self.attempts: list[Attempt] = []
        self.prepared: Prepared | None = None
        self.info: ExecutionInfo | None = None
        self.error: BaseException | None = None
        self._made: Timeline | None = None
        self.begun_s = self.packed_s = self.ended_s = time.monotonic()
        self.trace: CallTrace | None = None if tracing is None else tracing.begin(operator, self.begun_s)

    def __enter__(self) -> CallClock:
        """Returns the clock."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops the clock, notifies the sinks and ends the spans."""
        self.ended_s = time.monotonic()
        if self._sinks:
            self.error = error
            for sink in tuple(self._sinks):
                sink.ended(self)
        if self.trace is not None:
            self.trace.end(self, error)
        self._sinks = ()
        self.prepared = self.info = self.error = self.trace = None

    def begin_try(self, attempt: Attempt) -> None:
        """Records the start of a try; a hedge may start in its own thread when the call has just ended."""
        self.attempts.append(attempt)
        trace = self.trace
        if trace is not None:
            trace.begin_try(attempt)

    def timeline(self) -> Timeline:
        """Returns the timeline of the ended call, without what a losing hedge does later."""
        if self._made is None:
            origin, ended_s = self.begun_s, self.ended_s
            stages = sorted(
                (
                    i._replace(start_s=i.start_s - origin, end_s=min(i.end_s, ended_s) - origin)
                    for i in self._intervals()
                    if i.start_s < min(i.end_s, ended_s)
                ),
                key=lambda i: (i.start_s, i.end_s),
            )
            tries = (
                Try(a.number, a.target, a.started_s - origin, _end_of(a, ended_s) - origin, a.error)
                for a in sorted(self.attempts, key=lambda a: a.number)
                if a.started_s <= ended_s
            )
            self._made = Timeline(self.operator, ended_s - origin, tuple(stages), tuple(tries))
        return self._made

    def _intervals(self) -> Iterator[Interval]:
        """Yields the parts of the call on the client's clock, in no particular order."""
        yield Interval("pack", "client", self.begun_s, self.packed_s)
        attempts = sorted(self.attempts, key=lambda attempt: attempt.started_s)
        for before, after in pairwise(attempts):
            if before.ended_s and before.ended_s < after.started_s:
                yield Interval("wait", "client", before.ended_s, after.started_s)
        for attempt in attempts:
            yield from _of_attempt(attempt, self.ended_s)


def _end_of(attempt: Attempt, ended_s: float) -> float:
    return min(attempt.ended_s or ended_s, ended_s)


def _of_attempt(attempt: Attempt, ended_s: float) -> Iterator[Interval]:
    number = attempt.number
    for stage, start_s, end_s in (
        ("pack", attempt.started_s, attempt.packed_s),
        ("send", attempt.packed_s or attempt.started_s, attempt.sent_s),
        ("read", attempt.first_s, attempt.received_s),
        ("unpack", attempt.received_s, attempt.ended_s or ended_s),
    ):
        if start_s and end_s:
            yield Interval(stage, "client", start_s, end_s, number)
    if attempt.received_s:
        yield from placed(parse_stages(attempt.stages), attempt.started_s, attempt.received_s, number)


def tracing_by(provider: bool | TracerProvider) -> Tracing | None:
    """Returns what makes the spans of a client; None for no tracing.

    Args:
        provider: The caller's provider; True for the global one.

    Raises:
        ImportError: OpenTelemetry is not installed.
        WrongType: It is not a tracer provider.
    """
    if provider is False:
        return None
    try:
        from npugrad_client._tracing import Tracing  # here, because it is optional
    except ImportError as error:
        raise ImportError(
            f"tracing: OpenTelemetry is not installed ({error}): "
            "pip install '.[otel]' in a checkout of npugrad"
        ) from None
    return Tracing(None if provider is True else provider)
