"""What records say of an operator: parameters in the order of C, wanted outputs, edges, PyTorch's binding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from npugrad.agreement import agreement
from npugrad.attributes import KINDS
from npugrad.edges import NOT_FINITE, edges
from npugrad.operator import AttrParam, OpRecord, Param, TensorParam
from npugrad.ops import OPERATORS, get_operator
from npugrad.products import Product
from npugrad.validation import validate_call


def test_records_list_their_parameters_in_c_order(record: OpRecord) -> None:
    kinds = [p.role if isinstance(p, TensorParam) else "attr" for p in record.params]
    assert kinds.index("output") == len(kinds) - len(record.outputs)
    by_kind: list[Param] = [*record.inputs, *record.attrs, *record.outputs]
    assert {p.name for p in by_kind} == {p.name for p in record.params}
    assert [record.param_index(p.name) for p in record.params] == list(range(len(record.params)))
    assert record.rpc == record.aclnn_name[len("aclnn") :]
    for param in record.params:
        assert param.name.islower()
        assert param.name.isidentifier()
        assert param.doc.endswith(".")
        if isinstance(param, AttrParam):
            assert set(param.choices.values()) <= {0, 1, 2}
            assert KINDS[param.type].is_pointer or not param.optional


@pytest.mark.parametrize(
    ("mask", "wanted"), [((True, True), [0, 1]), ((False, True), [1]), ((False, False), []), (None, [])]
)
def test_a_masked_output_is_not_wanted_but_has_memory_where_the_operator_writes_it_all_the_same(
    mask: tuple[bool, ...] | None, wanted: list[int]
) -> None:
    sampler = get_operator("grid_sampler_2d_backward")
    call = sampler.build(output_mask=mask)
    metas = {"input_grad": call.tensor("input"), "grid_grad": call.tensor("grid")}
    names = [name for index, name in enumerate(metas) if index in wanted]
    assert sampler.infer(call) == {name: meta if name in names else None for name, meta in metas.items()}
    # A null mask succeeds at once, whatever else the call has.
    assert sampler.allocated(call) == ({} if mask is None else metas)
    if mask is None:
        assert sampler.infer(call.with_inputs(input=None)) == dict.fromkeys(metas)


def test_a_masked_output_has_no_memory_where_the_operator_wants_null() -> None:
    norm = get_operator("group_norm_backward")
    call = norm.build(output_mask=(True, False, True))
    assert norm.allocated(call).keys() == {"grad_input", "grad_beta"}
    assert {name: meta for name, meta in norm.infer(call).items() if meta} == norm.allocated(call)


def test_operators_are_found_by_name() -> None:
    assert [get_operator(name) for name in OPERATORS] == list(OPERATORS.values())
    # A new operator comes last: clients may show them in this order.
    assert list(OPERATORS)[:4] == [
        "multi_scale_deformable_attention_grad",
        "grid_sampler_2d_backward",
        "group_norm_backward",
        "fused_floyd_attention_grad",
    ]
    assert all(set(record.products) <= set(Product) for record in OPERATORS.values())


# Edges are legal calls, of every kind, and are what they are called.


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


def test_what_is_moved_onto_ties_stays_there_and_has_rules_that_judge_it(record: OpRecord) -> None:
    has_ties = record.workloads.ties is not None
    assert (record.sampled is not None) == has_ties == bool(record.references_by_rule)
    if record.workloads.ties is None:
        return
    call = record.build(**record.workloads.named["small"].sizes)
    operands = record.make_inputs(call, np.random.default_rng(1))
    record.workloads.ties(call, operands)
    moved = {name: None if array is None else array.copy() for name, array in operands.items()}
    record.workloads.ties(call, moved)
    assert all(np.array_equal(moved[n], a) for n, a in operands.items() if a is not None)  # type: ignore[arg-type]


# Bindings take what the records say: on the CPU, where torch has the same function.

BOUND = {name: record for name, record in OPERATORS.items() if record.binding is not None}
ON_CPU = [
    name for name, record in BOUND.items() if record.binding and record.binding.path.startswith("aten.")
]


def test_a_binding_takes_every_operand_and_attribute_once() -> None:
    for record in BOUND.values():
        assert record.binding is not None
        taken = [*record.binding.positional, *record.binding.keyword]
        assert sorted(taken) == sorted({p.name for p in record.params} - {p.name for p in record.outputs})


@pytest.mark.parametrize("name", ON_CPU)
def test_what_a_binding_gives_is_what_the_reference_gives(name: str) -> None:
    record = BOUND[name]
    assert record.binding is not None
    call = record.build(dtype="float32")
    operands = record.make_inputs(call, np.random.default_rng(3))
    tensors = {key: None if array is None else torch.from_numpy(array) for key, array in operands.items()}
    found = record.binding.call(torch.ops, {**tensors, **call.attrs})
    results = {p.name: output.numpy() for p, output in zip(record.outputs, found, strict=True)}
    judged = agreement(record, operands, call.attrs, results)
    assert judged.ok, judged


def test_an_older_torch_without_it_is_an_attribute_error() -> None:
    binding = BOUND["fused_floyd_attention_grad"].binding
    assert binding is not None
    with pytest.raises(AttributeError):
        binding.call(object(), {})
