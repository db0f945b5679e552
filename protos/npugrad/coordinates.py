"""Converts coordinates to positions in pixels, by named rules.

Kernels compute positions in float32, each with its own formulas and order of operations. If rounding moves a
point across a pixel edge, the gradient of its coordinate jumps, so a result can only be judged by the rule by
which it was computed. With `u = fl(x + 1)`, S the size of the axis and fl a rounding to float32:

    rule            operators       align_corners           otherwise
    torch           images          fl(u * fl((S-1)/2))     fl(u * S/2 - 0.5), fused
                    volumes         fl(fl(u/2) * (S-1))     fl(fl(fl(u*S) - 1) / 2)
    torch-unfused   images          fl(u * fl((S-1)/2))     fl(fl(u * fl(S/2)) - 0.5)
    vendor-a2       both            fl(fl(u/2) * (S-1))     fl(fl(fl(u*S) - 1) / 2)
    vendor-950      images          fl(fl(u/2) * (S-1))     fl(fl(fl(u*S) - 1) / 2)
    mmcv            attention                               fl(fl(x*S) - 0.5)
    float64         all three       (x+1)/2 * (S-1)         ((x+1)*S - 1) / 2; attention x*S - 0.5

Images are sampled by grid_sampler_2d_backward, volumes by grid_sampler_3d_backward; attention is
multi_scale_deformable_attention_grad. Sources: PyTorch's GridSamplerKernel.cpp (`ComputeLocation`, images)
and GridSampler.h (volumes), as built for AVX2 and AVX-512; the vendor's grid_sampler2_d_grad.h and
grid_sampler3_d_grad.h for Atlas A2 and A3; mmcv's and the vendor's attention kernels, which agree.

Padding follows the same kernels. Border clips to [0, S-1]; the bounds themselves have slope 0. Reflection
folds at the outer edges of the outer pixels, with align_corners at their centres, and then clips:

    torch, images   remainder by twice the span, fused (unfused in torch-unfused), then the shorter way
    vendor-a2       k = floor(fl(distance * fl(1/span))), rest = fl(distance - fl(k*span))
    others          rest = fmod(distance, span), backwards where floor(fl(distance/span)) is odd
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable

Array: TypeAlias = npt.NDArray[Any]
Float64Array: TypeAlias = npt.NDArray[np.float64]

_ZEROS, _REFLECTION = 0, 2  # padding_mode; 1 is border
_FAR_OUTSIDE = -100.0  # given to points that have no position; no sample has corners around it
_POSITIONS = 2.0**31  # positions of this magnitude or more count as none
_EXACT = 2.0**52  # from here on float64 has no halves


class CoordinateRule(str, Enum):
    """A rule by which kernels turn coordinates into pixels; compares equal to its name."""

    TORCH = "torch"
    """PyTorch's CPU kernels, as its builds for AVX2 and AVX-512 compute."""
    TORCH_UNFUSED = "torch-unfused"
    """PyTorch's formulas with every operation rounded, as on processors without fused operations."""
    VENDOR_A2 = "vendor-a2"
    """The vendor's kernels for Atlas A2 and A3."""
    VENDOR_950 = "vendor-950"
    """The vendor's kernels for Ascend 950, every operation rounded."""
    MMCV = "mmcv"
    """Deformable attention in mmcv, and in the vendor's kernels for Atlas A2 and A3."""
    FLOAT64 = "float64"
    """The mathematics, without float32."""

    def __str__(self) -> str:
        """The name."""
        return str(self.value)


GRID_2D_RULES = (
    CoordinateRule.TORCH,
    CoordinateRule.TORCH_UNFUSED,
    CoordinateRule.VENDOR_A2,
    CoordinateRule.VENDOR_950,
    CoordinateRule.FLOAT64,
)
"""Rules of images, the service's own first."""
GRID_3D_RULES = (CoordinateRule.TORCH, CoordinateRule.VENDOR_A2, CoordinateRule.FLOAT64)
"""Rules of volumes, the service's own first."""
ATTENTION_RULES = (CoordinateRule.MMCV, CoordinateRule.FLOAT64)
"""Rules of deformable attention, the service's own first."""


