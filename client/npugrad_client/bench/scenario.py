"""Scenarios: what a measurement sends, when and for how long, as frozen, validated records."""

from __future__ import annotations

import inspect
import math
import reprlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from npugrad.call import CallOptions
from npugrad.ops import OPERATORS
from npugrad.products import Product
from npugrad.recipe import recipes
from npugrad.validation import validate_call
from npugrad_client.bench.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from npugrad.meta import CallMeta
    from npugrad.recipe import Recipe
    from npugrad_client.bench.slo import Slo

Arrival = Literal["constant", "poisson", "trace", "closed"]
ARRIVALS: tuple[Arrival, ...] = ("constant", "poisson", "trace", "closed")
MAX_WORKERS = 64
MAX_RATE = 1e6
MAX_CONCURRENCY = 65536
DEFAULT_LABEL = "bench"
MAX_WINDOWS = 100_000
MAX_OPERAND_BYTES = 2**31 - 1
"""Maximum size of the operands that a workload sends; no message can be larger."""
Inputs = Literal["data", "recipe"]
INPUTS: tuple[Inputs, ...] = ("data", "recipe")
_WEEK_S = 7 * 86400
_ROUNDING = 1e-3
"""So that what a message shows, with four digits, is enough."""
NOT_SIZES = ("dtype", "product")
"""Keywords of every record's `build` that are not sizes."""


class ScenarioError(ValueError):
    """A scenario that cannot be run; the message names the key, what was found and what is expected."""


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 80, 80


def check(holds: bool, key: str, found: object, expected: str) -> None:
    """Raises ScenarioError unless `holds`; the message shows only the beginning of a long value."""
    if not holds:
        raise ScenarioError(f"{key}: found {shown(found)}; expected {expected}")


def shown(value: object) -> str:
    """Formats a value for a message: only the beginning of a long or deep one."""
    return _SHORT.repr(value)


