"""The block helper: cutting covers everything once within the budget, reading and rounding lose nothing."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npugrad.references._blocks import flat_float64, spans, store, tiles

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@given(total=st.integers(0, 200), row_bytes=st.integers(0, 50), scratch_bytes=st.integers(0, 1000))
def test_spans_cover_every_row_once_and_fit(total: int, row_bytes: int, scratch_bytes: int) -> None:
    cut = list(spans(total, row_bytes, scratch_bytes))
    assert [row for span in cut for row in range(span.start, span.stop)] == list(range(total))
    assert all((s.stop - s.start) * row_bytes <= scratch_bytes or s.stop - s.start == 1 for s in cut)


def test_spans_are_as_long_as_the_budget_allows() -> None:
    assert list(spans(10, 3, 12)) == [slice(0, 4), slice(4, 8), slice(8, 10)]


@given(shape=SHAPES, element_bytes=st.integers(1, 9), scratch_bytes=st.integers(0, 400))
def test_tiles_are_consecutive_runs_that_fit(
    shape: tuple[int, ...], element_bytes: int, scratch_bytes: int
) -> None:
    flat = np.arange(math.prod(shape)).reshape(shape)
    cut = [flat[tile].reshape(-1) for tile in tiles(shape, element_bytes, scratch_bytes)]
    assert [element for run in cut for element in run] == list(range(flat.size))
    assert all(run.size * element_bytes <= scratch_bytes or run.size == 1 for run in cut)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_flat_float64_reads_c_order_whatever_the_strides(dtype: str) -> None:
    base = np.arange(60).reshape(3, 4, 5).astype(dtype)
    expanded = np.broadcast_to(base[:, :1], (2, 3, 4, 5))
    for array in (base, base.transpose(2, 0, 1), base[::-1, ::2, ::-3], expanded, np.array(base[1, 1, 1])):
        expected = np.array(array, dtype=np.float64, order="C").reshape(-1)
        stop = expected.size
        for start in {0, stop // 3, stop}:
            run = flat_float64(array, start, stop)
            np.testing.assert_array_equal(run, expected[start:stop])
            assert run.dtype == np.float64
            run[...] = -1  # a copy: the operand stays as it was
        np.testing.assert_array_equal(np.array(array, dtype=np.float64).reshape(-1), expected)


def _nearest_even_bfloat16(value: float, grid: npt.NDArray[np.float64]) -> float:
    """Round by exact arithmetic; grid holds the magnitudes of all finite bfloat16, then 2 to the 128th."""
    magnitude = Fraction(abs(value))
    above = min(int(np.searchsorted(grid, abs(value))), len(grid) - 1)
    below = max(above - 1, 0)
    to_below, to_above = magnitude - Fraction(grid[below]), Fraction(grid[above]) - magnitude
    goes_up = to_above < to_below or (to_above == to_below and above % 2 == 0)
    rounded = grid[above if goes_up else below]
    return math.copysign(math.inf if rounded >= 2.0**128 else rounded, value)


def test_store_rounds_to_bfloat16_only_once() -> None:
    magnitudes = np.arange(0x7F80, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)
    grid = np.append(magnitudes, 2.0**128)
    rng = np.random.default_rng(0)
    below = rng.integers(0, len(grid) - 1, 400)
    ties = grid[below] / 2 + grid[below + 1] / 2
    beside_ties = [ties * (1 + 2.0**-40), ties * (1 - 2.0**-40)]
    values = np.concatenate([ties, -ties, *beside_ties, rng.standard_normal(400), [1e300, -1e-300]])
    target = np.empty(values.shape, ml_dtypes.bfloat16)
    store(target, values)
    expected = [_nearest_even_bfloat16(float(value), grid) for value in values]
    np.testing.assert_array_equal(target.astype(np.float64), expected)
    with np.errstate(over="ignore"):
        twice = values.astype(np.float32).astype(ml_dtypes.bfloat16)
    assert (twice != target).any(), "the values are to include some that rounding twice gets wrong"


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_store_keeps_special_values_and_overflows_silently(dtype: str) -> None:
    values = np.array([[np.nan, np.inf, -np.inf], [0.0, -0.0, -1e39]])
    before = values.copy()
    buffer: npt.NDArray[Any] = np.zeros((2, 6), dtype)
    store(buffer[:, ::2], values)
    expected = values.copy()
    expected[1, 2] = -1e39 if dtype == "float64" else -np.inf
    np.testing.assert_array_equal(buffer[:, ::2].astype(np.float64), expected)
    assert np.signbit(buffer[1, 2].astype(np.float64))
    assert not buffer[:, 1::2].any()
    np.testing.assert_array_equal(values, before)


def test_store_of_many_values_equals_store_of_each() -> None:
    values = np.random.default_rng(1).standard_normal((3, 20_000))
    target = np.empty(values.shape, ml_dtypes.bfloat16)
    store(target, values)
    singles = np.empty(50, ml_dtypes.bfloat16)
    for index in range(50):
        store(singles[index : index + 1], values[2, 400 * index : 400 * index + 1])
    np.testing.assert_array_equal(target[2, ::400], singles)
