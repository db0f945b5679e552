"""What holds of every operator's reference: layout, blocks, rounding, memory, parts; calls come from records.

That the numbers are right is shown in each operator's own file, against an independent implementation.
"""

from __future__ import annotations

import itertools
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.derived import FLOATS, LAYOUTS, Derived, each, longer, relaid, varied

from npugrad.ops import OPERATORS
from npugrad.products import Product
from npugrad.references._blocks import store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.derived import Array, Operands

    from npugrad.meta import CallMeta
    from npugrad.operator import OpRecord, Sample
    from npugrad.workloads import Example

WHOLE = 2**28
BUDGET = 2**20
LARGE = BUDGET // 4  # elements: in float64 they hold twice the budget
TYPES = ("float64", *FLOATS)
VARIED = list(each(lambda record: varied(record, 3)))
RECORDS = pytest.mark.parametrize("record", OPERATORS.values(), ids=OPERATORS)
CALLS = pytest.mark.parametrize("derived", VARIED, ids=str)


def reference_of(record: OpRecord) -> Callable[..., None]:
    """The reference with the option that every one has: how much scratch memory it may use."""
    return record.reference


def run(
    record: OpRecord,
    call: CallMeta,
    inputs: Mapping[str, Array | None],
    dtype: str = "float64",
    **options: Any,
) -> dict[str, Array]:
    """Run the reference into outputs full of NaN, so that an element left alone shows."""
    metas = {name: meta for name, meta in record.infer(call).items() if meta is not None}
    outputs = {name: np.full(meta.shape, np.nan, dtype) for name, meta in metas.items()}
    reference_of(record)(inputs, call.attrs, outputs, **options)
    return outputs


def parts(call: CallMeta, count: int) -> int:
    """Scratch memory for that part of the operands in float64, in bytes."""
    return 8 * sum(meta.size for meta in call.inputs.values() if meta is not None) // count


def assert_same_bits(found: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].tobytes() == array.tobytes(), name


def assert_close(found: Mapping[str, Array], expected: Mapping[str, Array], tolerance: float = 1e-12) -> None:
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        atol = tolerance * (1 + np.abs(want[np.isfinite(want)]).max(initial=0))
        np.testing.assert_allclose(found[name], want, rtol=0, atol=atol, err_msg=name)


# ------------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("layout", [*LAYOUTS, "reversed"])
@CALLS
def test_layout_changes_no_bit(derived: Derived, layout: str, dtype: str) -> None:
    call = derived.call(dtype)
    inputs = derived.operands(call)
    moved = relaid(
        inputs, LAYOUTS.get(layout, lambda array: np.ascontiguousarray(array[..., ::-1])[..., ::-1])
    )
    for scratch_bytes in (WHOLE, parts(call, 8)):
        expected = run(derived.record, call, inputs, scratch_bytes=scratch_bytes)
        assert_same_bits(run(derived.record, call, moved, scratch_bytes=scratch_bytes), expected)


EXPANDED = [
    pytest.param(derived, name, axis, id=f"{derived}-{name}-{axis}")
    for derived in (varied(record, 3)[-1] for record in OPERATORS.values())
    for name, meta in derived.call().inputs.items()
    if meta is not None
    for axis in (*range(meta.rank), None)
]


@pytest.mark.parametrize(("derived", "name", "axis"), EXPANDED)
def test_an_expanded_operand_equals_its_copy(derived: Derived, name: str, axis: int | None) -> None:
    call = derived.call("float64")
    inputs = derived.operands(call)
    array = inputs[name]
    assert array is not None
    one = array.reshape(-1)[:1] if axis is None else np.take(array, [0], axis=axis)
    expanded = np.broadcast_to(one, array.shape)
    for scratch_bytes in (WHOLE, parts(call, 8)):
        found, expected = (
            run(derived.record, call, {**inputs, name: operand}, scratch_bytes=scratch_bytes)
            for operand in (expanded, expanded.copy())
        )
        assert_same_bits(found, expected)


@CALLS
def test_inputs_are_left_alone(derived: Derived) -> None:
    call = derived.call("float64")
    inputs = derived.operands(call)
    before = {name: array.copy() for name, array in inputs.items() if array is not None}
    run(derived.record, call, inputs)
    assert_same_bits({name: array for name, array in inputs.items() if array is not None}, before)


# ------------------------------------------------------------------------------------------- outputs


@pytest.mark.parametrize("dtype", FLOATS)
@CALLS
def test_a_result_is_the_float64_result_rounded_once(derived: Derived, dtype: str) -> None:
    call = derived.call(dtype)
    inputs = derived.operands(call)
    exact = run(derived.record, call, inputs)
    for name, rounded in run(derived.record, call, inputs, dtype).items():
        expected = np.empty_like(rounded)
        store(expected, exact[name])
        assert rounded.tobytes() == expected.tobytes(), name


SUBSETS = [
    pytest.param(derived, wanted, id=f"{derived}-{'-'.join(wanted) or 'none'}")
    for derived in VARIED
    for count in range(len(derived.record.outputs))
    for wanted in itertools.combinations([p.name for p in derived.record.outputs], count)
]


@pytest.mark.parametrize(("derived", "wanted"), SUBSETS)
def test_outputs_can_be_had_without_the_others(derived: Derived, wanted: tuple[str, ...]) -> None:
    masks: dict[str, Any] = {}
    if any(p.masked_by is not None for p in derived.record.outputs):
        masks["output_mask"] = tuple(True for _ in derived.record.outputs)
    call = derived.call(**masks)
    inputs = derived.operands(call)
    for scratch_bytes in (WHOLE, parts(call, 8)):
        full = run(derived.record, call, inputs, scratch_bytes=scratch_bytes)
        some = {name: np.full_like(full[name], np.nan) for name in wanted}
        attrs = dict(call.attrs)
        if masks:
            attrs["output_mask"] = tuple(name in wanted for name in full)
        reference_of(derived.record)(inputs, attrs, some, scratch_bytes=scratch_bytes)
        compare = assert_same_bits if scratch_bytes == WHOLE else assert_close
        compare(some, {name: full[name] for name in wanted})


