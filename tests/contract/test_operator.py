"""Records list what they have in the order of C, and say which outputs a call wants."""

from __future__ import annotations

import pytest

from npugrad.attributes import KINDS
from npugrad.operator import AttrParam, OpRecord, Param, TensorParam
from npugrad.ops import OPERATORS, get_operator
from npugrad.products import Product


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
    ("mask", "wanted"),
    [((True, True), [0, 1]), ((False, True), [1]), ((False, False), []), (None, [])],
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
