"""Measures how a quantity grows over time, by a straight line through its samples or the last of them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

_STEP = 0.05
"""Share of the time between the starts of two stretches."""


@dataclass(frozen=True)
class Growth:
    """How a quantity grew.

    Attributes:
        since: Time of the first sample that counted.
        slope: Growth per second.
        seconds: Time between the first and the last sample that counted.
        level: Median of those samples.
    """

    since: float
    slope: float
    seconds: float
    level: float

    @property
    def total(self) -> float:
        """Growth over all of `seconds`."""
        return self.slope * self.seconds


def growth(times: Sequence[float], values: Sequence[float], warm_up: float) -> Growth:
    """Fits a line by least squares to the samples after a warm-up.

    Args:
        times: Seconds, ascending.
        values: The quantity at each.
        warm_up: Share of the time, at its start, whose samples do not count.

    Raises:
        ValueError: Fewer than three samples are left.
    """
    x, y = np.asarray(times, np.float64), np.asarray(values, np.float64)
    counts = x >= x[0] + warm_up * (x[-1] - x[0]) if x.size else np.zeros(0, np.bool_)
    x, y = x[counts], y[counts]
    if x.size < 3:
        raise ValueError(f"found {x.size} samples after the warm-up; expected at least 3")
    centred = x - x.mean()
    slope = float(centred @ (y - y.mean()) / (centred @ centred))
    return Growth(float(x[0]), slope, float(x[-1] - x[0]), float(np.median(y)))


def settled(times: Sequence[float], values: Sequence[float], warm_up: float, least: float) -> Growth:
    """Returns the least growth over any final stretch: a quantity that first fills caches ends flat.

    Args:
        times: Seconds, ascending.
        values: The quantity at each.
        warm_up: Share of the time, at its start, that is in no stretch.
        least: Length of the shortest stretch, as a share of the time.

    Raises:
        ValueError: There are fewer than three samples after the warm-up.
    """
    found = [growth(times, values, warm_up)]
    for start in np.arange(warm_up + _STEP, 1 - least + _STEP / 2, _STEP):
        with suppress(ValueError):  # too few samples in so short a stretch
            found.append(growth(times, values, float(start)))
    return min(found, key=lambda one: one.slope)
