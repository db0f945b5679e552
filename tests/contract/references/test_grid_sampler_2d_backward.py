"""The GridSampler reference against torch float64, and its own kinks: ties, infinity, points outside."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
from tests.contract.references.against import against, assert_close

from npugrad.ops.grid_sampler_2d_backward import GRID_SAMPLER_2D_BACKWARD as RECORD
from npugrad.references.grid_sampler_2d_backward import reference

torch = pytest.importorskip("torch")

Array: TypeAlias = npt.NDArray[Any]
Arrays: TypeAlias = dict[str, Array]
NAMES = ("input_grad", "grid_grad")
MODES, PADDINGS = ("bilinear", "nearest"), ("zeros", "border", "reflection")
ALIGNMENTS = pytest.mark.parametrize("align", [False, True], ids=["pixels", "corners"])
ALL_PADDINGS = pytest.mark.parametrize("padding", PADDINGS)
ALL_MODES = pytest.mark.parametrize("mode", MODES)


class Case(NamedTuple):
    inputs: dict[str, Array]
    mode: str = "bilinear"
    padding: str = "zeros"
    align: bool = False

    def run(self, names: tuple[str, ...] = NAMES, dtype: str = "float64", **options: int) -> Arrays:
        """Run the reference into outputs full of NaN, so that an element left alone shows."""
        shapes = {"input_grad": self.inputs["input"].shape, "grid_grad": self.inputs["grid"].shape}
        outputs: Arrays = {name: np.full(shapes[name], np.nan, dtype) for name in names}
        attrs = {
            "interpolation_mode": MODES.index(self.mode),
            "padding_mode": PADDINGS.index(self.padding),
            "align_corners": self.align,
            "output_mask": tuple(name in names for name in NAMES),
        }
        reference(self.inputs, attrs, outputs, **options)
        return outputs

    def run_torch(self) -> Arrays:
        operands = [torch.from_numpy(self.inputs[name]) for name in ("grad_output", "input", "grid")]
        modes = MODES.index(self.mode), PADDINGS.index(self.padding)
        grads = torch.ops.aten.grid_sampler_2d_backward(*operands, *modes, self.align, [True, True])
        return {name: grad.numpy() for name, grad in zip(NAMES, grads, strict=True)}


def by_autograd(inputs: Any, attrs: Any) -> Arrays:
    """Differentiate torch's forward pass."""
    gradient, image, grid = (torch.from_numpy(np.asarray(a, np.float64)) for a in inputs.values())
    leaves = [image.requires_grad_(), grid.requires_grad_()]
    modes = MODES[attrs["interpolation_mode"]], PADDINGS[attrs["padding_mode"]], attrs["align_corners"]
    grads = torch.autograd.grad(torch.nn.functional.grid_sample(*leaves, *modes), leaves, gradient)
    return {name: grad.numpy() for name, grad in zip(NAMES, grads, strict=True)}


TestAgainstTorch = against(RECORD, by_autograd, count=400)


def make_inputs(
    sizes: tuple[int, int, int, int, int, int], seed: int = 0, dtype: str = "float64", spread: float = 1.6
) -> dict[str, Array]:
    """Draw operands for sizes N, C, H, W, OH, OW; some grid points lie outside the image."""
    n, c, h, w, oh, ow = sizes
    rng = np.random.default_rng(seed)
    return {
        "grad_output": rng.standard_normal((n, c, oh, ow)).astype(dtype),
        "input": rng.standard_normal((n, c, h, w)).astype(dtype),
        "grid": rng.uniform(-spread, spread, (n, oh, ow, 2)).astype(dtype),
    }


def one_point(x: float, y: float = 0.0, h: int = 3, w: int = 5) -> dict[str, Array]:
    """Make a call of one grid point with gradient 1 on an image of consecutive numbers."""
    image = np.arange(1.0, h * w + 1).reshape(1, 1, h, w)
    return {"grad_output": np.ones((1, 1, 1, 1)), "input": image, "grid": np.array([[[[x, y]]]], float)}


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@ALIGNMENTS
@ALL_PADDINGS
@ALL_MODES
def test_matches_native_op_on_the_lattice(mode: str, padding: str, align: bool, size: int) -> None:
    """Pixel centres, ties between them, both borders and reflections far away; sizes make positions exact."""
    extent = size + 1 if align else size
    positions = np.arange(-6 * size - 2, 6 * size + 3) / 2
    axis = 2 * positions / size - 1 if align else (2 * positions + 1) / size - 1
    inputs = make_inputs((1, 2, extent, extent, len(axis), len(axis)), size)
    inputs["grid"] = np.stack(np.meshgrid(axis, axis), axis=-1)[np.newaxis]
    case = Case(inputs, mode, padding, align)
    assert_close(case.run(), case.run_torch())


