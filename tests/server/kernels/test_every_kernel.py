"""What holds of every operator's kernel: samples, layouts, threads, parts, refusals; calls come from records.

The bounds of each kernel, and what only it must not get wrong, are in its own file.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from tests.derived import (
    FLOATS,
    LAYOUTS,
    NO_PLACES,
    SEEDS,
    Array,
    Derived,
    Operands,
    combined,
    drawn,
    emptied,
    longer,
    ones,
    pairs,
    places,
    relaid,
    told,
    turns,
    varied,
)
from tests.reaches import MASK, masked, prove
from tests.server.kernels.compare import (
    assert_any_threads_give_the_same,
    assert_errors_below,
    assert_not_finite_alike,
    assert_right,
    assert_same_bits,
    computed,
    contents,
    examples,
    given_array,
    golden,
    outputs_for,
)

from npugrad.dtypes import DType
from npugrad.edges import NOT_FINITE, Edge, edges
from npugrad.layout import view
from npugrad.meta import CallMeta
from npugrad.operator import OpRecord
from npugrad.ops import OPERATORS
from npugrad.products import Product
from npugrad_server.backends.cpu.kernels import Kernels, KernelUnsupported

pytestmark = [
    pytest.mark.usefixtures("has_kernel"),
    pytest.mark.parametrize("record", OPERATORS.values(), ids=OPERATORS),
]
LARGEST_ERROR = 2e-6


@cache
def calls(record: OpRecord) -> list[Derived]:
    """The uneven call of a record in each of its variants."""
    return varied(record)


@cache
def long_calls(record: OpRecord) -> list[Derived]:
    """Calls of more than one block."""
    return longer(record, 2**14, 3)


@cache
def placed(record: OpRecord) -> list[Derived]:
    """Calls in every combination of variants, and with sizes of 1, of an operator that has places."""
    return [*combined(record), *ones(record)] if record.workloads.ties else []


@cache
def made(derived: Derived, dtype: str = "float32") -> tuple[CallMeta, Operands]:
    """A call and its operands, which several tests take and none may change."""
    call = derived.call(dtype)
    inputs = derived.operands(call)
    for array in inputs.values():
        if array is not None:
            array.flags.writeable = False
    return call, inputs


def of_16_bits_too(derived: list[Derived]) -> list[tuple[Derived, str]]:
    """Each call in float32 and, in turn, in one of the types of 16 bits."""
    return [(one, dtype) for i, one in enumerate(derived) for dtype in (FLOATS[0], FLOATS[1 + i % 2])]


def in_turn(derived: list[Derived], turn: int = 0) -> list[tuple[Derived, str]]:
    """Each call in one type, the next in the next."""
    return [(one, FLOATS[i % len(FLOATS)]) for i, one in enumerate(derived, turn)]


def _mixed(number: int, turn: int) -> int:
    """A number for a type: another for every third case, as those may have a mask or a value in common."""
    return number + number // 3 + turn


def names_of(derived: Derived) -> list[str]:
    return [name for name, meta in derived.call().inputs.items() if meta is not None]


def is_real(array: Array | None) -> bool:
    """Whether an operand may hold infinities and NaNs."""
    return array is not None and array.dtype.kind not in "iub?"


def is_large(call: CallMeta) -> bool:
    return any(meta is not None and meta.nbytes > 2**18 for meta in call.inputs.values())


# ---------------------------------------------------------------------------------------------- results


def test_every_sample_of_the_record(kernels: Kernels, record: OpRecord) -> None:
    """A kernel does not know of products: each call once, in types that kernels take."""
    found = {str((s.call.inputs, s.call.attrs)): s for p in record.products for s in record.samples(p)}
    for sample in found.values():
        if any(meta is not None and meta.dtype in FLOATS for meta in sample.call.inputs.values()):
            inputs = record.make_inputs(sample.call, np.random.default_rng(1))
            with told(sample.name):
                assert_right(record, sample.call, inputs, computed(kernels, record, sample.call, inputs))


@examples(80)
@given(seed=SEEDS)
def test_calls_of_any_size_are_right(kernels: Kernels, record: OpRecord, seed: int) -> None:
    call, inputs = drawn(record, seed)
    assert_right(record, call, inputs, computed(kernels, record, call, inputs))


def test_sums_of_nothing_are_zero_whatever_is_left(kernels: Kernels, record: OpRecord) -> None:
    for derived, dtype in itertools.product(emptied(record), FLOATS):
        call = derived.call(dtype)
        for name, array in computed(kernels, record, call, derived.nothing(call)).items():
            assert not array.any(), (derived.name, name, dtype)


def test_errors_are_those_of_the_last_digits(kernels: Kernels, record: OpRecord) -> None:
    for derived in [*calls(record), *long_calls(record)]:
        with told(derived):
            assert_errors_below(kernels, record, *made(derived), LARGEST_ERROR)


def test_ties_and_borders_fall_on_the_same_side(kernels: Kernels, record: OpRecord) -> None:
    """One pixel to the wrong side would be an error of the size of the data."""
    for derived in placed(record):
        call, inputs = made(derived)
        with told(derived):
            assert_errors_below(kernels, record, call, derived.on_ties(call, inputs), LARGEST_ERROR)


@turns(3)
def test_places_that_are_none_are_taken_as_the_reference_does(
    kernels: Kernels, record: OpRecord, turn: int
) -> None:
    for number, derived in enumerate(placed(record)):
        call = derived.call(FLOATS[_mixed(number, turn) % 3])
        inputs = derived.operands(call)
        for name in places(derived, call):
            array = given_array(inputs, name)
            count = min(array.size, 3 * len(NO_PLACES))
            with np.errstate(over="ignore"):
                array.reshape(-1)[:: array.size // count][:count] = np.resize(NO_PLACES, count)
        with told((derived, turn)):
            assert_right(record, call, inputs, computed(kernels, record, call, inputs))


def test_bits_do_not_depend_on_threads(make_kernels: Callable[[int], Kernels], record: OpRecord) -> None:
    for derived, dtype in of_16_bits_too([*calls(record), *long_calls(record)]):
        with told((derived, dtype)):
            assert_any_threads_give_the_same(make_kernels, record, *made(derived, dtype), (2, 3, 5))


def test_values_that_are_not_finite_spread_as_in_the_reference(kernels: Kernels, record: OpRecord) -> None:
    last = varied(record, 2)[-1]
    cases = [(last, *case) for case in pairs(names_of(last), NOT_FINITE, FLOATS)]
    longest = [(derived, name) for derived in long_calls(record) for name in names_of(derived)]
    values = itertools.cycle(NOT_FINITE)
    cases += [(*one, value, FLOATS[0]) for one, value in zip(longest, values, strict=False)]
    for derived, name, value, dtype in cases:
        call = derived.call(dtype)
        inputs = derived.operands(call)
        array = given_array(inputs, name)
        if is_real(array):
            array.reshape(-1)[array.size // 2] = value
            with told((derived, name, value, dtype)):
                assert_right(record, call, inputs, computed(kernels, record, call, inputs))


def test_operands_without_a_finite_number(kernels: Kernels, record: OpRecord) -> None:
    for derived, value, dtype in pairs(calls(record), NOT_FINITE, FLOATS):
        call, inputs = made(derived, dtype)
        odd = {n: np.full_like(a, value) if is_real(a) else a for n, a in inputs.items()}
        with told((derived, value, dtype)):
            assert_right(record, call, odd, computed(kernels, record, call, odd))


@turns(3)
def test_an_edge_comes_out_as_in_the_reference(kernels: Kernels, record: OpRecord, turn: int) -> None:
    """Each in one type, a large one in one turn; empty and strided calls keep the type of their samples."""
    types = [dtype for dtype in record.inputs[0].dtypes[Product.ATLAS_A2] if dtype in FLOATS]
    for number, same in enumerate(zip(*(edges(record, dtype) for dtype in types), strict=True)):
        edge = same[_mixed(number, turn) % len(types)]
        if number % 3 == turn or not is_large(edge.call):
            with told((edge.kind, edge.name, edge.call.inputs)):
                _check(kernels, record, edge)


def _check(kernels: Kernels, record: OpRecord, edge: Edge) -> None:
    operands = edge.make()
    for name, meta in edge.call.inputs.items():
        array = operands[name]
        if array is not None and meta is not None and meta.strides and kernels.takes_strides(record, name):
            operands[name] = strided = view(meta, bytearray(meta.content_bytes))
            strided[...] = array  # elements that repeat one hold the last that was written
    outputs = computed(kernels, record, edge.call, operands)
    if edge.kind == "non-finite":
        assert_not_finite_alike(outputs, golden(record, edge.call, operands))
    else:
        assert_right(record, edge.call, operands, outputs)


# ------------------------------------------------------------------------------------- layouts and memory


def test_strides_change_no_bit(kernels: Kernels, record: OpRecord) -> None:
    """Of operands that the kernel takes as they lie; the backend copies the others."""
    for derived, layout, dtype in pairs(calls(record), [*LAYOUTS], FLOATS):
        call, inputs = made(derived, dtype)
        taken = {name: array for name, array in inputs.items() if kernels.takes_strides(record, name)}
        found = computed(kernels, record, call, {**inputs, **relaid(taken, LAYOUTS[layout])})
        with told((derived, layout, dtype)):
            assert_same_bits(found, computed(kernels, record, call, inputs))


def test_an_expanded_operand_is_read_where_it_lies(kernels: Kernels, record: OpRecord) -> None:
    derived = varied(record, 2)[-1]
    for name, part, dtype in pairs(names_of(derived), ("one", "first", "last axis"), FLOATS):
        if not kernels.takes_strides(record, name):
            continue
        call, inputs = made(derived, dtype)
        array = given_array(inputs, name)
        one = {"one": array.reshape(-1)[:1], "first": array[:1], "last axis": array[..., :1]}[part]
        expanded = np.broadcast_to(one, array.shape)
        found, expected = (
            computed(kernels, record, call, {**inputs, name: operand})
            for operand in (expanded, expanded.copy())
        )
        with told((derived, name, part, dtype)):
            assert_same_bits(found, expected)


def shifted(array: Array, nbytes: int) -> Array:
    """The same array, so many bytes behind the start of a cache line."""
    memory = np.empty(array.nbytes + 64 + nbytes, np.uint8)
    start = -memory.ctypes.data % 64 + nbytes
    moved = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


def test_bits_do_not_depend_on_where_tensors_lie(kernels: Kernels, record: OpRecord) -> None:
    for derived, elements, dtype in pairs(calls(record), (1, 3, 7), FLOATS):
        call, inputs = made(derived, dtype)
        moved = {
            key: None if array is None else shifted(np.ascontiguousarray(array), elements * array.itemsize)
            for key, array in inputs.items()
        }
        outputs = {
            key: shifted(array, elements * array.itemsize) for key, array in outputs_for(record, call).items()
        }
        kernels.run(record, moved, call.attrs, outputs)
        with told((derived, elements, dtype)):
            assert_same_bits(outputs, computed(kernels, record, call, inputs))


def test_fractions_of_an_element_are_refused(kernels: Kernels, record: OpRecord) -> None:
    """Stores past the cache would end the process; the backend copies such operands."""
    for derived, dtype in in_turn(calls(record)):
        call, inputs = made(derived, dtype)
        outputs = outputs_for(record, call)
        before = contents(outputs)
        odd: list[tuple[Mapping[str, Array | None], Mapping[str, Array]]] = [
            ({**inputs, key: shifted(np.ascontiguousarray(array), 1)}, outputs)
            for key, array in inputs.items()
            if array is not None and array.itemsize > 1
        ]
        odd += [(inputs, {**outputs, key: shifted(array, 1)}) for key, array in outputs.items()]
        for operands, results in odd:
            with told((derived, dtype)), pytest.raises(RuntimeError, match="status 3"):
                kernels.run(record, operands, call.attrs, results)
        assert contents(outputs) == before, (derived, dtype)


# -------------------------------------------------------------------------------------- parts of a call


@turns(3)
def test_each_output_can_be_had_alone(kernels: Kernels, record: OpRecord, turn: int) -> None:
    for derived, dtype in in_turn(calls(record), turn):
        call, inputs = made(derived, dtype)
        for name, array in computed(kernels, record, call, inputs).items():
            alone = {name: outputs_for(record, call)[name]}
            kernels.run(record, inputs, call.attrs, alone)
            with told((derived, name, dtype)):
                if any(param.masked_by is not None for param in record.outputs):
                    # There may be another way for it.
                    only = call.with_attrs(output_mask=tuple(param.name == name for param in record.outputs))
                    assert_right(record, only, inputs, alone)
                else:
                    assert_same_bits(alone, {name: array})


@pytest.mark.parametrize("size", ["small", pytest.param("large", marks=pytest.mark.deep)])
def test_an_output_depends_on_what_the_record_says_and_on_nothing_else(
    kernels: Kernels, record: OpRecord, size: str
) -> None:
    """Every sample under every mask, and calls of several blocks and tasks."""

    def compute(record: OpRecord, call: CallMeta, arrays: Mapping[str, Array | None]) -> dict[str, Array]:
        if record.accepts_unchecked(call):
            return {}
        packed = {
            name: array if array is None or kernels.takes_strides(record, name) else array.copy()
            for name, array in arrays.items()
        }
        return computed(kernels, record, call, packed)

    found = [sample.call for sample in record.samples(Product.ATLAS_A2)]
    found += [derived.call() for derived in longer(record, 2**15, 2)[::2]]
    # Samples that differ in their masks alone are one.
    different = {
        str((call.inputs, {**call.attrs, MASK: call.attrs.get(MASK) is None})): call for call in found
    }
    for call in different.values():
        if (size == "large") == is_large(call):
            for one in masked(record, call):
                prove(record, one, compute)


# ---------------------------------------------------------------------------------------------- refusals


def test_operands_that_do_not_fit_are_refused_and_nothing_written(kernels: Kernels, record: OpRecord) -> None:
    """With all outputs wanted, so that each operand has to fit another."""
    for derived, dtype in in_turn(calls(record)):
        call, inputs = made(derived, dtype)
        if MASK in call.attrs:
            call = call.with_attrs(output_mask=(True,) * len(record.outputs))
        outputs = outputs_for(record, call)
        before = contents(outputs)
        for name, array in inputs.items():
            if array is not None:
                shorter = {**inputs, name: np.ascontiguousarray(array[..., :-1])}
                with told((derived, name, dtype)), pytest.raises(RuntimeError, match="status 3"):
                    kernels.run(record, shorter, call.attrs, outputs)
        for name, array in outputs.items():
            with told((derived, name, dtype)), pytest.raises(RuntimeError, match="status 3"):
                kernels.run(record, inputs, call.attrs, {**outputs, name: array[..., :-1].copy()})
        assert contents(outputs) == before, (derived, dtype)


def test_an_operand_of_another_type_is_taken_or_refused_whole(kernels: Kernels, record: OpRecord) -> None:
    """Two floats of different types somewhere are refused, however many of them the kernel takes."""
    for derived in calls(record):
        call, inputs = made(derived)
        refused = []
        for name, dtype in itertools.product(names_of(derived), (*FLOATS[:2], "float64", "int64")):
            array = given_array(inputs, name)
            if array.dtype == dtype:
                continue
            with np.errstate(over="ignore", invalid="ignore"):
                other = {**inputs, name: array.astype(dtype)}
            outputs = outputs_for(record, call)
            before = contents(outputs)
            with told((derived, name, dtype)):
                try:
                    kernels.run(record, other, call.attrs, outputs)
                except KernelUnsupported:
                    refused.append(name)
                    assert contents(outputs) == before
                else:
                    assert_right(record, call, other, outputs)
        assert refused.count(record.inputs[0].name) == 3, derived


def test_float64_is_left_to_the_reference_unless_the_documents_have_it(
    kernels: Kernels, record: OpRecord
) -> None:
    is_taken = DType.FLOAT64 in record.inputs[0].dtypes[Product.ATLAS_A2]
    for derived in calls(record):
        call = derived.call("float64")
        inputs, outputs = derived.operands(call), outputs_for(record, call)
        before = contents(outputs)
        if is_taken:
            kernels.run(record, inputs, call.attrs, outputs)
            assert_right(record, call, inputs, outputs)
            continue
        with told(derived), pytest.raises(KernelUnsupported):
            kernels.run(record, inputs, call.attrs, outputs)
        assert contents(outputs) == before, derived


def test_attributes_that_do_not_fit_are_refused_and_nothing_written(
    kernels: Kernels, record: OpRecord
) -> None:
    """Numbers that are no choice; sizes that are not those of the operands, unless the kernel needs none."""
    for derived, attr in itertools.product(calls(record), record.attrs):
        if attr.type != "int64":
            continue
        call, inputs = made(derived)
        outputs = outputs_for(record, call)
        before = contents(outputs)
        number = max(attr.choices.values(), default=call.integer(attr.name)) + 1
        wrong: dict[str, Any] = {**call.attrs, attr.name: number}
        with told((derived, attr.name, number)):
            try:
                kernels.run(record, inputs, wrong, outputs)
            except (RuntimeError, KernelUnsupported):
                assert contents(outputs) == before
            else:
                assert not attr.choices
                assert_right(record, call, inputs, outputs)