@dataclass(frozen=True)
class WeightedWorkload:
    """One kind of call, and its share of the mix.

    Attributes:
        operator: Name such as ``"group_norm_backward"``.
        dtype: Element type; empty for the operator's first one.
        size: One of the sizes that the operator's record names; ignored if `sizes` are given.
        sizes: Keywords of the operator's `build`; empty for those of `size`.
        label: Label of the calls; a tenant's calls with different labels take turns.
        priority: Priority of the calls, -100 to 100.
        weight: Share of the mix, relative to the other workloads.
        deterministic: Whether the calls ask for bitwise reproducible results.
        inputs: ``"data"``: operands are sent with each call. ``"recipe"``: the server makes them from a few
            numbers, so that no operand is sent.
        digest: Whether each recipe has a digest, so that the server proves that it made the same bits.
        name: Name in reports; by default made from operator, type, size and whatever is not usual.
    """

    operator: str
    dtype: str = ""
    size: str = "small"
    sizes: Mapping[str, Any] = field(default_factory=dict)
    label: str = DEFAULT_LABEL
    priority: int = 0
    weight: float = 1.0
    deterministic: bool = False
    inputs: Inputs = "data"
    digest: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        """Checks it and fills in what was left out.

        Raises:
            ScenarioError: A value is not allowed, or the call is illegal.
        """
        check(self.operator in OPERATORS, "operator", self.operator, ", ".join(OPERATORS))
        record = OPERATORS[self.operator]
        supported = [str(each) for each in record.inputs[0].dtypes[Product.ATLAS_A2]]
        object.__setattr__(self, "dtype", self.dtype or supported[0])
        check(self.dtype in supported, "dtype", self.dtype, ", ".join(supported))
        check(math.isfinite(self.weight) and self.weight > 0, "weight", self.weight, "a number above 0")
        check(self.inputs in INPUTS, "inputs", self.inputs, ", ".join(INPUTS))
        if self.digest and self.inputs != "recipe":
            raise ScenarioError("digest: needs recipes as inputs")
        problem = CallOptions(priority=self.priority, label=self.label).problem()
        if problem is not None:
            raise ScenarioError(f"{problem[0]}: {problem[1]}")
        self._check_sizes()
        if not self.name:
            sizes = " ".join(f"{k}={_short(v)}" for k, v in self.sizes.items()) or self.size
            parts = [self.operator, self.dtype, sizes, "recipe" if self.inputs == "recipe" else ""]
            parts.append(self.label if self.label != DEFAULT_LABEL else "")
            object.__setattr__(self, "name", " ".join(filter(None, parts)))

    def changed(self, **changes: Any) -> WeightedWorkload:
        """Returns a copy with some fields changed; a generated name is generated again.

        Raises:
            ScenarioError: A value is not allowed.
        """
        name = "" if self.name == replace(self, name="").name else self.name
        return replace(self, name=name, **changes)

    def _check_sizes(self) -> None:
        named = OPERATORS[self.operator].workloads.named
        check(bool(self.sizes) or self.size in named, "size", self.size, ", ".join(named))
        known = [
            n for n in inspect.signature(OPERATORS[self.operator].build).parameters if n not in NOT_SIZES
        ]
        for key in self.sizes:
            check(key in known, f"sizes.{key}", key, f"one of {', '.join(known)}")
        verdict = validate_call(OPERATORS[self.operator], self.call())
        if verdict.violations:
            first = verdict.violations[0]
            raise ScenarioError(
                f"sizes: {', '.join(first.operands)}: found {first.found}; expected {first.expected}"
            )
        sent, most = self.nbytes[0], MAX_OPERAND_BYTES
        check(sent <= most, "sizes", f"{sent} bytes of operands", f"at most {most}, or `inputs: recipe`")

    @property
    def keywords(self) -> dict[str, Any]:
        """Keywords of the operator's `build` besides the type."""
        return dict(self.sizes or OPERATORS[self.operator].workloads.named[self.size].sizes)

    def call(self) -> CallMeta:
        """Metas and attributes of its calls.

        Raises:
            ScenarioError: The sizes do not make a call.
        """
        try:
            return OPERATORS[self.operator].build(dtype=self.dtype, **self.keywords)
        except (TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise ScenarioError(f"sizes: found {shown(self.keywords)}, which make no call: {error}") from None

    def arguments(self, seed: int) -> dict[str, Any]:
        """Keyword arguments for a client's method: operands or recipes of this seed, and the rest."""
        call, record = self.call(), OPERATORS[self.operator]
        made = recipes(record, call, seed) if self.inputs == "recipe" else {}
        if self.digest:
            made = {name: recipe.with_digest() for name, recipe in made.items()}
        operands: dict[str, npt.NDArray[Any] | Recipe | None] = dict.fromkeys(call.inputs)
        if any(meta is not None and name not in made for name, meta in call.inputs.items()):
            operands.update(record.make_inputs(call, np.random.default_rng(seed)))
        operands.update(made)
        options = {"label": self.label, "priority": self.priority, "deterministic": self.deterministic}
        return {**operands, **call.attrs, **options}

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes of the operands that are sent, and of the results."""
        call, record = self.call(), OPERATORS[self.operator]
        outputs = record.infer(call)
        made = recipes(record, call) if self.inputs == "recipe" else {}
        return (
            sum(meta.nbytes for name, meta in call.inputs.items() if meta is not None and name not in made),
            sum(meta.nbytes for meta in outputs.values() if meta is not None),
        )


def _listed(value: Any) -> Any:
    """Converts a value to what JSON would return for it."""
    if isinstance(value, dict):
        return {key: _listed(each) for key, each in value.items()}
    return [_listed(each) for each in value] if isinstance(value, (list, tuple)) else value


def _short(value: Any) -> str:
    return str(value).replace(" ", "")


@dataclass(frozen=True)
class LoadStage:
    """A part of the load: a level, or a ramp between two.

    Attributes:
        start: Level at its start: calls per second, or calls in flight in a closed loop.
        end: Level at its end; the same for a constant one.
        duration_s: Seconds it lasts.
    """

    start: float
    end: float
    duration_s: float

    def level(self, t: float) -> float:
        """Level after t seconds."""
        return self.start + (self.end - self.start) * (t / self.duration_s)


@dataclass(frozen=True)
class Scenario:
    """Complete description of one measurement.

    Attributes:
        workloads: The mix.
        stages: The load over time, without the warm-up; for a trace, one stage of the same duration.
        arrival: Open loop (``"constant"``, ``"poisson"``, ``"trace"``) or ``"closed"``.
        trace: Intended starts of a trace in seconds, ascending, each with the index of its workload, or -1
            for one drawn from the mix.
        warm_up_s: Seconds at the first stage's level whose calls are not measured.
        max_calls: Calls, warm-up included, after which the run ends in any case; 0 for no limit.
        timeout_s: Deadline of each call in seconds.
        max_in_flight: Maximum number of calls in flight in an open loop; further ones are dropped and
            counted.
        workers: Number of processes that send.
        seed: Seed of the operands, the intervals and the order of the mix.
        window_s: Length of the time windows for which results are kept.
        slo: Objectives for the results; None for none.
        name: Name in reports.
    """

    workloads: tuple[WeightedWorkload, ...]
    stages: tuple[LoadStage, ...]
    arrival: Arrival = "constant"
    trace: tuple[tuple[float, int], ...] = ()
    warm_up_s: float = 0.0
    max_calls: int = 0
    timeout_s: float = 60.0
    max_in_flight: int = 1024
    workers: int = 1
    seed: int = 7
    window_s: float = 0.0
    slo: Slo | None = None
    name: str = ""

    def __post_init__(self) -> None:
        """Checks it and fills in what was left out.

        Raises:
            ScenarioError: A value is not allowed.
        """
        check(self.arrival in ARRIVALS, "arrival", self.arrival, ", ".join(ARRIVALS))
        check(bool(self.workloads), "workloads", [], "at least one")
        check(bool(self.stages), "load", [], "at least one stage")
        check(1 <= self.workers <= MAX_WORKERS, "workers", self.workers, f"1 to {MAX_WORKERS}")
        check(
            self.max_in_flight >= self.workers,
            "max_in_flight",
            self.max_in_flight,
            f"{self.workers} or more, one for each worker",
        )
        check(0 < self.timeout_s <= 86400, "timeout", self.timeout_s, "above 0 s and up to a day")
        check(0 <= self.warm_up_s <= _WEEK_S, "warm_up", self.warm_up_s, "0 s and up to a week")
        is_paced = self.arrival == "trace" and self.warm_up_s > 0
        check(not is_paced, "warm_up", self.warm_up_s, "none with a trace, which says when calls start")
        check(self.max_calls >= 0, "calls", self.max_calls, "0 or more")
        check(self.seed >= 0, "seed", self.seed, "0 or more")
        for stage in self.stages:
            self._check_stage(stage)
        if self.arrival in ("constant", "poisson"):
            self._check_calls()
        self._check_names()
        if not self.window_s:
            object.__setattr__(self, "window_s", _window_s(self.duration_s))
        self._check_windows()

    def _check_windows(self) -> None:
        """Limits the number of windows, because results are kept per window."""
        least_s = max(1e-3, self.duration_s / MAX_WINDOWS)
        check(least_s <= self.window_s <= _WEEK_S, "window", self.window_s, f"{least_s:g} s and up to a week")
        most_s = MAX_WINDOWS * self.window_s - self.duration_s
        expected = (
            f"at most {most_s:.6g} s with a duration of {self.duration_s:g} s, because results have at most "
            f"{MAX_WINDOWS} windows of {self.window_s:g} s"
        )
        check(self.warm_up_s <= most_s, "warm_up", self.warm_up_s, expected)

    def _check_names(self) -> None:
        """Rejects duplicate names, because reports tell workloads apart by their names."""
        names = [each.name for each in self.workloads]
        for index, name in enumerate(names):
            check(
                name not in names[:index],
                f"workloads[{index}].name",
                name,
                "a name that no other workload has",
            )

    def _check_stage(self, stage: LoadStage) -> None:
        check(0 < stage.duration_s <= _WEEK_S, "duration", stage.duration_s, "above 0 s and up to a week")
        key, most = ("concurrency", MAX_CONCURRENCY) if self.is_closed else ("rate", MAX_RATE)
        for level in (stage.start, stage.end):
            check(math.isfinite(level) and 0 <= level <= most, key, level, f"0 to {most:g}")
            check(not self.is_closed or level == int(level), key, level, "a whole number of calls")
        check(max(stage.start, stage.end) > 0, key, stage.start, "above 0 somewhere in the stage")

    def _check_calls(self) -> None:
        """Rejects a duration without a whole call, which cannot have the rate."""
        calls = sum((stage.start + stage.end) / 2 * stage.duration_s for stage in self.stages)
        rate = calls / self.duration_s
        if calls < 1 - _ROUNDING:
            raise ScenarioError(
                f"duration: found {format_seconds(self.duration_s)} at a rate of {rate:.4g}/s, which is "
                f"{calls:.3g} calls; expected 1 or more: use a duration of at least {1 / rate:.4g} s, "
                f"or a rate of at least {1 / self.duration_s:.4g}/s"
            )

    @property
    def is_closed(self) -> bool:
        """Whether each call waits for the answer to the one before."""
        return self.arrival == "closed"

    @property
    def duration_s(self) -> float:
        """Seconds that are measured."""
        return sum(stage.duration_s for stage in self.stages)

    def level(self, t: float) -> float:
        """The load at t seconds (negative in the warm-up); 0 after the end."""
        if t < 0:
            return self.stages[0].start or self.stages[0].end
        for stage in self.stages:
            if t < stage.duration_s:
                return stage.level(t)
            t -= stage.duration_s
        return 0.0

    @property
    def top_level(self) -> float:
        """The highest load."""
        return max(max(stage.start, stage.end) for stage in self.stages)

    def as_dict(self) -> dict[str, Any]:
        """The scenario for reports."""
        return {
            "name": self.name,
            "arrival": self.arrival,
            "workloads": [
                {
                    "name": each.name,
                    "operator": each.operator,
                    "dtype": each.dtype,
                    "sizes": _listed(each.keywords),
                    "deterministic": each.deterministic,
                    "label": each.label,
                    "priority": each.priority,
                    "weight": each.weight,
                    "inputs": each.inputs,
                    "digest": each.digest,
                    "request_bytes": each.nbytes[0],
                    "response_bytes": each.nbytes[1],
                }
                for each in self.workloads
            ],
            "load": [[each.start, each.end, each.duration_s] for each in self.stages],
            "warm_up_s": self.warm_up_s,
            "max_calls": self.max_calls,
            "timeout_s": self.timeout_s,
            "max_in_flight": self.max_in_flight,
            "workers": self.workers,
            "seed": self.seed,
            "window_s": self.window_s,
            "slo": str(self.slo) if self.slo else "",
        }


def _window_s(duration_s: float) -> float:
    """A round window length of at least 0.1 s that gives about 120 windows."""
    wanted = duration_s / 120
    return next((w for w in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0) if w >= wanted), 3600.0)
