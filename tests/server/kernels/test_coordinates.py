"""Kernels of every variant place sampling points exactly where the rules say: so the variants agree."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.proofs.coordinates import GridCall, attention_by_kernel, blocks, by_rule
from tests.server.kernels.driven import DrivenKernels, driver_command

from npugrad.coordinates import ATTENTION_RULES, CoordinateRule, GridAxis, attention_pixels
from npugrad_server.backends.cpu.kernels import Kernels

Float32Array = npt.NDArray[np.float32]
MakeKernels = Callable[[CoordinateRule], Kernels]

pytest.importorskip("torch")  # makes identity grids

COUNT = 5000
WITHOUT_PLACE = np.array([np.nan, np.inf, -np.inf, 3.4e38, -3.4e38], np.float32)


@pytest.fixture(scope="module")
def kernels_by(tested: Path) -> Iterator[MakeKernels]:
    """Kernels that take coordinates by a rule."""
    made: dict[bool, Kernels] = {}

    def make(rule: CoordinateRule) -> Kernels:
        is_exact = rule is CoordinateRule.FLOAT64
        if is_exact not in made:
            kind = DrivenKernels if driver_command() else Kernels
            made[is_exact] = kind(1, tested, float64_coordinates=is_exact)
        return made[is_exact]

    yield make
    for kernels in made.values():
        kernels.close()


def points_on(align_corners: bool) -> Iterator[tuple[int, Float32Array]]:
    """Sizes of an axis with points, some of them not finite."""
    for size, points in blocks(COUNT, align_corners):
        yield size, np.concatenate([points, WITHOUT_PLACE])


@pytest.mark.parametrize("rule", [CoordinateRule.TORCH, CoordinateRule.FLOAT64])
@pytest.mark.parametrize("axes", [2, 3])
def test_grids(kernels_by: MakeKernels, axes: int, rule: CoordinateRule) -> None:
    """A quadratic input names the pixel before a point; gradients name the nearest one."""
    for padding, align_corners in itertools.product(range(3), (False, True)):
        for size, points in points_on(align_corners):
            axis, weights = GridAxis(size, padding, align_corners, axes), np.arange(len(points)) % 61 + 1.0
            call = GridCall(axes, size, points, np.ones(len(points), np.float32))
            _, found = call.by_kernel(kernels_by(rule), 0, padding, align_corners)
            case = f"size {size}, padding {padding}, align_corners {align_corners}"
            np.testing.assert_array_equal(found, by_rule(axis, points, rule), err_msg=case)
            call = GridCall(axes, size, points, weights.astype(np.float32))
            sums, _ = call.by_kernel(kernels_by(rule), 1, padding, align_corners)
            nearest = np.rint(axis.locate(points, rule)[0])
            is_inside = (nearest >= 0) & (nearest < size)
            expected = np.bincount(nearest[is_inside].astype(int), weights[is_inside], size)
            np.testing.assert_array_equal(sums, expected, err_msg=case)


@pytest.mark.parametrize("levels", [1, 2], ids=["bands", "overlapping levels"])
@pytest.mark.parametrize("rule", ATTENTION_RULES)
def test_attention(kernels_by: MakeKernels, rule: CoordinateRule, levels: int) -> None:
    for size, grid in points_on(align_corners=False):
        points = (grid + np.float32(1)) / np.float32(2)
        pixels = attention_pixels(points, np.array(size), rule)
        is_reached = (pixels > -1) & (pixels < size)
        first = np.floor(np.where(is_reached, pixels, 0))
        below, above = (np.where((k >= 0) & (k < size), k**2, 0) for k in (first, first + 1))
        expected: Any = np.where(is_reached, above - below, 0)
        found = attention_by_kernel(kernels_by(rule), size, points, levels)
        np.testing.assert_array_equal(found, expected, err_msg=f"size {size}")
