"""The GridSampler references, of images and volumes, against torch float64 and against loops over points."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.contract.references.against import against, assert_close, assert_same_bits
from tests.derived import told
from tests.operators import GRID_SAMPLER, GRID_SAMPLER_3D

from npugrad.layout import view
from npugrad.meta import TensorMeta
from npugrad.operator import OpRecord

torch = pytest.importorskip("torch")

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
Way = tuple[str, str, bool]

MODES, PADDINGS = ("bilinear", "nearest"), ("zeros", "border", "reflection")
NAMES = ("input_grad", "grid_grad")
WAYS = list(itertools.product(MODES, PADDINGS, (False, True)))
ODD_VALUES = (np.nan, np.inf, -np.inf, 1e30, -1e30, 1.7e308, 3e9, -3e9, -1e16)
RECORDS = pytest.mark.parametrize("record", [GRID_SAMPLER, GRID_SAMPLER_3D], ids=lambda r: r.name)


def sides_of(record: OpRecord) -> int:
    """Spatial axes of an image or a volume."""
    return record.build().tensor("input").rank - 2


def way_of(attrs: Mapping[str, Any]) -> Way:
    return MODES[attrs["interpolation_mode"]], PADDINGS[attrs["padding_mode"]], attrs["align_corners"]


def on_axis(value: float, size: int, padding: str, align: bool) -> tuple[float, float]:
    """Position of a coordinate and its derivative, by steps 1 and 2 of the page; NaN where there is none."""
    slope = (size - 1) / 2 if align else size / 2
    position = (value + 1) * slope - (0 if align else 0.5)
    if padding == "reflection":
        low, span = (0.0, size - 1.0) if align else (-0.5, float(size))
        if not span:
            return 0.0, 0.0
        if not math.isfinite(position):
            return math.nan, 0.0
        distance = abs(position - low)
        rest, turned = math.fmod(distance, span), math.floor(distance / span) % 2 == 1
        slope *= (-1 if turned else 1) * (-1 if position < low else 1)
        position = low + (span - rest if turned else rest)
    if padding != "zeros" and (position <= 0 or position >= size - 1):
        return (0.0 if position <= 0 else size - 1.0), 0.0
    return (position if abs(position) < 2**31 else math.nan), slope


def by_points(inputs: Any, attrs: Mapping[str, Any]) -> Arrays:
    """One point after another, one pixel after another: a pixel's weight is a product of triangles."""
    grad, image, grid = (np.asarray(array, np.float64) for array in inputs.values())
    mode, padding, align = way_of(attrs)
    found = {"input_grad": np.zeros(image.shape), "grid_grad": np.zeros(grid.shape)}
    sizes = image.shape[2:]
    for n, *point in np.ndindex(*grid.shape[:-1]):
        # Coordinates begin with x, which is the last axis.
        at = [
            on_axis(v, s, padding, align)
            for v, s in zip(grid[(n, *point)][::-1].tolist(), sizes, strict=True)
        ]
        if any(math.isnan(position) for position, _ in at):
            continue
        values = grad[(n, slice(None), *point)]
        for pixel in itertools.product(*(range(math.floor(p), math.floor(p) + 2) for p, _ in at)):
            if not all(0 <= index < size for index, size in zip(pixel, sizes, strict=True)):
                continue
            here = (n, slice(None), *pixel)
            if mode == "nearest":
                # Python rounds halves to even.
                found["input_grad"][here] += values * (pixel == tuple(round(p) for p, _ in at))
                continue
            weights = [1 - abs(p - index) for (p, _), index in zip(at, pixel, strict=True)]
            found["input_grad"][here] += math.prod(weights) * values
            dot = float(values @ image[here])
            for axis, ((p, slope), index) in enumerate(zip(at, pixel, strict=True)):
                others = math.prod(weights[:axis] + weights[axis + 1 :])
                sign = 1 if index > p else -1
                found["grid_grad"][(n, *point, len(at) - 1 - axis)] += dot * slope * sign * others
    return found


