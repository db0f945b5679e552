"""float16 and bfloat16 to float32 and back: every pattern, every variant."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from npugrad.dtypes import dtype_from_name
from npugrad_server.backends.cpu.kernels import Kernels

NARROW = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
F32 = np.dtype(np.float32)


def converted(kernels: Kernels, source: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    target = np.empty(source.shape, dtype)
    numbers = [dtype_from_name(d).acl for d in (source.dtype, dtype)]
    status = kernels.functions.npugrad_probe_convert(
        source.ctypes.data, numbers[0], target.ctypes.data, numbers[1], source.size
    )
    assert status == 0
    return target


def every_pattern(dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    return np.arange(65536, dtype=np.uint16).view(dtype)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_every_pattern_widens_exactly(kernels: Kernels, dtype: np.dtype[Any]) -> None:
    source = every_pattern(dtype)
    found, expected = converted(kernels, source, F32), source.astype(np.float32)
    nan = np.isnan(expected)
    assert np.array_equal(nan, np.isnan(found))
    assert np.array_equal(found[~nan].view(np.uint32), expected[~nan].view(np.uint32))
    assert np.array_equal(np.signbit(found), np.signbit(expected))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_every_pattern_comes_back_and_a_nan_stays_one_with_its_payload(
    kernels: Kernels, dtype: np.dtype[Any]
) -> None:
    source = every_pattern(dtype)
    back = converted(kernels, converted(kernels, source, F32), dtype).view(np.uint16)
    quiet = np.where(np.isnan(source.astype(np.float32)), 0x200 if dtype == np.float16 else 0x40, 0)
    if dtype != np.float16:
        # A widened bfloat16 is the same NaN, so the quiet bit comes with the way back.
        assert np.isnan(back.view(dtype).astype(np.float32)).sum() == (quiet > 0).sum()
    assert np.array_equal(back, source.view(np.uint16) | quiet.astype(np.uint16))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrowing_rounds_to_nearest_even(kernels: Kernels, dtype: np.dtype[Any]) -> None:
    """Every number of the type, the middle to the next one, and the floats beside that middle."""
    wide = np.sort(every_pattern(dtype).astype(np.float32))
    wide = wide[np.isfinite(wide)]
    middle = ((wide[:-1].astype(np.float64) + wide[1:]) / 2).astype(np.float32)
    beside = [np.nextafter(middle, np.float32(sign * np.inf)) for sign in (1, -1)]
    # 65520 is halfway between the largest float16 and what would come next.
    bounds = np.array([65519.996, 65520, 65536, 1e-45, 0.0, np.inf, np.finfo(np.float32).max], np.float32)
    beyond = np.concatenate([bounds, -bounds])
    source = np.concatenate([wide, middle, *beside, beyond])
    with np.errstate(over="ignore", under="ignore"):
        expected = source.astype(dtype)
    found = converted(kernels, source, dtype)
    assert np.array_equal(found.view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_random_floats_narrow_like_numpy(kernels: Kernels, dtype: np.dtype[Any]) -> None:
    source = np.random.default_rng(0).integers(0, 2**32, 200_000, np.uint32).view(np.float32)
    source = np.where(np.isnan(source), np.float32(1), source)
    with np.errstate(over="ignore", under="ignore"):
        expected = source.astype(dtype)
    assert np.array_equal(converted(kernels, source, dtype).view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("count", range(35))
def test_ends_of_any_length_touch_nothing_else(kernels: Kernels, dtype: np.dtype[Any], count: int) -> None:
    source = np.arange(1, 65, dtype=np.float32)
    target = np.full(64, 7, dtype)
    numbers = [dtype_from_name(d).acl for d in (F32, dtype)]
    kernels.functions.npugrad_probe_convert(
        source.ctypes.data, numbers[0], target.ctypes.data, numbers[1], count
    )
    assert np.array_equal(target[:count].astype(np.float32), source[:count])
    assert (target[count:].astype(np.float32) == 7).all()
