"""Measures backward passes locally and with their operators sent, and advises what to send.

The first call of each kind is also sent a few times, and run here as often, on its own operands; the time for
this is excluded from its pass. From the third pass on, every second pass sends all its calls in place, before
they run here, because a call that is sent repeatedly finds its memory warm.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TYPE_CHECKING, TypeVar

from npugrad_client._costs import MARGIN, CallKind, describe, kind_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from npugrad_client._backward_call import BackwardCall

R = TypeVar("R")

_PROBES = 20
"""Maximum number of times a call is sent to learn its time, including the first, which does not count."""
_PROBE_S = 2.0
"""Time limit for each kind; after it, only the minimum number of calls is sent."""
_FEWEST_PROBES = 3
_MOST_KINDS = 100
"""Maximum number of kinds that are sent to learn their time."""
_UNMEASURED = f"not measured, as there are more than {_MOST_KINDS} kinds"


@dataclass(frozen=True)
class KindAdvice:
    """One kind of calls.

    Attributes:
        operator: Name such as ``"group_norm_backward"``.
        kind: Type and shape of the largest operand of its first call, such as ``"float32[2,32,64,64]"``.
        calls: Calls per backward pass.
        bytes: Mean bytes of a call's operands and results.
        local_s: Median seconds of a call when run locally.
        remote_s: Measured seconds of a call when sent; None if it cannot be sent.
        why: Why it cannot be sent; else empty.
    """

    operator: str
    kind: str
    calls: float
    bytes: float
    local_s: float
    remote_s: float | None
    why: str = ""

    @property
    def send(self) -> bool:
        """Whether it is worth sending; a tie is not."""
        return self.remote_s is not None and self.remote_s < MARGIN * self.local_s

    @property
    def won_s(self) -> float:
        """Seconds per backward pass saved by sending it; negative if slower, 0 if it cannot be sent."""
        return 0.0 if self.remote_s is None else self.calls * (self.local_s - self.remote_s)


@dataclass(frozen=True)
class Advice:
    """Mean measurements of some backward passes.

    Attributes:
        passes: Backward passes that were measured.
        is_warm: Whether a pass before them served as warm-up.
        backward_s: Seconds per pass, run entirely locally.
        step_s: Seconds from the end of one pass to the end of the next, which is a whole step if it has one
            backward pass. None if there was only one pass.
        rows: Kinds of calls the service supports, longest local time first.
    """

    passes: int
    is_warm: bool
    backward_s: float
    step_s: float | None
    rows: tuple[KindAdvice, ...]

    @property
    def known_s(self) -> float:
        """Seconds per pass in operators the service supports."""
        return sum(row.calls * row.local_s for row in self.rows)

    @property
    def all_sent_s(self) -> float:
        """Seconds a pass would take if everything possible were sent."""
        return self.backward_s - sum(row.won_s for row in self.rows)

    @property
    def advised_s(self) -> float:
        """Seconds a pass would take if everything worth sending were sent."""
        return self.backward_s - sum(row.won_s for row in self.rows if row.send)


@dataclass
class _Calls:
    """Calls of a kind in one pass: bytes and seconds of each, here or sent."""

    nbytes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


@dataclass
class _Pass:
    begun_s: float
    ended_s: float = 0.0
    probing_s: float = 0.0
    kinds: dict[CallKind, _Calls] = field(default_factory=dict)

    def add(self, kind: CallKind, nbytes: int, seconds: float) -> None:
        calls = self.kinds.setdefault(kind, _Calls())
        calls.nbytes.append(nbytes)
        calls.seconds.append(seconds)


@dataclass
class _Seen:
    """A kind, and the times of its first call: sent, and here."""

    text: str
    nbytes: int
    why: str = ""
    remote: list[float] = field(default_factory=list)
    local: list[float] = field(default_factory=list)


class CallProfile:
    """Watches the backward passes of one thread: the first to run one.

    Thread safety: calls and passes of other threads are unaffected.
    """

    def __init__(
        self, send: Callable[[BackwardCall], str], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Creates a profile without passes.

        Args:
            send: Sends a call and waits for its results. Returns why it cannot be sent, or an empty text.
            clock: Returns the time in seconds.
        """
        self._send, self._clock = send, clock
        self._thread: int | None = None
        self._now: _Pass | None = None
        self._passes: list[_Pass] = []
        self._seen: dict[CallKind, _Seen] = {}

    @property
    def passes(self) -> int:
        """Number of backward passes that completed."""
        return len(self._passes)

    @contextmanager
    def backward(self) -> Iterator[bool]:
        """Wraps a backward pass; yields whether it is watched, False if nested or in another thread."""
        me = threading.get_ident()
        if self._now is not None or self._thread not in (None, me):
            yield False
            return
        self._thread, self._now = me, _Pass(self._clock())
        try:
            yield True
            self._now.ended_s = self._clock()
            self._passes.append(self._now)
        finally:
            self._now = None

    def call(self, request: BackwardCall, local: Callable[[], R]) -> R:
        """Runs a call here; also sends it if it is the first of its kind or its pass sends its calls."""
        now = self._now
        if now is None or self._thread != threading.get_ident():
            return local()
        kind, nbytes = _kind_of(request)
        seen = self._seen.get(kind)
        is_sent = self._is_sending and seen is not None and not seen.why
        started = self._clock()
        if is_sent:
            self._send(request)
            now.add(kind, nbytes, self._clock() - started)
            return local()
        result = local()
        if not self._is_sending:
            now.add(kind, nbytes, self._clock() - started)
        if seen is None:
            before = self._clock()
            self._seen[kind] = self._probe(request, nbytes, local)
            now.probing_s += self._clock() - before
        return result

    @property
    def _is_sending(self) -> bool:
        """Whether this pass sends its calls before it runs them here: every second one, from the third on."""
        return self._passes != [] and len(self._passes) % 2 == 0

    def _probe(self, request: BackwardCall, nbytes: int, local: Callable[[], object]) -> _Seen:
        if request.odd is not None:
            return _Seen(request.odd, nbytes, "not dense CPU tensors")
        seen, begun = _Seen(describe(request.inputs), nbytes), self._clock()
        if len(self._seen) >= _MOST_KINDS:
            seen.why = _UNMEASURED
            return seen
        while len(seen.remote) < _FEWEST_PROBES or (
            len(seen.remote) < _PROBES and self._clock() - begun < _PROBE_S
        ):
            started = self._clock()
            seen.why = self._send(request)
            if seen.why:
                return seen
            sent = self._clock()
            local()  # alternating, as in a pass: each finds caches and cores as the other left them
            seen.remote.append(sent - started)
            seen.local.append(self._clock() - sent)
        return seen

    def advice(self) -> Advice:
        """Returns the measurements; at least one pass must have ended. Of several, the first is a warm-up."""
        is_warm = len(self._passes) > 1
        found, sent = self._passes[is_warm::2], self._passes[2::2]
        backward_s = fmean(each.ended_s - each.begun_s - each.probing_s for each in found)
        step_s = None
        if is_warm:
            steps = zip(self._passes[::2], found, strict=False)
            step_s = fmean(now.ended_s - before.ended_s - now.probing_s for before, now in steps)
        rows = [
            _row(kind, seen, [p.kinds.get(kind, _Calls()) for p in found], [p.kinds.get(kind) for p in sent])
            for kind, seen in self._seen.items()
            if any(kind in each.kinds for each in found)
        ]
        rows.sort(key=lambda row: (-row.calls * row.local_s, row.operator, row.kind))
        return Advice(len(found), is_warm, backward_s, step_s, tuple(rows))


