"""What holds of every operator's record: nulls, masks, declared outputs, layouts, examples, made operands.

What its page says of concrete calls is in each operator's own file; that each constraint proves itself, in
`tests/contract/test_constraints.py`.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from npugrad.dtypes import DType, Format, dtype_from_name
from npugrad.error_table import PARAM_INVALID, PARAM_NULLPTR, TILING_ERROR
from npugrad.meta import CallMeta, TensorMeta
from npugrad.operator import OpRecord, Sample, TensorParam
from npugrad.ops import OPERATORS
from npugrad.products import Product
from npugrad.validation import validate_call
from npugrad.workloads import Example

PAIRS = [(record, product) for record in OPERATORS.values() for product in record.products]
EACH_PRODUCT = pytest.mark.parametrize(
    ("record", "product"), [pytest.param(r, p, id=f"{r.name}-{p}") for r, p in PAIRS]
)
EACH_EXAMPLE = pytest.mark.parametrize(
    ("record", "product", "example"),
    [
        pytest.param(r, p, example, id=f"{r.name}-{p}-{example.reading}")
        for r, p in PAIRS
        for example in r.workloads.examples
    ],
)
EACH_INPUT = pytest.mark.parametrize(
    ("record", "product", "param"),
    [pytest.param(r, p, param, id=f"{r.name}-{p}-{param.name}") for r, p in PAIRS for param in r.inputs],
)
EACH_OUTPUT = pytest.mark.parametrize(
    ("record", "product", "param"),
    [pytest.param(r, p, param, id=f"{r.name}-{p}-{param.name}") for r, p in PAIRS for param in r.outputs],
)
EACH_SAMPLE = pytest.mark.parametrize(
    ("record", "sample"),
    [
        pytest.param(r, sample, id=f"{r.name}-{p}-{sample.name}")
        for r, p in PAIRS
        for sample in r.samples(p)
        if p is Product.ATLAS_A2 or not sample.call.outputs
    ],
)


def first(record: OpRecord, product: Product) -> CallMeta:
    """A legal call with all outputs wanted."""
    call: CallMeta = next(iter(record.samples(product))).call
    assert None not in record.infer(call).values()
    return call


def ids(record: OpRecord, call: CallMeta) -> list[str]:
    return [violation.id for violation in validate_call(record, call).violations]


def _grown(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], shape[axis] + 1, *shape[axis + 1 :])


def backwards(meta: TensorMeta) -> TensorMeta:
    """The same tensor with its axes in memory in reverse order, as a transpose leaves them."""
    strides = TensorMeta(meta.dtype, meta.shape[::-1]).contiguous_strides[::-1]
    return TensorMeta(meta.dtype, meta.shape, meta.format, strides)


@EACH_EXAMPLE
def test_example_programs_are_legal(record: OpRecord, product: Product, example: Example) -> None:
    filled = example.make()
    inputs = {
        name: None if array is None else TensorMeta(dtype_from_name(array.dtype), array.shape)
        for name, array in filled.operands.items()
    }
    verdict = validate_call(record, CallMeta(inputs, filled.attrs, product=product))
    assert (verdict.status, verdict.violations) == (0, ())
    for name, want in filled.expected.items():
        assert verdict.outputs[name] == TensorMeta(example.dtype, want.shape)


@EACH_INPUT
def test_null_is_legal_for_optional_inputs_only(
    record: OpRecord, product: Product, param: TensorParam
) -> None:
    broken = first(record, product).with_inputs(**{param.name: None})
    verdict = validate_call(record, broken)
    assert verdict.status == (0 if param.optional else PARAM_NULLPTR)
    assert ids(record, broken) == ([] if param.optional else [f"{param.name}.not_null"])


@EACH_OUTPUT
def test_wanted_outputs_are_not_null(record: OpRecord, product: Product, param: TensorParam) -> None:
    broken = first(record, product).with_outputs(**{param.name: None})
    assert validate_call(record, broken).status == PARAM_NULLPTR
    assert ids(record, broken) == [f"{param.name}.not_null"]


@EACH_OUTPUT
def test_declared_outputs_have_the_type_and_shape_that_are_inferred(
    record: OpRecord, product: Product, param: TensorParam
) -> None:
    call = first(record, product)
    meta = record.infer(call)[param.name]
    assert meta is not None
    wrong_type = {TensorMeta(dtype, meta.shape) for dtype in (*param.dtypes[product], DType.INT8)} - {meta}
    wrong_shape = {TensorMeta(meta.dtype, shape) for shape in ((*meta.shape, 1), (7, *meta.shape[1:]))}
    for wrong, kinds in ((wrong_type, {"same_dtype", "dtype"}), (wrong_shape, {"shape", "rank"})):
        for declared in wrong:
            verdict = validate_call(record, call.with_outputs(**{param.name: declared}))
            assert verdict.status in (PARAM_INVALID, TILING_ERROR)
            (found,) = verdict.violations
            name, _, kind = found.id.partition(".")
            assert name == param.name
            assert kind in kinds


@EACH_INPUT
def test_a_wrong_input_is_the_one_that_is_named(
    record: OpRecord, product: Product, param: TensorParam
) -> None:
    """Alike each time; a type, a format, a rank or a size that does not fit."""
    call, given = next(
        (sample.call, meta)
        for sample in record.samples(product)
        if (meta := sample.call.inputs[param.name]) is not None and not sample.call.outputs
    )
    shapes = [
        (),
        (*given.shape, *[1] * (9 - given.rank)),
        *(_grown(given.shape, axis) for axis in range(given.rank)),
    ]
    wrong = [
        *(TensorMeta(dtype, given.shape) for dtype in DType),
        *(TensorMeta(given.dtype, given.shape, storage) for storage in Format),
        *(TensorMeta(given.dtype, shape) for shape in shapes),
    ]
    refused = 0
    for meta in wrong:
        verdict = validate_call(record, call.with_inputs(**{param.name: meta}))
        assert verdict == validate_call(record, call.with_inputs(**{param.name: meta}))
        assert bool(verdict.status) == bool(verdict.violations)
        named = any(param.name in violation.operands for violation in verdict.violations)
        is_own = meta.format != given.format or meta.dtype not in param.dtypes[product]  # whatever others are
        assert named or not is_own or not verdict.status
        refused += bool(verdict.status)
    assert refused >= len(DType) - len(param.dtypes[product]) + 1


@EACH_PRODUCT
def test_outputs_are_contiguous_whatever_is_strided(record: OpRecord, product: Product) -> None:
    call = first(record, product)
    plain = record.infer(call)
    strided = {name: None if meta is None else backwards(meta) for name, meta in call.inputs.items()}
    verdict = validate_call(record, replace(call, inputs=strided))
    assert (verdict.status, verdict.outputs) == (0, plain)
    declared = {name: None if meta is None else backwards(meta) for name, meta in plain.items()}
    verdict = validate_call(record, call.with_outputs(**declared))
    assert (verdict.status, verdict.outputs) == (0, plain)


EACH_MASK = [
    pytest.param(record, product, mask, id=f"{record.name}-{product}-{''.join('01'[bit] for bit in mask)}")
    for record, product in PAIRS
    if any(param.masked_by is not None for param in record.outputs)
    for mask in itertools.product((False, True), repeat=len(record.outputs))
]


@pytest.mark.parametrize(("record", "product", "mask"), EACH_MASK)
def test_masked_outputs_are_absent(record: OpRecord, product: Product, mask: tuple[bool, ...]) -> None:
    """They are looked at all the same where the operator wants them allocated, else at most their type."""
    call = first(record, product).with_attrs(output_mask=mask)
    types_checked = {c.id for c in record.constraints if c.id.endswith(".dtype")}
    verdict = validate_call(record, call)
    assert verdict.status == 0
    masked = [p for p in record.outputs if p.masked_by is not None and not mask[p.masked_by]]
    assert [name for name, meta in verdict.outputs.items() if meta is None] == [p.name for p in masked]
    for param in masked:
        allocated = param.when_masked == "allocate"
        null = call.with_outputs(**{param.name: None})
        assert ids(record, null) == ([f"{param.name}.not_null"] if allocated else [])
        for dtype in ("int8", call.tensor("input").dtype):
            wrong = call.with_outputs(**{param.name: TensorMeta(dtype, (9,))})
            is_seen = allocated or (dtype == "int8" and f"{param.name}.dtype" in types_checked)
            assert validate_call(record, wrong).status == (PARAM_INVALID if is_seen else 0)


@EACH_SAMPLE
def test_made_operands_fit_the_call_and_the_seed(record: OpRecord, sample: Sample) -> None:
    made, again = (record.make_inputs(sample.call, np.random.default_rng(5)) for _ in range(2))
    assert list(made) == [param.name for param in record.inputs]
    for name, meta in sample.call.inputs.items():
        array, same = made[name], again[name]
        assert (array is None) == (same is None) == (meta is None)
        if array is not None and same is not None and meta is not None:
            assert (array.shape, dtype_from_name(array.dtype)) == (meta.shape, meta.dtype)
            assert array.tobytes() == same.tobytes()
            assert np.isfinite(array.astype(np.float64)).all()
    assert record.data_check is None or record.data_check(made) is None
