"""The kernel of grid_sampler_3d_backward against the float64 reference: its bounds and its own kinks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.derived import pairs, told
from tests.server.kernels.compare import (
    Inputs,
    assert_any_threads_give_the_same,
    assert_errors_below,
    assert_not_finite_alike,
    assert_right,
    assert_same_bits,
    bits_at_bounds,
    computed,
    given_array,
    golden,
    result_at,
)

from npugrad import OPERATORS
from npugrad.meta import CallMeta
from npugrad_server.backends.cpu.kernels import Kernels, KernelUnsupported

GRID = OPERATORS["grid_sampler_3d_backward"]
MODES = ((0, 1), (0, 1, 2), (False, True))
"""Interpolation, padding, aligned corners."""


def made(call: CallMeta, seed: int) -> Inputs:
    return GRID.make_inputs(call, np.random.default_rng(seed))


def test_errors_stay_below_half_a_millionth(kernels: Kernels) -> None:
    for c, mode, padding, aligned in pairs((1, 4, 5, 9, 17, 33), *MODES):
        modes = dict(interpolation_mode=mode, padding_mode=padding, align_corners=aligned)
        call = GRID.build(n=2, c=c, d=11, h=17, w=20, od=9, oh=13, ow=16, **modes)
        with told((c, modes)):
            assert_errors_below(kernels, GRID, call, made(call, c), 5e-7)


def test_values_that_are_not_finite_reach_what_they_reach_in_the_reference(kernels: Kernels) -> None:
    for dtype, name, mode, padding, aligned in pairs(
        ("float32", "float64"), ("input", "grad_output"), *MODES
    ):
        modes = dict(dtype=dtype, interpolation_mode=mode, padding_mode=padding, align_corners=aligned)
        call = GRID.build(n=1, c=20, d=4, h=5, w=6, od=3, oh=4, ow=5, **modes)
        inputs = made(call, 4)
        given_array(inputs, name)[0, ::3, 1, 2, ::2] = np.inf
        given_array(inputs, name)[0, 1, 2, 1] = np.nan
        with told((name, modes)):
            assert_not_finite_alike(computed(kernels, GRID, call, inputs), golden(GRID, call, inputs))


# Lanes of each number, one block of channels and several, one band of slices and several, spans of points.
BOUNDS = [
    dict(n=1, c=1, d=1, h=1, w=1, od=1, oh=1, ow=1),
    dict(n=3, c=35, d=4, h=6, w=5, od=3, oh=2, ow=7),
    dict(n=1, c=3, d=33, h=90, w=70, od=9, oh=20, ow=31),
    dict(n=2, c=20, d=7, h=100, w=110, od=8, oh=25, ow=27),
    dict(n=1, c=8, d=2, h=300, w=131, od=3, oh=61, ow=64),
]


test_bits_do_not_depend_on_threads = bits_at_bounds(
    GRID,
    [{**sizes, "interpolation_mode": mode} for mode in (0, 1) for sizes in BOUNDS],
    lambda call, _: made(call, 5),
    3,
)


def test_float64_is_exact_with_any_threads_and_strides(make_kernels: Callable[[int], Kernels]) -> None:
    for sizes, mode, padding, aligned in pairs(BOUNDS, *MODES):
        modes = dict(interpolation_mode=mode, padding_mode=padding, align_corners=aligned)
        call = GRID.build(dtype="float64", **sizes, **modes)
        inputs = made(call, 7)
        with told((sizes, modes)):
            assert_any_threads_give_the_same(make_kernels, GRID, call, inputs)
            assert_errors_below(make_kernels(2), GRID, call, inputs, 1e-13)
            relaid = {name: given_array(inputs, name).transpose().copy().transpose() for name in inputs}
            packed = computed(make_kernels(2), GRID, call, inputs)
            assert_same_bits(computed(make_kernels(2), GRID, call, relaid), packed)


def test_volumes_of_several_waves(kernels: Kernels) -> None:
    """64 MiB of scratch memory hold points and channels of two of three volumes; with grid_grad's, of one.

    The reference takes seconds; its results are the same under any mask.
    """
    sizes: dict[str, Any] = {"n": 3, "c": 17, "d": 3, "h": 4, "w": 5, "od": 26, "oh": 82, "ow": 83}
    whole = GRID.build(**sizes)
    inputs = made(whole, 6)
    every = golden(GRID, whole, inputs)
    for mask in ((True, True), (True, False), (False, True)):
        call = GRID.build(**sizes, output_mask=mask)
        expected = {name: every[name] for name, meta in GRID.infer(call).items() if meta is not None}
        with told(mask):
            assert_right(GRID, call, inputs, computed(kernels, GRID, call, inputs), expected=expected)


@pytest.mark.parametrize("mode", [0, 1])
def test_a_large_result_is_the_same_wherever_it_lies(kernels: Kernels, mode: int) -> None:
    """16 MiB and more: at the start of a line of the cache, where vectors may bypass it, and past one."""
    sizes = {"n": 1, "c": 17, "d": 61, "h": 64, "w": 64, "od": 3, "oh": 5, "ow": 7}
    call = GRID.build(**sizes, interpolation_mode=mode, output_mask=(True, False))
    inputs = made(call, 8)
    meta = GRID.infer(call)["input_grad"]
    assert meta is not None
    found = []
    for shift in (0, 4):
        with result_at(meta, shift) as result:
            kernels.run(GRID, inputs, call.attrs, {"input_grad": result})
        found.append(result)
    assert_right(GRID, call, inputs, {"input_grad": found[0]})
    np.testing.assert_array_equal(found[0], found[1])


def test_the_deepest_volume(kernels: Kernels) -> None:
    """Numbers of slices take memory however small a slice is: more than a million are for the reference."""
    for mode in (0, 1):
        sizes = dict(n=1, c=2, h=1, w=1, od=5, oh=2, ow=3, interpolation_mode=mode)
        call, deeper = (GRID.build(d=2**20 + more, **sizes) for more in (0, 1))
        inputs = made(call, 9)
        assert_right(GRID, call, inputs, computed(kernels, GRID, call, inputs))
        with pytest.raises(KernelUnsupported):
            computed(kernels, GRID, deeper, made(deeper, 9))
