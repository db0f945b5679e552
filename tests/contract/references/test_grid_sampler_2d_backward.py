"""The GridSampler reference against torch float64, the official example, and other layouts and budgets."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

from npugrad.references._blocks import store
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


def assert_close(actual: Arrays, expected: Arrays, tolerance: float = 1e-12) -> None:
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        scale = 1 + np.abs(want).max(initial=0)
        np.testing.assert_allclose(actual[name], want, rtol=0, atol=tolerance * scale, err_msg=name)


def assert_same_bits(actual: Arrays, expected: Arrays) -> None:
    assert {name: array.tobytes() for name, array in actual.items()} == {
        name: array.tobytes() for name, array in expected.items()
    }


@pytest.mark.parametrize("seed", range(25))
@ALIGNMENTS
@ALL_PADDINGS
@ALL_MODES
def test_matches_native_op(mode: str, padding: str, align: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, c, h, w, oh, ow = (int(size) for size in rng.choice([1, 1, 2, 3, 4, 7], 6))
    inputs = make_inputs((n, c, h, w, oh, ow), seed, spread=float(rng.choice([1, 2, 9])))
    case = Case(inputs, mode, padding, align)
    assert_close(case.run(), case.run_torch())


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


@pytest.mark.parametrize("seed", range(8))
@ALIGNMENTS
@ALL_PADDINGS
@ALL_MODES
def test_matches_autograd(mode: str, padding: str, align: bool, seed: int) -> None:
    case = Case(make_inputs((2, 3, 5, 4, 6, 3), seed), mode, padding, align)
    image, grid = (torch.from_numpy(case.inputs[name]).requires_grad_() for name in ("input", "grid"))
    out = torch.nn.functional.grid_sample(image, grid, mode, padding, align)
    grads = torch.autograd.grad(out, [image, grid], torch.from_numpy(case.inputs["grad_output"]))
    assert_close(case.run(), {name: grad.numpy() for name, grad in zip(NAMES, grads, strict=True)})


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_official_example(dtype: str) -> None:
    axis = np.array([-1, 0, 1])
    inputs = {
        "grad_output": np.ones((1, 1, 3, 3), dtype),
        "input": np.arange(1, 41).reshape(1, 1, 5, 8).astype(dtype),
        "grid": np.stack(np.meshgrid(axis, axis), axis=-1)[np.newaxis].astype(dtype),
    }
    grads = Case(inputs).run()
    outer, middle = [0.25, 0, 0, 0.25, 0.25, 0, 0, 0.25], [0.5, 0, 0, 0.5, 0.5, 0, 0, 0.5]
    np.testing.assert_array_equal(grads["input_grad"][0, 0], [outer, [0] * 8, middle, [0] * 8, outer])
    by_x = [[2, 2, -16], [68, 4, -96], [66, 2, -80]]
    by_y = [[1.25, 11.25, 10], [10, 20, 10], [-41.25, -91.25, -50]]
    np.testing.assert_array_equal(grads["grid_grad"][0], np.stack([np.array(by_x), np.array(by_y)], axis=-1))


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


@pytest.mark.parametrize("names", [(), ("input_grad",), ("grid_grad",)], ids=["none", *NAMES])
@ALL_MODES
def test_mask_selects_outputs_and_changes_no_bit(mode: str, names: tuple[str, ...]) -> None:
    case = Case(make_inputs((2, 3, 5, 4, 6, 3)), mode)
    full = case.run()
    assert_same_bits(case.run(names), {name: full[name] for name in names})


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_result_is_the_float64_result_rounded_once(dtype: str) -> None:
    case = Case(make_inputs((2, 3, 9, 8, 20, 30), dtype=dtype))
    exact = case.run()
    for name, rounded in case.run(dtype=dtype).items():
        expected = np.empty_like(rounded)
        store(expected, exact[name])
        assert rounded.tobytes() == expected.tobytes()


@pytest.mark.parametrize("scratch_bytes", [2**28, 6000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["transposed", "reversed", "gaps", "channels-last"])
@ALL_MODES
def test_layout_changes_no_bit(mode: str, layout: str, dtype: str, scratch_bytes: int) -> None:
    inputs = make_inputs((2, 3, 5, 4, 6, 3), dtype=dtype)
    strided = {}
    for name, array in inputs.items():
        if layout == "transposed":
            strided[name] = np.ascontiguousarray(array.T).T
        elif layout == "reversed":
            strided[name] = np.ascontiguousarray(array[:, ::-1, :, ::-1])[:, ::-1, :, ::-1]
        elif layout == "channels-last":
            strided[name] = np.ascontiguousarray(array.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
        else:
            wide = np.full((*array.shape, 3), np.nan, array.dtype)
            wide[..., 1] = array
            strided[name] = wide[..., 1]
    contiguous = Case(inputs, mode, "border").run(scratch_bytes=scratch_bytes)
    assert_same_bits(Case(strided, mode, "border").run(scratch_bytes=scratch_bytes), contiguous)


@pytest.mark.parametrize("scratch_bytes", [2**28, 6000])
def test_expanded_operands_equal_their_copies(scratch_bytes: int) -> None:
    inputs = make_inputs((2, 3, 5, 4, 6, 3))
    expanded = {
        "grad_output": np.broadcast_to(np.float64(0.7), (2, 3, 6, 3)),
        "input": np.broadcast_to(inputs["input"][:1, :1], (2, 3, 5, 4)),
        "grid": np.broadcast_to(inputs["grid"][:1], (2, 6, 3, 2)),
    }
    copies = {name: array.copy() for name, array in expanded.items()}
    assert_same_bits(
        Case(expanded).run(scratch_bytes=scratch_bytes), Case(copies).run(scratch_bytes=scratch_bytes)
    )


@pytest.mark.parametrize(
    "sizes", [(0, 2, 3, 4, 5, 6), (2, 0, 3, 4, 5, 6), (2, 3, 4, 5, 0, 6), (2, 3, 4, 5, 6, 0)], ids=str
)
@ALL_MODES
def test_empty_operands_give_zeros(mode: str, sizes: tuple[int, int, int, int, int, int]) -> None:
    n, c, h, w, oh, ow = sizes
    grads = Case(make_inputs(sizes), mode).run()
    assert grads["input_grad"].shape == (n, c, h, w)
    assert grads["grid_grad"].shape == (n, oh, ow, 2)
    assert not any(grad.any() for grad in grads.values())


@pytest.mark.parametrize("scratch_bytes", [300, 4000, 20_000, 100_000])
@pytest.mark.parametrize(
    "sizes",
    [(3, 2, 6, 7, 5, 4), (40, 2, 2, 3, 2, 1), (1, 60, 3, 3, 2, 3), (2, 2, 4, 3, 1, 90), (1, 1, 40, 9, 3, 2)],
    ids=["square", "many-images", "many-channels", "many-points", "many-pixels"],
)
@ALL_MODES
def test_blocks_change_only_the_last_digits(
    mode: str, sizes: tuple[int, int, int, int, int, int], scratch_bytes: int
) -> None:
    case = Case(make_inputs(sizes), mode)
    assert_close(case.run(scratch_bytes=scratch_bytes), case.run(), 1e-14)


def test_blocks_of_one_element_each() -> None:
    for mode, padding, align in itertools.product(MODES, PADDINGS, (False, True)):
        case = Case(make_inputs((2, 2, 3, 2, 2, 2)), mode, padding, align)
        assert_close(case.run(scratch_bytes=1), case.run(), 1e-14)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize(
    "sizes",
    [
        (4, 16, 80, 80, 80, 80),
        (1, 1, 2, 2, 250, 300),
        (1, 1, 900, 900, 40, 40),
        (1, 1, 1, 700_000, 50, 20),
        (1, 9000, 9, 9, 2, 3),
        (9000, 2, 6, 7, 2, 2),
    ],
    ids=["ordinary", "many-points", "large-plane", "large-row", "many-channels", "many-images"],
)
def test_scratch_memory_stays_within_the_budget(
    sizes: tuple[int, int, int, int, int, int], is_strided: bool, dtype: str
) -> None:
    inputs = make_inputs(sizes, dtype=dtype)
    if is_strided:
        inputs = {name: np.ascontiguousarray(array.T).T for name, array in inputs.items()}
    outputs = {
        "input_grad": np.empty(inputs["input"].shape, dtype),
        "grid_grad": np.empty(inputs["grid"].shape, dtype),
    }
    attrs = {"interpolation_mode": 0, "padding_mode": 2, "align_corners": False}
    scratch_bytes = 2**20
    tracemalloc.start()
    try:
        reference(inputs, attrs, outputs, scratch_bytes=scratch_bytes)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes <= scratch_bytes
    largest = max(array.size for array in inputs.values())
    assert largest * 8 > peak_bytes, "the case is to be larger than what it may use"
