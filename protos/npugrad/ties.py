"""Ties: where a gradient jumps, so that rounding alone decides between two right results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

MARGIN_PIXELS = 1 / 128
"""Least distance of a settled sampling point to where the gradient jumps."""


def half_pixels(coordinates: npt.NDArray[Any], size: int) -> npt.NDArray[np.float64]:
    """As many multiples of half a pixel as there are coordinates, from two pixels before the first one."""
    count = 2 * size + 9
    return (np.arange(coordinates.size).reshape(coordinates.shape) * 7 % count - 4) / 2


def settle(coordinates: npt.NDArray[Any], scale: float, offset: float, steps: int) -> None:
    """Replaces coordinates next to a multiple of 1/`steps` pixel by others of the same array, in place.

    Among many sampling points some fall so near to a pixel's edge that the rounding of float32 decides to
    which side they belong. The gradient jumps there, so two right results may differ; these are moved.

    Args:
        coordinates: What the operator turns into pixels: scale * coordinate + offset.
        scale: Pixels of one unit.
        offset: Pixel of coordinate 0.
        steps: Jumps of the gradient in one pixel.
    """
    where = (coordinates.astype(np.float64) * scale + offset) * steps
    unsafe = np.abs(where - np.rint(where)) < MARGIN_PIXELS * steps
    safe = coordinates[~unsafe]
    if safe.size:
        coordinates[unsafe] = np.resize(safe, int(unsafe.sum()))
