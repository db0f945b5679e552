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
from tests.derived import (
    FLOATS,
    LAYOUTS,
    Array,
    Derived,
    Operands,
    emptied,
    longer,
    pairs,
    relaid,
    told,
    turns,
    varied,
)

from npugrad.meta import CallMeta
from npugrad.operator import OpRecord
from npugrad.products import Product
from npugrad.references._blocks import store

WHOLE = 2**28
BUDGET = 2**20
MOST = BUDGET + BUDGET // 64  # a few numbers come on top
LARGE = BUDGET // 4  # elements: in float64 they hold twice the budget
EVERY_LAYOUT = {**LAYOUTS, "reversed": lambda array: np.ascontiguousarray(array[..., ::-1])[..., ::-1]}


@cache
def uneven(record: OpRecord) -> list[Derived]:
    """The uneven call of a record in each of its variants."""
    return varied(record, 3)


def scratch(call: CallMeta, count: int) -> int:
    """Scratch memory for that part of the operands in float64, in bytes; for 0, more than there is."""
    return 8 * sum(meta.size for meta in call.inputs.values() if meta) // count if count else WHOLE


@cache
def computed(derived: Derived, dtype: str, count: int) -> tuple[CallMeta, Operands, dict[str, Array]]:
    """A call with every output, its operands, which computing leaves alone, and its results in so many parts.

    Computed once, as many tests hold theirs against these; they change neither operands nor results.
    """
    masks: dict[str, Any] = {}
    if any(p.masked_by is not None for p in derived.record.outputs):
        masks["output_mask"] = tuple(True for _ in derived.record.outputs)
    call = derived.call(dtype, **masks)
    inputs = derived.operands(call)
    before = {name: array.copy() for name, array in inputs.items() if array is not None}
    results = run(derived.record, call, inputs, scratch_bytes=scratch(call, count))
    assert_same_bits({name: inputs[name] for name in before}, before)  # type: ignore[misc]
    return call, inputs, results


# ------------------------------------------------------------------------------------------- layouts


def test_layout_changes_no_bit(record: OpRecord) -> None:
    """In float64, which needs no copy, and in types that do."""
    for derived, layout, is_narrow, count in pairs(uneven(record), [*EVERY_LAYOUT], (False, True), (0, 4)):
        narrow = FLOATS[uneven(record).index(derived) % len(FLOATS)]
        dtype = narrow if is_narrow else "float64"
        call, inputs, expected = computed(derived, dtype, count)
        moved = relaid(inputs, EVERY_LAYOUT[layout])
        with told((derived.name, layout, dtype, count)):
            assert_same_bits(run(record, call, moved, scratch_bytes=scratch(call, count)), expected)


def test_an_expanded_operand_equals_its_copy(record: OpRecord) -> None:
    derived = uneven(record)[-1]
    call = derived.call("float64")
    inputs = derived.operands(call)
    cases = [(n, axis) for n, m in call.inputs.items() if m for axis in (*range(m.rank), None)]
    for number, (name, axis) in enumerate(cases):
        array = inputs[name]
        assert array is not None
        one = array.reshape(-1)[:1] if axis is None else np.take(array, [0], axis=axis)
        expanded = np.broadcast_to(one, array.shape)
        found, expected = (
            run(record, call, {**inputs, name: operand}, scratch_bytes=scratch(call, (0, 4)[number % 2]))
            for operand in (expanded, expanded.copy())
        )
        with told((derived.name, name, axis)):
            assert_same_bits(found, expected)


# ------------------------------------------------------------------------------------------- outputs


def test_a_result_is_the_float64_result_rounded_once(record: OpRecord) -> None:
    for derived, dtype in itertools.product(uneven(record), FLOATS):
        call, inputs, exact = computed(derived, dtype, 0)
        for name, rounded in run(record, call, inputs, dtype).items():
            expected = np.empty_like(rounded)
            store(expected, exact[name])
            assert rounded.tobytes() == expected.tobytes(), (derived.name, dtype, name)


def test_outputs_can_be_had_without_the_others(record: OpRecord) -> None:
    names = [p.name for p in record.outputs]
    subsets = [chosen for count in range(len(names)) for chosen in itertools.combinations(names, count)]
    variants = itertools.cycle(uneven(record))
    for (wanted, count), derived in zip(itertools.product(subsets, (0, 4)), variants, strict=False):
        call, inputs, full = computed(derived, "float32", count)
        some = {name: np.full_like(full[name], np.nan) for name in wanted}
        attrs = dict(call.attrs)
        if "output_mask" in attrs:
            attrs["output_mask"] = tuple(name in wanted for name in full)
        reference_of(record)(inputs, attrs, some, scratch_bytes=scratch(call, count))
        compare = assert_close if count else assert_same_bits
        with told((derived.name, wanted, count)):
            compare(some, {name: full[name] for name in wanted})


def test_sums_of_nothing_are_zero_whatever_is_left(record: OpRecord) -> None:
    for derived, dtype in itertools.product(emptied(record), FLOATS):
        call = derived.call()
        for name, array in run(record, call, derived.nothing(call), dtype).items():
            assert not array.any(), (derived.name, name, dtype)


