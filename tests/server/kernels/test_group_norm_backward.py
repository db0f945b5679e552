"""The kernel of group_norm_backward against the float64 reference: its bounds and its own kinks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.derived import told
from tests.server.kernels.compare import (
    Inputs,
    assert_errors_below,
    assert_right,
    bits_at_bounds,
    computed,
    contents,
    given_array,
    outputs_for,
)

from npugrad import OPERATORS
from npugrad.dtypes import DType
from npugrad.meta import CallMeta
from npugrad_server.backends.cpu.kernels import Kernels

NORM = OPERATORS["group_norm_backward"]


def _inputs(call: CallMeta, sizes: Any = None) -> Inputs:
    return NORM.make_inputs(call, np.random.default_rng(2))


# Parts of a vector, a block, a chunk, whole groups or split ones, and split ones that bypass the cache.
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
test_bits_do_not_depend_on_threads = bits_at_bounds(NORM, BOUNDS, _inputs)


@pytest.mark.parametrize(
    ("dtype", "c", "hxw"),
    [
        # A group of pages, a page of groups.
        (DType.FLOAT32, 2, 2**19 + 37),
        (DType.BFLOAT16, 8, 2053),
        pytest.param(DType.FLOAT16, 2, 2**19 + 37, marks=pytest.mark.deep),
        pytest.param(DType.FLOAT32, 8, 2053, marks=pytest.mark.deep),
    ],
)
def test_large_results_have_the_bits_of_small_ones(kernels: Kernels, dtype: DType, c: int, hxw: int) -> None:
    """Those bypass the cache where their memory is there, in whole lines from wherever they start."""
    nbytes = 33 * 2**20
    small = NORM.build(dtype=dtype, n=1, c=c, hxw=hxw, group=2)
    inputs = _inputs(small)
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


def test_numbers_at_the_ends_of_float32_are_computed_like_any(kernels: Kernels) -> None:
    """Products overflow or vanish in float32 though the results do not."""
    for scale in (1e-18, 1e18, 1e30):
        call = NORM.build(n=2, c=4, hxw=300, group=2)
        inputs = _inputs(call)
        for name, factor in (("input", scale), ("mean", scale), ("rstd", 1 / scale), ("grad_out", scale)):
            inputs[name] = (given_array(inputs, name) * factor).astype(np.float32)
        with told(scale):
            assert_right(NORM, call, inputs, computed(kernels, NORM, call, inputs))


def test_errors_stay_below_a_millionth(kernels: Kernels) -> None:
    call = NORM.build(n=2, c=8, hxw=512 * 128, group=2)
    assert_errors_below(kernels, NORM, call, _inputs(call), 1e-6)


def test_statistics_of_another_dtype_are_taken(kernels: Kernels) -> None:
    """The documents of the newest product allow float32 statistics beside 16-bit data."""
    call = NORM.build(dtype=DType.BFLOAT16, n=2, c=6, hxw=40, group=2)
    inputs, outputs = _inputs(call), outputs_for(NORM, call)
    for name in ("mean", "rstd", "gamma"):
        inputs[name] = given_array(inputs, name).astype(np.float32)
    outputs["grad_gamma"] = np.empty(6, np.float32)
    kernels.run(NORM, inputs, call.attrs, outputs)
    assert_right(NORM, call, inputs, outputs)


def test_groups_that_do_not_divide_the_channels_are_refused(kernels: Kernels) -> None:
    """With statistics of so many groups: else their number alone would be refused."""
    call = NORM.build(n=2, c=6, hxw=40, group=3)
    inputs, outputs = _inputs(call), outputs_for(NORM, call)
    before = contents(outputs)
    for name in ("mean", "rstd"):
        inputs[name] = np.ones((2, 4), np.float32)
    with pytest.raises(RuntimeError, match="status 3"):
        kernels.run(NORM, inputs, {**call.attrs, "group": 4}, outputs)
    assert contents(outputs) == before