def by_autograd(inputs: Any, attrs: Mapping[str, Any]) -> Arrays:
    """Differentiate torch's forward pass."""
    gradient, image, grid = (torch.from_numpy(np.asarray(array, np.float64)) for array in inputs.values())
    leaves = [image.requires_grad_(), grid.requires_grad_()]
    out = torch.nn.functional.grid_sample(*leaves, *way_of(attrs))
    grads = torch.autograd.grad(out, leaves, gradient)
    return {name: grad.numpy() for name, grad in zip(NAMES, grads, strict=True)}


TestImagesAgainstTorch = against(GRID_SAMPLER, by_autograd, count=400)
TestVolumesAgainstTorch = against(GRID_SAMPLER_3D, by_autograd, count=200)
TestImagesPointByPoint = against(GRID_SAMPLER, by_points, count=50)
TestVolumesPointByPoint = against(GRID_SAMPLER_3D, by_points, count=150)


def attrs_of(way: Way) -> dict[str, Any]:
    mode, padding, align = way
    return {
        "interpolation_mode": MODES.index(mode),
        "padding_mode": PADDINGS.index(padding),
        "align_corners": align,
        "output_mask": (True, True),
    }


def run(record: OpRecord, inputs: Arrays, way: Way = ("bilinear", "zeros", False), **options: int) -> Arrays:
    """Run the reference into outputs full of NaN, so that an element left alone shows; it warns nobody."""
    outputs = {name: np.full(inputs[name.removesuffix("_grad")].shape, np.nan) for name in NAMES}
    compute: Any = record.reference
    with np.errstate(all="raise", under="ignore"):
        compute(inputs, attrs_of(way), outputs, **options)
    return outputs


def at_points(points: Array, extents: tuple[int, ...], n: int = 1, c: int = 2) -> Arrays:
    """Random data on an image of those extents, read at the same points in each of n images."""
    rng = np.random.default_rng(len(points))
    return {
        "grad_output": rng.standard_normal((n, c, *points.shape[:-1])),
        "input": rng.standard_normal((n, c, *extents)),
        "grid": np.broadcast_to(points, (n, *points.shape)).copy(),
    }


def one_point(record: OpRecord, *coordinates: float, extents: tuple[int, ...] = (4, 3, 5)) -> Arrays:
    """One point with gradient 1 in an image of consecutive numbers; coordinates not given are 0.1."""
    sides = sides_of(record)
    extents = extents[-sides:]
    grid = np.array([*coordinates, *(0.1,) * (sides - len(coordinates))])
    image = np.arange(1.0, math.prod(extents) + 1).reshape(1, 1, *extents)
    return {
        "grad_output": np.ones((1,) * (2 + sides)),
        "input": image,
        "grid": grid.reshape(*(1,) * (1 + sides), -1),
    }


@RECORDS
def test_centres_edges_and_halves(record: OpRecord) -> None:
    """Pixels, ties between them, both borders and reflections far away; sizes make positions exact."""
    sides = sides_of(record)
    for way, size in itertools.product(WAYS, (1, 2, 4, 8) if sides == 2 else (1, 2, 4)):
        far = (6 if sides == 2 else 3) * size + 2
        positions, align = np.arange(-far, far + 1) / 2, way[2]
        axis = 2 * positions / size - 1 if align else (2 * positions + 1) / size - 1
        axes = (axis, axis) if sides == 2 else (axis, axis[::3], axis[1::2])
        points = np.stack(np.meshgrid(*axes, indexing="ij"), -1)
        inputs = at_points(points, (size + 1 if align else size,) * sides)
        found = run(record, inputs, way)
        with told((way, size)):
            assert_close(found, by_autograd(inputs, attrs_of(way)))
            if size <= 2:
                assert_close(found, by_points(inputs, attrs_of(way)), 1e-11)


