"""What the records say that each operand reaches, against their float64 references."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.operators import GRID_SAMPLER, GROUP_NORM
from tests.reaches import masked, prove, unlike_samples

from npugrad import OPERATORS, Product
from npugrad.meta import CallMeta
from npugrad.operator import AttrParam, OpRecord

Array = npt.NDArray[Any]


def golden(record: OpRecord, call: CallMeta, arrays: Mapping[str, Array | None]) -> dict[str, Array]:
    outputs = {name: np.empty(meta.shape) for name, meta in record.infer(call).items() if meta is not None}
    if outputs:
        record.reference(arrays, call.attrs, outputs)
    return outputs


def test_every_sample_under_every_mask(record: OpRecord) -> None:
    for call in unlike_samples(record):
        for one in masked(record, call):
            prove(record, one, golden)


@pytest.mark.parametrize("claim", ["everything", "nothing"])
def test_a_record_that_says_everything_or_nothing_is_found_out(record: OpRecord, claim: str) -> None:
    operands = tuple(param.name for param in record.inputs) if claim == "everything" else ()
    liar = replace(record, reads=lambda call: {param.name: operands for param in record.outputs})
    call = next(record.samples(Product.ATLAS_A2)).call
    if liar.reads(call) != record.reads(call):
        with pytest.raises(AssertionError, match="changed"):
            prove(liar, call, golden)


def test_the_samples_have_every_mode(record: OpRecord) -> None:
    """So that the proof has them."""

    def values(param: AttrParam) -> tuple[Any, ...]:
        return tuple(param.choices.values()) or (False, True)

    params = [param for param in record.attrs if param.choices or param.type == "bool"]
    calls = [sample.call for sample in record.samples(Product.ATLAS_A2)]
    found = {tuple(call.attrs[param.name] for param in params) for call in calls}
    assert found >= set(product(*map(values, params)))


def test_what_the_data_check_reads_reaches_every_wanted_output() -> None:
    for record in OPERATORS.values():
        for sample in record.samples(Product.ATLAS_A2):
            wanted = {name for name, meta in record.infer(sample.call).items() if meta is not None}
            for name in record.checked_operands:
                meta = sample.call.tensor(name)
                assert record.reaches(sample.call)[name] == (wanted if meta.size else set())


@pytest.mark.parametrize(
    ("record", "call", "expected"),
    [
        (
            GROUP_NORM,
            GROUP_NORM.build(with_gamma=False, output_mask=(False, True, True)),
            {
                "grad_out": {"grad_gamma", "grad_beta"},
                **{name: {"grad_gamma"} for name in ("input", "mean", "rstd")},
            },
        ),
        (GROUP_NORM, GROUP_NORM.build(output_mask=(True, False, False), hxw=0), None),
        (
            GRID_SAMPLER,
            GRID_SAMPLER.build(),
            {
                "grad_output": {"input_grad", "grid_grad"},
                "input": {"grid_grad"},
                "grid": {"input_grad", "grid_grad"},
            },
        ),
        (
            GRID_SAMPLER,
            GRID_SAMPLER.build(interpolation_mode=1),
            {"grad_output": {"input_grad"}, "input": set(), "grid": {"input_grad"}},
        ),
        (GRID_SAMPLER, GRID_SAMPLER.build(output_mask=None).with_inputs(grid=None), None),
    ],
)
def test_examples(record: OpRecord, call: CallMeta, expected: Mapping[str, set[str]] | None) -> None:
    """None where nothing reaches anything."""
    nothing: Mapping[str, set[str]] = {name: set() for name, meta in call.inputs.items() if meta is not None}
    assert record.reaches(call) == (nothing if expected is None else expected)
