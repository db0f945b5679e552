"""Each constraint proves itself: legal samples pass, and what it breaks reports it and nothing else."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

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


EACH_PRODUCT = [
    pytest.param(record, product, id=f"{name}-{product}")
    for name, record in OPERATORS.items()
    for product in record.products
]
EACH_CONSTRAINT = [
    pytest.param(record, product, constraint, id=f"{name}-{product}-{constraint.id}")
    for name, record in OPERATORS.items()
    for product in record.products
    for constraint in record.constraints
    if constraint.applies(product)
]


def samples(record: OpRecord, product: Product) -> list[Sample]:
    return list(record.samples(product))


@pytest.mark.parametrize(("record", "product"), EACH_PRODUCT)
def test_samples_are_legal_and_inferred(record: OpRecord, product: Product) -> None:
    found = samples(record, product)
    assert found
    assert max(Counter(sample.name for sample in found).values()) == 1
    for sample in found:
        verdict = validate_call(record, sample.call)
        assert (verdict.status, verdict.violations) == (0, ()), sample.name
        assert sample.call.product is product
        assert list(verdict.outputs) == [p.name for p in record.outputs]


@pytest.mark.parametrize(("record", "product", "constraint"), EACH_CONSTRAINT)
def test_a_constraint_proves_itself(record: OpRecord, product: Product, constraint: Constraint) -> None:
    proofs = 0
    for sample in samples(record, product):
        broken = constraint.violate(sample.call)
        if broken is None:
            continue
        verdict = validate_call(record, broken)
        assert [v.id for v in verdict.violations] == [constraint.id], sample.name
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
        proofs += 1
    assert proofs, "no sample can show it"


def test_records_are_well_formed(record: OpRecord) -> None:
    names = [p.name for p in record.params]
    ids = [c.id for c in record.constraints]
    assert len(set(names)) == len(names)
    assert len(set(ids)) == len(ids)
    for constraint in record.constraints:
        allowed = set(BY_CODE) if constraint.alone else REPORTABLE
        assert constraint.code in allowed, constraint.id
        assert constraint.sources, constraint.id
        assert constraint.text.endswith("."), constraint.id
        assert set(constraint.operands) <= {*names, "product"}, constraint.id
        assert constraint.operands, constraint.id
        assert constraint.id.split(".")[0].isidentifier(), constraint.id


@pytest.mark.parametrize(("record", "product", "constraint"), EACH_CONSTRAINT)
def test_the_vendor_s_code_is_a_value_unless_calls_differ(
    record: OpRecord, product: Product, constraint: Constraint
) -> None:
    broken = (constraint.violate(sample.call) for sample in samples(record, product))
    codes = {constraint.vendor_status(call) for call in broken if call is not None}
    assert codes <= {0, *BY_CODE}
    assert len(codes) == (2 if callable(constraint.vendor_code) else 1)
    only = "accepts" if codes == {0} else str(min(codes))
    assert constraint.vendor_words == ("varies" if callable(constraint.vendor_code) else only)


def test_where_document_and_source_differ_both_sides_are_named(record: OpRecord) -> None:
    for constraint in record.constraints:
        if constraint.vendor_code != constraint.code:
            assert constraint.pick, constraint.id
        if constraint.pick:
            assert "Taken: " in constraint.pick, constraint.id
            assert "document" in constraint.pick, constraint.id
            assert "source" in constraint.pick or "vendor" in constraint.pick, constraint.id


def test_requires_exist_and_have_no_cycle(record: OpRecord) -> None:
    by_id = {c.id: c for c in record.constraints}
    for constraint in record.constraints:
        for required in constraint.requires:
            assert required in by_id, f"{constraint.id} requires {required}"
            assert by_id[required].alone == constraint.alone

    done: set[str] = set()

    def visit(constraint_id: str, path: tuple[str, ...]) -> None:
        assert constraint_id not in path, " > ".join((*path, constraint_id))
        if constraint_id not in done:
            for required in by_id[constraint_id].requires:
                visit(required, (*path, constraint_id))
            done.add(constraint_id)

    for constraint_id in by_id:
        visit(constraint_id, ())
    assert done == set(by_id)


@pytest.mark.parametrize(("record", "product"), EACH_PRODUCT)
def test_listed_dtypes_are_those_the_constraints_take(record: OpRecord, product: Product) -> None:
    """A tensor parameter's list of dtypes is shown to people; the validator refuses exactly the others."""
    for param in (*record.inputs, *record.outputs):
        call, meta = next(_calls_with(record, product, param))
        assert meta.dtype in param.dtypes[product]
        change = call.with_inputs if param.role == "input" else call.with_outputs
        for dtype in set(DType) - set(param.dtypes[product]):
            broken = change(**{param.name: TensorMeta(dtype, meta.shape)})
            assert validate_call(record, broken).status == PARAM_INVALID, (param.name, dtype)


def _calls_with(
    record: OpRecord, product: Product, param: TensorParam
) -> Iterator[tuple[CallMeta, TensorMeta]]:
    for sample in samples(record, product):
        metas = sample.call.inputs if param.role == "input" else validate_call(record, sample.call).outputs
        meta = metas[param.name]
        if meta is not None:
            yield sample.call, meta


@pytest.mark.parametrize(("record", "product"), EACH_PRODUCT)
def test_every_listed_dtype_occurs_in_a_sample(record: OpRecord, product: Product) -> None:
    for param in record.inputs:
        metas = [sample.call.inputs[param.name] for sample in samples(record, product)]
        assert {m.dtype for m in metas if m is not None} == set(param.dtypes[product]), param.name


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


@pytest.mark.parametrize(("record", "product"), EACH_PRODUCT)
def test_shape_sent_to_the_device_has_the_same_elements(record: OpRecord, product: Product) -> None:
    for sample in samples(record, product):
        for param in record.inputs:
            meta = sample.call.inputs[param.name]
            if param.device_view is not None and meta is not None:
                assert math.prod(param.device_view(meta)) == meta.size


def test_counts_are_reported(record: OpRecord, tally: Tally) -> None:
    """The numbers that a reader of the test output wants to see."""
    proofs = sum(
        constraint.violate(sample.call) is not None
        for product in record.products
        for constraint in record.constraints
        if constraint.applies(product)
        for sample in samples(record, product)
    )
    assert proofs >= len(record.constraints)
    codes = Counter(c.code for c in record.constraints)
    by_code = ", ".join(f"{code}: {count}" for code, count in sorted(codes.items()))
    picks = sum(bool(c.pick) for c in record.constraints)
    tally(
        f"{record.name} constraints",
        f"{len(record.constraints)} ({by_code}), {picks} with a pick between document and source, "
        f"shown by {proofs} broken calls on {len(record.products)} products",
    )
