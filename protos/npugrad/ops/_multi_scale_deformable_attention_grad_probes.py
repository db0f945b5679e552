"""Probes of aclnnMultiScaleDeformableAttentionGrad: they tell x from y.

One level of 2 rows and 4 columns, one query, one head, one sampling point. A point at column x and row y
reads the four pixels around it with weights that depend on x and y differently, so an implementation that
takes them the other way round puts the gradient at another key.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from npugrad.workloads import Filled, Probe

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

_ROWS, _COLUMNS, _CHANNELS = 2, 4, 8
_POINTS: tuple[tuple[str, float, float, Mapping[int, float]], ...] = (
    ("on column 2 of row 0", 2, 0, {2: 1.0}),
    ("on column 0 of row 1", 0, 1, {4: 1.0}),
    ("a quarter off in x only", 1.25, 0, {1: 0.75, 2: 0.25}),
    ("a quarter off in y only", 2, 0.25, {2: 0.75, 6: 0.25}),
    ("beyond the right edge by half a pixel", 3.5, 1, {7: 0.5}),
)
"""Column and row in pixels from the centre of the first one, and each key's share of the gradient of the
output. The pixel of column x and row y is key 4 y + x. No point has the same share of both sizes."""
_SLOPES = ((1.0, 0.0, "by columns only"), (0.0, 1.0, "by rows only"))
"""Increase of the values for a step in x and in y: grad_location must have each in its own place."""


def probes() -> Iterator[Probe]:
    """Yields all probes."""
    for name, x, y, weights in _POINTS:
        yield Probe(f"point {name}", partial(_corners, x, y, weights))
    for by_x, by_y, name in _SLOPES:
        yield Probe(f"values that rise {name}", partial(_slope, by_x, by_y))


def _corners(x: float, y: float, weights: Mapping[int, float]) -> Filled:
    expected = np.zeros((1, _ROWS * _COLUMNS, 1, _CHANNELS), np.float32)
    for key, weight in weights.items():
        expected[:, key] = weight
    return _filled(x, y, np.zeros_like(expected), grad_value=expected)


def _slope(by_x: float, by_y: float) -> Filled:
    row, column = np.divmod(np.arange(_ROWS * _COLUMNS, dtype=np.float32), _COLUMNS)
    values = np.repeat((by_x * column + by_y * row)[None, :, None, None], _CHANNELS, axis=3)
    # Location runs from 0 to 1 across the level, so its gradient is that by pixels times the size.
    slopes = np.array([by_x * _COLUMNS, by_y * _ROWS], np.float32) * _CHANNELS
    return _filled(1.25, 0.25, values.astype(np.float32), grad_location=slopes.reshape(1, 1, 1, 1, 1, 2))


def _filled(
    x: float, y: float, values: npt.NDArray[np.float32], **expected: npt.NDArray[np.float32]
) -> Filled:
    location = np.array([(x + 0.5) / _COLUMNS, (y + 0.5) / _ROWS], np.float32)
    return Filled(
        operands={
            "value": values,
            "spatial_shape": np.array([[_ROWS, _COLUMNS]], np.int32),
            "level_start_index": np.zeros(1, np.int32),
            "location": location.reshape(1, 1, 1, 1, 1, 2),
            "attn_weight": np.ones((1, 1, 1, 1, 1), np.float32),
            "grad_output": np.ones((1, 1, _CHANNELS), np.float32),
        },
        attrs={},
        expected=expected,
    )
