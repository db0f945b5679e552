"""Whether two runs differ, by intervals from a block bootstrap over time windows and a margin to ignore.

Latencies of neighbouring calls depend on each other, so blocks of neighbouring windows are resampled, not
single calls. Resampling a run cannot show how much whole runs of the same build differ, so a difference
counts only if its whole interval is beyond a margin.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from npugrad_client.bench.flaws import flaws
from npugrad_client.bench.record import Window
from npugrad_client.bench.scenario import ScenarioError, check, shown
from npugrad_client.bench.sketch import bucket_s, count_for
from npugrad_client.bench.units import format_rate, format_seconds, format_share

if TYPE_CHECKING:
    import numpy.typing as npt

    from npugrad_client.bench.result import Result

    Floats = npt.NDArray[np.float64]

Judgement = Literal["no difference", "slower", "faster", "inconclusive"]
MARGIN = 0.05
CONFIDENCE = 0.95
LEAST_WINDOWS = 10
_PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0}
_SHOWN_ONLY = ("p99",)
"""Tails of two runs of the same build differ too much for a verdict; their intervals are shown."""
ERROR_MARGIN = 0.001
"""Like `MARGIN`, for the difference between the shares of calls that were not served."""
_WIDEST = 1.5
"""If an interval spans more than this factor, the runs are too short or too unsteady to tell."""
_REPLICATES = 2000
_MOST_WINDOWS = 5000
_FOLLOWING = ("name", "request_bytes", "response_bytes")
"""Fields of a workload that follow from its other fields, which show better what differs."""
_SAME = ("arrival", "workloads", "load", "workers", "timeout_s", "max_in_flight")


@dataclass(frozen=True)
class Difference:
    """One figure of two runs.

    Attributes:
        metric: ``"p50"``, ``"p90"``, ``"p99"``, ``"throughput"`` or ``"errors"``.
        a: Its value in the first run: seconds, calls per second, or a share.
        b: Its value in the second run.
        change: How much worse the second is: 0.2 for a latency a fifth longer or a throughput a sixth lower;
            for errors the difference of the shares.
        low: Lower end of the interval of `change`.
        high: Its upper end.
        judgement: What the interval shows.
        decides: Whether it counts for the verdict.
    """

    metric: str
    a: float
    b: float
    change: float
    low: float
    high: float
    judgement: Judgement
    decides: bool = True

    def __str__(self) -> str:
        """Such as ``p50: 20.3 ms to 24.4 ms, slower by 20.1 % (18.9 % to 21.4 %)``."""
        values = f"{self.metric}: {self._format(self.a)} to {self._format(self.b)}"
        interval = f"{self.low * 100:+.1f} % to {self.high * 100:+.1f} %"
        if self.judgement in ("slower", "faster"):
            sizes = sorted(abs(end) * 100 for end in (self.low, self.high))
            by = f"{abs(self.change) * 100:.1f} % ({sizes[0]:.1f} % to {sizes[1]:.1f} %)"
            word = (
                {"slower": "more", "faster": "fewer"}[self.judgement] if self._is_errors else self.judgement
            )
            return f"{values}, {word} by {by}"
        return f"{values}, {self.judgement} ({interval})"

    @property
    def _is_errors(self) -> bool:
        return self.metric == "errors"

    def _format(self, value: float) -> str:
        if self._is_errors:
            return format_share(value)
        return format_rate(value) if self.metric == "throughput" else format_seconds(value)


@dataclass(frozen=True)
class RunComparison:
    """Comparison of two runs.

    Attributes:
        differences: Figure by figure.
        margin: Relative change that is ignored.
        confidence: Joint confidence level of the intervals that decide.
        flaws: Flaws of the runs, in sentences; only if flawed runs are allowed.
    """

    differences: tuple[Difference, ...]
    margin: float
    confidence: float
    flaws: tuple[str, ...] = ()

    @property
    def judgement(self) -> Judgement:
        """The verdict: the worst judgement of the figures that decide."""
        found = {each.judgement for each in self.differences if each.decides}
        order: tuple[Judgement, ...] = ("slower", "inconclusive", "faster")
        worst: Judgement | None = next((each for each in order if each in found), None)
        return worst or "no difference"

    def __str__(self) -> str:
        """The verdict in a line."""
        telling = [str(d) for d in self.differences if d.decides and d.judgement == self.judgement]
        if self.judgement == "no difference":
            return f"no difference beyond {format_share(self.margin)} was found"
        return f"{self.judgement}: {'; '.join(telling)}"

    def as_dict(self) -> dict[str, Any]:
        """The comparison for scripts."""
        return {
            "verdict": self.judgement,
            "margin": self.margin,
            "confidence": self.confidence,
            "flaws": list(self.flaws),
            "differences": [_as_json(asdict(each)) for each in self.differences],
        }


def _as_json(values: dict[str, Any]) -> dict[str, Any]:
    """Replaces infinity, which JSON lacks, by None."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def compare(
    a: Result,
    b: Result,
    margin: float = MARGIN,
    confidence: float = CONFIDENCE,
    *,
    allow_flawed: bool = False,
) -> RunComparison:
    """Compares a second run with a first one.

    Args:
        a: The first run, such as that of the last release.
        b: The second.
        margin: Relative change to ignore; for errors it is `ERROR_MARGIN`.
        confidence: Joint confidence level of the intervals that decide.
        allow_flawed: Whether to compare runs that were interrupted, died or were limited by the client.

    Raises:
        ScenarioError: The runs did not send the same load, or one is too short or has a flaw.
    """
    check(0 < margin < 1, "margin", margin, "a share between 0 and 1")
    check(0.5 <= confidence < 1, "confidence", confidence, "0.5 to 1")
    _check_same(a, b)
    told = tuple(f"{name}: {flaw.message}" for name, run in (("A", a), ("B", b)) for flaw in flaws(run))
    if told and not allow_flawed:
        raise ScenarioError(f"{' '.join(told)} Compare runs without flaws, or use --allow-flawed.")
    runs = [_Run(a, "A"), _Run(b, "B")]
    told_by_both = [name for name, p in _PERCENTILES.items() if min(r.answers for r in runs) >= count_for(p)]
    metrics = [*told_by_both, *(["throughput"] if a.is_closed else []), "errors"]
    deciding = [name for name in metrics if name not in _SHOWN_ONLY]
    tail = (1 - confidence) / len(deciding) / 2  # all intervals jointly, not each by itself
    found = [_difference(name, runs, tail, margin) for name in metrics]
    return RunComparison(tuple(found), margin, confidence, told)