@RECORDS
def test_images_one_pixel_wide(record: OpRecord) -> None:
    """But for one axis; points in the middle, on both borders and elsewhere."""
    sides = sides_of(record)
    points = np.random.default_rng(1).uniform(-1.6, 1.6, (5,) * sides + (sides,))
    points[0], points[1], points[2] = 0, 1, -1
    for way, axis in itertools.product(WAYS, (None, 0, 1)):
        inputs = at_points(points, tuple(6 if side == axis else 1 for side in range(sides)), n=2, c=3)
        with told((way, axis)):
            assert_close(run(record, inputs, way), by_autograd(inputs, attrs_of(way)))


@RECORDS
def test_points_that_are_not_finite_or_far_away(record: OpRecord) -> None:
    """Nowhere, on the edge, or folded into the image, by padding; nothing warns. Each has its own image."""
    cases = list(itertools.product(ODD_VALUES, range(sides_of(record))))
    inputs = {
        name: np.repeat(array, len(cases), axis=0)
        for name, array in one_point(record, extents=(4, 4, 5)).items()
    }
    for place, (value, axis) in zip(inputs["grid"], cases, strict=True):
        place[..., axis] = value
    for way in WAYS:
        found = run(record, inputs, way)
        assert all(np.isfinite(array).all() for array in found.values())
        assert_close(found, by_points(inputs, attrs_of(way)))
        for number, (value, _) in enumerate(cases):
            # 1.7e308 gives an infinite position.
            is_somewhere = {"zeros": False, "border": not np.isnan(value), "reflection": abs(value) < 1e308}
            assert found["input_grad"][number].any() == is_somewhere[way[1]], (way, value)
            assert is_somewhere[way[1]] or not found["grid_grad"][number].any(), (way, value)


@RECORDS
def test_reflection_in_one_pixel_between_corners_ignores_the_coordinate(record: OpRecord) -> None:
    for mode in MODES:
        found = run(record, one_point(record, np.nan, 0.3, extents=(1, 1, 1)), (mode, "reflection", True))
        assert (found["input_grad"] == 1).all()
        assert not found["grid_grad"].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@RECORDS
def test_data_that_are_not_finite_reach_no_more_than_the_corners_inside(record: OpRecord, bad: float) -> None:
    inputs = one_point(record, 5)
    inputs["grad_output"][...] = inputs["input"][...] = bad
    for scratch_bytes in (2**28, 3000):
        assert not any(array.any() for array in run(record, inputs, scratch_bytes=scratch_bytes).values())
    inputs = one_point(record, 0.9, 0.3)  # x is 4.25, beyond the last column; y 1.45, z 1.7
    inputs["grad_output"][...] = bad
    found = run(record, inputs)
    touched = np.zeros(inputs["input"].shape, bool)
    around = touched[..., 1:3, 4] if record is GRID_SAMPLER else touched[..., 1:3, 1:3, 4]
    around[...] = True
    np.testing.assert_array_equal(np.isfinite(found["input_grad"]), ~touched)
    assert not found["input_grad"][~touched].any()
    assert not np.isfinite(found["grid_grad"]).any()


def test_channels_last_are_the_same_values() -> None:
    """What the record makes of volumes in NDHWC, as a backend gets them."""
    points = np.random.default_rng(5).uniform(-1.6, 1.6, (3, 2, 4, 3))
    inputs = {n: a.astype(np.float32) for n, a in at_points(points, (4, 3, 2), n=2, c=3).items()}
    last = {
        name: np.ascontiguousarray(array if name == "grid" else np.moveaxis(array, 1, -1))
        for name, array in inputs.items()
    }
    metas = {
        name: TensorMeta("float32", array.shape, "ND" if name == "grid" else "NDHWC")
        for name, array in last.items()
    }
    call = GRID_SAMPLER_3D.ordered(GRID_SAMPLER_3D.build().with_inputs(**metas))
    views = {name: view(call.tensor(name), array.tobytes()) for name, array in last.items()}
    for name, array in inputs.items():
        np.testing.assert_array_equal(views[name], array)
    for way in WAYS:
        assert_same_bits(run(GRID_SAMPLER_3D, views, way), run(GRID_SAMPLER_3D, inputs, way))
