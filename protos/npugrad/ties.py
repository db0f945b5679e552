"""Ties: where a gradient jumps, so that rounding alone decides between two right results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt


def half_pixels(coordinates: npt.NDArray[Any], size: int) -> npt.NDArray[np.float64]:
    """Returns a multiple of half a pixel for each coordinate, from two pixels before the first pixel on."""
    count = 2 * size + 9
    return (np.arange(coordinates.size).reshape(coordinates.shape) * 7 % count - 4) / 2