def _check_same(a: Result, b: Result) -> None:
    for key in _SAME:
        _check_value(key, a.scenario[key], b.scenario[key])


def _check_value(key: str, a: Any, b: Any) -> None:
    """Raises ScenarioError for the first difference, naming its workload and key."""
    if key == "workloads" and len(a) == len(b):
        for index, (one, other) in enumerate(zip(a, b, strict=True)):
            _check_value(f"{key}[{index}]", one, other)
    elif isinstance(a, dict) and isinstance(b, dict):
        # A key that only one has, as in a report of another version, is a difference too.
        for name in sorted({**a, **b}, key=_FOLLOWING.__contains__):
            _check_value(f"{key}.{name}", a.get(name), b.get(name))
    elif a != b:
        raise ScenarioError(f"B: {key}: found {shown(b)}; expected that of A, {shown(a)}")


class _Run:
    """One run as matrices with a row per window, and the weights that resample its windows."""

    def __init__(self, result: Result, name: str) -> None:
        kept, self.window_s = _windows(result)
        answered = sum(1 for window in kept if window.tally.answered)
        check(
            answered >= LEAST_WINDOWS, f"{name}: windows with answers", answered, f"{LEAST_WINDOWS} or more"
        )
        self.buckets = sorted({index for window in kept for index in window.latency.counts})
        self.counts = np.array(
            [[w.latency.counts[index] for index in self.buckets] for w in kept], np.float64
        )
        self.answers = int(self.counts.sum())
        self.intended = np.array([window.tally.intended for window in kept], np.float64)
        self.wrong = self.intended - np.array([window.tally.answered for window in kept], np.float64)
        self.completed = np.array([window.completed for window in kept], np.float64)
        self.once: Floats = np.ones((1, len(kept)))
        begun = int(np.count_nonzero(self.intended))
        self.drawn = _redrawn(len(kept), begun, np.random.default_rng(len(kept)))

    def value(self, metric: str, weights: Floats) -> Floats:
        """Returns the figure for each row of window weights."""
        if metric == "errors":
            # A replicate without calls has no errors; this only occurs in runs of few calls.
            shares: Floats = (weights @ self.wrong) / np.maximum(weights @ self.intended, 1.0)
            return shares
        if metric == "throughput":
            rates: Floats = (weights @ self.completed) / (weights.sum(axis=1) * self.window_s)
            return rates
        return _percentiles(weights @ self.counts, self.buckets, _PERCENTILES[metric])


