"""What holds of every operator's reference: layout, blocks, rounding, memory, parts; calls come from records.

That the numbers are right is shown in each operator's own file, against an independent implementation.
"""

from __future__ import annotations

import itertools
import tracemalloc
from functools import cache
from typing import Any

import numpy as np
import pytest
from tests.contract.references.against import assert_close, assert_same_bits, reference_of, run
from tests.derived import FLOATS, LAYOUTS, Array, Derived, Operands, each, emptied, longer, relaid, varied

from npugrad.meta import CallMeta
from npugrad.operator import OpRecord, Sample
from npugrad.ops import OPERATORS
from npugrad.products import Product
from npugrad.references._blocks import store
from npugrad.workloads import Example, Probe

WHOLE = 2**28
BUDGET = 2**20
LARGE = BUDGET // 4  # elements: in float64 they hold twice the budget
TYPES = ("float64", *FLOATS)
VARIED = list(each(lambda record: varied(record, 3)))
RECORDS = pytest.mark.parametrize("record", OPERATORS.values(), ids=OPERATORS)
CALLS = pytest.mark.parametrize("derived", VARIED, ids=str)


def parts(call: CallMeta, count: int) -> int:
    """Scratch memory for that part of the operands in float64, in bytes."""
    return 8 * sum(meta.size for meta in call.inputs.values() if meta is not None) // count


@cache
def computed(derived: Derived, dtype: str) -> tuple[CallMeta, Operands, dict[int, dict[str, Array]]]:
    """A call with every output, its operands, and its results in one block and in parts, by scratch memory.

    Computed once, as many tests hold theirs against these; they change neither operands nor results.
    """
    masks: dict[str, Any] = {}
    if any(p.masked_by is not None for p in derived.record.outputs):
        masks["output_mask"] = tuple(True for _ in derived.record.outputs)
    call = derived.call(dtype, **masks)
    inputs = derived.operands(call)
    budgets = (WHOLE, parts(call, 8))
    return call, inputs, {b: run(derived.record, call, inputs, scratch_bytes=b) for b in budgets}


# ------------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        (layout, dtype)
        for number, layout in enumerate([*LAYOUTS, "reversed"])
        for dtype in ("float64", FLOATS[number % len(FLOATS)])
    ],
)
@CALLS
def test_layout_changes_no_bit(derived: Derived, layout: str, dtype: str) -> None:
    """In float64, which needs no copy, and in one of the types that do."""
    call, inputs, results = computed(derived, dtype)
    moved = relaid(
        inputs, LAYOUTS.get(layout, lambda array: np.ascontiguousarray(array[..., ::-1])[..., ::-1])
    )
    for scratch_bytes, expected in results.items():
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
    call, inputs, results = computed(derived, "float32")
    for scratch_bytes, full in results.items():
        some = {name: np.full_like(full[name], np.nan) for name in wanted}
        attrs = dict(call.attrs)
        if "output_mask" in attrs:
            attrs["output_mask"] = tuple(name in wanted for name in full)
        reference_of(derived.record)(inputs, attrs, some, scratch_bytes=scratch_bytes)
        compare = assert_same_bits if scratch_bytes == WHOLE else assert_close
        compare(some, {name: full[name] for name in wanted})


@pytest.mark.parametrize("derived", list(each(emptied)), ids=str)
def test_sums_of_nothing_are_zero_whatever_is_left(derived: Derived) -> None:
    call = derived.call()
    for dtype in FLOATS:
        for name, array in run(derived.record, call, derived.nothing(call), dtype).items():
            assert not array.any(), (name, dtype)


@CALLS
def test_results_beyond_the_type_are_infinite_without_a_warning(derived: Derived) -> None:
    call = derived.call("float64")
    inputs = {
        name: array if array is None or array.dtype.kind != "f" else array.astype(np.float64) * 1e39
        for name, array in derived.operands(call).items()
    }
    exact = run(derived.record, call, inputs)
    for dtype in FLOATS:
        for name, array in run(derived.record, call, inputs, dtype).items():
            is_beyond = np.abs(exact[name]) > 1e39
            assert np.array_equal(np.isinf(array[is_beyond]), np.ones(is_beyond.sum(), bool)), (name, dtype)


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


@pytest.mark.parametrize(
    ("record", "probe"),
    [pytest.param(r, p, id=f"{n}-{p.name}") for n, r in OPERATORS.items() for p in r.workloads.probes],
)
def test_a_probe_expects_what_its_formula_gives(record: OpRecord, probe: Probe) -> None:
    filled = probe.make()
    outputs = {name: np.full(want.shape, np.nan) for name, want in filled.expected.items()}
    record.reference(filled.operands, filled.attrs, outputs)
    for name, want in filled.expected.items():
        np.testing.assert_array_equal(outputs[name], want)


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


@pytest.mark.parametrize(
    ("layout", "dtype"), [("contiguous", "bfloat16"), ("transposed", "float64"), ("expanded", "bfloat16")]
)
@pytest.mark.parametrize("derived", list(each(lambda record: longer(record, LARGE))), ids=str)
def test_scratch_memory_stays_within_the_budget(derived: Derived, layout: str, dtype: str) -> None:
    """Some operand holds twice the budget in float64, and so do some results."""
    call = derived.call(dtype)
    inputs = derived.operands(call)
    if layout == "transposed":
        inputs = relaid(inputs, LAYOUTS["transposed"])
    if layout == "expanded":
        inputs = {
            n: a if a is None else np.broadcast_to(a.reshape(-1)[0], a.shape) for n, a in inputs.items()
        }
    metas = {name: meta for name, meta in derived.record.infer(call).items() if meta is not None}
    outputs = {name: np.empty(meta.shape, meta.dtype.numpy) for name, meta in metas.items()}
    # The lowest of some runs: threads that other tests have left behind may allocate meanwhile.
    peak_bytes = min(_peak_bytes(derived.record, inputs, call, outputs) for _ in range(3))
    # A few numbers come on top; blocks of a small part of the budget would be slow.
    assert BUDGET // 8 < peak_bytes <= BUDGET + BUDGET // 64


def _peak_bytes(record: OpRecord, inputs: Operands, call: CallMeta, outputs: dict[str, Array]) -> int:
    tracemalloc.start()
    try:
        reference_of(record)(inputs, call.attrs, outputs, scratch_bytes=BUDGET)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