def test_results_beyond_the_type_are_infinite_without_a_warning(record: OpRecord) -> None:
    for derived in uneven(record):
        call, operands, _ = computed(derived, "float64", 0)
        inputs = {
            name: array if array is None or array.dtype.kind != "f" else array.astype(np.float64) * 1e39
            for name, array in operands.items()
        }
        exact = run(record, call, inputs)
        for dtype in FLOATS:
            for name, array in run(record, call, inputs, dtype).items():
                is_beyond = np.abs(exact[name]) > 1e39
                assert np.isinf(array[is_beyond]).all(), (derived.name, name, dtype)


def test_samples_have_finite_gradients_of_which_some_are_not_zero(record: OpRecord) -> None:
    for sample in record.samples(Product.ATLAS_A2):
        inputs = record.make_inputs(sample.call, np.random.default_rng(7))
        is_empty = any(meta is not None and not meta.size for meta in sample.call.inputs.values())
        found = run(record, sample.call, inputs, "float32")
        wanted = {name for name, meta in record.infer(sample.call).items() if meta is not None}
        assert found.keys() == wanted, sample.name
        assert all(np.isfinite(array).all() for array in found.values()), sample.name
        assert is_empty or not found or any(array.any() for array in found.values()), sample.name


@pytest.mark.parametrize("dtype", ["float64", *FLOATS])
def test_official_examples_print_what_the_pages_say(record: OpRecord, dtype: str) -> None:
    """Operands in another type where that changes no value."""
    for filled in filter(lambda made: made.expected, (e.make() for e in record.workloads.examples)):
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


def test_a_probe_expects_what_its_formula_gives(record: OpRecord) -> None:
    for probe in record.workloads.probes:
        filled = probe.make()
        outputs = {name: np.full(want.shape, np.nan) for name, want in filled.expected.items()}
        record.reference(filled.operands, filled.attrs, outputs)
        for name, want in filled.expected.items():
            np.testing.assert_array_equal(outputs[name], want, f"{probe.name} {name}")


@turns(3)
def test_values_that_are_not_finite_spread_alike_in_blocks_and_warn_nobody(
    record: OpRecord, turn: int
) -> None:
    cases = [
        (derived, name)
        for derived in uneven(record)
        for name, meta in derived.call().inputs.items()
        if meta is not None and meta.dtype.numpy.kind not in "iub?"
    ]
    for number, (derived, name) in enumerate(cases, turn):
        call = derived.call("float64")
        inputs = derived.operands(call)
        array = inputs[name]
        assert array is not None
        array.reshape(-1)[array.size // 2] = (np.nan, np.inf, -np.inf)[number % 3]
        with np.errstate(all="raise"):
            whole, split = (run(record, call, inputs, scratch_bytes=scratch(call, n)) for n in (0, 4))
        for output, array in whole.items():  # a sum of parts may be NaN where the whole one is infinite
            finite = np.isfinite(array)
            with told((derived.name, name, number % 3, output)):
                np.testing.assert_array_equal(np.isfinite(split[output]), finite)
                assert_close({output: split[output][finite]}, {output: array[finite]})


# ------------------------------------------------------------------------------------------- blocks


@turns(2)
def test_blocks_change_only_the_last_digits(record: OpRecord, turn: int) -> None:
    for number, derived in enumerate([*uneven(record), *longer(record, 3000, 5)], turn):
        call = derived.call("float64")
        inputs = derived.operands(call)
        count = (1, 2, 6, 24)[number % 4]
        with told((derived.name, count)):
            found = run(record, call, inputs, scratch_bytes=scratch(call, count))
            assert_close(found, run(record, call, inputs))


def test_blocks_of_one_element_each(record: OpRecord) -> None:
    for small in varied(record, 16):
        call = small.call("float64")
        inputs = small.operands(call)
        with told(small.name):
            assert_close(run(record, call, inputs, scratch_bytes=1), run(record, call, inputs))


@turns(2)
def test_scratch_memory_stays_within_the_budget(record: OpRecord, turn: int) -> None:
    """Some operand holds twice the budget in float64, and so do some results."""
    for number, derived in enumerate(longer(record, LARGE), turn):
        layout = ("contiguous", "transposed", "expanded")[number % 3]
        call = derived.call("float64" if layout == "transposed" else "bfloat16")
        inputs = derived.operands(call)
        if layout == "transposed":
            inputs = relaid(inputs, LAYOUTS["transposed"])
        if layout == "expanded":
            inputs = {
                n: a if a is None else np.broadcast_to(a.reshape(-1)[0], a.shape) for n, a in inputs.items()
            }
        metas = {name: meta for name, meta in record.infer(call).items() if meta is not None}
        outputs = {name: np.empty(meta.shape, meta.dtype.numpy) for name, meta in metas.items()}
        # Up to three runs: threads that other tests have left behind may allocate meanwhile.
        peaks = [_peak_bytes(record, inputs, call, outputs)]
        while min(peaks) > MOST and len(peaks) < 3:
            peaks.append(_peak_bytes(record, inputs, call, outputs))
        assert min(peaks) <= MOST, (derived.name, layout)
        # Blocks of a small part of the budget would be slow, unless it takes no more at once.
        is_slow = min(peaks) <= BUDGET // 8 < _peak_bytes(record, inputs, call, outputs, WHOLE)
        assert not is_slow, (derived.name, layout)


def _peak_bytes(
    record: OpRecord, inputs: Operands, call: CallMeta, outputs: dict[str, Array], budget: int = BUDGET
) -> int:
    tracemalloc.start()
    try:
        reference_of(record)(inputs, call.attrs, outputs, scratch_bytes=budget)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
