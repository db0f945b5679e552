"""Searches the highest rate at which a server meets its objectives: bracket, bisect, confirm."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from npugrad_client.bench.bottleneck import client_bound
from npugrad_client.bench.scenario import MAX_RATE, LoadStage, ScenarioError, check
from npugrad_client.bench.slo import Slo

if TYPE_CHECKING:
    from collections.abc import Callable

    from npugrad_client.bench.result import Result
    from npugrad_client.bench.scenario import Scenario

PRECISION = 0.02
CONFIRM = 3
MOST_TRIALS = 40
_GROWTH = 0.01
"""Share of all calls by which the calls in flight may grow while a server keeps up."""
_LEAST_GROWTH = 3
_FIRST_STEP = 1.15


@dataclass(frozen=True)
class CapacityTrial:
    """One run of the search.

    Attributes:
        rate: Intended calls per second.
        complaints: Why the server cannot sustain this rate; empty if it can.
        client_bound: Why the client was the bottleneck, if it was.
        throughput_per_s: Successful answers per second.
        unjudged: Which objectives had too few calls to be judged, and how long a trial takes for them; empty
            if none had.
    """

    rate: float
    complaints: tuple[str, ...] = ()
    client_bound: tuple[str, ...] = ()
    throughput_per_s: float = 0.0
    unjudged: str = ""

    @property
    def is_met(self) -> bool:
        """Whether the server sustained it."""
        return not self.complaints and not self.unjudged


def judge(result: Result, rate: float, slo: Slo) -> CapacityTrial:
    """Checks one run against the objectives, and for a growing queue."""
    outcomes = slo.judge(result)
    few = [outcome for outcome in outcomes if outcome.has_too_few]
    complaints = [str(outcome) for outcome in outcomes if not outcome.is_met and outcome not in few]
    grown, allowed = backlog_growth(result), _allowed_growth(result)
    if grown > allowed:
        complaints.append(f"the queue grew by {grown:.0f} calls (limit: {allowed:.0f})")
    unjudged = ""
    if few and not complaints:
        needed_s = max(outcome.objective.calls_needed for outcome in few) / rate
        told = "; ".join(str(outcome) for outcome in few)
        unjudged = f"at {rate:.4g}/s, {told}; use a duration of at least {needed_s:.4g} s"
    return CapacityTrial(rate, tuple(complaints), client_bound(result), result.throughput_per_s, unjudged)


def backlog_growth(result: Result) -> float:
    """Growth of the number of calls in flight over the measured part."""
    last = result.duration_s / result.record.window_s - 1e-9
    windows = [w for number, w in result.record.windows.items() if 0 <= number < last]
    ended = sum(w.completed + sum(w.tally.failed.values()) + w.tally.dropped for w in windows)
    return sum(w.tally.intended for w in windows) - ended


def _allowed_growth(result: Result) -> float:
    steady = max(_GROWTH * result.intended, _LEAST_GROWTH)
    # In flight are the calls of one service time, which may all have begun in the measured part.
    steady += result.throughput_per_s * result.record.service.percentile_s(1.0)
    return steady + (2 * math.sqrt(result.intended) if result.scenario["arrival"] == "poisson" else 0.0)


@dataclass
class Capacity:
    """What the search found.

    Attributes:
        trials: All runs in order.
        precision: Relative distance between the two rates at which the search stopped.
        is_client_limited: Whether the client could not send enough to find the limit.
        is_settled: Whether the search finished within its trials.
        is_interrupted: Whether it was interrupted.
        died: Why a trial died, which ended the search; empty if none did.
        too_short: Why a trial was too short, which ended the search; empty if none was.
    """

    trials: list[CapacityTrial] = field(default_factory=list)
    precision: float = PRECISION
    is_client_limited: bool = False
    is_settled: bool = True
    is_interrupted: bool = False
    died: str = ""
    too_short: str = ""

    def _counts(self) -> tuple[Counter[float], Counter[float]]:
        """Trials that were met, and missed, by rate."""
        met, missed = (Counter(t.rate for t in self.trials if t.is_met is kind) for kind in (True, False))
        return met, missed

    def holds(self, rate: float) -> bool:
        """Whether most trials at this rate were met."""
        met, missed = self._counts()
        return met[rate] > missed[rate]

    @property
    def rate(self) -> float:
        """The highest rate that held, in calls a second, and below which none failed; 0 when none did."""
        rates = {trial.rate for trial in self.trials}
        failed = min((rate for rate in rates if not self.holds(rate)), default=math.inf)
        return max((rate for rate in rates if rate < failed), default=0.0)

    @property
    def above(self) -> float:
        """The lowest rate above it that did not hold; infinite when none was found."""
        return min((t.rate for t in self.trials if t.rate > self.rate), default=math.inf)

    def tried(self, rate: float) -> tuple[int, int]:
        """Trials met, and all trials, at a rate."""
        met, missed = self._counts()
        return met[rate], met[rate] + missed[rate]

    @property
    def least_share_met(self) -> float:
        """Lower bound, with 95 % confidence, on the share of trials met at the capacity: 0.05^(1/n)."""
        met, all_trials = self.tried(self.rate)
        return 0.05 ** (1 / met) if met and met == all_trials else 0.0

    def __str__(self) -> str:  # noqa: C901 -- one sentence for each way to end
        """The finding, and how sure it is."""
        if not self.rate and self.died:
            return f"The search failed before it found a rate that meets the objectives: {self.died}"
        if not self.rate and self.is_interrupted:
            return "The search was interrupted before it found a rate that meets the objectives."
        if not self.rate and self.is_client_limited:
            return "No rate was found: the client cannot send at the rates it would have to try."
        if not self.rate and self.too_short:
            return f"No rate was found: {self.too_short}"
        if not self.rate and not self.is_settled:
            return "No rate was found: the server is too unsteady, or the trials too short."
        if not self.rate:
            return "No rate was found that meets the objectives."
        met, tried = self.tried(self.rate)
        text = f"capacity {self.rate:.4g}/s: met in {met} of {tried} trials"
        if self.least_share_met:
            text += f" (95 % confidence: in at least {self.least_share_met:.0%} of them)"
        if math.isfinite(self.above) and not self.is_client_limited:
            missed = self.tried(self.above)
            text += f"; at {self.above:.4g}/s missed in {missed[1] - missed[0]} of {missed[1]}"
        if self.is_client_limited:
            text += "; the client cannot send more, so the server's capacity is at least that"
        if self.died:
            text += f"; not confirmed, because the search failed: {self.died}"
        elif self.is_interrupted:
            text += "; interrupted: the capacity may be higher, and was not confirmed"
        elif self.too_short:
            text += f"; not confirmed: {self.too_short}"
        elif not self.is_settled:
            text += "; not converged: the server is too unsteady, or the trials too short"
        return text

    def as_dict(self) -> dict[str, Any]:
        """The finding for scripts."""
        return {
            "capacity_per_s": self.rate,
            "above_per_s": self.above if math.isfinite(self.above) else None,
            "met_of_trials": list(self.tried(self.rate)),
            "least_share_met": self.least_share_met,
            "client_limited": self.is_client_limited,
            "settled": self.is_settled,
            "interrupted": self.is_interrupted,
            "died": self.died,
            "too_short": self.too_short,
            "trials": [
                {
                    "rate": trial.rate,
                    "met": trial.is_met,
                    "throughput_per_s": trial.throughput_per_s,
                    "complaints": list(trial.complaints),
                    "client_bound": list(trial.client_bound),
                }
                for trial in self.trials
            ],
        }


class ClientLimited(Exception):
    """The client cannot send at the rate to be tried."""


class Ended(Exception):
    """The search must end without a settled result; raised by whatever runs a trial."""


class Interrupted(Ended):
    """The search was interrupted."""


class Died(Ended):
    """A trial could not be carried out; the message says why."""


class TooShort(Ended):
    """A trial at this rate has too few calls; the message says how many it takes."""


class TrialsUsedUp(Exception):
    """The search has had all its trials."""


class Search:
    """A search for the capacity.

    Args:
        measure: Runs one trial at a rate.
        precision: Relative distance between the rate that holds and the one that does not.
        confirm: Number of trials in which the capacity must be met, which must be over half of its trials.
        most_trials: Trials after which the search ends unsettled.
    """

    def __init__(
        self,
        measure: Callable[[float], CapacityTrial],
        precision: float = PRECISION,
        confirm: int = CONFIRM,
        most_trials: int = MOST_TRIALS,
    ) -> None:
        check_precision(precision)
        check(1 <= confirm <= 100, "confirm", confirm, "1 to 100")
        self._measure, self._precision, self._confirm = measure, precision, confirm
        self._most_trials = most_trials
        self.found = Capacity(precision=precision)

    def run(self, start: float) -> Capacity:
        """Searches from a first rate, in calls a second."""
        try:
            low, high = self._bracket(start)
            while low > 0:
                low, high = self._halve(low, high)
                if self._is_confirmed(low):
                    break
                # It was met by luck: look for another bracket below it.
                low, high = self._below(low), low
        except ClientLimited:
            self.found.is_client_limited = True
        except TrialsUsedUp:
            self.found.is_settled = False
        except Ended as ended:
            self.end(ended)
        return self.found

    def end(self, ended: Ended) -> None:
        """Notes why it ended early."""
        self.found.is_settled = False
        if isinstance(ended, Interrupted):
            self.found.is_interrupted = True
        elif isinstance(ended, TooShort):
            self.found.too_short = str(ended)
        else:
            self.found.died = str(ended)

    def _try(self, rate: float) -> bool:
        if len(self.found.trials) >= self._most_trials:
            raise TrialsUsedUp
        if rate > MAX_RATE:
            raise ClientLimited
        trial = self._measure(rate)
        if trial.client_bound:  # once more: something else may have used the CPU for a moment
            trial = self._measure(rate)
        if trial.client_bound:
            raise ClientLimited
        if trial.unjudged:
            raise TooShort(trial.unjudged)
        self.found.trials.append(trial)
        return trial.is_met

    def _bracket(self, start: float) -> tuple[float, float]:
        """Finds a rate that is met and one that is not; the first is 0 if none is met."""
        rate, step = start, _FIRST_STEP
        if self._try(rate):
            while self._try(rate * step):
                rate, step = rate * step, min(step * step, 2.0)
            return rate, rate * step
        return self._below(rate), rate

    def _below(self, high: float) -> float:
        """Finds a rate that is met, below one that was missed; 0 if there is none."""
        step = _FIRST_STEP
        while high > 1e-3:
            high, step = high / step, min(step * step, 2.0)
            if self.found.holds(high) or self._try(high):
                return high
        return 0.0

    def _halve(self, low: float, high: float) -> tuple[float, float]:
        while high / low > 1 + self._precision:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self._try(middle) else (low, middle)
        return low, high

    def _is_confirmed(self, rate: float) -> bool:
        """Repeats a rate until it was met often enough, or missed as often."""
        while True:
            met, tried = self.found.tried(rate)
            if met >= self._confirm and met > tried - met:
                return True
            if tried - met >= max(met, 1) and tried > 1:
                return False
            self._try(rate)


def check_precision(precision: float) -> None:
    """Raises ScenarioError for a precision that is unreachable or meaningless."""
    check(0.001 <= precision <= 0.5, "precision", precision, "0.001 to 0.5")


def at_rate(scenario: Scenario, rate: float) -> Scenario:
    """Returns a scenario as an open loop at one rate, with the same duration.

    Raises:
        TooShort: At this rate it has no call.
    """
    arrival = "constant" if scenario.is_closed else scenario.arrival
    try:
        return replace(scenario, arrival=arrival, stages=(LoadStage(rate, rate, scenario.duration_s),))
    except ScenarioError as error:
        raise TooShort(str(error)) from None


def first_guess(scenario: Scenario, in_flight: int) -> Scenario:
    """A closed loop whose throughput is about what the server can do."""
    duration_s = max(1.0, scenario.duration_s / 2)
    return replace(
        scenario, arrival="closed", stages=(LoadStage(in_flight, in_flight, duration_s),), max_calls=0
    )


UNLIMITED = Slo.parse("errors=0")
"""The objectives by default: every call is answered, and the queue does not grow."""
