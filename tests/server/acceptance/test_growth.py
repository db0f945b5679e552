from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npugrad_server.acceptance.growth import growth, settled


@given(slope=st.floats(-1e6, 1e6), start=st.floats(0, 1e9), count=st.integers(10, 200))
def test_the_slope_of_a_line_is_found(slope: float, start: float, count: int) -> None:
    times = [0.5 * i for i in range(count)]
    found = growth(times, [start + slope * t for t in times], 0.25)
    assert found.slope == pytest.approx(slope, rel=1e-6, abs=1e-3)
    assert found.total == pytest.approx(found.slope * found.seconds)
    assert found.seconds <= 0.75 * times[-1] + 0.5


def test_the_warm_up_does_not_count() -> None:
    times = [float(i) for i in range(100)]
    values = [min(i, 30) * 1000.0 for i in range(100)]
    assert growth(times, values, 0.3).slope == pytest.approx(0, abs=1e-6)
    assert growth(times, values, 0.0).slope > 50


def test_noise_around_a_level_is_no_growth() -> None:
    times = [float(i) for i in range(200)]
    found = growth(times, [500.0 + (-1) ** i * 20 for i in range(200)], 0.25)
    assert abs(found.total) < 5
    assert found.level == pytest.approx(500, abs=20)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_too_few_samples_tell_nothing(count: int) -> None:
    with pytest.raises(ValueError, match=f"found {count} samples"):
        growth([float(i) for i in range(count)], [1.0] * count, 0.0)


def test_what_fills_up_first_is_judged_on_its_plateau() -> None:
    times = [float(i) for i in range(200)]
    found = settled(times, [min(t, 140.0) * 1e6 for t in times], 0.4, 0.25)
    assert found.slope == pytest.approx(0, abs=1)
    assert found.since >= 140
    assert found.seconds >= 0.25 * 199 - 1


@given(slope=st.floats(1, 1e6), share=st.floats(0, 1))
def test_what_never_ends_to_grow_has_no_plateau(slope: float, share: float) -> None:
    """Also when it grows in steps, the tenth part of the time each."""
    times = [float(i) for i in range(200)]
    stairs = [slope * (20 * (i // 20) * share + i * (1 - share)) for i in range(200)]
    assert settled(times, stairs, 0.4, 0.25).slope > 0.5 * slope


@pytest.mark.parametrize("count", [0, 2, 3, 5])
def test_few_samples_are_taken_as_far_as_they_go(count: int) -> None:
    times = [float(i) for i in range(count)]
    if count < 3:
        with pytest.raises(ValueError, match=f"found {count} samples"):
            settled(times, times, 0.0, 0.25)
    else:
        assert settled(times, times, 0.0, 0.25).slope == pytest.approx(1)