@pytest.mark.parametrize("shape", [(1, 1), (1, 6), (6, 1)], ids=str)
@ALIGNMENTS
@ALL_PADDINGS
@ALL_MODES
def test_matches_native_op_on_images_one_pixel_wide(
    mode: str, padding: str, align: bool, shape: tuple[int, int]
) -> None:
    inputs = make_inputs((2, 3, *shape, 5, 5))
    inputs["grid"][:, 0] = 0
    inputs["grid"][:, 1] = 1
    inputs["grid"][:, 2] = -1
    case = Case(inputs, mode, padding, align)
    assert_close(case.run(), case.run_torch())


@pytest.mark.parametrize("axis", ["x", "y"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30, -1e30, 1e308])
@ALIGNMENTS
@ALL_MODES
def test_points_infinitely_far_contribute_nothing_under_zeros_padding(
    mode: str, align: bool, value: float, axis: str
) -> None:
    inputs = one_point(value, 0) if axis == "x" else one_point(0, value)
    with np.errstate(all="raise"):
        grads = Case(inputs, mode, "zeros", align).run()
    assert not grads["input_grad"].any()
    assert not grads["grid_grad"].any()


@pytest.mark.parametrize("value", [np.inf, -np.inf, 1e30, -1e30, 1e308])
@ALIGNMENTS
@ALL_MODES
def test_border_padding_clips_infinity_to_the_edge(mode: str, align: bool, value: float) -> None:
    grads = Case(one_point(value), mode, "border", align).run()
    expected = np.zeros((1, 1, 3, 5))
    expected[0, 0, 1, 0 if value < 0 else 4] = 1
    np.testing.assert_array_equal(grads["input_grad"], expected)
    # One row down the image grows by 5; y runs over 3 pixels, or 2 between the corners' centres, in 2.
    slope_y = {"bilinear": 5 * (1.0 if align else 1.5), "nearest": 0}[mode]
    np.testing.assert_array_equal(grads["grid_grad"].reshape(2), [0, slope_y])


@pytest.mark.parametrize(
    ("padding", "value"),
    [("border", np.nan), ("reflection", np.nan), ("reflection", np.inf), ("reflection", -np.inf)],
    ids=str,
)
@ALIGNMENTS
@ALL_MODES
def test_positions_without_a_value_contribute_nothing(
    mode: str, align: bool, padding: str, value: float
) -> None:
    grads = Case(one_point(value), mode, padding, align).run()
    assert not grads["input_grad"].any()
    assert not grads["grid_grad"].any()


@pytest.mark.parametrize("value", [1e30, -1e30, 3e9, -1e16])
@ALIGNMENTS
@ALL_MODES
def test_reflection_folds_huge_coordinates_into_the_image(mode: str, align: bool, value: float) -> None:
    grads = Case(one_point(value), mode, "reflection", align).run()
    low, span = (0.0, 4) if align else (-0.5, 5)
    distance = abs(((value + 1) / 2 * 4 if align else ((value + 1) * 5 - 1) / 2) - low)
    rest = math.fmod(distance, span)
    is_backward = math.fmod(math.floor(distance / span), 2) == 1
    position = min(max((span - rest if is_backward else rest) + low, 0), 4)
    weights = np.maximum(0, 1 - np.abs(np.arange(5) - position))
    if mode == "nearest":
        weights = np.arange(5) == np.rint(position)
    expected = np.zeros((3, 5))
    expected[1] = weights
    np.testing.assert_array_equal(grads["input_grad"][0, 0], expected)
    assert np.isfinite(grads["grid_grad"]).all()


@ALL_MODES
def test_reflection_in_one_pixel_between_corners_ignores_the_coordinate(mode: str) -> None:
    grads = Case(one_point(np.nan, 0.3, 1, 1), mode, "reflection", True).run()
    np.testing.assert_array_equal(grads["input_grad"], [[[[1]]]])
    np.testing.assert_array_equal(grads["grid_grad"], [[[[0, 0]]]])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("scratch_bytes", [2**28, 3000])
def test_corners_outside_take_nothing_from_non_finite_data(scratch_bytes: int, bad: float) -> None:
    inputs = one_point(5.0)
    inputs["grad_output"] = np.full((1, 1, 1, 1), bad)
    inputs["input"][0, 0, 0, 0] = bad
    grads = Case(inputs).run(scratch_bytes=scratch_bytes)
    assert not grads["input_grad"].any()
    assert not grads["grid_grad"].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_gradient_reaches_its_corners_only(bad: float) -> None:
    inputs = one_point(0.9, 0.3)  # px = 4.25, py = 1.45: columns 4 and 5, the latter outside
    inputs["grad_output"] = np.full((1, 1, 1, 1), bad)
    grads = Case(inputs).run()
    touched = np.zeros((3, 5), bool)
    touched[1:, 4] = True
    np.testing.assert_array_equal(np.isfinite(grads["input_grad"][0, 0]), ~touched)
    assert not grads["input_grad"][0, 0][~touched].any()
    assert not np.isfinite(grads["grid_grad"]).any()
