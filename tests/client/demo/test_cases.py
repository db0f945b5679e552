"""The demo's calls are legal, and the values it expects of the official examples are the reference's own."""

from __future__ import annotations

import numpy as np
import pytest

import npugrad
from npugrad import CallMeta, Product, layout
from npugrad_client.demo._cases import Case, official_cases, realistic_cases

OFFICIAL = list(official_cases())
REALISTIC = list(realistic_cases(quick=True))


def _name(case: Case) -> str:
    return f"{case.record.name}-{case.dtype}-{case.title.replace(' ', '_')}"


def described(case: Case) -> CallMeta:
    """The call that a realistic case makes, whose data takes long to draw."""
    record, dtype, sizes = case.make.args  # type: ignore[attr-defined]
    found: CallMeta = record.build(dtype=dtype, **sizes)
    return found


def made(case: Case) -> CallMeta:
    """The call of the data of a case."""
    filled = case.make()
    metas = {n: None if a is None else layout.content(a)[0] for n, a in filled.operands.items()}
    return CallMeta(inputs=metas, attrs=filled.attrs)


@pytest.mark.parametrize("case", [*OFFICIAL, *REALISTIC], ids=_name)
def test_call_is_legal_on_every_product_of_the_operator_and_dtype(case: Case) -> None:
    call = made(case) if case in OFFICIAL else described(case)
    for product in case.record.products:
        if case.dtype in case.record.inputs[0].dtypes[product]:
            verdict = npugrad.validate(
                case.record.name, inputs=call.inputs, attrs=call.attrs, product=product
            )
            assert verdict.status == 0, verdict.violations


FIRST = [case for case in REALISTIC if case.dtype == case.record.inputs[0].dtypes[Product.ATLAS_A2][0]]
SMALLEST = min(
    FIRST, key=lambda case: sum(m.nbytes for m in described(case).inputs.values() if m is not None)
)


@pytest.mark.parametrize(
    "case", [c if c is SMALLEST else pytest.param(c, marks=pytest.mark.deep) for c in FIRST], ids=_name
)
def test_a_realistic_case_makes_what_it_describes(case: Case) -> None:
    call = described(case)
    assert (made(case).inputs, made(case).attrs) == (dict(call.inputs), call.attrs)


@pytest.mark.parametrize("case", [c for c in OFFICIAL if "overflows" not in c.title], ids=_name)
def test_official_values_are_those_of_the_reference(case: Case) -> None:
    inputs = case.make()
    outputs = {name: np.empty(values.shape, np.float64) for name, values in inputs.expected.items()}
    case.record.reference(inputs.operands, inputs.attrs, outputs)
    for name, values in inputs.expected.items():
        np.testing.assert_allclose(outputs[name], values, rtol=1e-6, atol=inputs.expected_atol)


def test_every_operator_runs_in_every_dtype_it_supports() -> None:
    runs = {(case.record.name, case.dtype) for case in realistic_cases()}
    supported = {
        (record.name, dtype)
        for record in npugrad.OPERATORS.values()
        for dtypes in record.inputs[0].dtypes.values()
        for dtype in dtypes
    }
    assert runs == supported


def test_encoder_has_full_size_once() -> None:
    cases = [case for case in realistic_cases() if "encoder" in case.title]
    assert [case.title for case in cases].count("Deformable-DETR encoder") == 1
    for case in cases:
        record, _, sizes = case.make.args  # type: ignore[attr-defined]
        assert record.workloads.fixed is not None
        fixed, value = record.workloads.fixed(sizes), described(case).inputs["value"]
        levels, starts = fixed["spatial_shape"], fixed["level_start_index"]
        if case is cases[0]:
            assert levels.tolist() == [[100, 134], [50, 67], [25, 34], [13, 17]]
        else:
            operands = case.make().operands
            np.testing.assert_array_equal(operands["spatial_shape"], levels)
            np.testing.assert_array_equal(operands["level_start_index"], starts)
        assert starts.tolist() == [0, *np.cumsum(levels.prod(axis=1))[:-1]]
        assert value is not None
        assert levels.prod(axis=1).sum() == value.shape[1]
