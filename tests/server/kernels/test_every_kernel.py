"""What holds of every operator's kernel: samples, layouts, threads, parts, refusals; calls come from records.

The bounds of each kernel, and what only it must not get wrong, are in its own file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.derived import FLOATS, LAYOUTS, Derived, each, relaid, varied
from tests.server.kernels.compare import (
    assert_any_threads_give_the_same,
    assert_not_finite_alike,
    assert_right,
    assert_same_bits,
    computed,
    contents,
    golden,
    outputs_for,
)

from npugrad.ops import OPERATORS

if TYPE_CHECKING:
    from collections.abc import Callable

    from npugrad.operator import OpRecord, Sample
    from npugrad_server.backends.cpu.kernels import Kernels

pytestmark = pytest.mark.usefixtures("has_kernel")
VARIED = list(each(varied))
CALLS = pytest.mark.parametrize("derived", VARIED, ids=str)
DTYPES = pytest.mark.parametrize("dtype", FLOATS)
INPUTS = [
    pytest.param(derived, name, id=f"{derived}-{name}")
    for derived in (varied(record)[-1] for record in OPERATORS.values())
    for name, meta in derived.call().inputs.items()
    if meta is not None
]
SAMPLES = [
    pytest.param(record, sample, id=f"{name}-{product}-{sample.name}")
    for name, record in OPERATORS.items()
    for product in record.products
    for sample in record.samples(product)
]


@pytest.mark.parametrize(("record", "sample"), SAMPLES)
def test_every_sample_of_the_record(kernels: Kernels, record: OpRecord, sample: Sample) -> None:
    inputs = record.make_inputs(sample.call, np.random.default_rng(1))
    assert_right(record, sample.call, inputs, computed(kernels, record, sample.call, inputs))


@DTYPES
@CALLS
def test_bits_do_not_depend_on_threads(
    make_kernels: Callable[[int], Kernels], derived: Derived, dtype: str
) -> None:
    call = derived.call(dtype)
    assert_any_threads_give_the_same(make_kernels, derived.record, call, derived.operands(call), (2, 3, 5))


@DTYPES
@pytest.mark.parametrize("layout", LAYOUTS)
@CALLS
def test_strides_change_no_bit(kernels: Kernels, derived: Derived, layout: str, dtype: str) -> None:
    """Of operands that the kernel takes as they lie; the backend copies the others."""
    record, call = derived.record, derived.call(dtype)
    inputs = derived.operands(call)
    taken = {name: array for name, array in inputs.items() if kernels.takes_strides(record, name)}
    found = computed(kernels, record, call, {**inputs, **relaid(taken, LAYOUTS[layout])})
    assert_same_bits(found, computed(kernels, record, call, inputs))


@DTYPES
@pytest.mark.parametrize(("derived", "name"), INPUTS)
def test_an_expanded_operand_is_read_where_it_lies(
    kernels: Kernels, derived: Derived, name: str, dtype: str
) -> None:
    record, call = derived.record, derived.call(dtype)
    if not kernels.takes_strides(record, name):
        return
    inputs = derived.operands(call)
    array = inputs[name]
    assert array is not None
    for one in (array.reshape(-1)[:1], array[:1], array[..., :1]):
        expanded = np.broadcast_to(one, array.shape)
        found, expected = (
            computed(kernels, record, call, {**inputs, name: operand})
            for operand in (expanded, expanded.copy())
        )
        assert_same_bits(found, expected)


@DTYPES
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan], ids=str)
@pytest.mark.parametrize(("derived", "name"), INPUTS)
def test_values_that_are_not_finite_spread_as_in_the_reference(
    kernels: Kernels, derived: Derived, name: str, value: float, dtype: str
) -> None:
    record, call = derived.record, derived.call(dtype)
    inputs = derived.operands(call)
    array = inputs[name]
    assert array is not None
    if array.dtype.kind in "iub?":
        return
    array.reshape(-1)[array.size // 2] = value
    found = computed(kernels, record, call, inputs)
    assert_not_finite_alike(found, golden(record, call, inputs))
    assert_right(record, call, inputs, found)


def _only(record: OpRecord, name: str) -> tuple[bool, ...]:
    return tuple(param.name == name for param in record.outputs)


@DTYPES
@CALLS
def test_each_output_can_be_had_alone(kernels: Kernels, derived: Derived, dtype: str) -> None:
    record, call = derived.record, derived.call(dtype)
    inputs = derived.operands(call)
    for name, array in computed(kernels, record, call, inputs).items():
        alone = {name: outputs_for(record, call)[name]}
        kernels.run(record, inputs, call.attrs, alone)
        if any(param.masked_by is not None for param in record.outputs):  # there may be another way for it
            assert_right(record, call.with_attrs(output_mask=_only(record, name)), inputs, alone)
        else:
            assert_same_bits(alone, {name: array})


@DTYPES
@CALLS
def test_operands_that_do_not_fit_are_refused_and_nothing_written(
    kernels: Kernels, derived: Derived, dtype: str
) -> None:
    """With all outputs wanted, so that each operand has to fit another."""
    record, call = derived.record, derived.call(dtype)
    if "output_mask" in call.attrs:
        call = call.with_attrs(output_mask=(True,) * len(record.outputs))
    inputs = derived.operands(call)
    outputs = outputs_for(record, call)
    before = contents(outputs)
    for name, array in inputs.items():
        if array is not None:
            shorter = {**inputs, name: np.ascontiguousarray(array[..., :-1])}
            with pytest.raises(RuntimeError, match="status 3"):
                kernels.run(record, shorter, call.attrs, outputs)
    for name, array in outputs.items():
        with pytest.raises(RuntimeError, match="status 3"):
            kernels.run(record, inputs, call.attrs, {**outputs, name: array[..., :-1].copy()})
    assert contents(outputs) == before
