"""The demo's calls are legal, and the values it expects of the official examples are the reference's own."""

from __future__ import annotations

import numpy as np
import pytest

import npugrad
from npugrad import layout
from npugrad_client.demo._cases import Case, official_cases, realistic_cases

OFFICIAL = list(official_cases())
REALISTIC = list(realistic_cases(quick=True))


def _name(case: Case) -> str:
    return f"{case.record.name}-{case.dtype}-{case.title.replace(' ', '_')}"


@pytest.mark.parametrize("case", [*OFFICIAL, *REALISTIC], ids=_name)
def test_call_is_legal_on_every_product_of_the_operator_and_dtype(case: Case) -> None:
    inputs = case.make()
    metas = {n: None if a is None else layout.content(a)[0] for n, a in inputs.operands.items()}
    for product in case.record.products:
        if case.dtype in case.record.inputs[0].dtypes[product]:
            verdict = npugrad.validate(case.record.name, inputs=metas, attrs=inputs.attrs, product=product)
            assert verdict.status == 0, verdict.violations


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
    full, *reduced = (case.make().operands for case in cases)
    levels = full["spatial_shape"]
    assert levels is not None
    assert levels.tolist() == [[100, 134], [50, 67], [25, 34], [13, 17]]
    for operands in (full, *reduced):
        sizes, starts, value = (operands[n] for n in ("spatial_shape", "level_start_index", "value"))
        assert sizes is not None
        assert starts is not None
        assert value is not None
        assert starts.tolist() == [0, *np.cumsum(sizes.prod(axis=1))[:-1]]
        assert sizes.prod(axis=1).sum() == value.shape[1]
