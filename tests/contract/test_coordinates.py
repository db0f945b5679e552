"""The rules of coordinates: against exact arithmetic rounded as they say, and against PyTorch's kernels."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.derived import random_cases
from tests.proofs.coordinates import CAPABILITY, prove, usable_levels

from npugrad import OPERATORS
from npugrad.coordinates import (
    ATTENTION_RULES,
    GRID_2D_RULES,
    GRID_3D_RULES,
    CoordinateRule,
    GridAxis,
    attention_pixels,
)
from npugrad.operator import OpRecord

FLOATS = st.floats(-40, 40, width=32) | st.floats(width=32, allow_nan=False, allow_infinity=False)
SAMPLING = [record for record in OPERATORS.values() if record.references_by_rule]
HALF = Fraction(1, 2)


def fl(value: Fraction | int) -> Fraction:
    """The float32 next to an exact number, ties to even; numbers are small enough."""
    value = Fraction(value)
    if not value:
        return value
    exponent = max(-149, math.floor(math.log2(abs(value))) - 23)
    step = Fraction(2) ** exponent
    if abs(value) >= step * 2**24:
        step *= 2
    elif abs(value) < step * 2**23 and exponent > -149:
        step /= 2
    return round(value / step) * step


def exact_position(x: Fraction, axis: GridAxis, rule: CoordinateRule) -> Fraction:
    """A position before padding, by the table of the module."""
    u, size = fl(x + 1), axis.size
    if axis.axes == 2 and rule in (CoordinateRule.TORCH, CoordinateRule.TORCH_UNFUSED):
        if axis.align_corners:
            return fl(u * fl(HALF * (size - 1)))
        scaled = u * size / 2
        return fl((scaled if rule is CoordinateRule.TORCH else fl(scaled)) - HALF)
    if axis.align_corners:
        return fl(fl(u / 2) * (size - 1))
    return fl(fl(fl(u * size) - 1) / 2)


def exact_fold(position: Fraction, axis: GridAxis, rule: CoordinateRule) -> tuple[Fraction, int]:
    """The position after reflection, and the factor on its slope, by the table of the module."""
    low = Fraction(0) if axis.align_corners else -HALF
    span = Fraction(axis.size - 1 if axis.align_corners else axis.size)
    if not span:
        return Fraction(0), 0
    offset = fl(position - low)
    distance = abs(offset)
    if axis.axes == 2 and rule in (CoordinateRule.TORCH, CoordinateRule.TORCH_UNFUSED):
        taken = math.floor(fl(distance / (2 * span))) * 2 * span
        rest = fl(distance - (taken if rule is CoordinateRule.TORCH else fl(taken)))
        back = fl(2 * span - rest)
        is_backward = rest > back
    elif rule is CoordinateRule.VENDOR_A2:
        folds = min(math.floor(fl(distance * fl(1 / span))), 2**31)
        rest = fl(distance - fl(folds * span))
        back, is_backward = fl(span - rest), folds % 2 == 1
    else:
        rest = distance % span
        back, is_backward = fl(span - rest), math.floor(fl(distance / span)) % 2 == 1
    return fl((back if is_backward else rest) + low), -1 if is_backward ^ (offset < 0) else 1


def exactly(x: float, axis: GridAxis, rule: CoordinateRule) -> tuple[float, float]:
    """Position and slope of a finite coordinate."""
    slope = Fraction(axis.size - 1 if axis.align_corners else axis.size) / 2
    position = exact_position(Fraction(x), axis, rule)
    if axis.padding_mode == 2:
        position, factor = exact_fold(position, axis, rule)
        slope *= factor
    if axis.padding_mode and not 0 < position < axis.size - 1:
        position, slope = Fraction(0 if position <= 0 else axis.size - 1), Fraction(0)
    return (float(position) if abs(position) < 2**31 else -100.0), float(slope)


@st.composite
def axes_with_rules(draw: st.DrawFn) -> tuple[GridAxis, CoordinateRule]:
    axes = draw(st.sampled_from([2, 3]))
    axis = GridAxis(draw(st.integers(1, 3000)), draw(st.integers(0, 2)), draw(st.booleans()), axes)
    rules = [rule for rule in axis.rules if rule is not CoordinateRule.FLOAT64]
    return axis, draw(st.sampled_from(rules))


@st.composite
def near_edges(draw: st.DrawFn, size: int) -> float:
    """A coordinate few roundings from a pixel's centre or edge."""
    half_pixel = draw(st.integers(-6 * size, 8 * size)) / 2
    x = np.float32(
        draw(st.sampled_from([(2 * half_pixel + 1) / size, 2 * half_pixel / max(1, size - 1)])) - 1
    )
    return float(x + draw(st.integers(-3, 3)) * np.spacing(x))


