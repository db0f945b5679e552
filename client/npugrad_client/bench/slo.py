"""Service level objectives, checked against measurements."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from npugrad_client.bench.flaws import spoiling
from npugrad_client.bench.sketch import count_for, rank_of
from npugrad_client.bench.units import (
    format_rate,
    format_seconds,
    format_share,
    parse_duration,
    parse_rate,
    parse_share,
)

if TYPE_CHECKING:
    from npugrad_client.bench.result import Result

_PERCENTILE = re.compile(r"p(\d{1,2}(\.\d+)?)", re.ASCII)
_LATENCIES = ("mean", "max")
_SHARES = ("errors", "deadline_misses")
_EXPECTED = "p99=50ms, mean=20ms, max=1s, errors=0.1%, deadline_misses=0 or throughput=95/s"


@dataclass(frozen=True)
class Objective:
    """One objective.

    Attributes:
        name: ``"p99"`` or another percentile, ``"mean"``, ``"max"``, ``"errors"``, ``"deadline_misses"`` or
            ``"throughput"``.
        limit: Seconds, share from 0 to 1, or calls per second.
    """

    name: str
    limit: float

    @property
    def is_latency(self) -> bool:
        """Whether the limit is in seconds."""
        return self.name in _LATENCIES or _PERCENTILE.fullmatch(self.name) is not None

    @property
    def calls_needed(self) -> int:
        """How many calls it takes to judge it, answered or not; 0 if it is not a percentile."""
        return count_for(float(self.name[1:])) if _PERCENTILE.fullmatch(self.name) else 0

    def measured(self, result: Result) -> float:
        """Measured value in a run, in the limit's unit.

        For a percentile and the maximum, calls that were not served count as infinitely slow. The mean is
        that of the answers; infinite without any.
        """
        if self.name == "throughput":
            return result.throughput_per_s
        if self.name == "errors":
            return result.error_share
        if self.name == "deadline_misses":
            return result.deadline_miss_share
        latency = result.record.latency
        if self.name == "mean":
            return latency.mean_s if latency.count else math.inf
        unserved = result.failed + result.dropped
        rank = rank_of(100.0 if self.name == "max" else float(self.name[1:]), latency.count + unserved)
        return latency.ranked_s(rank) if rank <= latency.count else math.inf

    def format(self, value: float) -> str:
        """Formats a value with its unit."""
        if self.is_latency:
            return format_seconds(value)
        return format_rate(value) if self.name == "throughput" else format_share(value)


ObjectiveVerdict = Literal["met", "missed", "not judged"]


@dataclass(frozen=True)
class ObjectiveResult:
    """An objective, and what a run measured.

    Attributes:
        objective: The objective.
        measured: The measured value, in its unit.
        verdict: Whether it was met; not judged if the run has a flaw, or too few calls.
        answers: Calls that succeeded.
        unserved: Calls that failed or were dropped.
        unserved_share: Share of the calls that failed or were dropped.
    """

    objective: Objective
    measured: float
    verdict: ObjectiveVerdict
    answers: int
    unserved: int
    unserved_share: float

    @property
    def is_met(self) -> bool:
        """Whether the objective was met."""
        return self.verdict == "met"

    @property
    def has_too_few(self) -> bool:
        """Whether there were too few calls to judge it."""
        return self.answers + self.unserved < self.objective.calls_needed

    @property
    def label(self) -> str:
        """The verdict as text."""
        return "MISSED" if self.verdict == "missed" else self.verdict

    def __str__(self) -> str:
        """Such as ``p99: 61.2 ms (objective: at most 50.0 ms)``."""
        bound = "at least" if self.objective.name == "throughput" else "at most"
        found, limit = (self.objective.format(v) for v in (self.measured, self.objective.limit))
        if self.has_too_few:
            found = self._few()
        elif math.isinf(self.measured):
            found = f"no answer, because {format_share(self.unserved_share)} of the calls were not served"
        return f"{self.objective.name}: {found} (objective: {bound} {limit})"

    def _few(self) -> str:
        needed = self.objective.calls_needed
        if not self.unserved:
            return f"not known from {self.answers} answer{'s' * (self.answers != 1)}, it takes {needed}"
        calls = self.answers + self.unserved
        return f"not known from {calls} calls, {self.answers} of them answered; it takes {needed}"

    def as_dict(self) -> dict[str, Any]:
        """The outcome as JSON; None stands for infinity, and for what is not known."""
        is_known = math.isfinite(self.measured) and not self.has_too_few
        return {
            "name": self.objective.name,
            "limit": self.objective.limit,
            "measured": self.measured if is_known else None,
            "verdict": self.verdict,
            "calls": self.answers + self.unserved,
            "calls_needed": self.objective.calls_needed,
        }


@dataclass(frozen=True)
class Slo:
    """Objectives, all of which must be met.

    Attributes:
        objectives: The objectives.
    """

    objectives: tuple[Objective, ...]

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Reads ``"p99=50ms,errors=0.1%"``; errors must be 0 unless it names them.

        Raises:
            ValueError: A name is unknown or appears twice, or a value has the wrong unit.
        """
        found: dict[str, Objective] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = (piece.strip() for piece in part.partition("="))
            if name in found:
                raise ValueError(f"slo: {name} appears more than once")
            found[name] = Objective(name, _limit(name, value, part))
        if not found:
            raise ValueError(f"slo: found nothing; expected {_EXPECTED}")
        found.setdefault("errors", Objective("errors", 0.0))
        return cls(tuple(found.values()))

    def judge(self, result: Result) -> tuple[ObjectiveResult, ...]:
        """Compares a run with every objective.

        A run that has a flaw neither meets nor misses any, and one of too few calls no percentile.
        """
        counts = result.answered, result.failed + result.dropped, result.error_share
        is_flawed = bool(spoiling(result))
        outcomes = []
        for objective in self.objectives:
            measured = objective.measured(result)
            at_least = objective.name == "throughput"
            is_met = measured >= objective.limit if at_least else measured <= objective.limit
            outcome = ObjectiveResult(objective, measured, "met" if is_met else "missed", *counts)
            is_unjudged = is_flawed or outcome.has_too_few
            outcomes.append(replace(outcome, verdict="not judged") if is_unjudged else outcome)
        return tuple(outcomes)

    def __str__(self) -> str:
        """As `parse` reads it."""
        return ",".join(f"{each.name}={_written(each)}" for each in self.objectives)


def _written(objective: Objective) -> str:
    if objective.is_latency:
        return f"{objective.limit * 1e3:.10g}ms"
    if objective.name == "throughput":
        return f"{objective.limit:.10g}/s"
    return f"{objective.limit * 100:.10g}%"


def _limit(name: str, value: str, part: str) -> float:
    try:
        if name in _SHARES:
            return parse_share(value)
        if name == "throughput":
            return parse_rate(value)
        if name in _LATENCIES or _PERCENTILE.fullmatch(name):
            return parse_duration(value)
    except ValueError as error:
        raise ValueError(f"slo: {name}: {error}") from None
    raise ValueError(f"slo: found {part!r}; expected {_EXPECTED}")
