"""The tolerance formula accepts correct rounding and nothing that is really wrong."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npugrad import tolerance
from npugrad.dtypes import DATA_DTYPES, DType
from npugrad.references._blocks import store
from npugrad.tolerance import T, compare, wrong_elements

DTYPES = tuple(T)
SHAPE = (7, 5, 11)


def rounded(golden: npt.NDArray[np.float64], dtype: DType) -> npt.NDArray[Any]:
    result = np.empty(golden.shape, dtype.numpy)
    store(result, golden)
    return result


def normal(seed: int = 0, shape: tuple[int, ...] = SHAPE) -> npt.NDArray[np.float64]:
    return np.random.default_rng(seed).standard_normal(shape)


def corrupted(array: npt.NDArray[Any], value: float, index: tuple[int, ...] = (3, 2, 4)) -> npt.NDArray[Any]:
    copy = array.copy()
    copy[index] = value
    return copy


@pytest.mark.parametrize("dtype", DTYPES)
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-4, 4), outliers=st.booleans())
@settings(max_examples=30)
def test_correct_rounding_passes(dtype: DType, seed: int, exponent: int, outliers: bool) -> None:
    golden = normal(seed) * 10.0**exponent
    if outliers:
        golden[0] *= 1e-30
    found = compare(golden, rounded(golden, dtype))
    assert found.ok
    assert found.worst <= 1
    assert (found.mismatches, found.first_mismatch, found.size) == (0, None, golden.size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_numbers_are_those_of_the_formula(dtype: DType) -> None:
    """Checked against a second writing of the formula, with an error known exactly."""
    golden = rounded(normal(1), dtype).astype(np.float64)
    got = golden.copy()
    got[2, 3, 5] += 0.5
    got = rounded(got, dtype)
    error = float(got.astype(np.float64)[2, 3, 5] - golden[2, 3, 5])
    tiny = 2.0**-14 if dtype is DType.FLOAT16 else 2.0**-126
    rms, t = math.sqrt(float(np.mean(golden**2))), T[dtype]
    element = error / (10 * t * abs(golden[2, 3, 5]) + t * rms + tiny)
    mean = error / golden.size / (t * (float(np.mean(np.abs(golden))) + tiny))
    found = compare(golden, got)
    assert found.worst == pytest.approx(max(element, mean), rel=1e-12)
    assert found.max_relative_error == pytest.approx(error / float(np.abs(golden).max()), rel=1e-12)
    assert found.mean_relative_error == pytest.approx(
        error / golden.size / float(np.mean(np.abs(golden))), rel=1e-12
    )
    assert not found.ok
    assert found.first_mismatch == (2, 3, 5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_wrong_element_of_many_or_a_swapped_sign_fails(dtype: DType) -> None:
    golden = normal(2, (100, 100, 10))
    got = rounded(golden, dtype)
    found = compare(golden, corrupted(got, float(golden[3, 2, 4]) + 1.0))
    assert not found.ok
    assert (found.mismatches, found.first_mismatch) == (1, (3, 2, 4))
    assert "1 of 100000 elements off, the first at [3, 2, 4]" in str(found)
    golden, got = golden[:7], got[:7]
    assert not compare(golden, -got).ok
    assert not compare(golden, corrupted(got, -float(golden[3, 2, 4]))).ok


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_systematic_error_fails_by_the_mean_alone(dtype: DType) -> None:
    """Each element is inside its own bound of 10*T*|g|; all of them together are not."""
    golden = np.ones(SHAPE)
    t = T[dtype]
    found = compare(golden, rounded(golden * (1 + 4 * t), dtype))
    assert found.mismatches == 0
    assert not found.ok
    assert found.worst == pytest.approx(4, rel=0.01)
    assert found.mean_error == pytest.approx(4 * t, rel=0.01)
    assert found.mean_limit == pytest.approx(t, rel=1e-4)
    means = f"mean error {found.mean_error:.2e} (limit {t:.2e}), each element within its own limit"
    assert str(found).endswith(f", 4 of the tolerance, {means}")
    both = compare(golden, rounded(golden * (1 + 40 * t), dtype))
    assert f", {golden.size} of {golden.size} elements off, the first at [0, 0, 0], mean error " in str(both)
    assert str(both).endswith(f"(limit {t:.2e})")


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_must_be_so_on_both_sides_alike(dtype: DType) -> None:
    """It does not widen the tolerance."""
    golden = normal(4)
    got = rounded(golden, dtype)
    for wrong in (np.nan, np.inf, -np.inf):
        found = compare(golden, corrupted(got, wrong))
        assert not found.ok
        assert (found.worst, found.mismatches, found.first_mismatch) == (math.inf, 1, (3, 2, 4))
        assert not compare(corrupted(golden, wrong), got).ok
        for other in {np.nan, np.inf, -np.inf} - {wrong}:
            assert not compare(corrupted(golden, wrong), corrupted(got, other)).ok
    golden[0, 0, :3] = (np.nan, np.inf, -np.inf)
    got = rounded(golden, dtype)
    found = compare(golden, got)
    assert found.ok
    assert found.non_finite == 3
    assert math.isfinite(found.max_relative_error)
    assert not compare(golden, corrupted(got, float(golden[3, 2, 4]) + 1)).ok


def test_golden_values_are_cast_before_they_are_called_finite() -> None:
    """What overflows the dtype must be infinite; what rounds down to the largest number must not be."""
    golden = np.array([65519.0, 65520.0, -1e300, 1.0])
    assert compare(golden, np.array([65504, np.inf, -np.inf, 1], np.float16)).ok
    assert not compare(golden, np.array([65504, 65504, -np.inf, 1], np.float16)).ok
    assert not compare(golden, np.array([np.inf, np.inf, -np.inf, 1], np.float16)).ok
    # 1e300 must not count in rms: a wrong 1.0 would pass under its shadow.
    assert not compare(golden[2:], np.array([-np.inf, 2], np.float16)).ok


def test_bfloat16_is_rounded_once() -> None:
    """Just below the overflow limit of bfloat16, rounding through float32 would say infinite."""
    limit = (2 - 2.0**-7) * 2.0**127  # the largest number of bfloat16
    halfway = limit + 2.0**119
    below = math.nextafter(halfway, 0.0)
    assert compare(np.array([below]), np.array([limit], ml_dtypes.bfloat16)).ok
    assert compare(np.array([halfway]), np.array([np.inf], ml_dtypes.bfloat16)).ok


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_nothing_and_what_may_come_on_top(dtype: DType) -> None:
    zeros = np.zeros(SHAPE)
    assert compare(zeros, zeros.astype(dtype.numpy)).worst == 0
    found = compare(zeros, np.full(SHAPE, 1, dtype.numpy))
    assert (found.ok, found.max_relative_error) == (False, math.inf)
    nothing = compare(np.zeros((3, 0)), np.zeros((3, 0), dtype.numpy))
    assert (nothing.ok, nothing.size, nothing.max_relative_error) == (True, 0, 0)
    assert compare(np.array(2.0), np.array(2, dtype.numpy)).ok
    assert compare(np.array(2.0), np.array(3, dtype.numpy)).first_mismatch == ()
    # What comes on top is absolute, for elements and mean.
    got = np.full(SHAPE, 2.0**-4, dtype.numpy)
    assert not compare(zeros, got).ok
    assert compare(zeros, got, extra=2.0**-4).ok
    assert not compare(zeros, got, extra=2.0**-5).ok


def test_layout_and_blocks_do_not_change_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    golden = normal(7, (40, 30, 20))
    got = corrupted(rounded(golden, DType.FLOAT16), 3.0)
    whole = compare(golden, got)
    turned = compare(golden.transpose(2, 0, 1), got.transpose(2, 0, 1))
    assert (turned.mismatches, turned.first_mismatch) == (whole.mismatches, (4, 3, 2))
    assert turned.worst == pytest.approx(whole.worst)
    monkeypatch.setattr(tolerance, "_BLOCK_BYTES", 80 * 1000)
    blocked = compare(golden, got)
    assert blocked.first_mismatch == whole.first_mismatch
    assert blocked.worst == pytest.approx(whole.worst)
    assert blocked.max_relative_error == whole.max_relative_error


def test_broadcast_golden_needs_no_copy_of_its_own() -> None:
    golden = np.broadcast_to(np.float64(0.5), (1000, 1000))
    assert compare(golden, np.full((1000, 1000), 0.5, np.float32)).ok


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match=r"found shape \[3\]; expected \[2\]"):
        compare(np.zeros(2), np.zeros(3, np.float32))
    with pytest.raises(
        ValueError, match="found dtype complex64; expected float32, float16, bfloat16, float64"
    ):
        compare(np.zeros(2), np.zeros(2, np.complex64))


EXACT = tuple(dtype for dtype in DATA_DTYPES if dtype not in T)


@pytest.mark.parametrize("dtype", EXACT)
def test_integers_and_bools_are_right_when_they_are_equal(dtype: DType) -> None:
    kind = dtype.numpy
    ends = (np.iinfo(kind).min, np.iinfo(kind).max) if kind.kind in "iu" else (False, True)
    golden = np.resize(np.array(ends, kind), (7, 5, 2))
    assert compare(golden, golden.copy(), extra=9.0).ok
    assert compare(golden[:0], golden[:0]).ok
    # One less, which float64 does not tell from the largest of 64 bits.
    wrong = corrupted(golden, ends[1] - 1 if kind.kind in "iu" else False, (3, 2, 1))
    found = compare(golden, wrong, extra=9.0)
    assert (found.ok, found.mismatches, found.first_mismatch, found.worst) == (False, 1, (3, 2, 1), math.inf)
    assert "1 of 70 elements off, the first at [3, 2, 1]" in str(found)
    assert wrong_elements(golden, wrong, 5).tolist() == [35]
    assert found.max_absolute_error == (1.0 if kind.itemsize < 8 else 0.0)
    turned = compare(golden.transpose(2, 0, 1), wrong.transpose(2, 0, 1))
    assert turned.first_mismatch == (1, 3, 2)


@pytest.mark.filterwarnings("error")
def test_huge_values_allow_no_other_element_more_than_their_share() -> None:
    """The squares of values above 1e154 are infinite in float64; what is allowed must not be."""
    golden = np.zeros(1000)
    golden[0] = 1e200
    assert compare(golden, golden.copy()).ok
    wrong = golden.copy()
    wrong[1:] = 1e190
    found = compare(golden, wrong)
    assert (found.ok, found.mismatches) == (False, 999)