def widened(coordinates: Array, rule: CoordinateRule) -> Array:
    """Copies coordinates to the type in which a rule computes.

    Args:
        coordinates: Of any float dtype, shape and strides.
        rule: The rule.

    Returns:
        A C-contiguous copy: float64 for that rule and for float64 coordinates, else float32.
    """
    is_double = rule is CoordinateRule.FLOAT64 or coordinates.dtype == np.float64
    return np.array(coordinates, dtype=np.float64 if is_double else np.float32, order="C")


def attention_pixels(
    location: Array, size: Array, rule: CoordinateRule = CoordinateRule.MMCV
) -> Float64Array:
    """Converts locations of deformable attention to pixels of their level.

    Args:
        location: In units of the level's size; any float dtype.
        size: Pixels of the level along that axis, whole numbers that broadcast to the locations.
        rule: One of `ATTENTION_RULES`; no effect on float64 locations.

    Returns:
        Pixels, with 0 at the centre of the first one; shaped like `location`.
    """
    _check(rule, ATTENTION_RULES)
    location = widened(location, rule)
    with np.errstate(all="ignore"):
        pixels: Array = location * size.astype(location.dtype) - location.dtype.type(0.5)
    return pixels.astype(np.float64)


@dataclass(frozen=True)
class GridAxis:
    """One spatial axis of the images or volumes that a grid samples.

    Attributes:
        size: Number of pixels along it.
        padding_mode: 0 zeros, 1 border or 2 reflection.
        align_corners: Whether -1 and 1 are the centres of the outer corners, or their outer edges.
        axes: Number of spatial axes: 2 or 3.
    """

    size: int
    padding_mode: int
    align_corners: bool
    axes: int

    @property
    def rules(self) -> tuple[CoordinateRule, ...]:
        """Rules that apply, the service's own first."""
        return GRID_2D_RULES if self.axes == 2 else GRID_3D_RULES

    def locate(
        self, coordinates: Array, rule: CoordinateRule = CoordinateRule.TORCH
    ) -> tuple[Float64Array, Float64Array]:
        """Converts normalised coordinates to positions and their derivatives by the coordinate.

        Args:
            coordinates: Any float dtype; -1 to 1 is inside.
            rule: One of `rules`; no effect on float64 coordinates.

        Returns:
            Positions, -100 for a point that has none, and slopes; shaped like `coordinates`.
        """
        _check(rule, self.rules)
        coordinates = widened(coordinates, rule)
        if coordinates.dtype == np.float64:
            rule = CoordinateRule.FLOAT64
        with np.errstate(all="ignore"):
            return self._locate(coordinates, rule)

    def _locate(self, coordinates: Array, rule: CoordinateRule) -> tuple[Float64Array, Float64Array]:
        number = coordinates.dtype.type
        position = self._position(coordinates + number(1), rule)
        slope = np.full(position.shape, float(self._span(number)) / 2)
        if self.padding_mode == _REFLECTION:
            position, factor = self._reflected(position, rule)
            slope *= factor
        last = number(self.size - 1)
        if self.padding_mode != _ZEROS:
            # Clipping comes after reflecting and before infinities are dropped: with border padding they
            # count as far outside. The bounds themselves have slope zero.
            at_start, at_end = position <= 0, position >= last
            position = np.where(at_start, number(0), np.where(at_end, last, position))
            slope[at_start | at_end] = 0
        is_addressable = np.abs(position) < _POSITIONS  # false for NaN
        return np.where(is_addressable, position.astype(np.float64), _FAR_OUTSIDE), slope

    def _span(self, number: Callable[[float], Any]) -> Any:
        """Distance in positions from coordinate -1 to 1."""
        return number(self.size - 1 if self.align_corners else self.size)

    def _is_vectorised(self, rule: CoordinateRule) -> bool:
        """Whether the rule is that of PyTorch's vectorised kernels for images."""
        return self.axes == 2 and rule in (CoordinateRule.TORCH, CoordinateRule.TORCH_UNFUSED)

    def _position(self, u: Array, rule: CoordinateRule) -> Array:
        """Positions before padding, from coordinates plus 1."""
        number = u.dtype.type
        span = self._span(number)
        position: Array
        if not self._is_vectorised(rule):
            position = u / number(2) * span if self.align_corners else (u * span - number(1)) / number(2)
        elif self.align_corners:
            position = u * (span / number(2))
        elif rule is CoordinateRule.TORCH_UNFUSED:
            position = u * (span / number(2)) - number(0.5)
        else:
            product = u.astype(np.float64) * (float(span) / 2)  # exact
            # Where float64 has no halves, the next number below rounds like the exact difference.
            is_near = np.abs(product) < _EXACT
            position = np.where(is_near, product - 0.5, np.nextafter(product, -np.inf)).astype(number)
        return position

    def _reflected(self, position: Array, rule: CoordinateRule) -> tuple[Array, Array]:
        """Positions folded back at both ends, and the factor +1, -1 or 0 of their derivatives."""
        number = position.dtype.type
        low, span = number(0 if self.align_corners else -0.5), self._span(number)
        if span == 0:
            return np.zeros_like(position), np.zeros_like(position)
        offset = position - low
        if self._is_vectorised(rule):
            fold = _fold_fused if rule is CoordinateRule.TORCH else _fold_unfused
        else:
            fold = _fold_by_reciprocal if rule is CoordinateRule.VENDOR_A2 else _fold_by_rest
        folded, is_backward = fold(np.abs(offset), span)
        return folded + low, np.where(is_backward ^ (offset < 0), number(-1), number(1))


