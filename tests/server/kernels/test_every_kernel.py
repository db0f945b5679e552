"""What holds of every operator's kernel: samples, layouts, threads, parts, refusals; calls come from records.

The bounds of each kernel, and what only it must not get wrong, are in its own file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from tests.derived import (
    FLOATS,
    LAYOUTS,
    NO_PLACES,
    SEEDS,
    Derived,
    combined,
    drawn,
    each,
    emptied,
    longer,
    ones,
    places,
    relaid,
    varied,
)
from tests.server.kernels.compare import (
    assert_any_threads_give_the_same,
    assert_errors_below,
    assert_right,
    assert_same_bits,
    computed,
    contents,
    examples,
    outputs_for,
)

from npugrad.edges import NOT_FINITE
from npugrad.operator import OpRecord, Sample
from npugrad.ops import OPERATORS
from npugrad_server.backends.cpu.kernels import Kernels, KernelUnsupported

pytestmark = pytest.mark.usefixtures("has_kernel")
LARGEST_ERROR = 2e-6
VARIED = list(each(varied))
LONG = list(each(lambda record: longer(record, 2**14, 3)))
PLACED = [*each(lambda record: [*combined(record), *ones(record)] if record.workloads.ties else [])]
RECORDS = pytest.mark.parametrize("record", OPERATORS.values(), ids=OPERATORS)
CALLS = pytest.mark.parametrize("derived", VARIED, ids=str)
DTYPES = pytest.mark.parametrize("dtype", FLOATS)


def _inputs_of(*calls: Derived) -> list[Any]:
    return [
        pytest.param(derived, name, id=f"{derived}-{name}")
        for derived in calls
        for name, meta in derived.call().inputs.items()
        if meta is not None
    ]


def _samples(record: OpRecord) -> list[Any]:
    """A kernel does not know of products: each call once, in types that kernels take."""
    found = {str((s.call.inputs, s.call.attrs)): s for p in record.products for s in record.samples(p)}
    return [
        pytest.param(record, s, id=f"{record.name}-{s.name}")
        for s in found.values()
        if any(meta is not None and meta.dtype in FLOATS for meta in s.call.inputs.values())
    ]


LAST = [varied(record, 2)[-1] for record in OPERATORS.values()]
SAMPLES = [sample for record in OPERATORS.values() for sample in _samples(record)]


@pytest.mark.parametrize(("record", "sample"), SAMPLES)
def test_every_sample_of_the_record(kernels: Kernels, record: OpRecord, sample: Sample) -> None:
    inputs = record.make_inputs(sample.call, np.random.default_rng(1))
    assert_right(record, sample.call, inputs, computed(kernels, record, sample.call, inputs))


@RECORDS
@examples(80)
@given(seed=SEEDS)
def test_calls_of_any_size_are_right(kernels: Kernels, record: OpRecord, seed: int) -> None:
    call, inputs = drawn(record, seed)
    assert_right(record, call, inputs, computed(kernels, record, call, inputs))


@pytest.mark.parametrize("derived", list(each(emptied)), ids=str)
def test_sums_of_nothing_are_zero_whatever_is_left(kernels: Kernels, derived: Derived) -> None:
    for dtype in FLOATS:
        call = derived.call(dtype)
        for name, array in computed(kernels, derived.record, call, derived.nothing(call)).items():
            assert not array.any(), (name, dtype)


@pytest.mark.parametrize("derived", [*VARIED, *LONG], ids=str)
def test_errors_are_those_of_the_last_digits(kernels: Kernels, derived: Derived) -> None:
    call = derived.call()
    assert_errors_below(kernels, derived.record, call, derived.operands(call), LARGEST_ERROR)


@pytest.mark.parametrize("derived", PLACED, ids=str)
def test_ties_and_borders_fall_on_the_same_side(kernels: Kernels, derived: Derived) -> None:
    """One pixel to the wrong side would be an error of the size of the data."""
    call = derived.call()
    inputs = derived.on_ties(call, derived.operands(call))
    assert_errors_below(kernels, derived.record, call, inputs, LARGEST_ERROR)


@pytest.mark.parametrize("derived", PLACED, ids=str)
def test_places_that_are_none_are_taken_as_the_reference_does(kernels: Kernels, derived: Derived) -> None:
    for dtype in FLOATS:
        call = derived.call(dtype)
        inputs = derived.operands(call)
        for name in places(derived, call):
            array = inputs[name]
            assert array is not None
            count = min(array.size, 3 * len(NO_PLACES))
            with np.errstate(over="ignore"):
                array.reshape(-1)[:: array.size // count][:count] = np.resize(NO_PLACES, count)
        assert_right(derived.record, call, inputs, computed(kernels, derived.record, call, inputs))


@DTYPES
@pytest.mark.parametrize("derived", [*VARIED, *LONG], ids=str)
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
@pytest.mark.parametrize(("derived", "name"), _inputs_of(*LAST))
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


@pytest.mark.parametrize(
    ("derived", "name", "dtype"),
    [
        pytest.param(*param.values, dtype, id=f"{param.id}-{dtype}")
        for calls, dtypes in ((LAST, FLOATS), (LONG, FLOATS[:1]))
        for param in _inputs_of(*calls)
        for dtype in dtypes
    ],
)
def test_values_that_are_not_finite_spread_as_in_the_reference(
    kernels: Kernels, derived: Derived, name: str, dtype: str
) -> None:
    record, call = derived.record, derived.call(dtype)
    inputs = derived.operands(call)
    array = inputs[name]
    assert array is not None
    for value in NOT_FINITE if array.dtype.kind not in "iub?" else ():
        array.reshape(-1)[array.size // 2] = value
        assert_right(record, call, inputs, computed(kernels, record, call, inputs))


@DTYPES
@CALLS
def test_operands_without_a_finite_number(kernels: Kernels, derived: Derived, dtype: str) -> None:
    call = derived.call(dtype)
    inputs = derived.operands(call)
    for value in NOT_FINITE:
        for array in inputs.values():
            if array is not None and array.dtype.kind not in "iub?":
                array[...] = value
        assert_right(derived.record, call, inputs, computed(kernels, derived.record, call, inputs))


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


@CALLS
def test_an_operand_of_another_type_is_taken_or_refused_whole(kernels: Kernels, derived: Derived) -> None:
    """Two floats of different types somewhere are refused, however many of them the kernel takes."""
    record, call = derived.record, derived.call()
    inputs = derived.operands(call)
    refused = []
    for name, array in inputs.items():
        for dtype in ("float16", "float32", "float64", "int64"):
            if array is None or array.dtype == dtype:
                continue
            with np.errstate(over="ignore", invalid="ignore"):
                other = {**inputs, name: array.astype(dtype)}
            outputs = outputs_for(record, call)
            before = contents(outputs)
            try:
                kernels.run(record, other, call.attrs, outputs)
            except KernelUnsupported:
                refused.append(name)
                assert contents(outputs) == before
            else:
                assert_right(record, call, other, outputs)
    assert refused.count(record.inputs[0].name) == 3


@CALLS
def test_float64_is_left_to_the_reference(kernels: Kernels, derived: Derived) -> None:
    call = derived.call("float64")
    outputs = outputs_for(derived.record, call)
    before = contents(outputs)
    with pytest.raises(KernelUnsupported):
        kernels.run(derived.record, derived.operands(call), call.attrs, outputs)
    assert contents(outputs) == before


@CALLS
def test_attributes_that_do_not_fit_are_refused_and_nothing_written(
    kernels: Kernels, derived: Derived
) -> None:
    """Numbers that are no choice; sizes that are not those of the operands, unless the kernel needs none."""
    record, call = derived.record, derived.call()
    inputs = derived.operands(call)
    for attr in record.attrs:
        if attr.type != "int64":
            continue
        outputs = outputs_for(record, call)
        before = contents(outputs)
        wrong = {**call.attrs, attr.name: max(attr.choices.values(), default=call.integer(attr.name)) + 1}
        try:
            kernels.run(record, inputs, wrong, outputs)
        except (RuntimeError, KernelUnsupported):
            assert contents(outputs) == before
        else:
            assert not attr.choices, (attr.name, wrong[attr.name])
            assert_right(record, call, inputs, outputs)
