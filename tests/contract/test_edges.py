"""The edges that records have are legal calls, of every kind, and are what they are called."""

from __future__ import annotations

import numpy as np

from npugrad.edges import NOT_FINITE, edges
from npugrad.operator import OpRecord
from npugrad.validation import validate_call


def test_every_operator_has_edges_of_every_kind_that_are_legal(record: OpRecord) -> None:
    found = list(edges(record, record.inputs[0].dtypes[next(iter(record.products))][0]))
    assert {edge.kind for edge in found} >= {"strided", "non-finite"}
    assert ("ties" in {edge.kind for edge in found}) == (record.workloads.ties is not None)
    assert len({(edge.kind, edge.name) for edge in found}) == len(found)
    for edge in found:
        assert validate_call(record, edge.call).violations == ()
    floats = [p for p in record.inputs if any("float" in d for types in p.dtypes.values() for d in types)]
    odd = [edge.name.split() for edge in found if edge.kind == "non-finite"]
    assert {p.name for p in floats if not p.optional} <= {name for name, _ in odd}
    assert {value for _, value in odd} == set(map(str, NOT_FINITE))


def test_one_value_of_one_operand_is_not_finite(record: OpRecord) -> None:
    for edge in edges(record, record.inputs[0].dtypes[next(iter(record.products))][0]):
        if edge.kind == "non-finite" and edge.name.endswith(" nan"):
            odd = {
                name: int((~np.isfinite(array.astype(np.float64))).sum())
                for name, array in edge.make().items()
                if array is not None
            }
            assert odd == {name: int(edge.name == f"{name} nan") for name in odd}


def test_an_operator_that_jumps_at_pixel_edges_has_calls_on_them_and_rules_to_judge_them(
    record: OpRecord,
) -> None:
    assert (
        (record.sampled is not None) == (record.workloads.ties is not None) == bool(record.references_by_rule)
    )


def test_what_is_moved_onto_ties_stays_there(record: OpRecord) -> None:
    if record.workloads.ties is None:
        return
    call = record.build(**record.workloads.named["small"].sizes)
    operands = record.make_inputs(call, np.random.default_rng(1))
    record.workloads.ties(call, operands)
    moved = {name: None if array is None else array.copy() for name, array in operands.items()}
    record.workloads.ties(call, moved)
    assert all(np.array_equal(moved[n], a) for n, a in operands.items() if a is not None)  # type: ignore[arg-type]
