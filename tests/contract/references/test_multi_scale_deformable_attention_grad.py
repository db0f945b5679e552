"""The MSDA reference against torch autograd and a plain loop over Python integers; hostile levels, kinks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract.references.against import against, assert_close, assert_same_bits, operand, run_like
from tests.operators import MSDA as RECORD

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


class TestPlainLoop:
    @pytest.mark.torch
    def test_it_is_right_too(self) -> None:
        inputs = make([(5, 3), (2, 9)], bs=2, nq=4)
        assert_close(loop(inputs), by_autograd(inputs))

    @pytest.mark.torch
    @pytest.mark.parametrize(
        "levels", [[(1, 7)], [(6, 1), (2, 3)], [(8, 11), (4, 6), (2, 3), (1, 2)]], ids=str
    )
    def test_levels_with_keys_of_no_level_between_them(self, levels: Levels) -> None:
        inputs = make(levels, bs=2, nq=7, spare_keys=1, points=3)
        assert_close(run(inputs), by_autograd(inputs))

    def test_location_is_x_then_y(self) -> None:
        inputs = make([(2, 9)], nq=4)
        swapped = {**inputs, "location": operand(inputs, "location")[..., ::-1]}
        assert not np.allclose(run(inputs)["grad_value"], run(swapped)["grad_value"])


class TestKinks:
    """Locations on whole pixels and at the rim, where the documented rule and grid_sample may differ."""

    @staticmethod
    def at(w: float, h: float, size: int = 4) -> dict[str, Array]:
        """Sample a size x size level of values 1, 2, 3, ... at pixel (w, h), weight and gradient 1."""
        value = np.arange(1.0, size * size + 1).reshape(1, -1, 1, 1)
        location = (np.array([w, h]) + 0.5) / size
        return run(
            {
                "value": value,
                "spatial_shape": np.array([[size, size]]),
                "level_start_index": np.array([0]),
                "location": location.reshape(1, 1, 1, 1, 1, 2),
                "attn_weight": np.ones((1, 1, 1, 1, 1)),
                "grad_output": np.ones((1, 1, 1)),
            }
        )

    def test_on_a_pixel_the_slope_is_that_to_the_right_and_below(self) -> None:
        grads = self.at(1, 2)
        assert grads["grad_attn_weight"].item() == 10  # value[2, 1]
        assert grads["grad_location"].ravel().tolist() == [4 * 1, 4 * 4]
        assert np.flatnonzero(grads["grad_value"]).tolist() == [9]

    def test_on_the_last_pixel_the_slope_falls_to_zero_outside(self) -> None:
        grads = self.at(3, 3)
        assert grads["grad_attn_weight"].item() == 16
        assert grads["grad_location"].ravel().tolist() == [-4 * 16, -4 * 16]

    @pytest.mark.parametrize(
        ("w", "h"), [(-1, 1), (1, -1), (-1, -1), (4, 1), (1, 4), (-1.5, 0), (0, 9)], ids=lambda v: f"{v:g}"
    )
    def test_at_minus_one_at_the_size_and_beyond_nothing_contributes(self, w: float, h: float) -> None:
        assert not any(np.any(grad) for grad in self.at(w, h).values())

    def test_just_inside_the_rim_contributes(self) -> None:
        grads = self.at(-0.75, 3.5)
        assert grads["grad_attn_weight"].item() == 13 * 0.25 * 0.5
        assert grads["grad_location"].ravel().tolist() == [4 * 13 * 0.5, -4 * 13 * 0.25]
        assert np.flatnonzero(grads["grad_value"]).tolist() == [12]


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


class TestHostileLevels:
    @settings(max_examples=150, deadline=None)
    @given(
        levels=st.lists(st.tuples(SIZES, SIZES, SIZES), min_size=1, max_size=3),
        places=st.lists(PLACES, min_size=12, max_size=12),
        data=st.lists(st.sampled_from([1.0, -2.5, 0.0, 3.0, math.nan, math.inf]), min_size=5, max_size=5),
        keys=st.integers(1, 7),
    )
    def test_equal_the_plain_loop(
        self, levels: list[tuple[int, int, int]], places: list[float], data: list[float], keys: int
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

    def test_an_index_that_wraps_into_range_is_dropped(self) -> None:
        # Row 4 of width 2**62 starts at 2**64, which is 0 modulo 2**64.
        inputs = one_key(width=2**62, height=8, start=0, w=-0.5, h=4)
        assert not np.any(run(inputs)["grad_value"])
        assert not np.any(run(inputs)["grad_attn_weight"])

    def test_an_index_that_comes_into_range_only_by_its_start_is_kept(self) -> None:
        inputs = one_key(width=2**62, height=8, start=1 - 2**62, w=-0.5, h=1)
        assert run(inputs)["grad_value"].ravel().tolist() == [0, 0.5, 0]

    def test_the_largest_start_is_dropped(self) -> None:
        inputs = one_key(width=4, height=4, start=INT64.max, w=1.5, h=1.5)
        assert not np.any(run(inputs)["grad_value"])

    def test_only_the_corners_among_the_keys_get_a_gradient(self) -> None:
        inputs = one_key(width=2, height=2, start=1, w=0.5, h=0.5)  # the fourth corner would be key 4 of 3
        grads = run(inputs)
        assert grads["grad_value"].ravel().tolist() == [0, 0.25, 0.25]
        assert grads["grad_attn_weight"].item() == (2 + 3) * 0.25

    @pytest.mark.parametrize("dtype", [np.int32, np.int64], ids=["int32", "int64"])
    def test_index_dtypes(self, dtype: npt.DTypeLike) -> None:
        inputs = make([(5, 3), (2, 9)])
        indices = {
            name: operand(inputs, name).astype(dtype) for name in ("spatial_shape", "level_start_index")
        }
        assert_same_bits(run({**inputs, **indices}), run(inputs))


class TestNonFinite:
    @pytest.mark.parametrize("place", [math.nan, math.inf, -math.inf, 1e300, -1e300], ids=str)
    @pytest.mark.parametrize("axis", [0, 1], ids=["x", "y"])
    def test_a_location_nowhere_contributes_nothing(self, place: float, axis: int) -> None:
        inputs = make([(5, 3)], nq=2)
        operand(inputs, "location")[0, 1, ..., axis] = place
        operand(inputs, "grad_output")[0, 1] = math.nan  # not even a NaN gets past it
        operand(inputs, "attn_weight")[0, 1] = math.inf
        grads = run(inputs)
        assert not np.any(grads["grad_location"][0, 1])
        assert not np.any(grads["grad_attn_weight"][0, 1])
        assert np.all(np.isfinite(grads["grad_value"]))

    def test_nan_in_keys_that_are_not_read_stays_there(self) -> None:
        inputs = make([(5, 3), (4, 4)], spare_keys=2, nq=20)
        expected = run(inputs)
        operand(inputs, "value")[:, [0, 1, 17, 18]] = math.nan  # the spare keys
        assert_same_bits(run(inputs), expected)

    def test_nan_reaches_what_reads_it_and_no_more(self) -> None:
        inputs = make([(4, 4)], nq=30, nh=1, points=1, seed=5)
        operand(inputs, "value")[0, 5] = math.nan
        grads, expected = run(inputs), loop(inputs)
        assert np.isnan(grads["grad_attn_weight"]).any()
        assert not np.isnan(grads["grad_attn_weight"]).all()
        assert np.isfinite(grads["grad_value"]).all()
        assert_close(grads, expected)


LEVELS: Levels = [(8, 11), (4, 6), (2, 3)]


class TestLayouts:
    def test_both_ranks_of_grad_output_are_one(self) -> None:
        inputs = make(LEVELS, bs=2, nh=3)
        rank4 = operand(inputs, "grad_output").reshape(2, 3, 3, 8)
        assert_same_bits(run({**inputs, "grad_output": rank4}), run(inputs))
        strided = np.ascontiguousarray(rank4.T).T
        assert_same_bits(run({**inputs, "grad_output": strided}), run(inputs))
