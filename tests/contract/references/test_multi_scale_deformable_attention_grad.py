"""The MSDA reference against torch autograd and a plain loop over Python integers; hostile levels, kinks."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.contract.references.against import against, assert_close, assert_same_bits, operand, run_like
from tests.derived import random_cases
from tests.operators import UNCHECKED_MSDA as RECORD

Array = npt.NDArray[Any]
Inputs = dict[str, Array | None]
Levels = list[tuple[int, int]]

OUTPUTS = {"grad_value": "value", "grad_location": "location", "grad_attn_weight": "attn_weight"}
INT64 = np.iinfo(np.int64)


def run(inputs: Inputs) -> dict[str, Array]:
    return run_like(RECORD, inputs, OUTPUTS)


def make(
    levels: Levels,
    *,
    bs: int = 1,
    nq: int = 3,
    nh: int = 2,
    ch: int = 8,
    points: int = 2,
    spare_keys: int = 0,
    seed: int = 0,
) -> Inputs:
    """Draw a call with its levels one behind the other, `spare_keys` before each, and away from kinks."""
    rng = np.random.default_rng(seed)
    sizes = [height * width + spare_keys for height, width in levels]
    starts = np.cumsum([spare_keys, *sizes[:-1]])
    location = rng.uniform(-0.4, 1.4, size=(bs, nq, nh, len(levels), points, 2))
    per_axis = np.array([(width, height) for height, width in levels], dtype=float)[:, None]
    pixel = location * per_axis - 0.5
    fraction = np.clip(pixel - np.floor(pixel), 1e-3, 1 - 1e-3)
    location = (np.floor(pixel) + fraction + 0.5) / per_axis
    return {
        "value": rng.standard_normal((bs, sum(sizes), nh, ch)),
        "spatial_shape": np.array(levels),
        "level_start_index": starts,
        "location": location,
        "attn_weight": rng.standard_normal((bs, nq, nh, len(levels), points)),
        "grad_output": rng.standard_normal((bs, nq, nh * ch)),
    }


def loop(inputs: Inputs, attrs: Any = None) -> dict[str, Array]:
    """Write the documented rule down with one sample at a time and integers that cannot overflow."""
    value, location, weight = (operand(inputs, name) for name in ("value", "location", "attn_weight"))
    keys = value.shape[1]
    grad_output = operand(inputs, "grad_output").reshape(*weight.shape[:3], value.shape[3])
    grads = {name: np.zeros(operand(inputs, source).shape) for name, source in OUTPUTS.items()}
    for index in np.ndindex(weight.shape):
        b, q, m, level, _ = index
        height, width = (int(size) for size in operand(inputs, "spatial_shape")[level])
        start = int(operand(inputs, "level_start_index")[level])
        a, go = float(weight[index]), grad_output[b, q, m]
        w = float(location[index][0]) * float(width) - 0.5
        h = float(location[index][1]) * float(height) - 0.5
        if not (h > -1 and w > -1 and h < height and w < width):
            continue
        h0, w0 = math.floor(h), math.floor(w)
        lh, lw = h - h0, w - w0
        hh, hw = 1 - lh, 1 - lw
        val, by_h, by_w = np.zeros((3, value.shape[3]))
        for y, x, share, to_h, to_w in (
            (h0, w0, hh * hw, -hw, -hh),
            (h0, w0 + 1, hh * lw, -lw, hh),
            (h0 + 1, w0, lh * hw, hw, -lh),
            (h0 + 1, w0 + 1, lh * lw, lw, lh),
        ):
            key = start + y * width + x
            if not (0 <= y < height and 0 <= x < width and 0 <= key < keys):
                continue
            v = value[b, key, m]
            grads["grad_value"][b, key, m] += share * a * go
            val, by_h, by_w = val + share * v, by_h + to_h * v, by_w + to_w * v
        grads["grad_attn_weight"][index] = np.sum(go * val)
        grads["grad_location"][index] = (
            float(width) * a * np.sum(go * by_w),
            float(height) * a * np.sum(go * by_h),
        )
    return grads


def by_autograd(inputs: Inputs, attrs: Any = None) -> dict[str, Array]:
    """Differentiate the composition of grid_sample that Deformable-DETR checks its own kernel with."""
    torch = pytest.importorskip("torch")
    names = ("value", "location", "attn_weight", "grad_output")
    *leaves, gradient = (torch.from_numpy(np.array(inputs[name], np.float64)) for name in names)
    value, location, weight = (leaf.requires_grad_() for leaf in leaves)
    bs, _, nh, ch = value.shape
    _, nq, _, count, points, _ = location.shape
    sampled = []
    levels = [level for level in range(count) if operand(inputs, "spatial_shape")[level].all()]
    weights = weight[..., levels, :].transpose(1, 2).reshape(bs * nh, 1, nq, len(levels) * points)
    for level in levels:
        height, width = operand(inputs, "spatial_shape")[level].tolist()
        start = int(operand(inputs, "level_start_index")[level])
        image = (
            value[:, start : start + height * width].permute(0, 2, 3, 1).reshape(bs * nh, ch, height, width)
        )
        grid = (2 * location[:, :, :, level] - 1).transpose(1, 2).reshape(bs * nh, nq, points, 2)
        sampled.append(torch.nn.functional.grid_sample(image, grid, align_corners=False))
    output = (torch.cat(sampled, dim=-1) * weights).sum(-1).reshape(bs, nh * ch, nq).transpose(1, 2)
    grads = torch.autograd.grad(output, leaves, gradient.reshape(bs, nq, nh * ch))
    return {name: grad.numpy() for name, grad in zip(OUTPUTS, grads, strict=True)}


TestAgainstTorch = pytest.mark.torch(against(RECORD, by_autograd, count=250))


@pytest.mark.torch
@pytest.mark.parametrize(
    "levels", [[(5, 3), (2, 9)], [(1, 7)], [(6, 1), (2, 3)], [(8, 11), (4, 6), (2, 3), (1, 2)]], ids=str
)
def test_levels_with_keys_of_no_level_between_them(levels: Levels) -> None:
    """The plain loop is right, too."""
    inputs = make(levels, bs=2, nq=7, spare_keys=1, points=3)
    expected = by_autograd(inputs)
    assert_close(run(inputs), expected)
    assert_close(loop(inputs), expected)


def at(w: float, h: float, size: int = 4) -> dict[str, Array]:
    """Sample a size x size level of values 1, 2, 3, ... at pixel (w, h), weight and gradient 1."""
    return run(one_key(size, size, 0, w, h, keys=size * size))


@pytest.mark.parametrize(
    ("w", "h", "weight", "location", "keys"),
    [
        (1, 2, 10, [4 * 1, 4 * 4], [9]),  # value[2, 1]; the slope is that to the right and below
        (3, 3, 16, [-4 * 16, -4 * 16], [15]),  # on the last pixel it falls to zero outside
        (-0.75, 3.5, 13 * 0.25 * 0.5, [4 * 13 * 0.5, -4 * 13 * 0.25], [12]),  # just inside the rim
        *((w, h, 0, [0, 0], []) for w, h in ((-1, 1), (1, -1), (-1, -1), (4, 1), (1, 4), (-1.5, 0), (0, 9))),
    ],
    ids=str,
)
def test_on_pixels_and_at_the_rim(
    w: float, h: float, weight: float, location: list[float], keys: list[int]
) -> None:
    """Where the documented rule and grid_sample may differ."""
    grads = at(w, h)
    assert grads["grad_attn_weight"].item() == weight
    assert grads["grad_location"].ravel().tolist() == location
    assert np.flatnonzero(grads["grad_value"]).tolist() == keys


def one_key(width: int, height: int, start: int, w: float, h: float, keys: int = 3) -> Inputs:
    """Make a call of one sample near pixel (w, h) of a level that claims any size and start."""
    return {
        "value": np.arange(1.0, keys + 1).reshape(1, keys, 1, 1),
        "spatial_shape": np.array([[height, width]], dtype=np.int64),
        "level_start_index": np.array([start], dtype=np.int64),
        "location": np.array([(w + 0.5) / float(width), (h + 0.5) / float(height)]).reshape(1, 1, 1, 1, 1, 2),
        "attn_weight": np.ones((1, 1, 1, 1, 1)),
        "grad_output": np.ones((1, 1, 1)),
    }


EXTREMES = [0, 1, 2, 3, -1, -2, INT64.min, INT64.min + 1, INT64.max, INT64.max - 1]
EXTREMES += [2**31 - 1, 2**31, 2**32, -(2**31), 2**53 + 1, 2**62, 2**62 + 1, -(2**62), 3 * 2**61]
SIZES = st.one_of(st.integers(-2, 6), st.sampled_from(EXTREMES), st.integers(INT64.min, INT64.max))
PLACES = st.one_of(
    st.floats(-0.4, 1.4),
    st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0, -0.25, 1e-18, 1e-9, 3e8, 1e300, -1e300]),
    st.sampled_from([math.nan, math.inf, -math.inf]),
)


@random_cases(150)
@given(
    levels=st.lists(st.tuples(SIZES, SIZES, SIZES), min_size=1, max_size=3),
    places=st.lists(PLACES, min_size=12, max_size=12),
    data=st.lists(st.sampled_from([1.0, -2.5, 0.0, 3.0, math.nan, math.inf]), min_size=5, max_size=5),
    keys=st.integers(1, 7),
)
def test_hostile_levels_equal_the_plain_loop(
    levels: list[tuple[int, int, int]], places: list[float], data: list[float], keys: int
) -> None:
    """Neither raise nor warn (warnings are errors here), and touch the keys the exact rule names."""
    shape = (1, 2, 1, len(levels), 2)
    inputs: Inputs = {
        "value": np.resize([*data, 0.5, 2.0], (1, keys, 1, 2)),
        "spatial_shape": np.array([level[:2] for level in levels], dtype=np.int64),
        "level_start_index": np.array([level[2] for level in levels], dtype=np.int64),
        "location": np.resize(places, (*shape, 2)),
        "attn_weight": np.resize([0.5, 1.5, -1.0, data[0]], shape),
        "grad_output": np.resize([1.0, 0.25, data[1], -3.0], (1, 2, 2)),
    }
    with np.errstate(all="ignore"):
        expected = loop(inputs)
    assert_close(run(inputs), expected)


@pytest.mark.parametrize(
    ("level", "place", "grad_value"),
    [
        # Row 4 of width 2**62 starts at 2**64, which is 0 modulo 2**64.
        pytest.param((2**62, 8, 0), (-0.5, 4), [0, 0, 0], id="wraps into range"),
        pytest.param((2**62, 8, 1 - 2**62), (-0.5, 1), [0, 0.5, 0], id="in range only by its start"),
        pytest.param((4, 4, INT64.max), (1.5, 1.5), [0, 0, 0], id="largest start"),
        # The fourth corner would be key 4 of 3.
        pytest.param((2, 2, 1), (0.5, 0.5), [0, 0.25, 0.25], id="corners among the keys"),
    ],
)
def test_only_corners_among_the_keys_get_a_gradient(
    level: tuple[int, int, int], place: tuple[float, float], grad_value: list[float]
) -> None:
    grads = run(one_key(*level, *place))
    assert grads["grad_value"].ravel().tolist() == grad_value
    assert grads["grad_attn_weight"].item() == sum(np.arange(1, 4) * grad_value)


def test_a_location_nowhere_contributes_nothing() -> None:
    for place, axis in itertools.product((math.nan, math.inf, -math.inf, 1e300, -1e300), (0, 1)):
        inputs = make([(5, 3)], nq=2)
        operand(inputs, "location")[0, 1, ..., axis] = place
        operand(inputs, "grad_output")[0, 1] = math.nan  # not even a NaN gets past it
        operand(inputs, "attn_weight")[0, 1] = math.inf
        grads = run(inputs)
        assert not np.any(grads["grad_location"][0, 1])
        assert not np.any(grads["grad_attn_weight"][0, 1])
        assert np.all(np.isfinite(grads["grad_value"]))


def test_nan_in_keys_that_are_not_read_stays_there() -> None:
    inputs = make([(5, 3), (4, 4)], spare_keys=2, nq=20)
    expected = run(inputs)
    operand(inputs, "value")[:, [0, 1, 17, 18]] = math.nan  # the spare keys
    assert_same_bits(run(inputs), expected)