def _windows(result: Result) -> tuple[list[Window], float]:
    """The complete windows of the measured part, and their length in seconds.

    They include windows in which nothing started: a waiting closed loop has them, and their time passed too.
    Neighbours are joined if there are so many that resampling would take gigabytes.
    """
    window_s = result.record.window_s
    whole = math.floor(result.duration_s / window_s + 1e-9)
    joined = math.ceil(whole / _MOST_WINDOWS) or 1
    kept = [Window() for _ in range(whole // joined)]
    for number, window in result.record.windows.items():
        if 0 <= number < len(kept) * joined:
            kept[number // joined].merge(window)
    return kept, window_s * joined


def _redrawn(windows: int, begun: int, random: np.random.Generator) -> Floats:
    """How often each replicate takes each window, in blocks of neighbours that wrap around at the end.

    On average, a block contains the cube root of the number of windows in which calls began. If most windows
    are empty, shorter blocks would separate calls that depend on each other.
    """
    length = max(1, round(windows / begun ** (2 / 3)))
    blocks = math.ceil(windows / length)
    starts = random.integers(0, windows, (_REPLICATES, blocks))
    taken = ((starts[:, :, None] + np.arange(length)) % windows).reshape(_REPLICATES, -1)[:, :windows]
    weights: Floats = np.zeros((_REPLICATES, windows))
    np.add.at(weights, (np.arange(_REPLICATES)[:, None], taken), 1.0)
    return weights


def _percentiles(counts: Floats, buckets: list[int], percentile: float) -> Floats:
    """A percentile of each row of counts, in seconds, interpolated within its bucket."""
    below = np.cumsum(counts, axis=1)
    rank = below[:, -1:] * percentile / 100
    which = np.minimum((below < rank).sum(axis=1), len(buckets) - 1)
    rows = np.arange(len(counts))
    inside = counts[rows, which]
    before = below[rows, which] - inside
    part = np.divide(rank[:, 0] - before, inside, out=np.full(len(counts), 0.5), where=inside > 0)
    index = np.array(buckets, np.float64)[which] - 0.5 + part
    seconds: Floats = np.exp(index * math.log(bucket_s(1) / bucket_s(0))) * bucket_s(0)
    return seconds


def _difference(metric: str, runs: list[_Run], tail: float, margin: float) -> Difference:
    a, b = (float(run.value(metric, run.once)[0]) for run in runs)
    drawn = [run.value(metric, run.drawn) for run in runs]
    decides = metric not in _SHOWN_ONLY
    if metric == "errors":
        low, high = (float(each) for each in np.quantile(drawn[1] - drawn[0], [tail, 1 - tail]))
        return Difference(metric, a, b, b - a, low, high, _judge(low, high, ERROR_MARGIN, math.inf), decides)
    worse = (a / b if b else math.inf, drawn[0] / np.maximum(drawn[1], 1e-12))
    ratio, ratios = worse if metric == "throughput" else (b / a, drawn[1] / drawn[0])
    low, high = (float(each) - 1 for each in np.quantile(ratios, [tail, 1 - tail]))
    return Difference(metric, a, b, ratio - 1, low, high, _judge(low, high, margin, _WIDEST), decides)


def _judge(low: float, high: float, margin: float, widest: float) -> Judgement:
    if low > margin:
        return "slower"
    if high < (-margin if math.isinf(widest) else 1 / (1 + margin) - 1):
        return "faster"
    return "inconclusive" if (1 + high) / max(1 + low, 1e-12) > widest else "no difference"
