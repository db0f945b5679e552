"""A sampling call as pixel edges see it: points with a place in pixels on every axis."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from npugrad.coordinates import CoordinateRule

    Array = npt.NDArray[Any]
    Floats = npt.NDArray[np.float64]
    Ints = npt.NDArray[np.int64]
    Bools = npt.NDArray[np.bool_]

REACH = 3 * 2.0**-24
"""How far float32 can put a point from its exact place, as a share of the axis's size in pixels."""
_BESIDE = 2.0**-30
"""At this distance from an edge, as a share of the size, a place is on one side and has its values."""
_ON_EDGE = 2.0**-40
"""Within this distance of an edge, converting a place to a coordinate and back may move it across."""


class SampledCall(ABC):
    """A call as pixel edges see it: points, numbered in C order, each with a place on every axis.

    A *place* is a position in pixels before padding, with 0 at the centre of the first pixel; axes are in the
    order of the coordinates, x first. Points are given by their numbers, (k,).

    Attributes:
        rules: Coordinate rules by which a result may be computed, the service's own first; only one for
            float64 coordinates, on which rules have no effect.
        count: Number of points.
        axes: Number of coordinates of each point.
        edge: Where in a pixel the result jumps: 0.0 at its centre, 0.5 between two.
        rows: Outputs that have one row for each point, with the number of values in a row.
        sums: The output that adds up the contributions of the points by pixel.
        points: The operand that has the coordinates.
    """

    rules: tuple[CoordinateRule, ...]
    count: int
    axes: int
    edge: float
    rows: Mapping[str, int]
    sums: ClassVar[str]
    points: ClassVar[str]

    @abstractmethod
    def compute(self, rule: CoordinateRule, outputs: Mapping[str, Array]) -> None:
        """Runs the reference with a rule."""

    @abstractmethod
    def sizes(self, points: Ints) -> Floats:
        """Number of pixels on each axis of what the points sample, (k, axes)."""

    @abstractmethod
    def places(self, points: Ints) -> Floats:
        """Exact places, (k, axes)."""

    @abstractmethod
    def located(self, points: Ints, rule: CoordinateRule) -> Floats:
        """All that a rule computes from the coordinates, (k, axes, values): equal if nothing differs."""

    @abstractmethod
    def placed(self, points: Ints, rule: CoordinateRule) -> Floats:
        """Places at which the values are those of the points under a rule, (k, axes)."""

    @abstractmethod
    def read(self, points: Ints, places: Floats, names: tuple[str, ...]) -> dict[str, Floats]:
        """The rows of points at some places, (k, places of each, values), by output.

        Args:
            points: The points.
            places: (k, places of each, axes).
            names: Some of `rows`.
        """

    @abstractmethod
    def add_up(self, rule: CoordinateRule, points: Ints, places: Floats, sums: Floats) -> None:
        """Recomputes `sums` where these points contribute: with them at other places, all others by a rule.

        Args:
            rule: Rule by which `sums` were computed.
            points: Points at other places.
            places: Their places, (k, axes).
            sums: The output to correct.
        """

    def is_near(self, points: Ints) -> Bools:
        """Whether float32 can put a point on the other side of an edge, by axis, (k, axes)."""
        places = self.places(points)
        near: Bools = np.abs(places - self._edges(places)) <= REACH * self.sizes(points)
        return near

    def may_move(self, points: Ints) -> Bools:
        """Whether a point may lie on the other side of an edge, by axis, (k, axes).

        Some rule must place it differently from the others: where all agree, no rounding decides.
        """
        first, *others = (self.located(points, rule) for rule in self.rules)
        differs = np.zeros(first.shape, np.bool_)
        for other in others:
            differs |= other != first
        return self.is_near(points) & differs.any(axis=-1)

    def both_sides(self, points: Ints, rule: CoordinateRule) -> Floats:
        """Places on each side of the edges that points may cross, (k, 2^axes, axes); else their own."""
        edges = self._edges(self.places(points))
        step = _BESIDE * np.maximum(self.sizes(points), np.abs(edges))
        signs = np.array(list(itertools.product((-1.0, 1.0), repeat=self.axes)))
        beside = edges[:, np.newaxis] + signs * step[:, np.newaxis]
        own = self.placed(points, rule)[:, np.newaxis]
        return np.where(self.may_move(points)[:, np.newaxis], beside, own)

    def off_edges(self, positions: Floats, sizes: Floats, side: Floats) -> Floats:
        """Moves positions off the edges on which they lie, so that rounding cannot take them across.

        Args:
            positions: (k, axes).
            sizes: Pixels of each axis, (k, axes).
            side: 1 or -1 if the values at an edge are those above or below it, (k, axes).
        """
        edges = self._edges(positions)
        scale = np.maximum(sizes, np.abs(edges))
        is_on = np.abs(positions - edges) < _ON_EDGE * scale
        towards = np.where(positions == edges, side, np.sign(positions - edges))
        return np.where(is_on, edges + towards * _BESIDE * scale, positions)

    def _edges(self, places: Floats) -> Floats:
        nearest: Floats = np.rint(places - self.edge) + self.edge
        return nearest


class SampledByNearest(SampledCall):
    """A call whose points each read a single pixel: a *cell*, numbered over all samples."""

    @abstractmethod
    def cells(self, points: Ints, places: Floats) -> Ints:
        """The cell that is read at places, -1 for none; (k, places of each) of (k, places of each, axes)."""

    @abstractmethod
    def given(self, points: Ints) -> Floats:
        """What each point adds to its cell, (k, channels)."""

    @abstractmethod
    def cell_of(self, elements: Ints) -> Ints:
        """The cells of flat elements of `sums`."""

    @abstractmethod
    def in_cells(self, sums: Array, cells: Ints) -> Floats:
        """The values of `sums` in cells, (k, channels)."""
