"""Learns how long calls of a kind take when sent and when run locally, and which is faster.

Calls of a kind share operator, types, flags, and sizes up to the same power of two, so that even a model
whose sizes change from step to step has few kinds. Within a kind, times are compared per byte.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from npugrad.representation import short_repr

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

TRIALS = 3
"""Calls of a kind that go each way before one way is chosen."""
_RECENT = 5
"""Latest calls each way that decide: the median of those sent against the fastest of those that ran here.

Disturbances only make a measurement longer, so cases of doubt stay local.
"""
_SURELY = 2.0
"""If two sent calls took more than this many times the slowest local one, no third is sent to learn."""
MARGIN = 0.95
"""Calls are sent if that takes less than this share of the local time: a tie is not worth a network."""
_LOOK_EVERY = 32
"""Calls of a kind after which the slower way may be measured again."""
_LOOK_SHARE = 0.01
"""Maximum cost of measuring the slower way, as a share of the kind's time since the last measurement."""
_MOST_KINDS = 256
"""Maximum number of kinds; further kinds of an operator count as one."""
REST = "other sizes"
FASTER_HERE = "faster here"
MEASURED_HERE = "measured here"


class CallKind(NamedTuple):
    """What calls that take about the same time per byte have in common.

    Attributes:
        operator: Name of the operator.
        signature: Types, flags and powers of two of the sizes; empty for all kinds beyond the limit.
    """

    operator: str
    signature: tuple[Hashable, ...]


@dataclass(frozen=True)
class CostRow:
    """Times of calls of one kind, sent and local.

    Attributes:
        operator: Name such as ``"group_norm_backward"``.
        kind: Dtype and shape of the largest operand of its first call, such as ``"float32[2,32,64,64]"``.
        sent: Number of calls sent to the service, failures included.
        local: Number of calls that ran locally.
        sent_s: Seconds for a call of average size when sent, transport included; None if none was sent.
        local_s: Seconds for such a call when run locally; None if none was.
        won_s: Seconds saved by the calls that were sent; negative if they were slower. None if unknown.

    Example:
        >>> row = CostRow("group_norm_backward", "float32[2,32,64,64]", 10, 3, 0.5, 0.2, -3.0)
        >>> row.sent * (row.local_s - row.sent_s)
        -3.0
    """

    __repr__ = short_repr

    operator: str
    kind: str
    sent: int
    local: int
    sent_s: float | None
    local_s: float | None
    won_s: float | None


def kind_of(operator: str, inputs: Mapping[str, Any], attrs: Mapping[str, Any]) -> CallKind:
    """Returns the kind of a call.

    Args:
        operator: Name of the operator.
        inputs: Its operands, of which only `dtype` and `shape` are read; None is null.
        attrs: Its attributes. Numbers count by their power of two, which still tells modes apart.
    """
    operands = tuple(None if t is None else (t.dtype, *map(_size, t.shape)) for t in inputs.values())
    return CallKind(operator, (operands, tuple(map(_size, attrs.values()))))


def describe(inputs: Mapping[str, Any]) -> str:
    """Type and shape of the largest operand, such as ``"float32[2,32,64,64]"``."""
    given = [tensor for tensor in inputs.values() if tensor is not None]
    largest = max(given, key=lambda tensor: tensor.nbytes)
    return f"{str(largest.dtype).removeprefix('torch.')}[{','.join(map(str, largest.shape))}]"


def _size(value: Any) -> Hashable:
    if isinstance(value, tuple | list):
        return tuple(map(_size, value))
    if isinstance(value, bool):
        return value
    return value.bit_length() if isinstance(value, int) else None


@dataclass
class _Way:
    """Calls of a kind that went one way."""

    calls: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """Seconds per byte of the last calls."""

    def seconds_of(self, nbytes: float) -> float | None:
        """Estimated seconds for this many bytes, at the mean rate; None without calls."""
        return self.seconds * nbytes / max(self.nbytes, 1) if self.calls else None

    def add(self, seconds: float, nbytes: int) -> None:
        self.calls += 1
        self.nbytes += nbytes
        self.seconds += seconds
        self.recent.append(seconds / max(nbytes, 1))


