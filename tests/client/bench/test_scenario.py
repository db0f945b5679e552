"""Scenarios: what is legal, what is told of what is not, and the ones that are shipped."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.client.bench.made import GRID, scenario

from npugrad import OPERATORS
from npugrad.recipe import recipes
from npugrad_client.bench.scenario import LoadStage, Scenario, ScenarioError, WeightedWorkload
from npugrad_client.bench.scenario_file import load_scenario, scenario_from, shipped_scenarios
from npugrad_client.bench.schedule import schedule

WHOLE = """
name: both
workloads:
  - operator: multi_scale_deformable_attention_grad
    sizes: {bs: 1, nq: 32, nh: 2, ch: 8, levels: [[8, 8], [4, 4]], points: 4}
    dtype: bfloat16
    label: training
    priority: 10
    weight: 3
  - {operator: group_norm_backward, size: medium, deterministic: true, name: norms}
arrival: poisson
load:
  - {rate: 50, duration: 30s}
  - {rate: [50, 200], duration: 1m}
warm_up: 500ms
calls: 1000
timeout: 10s
max_in_flight: 64
workers: 2
seed: 3
window: 2s
slo: p99=50ms,errors=0.1%
"""


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "scenario.yaml"
    path.write_text(textwrap.dedent(text), "utf-8")
    return str(path)


def test_every_size_of_the_record_can_be_measured() -> None:
    for operator, record in OPERATORS.items():
        for size, named in record.workloads.named.items():
            workload = WeightedWorkload(operator, size=size, inputs="recipe")
            assert workload.keywords == named.sizes
            assert workload.call() == record.build(dtype=workload.dtype, **named.sizes)


def test_one_entry_may_stand_for_every_operator(tmp_path: Path) -> None:
    text = "workloads: [{operator: all, size: tiny, label: a}]\nload: [{rate: 1, duration: 1s}]"
    made = load_scenario(written(tmp_path, text))
    assert [each.operator for each in made.workloads] == list(OPERATORS)
    assert {(each.size, each.label, each.dtype) for each in made.workloads[:3]} == {("tiny", "a", "float32")}


def test_shipped_scenarios_are_legal_and_cover_the_operators() -> None:
    shipped = {name: load_scenario(name) for name in shipped_scenarios()}
    for name, made in shipped.items():
        assert made.name == name
        assert made.duration_s > 0
        if made.slo and not made.is_closed:
            calls = sum(at_s >= 0 for at_s, _ in schedule(made))
            assert calls >= max(each.calls_needed for each in made.slo.objectives), "or none is judged"
        for workload in made.workloads:
            assert max(workload.nbytes) < 64 * 2**20, "a load test sends it many times"
    assert {each.operator for made in shipped.values() for each in made.workloads} == set(OPERATORS)


def test_a_file_says_everything(tmp_path: Path) -> None:
    made = load_scenario(written(tmp_path, WHOLE))
    first, second = made.workloads
    assert first.operator == "multi_scale_deformable_attention_grad"
    assert (first.dtype, first.label, first.priority, first.weight) == ("bfloat16", "training", 10, 3)
    assert second.name == "norms"
    assert second.arguments(1)["deterministic"] is True
    assert made.stages == (LoadStage(50, 50, 30), LoadStage(50, 200, 60))
    assert (made.arrival, made.warm_up_s, made.max_calls, made.timeout_s) == ("poisson", 0.5, 1000, 10)
    assert (made.max_in_flight, made.workers, made.seed, made.window_s) == (64, 2, 3, 2)
    assert str(made.slo) == "p99=50ms,errors=0.1%"
    assert made.duration_s == 90
    assert [made.level(t) for t in (-1, 0, 30, 60, 95)] == [50, 50, 50, 125, 0]


def test_operands_come_from_the_seed() -> None:
    first, again, other = (GRID.arguments(seed)["input"] for seed in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).any()


# Of a workload of group_norm_backward: what is changed, and what is told after `workloads[0]`.
BROKEN_WORKLOADS: list[tuple[dict[str, Any], str]] = [
    ({"operator": "relu"}, ".operator: found 'relu'; expected multi_scale_deformable_attention_grad, "),
    ({"operator": 5}, ".operator: found 5; expected text"),
    ({"dtype": "int8"}, ".dtype: found 'int8'; expected float32, float16, bfloat16"),
    ({"size": "huge"}, ".size: found 'huge'; expected tiny, small, medium, large, unet-block"),
    ({"sizes": {"d": 1}}, ".sizes.d: found 'd'; expected one of n, c, hxw, group"),
    ({"sizes": {"c": 10, "group": 3}}, ".sizes: c, group: found"),
    ({"sizes": {"c": "many"}}, ".sizes: found {'c': 'many'}, which make no call"),
    ({"weight": 0}, ".weight: found 0; expected a number above 0"),
    ({"priority": 101}, ".priority: found 101; expected -100 to 100"),
    ({"label": "x" * 65}, ".label: found 65 characters; expected at most 64"),
    ({"size": True}, ".size: found True; expected text"),
]
STAGE = {"rate": 1, "duration": "1s"}
BROKEN: list[tuple[dict[str, Any], str]] = [
    *(
        ({"workloads": [{"operator": "group_norm_backward", **change}]}, f"workloads[0]{message}")
        for change, message in BROKEN_WORKLOADS
    ),
    ({"workloads": []}, "workloads: found []; expected at least one"),
    ({"workloads": 3}, "workloads: found 3; expected a list"),
    ({"workloads": [{}]}, r"workloads[0]: found []; expected a key `operator`"),
    ({"workloads": ["x"]}, "workloads[0]: found 'x'; expected a mapping"),
    ({"arrival": "random"}, "arrival: found 'random'; expected constant, poisson, closed, or a mapping"),
    ({"arrival": {"speed": 1}}, "arrival: found ['speed']; expected a key `trace`"),
    ({"load": []}, "load: found []; expected at least one stage"),
    ({"load": [{"duration": "1s"}]}, "load[0]: found ['duration']; expected a key `rate`"),
    ({"load": [{**STAGE, "duration": "soon"}]}, "load[0].duration: found 'soon'; expected a duration such"),
    ({"load": [{**STAGE, "duration": "0s"}]}, "duration: found 0.0; expected above 0 s"),
    ({"load": [{**STAGE, "duration": 30}]}, "load[0].duration: found 30; expected a duration with its unit"),
    ({"load": [{**STAGE, "rate": [1, 2, 3]}]}, "load[0].rate: found [1, 2, 3]; expected a number, or two"),
    ({"load": [{**STAGE, "rate": 0}]}, "rate: found 0.0; expected above 0 somewhere in the stage"),
    ({"load": [{**STAGE, "rate": -1}]}, "rate: found -1.0; expected 0 to 1e+06"),
    (
        {"load": [{"concurrency": 1, "duration": "1s"}]},
        "load[0]: found 'concurrency'; expected one of rate, duration",
    ),
    ({"warm_up": "-1s"}, "warm_up: found '-1s'; expected a duration"),
    ({"timeout": "0s"}, "timeout: found 0.0; expected above 0 s"),
    ({"workers": 0}, "workers: found 0; expected 1 to 64"),
    ({"workers": 2.5}, "workers: found 2.5; expected a whole number"),
    ({"seed": -1}, "seed: found -1; expected 0 or more"),
    ({"warm_up": 5}, "warm_up: found 5; expected a duration with its unit, such as 5ms or 5s"),
    ({"timeout": "10"}, "timeout: found '10'; expected a duration with its unit, such as 10ms or 10s"),
    ({"window": 0.5}, "window: found 0.5; expected a duration with its unit, such as 0.5ms or 0.5s"),
    ({"slo": "max=50"}, "slo: max: found '50'; expected a duration with its unit, such as 50ms or 50s"),
    ({"slo": "p99"}, "slo: p99: found ''; expected a duration"),
    ({"slo": 5}, "slo: found 5; expected text"),
    ({"rate": 5}, "scenario: found 'rate'; expected one of name, workloads, arrival, load"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN, ids=lambda value: str(value)[:40])
def test_what_is_wrong_is_told_with_its_key(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    document = {**yaml.safe_load(WHOLE), **change}
    with pytest.raises(ScenarioError) as caught:
        scenario_from(document, tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not YAML: while parsing"),
        ("- 1", "scenario: found [1]; expected a mapping"),
        ("", "scenario: found None; expected a mapping"),
    ],
)
def test_files_that_are_none(text: str, message: str, tmp_path: Path) -> None:
    name = written(tmp_path, text)
    with pytest.raises(ScenarioError) as caught:
        load_scenario(name)
    assert str(caught.value).startswith(f"{name}: {message}")


def test_a_name_that_is_none_lists_what_there_is() -> None:
    message = r"cannot be read \(No such file or directory\); give the name of a file, or one of "
    with pytest.raises(ScenarioError, match=message):
        load_scenario("nonexistent")


TRACED = "workloads: [{operator: grid_sampler_2d_backward, name: a}]\narrival: {trace: t.csv, speed: 2}\n"


def test_a_trace_stands_beside_its_scenario(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("# seconds, workload\n0\n1.0, a\n\n4.0  # last\n", "utf-8")
    made = load_scenario(written(tmp_path, TRACED))
    assert made.trace == ((0.0, -1), (0.5, 0), (2.0, -1))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("x", "t.csv:1: found 'x'; expected seconds, ascending from 0"),
        ("1\n0.5", "t.csv:2: found '0.5'; expected seconds, ascending from 0"),
        ("nan", "t.csv:1: found 'nan'; expected seconds"),
        ("-1", "t.csv:1: found '-1'; expected seconds"),
        ("1, b", "t.csv:1: found 'b'; expected one of a"),
        ("# nothing", "has no calls; write one per line"),
    ],
)
def test_traces_that_are_none(lines: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(lines, "utf-8")
    with pytest.raises(ScenarioError) as caught:
        load_scenario(written(tmp_path, TRACED))
    assert message in str(caught.value)


def test_a_trace_has_no_load_of_its_own_and_lasts_longer_than_to_its_last_call(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("5\n", "utf-8")
    assert load_scenario(written(tmp_path, TRACED)).duration_s > 2.5, "twice as fast as recorded"
    with pytest.raises(ScenarioError, match="warm_up: found '1s'; expected none with a trace"):
        load_scenario(written(tmp_path, TRACED + "warm_up: 1s\n"))


def test_windows_have_a_round_length() -> None:
    lengths = [scenario(duration_s=d).window_s for d in (1, 20, 60, 600, 86400)]
    assert lengths == [0.1, 0.2, 0.5, 5.0, 3600.0]


def test_a_scenario_needs_no_file() -> None:
    made = Scenario((GRID,), (LoadStage(4, 4, 1.0),), arrival="closed")
    assert made.is_closed
    sent = sum(meta.nbytes for meta in GRID.call().inputs.values() if meta is not None)
    assert made.as_dict()["workloads"][0]["request_bytes"] == sent


def test_inputs_hold_for_all_workloads_and_for_each(tmp_path: Path) -> None:
    text = """
    inputs: recipe
    digest: true
    workloads:
      - {operator: grid_sampler_2d_backward}
      - {operator: group_norm_backward, inputs: data}
      - {operator: group_norm_backward, digest: false}
    load: [{rate: 1, duration: 1s}]
    """
    first, second, third = load_scenario(written(tmp_path, text)).workloads
    found = [(each.inputs, each.digest) for each in (first, second, third)]
    assert found == [("recipe", True), ("data", False), ("recipe", False)]
    assert second.name != third.name


def test_recipes_are_those_of_the_seed_and_have_digests_by_choice() -> None:
    plain, proven = (WeightedWorkload(GRID.operator, inputs="recipe", digest=each) for each in (False, True))
    recipe = plain.arguments(5)["input"]
    assert recipe == recipes(OPERATORS[GRID.operator], plain.call(), 5)["input"]
    assert recipe.digest == b""
    assert proven.arguments(5)["input"].digest == recipe.sha256()


def test_tenants_of_one_shape_are_told_apart_by_their_labels() -> None:
    tenants = tuple(WeightedWorkload(GRID.operator, label=label) for label in ("live", "batch"))
    assert scenario(workloads=tenants).workloads == tenants
    message = r"workloads\[1\].name: found '.*'; expected a name that no other"
    with pytest.raises(ScenarioError, match=message):
        scenario(workloads=(GRID, WeightedWorkload(GRID.operator, priority=5)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arrival": "closed", "level": 2.5}, "concurrency: found 2.5; expected a whole number of calls"),
        ({"warm_up_s": 1e9}, "warm_up: found 1000000000.0; expected 0 s and up to a week"),
        ({"window_s": 1e-9}, "window: found 1e-09; expected 0.001 s and up to a week"),
        ({"duration_s": 86400.0, "window_s": 0.1}, "window: found 0.1; expected 0.864 s and up to a week"),
        (
            {"duration_s": 600.0, "warm_up_s": 600_000.0, "window_s": 2.0},
            "warm_up: found 600000.0; expected at most 199400 s with a duration of 600 s, because results "
            "have at most 100000 windows of 2 s",
        ),
        ({"level": 1e9}, "rate: found 1000000000.0; expected 0 to 1e+06"),
        ({"level": float("nan")}, "rate: found nan; expected 0 to 1e+06"),
        (
            {"workers": 4, "max_in_flight": 3},
            "max_in_flight: found 3; expected 4 or more, one for each worker",
        ),
    ],
)
def test_values_without_sense_are_told(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        scenario(**change)
    assert message in str(caught.value)


def test_huge_numbers_of_calls_are_no_matter() -> None:
    assert len(list(schedule(scenario(level=50, duration_s=1, max_calls=10**30)))) == 50
