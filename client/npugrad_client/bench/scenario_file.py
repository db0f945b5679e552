"""Scenarios as YAML files, and those that come with the package.

The load testing guide describes their format.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import npugrad_client
from npugrad.ops import OPERATORS
from npugrad_client.bench.scenario import (
    ARRIVALS,
    Arrival,
    LoadStage,
    Scenario,
    ScenarioError,
    WeightedWorkload,
    check,
    shown,
)
from npugrad_client.bench.slo import Slo
from npugrad_client.bench.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_MOST_BYTES = 256 * 2**20
_WORKLOAD_KEYS: dict[str, type | tuple[type, ...]] = {
    "operator": str,
    "dtype": str,
    "size": str,
    "sizes": dict,
    "label": str,
    "priority": int,
    "weight": (int, float),
    "deterministic": bool,
    "inputs": str,
    "digest": bool,
    "name": str,
}
EVERY = "all"
"""Operator of an entry that stands for one entry per operator."""
_SCENARIO_KEYS = (
    "name",
    "workloads",
    "arrival",
    "load",
    "inputs",
    "digest",
    "warm_up",
    "calls",
    "timeout",
    "max_in_flight",
    "workers",
    "seed",
    "window",
    "slo",
)
_KIND_NAMES = {str: "text", int: "a whole number", dict: "a mapping", bool: "true or false", list: "a list"}


def shipped_scenarios() -> dict[str, Path]:
    """Files of the scenarios that come with the package, by name."""
    package = Path(npugrad_client.__file__).parent
    # Inside the package if it is installed; next to it in a source tree.
    folder = next((f for f in (package / "scenarios", package.parent / "scenarios") if f.is_dir()), None)
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))} if folder else {}


def load_scenario(name: str) -> Scenario:
    """Reads a scenario.

    Args:
        name: Path of a file, or the name of a shipped scenario.

    Raises:
        ScenarioError: There is no such file, or it does not describe a scenario.
        ImportError: PyYAML is not installed.
    """
    from npugrad_client.bench.strict_yaml import read_yaml  # here: PyYAML comes with the extra `bench`

    path = shipped_scenarios().get(name, Path(name))
    text = read_text(path, f"the name of a file, or one of {', '.join(shipped_scenarios())}")
    try:
        document = read_yaml(text)
    except ValueError as error:
        raise ScenarioError(f"{path}: {error}") from None
    try:
        return scenario_from(document, path.parent, default_name=path.stem)
    except ScenarioError as error:
        raise ScenarioError(f"{path}: {error}") from None


def read_text(path: Path, expected: str) -> str:
    """A file's text.

    Raises:
        ScenarioError: It cannot be read, or is larger than any scenario.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ScenarioError(f"{path}: found {path.stat().st_size} bytes; expected at most {_MOST_BYTES}")
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise ScenarioError(f"{path}: cannot be read ({reason}); give {expected}") from None


def scenario_from(document: Any, folder: Path, default_name: str = "") -> Scenario:
    """Makes a scenario from the content of a file.

    Args:
        document: The mapping.
        folder: Folder of the files that it names.
        default_name: Name if it has none.

    Raises:
        ScenarioError: A key is missing, unknown or of the wrong kind, or a value is not allowed.
    """
    given = _mapping(document, "scenario", _SCENARIO_KEYS)
    common = {key: given[key] for key in ("inputs", "digest") if key in given}
    workloads = tuple(
        _workload(each, f"workloads[{index}]", common)
        for index, entry in enumerate(_of_kind(given.get("workloads", []), "workloads", list))
        for each in _for_every_operator(entry)
    )
    fields: dict[str, Any] = {"name": _of_kind(given.get("name", default_name), "name", str)}
    arrival, trace = _arrival(given.get("arrival", "constant"), workloads, folder)
    for key, field in (("warm_up", "warm_up_s"), ("timeout", "timeout_s"), ("window", "window_s")):
        if key in given:
            fields[field] = at_key(key, parse_duration, given[key])
    for key, field in (("calls", "max_calls"), *((k, k) for k in ("max_in_flight", "workers", "seed"))):
        if key in given:
            fields[field] = _of_kind(given[key], key, int)
    if "slo" in given:
        fields["slo"] = _slo(_of_kind(given["slo"], "slo", str))
    stages = _trace_stages(trace, given) if arrival == "trace" else _stages(given.get("load", []), arrival)
    return Scenario(workloads, stages, arrival=arrival, trace=trace, **fields)


def at_key(key: str, parse: Callable[[Any], Any], value: Any) -> Any:
    """Reads a value; errors name its key.

    Raises:
        ScenarioError: It cannot be read.
    """
    try:
        return parse(value)
    except ScenarioError as error:
        raise ScenarioError(f"{key}.{error}") from None
    except ValueError as error:
        raise ScenarioError(f"{key}: {error}") from None


def _mapping(value: Any, key: str, known: Sequence[str]) -> Mapping[str, Any]:
    found = _of_kind(value, key, dict)
    unknown = [name for name in found if name not in known]
    check(not unknown, key, unknown[0] if unknown else "", f"one of {', '.join(known)}")
    return dict(found)


