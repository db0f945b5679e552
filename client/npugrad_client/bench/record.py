"""Measurements: one record per worker, merged into one per run, stored as JSON."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from npugrad_client.bench.sketch import Distribution, Sketch
from npugrad_client.bench.throughput import AnswerCounter, window_number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npugrad.call import ExecutionInfo

STAGES = ("queued", "copy_in", "run", "copy_out", "elsewhere")
"""Where a call's time goes: the server's stages, and everything else between client and worker and back."""
DEADLINE_REASON = "DEADLINE_EXCEEDED"


@dataclass
class Tally:
    """Counts of calls of one kind.

    Attributes:
        intended: Calls that were to be sent.
        answered: Calls that succeeded.
        dropped: Calls not sent, because too many were in flight.
        failed: Calls that failed, by reason.
    """

    intended: int = 0
    answered: int = 0
    dropped: int = 0
    failed: Counter[str] = field(default_factory=Counter)

    def merge(self, other: Tally) -> None:
        """Adds the other's counts."""
        self.intended += other.intended
        self.answered += other.answered
        self.dropped += other.dropped
        self.failed.update(other.failed)

    def as_dict(self) -> dict[str, Any]:
        """The counts as JSON."""
        return {**vars(self), "failed": dict(self.failed)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Tally:
        """Reads what `as_dict` wrote."""
        counts = {name: int(values[name]) for name in ("intended", "answered", "dropped")}
        return cls(**counts, failed=Counter(values["failed"]))


@dataclass
class Window:
    """A span of time. Calls count by their intended start, `completed` by the time of the answer.

    Attributes:
        tally: Calls meant to start in it.
        completed: Successful answers that arrived in it; in a closed loop what counts in it for the rate,
            not only whole calls.
        latency: Latencies from the intended start, of calls meant to start in it.
        stages: Seconds by stage, summed over these calls.
    """

    tally: Tally = field(default_factory=Tally)
    completed: float = 0
    latency: Sketch = field(default_factory=Sketch)
    stages: list[float] = field(default_factory=lambda: [0.0] * len(STAGES))

    def merge(self, other: Window) -> None:
        """Adds the other's counts."""
        self.tally.merge(other.tally)
        self.completed += other.completed
        self.latency.merge(other.latency)
        self.stages = [a + b for a, b in zip(self.stages, other.stages, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        """The window as JSON."""
        return {
            **self.tally.as_dict(),
            "completed": self.completed,
            "latency": self.latency.as_list(),
            "stages_s": self.stages,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Window:
        """Reads what `as_dict` wrote."""
        stages = [float(each) for each in values["stages_s"]]
        return cls(
            Tally.from_dict(values), float(values["completed"]), Sketch.from_list(values["latency"]), stages
        )


@dataclass
class Part:
    """The calls of one workload, server or device.

    Attributes:
        tally: Their counts; for a device only the answers, for a server without dropped calls.
        latency: Latencies from the intended start.
        run_s: Seconds the operator ran, summed.
    """

    tally: Tally = field(default_factory=Tally)
    latency: Sketch = field(default_factory=Sketch)
    run_s: float = 0.0

    def merge(self, other: Part) -> None:
        """Adds the other's counts."""
        self.tally.merge(other.tally)
        self.latency.merge(other.latency)
        self.run_s += other.run_s

    def as_dict(self) -> dict[str, Any]:
        """The part as JSON."""
        return {**self.tally.as_dict(), "latency": self.latency.as_list(), "run_s": self.run_s}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Part:
        """Reads what `as_dict` wrote."""
        return cls(Tally.from_dict(values), Sketch.from_list(values["latency"]), float(values["run_s"]))


_PARTS = ("workloads", "servers", "devices")
_DISTRIBUTIONS = ("latency", "service", "lateness", "loop_lag")


class Record:
    """Everything recorded of a run's calls. Times are seconds from the start of the measured part.

    Args:
        window_s: Length of a window.
        is_closed: Whether the calls are those of a closed loop.
        end_s: When the measured part is to end.

    Attributes:
        window_s: Length of a window; windows of the warm-up have negative numbers.
        total: Counts of the measured part.
        latency: From the intended start to the answer, of successful calls.
        service: From the actual start to the answer.
        lateness: From the intended start to the actual one, of all calls that were sent.
        loop_lag: How late a worker's event loop ran due tasks.
        stages: Distribution of each stage.
        stage_sums: Seconds by stage, summed.
        windows: Windows by number.
        workloads: Parts by workload.
        devices: Parts by device; with its server, if there are several.
        servers: Parts by server; empty if there is only one.
        unsent_s: How far behind its schedule a worker was when it gave up; 0 if none did.
        end_s: When the measured part ended, for the first worker for which it did.
        answered_per_s: The rate of the answers, as `throughput` defines it; 0 before `close`.
    """

    def __init__(self, window_s: float, *, is_closed: bool = False, end_s: float = math.inf) -> None:
        self.window_s, self._is_closed, self.end_s = window_s, is_closed, end_s
        self._answers = AnswerCounter(window_s, is_closed, end_s)
        self.answered_per_s = 0.0
        self.total = Tally()
        self.latency, self.service = Distribution(), Distribution()
        self.lateness, self.loop_lag = Distribution(), Distribution()
        self.stages = {stage: Sketch() for stage in STAGES}
        self.stage_sums = dict.fromkeys(STAGES, 0.0)
        self.windows: defaultdict[int, Window] = defaultdict(Window)
        self.workloads: defaultdict[str, Part] = defaultdict(Part)
        self.devices: defaultdict[str, Part] = defaultdict(Part)
        self.servers: defaultdict[str, Part] = defaultdict(Part)
        self.unsent_s = 0.0

    def window(self, at_s: float) -> Window:
        """Returns the window that contains a time."""
        return self.windows[window_number(at_s, self.window_s)]

    def end(self, at_s: float) -> None:
        """Ends the measured part, unless it has ended."""
        self.end_s = self._answers.end_s = min(self.end_s, max(at_s, 0.0))

    def close(self) -> None:
        """Computes the rate, when every call has been answered."""
        self.answered_per_s = self._answers.per_s
        for number, counted in self._answers.by_window():
            self.windows[number].completed = counted

    def intended(self, workload: str, at_s: float) -> None:
        """Counts a call that is to be sent at this time."""
        self.window(at_s).tally.intended += 1
        if at_s >= 0:
            self.total.intended += 1
            self.workloads[workload].tally.intended += 1

    def dropped(self, workload: str, at_s: float) -> None:
        """Counts a call that is not sent, because too many are in flight."""
        self.window(at_s).tally.dropped += 1
        if at_s >= 0:
            self.total.dropped += 1
            self.workloads[workload].tally.dropped += 1

    def sent(self, at_s: float, started_s: float, server: str = "") -> None:
        """Counts a call that is sent, and how late; `server` is given if there are several."""
        if at_s >= 0:
            self.lateness.add(started_s - at_s)
            if server:
                self.servers[server].tally.intended += 1

    def failed(self, workload: str, at_s: float, reason: str, server: str = "") -> None:
        """Counts a call that failed."""
        self.window(at_s).tally.failed[reason] += 1
        if at_s >= 0:
            self.total.failed[reason] += 1
            self.workloads[workload].tally.failed[reason] += 1
            if server:
                self.servers[server].tally.failed[reason] += 1

    def answered(
        self,
        workload: str,
        at_s: float,
        started_s: float,
        ended_s: float,
        info: ExecutionInfo,
        server: str = "",
    ) -> None:
        """Counts a call that succeeded.

        Args:
            workload: Its workload's name.
            at_s: When it was meant to start.
            started_s: When it started.
            ended_s: When its answer arrived.
            info: The server's info on it.
            server: Name of the server, if there are several.
        """
        times = [info.queued_s, info.copy_in_s, info.run_s, info.copy_out_s]
        times.append(max(0.0, ended_s - started_s - sum(times)))
        window = self.window(at_s)
        window.tally.answered += 1
        window.latency.add(ended_s - at_s)
        for index, seconds in enumerate(times):
            window.stages[index] += seconds
        self._answers.add(started_s, ended_s)
        if not self._is_closed:
            self._window_of_answer(ended_s).completed += 1
        if at_s >= 0:
            self._measured(ended_s - at_s, ended_s - started_s, times)
            device = f"{server} {info.device} ({info.backend})".strip()
            parts = [self.workloads[workload], self.devices[device]]
            if server:
                parts.append(self.servers[server])
            for part in parts:
                part.tally.answered += 1
                part.latency.add(ended_s - at_s)
                part.run_s += info.run_s

    def _window_of_answer(self, ended_s: float) -> Window:
        """The window that contains a time; after the end of the measured part, none that began before it."""
        number = window_number(ended_s, self.window_s)
        if ended_s >= self.end_s:
            number = max(number, math.ceil(self.end_s / self.window_s - 1e-9))
        return self.windows[number]

    def _measured(self, latency_s: float, service_s: float, times: list[float]) -> None:
        self.total.answered += 1
        self.latency.add(latency_s)
        self.service.add(service_s)
        for stage, seconds in zip(STAGES, times, strict=True):
            self.stages[stage].add(seconds)
            self.stage_sums[stage] += seconds

    def merge(self, other: Record) -> None:
        """Adds another worker's record."""
        self.total.merge(other.total)
        for name in _DISTRIBUTIONS:
            getattr(self, name).merge(getattr(other, name))
        for stage in STAGES:
            self.stages[stage].merge(other.stages[stage])
            self.stage_sums[stage] += other.stage_sums[stage]
        for number, window in other.windows.items():
            self.windows[number].merge(window)
        for kind in _PARTS:
            mine = getattr(self, kind)
            for name, part in getattr(other, kind).items():
                mine[name].merge(part)
        self.unsent_s = max(self.unsent_s, other.unsent_s)
        self.end_s = min(self.end_s, other.end_s)
        self.answered_per_s += other.answered_per_s

    def as_dict(self) -> dict[str, Any]:
        """The record as JSON."""
        return {
            "window_s": self.window_s,
            "total": self.total.as_dict(),
            **{name: getattr(self, name).encode() for name in _DISTRIBUTIONS},
            "stages": {stage: sketch.as_list() for stage, sketch in self.stages.items()},
            "stage_sums_s": self.stage_sums,
            "windows": {str(number): self.windows[number].as_dict() for number in sorted(self.windows)},
            **{
                kind: {n: part.as_dict() for n, part in sorted(getattr(self, kind).items())}
                for kind in _PARTS
            },
            "unsent_s": self.unsent_s,
            "end_s": self.end_s if math.isfinite(self.end_s) else None,
            "answered_per_s": self.answered_per_s,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Record:
        """Reads what `as_dict` wrote.

        Raises:
            KeyError, TypeError, ValueError: The values are something else.
        """
        end_s = values["end_s"]
        record = cls(float(values["window_s"]), end_s=math.inf if end_s is None else float(end_s))
        record.answered_per_s = float(values["answered_per_s"])
        record.total = Tally.from_dict(values["total"])
        for name in _DISTRIBUTIONS:
            setattr(record, name, Distribution.decode(values[name]))
        record.stages = {stage: Sketch.from_list(values["stages"][stage]) for stage in STAGES}
        record.stage_sums = {stage: float(values["stage_sums_s"][stage]) for stage in STAGES}
        record.windows.update({int(n): Window.from_dict(each) for n, each in values["windows"].items()})
        for kind in _PARTS:
            getattr(record, kind).update({name: Part.from_dict(each) for name, each in values[kind].items()})
        record.unsent_s = float(values["unsent_s"])
        return record
