"""Timeline of a call: its stages in client and server, as intervals.

Each process uses its own clock. The server's stages are centred in the time the client waited, because the
transport times in each direction are unknown. Time outside all stages is shown as transport.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from google.protobuf.message import DecodeError

from npugrad.representation import Html, html_table, in_lines
from npugrad.v1 import operators_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Mark: TypeAlias = "tuple[str, float]"
"""A stage and when it ended, on the clock of its process. It began at the previous mark; a mark without a
name is not a stage."""

TIMELINE_KEY = "npugrad-timeline-bin"
"""Metadata key of the timeline that a server sends after all of a streamed call."""
SERVER_STAGES = tuple(name.removeprefix("STAGE_").lower() for name in operators_pb2.Stage.keys()[1:])
"""What a server does for a call, in order: ``decode``, ``validate``, ``receive``, ``queued``, ``lost``,
``copy_in``, ``run``, ``copy_out``, ``verify``, ``encode``, ``send_back``."""
CLIENT_STAGES = ("pack", "send", "wait", "read", "unpack")
"""What a client does: packs the operands, sends them, waits for its next try, reads the chunks of the reply
and makes arrays of it. Only streamed calls have ``send`` and ``read``; for a call in one message gRPC does
not tell when it was sent."""
_NUMBERS = {name: number for number, name in enumerate(SERVER_STAGES, 1)}
_MAX_STAGES = 64
"""More than a call with several attempts has."""
_BAR = 40
_MOST_SHOWN = 9
"""Stages in the `repr`, the longest ones."""


class Interval(NamedTuple):
    """One stage of a call.

    Attributes:
        stage: One of `CLIENT_STAGES` or `SERVER_STAGES`.
        where: ``"client"`` or ``"server"``.
        start_s: Seconds from the start of the call to its start.
        end_s: Seconds from the start of the call to its end.
        number: Number of the try it belongs to, from 1; 0 if it belongs to none.
    """

    stage: str
    where: str
    start_s: float
    end_s: float
    number: int = 0


class Try(NamedTuple):
    """One try of a call; there are several after retries or hedges.

    Attributes:
        number: 1 for the first.
        target: Address of the server.
        start_s: Seconds from the start of the call to its start.
        end_s: Seconds from the start of the call to its end.
        error: Class of its error; empty for the try that was answered.
    """

    number: int
    target: str
    start_s: float
    end_s: float
    error: str


class Recorded(Protocol):
    """Measurements of a call."""

    def timeline(self) -> Timeline:
        """Its timeline."""
        ...


@dataclass(frozen=True)
class Timeline:
    """Where the time of a call went; prints as a table.

    Example:
        >>> timeline = Timeline("group_norm_backward", 0.01, (
        ...     Interval("pack", "client", 0.0, 0.002), Interval("run", "server", 0.004, 0.0095, 1)))
        >>> timeline
        Timeline(group_norm_backward: 10.0 ms; run 5.5, pack 2.0, transport 2.5)
        >>> timeline.seconds("run"), round(timeline.covered_s, 6)
        (0.0055, 0.0075)

    Attributes:
        operator: Name of the operator.
        wall_s: Seconds from calling the client's method to its return.
        stages: Its stages, ordered by start. Stages of client and server may overlap.
        tries: Each time it was sent, with the outcome.
    """

    operator: str
    wall_s: float
    stages: tuple[Interval, ...] = ()
    tries: tuple[Try, ...] = ()

    def seconds(self, stage: str) -> float:
        """Seconds spent in a stage over all tries; 0.0 if the call did not have it."""
        return self.by_stage.get(stage, 0.0)

    @property
    def by_stage(self) -> Mapping[str, float]:
        """Seconds spent in each stage of the call, in order of their start."""
        found: dict[str, float] = {}
        for interval in self.stages:
            found[interval.stage] = found.get(interval.stage, 0.0) + interval.end_s - interval.start_s
        return found

    @property
    def covered_s(self) -> float:
        """Seconds covered by at least one stage."""
        covered, reached = 0.0, 0.0
        for interval in self.stages:  # by their start
            covered += max(0.0, min(interval.end_s, self.wall_s) - max(interval.start_s, reached))
            reached = max(reached, interval.end_s)
        return covered

    @property
    def transport_s(self) -> float:
        """Remaining seconds: gRPC, the network, and handovers between threads and processes."""
        return max(0.0, self.wall_s - self.covered_s)

    def __repr__(self) -> str:
        """Such as ``Timeline(group_norm_backward: 10.0 ms; run 5.5, pack 2.0, transport 2.5)``."""
        longest = sorted(self.by_stage.items(), key=lambda each: -each[1])
        parts = [*longest[:_MOST_SHOWN], ("transport", self.transport_s)]
        first, *named = (f"{name} {seconds * 1e3:.1f}" for name, seconds in parts)
        if len(longest) > _MOST_SHOWN:
            named.append(f"{len(longest) - _MOST_SHOWN} more in .by_stage")
        return in_lines("Timeline", [f"{self.operator}: {self.wall_s * 1e3:.1f} ms; {first}", *named])

    def _repr_html_(self) -> str:
        """A table of the stages for notebooks, and one of the tries if there were several."""
        rows = [
            (i.stage, i.where, f"{i.start_s * 1e3:.2f}", f"{(i.end_s - i.start_s) * 1e3:.2f}", self._bar(i))
            for i in self.stages
        ]
        rows.append(("transport", "rest", "", f"{self.transport_s * 1e3:.2f}", Html()))
        caption = f"{self.operator}: {self.wall_s * 1e3:.2f} ms"
        tables = [html_table(caption, ("stage", "where", "start ms", "ms", ""), rows)]
        if len(self.tries) > 1:
            tries = [(str(t.number), t.target, t.error) for t in self.tries]
            tables.append(html_table("Tries", ("try", "server", "error"), tries))
        return "\n".join(tables)

    def _bar(self, interval: Interval) -> Html:
        scale = 100 / self.wall_s if self.wall_s else 0.0
        left, wide = interval.start_s * scale, (interval.end_s - interval.start_s) * scale
        style = f"margin-left:{left:.1f}%;width:{wide:.1f}%;min-width:1px;height:.7em;background:currentColor"
        return Html(f'<div style="width:20em"><div style="{style}"></div></div>')

    def __str__(self) -> str:
        """A table of the stages, with bars."""
        covered = self.covered_s / self.wall_s if self.wall_s else 1.0
        lines = [
            f"{self.operator}: {self.wall_s * 1e3:.2f} ms, {covered:.0%} of it measured",
            f"{'stage':<10}{'where':<8}{'start ms':>10}{'ms':>10}",
        ]
        lines += [_row(i.stage, i.where, i.start_s, i.end_s, self.wall_s) for i in self.stages]
        lines.append(f"{'transport':<10}{'rest':<8}{'':>10}{self.transport_s * 1e3:>10.2f}")
        if len(self.tries) > 1:
            lines += ["try  server, error"]
            lines += [f"{t.number:<5}{t.target}{t.error and f', {t.error}'}" for t in self.tries]
        return "\n".join(lines)


def _row(stage: str, where: str, start_s: float, end_s: float, wall_s: float) -> str:
    scale = _BAR / wall_s if wall_s else 0.0
    begin = min(int(start_s * scale), _BAR - 1)
    bar = " " * begin + "━" * max(1, min(round((end_s - start_s) * scale), _BAR - begin))
    return f"{stage:<10}{where:<8}{start_s * 1e3:>10.2f}{(end_s - start_s) * 1e3:>10.2f}  {bar}"


# ------------------------------------------------------------------------------------------- the wire


def encode_marks(marks: Sequence[Mark], message: operators_pb2.Timeline) -> None:
    """Writes the stages between marks into a message; the first mark is the arrival of the call."""
    origin, add = marks[0][1], message.stages.add
    for (_, start_s), (stage, end_s) in pairwise(marks):
        if stage:
            add(stage=_NUMBERS[stage], start_s=start_s - origin, end_s=end_s - origin)


def seconds_by_stage(marks: Sequence[Mark]) -> dict[str, float]:
    """Seconds between marks by stage, in the order in which the stages began."""
    found: dict[str, float] = {}
    for (_, start_s), (stage, end_s) in pairwise(marks):
        if stage:
            found[stage] = found.get(stage, 0.0) + end_s - start_s
    return found


def serialize_marks(marks: Sequence[Mark]) -> bytes:
    """The stages between marks as `TIMELINE_KEY` carries them."""
    message = operators_pb2.Timeline()
    encode_marks(marks, message)
    return bytes(message.SerializeToString())


def parse_stages(data: bytes) -> list[tuple[str, float, float]]:
    """The stages that a server sent: name, start and end in seconds from the arrival of the call.

    Invalid ones are left out: stages of a later release, times that are not numbers or run backwards. They
    only affect what is shown.
    """
    try:
        message = operators_pb2.Timeline.FromString(data)
    except DecodeError:
        return []
    return [
        (SERVER_STAGES[each.stage - 1], each.start_s, each.end_s)
        for each in message.stages[:_MAX_STAGES]
        if 1 <= each.stage <= len(SERVER_STAGES) and 0 <= each.start_s <= each.end_s < math.inf
    ]


def placed(
    stages: Iterable[tuple[str, float, float]], start_s: float, end_s: float, number: int
) -> list[Interval]:
    """A server's stages on the client's clock.

    Args:
        stages: From `parse_stages`.
        start_s: When the client began to send.
        end_s: When it had the reply.
        number: Number of the try.
    """
    found = [*stages]
    spare_s = (end_s - start_s) - max((end for _, _, end in found), default=0.0)
    origin = start_s + max(0.0, spare_s / 2)
    return [
        Interval(stage, "server", origin + start, min(origin + end, end_s), number)
        for stage, start, end in found
        if origin + start <= end_s
    ]
