"""The kernel of grid_sampler_3d_backward against the float64 reference: its bounds and its own kinks."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import numpy as np
import pytest
from tests.server.kernels.compare import (
    Array,
    Inputs,
    assert_errors_below,
    assert_not_finite_alike,
    assert_right,
    bits_at_bounds,
    computed,
    given_array,
    golden,
)

from npugrad import OPERATORS
from npugrad.meta import CallMeta
from npugrad_server.backends.cpu.kernels import Kernels, KernelUnsupported

GRID = OPERATORS["grid_sampler_3d_backward"]
LARGEST_ERROR = 5e-7
MODES = [
    dict(zip(("interpolation_mode", "padding_mode", "align_corners"), modes, strict=True))
    for modes in itertools.product((0, 1), (0, 1, 2), (False, True))
]
EVERY_MODE = pytest.mark.parametrize("modes", MODES, ids=lambda m: "-".join(str(int(v)) for v in m.values()))


def made(call: CallMeta, seed: int) -> Inputs:
    return GRID.make_inputs(call, np.random.default_rng(seed))


@EVERY_MODE
@pytest.mark.parametrize("c", [1, 4, 5, 9, 17, 33])
def test_errors_stay_below_half_a_millionth(kernels: Kernels, modes: dict[str, Any], c: int) -> None:
    call = GRID.build(n=2, c=c, d=11, h=17, w=20, od=9, oh=13, ow=16, **modes)
    assert_errors_below(kernels, GRID, call, made(call, c), LARGEST_ERROR)


@EVERY_MODE
@pytest.mark.parametrize("name", ["input", "grad_output"])
def test_values_that_are_not_finite_reach_what_they_reach_in_the_reference(
    kernels: Kernels, modes: dict[str, Any], name: str
) -> None:
    call = GRID.build(n=1, c=20, d=4, h=5, w=6, od=3, oh=4, ow=5, **modes)
    inputs = made(call, 4)
    given_array(inputs, name)[0, ::3, 1, 2, ::2] = np.inf
    given_array(inputs, name)[0, 1, 2, 1] = np.nan
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
    [{**sizes, "interpolation_mode": mode} for sizes in BOUNDS for mode in (0, 1)],
    lambda call, _: made(call, 5),
    every_type=True,
)


_WAVES: dict[str, Any] = {"n": 3, "c": 32, "d": 3, "h": 4, "w": 5, "od": 26, "oh": 100, "ow": 100}


@cache
def _several_waves() -> tuple[Inputs, dict[str, Array]]:
    """Operands, and the results of the reference, which takes seconds: the same under any mask."""
    call = GRID.build(**_WAVES)
    inputs = made(call, 6)
    return inputs, golden(GRID, call, inputs)


@pytest.mark.parametrize("output_mask", [(True, True), (True, False), (False, True)], ids=str)
def test_volumes_of_several_waves(kernels: Kernels, output_mask: tuple[bool, bool]) -> None:
    """Points and channels of three volumes that take more than 64 MiB of scratch memory together."""
    call = GRID.build(**_WAVES, output_mask=output_mask)
    inputs, every = _several_waves()
    expected = {name: every[name] for name, meta in GRID.infer(call).items() if meta is not None}
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
        memory = np.full(meta.nbytes + 128, 0xA5, np.uint8)
        start = -memory.ctypes.data % 64 + shift
        result = memory[start : start + meta.nbytes].view(np.float32).reshape(meta.shape)
        kernels.run(GRID, inputs, call.attrs, {"input_grad": result})
        assert (memory[:start] == 0xA5).all()
        assert (memory[start + meta.nbytes :] == 0xA5).all()
        found.append(result)
    assert_right(GRID, call, inputs, {"input_grad": found[0]})
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize("mode", [0, 1])
def test_the_deepest_volume(kernels: Kernels, mode: int) -> None:
    """Numbers of slices take memory however small a slice is: more than a million are for the reference."""
    deepest = 2**20
    call = GRID.build(n=1, c=2, d=deepest, h=1, w=1, od=5, oh=2, ow=3, interpolation_mode=mode)
    inputs = made(call, 9)
    assert_right(GRID, call, inputs, computed(kernels, GRID, call, inputs))
    deeper = GRID.build(n=1, c=2, d=deepest + 1, h=1, w=1, od=5, oh=2, ow=3, interpolation_mode=mode)
    with pytest.raises(KernelUnsupported):
        computed(kernels, GRID, deeper, made(deeper, 9))
