"""What records say of an operator: parameters in the order of C, wanted outputs, edges, PyTorch's binding."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
import torch

from npugrad.agreement import agreement
from npugrad.attributes import KINDS
from npugrad.binding import TorchBinding
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
    required = {p.name for p in floats if not p.optional} - {*record.checked_operands}
    assert required <= {name for name, _ in odd}
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
ON_CPU = [name for name, record in BOUND.items() if record.binding and record.binding.is_aten]


class _Read(dict[str, Any]):
    """Values that note who asks for them."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__((name, torch.zeros(1)) for name in names)
        self.names = list[str]()

    def __getitem__(self, name: str) -> Any:
        self.names.append(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        return False


def test_a_binding_takes_every_operand_and_attribute_once() -> None:
    for record in BOUND.values():
        binding = record.binding
        assert binding is not None
        taken = [name for name in (*binding.positional, *binding.keyword) if name not in binding.made]
        read = _Read({p.name for p in record.params} - {p.name for p in record.outputs})
        for make in binding.made.values():
            make(read)
        assert sorted({*read.names, *taken}) == sorted(read)
        assert len({*taken}) == len(taken)


# What each kind of parameter is in the schemas of PyTorch's operators.
SCHEMA_TYPES = {
    "int": {"int64", "int32", "int8", "uint64", "bool"},
    "float": {"float", "double"},
    "bool": {"bool"},
    "str": {"string"},
    "List[int]": {"int64_array"},
    "List[bool]": {"bool_array"},
    "List[float]": {"float_array"},
    "number": {"scalar", "double", "float"},
}


@pytest.mark.parametrize("name", ON_CPU)
def test_a_binding_fits_the_schema_of_its_operator(name: str) -> None:
    """In number, order by kind and keywords: a call fails only where such an argument is not the default."""
    record = BOUND[name]
    binding = record.binding
    assert binding is not None
    schema = attrgetter(binding.path)(torch.ops).default._schema
    params = {p.name: p for p in record.params}
    positional = [each for each in schema.arguments if not each.kwarg_only]
    assert {each.name for each in schema.arguments if each.kwarg_only} >= set(binding.keyword)
    assert len(binding.results or record.outputs) == len(record.outputs)
    assert len(schema.returns) == len(record.outputs) or binding.results
    for given, wanted in zip(binding.positional, positional, strict=True):
        if given in binding.made:
            continue
        param, kind = params[given], str(wanted.type)
        if isinstance(param, TensorParam):
            assert kind in {"Tensor", "Optional[Tensor]"}, given
        else:
            assert param.type in SCHEMA_TYPES[kind], given


def _values(**changes: Any) -> dict[str, Any]:
    made = {name: torch.rand(3, 4) for name in ("grad", "input", "output")}
    return {**made, "dim": 1, "mode": 1, "mask": 5, "indices": torch.ones(3), **changes}


# Bindings whose arguments or results are not the record's as they are, and the call that each makes.
MADE: dict[str, tuple[TorchBinding, Callable[..., Any]]] = {
    "a single result": (
        TorchBinding("aten.silu_backward", ("grad", "input")),
        lambda grad, input, **_: torch.ops.aten.silu_backward(grad, input),
    ),
    "a number that stands for a text, of another name": (
        TorchBinding(
            "aten.gelu_backward",
            ("grad", "input"),
            ("approximate",),
            {"approximate": lambda given: ("none", "tanh")[given["mode"]]},
        ),
        lambda grad, input, **_: torch.ops.aten.gelu_backward(grad, input, approximate="tanh"),
    ),
    "a dtype": (
        TorchBinding(
            "aten._softmax_backward_data",
            ("grad", "output", "dim", "dtype"),
            made={"dtype": lambda given: given["output"].dtype},
        ),
        lambda grad, output, dim, **_: torch.ops.aten._softmax_backward_data(grad, output, dim, grad.dtype),
    ),
    "indices of another type, and a constant": (
        TorchBinding(
            "aten.embedding_dense_backward",
            ("grad", "indices", "weights", "padding", "scale"),
            made={
                "indices": lambda given: given["indices"].long(),
                "weights": lambda given: 7,
                "padding": lambda given: -1,
                "scale": lambda given: False,
            },
        ),
        lambda grad, indices, **_: torch.ops.aten.embedding_dense_backward(
            grad, indices.long(), 7, -1, False
        ),
    ),
    "bits of a mask, and some results in another order": (
        TorchBinding(
            "aten.native_batch_norm_backward",
            ("grad", "input", "none", "none", "none", "mean", "mean", "train", "eps", "mask"),
            made={
                "none": lambda given: None,
                "mean": lambda given: given["input"].mean(0),
                "train": lambda given: True,
                "eps": lambda given: 1e-5,
                "mask": lambda given: [bool(given["mask"] >> bit & 1) for bit in range(3)],
            },
            results=(2, 0),
        ),
        lambda grad, **_: (grad.sum(0), None),
    ),
}


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


@pytest.mark.parametrize("name", MADE)
def test_arguments_and_results_that_differ_are_made(name: str) -> None:
    binding, direct = MADE[name]
    values = _values()
    expected = direct(**values)
    found = binding.call(torch.ops, values)
    for one, other in zip(found, expected if isinstance(expected, tuple) else (expected,), strict=True):
        assert other is None or torch.equal(one, other)


def test_an_older_torch_without_it_is_an_attribute_error() -> None:
    binding = BOUND["fused_floyd_attention_grad"].binding
    assert binding is not None
    with pytest.raises(AttributeError):
        binding.call(object(), {})
