"""The kernel of multi_scale_deformable_attention_grad against the reference: its bounds and kinks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.derived import pairs, told, turns
from tests.operators import UNCHECKED_MSDA as MSDA
from tests.server.kernels.compare import (
    DTYPES,
    Inputs,
    assert_errors_below,
    assert_not_finite_alike,
    assert_right,
    assert_same_bits,
    bits_at_bounds,
    computed,
    examples,
    given_array,
    golden,
    outputs_for,
)

from npugrad.dtypes import DType
from npugrad.edges import NOT_FINITE
from npugrad.meta import CallMeta
from npugrad_server.backends.cpu.kernels import Kernels

Levels = tuple[tuple[int, int], ...]

INDICES = (DType.INT32, DType.INT64)


def _inputs(call: CallMeta, levels: Levels, seed: int) -> Inputs:
    """Operands with these levels, one behind the other; some samples on pixels and borders, some far away."""
    rng = np.random.default_rng(seed)
    inputs = MSDA.make_inputs(call, rng)
    starts = np.cumsum([0, *(height * width for height, width in levels)])[:-1]
    given_array(inputs, "spatial_shape")[...] = np.reshape(levels, (-1, 2))
    given_array(inputs, "level_start_index")[...] = starts
    location = given_array(inputs, "location")
    special = rng.choice([0.0, 0.5, 1.0, -0.5, 1.5, 1e-7, 6e4, -6e4, np.inf, -np.inf, np.nan], location.shape)
    sizes = np.reshape(levels, (1, 1, 1, -1, 1, 2))[..., ::-1]
    on_pixels = (rng.integers(-1, 40, location.shape) + 0.5) / np.maximum(sizes, 1)
    kind = rng.integers(0, 8, location.shape)
    chosen = np.where(kind == 0, special, np.where(kind == 1, on_pixels, location.astype(np.float64)))
    location[...] = chosen.astype(location.dtype)
    return inputs


EDGES = [0, 1, 2, 3, 4, 5, 6, -1, -2, 2**31 - 1, -(2**31), 2**62, 2**63 - 1, -(2**63), 2**32, 2**33 + 1]
ANYTHING = st.one_of(st.sampled_from(EDGES), st.integers(-(2**63), 2**63 - 1), st.integers(-3, 30))


@examples(60)
@given(
    sizes=st.lists(st.tuples(ANYTHING, ANYTHING, ANYTHING), min_size=1, max_size=4),
    index_dtype=st.sampled_from(INDICES),
    dtype=st.sampled_from(DTYPES),
    keys=st.sampled_from([1, 5, 24, 300]),
    ch=st.sampled_from([8, 20]),
    seed=st.integers(0, 2**16),
)
def test_whatever_the_levels_say(
    kernels: Kernels,
    sizes: list[tuple[int, int, int]],
    index_dtype: DType,
    dtype: DType,
    keys: int,
    ch: int,
    seed: int,
) -> None:
    """Corners outside the keys are dropped; nothing else is read or written."""
    levels = ((1, keys),) + ((0, 0),) * (len(sizes) - 1)
    call = MSDA.build(dtype=dtype, index_dtype=index_dtype, nq=9, ch=ch, levels=levels, points=3)
    inputs = _inputs(call, levels, seed)
    table = np.array(sizes, np.int64)
    if index_dtype is DType.INT32:
        table = table.astype(np.int32)
    given_array(inputs, "spatial_shape")[...] = table[:, :2]
    given_array(inputs, "level_start_index")[...] = table[:, 2]
    assert_right(MSDA, call, inputs, computed(kernels, MSDA, call, inputs))


OVERLAPS: list[tuple[Levels, list[int]]] = [
    (((3, 4), (3, 4)), [0, 0]),
    (((3, 4), (2, 2)), [0, 11]),
    (((3, 4), (2, 2)), [12, 0]),
    (((3, 4), (2, 2)), [4, 0]),
    (((2, 2), (1, 3)), [2, 9]),
    (((3, 4), (2, 2)), [-1, 12]),
    (((4, 4), (2, 2)), [12, 0]),
]


def test_levels_may_overlap_leave_gaps_or_the_keys(kernels: Kernels) -> None:
    for levels, starts in OVERLAPS:
        call = MSDA.build(nq=50, ch=24, levels=((4, 4), (1, 1)), points=4)
        inputs = MSDA.make_inputs(call, np.random.default_rng(2))
        given_array(inputs, "spatial_shape")[...] = levels
        given_array(inputs, "level_start_index")[...] = starts
        with told((levels, starts)):
            assert_right(MSDA, call, inputs, computed(kernels, MSDA, call, inputs))


# Sizes around every bound of the kernel: one task or many, several bands, chunks and rounds, long rows.
BOUNDS: list[dict[str, Any]] = [
    dict(bs=1, nq=1, nh=1, ch=8, levels=((1, 1),), points=1),
    dict(bs=2, nq=40, nh=8, ch=32, levels=((30, 41), (7, 9)), points=4),
    dict(bs=1, nq=900, nh=1, ch=32, levels=((60, 70), (31, 34), (1, 1)), points=4),
    dict(bs=3, nq=300, nh=1, ch=256, levels=((20, 33), (9, 9)), points=3),
    dict(bs=1, nq=9000, nh=1, ch=8, levels=((5, 3), (2, 1)), points=4),
    dict(bs=1, nq=2, nh=3, ch=40, levels=((90, 110),), points=2),
    dict(bs=1, nq=200, nh=1, ch=8, levels=((3, 30000), (4000, 1)), points=2),
    dict(bs=1, nq=4200, nh=1, ch=8, levels=((6, 7),) * 16, points=16),
    dict(bs=5, nq=3000, nh=1, ch=64, levels=((9, 9),), points=1),
    dict(bs=2, nq=60, nh=3, ch=40, levels=((60, 70), (9, 9)), points=4),
    dict(bs=11, nq=30, nh=9, ch=8, levels=((21, 30),), points=4),
    dict(bs=1, nq=50, nh=8, ch=24, levels=((70, 3), (1, 900), (40, 41)), points=2),
]


test_bits_do_not_depend_on_threads = bits_at_bounds(
    MSDA, BOUNDS, lambda call, sizes: _inputs(call, sizes["levels"], 3)
)


def _slab(inputs: Inputs, batch: int, head: int) -> Inputs:
    parts = {
        name: given_array(inputs, name)[batch : batch + 1, :, head : head + 1]
        for name in ("value", "location", "attn_weight", "grad_output")
    }
    return {name: np.ascontiguousarray(parts.get(name, array)) for name, array in inputs.items()}


def test_a_slab_has_the_same_bits_alone(kernels: Kernels) -> None:
    """A slab as a task, a band of all heads, or all threads on one slab: the same sums in the same order."""
    for queries in (80, 700):  # fewer samples than keys, and more
        sizes: dict[str, Any] = dict(ch=32, nq=queries, levels=((60, 70), (31, 34)), points=4)
        inputs = _inputs(call := MSDA.build(bs=2, nh=4, **sizes), sizes["levels"], 4)
        whole = computed(kernels, MSDA, call, inputs)
        alone = MSDA.build(bs=1, nh=1, **sizes)
        for batch, head in ((0, 0), (1, 3)):
            expected = {name: np.ascontiguousarray(a[batch, :, head]) for name, a in whole.items()}
            with told((queries, batch, head)):
                found = computed(kernels, MSDA, alone, _slab(inputs, batch, head))
                assert_same_bits(found, expected)


NOT_FINITE_SIZES: list[dict[str, Any]] = [
    dict(nq=30, levels=((5, 7), (2, 3))),
    dict(nq=30, levels=((60, 90), (1, 1))),
    dict(nq=40, levels=((40, 30), (9, 9)), bs=2, nh=8),
]


def test_values_that_are_not_finite_spread_as_in_the_reference(kernels: Kernels) -> None:
    operands = ("value", "attn_weight", "grad_output", "location")
    for sizes, operand, value, dtype in pairs(NOT_FINITE_SIZES, operands, NOT_FINITE, DTYPES):
        call = MSDA.build(dtype=dtype, ch=24, points=3, **sizes)
        inputs = MSDA.make_inputs(call, np.random.default_rng(5))
        array = given_array(inputs, operand)
        array.reshape(-1)[array.size // 2] = value
        with told((sizes, operand, value, dtype)):
            assert_not_finite_alike(computed(kernels, MSDA, call, inputs), golden(MSDA, call, inputs))


def test_sums_that_leave_float32_on_their_way_are_right(kernels: Kernels) -> None:
    for value, gradient in ((1e30, 1e-25), (1e-25, 1e30), (3e38, 1e-30), (1e25, 1e12)):
        call = MSDA.build(nq=40, ch=32, levels=((4, 5), (1, 1)), points=4)
        inputs = MSDA.make_inputs(call, np.random.default_rng(6))
        for name, factor in (("value", value), ("grad_output", gradient)):
            inputs[name] = np.clip(given_array(inputs, name), -1, 1) * np.float32(factor)
        inputs["attn_weight"] = given_array(inputs, "attn_weight") * np.float32(1e-3)
        with told((value, gradient)):
            assert_right(MSDA, call, inputs, computed(kernels, MSDA, call, inputs))


ACCURACY: list[dict[str, Any]] = [
    dict(bs=1, nq=2000, nh=2, ch=32, levels=((40, 50), (20, 25), (10, 13)), points=4),
    dict(bs=1, nq=300, nh=1, ch=256, levels=((40, 50),), points=4),
    # Thousands of samples meet in each key, all of one sign.
    dict(bs=1, nq=40000, nh=1, ch=8, levels=((1, 1), (2, 2)), points=4),
]


def test_errors_stay_below_half_a_millionth(kernels: Kernels) -> None:
    for sizes in ACCURACY:
        call = MSDA.build(**sizes)
        inputs = MSDA.make_inputs(call, np.random.default_rng(7))
        if sizes["nq"] > 10000:
            inputs["grad_output"] = np.abs(given_array(inputs, "grad_output"))
        with told(sizes):
            assert_errors_below(kernels, MSDA, call, inputs, 5e-7)


def test_errors_of_keys_that_many_samples_reach(kernels: Kernels) -> None:
    """As in the small levels of an encoder; with 64 samples a key in float32 the error here is 6.1e-7."""
    call = MSDA.build(bs=1, nq=5000, nh=4, ch=32, levels=((25, 34), (13, 17)), points=4)
    inputs = MSDA.make_inputs(call, np.random.default_rng(7))
    assert_errors_below(kernels, MSDA, call, inputs, 3.5e-7)


@turns(3)
def test_few_samples_in_many_keys_are_right(kernels: Kernels, turn: int) -> None:
    """A result of several large pages, keys of no level among it; most of its rows are zero."""
    levels = ((100, 134), (40, 31))
    call = MSDA.build(dtype=DTYPES[turn], bs=2, nq=20, nh=8, ch=32, levels=levels, points=4)
    inputs = _inputs(call, levels, 11)
    given_array(inputs, "spatial_shape")[0] = (99, 134)
    assert_right(MSDA, call, inputs, computed(kernels, MSDA, call, inputs))


def test_outputs_of_overlapping_levels_can_be_had_alone(kernels: Kernels) -> None:
    call = MSDA.build(nq=30, ch=24, levels=((5, 7), (2, 3)), points=3)
    inputs = MSDA.make_inputs(call, np.random.default_rng(8))
    given_array(inputs, "level_start_index")[...] = [0, 3]
    expected = computed(kernels, MSDA, call, inputs)
    for name in expected:
        outputs = {name: outputs_for(MSDA, call)[name]}
        kernels.run(MSDA, inputs, call.attrs, outputs)
        assert_same_bits(outputs, {name: expected[name]})


class _Unwanted(Exception):
    pass


def test_it_ends_between_tasks_when_nobody_wants_it(kernels: Kernels) -> None:
    # Long enough to be asked again, ten milliseconds after the first time.
    call = MSDA.build(bs=1, nh=1, nq=100_000, ch=64, levels=((6, 7), (3, 4)), points=16)
    inputs = MSDA.make_inputs(call, np.random.default_rng(9))
    given_array(inputs, "spatial_shape")[...] = ((6, 7), (3, 4))
    for starts in ([0, 42], [1, 0]):  # in bands, and overlapping
        given_array(inputs, "level_start_index")[...] = starts
        asked: list[None] = []

        def check_wanted(asked: list[None] = asked) -> None:
            asked.append(None)
            if len(asked) > 1:
                raise _Unwanted

        with pytest.raises(_Unwanted):
            kernels.run(MSDA, inputs, call.attrs, outputs_for(MSDA, call), check_wanted)
        assert len(asked) == 2