@random_cases(400)
@given(st.data())
def test_grid_rules_round_where_they_say(data: st.DataObject) -> None:
    axis, rule = data.draw(axes_with_rules())
    values = data.draw(st.lists(FLOATS.filter(lambda x: abs(x) < 1e30) | near_edges(axis.size), min_size=1))
    positions, slopes = axis.locate(np.array(values, np.float32), rule)
    expected = [exactly(x, axis, rule) for x in values]
    assert list(zip(positions.tolist(), slopes.tolist(), strict=True)) == expected


@random_cases(200)
@given(st.lists(FLOATS.filter(lambda x: abs(x) < 1e30), min_size=1), st.integers(1, 2**25))
def test_attention_rounds_the_product_and_the_difference(values: list[float], size: int) -> None:
    found = attention_pixels(np.array(values, np.float32), np.array(size))
    assert found.tolist() == [float(fl(fl(Fraction(x) * fl(size)) - HALF)) for x in values]


def test_pytorch_chooses_the_same_pixels(capsys: pytest.CaptureFixture[str]) -> None:
    """A short form of `make prove-coordinates`, by the kernels that PyTorch takes here."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    is_same = prove(torch.backends.cpu.get_cpu_capability().lower(), 25_000)
    torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert is_same, printed
    assert printed.count("25000 points, different: 0 of ") == 13


@pytest.mark.deep
def test_pytorch_chooses_the_same_pixels_by_its_other_kernels() -> None:
    torch = pytest.importorskip("torch")
    for level in {*usable_levels()} - {torch.backends.cpu.get_cpu_capability().lower()}:
        command = [sys.executable, "-m", "tests.proofs.coordinates", "--points", "25000", "--level", level]
        env = {**os.environ, CAPABILITY: level}
        done = subprocess.run(command, env=env, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("25000 points, different: 0 of ") == 13


@pytest.mark.parametrize("axes", [2, 3])
def test_rules_differ_on_identity_grids(axes: int) -> None:
    """Else nothing here would tell one from another; float32 rules differ among each other, too."""
    pixels: dict[CoordinateRule, list[Any]] = {}
    for size in range(2, 200):
        centres = ((2 * np.arange(size) + 1) / size - 1).astype(np.float32)
        axis = GridAxis(size, 0, False, axes)
        for rule in axis.rules:
            pixels.setdefault(rule, []).extend(np.floor(axis.locate(centres, rule)[0]))
    differing = {
        rule: int((np.array(found) != pixels[CoordinateRule.TORCH]).sum()) for rule, found in pixels.items()
    }
    assert differing[CoordinateRule.FLOAT64] > 1000
    if axes == 2:
        assert 0 < differing[CoordinateRule.TORCH_UNFUSED] < 100
        assert 0 < differing[CoordinateRule.VENDOR_A2] < 100


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_coordinates_of_16_bits_are_widened_first(dtype: npt.DTypeLike) -> None:
    narrow = np.random.default_rng(0).uniform(-2, 2, 999).astype(dtype)
    wide = narrow.astype(np.float32)
    axis = GridAxis(37, 2, False, 2)
    for rule in GRID_2D_RULES:
        np.testing.assert_array_equal(axis.locate(narrow, rule), axis.locate(wide, rule))
    for rule in ATTENTION_RULES:
        found, expected = (attention_pixels(x, np.array(37), rule) for x in (narrow, wide))
        np.testing.assert_array_equal(found, expected)


def test_coordinates_in_float64_stay_so() -> None:
    x = np.random.default_rng(0).uniform(-2, 2, 999)
    axis = GridAxis(37, 1, True, 3)
    for rule in GRID_3D_RULES:
        np.testing.assert_array_equal(axis.locate(x, rule), axis.locate(x, CoordinateRule.FLOAT64))
    pixels = attention_pixels(x, np.array(37), CoordinateRule.MMCV)
    np.testing.assert_array_equal(pixels, x * 37 - 0.5)


def test_a_rule_of_another_operator_is_refused() -> None:
    with pytest.raises(ValueError, match="found coordinate rule mmcv; expected one of torch, torch-unfused"):
        GridAxis(4, 0, False, 2).locate(np.zeros(3), CoordinateRule.MMCV)
    with pytest.raises(ValueError, match="found coordinate rule torch; expected one of mmcv, float64"):
        attention_pixels(np.zeros(3), np.array(4), CoordinateRule.TORCH)


@pytest.mark.parametrize("record", SAMPLING, ids=lambda record: record.name)
def test_the_reference_is_that_of_the_first_rule(record: OpRecord) -> None:
    """And each rule of the record gives other bits, of points anywhere."""
    call = record.build()
    inputs = record.make_inputs(call, np.random.default_rng(4))
    found = []
    for reference in (record.reference, *record.references_by_rule.values()):
        outputs = {
            n: np.full(meta.shape, np.nan) for n, meta in record.infer(call).items() if meta is not None
        }
        reference(inputs, call.attrs, outputs)
        found.append({name: array.tobytes() for name, array in outputs.items()})
    assert found[0] == found[1]
    assert found[-1] != found[0]
    assert [*record.references_by_rule][-1] is CoordinateRule.FLOAT64
