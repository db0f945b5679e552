"""How a call lies in device memory."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.derived import told
from tests.operators import GRID_SAMPLER, GROUP_NORM, MSDA

from npugrad.dtypes import DType, Format
from npugrad.meta import CallMeta, TensorMeta
from npugrad.operator import OpRecord
from npugrad.ops import OPERATORS
from npugrad.products import Product
from npugrad_server.acl.layout import Slot, arrange, view_strides


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """A shape with strides, and another shape of as many elements."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    strides = draw(
        st.one_of(
            st.just(TensorMeta("int32", shape).contiguous_strides),
            st.permutations(range(len(shape))).map(lambda order: _permuted(shape, order)),
            st.lists(st.integers(0, 40), min_size=len(shape), max_size=len(shape)).map(tuple),
        )
    )
    left, new = math.prod(shape), []
    while left > 1 or draw(st.booleans()):
        size = draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0]))
        new.append(size)
        left //= size
        assume(len(new) < 8)
    return shape, tuple(strides), tuple(draw(st.permutations(new)))


def _permuted(shape: tuple[int, ...], order: list[int]) -> tuple[int, ...]:
    array = np.empty([shape[axis] for axis in order], np.int8)
    return tuple(array.transpose(np.argsort(order)).strides)


@given(reshapes())
def test_a_view_has_the_elements_of_the_tensor_in_their_order(
    case: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
) -> None:
    shape, strides, new_shape = case
    numbers = np.arange(sum((s - 1) * step for s, step in zip(shape, strides, strict=True)) + 1)
    tensor = np.lib.stride_tricks.as_strided(numbers, shape, [step * 8 for step in strides])
    found = view_strides(shape, strides, new_shape)
    if found is None:
        with pytest.raises(AttributeError):
            tensor.view().shape = new_shape  # NumPy too would have to copy
        return
    seen = np.lib.stride_tricks.as_strided(numbers, new_shape, [step * 8 for step in found])
    np.testing.assert_array_equal(seen, tensor.reshape(new_shape))


@pytest.mark.parametrize("record", OPERATORS.values(), ids=OPERATORS)
def test_every_operand_and_wanted_output_has_a_slot_in_the_order_of_the_record(record: OpRecord) -> None:
    for product in record.products:
        for sample in record.samples(product):
            with told((product, sample.name)):
                _check_slots(record, sample.call)


def _check_slots(record: OpRecord, call: CallMeta) -> None:
    found = arrange(record, call)
    given = [param.name for param in record.inputs if call.inputs[param.name] is not None]
    assert [slot.name for slot in found.inputs] == given
    wanted = {name for name, meta in record.infer(call).items() if meta is not None}
    assert {slot.name for slot in found.outputs if slot.wanted} == wanted
    names = [slot.name for slot in found.outputs]
    assert names == [param.name for param in record.outputs if param.name in names]
    for slot in found.inputs:
        operand = call.tensor(slot.name)
        assert (slot.meta.size, slot.meta.dtype) == (operand.size, operand.dtype)
        assert (slot.meta.format, slot.meta.storage_offset) == (Format.ND, 0)
    assert all(slot.meta.is_contiguous for slot in found.outputs)


def slots(record: OpRecord, call: CallMeta) -> dict[str, Slot]:
    found = arrange(record, call)
    return {slot.name: slot for slot in found.inputs + found.outputs}


@pytest.mark.parametrize("record", OPERATORS.values(), ids=OPERATORS)
def test_outputs_that_the_operator_may_leave_untouched_are_zeroed(record: OpRecord) -> None:
    for sample in record.samples(Product.ATLAS_A2):
        if record.accepts_unchecked(sample.call):
            continue
        found = arrange(record, sample.call)
        empty = any(not slot.meta.size for slot in found.inputs)
        for slot in found.outputs:
            param = next(p for p in record.outputs if p.name == slot.name)
            assert slot.zeroed == (empty or param.zero_init), f"{sample.name}: {slot.name}"


def test_masked_outputs_are_null_or_allocated_as_each_operator_wants() -> None:
    norm = slots(GROUP_NORM, GROUP_NORM.build(output_mask=(False, True, False)))
    assert {"grad_input", "grad_beta"}.isdisjoint(norm)
    sampler = slots(GRID_SAMPLER, GRID_SAMPLER.build(output_mask=(False, True)))
    assert (sampler["input_grad"].wanted, sampler["grid_grad"].wanted) == (False, True)
    assert sampler["input_grad"].meta == TensorMeta(DType.FLOAT32, (2, 3, 4, 5))


def test_strides_stay_where_that_is_no_more_to_copy() -> None:
    for strides, kept, nbytes in (
        ((24, 4, 1), None, 192),  # contiguous, but for an offset
        ((0, 4, 1), (0, 4, 1), 96),  # expanded: one sample goes down
        ((1, 2, 12), (1, 2, 12), 192),  # turned
        ((0, 0, 0), (0, 0, 0), 4),
        ((48, 8, 2), (48, 8, 2), 380),  # every second element
        ((72, 12, 3), None, 192),  # more gaps than that are packed
    ):
        call = GROUP_NORM.build(n=2, c=6, hxw=4, group=2)
        meta = TensorMeta(DType.FLOAT32, (2, 6, 4), strides=strides, storage_offset=5)
        slot = slots(GROUP_NORM, call.with_inputs(grad_out=meta))["grad_out"]
        assert (slot.meta.element_strides, slot.nbytes) == (kept or (24, 4, 1), nbytes), strides


def test_the_gradient_of_attention_goes_down_flat_strided_or_packed() -> None:
    call = MSDA.build(bs=2, nq=5, nh=4, ch=8, grad_output_rank=4)
    shape = call.tensor("grad_output").shape
    flat = slots(MSDA, call)["grad_output"]
    assert (flat.meta.shape, flat.packed) == ((2, 5, 32), False)
    turned = call.with_inputs(grad_output=TensorMeta("float32", shape, strides=(1, 64, 2, 8)))
    assert slots(MSDA, turned)["grad_output"].packed
    queries_first = call.with_inputs(grad_output=TensorMeta("float32", shape, strides=(32, 64, 8, 1)))
    slot = slots(MSDA, queries_first)["grad_output"]
    assert (slot.meta.strides, slot.packed) == ((32, 64, 1), False)


def test_the_format_a_caller_declared_is_not_handed_on() -> None:
    """The bytes are row-major whatever they are called, and a private format would be read otherwise."""
    call = GROUP_NORM.build()
    meta = TensorMeta("float32", call.tensor("input").shape, Format.FRACTAL_NZ)
    assert slots(GROUP_NORM, call.with_inputs(input=meta))["input"].meta.format is Format.ND
