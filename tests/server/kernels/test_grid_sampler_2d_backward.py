"""The kernel of grid_sampler_2d_backward against the float64 reference: its bounds and its own kinks."""

from __future__ import annotations

import numpy as np
import pytest
from tests.derived import pairs, told
from tests.server.kernels.compare import (
    DTYPES,
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
from npugrad.edges import NOT_FINITE
from npugrad.meta import CallMeta
from npugrad_server.backends.cpu.kernels import Kernels

GRID = OPERATORS["grid_sampler_2d_backward"]
MODES = ((0, 1), (0, 1, 2), (False, True))
"""Interpolation, padding, aligned corners."""


def _inputs(call: CallMeta, seed: int) -> Inputs:
    return dict(GRID.make_inputs(call, np.random.default_rng(seed)))


def _lattice(call: CallMeta, seed: int) -> Array:
    """Coordinates of pixels, of edges, of the middles between them, inside and far outside."""
    rng = np.random.default_rng(seed)
    meta = call.tensor("grid")
    sizes = np.array(call.tensor("input").shape[:1:-1])
    steps = rng.integers(-4 * sizes - 4, 4 * sizes + 5, size=meta.shape) / 2
    divisor = np.maximum(sizes - 1, 1) if call.attrs["align_corners"] else sizes
    return np.asarray(2 * steps / divisor - 1).astype(meta.dtype.numpy)


def _turned(call: CallMeta, angle: float = 0.3) -> Array:
    """A turned image: points that lie next to each other are neighbours in the image too."""
    meta = call.tensor("grid")
    _, oh, ow, _ = meta.shape
    y, x = np.meshgrid(np.linspace(-1, 1, oh), np.linspace(-1, 1, ow), indexing="ij")
    points = np.stack([np.cos(angle) * x - np.sin(angle) * y, np.sin(angle) * x + np.cos(angle) * y], -1)
    return np.broadcast_to(points, meta.shape).astype(meta.dtype.numpy)


def test_errors_stay_below_half_a_millionth(kernels: Kernels) -> None:
    for c, mode, padding, aligned in pairs((1, 3, 4, 5, 8, 9, 16, 17, 20, 24, 33), *MODES):
        modes = dict(interpolation_mode=mode, padding_mode=padding, align_corners=aligned)
        call = GRID.build(n=2, c=c, h=37, w=40, oh=29, ow=31, **modes)
        with told((c, modes)):
            assert_errors_below(kernels, GRID, call, _inputs(call, c), 5e-7)


def test_no_pixel_is_counted_beyond_32_bits(kernels: Kernels) -> None:
    """Points on the last pixel that 32 bits can number, and points all over an image of several windows."""
    for mode in (0, 1):
        call = GRID.build(n=1, c=17, h=601, w=255, oh=3, ow=16, interpolation_mode=mode)
        inputs = _inputs(call, 12)
        given_array(inputs, "grid")[0, :, ::5, 0] = 16843008  # ((x + 1) * 255 - 1) / 2 is 2^31 - 1
        assert_right(GRID, call, inputs, computed(kernels, GRID, call, inputs))


# Sizes around every bound of the kernel: one block of channels or several, each number of lanes, tasks by
# image, by block or by band of rows, windows or none, with neighbours in order (turned) or not.
BOUNDS = [
    dict(n=1, c=1, h=1, w=1, oh=1, ow=1),
    dict(n=1, c=64, h=13, w=11, oh=9, ow=17),
    dict(n=1, c=3, h=90, w=70, oh=80, ow=61),
    dict(n=17, c=35, h=6, w=5, oh=7, ow=3),
    dict(n=2, c=20, h=150, w=133, oh=131, ow=127),
    dict(n=1, c=16, h=3, w=5003, oh=64, ow=67),
    dict(n=1, c=12, h=4999, w=2, oh=61, ow=64),
    dict(n=20, c=40, h=75, w=80, oh=20, ow=24),
    dict(n=1, c=3, h=200, w=120, oh=150, ow=141),
    dict(n=3, c=8, h=131, w=170, oh=90, ow=113),
    dict(n=1, c=40, h=260, w=90, oh=97, ow=121),
]


test_bits_do_not_depend_on_threads = bits_at_bounds(GRID, BOUNDS, lambda call, _: _inputs(call, 4))
test_bits_of_turned_images_do_not_either = bits_at_bounds(
    GRID, BOUNDS, lambda call, _: {**_inputs(call, 4), "grid": _turned(call)}
)


@pytest.mark.parametrize(
    ("c", "h", "w", "mode", "turned"),
    [
        (9, 601, 1031, 0, True),
        (17, 601, 1031, 1, True),
        (5, 901, 897, 0, False),
        pytest.param(9, 601, 1031, 1, False, marks=pytest.mark.deep),
        pytest.param(17, 601, 1031, 0, False, marks=pytest.mark.deep),
        pytest.param(5, 901, 897, 1, True, marks=pytest.mark.deep),
    ],
)
def test_an_image_too_large_for_one_window_is_cut(
    kernels: Kernels, c: int, h: int, w: int, mode: int, turned: bool
) -> None:
    """24 MiB of scratch memory hold 0.4 million pixels with 16 channels, 0.8 million with 8."""
    call = GRID.build(n=1, c=c, h=h, w=w, oh=53, ow=59, interpolation_mode=mode)
    inputs = _inputs(call, 5)
    if turned:
        inputs["grid"] = _turned(call)
    assert_right(GRID, call, inputs, computed(kernels, GRID, call, inputs))


def test_an_image_alone_is_cut_into_bands(kernels: Kernels) -> None:
    """Groups of points within a band, over the line between two, over several, and with no pixel at all."""
    masks = ((True, True), (True, False), (False, True))
    for mask, mode, padding, aligned, c in pairs(masks, *MODES, (3, 12)):
        modes = dict(interpolation_mode=mode, padding_mode=padding, align_corners=aligned)
        call = GRID.build(n=1, c=c, h=257, w=90, oh=140, ow=83, output_mask=mask, **modes)
        inputs = _inputs(call, 6)
        points = _turned(call)
        points[:, :9] = _lattice(call, 7)[:, :9]
        points[:, 20:23] = 40
        inputs["grid"] = points
        given_array(inputs, "grad_output")[0, 0, 60, 5] = np.inf
        with told((mask, modes, c)):
            assert_right(GRID, call, inputs, computed(kernels, GRID, call, inputs))


def test_values_that_are_not_finite_spread_as_in_the_reference(kernels: Kernels) -> None:
    """Also over zeros, which infinity makes no number of, and not over points outside."""
    other = {"grad_output": "input", "input": "grad_output"}
    for dtype, value, name, c in pairs(DTYPES, NOT_FINITE, [*other], (3, 20)):
        call = GRID.build(dtype=dtype, n=2, c=c, h=5, w=6, oh=6, ow=7)
        inputs = _inputs(call, 8)
        given_array(inputs, "grid")[:, ::2] = _lattice(call, 9)[:, ::2]
        given_array(inputs, other[name]).reshape(-1)[::3] = 0
        given_array(inputs, name).reshape(-1)[5::31] = value
        found, expected = computed(kernels, GRID, call, inputs), golden(GRID, call, inputs)
        with told((dtype, value, name, c)):
            assert not np.isfinite(expected["grid_grad"]).all()
            assert_not_finite_alike(found, expected)


def test_products_beyond_float32_are_computed_like_any(kernels: Kernels) -> None:
    for scale in (1e-18, 1e18, 3e30):
        call = GRID.build(n=1, c=18, h=5, w=6, oh=6, ow=7)
        inputs = _inputs(call, 10)
        for name, factor in (("input", scale), ("grad_output", 1e3 / scale)):
            inputs[name] = (given_array(inputs, name) * factor).astype(np.float32)
        with told(scale):
            assert_right(GRID, call, inputs, computed(kernels, GRID, call, inputs))
