"""Converts calls to events of the Trace Event Format, for chrome://tracing and Perfetto.

A process of the trace is the client or a server, a thread is a lane: slices in one lane nest or follow each
other. Times are whole microseconds, so that rounding cannot make two slices overlap.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from npugrad.timeline import Interval, Try
    from npugrad_client._clock import CallClock

_CLIENT = "client"
_encode = json.JSONEncoder(separators=(",", ":")).encode


class _Slice(NamedTuple):
    """A box of the picture, and the boxes below it, ordered by start.

    `flow` is one end of the arrow from a try to the server's work for it: number, time, and which end.
    """

    name: str
    start_us: int
    end_us: int
    args: Mapping[str, Any] | None = None
    below: Sequence[_Slice] = ()
    flow: tuple[int, int, str] | None = None


class Trace:
    """The events of one trace, each as JSON; not thread-safe."""

    def __init__(self) -> None:
        """Creates an empty trace."""
        self._processes: dict[str, _Process] = {}
        self._flows = 0

    def begin(self) -> list[str]:
        """Returns the events at the start of the trace."""
        events: list[str] = []
        self._process(_CLIENT, events)
        return events

    def events(self, clock: CallClock, args: Mapping[str, Any]) -> list[str]:
        """Returns the events of a call that has ended.

        Args:
            clock: Its measurements.
            args: What to show of it besides its name and times.
        """
        events: list[str] = []
        timeline, origin_s = clock.timeline(), clock.begun_s
        stages: dict[tuple[str, int], list[_Slice]] = {}
        for part in timeline.stages:
            drawn = _slice(part.stage, part, origin_s)
            if drawn.start_us < drawn.end_us:
                stages.setdefault((part.where, part.number), []).append(drawn)
        parts, served = stages.get((_CLIENT, 0), []), []
        for each in timeline.tries:
            at_server, flow = stages.get(("server", each.number)), None
            if at_server:
                self._flows += 1
                begun_us, ended_us = at_server[0].start_us, max(stage.end_us for stage in at_server)
                shown = None if each.error else {"request_id": args.get("request_id", "")}
                arrives, flow = (self._flows, begun_us, "f"), (self._flows, begun_us, "s")
                over = _Slice(timeline.operator, begun_us, ended_us, shown, at_server, arrives)
                served.append((each.target, over))
            below, shown = stages.get((_CLIENT, each.number), ()), _of_try(each)
            drawn = _slice(f"try {each.number}", each, origin_s)
            parts.append(drawn._replace(args=shown, below=below, flow=flow))
        parts.sort(key=lambda part: part.start_us)
        begun_us = _us(origin_s)
        call = _Slice(timeline.operator, begun_us, max(_us(clock.ended_s), begun_us + 1), args, parts)
        self._process(_CLIENT, events).draw(call, events)
        for target, over in served:
            self._process(f"server {target}", events).draw(over, events)
        return events

    def _process(self, name: str, events: list[str]) -> _Process:
        found = self._processes.get(name)
        if found is None:
            found = self._processes[name] = _Process(len(self._processes) + 1)
            events.append(_named("process_name", name, found.pid, 0))
        return found


class _Process:
    """The lanes of a process: a call takes one while it lasts, and more if its tries overlap."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ends_us: list[int] = []

    def draw(self, drawn: _Slice, events: list[str], lane: int | None = None) -> None:
        """Adds a slice and those below it, to a free lane if none is given."""
        name, begun_us, ended_us, args, below, flow = drawn
        if lane is None:
            lane = self._take(begun_us, ended_us, events)
        place = f'"pid":{self.pid},"tid":{lane}'  # by hand: json takes three times as long
        shown = f',"args":{_encode(args)}' if args else ""
        times = f'"ts":{begun_us},"dur":{ended_us - begun_us}'
        events.append(f'{{"ph":"X","name":"{name}",{times},{place}{shown}}}')
        if flow is not None:
            number, at_us, end = flow
            bound = f'"ph":"{end}","bp":"e"' if end == "f" else f'"ph":"{end}"'
            events.append(f'{{{bound},"name":"call","cat":"call","id":{number},"ts":{at_us},{place}}}')
        reached_us = begun_us
        for each in below:
            start_us, end_us = max(each.start_us, begun_us), min(each.end_us, ended_us)
            if start_us >= end_us:
                continue
            if start_us != each.start_us or end_us != each.end_us:
                each = each._replace(start_us=start_us, end_us=end_us)
            if start_us >= reached_us:
                self.draw(each, events, lane)
                reached_us = end_us
            else:
                self.draw(each, events)

    def _take(self, begun_us: int, ended_us: int, events: list[str]) -> int:
        """Takes the most recently used free lane, so that the calls of one thread mostly stay in one.

        Calls arrive in the order in which they end, so a lane is free if its last slice ended in time.
        """
        ends_us = self._ends_us
        free = [(reached_us, -lane) for lane, reached_us in enumerate(ends_us) if reached_us <= begun_us]
        if free:
            lane = -max(free)[1]
            ends_us[lane] = ended_us
        else:
            lane = len(ends_us)
            ends_us.append(ended_us)
            events.append(_named("thread_name", f"calls {lane + 1}", self.pid, lane + 1))
        return lane + 1


def _us(seconds: float) -> int:
    return int(seconds * 1e6)


def _slice(name: str, part: Interval | Try, origin_s: float) -> _Slice:
    return _Slice(name, _us(origin_s + part.start_s), _us(origin_s + part.end_s))


def _of_try(each: Try) -> dict[str, str]:
    return {"server": each.target, "error": each.error} if each.error else {"server": each.target}


def _named(kind: str, name: str, pid: int, tid: int) -> str:
    return _encode({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}})
