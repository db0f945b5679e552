"""The entry point `npugrad.validate`: names, the order of codes, and a verdict for every call."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.operators import FLOYD, GRID_SAMPLER, GROUP_NORM

import npugrad
from npugrad import TensorMeta, Verdict
from npugrad.attributes import Scalar
from npugrad.dtypes import DType, Format
from npugrad.error_table import (
    BY_CODE,
    FIND_KERNEL_ERROR,
    INNER_NULLPTR,
    PARAM_INVALID,
    PARAM_NULLPTR,
    TILING_ERROR,
)
from npugrad.errors import (
    InvalidOperand,
    MalformedRequest,
    MalformedTensor,
    NullOperand,
    OperatorError,
    TilingError,
    UnsupportedOperator,
)
from npugrad.meta import CallMeta
from npugrad.operator import AttrParam, Constraint, OpRecord
from npugrad.ops import OPERATORS
from npugrad.products import Product
from npugrad.validation import error_from_verdict, make_call, validate_call

CODE_ORDER = (FIND_KERNEL_ERROR, INNER_NULLPTR, PARAM_NULLPTR, PARAM_INVALID, TILING_ERROR)


def validated(call: CallMeta, record: OpRecord, changes: dict[str, Any]) -> Verdict:
    """What the entry point says of a call; changes go to inputs, attributes, outputs or product by name."""
    given = {"product": call.product, "outputs": None, **call.inputs, **call.attrs, **changes}
    product, outputs = given.pop("product"), given.pop("outputs")
    inputs = {name: given.pop(name) for name in call.inputs}
    return npugrad.validate(record.name, inputs=inputs, attrs=given, outputs=outputs, product=product)


def group_norm(**changes: Any) -> Verdict:
    call = GROUP_NORM.build(n=2, c=3, hxw=4, group=1, shape=(2, 3, 4), with_gamma=False)
    return validated(call, GROUP_NORM, changes)


def grid_sampler(**changes: Any) -> Verdict:
    return validated(GRID_SAMPLER.build(dtype="float16"), GRID_SAMPLER, changes)


def floyd(**changes: Any) -> Verdict:
    return validated(FLOYD.build(), FLOYD, changes)


def ids(verdict: Verdict) -> list[str]:
    return [violation.id for violation in verdict.violations]


def test_a_legal_call() -> None:
    verdict = group_norm()
    assert (verdict.status, verdict.violations) == (0, ())
    assert verdict.outputs == {
        "grad_input": TensorMeta("float32", (2, 3, 4)),
        "grad_gamma": TensorMeta("float32", (3,)),
        "grad_beta": TensorMeta("float32", (3,)),
    }
    outputs = group_norm(output_mask=(True, False, False)).outputs
    assert [meta is None for meta in outputs.values()] == [False, True, True]


def test_an_illegal_call_tells_everything() -> None:
    verdict = group_norm(mean=None, group=2, gamma=TensorMeta("float16", (3,)))
    assert verdict.status == PARAM_NULLPTR
    assert ids(verdict) == ["mean.not_null", "gamma.same_dtype", "c.multiple_of_group", "rstd.count"]
    first = verdict.violations[0]
    assert (first.code, first.operands, first.found) == (PARAM_NULLPTR, ("mean",), "null")
    assert first.text == "mean must not be a null pointer."
    assert str(first.sources[0]) == "aclnnGroupNormBackward, return codes, 161001, row 1"
    assert first.message("group_norm_backward") == "group_norm_backward: mean: found null; expected a tensor"
    assert verdict.outputs == {}
    assert str(error_from_verdict(OPERATORS["group_norm_backward"], verdict)) == (
        "group_norm_backward: mean: found null; expected a tensor "
        "(and 3 more: see error.violations or npugrad validate)"
    )


def test_what_is_missing_is_null_and_declared_outputs_are_checked() -> None:
    verdict = npugrad.validate("group_norm_backward", inputs={}, attrs={"n": 2, "c": 3, "hxw": 4, "group": 1})
    assert [name.split(".")[0] for name in ids(verdict)[:4]] == ["grad_out", "input", "mean", "rstd"]
    assert "output_mask.not_null" in ids(verdict)
    assert ids(group_norm(outputs={"grad_input": None})) == ["grad_input.not_null"]
    assert ids(group_norm(outputs={"grad_input": TensorMeta("float32", (24,))})) == ["grad_input.shape"]
    masked = group_norm(outputs={"grad_input": None}, output_mask=(False, True, True))
    assert masked.status == 0


@pytest.mark.parametrize("product", [*Product, *(p.value for p in Product)])
def test_products_by_name(product: Product | str) -> None:
    assert group_norm(product=product).status == 0
    half = TensorMeta("bfloat16", (2, 3, 4))
    found = group_norm(product=product, grad_out=half, input=half)
    assert ("grad_out.dtype" in ids(found)) == (product == "atlas-training")


def test_unknown_products_and_operators() -> None:
    with pytest.raises(
        ValueError, match="unknown product 'a2'; known are atlas-training, atlas-a2, atlas-a3"
    ):
        group_norm(product="a2")
    with pytest.raises(UnsupportedOperator, match="unknown operator 'rope'; known are multi_scale") as caught:
        npugrad.validate("rope", inputs={}, attrs={})
    error = caught.value
    assert (error.reason, error.operator, error.code) == ("UNKNOWN_OPERATOR", "rope", None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inputs": {"self": None}}, "unknown input 'self'; known are grad_out, input, mean, rstd, gamma"),
        ({"attrs": {"HxW": 4}}, "unknown attribute 'HxW'; did you mean 'hxw'?"),
        ({"outputs": {"dx": None}}, "unknown output 'dx'; known are grad_input, grad_gamma, grad_beta"),
        ({"inputs": {"grad_out": np.zeros(3)}}, "grad_out: found ndarray; expected TensorMeta or None"),
        ({"outputs": {"grad_beta": (3,)}}, "grad_beta: found tuple; expected TensorMeta or None"),
    ],
)
def test_unknown_names_and_other_things_than_metas_are_type_errors(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=f"group_norm_backward: {message}"):
        npugrad.validate("group_norm_backward", **{"inputs": {}, "attrs": {}, **arguments})


def test_modes_by_name_and_number() -> None:
    for number, name in enumerate(("bilinear", "nearest")):
        assert grid_sampler(interpolation_mode=name) == grid_sampler(interpolation_mode=number)
    for number, name in enumerate(("zeros", "border", "reflection")):
        assert grid_sampler(padding_mode=name) == grid_sampler(padding_mode=number)
    assert grid_sampler(padding_mode=3).status == PARAM_INVALID
    with pytest.raises(
        MalformedRequest, match=r"found 'mirror'; expected .* or one of 'zeros', 'border', 'refl"
    ):
        grid_sampler(padding_mode="mirror")


# Order, and the exceptions that follow.


def test_codes_come_in_the_documented_order() -> None:
    tiling = {"value2": TensorMeta("float16", (1, 1, 128, 128, 64))}
    dtype = {"dy": TensorMeta("float32", (1, 1, 16, 128, 32))}
    null = {"softmax_sum": None}
    assert floyd(**tiling).status == TILING_ERROR
    assert [v.code for v in floyd(**tiling, **dtype).violations] == [PARAM_INVALID, TILING_ERROR]
    codes = [v.code for v in floyd(**tiling, **dtype, **null).violations]
    assert codes == [PARAM_NULLPTR, PARAM_INVALID, TILING_ERROR]
    alone = floyd(**tiling, **dtype, **null, product="atlas-training")
    assert (alone.status, len(alone.violations)) == (FIND_KERNEL_ERROR, 1)


@pytest.mark.parametrize(
    ("verdict", "cls", "reason"),
    [
        (group_norm(mean=None), NullOperand, "ACLNN_ERR_PARAM_NULLPTR"),
        (group_norm(group=0), InvalidOperand, "ACLNN_ERR_PARAM_INVALID"),
        (floyd(value2=TensorMeta("float16", (1,) * 5)), TilingError, "ACLNN_ERR_INNER_TILING_ERROR"),
        (floyd(product="atlas-training"), UnsupportedOperator, "OPERATOR_UNSUPPORTED"),
    ],
    ids=["null", "invalid", "tiling", "unsupported"],
)
def test_each_class_of_codes_has_its_exception(
    verdict: Verdict, cls: type[OperatorError], reason: str
) -> None:
    error = error_from_verdict(OPERATORS["group_norm_backward"], verdict)
    assert type(error) is cls
    assert (error.reason, error.code) == (reason, verdict.status)
    assert error.constraint == verdict.violations[0].id
    assert error.violations == verdict.violations
    assert error.violations_total == len(verdict.violations)
    assert (error.operator, error.source) == ("group_norm_backward", "validator")


def worst_call(record: OpRecord, *, seed: int, null: bool) -> CallMeta:
    """A call with everything wrong that can be wrong together; the seed shuffles only how it is made."""
    shuffle = random.Random(seed).sample
    last = record.inputs[-1].name
    metas = {
        p.name: None if null and p.name != last else TensorMeta("int16", (3,) * (9 - i % 3), "FRACTAL_NZ")
        for i, p in enumerate(record.inputs)
    }
    wrong: dict[str, Any] = {"int64": -7, "double": float("nan"), "bool": True}
    wrong |= {"bool_array": (True,) * 5, "int64_array": (7,) * 9, "string": "7", "uint64": 2**64 - 1}
    outputs = {p.name: None if null else TensorMeta("complex64", (2, 7)) for p in record.outputs}
    return make_call(
        record,
        dict(shuffle(list(metas.items()), len(metas))),
        dict(shuffle([(p.name, wrong[p.type]) for p in record.attrs], len(record.attrs))),
        dict(shuffle(list(outputs.items()), len(outputs))),
        Product.ATLAS_A2,
    )


def summary(verdict: Verdict) -> list[tuple[str, int, str, str]]:
    return [(v.id, v.code, v.found, v.expected) for v in verdict.violations]


def reported(record: OpRecord, call: CallMeta) -> set[str]:
    """What is to be reported of a call, by the definition: looked at where all that is required holds."""
    by_id = {c.id: c for c in record.constraints if c.applies(call.product)}

    def looked_at(constraint: Constraint) -> bool:
        return all(looked_at(by_id[name]) and by_id[name].holds(call) for name in constraint.requires)

    return {c.id for c in by_id.values() if looked_at(c) and not c.holds(call)}


@pytest.mark.parametrize("null", [False, True], ids=["wrong", "null"])
def test_a_call_that_breaks_everything_always_gives_the_same_answer(record: OpRecord, null: bool) -> None:
    call = worst_call(record, seed=0, null=null)
    first = validate_call(record, call)
    assert set(ids(first)) == reported(record, call) != set()
    required = [p.name for p in record.inputs[:-1] if not p.optional]
    assert not null or {f"{name}.not_null" for name in required} <= set(ids(first))
    ranks = [CODE_ORDER.index(v.code) for v in first.violations]
    assert ranks == sorted(ranks)
    order = {constraint.id: i for i, constraint in enumerate(record.constraints)}
    for code in CODE_ORDER:
        positions = [order[v.id] for v in first.violations if v.code == code]
        assert positions == sorted(positions)
    for seed in range(1, 201):
        again = validate_call(record, worst_call(record, seed=seed, null=null))
        assert (again.status, summary(again)) == (first.status, summary(first))


class CountedConstraints(tuple[Any, ...]):
    """Constraints that count how often somebody walks through them."""

    walks = 0

    def __iter__(self) -> Iterator[Any]:
        self.walks += 1
        return super().__iter__()


def test_the_order_of_the_checks_is_made_once_for_a_record(record: OpRecord) -> None:
    constraints = CountedConstraints(record.constraints)
    counted = replace(record, constraints=constraints)
    call = worst_call(counted, seed=0, null=False)
    first = validate_call(counted, call)
    walks = constraints.walks
    assert [validate_call(counted, call) for _ in range(3)] == [first] * 3
    assert 0 < walks == constraints.walks
    fewer = replace(counted, constraints=record.constraints[:1])
    assert len(validate_call(fewer, call).violations) <= 1


_IN_ANOTHER_PROCESS = """
from npugrad import OPERATORS, TensorMeta
from npugrad.meta import CallMeta
from npugrad.validation import validate_call
for record in OPERATORS.values():
    metas = {p.name: TensorMeta("int16", (3, 5), "FRACTAL_NZ") for p in record.inputs}
    wrong = {"int64": -7, "uint64": 2**64 - 1, "double": 1.0, "bool": True, "string": "7"}
    wrong |= {"bool_array": (True,) * 5, "int64_array": (7,) * 9}
    attrs = {p.name: wrong[p.type] for p in record.attrs}
    call = CallMeta(metas, attrs, {p.name: None for p in record.outputs})
    print(record.name, [(v.id, v.found, v.expected) for v in validate_call(record, call).violations])
