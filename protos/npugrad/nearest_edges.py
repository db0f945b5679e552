"""Finds points of nearest interpolation on the other side of a pixel edge, from the sums of the pixels.

A point that moves takes its contribution from one pixel to another, or into or out of the sample, in all
channels. The differences between results and reference are sums of such moves, which are found greedily: each
round makes those that reduce the differences most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad.references._blocks import spans
from npugrad.tolerance import wrong_elements

if TYPE_CHECKING:
    import numpy.typing as npt

    from npugrad.coordinates import CoordinateRule
    from npugrad.sampled import SampledByNearest

    Array = npt.NDArray[Any]
    Floats = npt.NDArray[np.float64]
    Ints = npt.NDArray[np.int64]

_ROUNDS = 64
_CHOICES_PER_MOVE = 16
"""Maximum number of candidate points for each allowed move. More only occur at a few repeated coordinates: a
device rounds equal ones alike, so that a rule explains all or none, and trying each takes minutes."""
_LEAST_GAIN = 0.25  # of what a single move gains: less is rounding
_POINT_BYTES = 1024  # scratch memory per point


def moves_between_cells(
    call: SampledByNearest, rule: CoordinateRule, got: Array, sums: Floats, most: int
) -> tuple[Ints, Floats] | None:
    """Finds points that explain the differences, and their places.

    Args:
        call: The call.
        rule: Rule by which `sums` were computed.
        got: Sums of the results.
        sums: Sums of the reference.
        most: Maximum number of points that may move.

    Returns:
        Points, (k,), and their places, (k, axes); None if there are too many or none at all.
    """
    channels = got.shape[1]
    wrong = np.unique(call.cell_of(wrong_elements(sums, got, (2 * most + 1) * channels)))
    if not 0 < len(wrong) <= 2 * most:  # a move changes two cells
        return None
    points = _next_to(call, rule, wrong, _CHOICES_PER_MOVE * most)
    if not len(points):
        return None
    places = call.both_sides(points, rule)
    cells = call.cells(points, places)
    own = call.cells(points, call.placed(points, rule)[:, np.newaxis])[:, 0]
    side = _Pursuit(call, got, sums, points, own, cells).solved()
    moved = np.flatnonzero(side >= 0)
    if not 0 < len(moved) <= most:
        return None
    return points[moved], places[moved, side[moved]]


def _next_to(call: SampledByNearest, rule: CoordinateRule, wrong: Ints, most: int) -> Ints:
    """Points that may move into or out of wrong cells; none if there are too many."""
    found, count = [np.zeros(0, np.int64)], 0
    for span in spans(call.count, _POINT_BYTES):
        points = np.arange(span.start, span.stop)
        points = points[call.is_near(points).any(axis=1)]
        cells = call.cells(points, call.both_sides(points, rule))
        moves = (cells != cells[:, :1]).any(axis=1)
        found.append(points[moves & np.isin(cells, wrong).any(axis=1)])
        count += len(found[-1])
        if count > most:
            return found[0]
    return np.concatenate(found)


class _Pursuit:
    """Matching pursuit: each point has one of a few cells, and each choice changes two sums."""

    def __init__(
        self, call: SampledByNearest, got: Array, sums: Floats, points: Ints, own: Ints, cells: Ints
    ) -> None:
        # Cell 0 is for points outside the samples; it has no sum.
        numbers, index = np.unique(np.concatenate([[-1], own, cells.reshape(-1)]), return_inverse=True)
        self._own = index[1 : 1 + len(own)]
        self._cells: Ints = index[1 + len(own) :].reshape(cells.shape)
        self._now = self._own.copy()
        self._given = call.given(points)
        self._rest = np.zeros((len(numbers), self._given.shape[1]))
        self._rest[1:] = call.in_cells(got, numbers[1:]) - call.in_cells(sums, numbers[1:])
        self._rest[~np.isfinite(self._rest)] = 0.0
        self._weight = np.square(self._given).sum(axis=1)

    def solved(self) -> Ints:
        """Index of each point's cell among its candidates; -1 for the cell given by the rule."""
        for _ in range(_ROUNDS):
            if not self._improve():
                break
        side = (self._cells == self._now[:, np.newaxis]).argmax(axis=1)
        return np.where(self._now == self._own, -1, side)

    def _improve(self) -> bool:
        """Makes the best moves that touch no cell twice; returns whether there were any."""
        gains = self._gains()
        touched: set[int] = set()
        for flat in np.argsort(-gains, axis=None).tolist():
            point, side = divmod(flat, gains.shape[1])
            if not gains[point, side] > 0:
                break
            old, new = int(self._now[point]), int(self._cells[point, side])
            if touched.isdisjoint({old, new} - {0}):
                touched |= {old, new} - {0}
                self._rest[old] += self._given[point]
                self._rest[new] -= self._given[point]
                self._rest[0] = 0.0
                self._now[point] = new
        return bool(touched)

    def _gains(self) -> Floats:
        """How much each move reduces the sum of the squared differences; 0 if hardly at all."""
        gains = np.zeros((len(self._now), len(self._cells.T)))
        old = self._now
        at_old = np.einsum("kc,kc->k", self._rest[old], self._given)
        for side in range(gains.shape[1]):
            new = self._cells[:, side]
            at_new = np.einsum("kc,kc->k", self._rest[new], self._given)
            alone = ((new > 0).astype(np.float64) + (old > 0)) * self._weight
            gain = 2 * (at_new - at_old) - alone
            gains[:, side] = np.where((new != old) & (gain > _LEAST_GAIN * alone), gain, 0.0)
        return gains
