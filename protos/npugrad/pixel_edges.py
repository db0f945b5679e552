"""The right results that a sampling operator can have for points next to a pixel edge.

Bilinear interpolation reads the pixels around a point, so the gradient of a coordinate jumps where the point
crosses the centre of a pixel; nearest interpolation switches pixels in the middle between two. Devices
compute positions in float32, each with its own formulas (`npugrad.coordinates`), and if rounding puts a point
on the other side of such an edge, both results are right.

Results that differ from the reference are therefore compared with the reference under each rule of the
operator. One rule must explain all of them, except for a few points that may lie on the other side of an
edge: at most one in 1000, or 8 in a small call. Such a point must lie within 3 * 2^-24 * S pixels of the
edge, S being the size of the axis, which is the possible error of float32; and some rule must place it
differently from the others, because where all agree nothing is left to rounding. All its gradients together
must be those of one side on each axis: each axis has two sides, so there are four pairs in an image and eight
triples in a volume. The point's contribution to the gradient of the samples follows the side that was found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad.nearest_edges import moves_between_cells
from npugrad.references._blocks import spans
from npugrad.sampled import SampledByNearest
from npugrad.tolerance import Allowance, compare, wrong_elements

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

    from npugrad.coordinates import CoordinateRule
    from npugrad.sampled import SampledCall

    Array = npt.NDArray[Any]
    Floats = npt.NDArray[np.float64]
    Ints = npt.NDArray[np.int64]

_POINTS_PER_MOVE = 1000
"""One in this many points may lie on the other side of an edge from where the rule places it."""
_LEAST_MOVES = 8
"""At least this many points may, even in small calls."""
_POINT_BYTES = 1024  # scratch memory per point


@dataclass(frozen=True)
class Explanation:
    """One way in which results can be right.

    Attributes:
        rule: The coordinate rule.
        alike: Other rules that place every point of the call where this one does.
        moved: Number of points on the other side of an edge from where the rule places them.
        points: Number of points of the call.
    """

    rule: CoordinateRule
    alike: tuple[CoordinateRule, ...]
    moved: int
    points: int

    def __str__(self) -> str:
        """The explanation in words."""
        text = f"by coordinate rule {' = '.join((self.rule, *self.alike))}"
        if not self.moved:
            return text
        return (
            f"{text}, but for {self.moved} of {self.points} points ({self.moved / self.points:.2g} of all) "
            "that lie on the other side of a pixel edge"
        )


def explanations(
    call: SampledCall, results: Mapping[str, Array], golden: Mapping[str, Floats]
) -> Iterator[Explanation]:
    """Yields ways in which results that differ from the reference may be right; the caller compares.

    Args:
        call: The call.
        results: Wanted outputs by name.
        golden: The reference's values of each by the service's own rule, C-contiguous. They are overwritten
            with those of each explanation before it is yielded.
    """
    suspects = _wrong_points(call, results, golden)
    yield from _with_moves(call, call.rules[0], results, golden)
    for rule in call.rules[1:]:
        if _explains_most(call, rule, suspects, results, golden):
            call.compute(rule, golden)
            yield _explanation(call, rule, 0)
            yield from _with_moves(call, rule, results, golden)


def _explanation(call: SampledCall, rule: CoordinateRule, moved: int) -> Explanation:
    others = (other for other in call.rules if other is not rule)
    return Explanation(
        rule, tuple(other for other in others if not _differ(call, rule, other)), moved, call.count
    )


def _most_moves(call: SampledCall) -> int:
    return max(_LEAST_MOVES, call.count // _POINTS_PER_MOVE)


def _with_moves(
    call: SampledCall, rule: CoordinateRule, results: Mapping[str, Array], golden: Mapping[str, Floats]
) -> Iterator[Explanation]:
    """A rule with some points on the other side of an edge, unless there are too many of them."""
    most = _most_moves(call)
    if not isinstance(call, SampledByNearest):
        found = _moves_by_rows(call, rule, results, golden)
    elif call.sums in results:
        found = moves_between_cells(call, rule, results[call.sums], golden[call.sums], most)
    else:
        return
    if found is None:
        return
    points, places = found
    sums = golden.get(call.sums)
    # Across an edge, bilinear sums differ only in non-finite values.
    if sums is not None and not compare(sums, results[call.sums]).ok:
        call.add_up(rule, points, places, sums)
    yield _explanation(call, rule, len(points))


def _wrong_points(call: SampledCall, results: Mapping[str, Array], golden: Mapping[str, Floats]) -> Ints:
    """Points with a value outside its tolerance: all of them, or the first ones, more than may move."""
    found = [np.zeros(0, np.int64)]
    for name in call.rows.keys() & results.keys():
        elements = (_most_moves(call) + 1) * call.rows[name]
        found.append(wrong_elements(golden[name], results[name], elements) // call.rows[name])
    return np.unique(np.concatenate(found))


def _moves_by_rows(
    call: SampledCall, rule: CoordinateRule, results: Mapping[str, Array], golden: Mapping[str, Floats]
) -> tuple[Ints, Floats] | None:
    """Finds the sides that explain the rows of all wrong points, and writes these rows into `golden`."""
    points = _wrong_points(call, results, golden)
    if not 0 < len(points) <= _most_moves(call) or not call.may_move(points).any(axis=1).all():
        return None
    places = call.both_sides(points, rule)
    read, used = _read(call, points, places, results, golden)
    side = used.argmin(axis=1)
    every = np.arange(len(points))
    if (used[every, side] > 1).any():
        return None
    for name, rows in read.items():
        golden[name].reshape(call.count, -1)[points] = rows[every, side]
    return points, places[every, side]


def _read(
    call: SampledCall,
    points: Ints,
    places: Floats,
    results: Mapping[str, Array],
    golden: Mapping[str, Floats],
) -> tuple[dict[str, Floats], Floats]:
    """Rows of points at places, and the largest share of the allowance that the results use there."""
    read = call.read(points, places, tuple(name for name in call.rows if name in results))
    used = np.zeros(places.shape[:2])
    for name, rows in read.items():
        got = results[name].reshape(call.count, -1)[points, np.newaxis]
        allowed = Allowance.of(golden[name], results[name])
        np.maximum(used, allowed.used(rows, got).max(axis=2), out=used)
    return read, used


def _explains_most(
    call: SampledCall,
    rule: CoordinateRule,
    suspects: Ints,
    results: Mapping[str, Array],
    golden: Mapping[str, Floats],
) -> bool:
    """Whether a rule is worth computing the whole reference, judged by the points in `suspects`."""
    if len(suspects) <= _most_moves(call):
        return _differ(call, rule, call.rules[0])
    places = call.placed(suspects, rule)[:, np.newaxis]
    _, used = _read(call, suspects, places, results, golden)
    return int(np.count_nonzero(used > 1)) <= _most_moves(call)


def _differ(call: SampledCall, rule: CoordinateRule, other: CoordinateRule) -> bool:
    """Whether two rules place any point differently."""
    for span in spans(call.count, _POINT_BYTES):
        points = np.arange(span.start, span.stop)
        if (call.located(points, rule) != call.located(points, other)).any():
            return True
    return False