"""


def test_the_answer_does_not_depend_on_the_process() -> None:
    """String hashes differ between processes; no set may decide an order."""
    seen = set()
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", _IN_ANOTHER_PROCESS],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        seen.add(done.stdout)
    assert len(seen) == 1
    assert next(iter(seen)).count("\n") == len(OPERATORS)


# Random calls: each gets a verdict that is consistent, and nothing raises.

SIZES = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 16, 32, 64, 128, 256, 500_000, 2**20, 2**31, 2**40, 2**62])
SHAPES = st.lists(SIZES, max_size=9).map(tuple)
DTYPES = st.sampled_from(list(DType))
FORMATS = st.sampled_from([Format.ND, Format.ND, Format.ND, Format.NCHW, Format.FRACTAL_NZ])
VALUES = {
    "int64": st.one_of(st.integers(-3, 9), st.sampled_from([8000, 2**31, 2**63 - 1, -(2**63)])),
    "int32": st.integers(-(2**31), 2**31 - 1),
    "int8": st.integers(-128, 127),
    "uint64": st.integers(0, 2**64 - 1),
    "double": st.floats(),
    "float": st.floats(width=32),
    "bool": st.booleans(),
    "int64_array": st.none() | st.lists(SIZES, max_size=5).map(tuple),
    "float_array": st.none() | st.lists(st.floats(width=32), max_size=5).map(tuple),
    "bool_array": st.one_of(st.none(), st.lists(st.booleans(), max_size=5).map(tuple)),
    "scalar": st.none() | st.builds(Scalar, st.just("float32"), st.floats(width=32)),
    "string": st.none() | st.text(max_size=5),
}


@st.composite
def metas(draw: st.DrawFn) -> TensorMeta | None:
    """Any tensor description that can exist; null in some cases."""
    if draw(st.integers(0, 9)) == 0:
        return None
    shape, dtype = draw(SHAPES), draw(DTYPES)
    strides, offset = None, 0
    if draw(st.integers(0, 4)) == 0:
        strides = tuple(draw(st.sampled_from([0, 1, 2, 64])) for _ in shape)
        offset = draw(st.sampled_from([0, 5]))
    try:
        return TensorMeta(dtype, shape, draw(FORMATS), strides, offset)
    except MalformedTensor:  # more than 2^63 - 1 bytes
        return TensorMeta(dtype, shape[:1] and (min(shape[0], 2**40),))


# Strategies take the operator's name: hypothesis writes arguments out, and a record is long.


@cache
def sample_calls(operator: str) -> list[CallMeta]:
    record = OPERATORS[operator]
    return [sample.call for product in record.products for sample in record.samples(product)]


@st.composite
def almost_legal(draw: st.DrawFn, operator: str) -> CallMeta:
    """A legal call of which some operands or attributes, up to all, or something of them, are replaced."""
    record = OPERATORS[operator]
    calls = sample_calls(operator)
    call = calls[draw(st.integers(0, len(calls) - 1))]
    call = replace(call, product=draw(st.sampled_from([call.product] * 9 + list(Product))))
    last = len(record.params) - 1
    some = st.lists(st.integers(0, last), max_size=3)
    for param in (record.params[at] for at in draw(some | some | st.just(range(last + 1)))):
        if isinstance(param, AttrParam):
            call = call.with_attrs(**{param.name: draw(VALUES[param.type])})
        elif param.role == "output":
            inferred = validate_call(record, call).outputs.get(param.name)
            call = call.with_outputs(**{param.name: draw(changed(inferred))})
        else:
            call = call.with_inputs(**{param.name: draw(changed(call.inputs[param.name]))})
    return call


@st.composite
def changed(draw: st.DrawFn, meta: TensorMeta | None) -> TensorMeta | None:
    kind = draw(st.sampled_from(["any", "dtype", "axis", "format", "rank"]))
    if meta is None or kind == "any":
        return draw(metas())
    shape, dtype, storage = list(meta.shape), meta.dtype, meta.format
    if kind == "dtype":
        dtype = draw(DTYPES)
    elif kind == "format":
        storage = draw(FORMATS)
    elif kind == "rank" or not shape:
        shape.append(1)
    else:
        shape[draw(st.integers(0, len(shape) - 1))] = draw(st.integers(0, 300))
    try:
        return TensorMeta(dtype, shape, storage)
    except MalformedTensor:  # a second change of an operand that is huge already
        return meta


def check_verdict(record: OpRecord, call: CallMeta) -> None:
    verdict = validate_call(record, call)
    if verdict.violations:
        assert verdict.status == verdict.violations[0].code
        assert verdict.status in BY_CODE
        assert dict(verdict.outputs) == {}
        assert len({v.id for v in verdict.violations}) == len(verdict.violations)
        assert all(v.found and v.expected and v.message(record.name).isascii() for v in verdict.violations)
        assert call.product in record.products or len(verdict.violations) == 1
        return
    assert verdict.status == 0
    assert call.product in record.products
    check_outputs(record, call, verdict.outputs)


def check_outputs(record: OpRecord, call: CallMeta, outputs: Mapping[str, TensorMeta | None]) -> None:
    assert list(outputs) == [p.name for p in record.outputs]
    for param in record.outputs:
        meta, mask = outputs[param.name], call.mask() if param.masked_by is not None else None
        wanted = param.masked_by is None or (mask is not None and mask[param.masked_by])
        assert (meta is not None) == wanted
        if meta is not None:
            assert meta.is_contiguous
            assert meta.dtype in param.dtypes[call.product]
            declared = call.declared(param.name)
            assert declared is None or (declared.shape, declared.dtype) == (meta.shape, meta.dtype)


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_legal_almost_legal_and_nonsensical_calls_get_a_verdict(
    record: OpRecord, data: st.DataObject
) -> None:
    check_verdict(record, data.draw(almost_legal(record.name)))
