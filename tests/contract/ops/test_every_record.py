"""What holds of every operator's record: nulls, masks, declared outputs, layouts, examples, made operands.

What its page says of concrete calls is in each operator's own file; that each constraint proves itself, in
`tests/contract/test_constraints.py`.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from npugrad.dtypes import DType, Format, dtype_from_name
from npugrad.error_table import PARAM_INVALID, PARAM_NULLPTR, TILING_ERROR
from npugrad.meta import CallMeta, TensorMeta
from npugrad.operator import OpRecord
from npugrad.products import Product
from npugrad.validation import validate_call


def first(record: OpRecord, product: Product) -> CallMeta:
    """A legal call with all outputs wanted."""
    call: CallMeta = next(iter(record.samples(product))).call
    assert None not in record.infer(call).values()
    return call


def judged(record: OpRecord, call: CallMeta) -> tuple[int, list[str]]:
    """Status and what is violated."""
    verdict = validate_call(record, call)
    return verdict.status, [violation.id for violation in verdict.violations]


def _grown(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], shape[axis] + 1, *shape[axis + 1 :])


def backwards(meta: TensorMeta) -> TensorMeta:
    """The same tensor with its axes in memory in reverse order, as a transpose leaves them."""
    strides = TensorMeta(meta.dtype, meta.shape[::-1]).contiguous_strides[::-1]
    return TensorMeta(meta.dtype, meta.shape, meta.format, strides)


def test_example_programs_are_legal(record: OpRecord) -> None:
    for product, example in itertools.product(record.products, record.workloads.examples):
        filled = example.make()
        inputs = {
            name: None if array is None else TensorMeta(dtype_from_name(array.dtype), array.shape)
            for name, array in filled.operands.items()
        }
        verdict = validate_call(record, CallMeta(inputs, filled.attrs, product=product))
        assert (verdict.status, verdict.violations) == (0, ()), (product, example.reading)
        for name, want in filled.expected.items():
            assert verdict.outputs[name] == TensorMeta(example.dtype, want.shape)


def test_null_is_legal_for_optional_inputs_only(record: OpRecord) -> None:
    for product in record.products:
        call = first(record, product)
        for name, is_legal in [(p.name, p.optional) for p in record.inputs]:
            refused = (PARAM_NULLPTR, [f"{name}.not_null"])
            assert judged(record, call.with_inputs(**{name: None})) == ((0, []) if is_legal else refused)
        for param in record.outputs:
            refused = (PARAM_NULLPTR, [f"{param.name}.not_null"])
            assert judged(record, call.with_outputs(**{param.name: None})) == refused


def test_declared_outputs_have_the_type_and_shape_that_are_inferred(record: OpRecord) -> None:
    for product, param in itertools.product(record.products, record.outputs):
        call = first(record, product)
        meta = record.infer(call)[param.name]
        assert meta is not None
        is_free = f"{param.name}.same_dtype" not in {constraint.id for constraint in record.constraints}
        dtypes = {DType.INT8, *(() if is_free else param.dtypes[product])} - {meta.dtype}
        wrong_type = {TensorMeta(dtype, meta.shape) for dtype in dtypes}
        wrong_shape = {TensorMeta(meta.dtype, shape) for shape in ((*meta.shape, 1), (7, *meta.shape[1:]))}
        for wrong, kinds in ((wrong_type, {"same_dtype", "dtype"}), (wrong_shape, {"shape", "rank"})):
            for declared in wrong:
                status, (found,) = judged(record, call.with_outputs(**{param.name: declared}))
                assert status in (PARAM_INVALID, TILING_ERROR)
                name, _, kind = found.partition(".")
                assert name == param.name
                assert kind in kinds


def test_a_wrong_input_is_the_one_that_is_named(record: OpRecord) -> None:
    """Alike each time; a type, a format, a rank or a size that does not fit."""
    for product, param in itertools.product(record.products, record.inputs):
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
            # Whatever others are.
            is_own = meta.format != given.format or meta.dtype not in param.dtypes[product]
            assert named or not is_own or not verdict.status, (product, param.name, meta)
            refused += bool(verdict.status)
        assert refused >= len(DType) - len(param.dtypes[product]) + 1, (product, param.name)


def test_outputs_are_contiguous_whatever_is_strided(record: OpRecord) -> None:
    for product in record.products:
        call = first(record, product)
        plain = record.infer(call)
        strided = {name: None if meta is None else backwards(meta) for name, meta in call.inputs.items()}
        verdict = validate_call(record, replace(call, inputs=strided))
        assert (verdict.status, verdict.outputs) == (0, plain)
        declared = {name: None if meta is None else backwards(meta) for name, meta in plain.items()}
        verdict = validate_call(record, call.with_outputs(**declared))
        assert (verdict.status, verdict.outputs) == (0, plain)


def test_masked_outputs_are_absent(record: OpRecord) -> None:
    """They are looked at all the same where the operator wants them allocated, else at most their type."""
    if all(param.masked_by is None for param in record.outputs):
        return
    types_checked = {c.id for c in record.constraints if "data type" in c.text and "whatever" in c.text}
    masks = itertools.product((False, True), repeat=len(record.outputs))
    for product, mask in itertools.product(record.products, masks):
        call = first(record, product).with_attrs(output_mask=mask)
        verdict = validate_call(record, call)
        assert verdict.status == 0
        masked = [p for p in record.outputs if p.masked_by is not None and not mask[p.masked_by]]
        assert [name for name, meta in verdict.outputs.items() if meta is None] == [p.name for p in masked]
        for param in masked:
            allocated = param.when_masked == "allocate"
            _, found = judged(record, call.with_outputs(**{param.name: None}))
            assert found == ([f"{param.name}.not_null"] if allocated else [])
            for dtype in ("int8", call.tensor("input").dtype):
                wrong = call.with_outputs(**{param.name: TensorMeta(dtype, (9,))})
                is_seen = allocated or (dtype == "int8" and f"{param.name}.dtype" in types_checked)
                assert judged(record, wrong)[0] == (PARAM_INVALID if is_seen else 0), (product, mask)


def test_made_operands_fit_the_call_and_the_seed(record: OpRecord) -> None:
    calls = {s.name: s.call for p in record.products for s in record.samples(p)}
    for title, call in calls.items():
        made, again = (record.make_inputs(call, np.random.default_rng(5)) for _ in range(2))
        assert list(made) == [param.name for param in record.inputs]
        for name, meta in call.inputs.items():
            array, same = made[name], again[name]
            assert (array is None) == (same is None) == (meta is None), (title, name)
            if array is not None and same is not None and meta is not None:
                assert (array.shape, dtype_from_name(array.dtype)) == (meta.shape, meta.dtype)
                assert array.tobytes() == same.tobytes(), (title, name)
                assert np.isfinite(array.astype(np.float64)).all(), (title, name)
        record.data_check(made, call.attrs)