EMPTY = [
    pytest.param(record, sample, id=f"{name}-{sample.name}")
    for name, record in OPERATORS.items()
    for sample in record.samples(Product.ATLAS_A2)
    if any(meta is not None and not meta.size for meta in sample.call.inputs.values())
]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("record", "sample"), EMPTY)
def test_gradients_of_nothing_are_zero(record: OpRecord, sample: Sample, dtype: str) -> None:
    inputs = record.make_inputs(sample.call, np.random.default_rng(0))
    for name, array in run(record, sample.call, inputs, dtype).items():
        assert not array.any(), name


SAMPLES = [
    pytest.param(record, sample, id=f"{name}-{sample.name}")
    for name, record in OPERATORS.items()
    for sample in record.samples(Product.ATLAS_A2)
]


@pytest.mark.parametrize(("record", "sample"), SAMPLES)
def test_samples_have_finite_gradients_of_which_some_are_not_zero(record: OpRecord, sample: Sample) -> None:
    inputs = record.make_inputs(sample.call, np.random.default_rng(7))
    is_empty = any(meta is not None and not meta.size for meta in sample.call.inputs.values())
    found = run(record, sample.call, inputs, "float32")
    assert found.keys() == {name for name, meta in record.infer(sample.call).items() if meta is not None}
    for name, array in found.items():
        assert np.isfinite(array).all(), name
    assert is_empty or not found or any(array.any() for array in found.values())


EXAMPLES = [
    pytest.param(record, example, id=f"{name}-{example.reading}")
    for name, record in OPERATORS.items()
    for example in record.workloads.examples
    if example.make().expected
]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("record", "example"), EXAMPLES)
def test_official_examples_print_what_the_pages_say(record: OpRecord, example: Example, dtype: str) -> None:
    """Operands in another type where that changes no value."""
    filled = example.make()
    assert filled.expected.keys() == {p.name for p in record.outputs}
    inputs: Operands = dict(filled.operands)
    for name, array in filled.operands.items():
        if array is not None and array.dtype.kind == "f":
            cast = array.astype(dtype)
            inputs[name] = cast if np.array_equal(cast.astype(array.dtype), array) else array
    for result in ("float64", "float32"):
        outputs = {name: np.full(want.shape, np.nan, result) for name, want in filled.expected.items()}
        record.reference(inputs, filled.attrs, outputs)
        for name, want in filled.expected.items():
            np.testing.assert_allclose(
                outputs[name], want, rtol=1e-6, atol=filled.expected_atol, err_msg=name
            )


# ------------------------------------------------------------------------------ values that are not finite


FLOAT_INPUTS = [
    pytest.param(derived, name, id=f"{derived}-{name}")
    for derived in VARIED
    for name, meta in derived.call().inputs.items()
    if meta is not None and meta.dtype.numpy.kind not in "iub?"
]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize(("derived", "name"), FLOAT_INPUTS)
def test_values_that_are_not_finite_spread_alike_in_blocks_and_warn_nobody(
    derived: Derived, name: str, value: float
) -> None:
    call = derived.call("float64")
    inputs = derived.operands(call)
    array = inputs[name]
    assert array is not None
    array.reshape(-1)[array.size // 2] = value
    with np.errstate(all="raise"):
        whole, split = (
            run(derived.record, call, inputs, scratch_bytes=size) for size in (WHOLE, parts(call, 8))
        )
    for output, array in whole.items():  # a sum of parts may be NaN where the whole one is infinite
        finite = np.isfinite(array)
        np.testing.assert_array_equal(np.isfinite(split[output]), finite, output)
        assert_close({output: split[output][finite]}, {output: array[finite]})


# ------------------------------------------------------------------------------------------- blocks


LONGER = [*VARIED, *each(lambda record: longer(record, 3000, 5))]


@pytest.mark.parametrize("count", [1, 2, 6, 24])
@pytest.mark.parametrize("derived", LONGER, ids=str)
def test_blocks_change_only_the_last_digits(derived: Derived, count: int) -> None:
    call = derived.call("float64")
    inputs = derived.operands(call)
    expected = run(derived.record, call, inputs)
    assert_close(run(derived.record, call, inputs, scratch_bytes=parts(call, count)), expected)


@RECORDS
def test_blocks_of_one_element_each(record: OpRecord) -> None:
    for small in varied(record, 16):
        call = small.call("float64")
        inputs = small.operands(call)
        assert_close(run(record, call, inputs, scratch_bytes=1), run(record, call, inputs))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("derived", list(each(lambda record: longer(record, LARGE))), ids=str)
def test_scratch_memory_stays_within_the_budget(derived: Derived, layout: str, dtype: str) -> None:
    """Some operand holds twice the budget in float64, and so do some results."""
    call = derived.call(dtype)
    inputs = derived.operands(call)
    if layout == "transposed":
        inputs = relaid(inputs, LAYOUTS["transposed"])
    metas = {name: meta for name, meta in derived.record.infer(call).items() if meta is not None}
    outputs = {name: np.empty(meta.shape, meta.dtype.numpy) for name, meta in metas.items()}
    tracemalloc.start()
    try:
        reference_of(derived.record)(inputs, call.attrs, outputs, scratch_bytes=BUDGET)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes <= BUDGET + BUDGET // 64  # a few numbers come on top
