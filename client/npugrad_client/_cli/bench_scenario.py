"""The scenario that the options of `npugrad bench` describe.

The modules of the load test are imported only where needed, because they require the extra `bench`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from npugrad_client._cli.terminal import find_record

if TYPE_CHECKING:
    from npugrad_client.bench.scenario import Scenario

DEFAULT_OPERATOR = "group_norm_backward"


def scenario_of(name: str, given: dict[str, Any]) -> Scenario:
    """Returns the scenario of a file as changed by flags, or one made from flags alone."""
    from npugrad_client.bench.scenario import LoadStage, Scenario, ScenarioError
    from npugrad_client.bench.scenario_file import at_key, load_scenario
    from npugrad_client.bench.slo import Slo
    from npugrad_client.bench.units import parse_duration

    if name:
        keys = ("operator", "size", "dtype", "label", "priority")
        named = [key for key in keys if given[key] not in ("", None)]
        if named:
            raise ScenarioError(f"--{named[0]} cannot be combined with --scenario: set it in the file")
        base = _with_inputs(load_scenario(name), given["inputs"], given["digest"])
    else:
        base = Scenario((_workload(given),), (LoadStage(1, 1, 10.0),), arrival="closed")
    changes: dict[str, Any] = {
        key: given[key] for key in ("max_calls", "workers", "max_in_flight", "seed") if given[key] is not None
    }
    for key in ("warm_up_s", "timeout_s"):
        if given[key]:
            flag = f"--{key.removesuffix('_s').replace('_', '-')}"
            changes[key] = at_key(flag, parse_duration, given[key])
    changes |= _load(base, given)
    try:
        if given["slo"]:
            changes["slo"] = Slo.parse(given["slo"])
        return replace(base, **changes)
    except ValueError as error:  # the base was valid, so a flag is wrong
        key, colon, said = str(error).partition(":")
        raise ScenarioError(f"--{key.replace('_', '-')}{colon}{said}") from None


def _with_inputs(scenario: Scenario, inputs: str, has_digest: bool) -> Scenario:
    """Returns the scenario with operands from a source other than in its file."""
    from npugrad_client.bench.scenario import ScenarioError

    changes: dict[str, Any] = {"inputs": inputs} if inputs else {}
    if has_digest or inputs:
        changes["digest"] = has_digest
    try:
        workloads = tuple(each.changed(**changes) for each in scenario.workloads)
    except ScenarioError as error:
        raise ScenarioError(f"--{error}") from None
    return replace(scenario, workloads=workloads)


def _workload(given: dict[str, Any]) -> Any:
    from npugrad_client.bench.scenario import DEFAULT_LABEL, ScenarioError, WeightedWorkload
    from npugrad_client.bench.sizes import example, parse_sizes

    record = find_record(given["operator"] or DEFAULT_OPERATOR)
    size = given["size"] or "small"
    names = {
        "dtype": given["dtype"],
        "size": size,
        "label": given["label"] or DEFAULT_LABEL,
        "inputs": given["inputs"] or "data",
    }
    try:
        sizes = parse_sizes(record, size) if "=" in size else {}
    except ScenarioError as error:
        raise ScenarioError(f"--size: {error}") from None
    try:
        return WeightedWorkload(
            record.name, **names, sizes=sizes, priority=given["priority"] or 0, digest=given["digest"]
        )
    except ScenarioError as error:
        key, _, said = str(error).partition(": ")
        if key == "sizes":
            said = said.replace("`inputs: recipe`", "--inputs recipe")
            raise ScenarioError(f"--size: {record.name}: {said}") from None
        more = f", or sizes by name such as {example(record)}" if key == "size" else ""
        raise ScenarioError(f"--{error}{more}") from None


def _load(base: Scenario, given: dict[str, Any]) -> dict[str, Any]:
    """Arrival and stages from the flags; empty if there are none."""
    from npugrad_client.bench.scenario import LoadStage, ScenarioError
    from npugrad_client.bench.scenario_file import at_key
    from npugrad_client.bench.units import parse_duration

    if given["rate"] and given["concurrency"]:
        raise ScenarioError("--rate and --concurrency cannot be combined")
    if given["poisson"] and not given["rate"]:
        raise ScenarioError("--poisson needs --rate")
    duration_s = at_key("--duration", parse_duration, given["duration"]) if given["duration"] else None
    if given["rate"] or given["concurrency"]:
        flag = "rate" if given["rate"] else "concurrency"
        start, end = at_key(f"--{flag}", _ends, given[flag])
        arrival = "closed" if flag == "concurrency" else "poisson" if given["poisson"] else "constant"
        stages = (LoadStage(start, end, base.duration_s if duration_s is None else duration_s),)
        return {"arrival": arrival, "stages": stages, "trace": (), "window_s": 0.0}
    if duration_s is None:
        return {}
    if len(base.stages) > 1 or base.arrival == "trace":
        raise ScenarioError(
            "--duration: the scenario's file sets it; give --rate as well to replace its load"
        )
    longer = tuple(replace(stage, duration_s=duration_s) for stage in base.stages)
    return {"stages": longer, "window_s": 0.0}


def _ends(text: str) -> tuple[float, float]:
    first, _, last = text.partition(":")
    try:
        return float(first), float(last or first)
    except ValueError:
        raise ValueError(f"found {text!r}; expected a number, or two for a ramp such as 50:200") from None