def _of_kind(value: Any, key: str, kind: type | tuple[type, ...]) -> Any:
    is_bool = isinstance(value, bool) and kind is not bool
    if is_bool or not isinstance(value, kind):
        expected = _KIND_NAMES.get(kind, "a number") if isinstance(kind, type) else "a number"
        raise ScenarioError(f"{key}: found {shown(value)}; expected {expected}")
    return value


def _for_every_operator(entry: Any) -> list[Any]:
    """The entry itself, or one for each operator."""
    if isinstance(entry, dict) and entry.get("operator") == EVERY:
        return [{**entry, "operator": name} for name in OPERATORS]
    return [entry]


def _workload(entry: Any, key: str, common: Mapping[str, Any]) -> WeightedWorkload:
    given = {**common, **_mapping(entry, key, tuple(_WORKLOAD_KEYS))}
    if given.get("inputs") != "recipe" and not (isinstance(entry, dict) and "digest" in entry):
        given.pop("digest", None)  # a default does not matter if operands are sent
    check("operator" in given, key, sorted(given), "a key `operator`")
    values = {name: _of_kind(value, f"{key}.{name}", _WORKLOAD_KEYS[name]) for name, value in given.items()}
    if "sizes" in values:
        values["sizes"] = {name: _tuples(value) for name, value in values["sizes"].items()}
    return at_key(key, lambda kept: WeightedWorkload(**kept), values)  # type: ignore[no-any-return]


def _tuples(value: Any) -> Any:
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value


def _stages(entries: Any, arrival: Arrival) -> tuple[LoadStage, ...]:
    level_key = "concurrency" if arrival == "closed" else "rate"
    stages = []
    for index, entry in enumerate(_of_kind(entries, "load", list)):
        key = f"load[{index}]"
        given = _mapping(entry, key, (level_key, "duration"))
        for name in (level_key, "duration"):
            check(name in given, key, sorted(given), f"a key `{name}`")
        start, end = _levels(given[level_key], f"{key}.{level_key}")
        duration_s = at_key(f"{key}.duration", parse_duration, given["duration"])
        stages.append(LoadStage(start, end, duration_s))
    return tuple(stages)


def _levels(value: Any, key: str) -> tuple[float, float]:
    ends = value if isinstance(value, list) else [value, value]
    check(len(ends) == 2, key, value, "a number, or two for a ramp")
    start, end = (float(_of_kind(each, key, (int, float))) for each in ends)
    return start, end


def _arrival(
    value: Any, workloads: Sequence[WeightedWorkload], folder: Path
) -> tuple[Arrival, tuple[tuple[float, int], ...]]:
    if isinstance(value, str):
        named: dict[str, Arrival] = {each: each for each in ARRIVALS if each != "trace"}
        check(value in named, "arrival", value, f"{', '.join(named)}, or a mapping with a key `trace`")
        return named[value], ()
    given = _mapping(value, "arrival", ("trace", "speed"))
    check("trace" in given, "arrival", sorted(given), "a key `trace`")
    speed = float(_of_kind(given.get("speed", 1), "arrival.speed", (int, float)))
    check(math.isfinite(speed) and speed > 0, "arrival.speed", speed, "a number above 0")
    path = folder / _of_kind(given["trace"], "arrival.trace", str)
    return "trace", read_trace(path, [each.name for each in workloads], speed)


def read_trace(path: Path, names: Sequence[str], speed: float = 1.0) -> tuple[tuple[float, int], ...]:
    """Reads intended starts in seconds, and the index of the workload of each, -1 for one from the mix.

    Args:
        path: The file; empty lines and whatever follows a ``#`` are ignored.
        names: Names of the workloads.
        speed: How many times as fast as recorded.

    Raises:
        ScenarioError: A line has no valid time, names an unknown workload, or goes back in time.
    """
    arrivals: list[tuple[float, int]] = []
    for number, line in enumerate(read_text(path, "a trace").splitlines(), 1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        time, _, name = (part.strip() for part in entry.partition(","))
        try:
            seconds = float(time) / speed
        except ValueError:
            seconds = math.nan
        last = arrivals[-1][0] if arrivals else 0.0
        # Not `seconds < last`, which is false for NaN.
        check(last <= seconds < math.inf, f"{path}:{number}", time, "seconds, ascending from 0")
        check(not name or name in names, f"{path}:{number}", name, f"one of {', '.join(names)}")
        arrivals.append((seconds, names.index(name) if name else -1))
    if not arrivals:
        raise ScenarioError(f"{path}: has no calls; write one per line")
    return tuple(arrivals)


def trace_stage(trace: Sequence[tuple[float, int]]) -> LoadStage:
    """The stage of a trace: of the same duration, at its mean rate."""
    last_s, intervals = trace[-1][0], len(trace) - 1
    # Ends after the last start, which is followed by an interval too.
    duration_s = max(last_s * len(trace) / intervals if intervals else last_s + 0.1, 0.1)
    rate = len(trace) / duration_s
    return LoadStage(rate, rate, duration_s)


def _slo(text: str) -> Slo:
    try:
        return Slo.parse(text)
    except ValueError as error:
        raise ScenarioError(str(error)) from None


def _trace_stages(trace: Sequence[tuple[float, int]], given: Mapping[str, Any]) -> tuple[LoadStage, ...]:
    for key in ("load", "warm_up"):
        check(key not in given, key, given.get(key), "none with a trace, which says when calls start")
    return (trace_stage(trace),)
