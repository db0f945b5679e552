"""The points of a call of grid sampling, as pixel edges see them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad.coordinates import CoordinateRule, GridAxis
from npugrad.ops._grid_sampler import INTERPOLATION_MODES, PADDING_MODES
from npugrad.references._grid_sampling import reference
from npugrad.sampled import SampledByNearest, SampledCall

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

    from npugrad.operator import Arrays

    Array = npt.NDArray[Any]
    Floats = npt.NDArray[np.float64]
    Ints = npt.NDArray[np.int64]

_NO_PLACE = -100.0
"""What `GridAxis.locate` returns for a point without a position."""


def sampled(inputs: Arrays, attrs: Mapping[str, Any]) -> SampledCall:
    """The points of a call."""
    is_nearest = attrs["interpolation_mode"] == INTERPOLATION_MODES["nearest"]
    return (_Nearest if is_nearest else _Grid)(inputs, attrs)


class _Grid(SampledCall):
    """A bilinear call of either operator."""

    edge = 0.0
    sums, points = "input_grad", "grid"

    def __init__(self, inputs: Arrays, attrs: Mapping[str, Any]) -> None:
        self._inputs, self._attrs = inputs, attrs
        self._grad_output, self._image, self._grid = (
            np.asarray(inputs[name]) for name in ("grad_output", "input", "grid")
        )
        self._shape = self._grid.shape[:-1]
        self.count = int(np.prod(self._shape))
        self.axes = self._grid.shape[-1]
        self.rows = {"grid_grad": self.axes}
        self._padding = int(attrs["padding_mode"])
        self._align = bool(attrs["align_corners"])
        sizes = self._image.shape[:1:-1]  # x first
        self._axes = [GridAxis(size, self._padding, self._align, self.axes) for size in sizes]
        self._size = np.array(sizes, np.float64)
        self._last = np.maximum(self._size - 1, 1.0)
        rules = self._axes[0].rules
        self.rules = rules[:1] if self._grid.dtype == np.float64 else rules

    def compute(self, rule: CoordinateRule, outputs: Mapping[str, Array]) -> None:
        reference(self._inputs, self._attrs, outputs, rule=rule)

    def sizes(self, points: Ints) -> Floats:
        return np.broadcast_to(self._size, (len(points), self.axes))

    def places(self, points: Ints) -> Floats:
        return self._to_places(self._coordinates(points).astype(np.float64))

    def located(self, points: Ints, rule: CoordinateRule) -> Floats:
        found = [np.stack(pair, axis=-1) for pair in self._located(self._coordinates(points), rule)]
        return np.stack(found, axis=1)

    def placed(self, points: Ints, rule: CoordinateRule) -> Floats:
        """Undoes padding: clipped points lie outside or on the outer pixel, folded ones before the first."""
        position, slope = np.moveaxis(self.located(points, rule), -1, 0)
        has_place = position != _NO_PLACE
        above = np.where(np.rint(position) < position, -1.0, 1.0)  # -1 where nearest rounds a half down
        position = np.where(slope == 0, position, self.off_edges(position, self.sizes(points), above))
        low, outside = (0.0, 0.0) if self._align else (-0.5, 0.25)
        clipped = np.where(position <= 0, -outside, position + outside)
        place = np.where(slope < 0, 2 * low - position, np.where(slope == 0, clipped, position))
        return place if self._padding == PADDING_MODES["zeros"] else np.where(has_place, place, np.nan)

    def read(self, points: Ints, places: Floats, names: tuple[str, ...]) -> dict[str, Floats]:
        rows = np.zeros(places.shape)
        for sample, chosen in self._by_sample(points):
            inputs = self._alone(sample, points[chosen], places[chosen])
            found = np.zeros(inputs["grid"].shape)
            reference(inputs, self._attrs, {"grid_grad": found})
            rows[chosen] = found.reshape(places.shape[1], -1, self.axes).swapaxes(0, 1)
        return dict.fromkeys(names, rows)

    def add_up(self, rule: CoordinateRule, points: Ints, places: Floats, sums: Floats) -> None:
        for sample, chosen in self._by_sample(points):
            one = slice(sample, sample + 1)
            others = self._grad_output[one].copy()
            others[0][self._at(points[chosen])] = 0
            inputs = {"grad_output": others, "input": self._image[one], "grid": self._grid[one]}
            reference(inputs, self._attrs, {"input_grad": sums[one]}, rule=rule)
            moved = np.zeros(sums[one].shape)
            inputs = self._alone(sample, points[chosen], places[chosen, np.newaxis])
            reference(inputs, self._attrs, {"input_grad": moved})
            sums[one] += moved

    def _coordinates(self, points: Ints) -> Array:
        found: Array = self._grid[np.unravel_index(points, self._shape)]
        return found

    def _located(self, coordinates: Array, rule: CoordinateRule) -> Iterator[tuple[Floats, Floats]]:
        for number, axis in enumerate(self._axes):
            yield axis.locate(coordinates[..., number], rule)

    def _at(self, points: Ints) -> tuple[Any, ...]:
        """Indices of points in a sample of grad_output, all channels."""
        return (slice(None), *np.unravel_index(points, self._shape)[1:])

    def _by_sample(self, points: Ints) -> Iterator[tuple[int, Ints]]:
        """Yields each sample with the indices of its points."""
        sample = np.unravel_index(points, self._shape)[0]
        for number in np.unique(sample).tolist():
            yield number, np.flatnonzero(sample == number)

    def _alone(self, sample: int, points: Ints, places: Floats) -> dict[str, Array]:
        """Inputs of a call with points of one sample only, at each of their places, (k, places, axes)."""
        grid = self._to_coordinates(places).swapaxes(0, 1)
        between = (1,) * (self.axes - 1)  # before the grid's two axes: one sample, and one slice
        given = self._grad_output[sample][self._at(points)]
        gradient = given.reshape(1, len(given), *between[1:], 1, len(points))
        return {
            "grad_output": np.broadcast_to(gradient, (*gradient.shape[:-2], *grid.shape[:2])),
            "input": self._image[sample : sample + 1],
            "grid": grid.reshape(*between, *grid.shape),
        }

    def _to_places(self, coordinates: Floats) -> Floats:
        if self._align:
            return (coordinates + 1) / 2 * (self._size - 1)
        return ((coordinates + 1) * self._size - 1) / 2

    def _to_coordinates(self, places: Floats) -> Floats:
        """The coordinates that have these places in float64."""
        if self._align:
            return 2 * places / self._last - 1
        return (2 * places + 1) / self._size - 1


class _Nearest(_Grid, SampledByNearest):
    """A call of either operator with nearest interpolation."""

    edge = 0.5

    def cells(self, points: Ints, places: Floats) -> Ints:
        cell = np.unravel_index(points, self._shape)[0][:, np.newaxis]
        inside = np.ones(places.shape[:2], np.bool_)
        located = list(self._located(self._to_coordinates(places), CoordinateRule.FLOAT64))
        for (position, _), size in zip(located[::-1], self._image.shape[2:], strict=True):
            index = np.rint(position).astype(np.int64)
            inside &= (index >= 0) & (index < size)
            cell = cell * size + index
        return np.where(inside, cell, -1)

    def given(self, points: Ints) -> Floats:
        channels_last = np.moveaxis(self._grad_output, 1, -1)
        return np.asarray(channels_last[np.unravel_index(points, self._shape)], np.float64)

    def cell_of(self, elements: Ints) -> Ints:
        plane, channels = self._plane, self._image.shape[1]
        found: Ints = elements // (plane * channels) * plane + elements % plane
        return found

    def in_cells(self, sums: Array, cells: Ints) -> Floats:
        flat = sums.reshape(*self._image.shape[:2], -1)
        return np.asarray(flat[cells // self._plane, :, cells % self._plane], np.float64)

    @property
    def _plane(self) -> int:
        return int(np.prod(self._image.shape[2:]))
