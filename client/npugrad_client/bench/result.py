"""The result of a run, in memory and as JSON."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from npugrad_client.bench.engine import Cpu
from npugrad_client.bench.flaws import flaws
from npugrad_client.bench.record import DEADLINE_REASON, STAGES, Part, Record
from npugrad_client.bench.scenario import ScenarioError
from npugrad_client.bench.scenario_file import read_text
from npugrad_client.bench.sketch import count_for, known_s
from npugrad_client.bench.slo import Slo
from npugrad_client.bench.throughput import evenness

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from npugrad_client.bench.sketch import Distribution
    from npugrad_client.bench.slo import ObjectiveResult

FORMAT = "npugrad-bench/2"
_SCENARIO_KEYS = (
    *("name", "arrival", "workloads", "load", "warm_up_s", "max_calls"),
    *("timeout_s", "max_in_flight", "workers", "seed", "window_s", "slo"),
)
_WORKLOAD_KEYS = ("name", "weight", "inputs", "digest", "request_bytes", "response_bytes")
PERCENTILES = (50.0, 90.0, 99.0, 99.9)


@dataclass(frozen=True)
class Result:
    """What a run measured.

    Attributes:
        scenario: What was sent, as `Scenario.as_dict` gives it.
        record: The measurements.
        elapsed_s: Seconds of the measured part until the last call was sent and answered, or stopped.
        cpus: CPU time of each worker.
        is_interrupted: Whether it was interrupted.
        died: Why it ended early by itself, or could not begin; empty if it did not.
        is_client_bound_allowed: Whether objectives are judged even if the client was the bottleneck.
        environment: Versions, host and server, by name.
    """

    scenario: Mapping[str, Any]
    record: Record
    elapsed_s: float
    cpus: tuple[Cpu, ...] = ()
    is_interrupted: bool = False
    died: str = ""
    is_client_bound_allowed: bool = False
    environment: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_closed(self) -> bool:
        """Whether each call waited for the answer to the one before."""
        return bool(self.scenario["arrival"] == "closed")

    @property
    def duration_s(self) -> float:
        """Length of the measured part in seconds: as planned, or until its load ended if that came first."""
        planned = float(sum(stage[2] for stage in self.scenario["load"]))
        return min(planned, self.record.end_s if math.isfinite(self.record.end_s) else self.elapsed_s)

    @property
    def intended(self) -> int:
        """Calls that were to be sent in the measured part."""
        return self.record.total.intended

    @property
    def warmed_up(self) -> int:
        """Calls that were to be sent in the warm-up."""
        return sum(w.tally.intended for number, w in self.record.windows.items() if number < 0)

    @property
    def answered(self) -> int:
        """Calls that succeeded."""
        return self.record.total.answered

    @property
    def failed(self) -> int:
        """Calls that failed."""
        return sum(self.record.total.failed.values())

    @property
    def dropped(self) -> int:
        """Calls not sent, because too many were in flight."""
        return self.record.total.dropped

    @property
    def outcomes(self) -> tuple[ObjectiveResult, ...]:
        """How the run met the scenario's objectives; empty without objectives."""
        slo = self.scenario["slo"]
        return Slo.parse(slo).judge(self) if slo else ()

    @property
    def error_share(self) -> float:
        """Share of the intended calls that failed or were dropped; 1 if none was intended."""
        return (self.failed + self.dropped) / self.intended if self.intended else 1.0

    @property
    def deadline_miss_share(self) -> float:
        """Share of the intended calls whose deadline passed."""
        return self.record.total.failed[DEADLINE_REASON] / self.intended if self.intended else 0.0

    @property
    def throughput_per_s(self) -> float:
        """Successful answers per second, as `throughput` defines it."""
        return self.record.answered_per_s * evenness(self.scenario, self.intended, self.duration_s)

    @property
    def offered_per_s(self) -> float:
        """Calls per second that were to be sent; in a closed loop those that were sent."""
        if self.is_closed and self.answered:
            return self.throughput_per_s * self.intended / self.answered
        per_s = self.intended / self.duration_s if self.duration_s > 0 else 0.0
        return per_s * evenness(self.scenario, self.intended, self.duration_s)

    def part_per_s(self, part: Part) -> float:
        """Successful answers per second of a workload, server or device; those of all devices add up."""
        return self.throughput_per_s * part.tally.answered / max(self.answered, 1)

    def running_share(self, part: Part) -> float:
        """Share of the time in which operators of a part ran; 2 if two of them always did."""
        return self.throughput_per_s * part.run_s / max(self.answered, 1)

    @property
    def succeeded(self) -> bool:
        """Whether something was measured, and nothing failed or was dropped."""
        return self.answered > 0 and not self.failed and not self.dropped

    @property
    def stage_means_s(self) -> dict[str, float]:
        """Mean seconds by stage."""
        return {stage: self.record.stage_sums[stage] / max(self.answered, 1) for stage in STAGES}

    def summary(self) -> dict[str, Any]:
        """The figures most people want; times in seconds, None for percentiles of too few calls."""
        record = self.record
        return {
            "intended": self.intended,
            "answered": self.answered,
            "failed": dict(record.total.failed),
            "dropped": self.dropped,
            "error_share": self.error_share,
            "deadline_misses": record.total.failed[DEADLINE_REASON],
            "offered_per_s": self.offered_per_s,
            "throughput_per_s": self.throughput_per_s,
            "latency_s": _figures(record.latency),
            "service_s": _figures(record.service),
            "lateness_s": _figures(record.lateness),
            "stages_mean_s": self.stage_means_s,
            "devices": {name: part.tally.answered for name, part in sorted(record.devices.items())},
            "servers": {name: _server_figures(part) for name, part in sorted(record.servers.items())},
        }

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON; `from_dict` reads it."""
        return {
            "format": FORMAT,
            "loop": "closed" if self.is_closed else "open",
            "elapsed_s": self.elapsed_s,
            "interrupted": self.is_interrupted,
            "died": self.died,
            "client_bound_allowed": self.is_client_bound_allowed,
            "flaws": [{"kind": flaw.kind, "message": flaw.message} for flaw in flaws(self)],
            "scenario": dict(self.scenario),
            "summary": self.summary(),
            "objectives": [outcome.as_dict() for outcome in self.outcomes],
            "workers": [asdict(cpu) for cpu in self.cpus],
            "environment": dict(self.environment),
            "record": self.record.as_dict(),
        }

    def as_json(self) -> str:
        """`as_dict` as text."""
        return json.dumps(self.as_dict(), separators=(",", ":")) + "\n"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Result:
        """Reads what `as_dict` wrote.

        Raises:
            ValueError: The values are something else.
        """
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            found = values.get("format") if isinstance(values, dict) else type(values).__name__
            hint = ". Measure again: rates were counted differently" if found == "npugrad-bench/1" else ""
            if isinstance(values, dict) and "capacity_per_s" in values:
                hint = ". This is what --find-capacity found; give a run with --rate or --concurrency"
            raise ValueError(f"found format {found!r}; expected {FORMAT!r}{hint}")
        try:
            return cls(
                scenario=_check_scenario(values["scenario"]),
                record=Record.from_dict(values["record"]),
                elapsed_s=float(values["elapsed_s"]),
                cpus=tuple(Cpu(**each) for each in values["workers"]),
                is_interrupted=bool(values["interrupted"]),
                died=str(values.get("died", "")),
                is_client_bound_allowed=bool(values.get("client_bound_allowed", False)),
                environment=values["environment"],
            )
        except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"not a whole report: {type(error).__name__} {error}") from None

    def as_csv(self) -> str:
        """A line for each window, for spreadsheets."""
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        names = [f"p{p:g}_s" for p in PERCENTILES]
        stages = [f"{stage}_mean_s" for stage in STAGES]
        counts = ["intended", "answered", "failed", "dropped", "completed"]
        writer.writerow(["start_s", "is_warm_up", *counts, *names, *stages])
        for number in sorted(self.record.windows):
            window = self.record.windows[number]
            tally, answered = window.tally, max(window.tally.answered, 1)
            row: list[Any] = [f"{number * self.record.window_s:.6g}", int(number < 0)]
            row += [
                tally.intended,
                tally.answered,
                sum(tally.failed.values()),
                tally.dropped,
                f"{window.completed:.9g}",
            ]
            known = (known_s(window.latency, p) for p in PERCENTILES)
            row += ["" if seconds is None else f"{seconds:.6g}" for seconds in known]
            row += [f"{seconds / answered:.6g}" for seconds in window.stages]
            writer.writerow(row)
        return file.getvalue()


def _server_figures(part: Part) -> dict[str, Any]:
    latency = {f"p{p:g}": known_s(part.latency, p) for p in PERCENTILES}
    tally = part.tally
    return {
        "sent": tally.intended,
        "answered": tally.answered,
        "failed": dict(tally.failed),
        "latency_s": latency,
    }


def _check_scenario(scenario: Any) -> Any:
    """Returns the scenario of a report; raises `ValueError` if it lacks something that reports show."""
    missing = [key for key in _SCENARIO_KEYS if key not in scenario]
    if missing:
        raise ValueError(f"scenario: {missing[0]} is missing, so this is not a whole report")
    for workload in scenario["workloads"]:
        missing = [key for key in _WORKLOAD_KEYS if key not in workload]
        if missing:
            raise ValueError(f"scenario.workloads: {missing[0]} is missing, so this is not a whole report")
    return scenario


def few_answers(result: Result) -> str:
    """Says which percentiles are left out, and how many answers these take; empty if none is."""
    left_out = [p for p in PERCENTILES if result.answered < count_for(p)]
    if not left_out:
        return ""
    takes = (f"p{p:g} ({'it takes ' * (p == left_out[0])}{count_for(p)})" for p in left_out)
    return f"-: too few answers for {', '.join(takes)}"


def _figures(distribution: Distribution) -> dict[str, float | None]:
    values = {f"p{p:g}": known_s(distribution, p) for p in PERCENTILES}
    return {**values, "max": distribution.percentile_s(100.0), "mean": distribution.mean_s}


def load_result(path: Path) -> Result:
    """Reads the JSON of a run.

    Raises:
        ScenarioError: The file cannot be read, or contains something else.
    """
    text = read_text(path, "the JSON of a run")
    try:
        return Result.from_dict(json.loads(text))
    except ValueError as error:
        raise ScenarioError(f"{path}: {error}") from None