class _Entry:
    """Measurements of one kind."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sent, self.local = _Way(), _Way()
        self.since_calls, self.since_rate = 0, 0.0
        """Calls since the slower way was last measured, and the sum of their seconds per byte."""

    def why_local(self) -> str:
        """Returns why the next call should run here; empty if it should be sent."""
        if self._is_learning():
            return "" if self.sent.calls < self.local.calls else MEASURED_HERE
        sends = self._is_faster_sent()
        if self._is_time_to_look(sends):
            self.since_calls, self.since_rate = 0, 0.0
            return MEASURED_HERE if sends else ""
        return "" if sends else FASTER_HERE

    def add(self, is_sent: bool, seconds: float, nbytes: int) -> None:
        (self.sent if is_sent else self.local).add(seconds, nbytes)
        self.since_calls += 1
        self.since_rate += seconds / max(nbytes, 1)

    def _is_learning(self) -> bool:
        sent, local = self.sent, self.local
        if sent.calls >= 2 and local.calls >= 2 and min(sent.recent) > _SURELY * max(local.recent):
            return False
        return min(sent.calls, local.calls) < TRIALS

    def _is_faster_sent(self) -> bool:
        return median(self.sent.recent) < MARGIN * min(self.local.recent)

    def _is_time_to_look(self, sends: bool) -> bool:
        """Whether measuring the other way is probably cheap relative to the kind's time since then."""
        best, other = median(self.sent.recent), min(self.local.recent)
        if not sends:
            best, other = other, best
        last = (self.local if sends else self.sent).recent[-1]
        if last < best and self.since_calls == 1:  # it was faster when just measured: once more
            return True
        return self.since_calls >= _LOOK_EVERY and max(last, other) - best <= _LOOK_SHARE * self.since_rate

    def row(self, operator: str) -> CostRow:
        sent, local = self.sent, self.local
        average = (sent.nbytes + local.nbytes) / max(sent.calls + local.calls, 1)
        instead_s = local.seconds_of(sent.nbytes) if sent.calls else None
        return CostRow(
            operator,
            self.text,
            sent.calls,
            local.calls,
            sent.seconds_of(average),
            local.seconds_of(average),
            None if instead_s is None else instead_s - sent.seconds,
        )


class Costs:
    """Learns how long calls take either way; any number of threads may use one.

    `why_local` sends every second one of the first calls of a kind, then takes the faster way; it switches as
    soon as the latest calls show that this way became slower. It measures the other way again when that costs
    at most 1 % of the kind's time since the last measurement.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[CallKind, _Entry] = {}

    def why_local(self, kind: CallKind) -> str:
        """Returns why the next call of a kind should run here; empty if it should be sent."""
        with self._lock:
            return self._entry(kind, "").why_local()

    def add(self, kind: CallKind, text: str, *, is_sent: bool, seconds: float, nbytes: int) -> None:
        """Counts a call; `text` is its description by `describe`."""
        with self._lock:
            entry = self._entry(kind, text)
            entry.text = entry.text or text
            entry.add(is_sent, seconds, nbytes)

    def rows(self) -> tuple[CostRow, ...]:
        """Returns the measurements of each kind, longest total time first."""
        with self._lock:
            found = [entry.row(kind.operator) for kind, entry in self._entries.items() if entry.text]
        return tuple(sorted(found, key=lambda row: (-_total_s(row), row.operator, row.kind)))

    def _entry(self, kind: CallKind, text: str) -> _Entry:
        entry = self._entries.get(kind)
        if entry is None and len(self._entries) >= _MOST_KINDS:
            kind, text = CallKind(kind.operator, ()), REST
            entry = self._entries.get(kind)
        if entry is None:
            entry = self._entries[kind] = _Entry(text)
        return entry


def _total_s(row: CostRow) -> float:
    return row.sent * (row.sent_s or 0.0) + row.local * (row.local_s or 0.0)
