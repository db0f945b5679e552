"""The kernel of group_norm_backward against the float64 reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server.kernels.compare import (
    DTYPES,
    assert_any_threads_give_the_same,
    assert_errors_below,
    assert_not_finite_alike,
    assert_right,
    computed,
    contents,
    examples,
    given_array,
    golden,
    outputs_for,
)

from npugrad import OPERATORS
from npugrad.dtypes import DType
from npugrad_server.backends.cpu.kernels import Kernels, KernelUnsupported

if TYPE_CHECKING:
    from collections.abc import Callable


NORM = OPERATORS["group_norm_backward"]
SIZES = st.sampled_from([0, 1, 2, 3, 5, 7, 11])
PIXELS = st.sampled_from([0, 1, 2, 3, 7, 13, 16, 17, 31, 64, 67, 129, 509, 2048, 2053])
MASKS = st.tuples(st.booleans(), st.booleans(), st.booleans())
few = examples(60)


@few
@given(
    dtype=st.sampled_from(DTYPES),
    n=SIZES,
    per_group=SIZES,
    group=st.sampled_from([1, 2, 3, 8]),
    hxw=PIXELS,
    mask=MASKS,
    with_gamma=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_it_computes_what_the_reference_does(
    kernels: Kernels,
    dtype: DType,
    n: int,
    per_group: int,
    group: int,
    hxw: int,
    mask: tuple[bool, bool, bool],
    with_gamma: bool,
    seed: int,
) -> None:
    call = NORM.build(
        dtype=dtype, n=n, c=per_group * group, hxw=hxw, group=group, output_mask=mask, with_gamma=with_gamma
    )
    inputs = NORM.make_inputs(call, np.random.default_rng(seed))
    assert_right(NORM, call, inputs, computed(kernels, NORM, call, inputs))


# Sizes around every bound of the kernel: parts of a vector, a block, a chunk, whole groups or split ones, and
# split ones whose result bypasses the cache.
BOUNDS = [
    dict(n=1, c=1, hxw=1, group=1),
    dict(n=64, c=64, hxw=64, group=8),
    dict(n=1, c=8, hxw=65537, group=1),
    dict(n=1, c=1, hxw=131072, group=1),
    dict(n=3, c=2, hxw=32769, group=1),
    dict(n=1, c=4099, hxw=3, group=1),
    dict(n=7, c=30, hxw=257, group=5),
    dict(n=3, c=6, hxw=2047, group=3),
    dict(n=1000, c=3, hxw=2, group=3),
    dict(n=1, c=4, hxw=2**21 + 5, group=1),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", BOUNDS, ids=lambda s: "-".join(map(str, s.values())))
def test_bits_do_not_depend_on_threads(
    make_kernels: Callable[[int], Kernels], dtype: DType, sizes: dict[str, int]
) -> None:
    call = NORM.build(dtype=dtype, **sizes)
    inputs = NORM.make_inputs(call, np.random.default_rng(2))
    assert_any_threads_give_the_same(make_kernels, NORM, call, inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan], ids=str)
@pytest.mark.parametrize("operand", ["grad_out", "input", "mean", "rstd", "gamma"])
@pytest.mark.parametrize("hxw", [5, 4099])
def test_values_that_are_not_finite_spread_as_in_the_reference(
    kernels: Kernels, dtype: DType, value: float, operand: str, hxw: int
) -> None:
    call = NORM.build(dtype=dtype, n=2, c=6, hxw=hxw, group=2)
    inputs = NORM.make_inputs(call, np.random.default_rng(5))
    array = given_array(inputs, operand)
    array.reshape(-1)[array.size // 2] = value
    found, expected = computed(kernels, NORM, call, inputs), golden(NORM, call, inputs)
    assert_not_finite_alike(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("c", "hxw"), [(2, 2**19 + 37), (8, 2053)], ids=["group_of_pages", "page_of_groups"])
def test_large_results_have_the_bits_of_small_ones(kernels: Kernels, dtype: DType, c: int, hxw: int) -> None:
    """Those bypass the cache where their memory is there, in whole lines from wherever they start."""
    nbytes = 33 * 2**20
    small = NORM.build(dtype=dtype, n=1, c=c, hxw=hxw, group=2)
    inputs = NORM.make_inputs(small, np.random.default_rng(10))
    expected = computed(kernels, NORM, small, inputs)["grad_input"]
    n = -(-nbytes // expected.nbytes)
    large = NORM.build(dtype=dtype, n=n, c=c, hxw=hxw, group=2)
    repeated = {
        name: values if values is None or name == "gamma" else np.repeat(values, n, axis=0)
        for name, values in inputs.items()
    }
    outputs = outputs_for(NORM, large)
    fresh, there = (np.empty(n * expected.size + 64, expected.dtype) for _ in range(2))
    there.fill(1)
    for memory, start in ((fresh, 0), (there, 0), (there, 1), (there, 13)):
        outputs["grad_input"] = memory[start : start + n * expected.size].reshape(n, *expected.shape[1:])
        if memory is there:
            memory.fill(1)
        kernels.run(NORM, repeated, large.attrs, outputs)
        assert all(one.tobytes() == expected.tobytes() for one in outputs["grad_input"])


@pytest.mark.parametrize("scale", [1e-18, 1e18, 1e30])
def test_numbers_at_the_ends_of_float32_are_computed_like_any(kernels: Kernels, scale: float) -> None:
    """Products overflow or vanish in float32 though the results do not."""
    call = NORM.build(n=2, c=4, hxw=300, group=2)
    inputs = NORM.make_inputs(call, np.random.default_rng(6))
    for name, factor in (("input", scale), ("mean", scale), ("rstd", 1 / scale), ("grad_out", scale)):
        array = given_array(inputs, name)
        inputs[name] = (array * factor).astype(np.float32)
    assert_right(NORM, call, inputs, computed(kernels, NORM, call, inputs))


def test_errors_stay_below_a_millionth(kernels: Kernels) -> None:
    call = NORM.build(n=2, c=8, hxw=512 * 128, group=2)
    inputs = NORM.make_inputs(call, np.random.default_rng(7))
    assert_errors_below(kernels, NORM, call, inputs, 1e-6)


def test_statistics_of_another_dtype_are_taken(kernels: Kernels) -> None:
    """The documents of the newest product allow float32 statistics beside 16-bit data."""
    call = NORM.build(dtype=DType.BFLOAT16, n=2, c=6, hxw=40, group=2)
    inputs = NORM.make_inputs(call, np.random.default_rng(8))
    outputs = outputs_for(NORM, call)
    for name in ("mean", "rstd", "gamma"):
        array = given_array(inputs, name)
        inputs[name] = array.astype(np.float32)
    outputs["grad_gamma"] = np.empty(6, np.float32)
    kernels.run(NORM, inputs, call.attrs, outputs)
    assert_right(NORM, call, inputs, outputs)


def test_what_the_kernel_does_not_take_is_said_and_nothing_written(kernels: Kernels) -> None:
    call = NORM.build(n=2, c=6, hxw=4, group=2)
    inputs = NORM.make_inputs(call, np.random.default_rng(9))
    outputs = outputs_for(NORM, call)
    before = contents(outputs)
    array = given_array(inputs, "input")
    with pytest.raises(KernelUnsupported):
        kernels.run(NORM, {**inputs, "input": array.astype(np.float16)}, call.attrs, outputs)
    with pytest.raises(RuntimeError, match="status 3"):
        kernels.run(NORM, inputs, {**call.attrs, "n": 3}, outputs)
    assert contents(outputs) == before
