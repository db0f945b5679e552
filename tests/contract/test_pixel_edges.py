"""Results next to a pixel's edge: every rule's are right, what no rule explains is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.derived import NO_PLACES, SEEDS, pairs, random_cases
from tests.edge_calls import (
    ATTENTION,
    DTYPES,
    IMAGES,
    KINDS,
    MUTANTS,
    SAMPLERS,
    VOLUMES,
    EdgeCall,
    attention_call,
    edge_call,
    grid_call,
    modes_of,
)

from npugrad import OPERATORS, nearest_edges
from npugrad.agreement import agreement
from npugrad.coordinates import CoordinateRule
from npugrad.dtypes import DType
from npugrad.operator import OpRecord

each_sampler = pytest.mark.parametrize("record", SAMPLERS, ids=lambda record: record.name)
NEAREST = {"interpolation_mode": 1}


def drawn(record: OpRecord, kind: str, seed: int) -> EdgeCall:
    """A small call in one of the modes and one of the types."""
    mode = seed // 3 % len(modes_of(record))
    return edge_call(record, kind, seed, mode, dtype=DTYPES[seed % 3], scale=0.5)


@pytest.mark.parametrize("kind", KINDS)
@each_sampler
@given(seed=SEEDS)
@random_cases(5)
def test_results_by_every_rule_are_right(record: OpRecord, kind: str, seed: int) -> None:
    call = drawn(record, kind, seed)
    for rule in call.rules:
        found = call.judged(call.by_rule(rule))
        assert found.ok, f"{call} by {rule}: {found}"


@pytest.mark.parametrize(
    ("record", "kind", "mutant"),
    [
        pytest.param(*case, id=f"{case[0].name}-{case[1]}-{case[2]}")
        for case in pairs(SAMPLERS, KINDS, MUTANTS)
    ],
)
@given(seed=SEEDS, which=st.integers(0, 9))
@random_cases(5)
def test_mistakes_are_refused(record: OpRecord, kind: str, mutant: str, seed: int, which: int) -> None:
    call = drawn(record, kind, seed)
    rule = call.rules[which % len(call.rules)]
    results = call.mutated(mutant, rule, seed)
    if call.differ(results, call.by_rule(rule)):  # nearest interpolation has no floor to be mistaken in
        found = call.judged(results)
        assert not found.ok, f"{call}, {mutant} by {rule}: {found.explanation}"
        assert "no coordinate rule explains it" in str(found)


@each_sampler
@given(seed=SEEDS)
@random_cases(10)
def test_coordinates_that_are_no_place_are_judged_like_others(record: OpRecord, seed: int) -> None:
    call = drawn(record, "lattice", seed)
    rng = np.random.default_rng(seed)
    name = "location" if record is ATTENTION else "grid"
    coordinates = call.inputs[name]
    odd = rng.random(coordinates.shape) < 0.2
    with np.errstate(all="ignore"):
        coordinates[odd] = rng.choice(NO_PLACES, int(odd.sum())).astype(coordinates.dtype)
    for rule in call.rules:
        results = call.by_rule(rule)
        found = call.judged(results)
        assert found.ok, f"{call} by {rule}: {found}"
        with np.errstate(all="ignore"):
            for values in results.values():
                largest = np.abs(values[np.isfinite(values)]).max(initial=1)
                values.reshape(-1)[rng.integers(0, values.size, 200)] += largest
        assert not call.judged(results).ok


def on_edges(record: OpRecord, **attrs: Any) -> EdgeCall:
    """A call of many points that lie so near to an edge that the rules part."""
    if record is ATTENTION:
        return attention_call("identity")
    call = grid_call(record, "lattice", 4, padding_mode=0, align_corners=False, **attrs)
    assert call.sampled.may_move(np.arange(call.sampled.count)).any(axis=1).mean() > 0.1
    return call


def movable(call: EdgeCall, count: int, *, only_on: int | None = None) -> npt.NDArray[np.int64]:
    """Some points well inside that may lie on the other side of an edge, of one axis alone if it is given."""
    every = np.arange(call.sampled.count)
    places, may = call.placed(call.rules[0]), call.sampled.may_move(every)
    inside = ((places > 0.6) & (places < call.sampled.sizes(every) - 1.6)).all(axis=1)
    is_one = may.any(axis=1) if only_on is None else may[:, only_on] & (may.sum(axis=1) == 1)
    found = np.flatnonzero(inside & is_one)
    return np.random.default_rng(1).choice(found, count, replace=False)


def moved(call: EdgeCall, points: npt.NDArray[np.int64], rule: CoordinateRule) -> dict[str, Any]:
    """Results with some points on the other side of the edges that they may lie on either side of."""
    places = call.placed(rule)
    here = places[points]
    edges = np.rint(here - call.sampled.edge) + call.sampled.edge
    other = np.where(here >= edges, edges - 1e-9, edges + 1e-9)
    places[points] = np.where(call.sampled.may_move(points), other, here)
    return call.at(places)


@pytest.mark.parametrize(
    ("record", "number", "attrs"),
    [
        pytest.param(IMAGES, 0, {}, id="images-own"),
        pytest.param(IMAGES, -1, NEAREST, id="images-float64-nearest"),
        pytest.param(VOLUMES, -1, {}, id="volumes-float64"),
        pytest.param(VOLUMES, 0, NEAREST, id="volumes-own-nearest"),
        pytest.param(ATTENTION, 0, {}, id="attention-own"),
        pytest.param(ATTENTION, -1, {}, id="attention-float64"),
    ],
)
def test_a_few_points_may_lie_on_the_other_side_and_are_told(
    record: OpRecord, number: int, attrs: dict[str, Any]
) -> None:
    call = on_edges(record, **attrs)
    rule = call.rules[number]
    found = call.judged(moved(call, movable(call, 7), rule))
    assert found.ok, found
    assert found.explanation.startswith(f"by coordinate rule {rule}")
    assert f"but for 7 of {call.sampled.count} points" in found.explanation
    assert found.comparisons.keys() == call.by_rule(rule).keys()
    most = max(8, call.sampled.count // 1000)
    assert call.judged(moved(call, movable(call, most), rule)).ok
    assert not call.judged(moved(call, movable(call, most + 1 + most // 4), rule)).ok


@pytest.mark.parametrize("axis", [0, 1])
def test_a_pair_counts_only_as_a_whole(axis: int) -> None:
    """Each gradient is that of one side: nothing between the two, and nothing else where there is no edge."""
    call = on_edges(IMAGES, scale=0.5)
    rule = call.rules[0]
    (point,) = movable(call, 1, only_on=axis)
    right, other = call.by_rule(rule), moved(call, np.array([point]), rule)
    assert call.judged(other).ok
    pairs = [results["grid_grad"].reshape(-1, 2)[point].copy() for results in (right, other)]
    changed = other["grid_grad"].reshape(-1, 2)[point]
    for share in (0.5, 2.0, -1.0):
        changed[axis] = pairs[0][axis] + share * (pairs[1][axis] - pairs[0][axis])
        assert not call.judged(other).ok
    changed[:] = pairs[1]
    changed[1 - axis] *= 1.1
    assert not call.judged(other).ok


def test_where_all_rules_agree_there_is_no_edge() -> None:
    """A power of two for a size: every rule has the very same positions, right on the pixels."""
    meta = IMAGES.build(n=1, c=2, h=64, w=64, oh=64, ow=64)
    inputs = {k: a for k, a in IMAGES.make_inputs(meta, np.random.default_rng(2)).items() if a is not None}
    line = ((2 * np.arange(64) + 1) / 64 - 1).astype(np.float32)
    inputs["grid"] = np.stack(np.meshgrid(line, line), axis=-1)[np.newaxis]
    call = EdgeCall(IMAGES, meta, inputs, "identity of 64")
    positions = call.sampled.located(np.arange(64 * 64), call.rules[0])[..., 0]
    assert np.array_equal(positions, np.rint(positions))
    places = call.placed(call.rules[0])
    assert call.judged(call.by_rule(CoordinateRule.FLOAT64)).explanation == ""
    places[70] = np.rint(places[70]) - 1e-9  # one point, of 8 that might move
    assert not call.judged(call.at(places)).ok


def test_a_point_that_is_not_next_to_an_edge_is_refused() -> None:
    call = on_edges(IMAGES)
    places = call.placed(call.rules[0])
    point = int(np.flatnonzero((call.sampled.is_near(np.arange(len(places)))).all(axis=1))[500])
    places[point] += 20 * 2.0**-24 * 104  # pixels
    places[point] = np.floor(places[point]) - 1e-9
    results = call.at(places)
    inputs = {**call.inputs, "grid": call.inputs["grid"].copy()}
    inputs["grid"].reshape(-1, 2)[point] += np.float32(20 * 2.0**-24)
    assert not agreement(IMAGES, inputs, call.meta.attrs, results).ok


def test_coordinates_in_float64_know_no_rule_but_one() -> None:
    call = grid_call(VOLUMES, "identity", dtype=DType.FLOAT64)
    assert call.judged(call.by_rule(call.rules[0])).ok
    places = call.placed(call.rules[0])
    places[:3] = np.rint(places[:3]) - 1e-9
    assert not call.judged(call.at(places)).ok


@pytest.mark.parametrize("name", ["grad_output", "input"])
def test_values_that_are_not_finite_follow_the_side(name: str) -> None:
    """Bilinear interpolation gives a pixel of weight 0 to one side only, which shows where it is NaN."""
    call = on_edges(IMAGES, scale=0.5)
    call.inputs[name][0, 0, 20:24, 20:24] = np.nan
    for rule in call.rules:
        found = call.judged(call.by_rule(rule))
        assert found.ok, found
    results = call.by_rule(call.rules[0])
    for values in results.values():
        odd = np.argwhere(np.isnan(values))
        if len(odd):
            kept = values[tuple(odd[0])]
            values[tuple(odd[0])] = 1.0
            assert not call.judged(results).ok
            values[tuple(odd[0])] = kept
    assert any(np.isnan(values).any() for values in results.values())


def test_an_operator_without_points_is_compared_and_no_more() -> None:
    record = OPERATORS["group_norm_backward"]
    meta = record.build()
    inputs = record.make_inputs(meta, np.random.default_rng(0))
    results = {n: np.empty(m.shape, np.float32) for n, m in record.infer(meta).items() if m is not None}
    record.reference(inputs, meta.attrs, results)
    assert agreement(record, inputs, meta.attrs, results).ok
    results["grad_gamma"] += 1
    found = agreement(record, inputs, meta.attrs, results)
    assert (found.ok, list(found.wrong), found.tried) == (False, ["grad_gamma"], "")
    assert str(found).startswith("grad_gamma: outside tolerance")


def test_golden_values_at_hand_are_used_and_stay_as_they_are() -> None:
    call = on_edges(IMAGES)
    golden = {name: array.astype(np.float64) for name, array in call.by_rule(call.rules[0]).items()}
    before = {name: array.copy() for name, array in golden.items()}
    results = call.by_rule(CoordinateRule.FLOAT64)
    assert agreement(IMAGES, call.inputs, call.meta.attrs, results, golden).explanation
    assert all(np.array_equal(golden[name], before[name]) for name in golden)


def test_many_points_at_one_edge_are_left_to_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """All points of nearest interpolation at one coordinate: which of them moved is not for trial to find."""
    meta = IMAGES.build(n=1, c=2, h=104, w=77, oh=104, ow=77, interpolation_mode=1)
    inputs = {k: a for k, a in IMAGES.make_inputs(meta, np.random.default_rng(2)).items() if a is not None}
    edges = [((2 * np.arange(size) + 2) / size - 1).astype(np.float32) for size in (77, 104)]
    inputs["grid"] = np.stack(np.meshgrid(*edges), axis=-1)[np.newaxis]
    call = EdgeCall(IMAGES, meta, inputs, "one coordinate")
    own, exact = (call.placed(rule) for rule in (call.rules[0], CoordinateRule.FLOAT64))
    parted = np.flatnonzero((np.rint(own) != np.rint(exact)).any(axis=1))[0]
    inputs["grid"][:] = inputs["grid"].reshape(-1, 2)[parted].copy()

    def refuse(*args: object) -> None:
        raise AssertionError("looked for the points that moved among all")

    monkeypatch.setattr(nearest_edges, "_Pursuit", refuse)
    results = call.by_rule(CoordinateRule.FLOAT64)
    assert call.judged(results).explanation == "by coordinate rule float64"
    results["input_grad"] *= 2
    assert not call.judged(results).ok
