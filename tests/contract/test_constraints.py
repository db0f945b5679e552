"""Each constraint proves itself: legal samples pass, and what it breaks reports it and nothing else."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import cache
from graphlib import TopologicalSorter

import pytest
from tests.summary import Tally

from npugrad.dtypes import DType
from npugrad.error_table import BY_CODE, PARAM_INVALID, PARAM_NULLPTR, TILING_ERROR
from npugrad.meta import CallMeta, TensorMeta
from npugrad.operator import Constraint, OpRecord, Sample, TensorParam
from npugrad.ops import OPERATORS
from npugrad.products import Product
from npugrad.validation import error_from_verdict, validate_call

REPORTABLE = {PARAM_NULLPTR, PARAM_INVALID, TILING_ERROR}
EACH_CONSTRAINT = [
    pytest.param(record, constraint, id=f"{name}-{constraint.id}")
    for name, record in OPERATORS.items()
    for constraint in record.constraints
]


@cache
def samples(record: OpRecord, product: Product) -> list[Sample]:
    return list(record.samples(product))


def test_samples_are_legal_inferred_and_have_every_listed_type(record: OpRecord) -> None:
    for product in record.products:
        found = samples(record, product)
        assert found
        assert max(Counter(sample.name for sample in found).values()) == 1
        for sample in found:
            verdict = validate_call(record, sample.call)
            assert (verdict.status, verdict.violations) == (0, ()), sample.name
            assert sample.call.product is product
            assert list(verdict.outputs) == [p.name for p in record.outputs]
        for param in record.inputs:
            metas = [meta for s in found if (meta := s.call.inputs[param.name]) is not None]
            assert {meta.dtype for meta in metas} == set(param.dtypes[product]), param.name
            if param.device_view is not None:
                assert all(math.prod(param.device_view(meta)) == meta.size for meta in metas)


@pytest.mark.parametrize(("record", "constraint"), EACH_CONSTRAINT)
def test_a_constraint_proves_itself(record: OpRecord, constraint: Constraint, tally: Tally) -> None:
    """On each product; and the vendor's code is a value unless it differs from call to call."""
    for product in filter(constraint.applies, record.products):
        broken = [(s.name, constraint.violate(s.call)) for s in samples(record, product)]
        calls = [(name, call) for name, call in broken if call is not None]
        assert calls, "no sample can show it"
        for name, call in calls:
            check_proof(record, constraint, call, f"{product} {name}")
        codes = {constraint.vendor_status(call) for _, call in calls}
        assert codes <= {0, *BY_CODE}
        assert len(codes) == (2 if callable(constraint.vendor_code) else 1)
        only = "accepts" if codes == {0} else str(min(codes))
        assert constraint.vendor_words == ("varies" if callable(constraint.vendor_code) else only)
        tally(f"{record.name}: calls that each break one constraint", len(calls))
    tally(f"{record.name}: constraints", 1)
    tally(f"{record.name}: constraints with a pick between document and source", int(bool(constraint.pick)))


def check_proof(record: OpRecord, constraint: Constraint, call: CallMeta, case: str) -> None:
    verdict = validate_call(record, call)
    assert [v.id for v in verdict.violations] == [constraint.id], case
    violation = verdict.violations[0]
    assert verdict.status == violation.code == constraint.code
    assert verdict.outputs == {}
    assert (violation.text, violation.sources) == (constraint.text, constraint.sources)
    assert violation.operands == constraint.operands
    assert violation.found
    assert violation.expected
    assert violation.found != violation.expected
    message = str(error_from_verdict(record, verdict))
    assert message == violation.message(record.name)
    assert message.isascii()
    assert len(message) <= 512


def test_records_are_well_formed(record: OpRecord) -> None:
    names = [p.name for p in record.params]
    by_id = {c.id: c for c in record.constraints}
    assert len(set(names)) == len(names)
    assert len(by_id) == len(record.constraints)
    for constraint in record.constraints:
        allowed = set(BY_CODE) if constraint.alone else REPORTABLE
        assert constraint.code in allowed, constraint.id
        assert constraint.sources, constraint.id
        assert constraint.text.endswith("."), constraint.id
        assert set(constraint.operands) <= {*names, "product"}, constraint.id
        assert constraint.operands, constraint.id
        assert constraint.id.split(".")[0].isidentifier(), constraint.id
        for required in constraint.requires:
            assert by_id[required].alone == constraint.alone, f"{constraint.id} requires {required}"
        # Where document and source differ, both sides are named.
        assert constraint.pick or constraint.vendor_code == constraint.code, constraint.id
        if constraint.pick:
            assert "npugrad: " in constraint.pick, constraint.id
            assert "document" in constraint.pick, constraint.id
            assert "source" in constraint.pick or "vendor" in constraint.pick, constraint.id
    TopologicalSorter({c.id: c.requires for c in record.constraints}).prepare()  # refuses a cycle


def test_listed_dtypes_are_those_the_constraints_take(record: OpRecord) -> None:
    """A tensor parameter's list of dtypes is shown to people; the validator refuses exactly the others."""
    for product in record.products:
        for param in (*record.inputs, *record.outputs):
            call, meta = _call_with(record, product, param)
            assert meta.dtype in param.dtypes[product]
            change = call.with_inputs if param.role == "input" else call.with_outputs
            for dtype in set(DType) - {*param.dtypes[product], *param.uncarried}:
                broken = change(**{param.name: TensorMeta(dtype, meta.shape)})
                assert validate_call(record, broken).status == PARAM_INVALID, (product, param.name, dtype)


def _call_with(record: OpRecord, product: Product, param: TensorParam) -> tuple[CallMeta, TensorMeta]:
    for sample in samples(record, product):
        metas = sample.call.inputs if param.role == "input" else validate_call(record, sample.call).outputs
        meta = metas[param.name]
        if meta is not None:
            return sample.call, meta
    raise AssertionError(f"no sample has {param.name}")


def test_an_operator_that_a_product_lacks_is_decided_alone(record: OpRecord) -> None:
    missing = [product for product in Product if product not in record.products]
    alone = [c for c in record.constraints if c.alone]
    assert bool(missing) == bool(alone)
    for product in missing:
        assert samples(record, product) == []
        for sample in samples(record, next(iter(record.products))):
            null = {name: None for name in sample.call.inputs}
            for call in (sample.call, sample.call.with_inputs(**null)):
                verdict = validate_call(record, replace(call, product=product))
                assert [v.id for v in verdict.violations] == [alone[0].id]
                assert verdict.status == alone[0].code