def _kind_of(request: BackwardCall) -> tuple[CallKind, int]:
    """Kind and bytes of a call; an odd call has neither reliable shapes nor reliable bytes."""
    if request.odd is not None:
        return CallKind(request.operator, (request.odd,)), 0
    return kind_of(request.operator, request.inputs, request.attrs), request.nbytes


def _usual_s(seconds: Sequence[float]) -> float:
    """The mean of the times, without the slowest if there are several."""
    return fmean(sorted(seconds)[: max(len(seconds) - 1, 1)])


def _row(kind: CallKind, seen: _Seen, passes: Sequence[_Calls], sent: Sequence[_Calls | None]) -> KindAdvice:
    nbytes = [each for calls in passes for each in calls.nbytes]
    average = fmean(nbytes)
    # Per byte, because sizes of a kind differ; the median, because a local disturbance is no reason to send.
    local_s, scale = median(_rates(passes)) * max(average, 1), average / max(seen.nbytes, 1)
    if len(passes) == 1 and seen.local:  # the pass may have been cold; these calls were warm
        local_s = min(local_s, _usual_s(seen.local[1:]) * scale)
    remote_s = _usual_s(seen.remote[1:]) * scale if seen.remote else None  # the first makes the plan
    if remote_s is not None and any(sent):  # sent in place, with memory as it is there
        remote_s = _usual_s(_rates([calls for calls in sent if calls])) * average
    return KindAdvice(
        kind.operator, seen.text, len(nbytes) / len(passes), average, local_s, remote_s, seen.why
    )


def _rates(passes: Sequence[_Calls]) -> list[float]:
    """Seconds per byte of each call."""
    return [
        each_s / max(size, 1)
        for calls in passes
        for each_s, size in zip(calls.seconds, calls.nbytes, strict=True)
    ]
