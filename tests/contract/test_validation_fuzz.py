"""Random calls of every operator: the validator gives each a verdict that is consistent, and never raises."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from npugrad.attributes import Scalar
from npugrad.dtypes import DType, Format
from npugrad.error_table import BY_CODE
from npugrad.errors import MalformedTensor
from npugrad.meta import CallMeta, TensorMeta
from npugrad.operator import AttrParam, OpRecord
from npugrad.ops import OPERATORS
from npugrad.products import Product
from npugrad.validation import validate_call

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


@st.composite
def nonsense(draw: st.DrawFn, operator: str) -> CallMeta:
    """Anything in every place."""
    record = OPERATORS[operator]
    return CallMeta(
        inputs={p.name: draw(metas()) for p in record.inputs},
        attrs={p.name: draw(VALUES[p.type]) for p in record.attrs},
        outputs={p.name: draw(metas()) for p in record.outputs if draw(st.booleans())},
        product=draw(st.sampled_from(list(Product))),
    )


@st.composite
def almost_legal(draw: st.DrawFn, operator: str) -> CallMeta:
    """A legal call with up to three operands or attributes, or something of them, replaced by anything."""
    record = OPERATORS[operator]
    calls = [sample.call for sample in record.samples(draw(st.sampled_from(list(record.products))))]
    call = calls[draw(st.integers(0, len(calls) - 1))]
    for _ in range(draw(st.integers(0, 3))):
        param = record.params[draw(st.integers(0, len(record.params) - 1))]
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


FUZZ = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@given(data=st.data())
@FUZZ
def test_nonsense_gets_a_verdict(record: OpRecord, data: st.DataObject) -> None:
    check_verdict(record, data.draw(nonsense(record.name)))


@given(data=st.data())
@FUZZ
def test_almost_legal_calls_get_a_verdict(record: OpRecord, data: st.DataObject) -> None:
    check_verdict(record, data.draw(almost_legal(record.name)))
