"""Whether a quantity grows over time: a straight line through its samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Growth:
    """How a quantity grew.

    Attributes:
        slope: By how much in a second.
        seconds: Time between the first and the last sample that counted.
        level: Median of those samples.
    """

    slope: float
    seconds: float
    level: float

    @property
    def total(self) -> float:
        """Growth over the whole time."""
        return self.slope * self.seconds


def growth(times: Sequence[float], values: Sequence[float], warm_up: float) -> Growth:
    """Fits a line by least squares to the samples after a warm-up.

    Args:
        times: Seconds, ascending.
        values: The quantity at each.
        warm_up: Share of the time, from its start, whose samples do not count.

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
    return Growth(slope, float(x[-1] - x[0]), float(np.median(y)))