def _check(rule: CoordinateRule, known: tuple[CoordinateRule, ...]) -> None:
    if rule not in known:
        raise ValueError(f"found coordinate rule {rule}; expected one of {', '.join(map(str, known))}")


def _fold_by_rest(distance: Array, span: Any) -> tuple[Array, Array]:
    """Folds distances from the lower end; returns them and which of them run backwards."""
    rest = np.fmod(distance, span)
    is_backward = np.fmod(np.floor(distance / span), 2) == 1
    return np.where(is_backward, span - rest, rest), is_backward


def _fold_by_reciprocal(distance: Array, span: Any) -> tuple[Array, Array]:
    """The same, multiplying by the reciprocal; `span` has the type of the distances, here float32."""
    # The kernel casts to int32 and back, where the largest quotients saturate.
    folds = np.minimum(np.floor(distance * (type(span)(1) / span)), distance.dtype.type(_POSITIONS))
    rest = distance - folds * span
    is_backward = np.fmod(folds, 2) == 1
    return np.where(is_backward, span - rest, rest), is_backward


def _fold_unfused(distance: Array, span: Any) -> tuple[Array, Array]:
    """The same modulo twice the span, every operation rounded."""
    turns = np.trunc(distance / (span + span))
    return _shorter(distance - turns * (span + span), span)


def _fold_fused(distance: Array, span: Any) -> tuple[Array, Array]:
    """The same with the remainder of the division in one operation."""
    turns = np.trunc(distance / (span + span))
    # Exact in float64, because it cancels; rounded once below.
    rest = distance.astype(np.float64) - turns.astype(np.float64) * float(span + span)
    return _shorter(rest.astype(distance.dtype), span)


def _shorter(rest: Array, span: Any) -> tuple[Array, Array]:
    back = (span + span) - rest
    is_backward = rest > back
    return np.where(is_backward, back, rest), is_backward
