"""Register two photographs by gradient descent, with every gradient computed by the service.

The stereo pair "motorcycle" that scikit-image ships shows one scene from two cameras. A smooth displacement
field (cubic B-splines over a coarse grid of control points) moves the pixels of the right picture until it
matches the left one, and is kept smooth by a penalty on its bending. The picture is sampled here, on the
CPU; the gradient of the sampling positions is `grid_sampler_2d_backward` on the service, and Adam moves the
control points, from coarse to fine.

    python client/examples/register_images.py --target localhost:50051 --out build/registration.png

Ends with status 1 unless the mean squared error at least halves. Needs the extra `demo` (scikit-image).
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import skimage
from skimage import io

from npugrad_client import Client, Tls

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]
    Singles = npt.NDArray[np.float32]

CONTROL_POINTS = (12, 16)
LEVELS = ((32, 80, 0.016), (16, 80, 0.008), (8, 80, 0.004), (4, 80, 0.002))
"""(shrink factor, steps, learning rate) of each level, coarse to fine."""
SHOWN_FACTOR = 2
"""Shrink factor of the picture that is written and of the errors that are reported."""
BENDING = 0.05
"""Weight of the squared second differences of the control points."""


@dataclass(frozen=True)
class Level:
    """One resolution: pictures (C, H, W), splines (H, rows) and (W, columns), the identity grid (H, W, 2)."""

    left: Singles
    right: Singles
    rows: Floats
    columns: Floats
    identity: Floats


def load_pair() -> tuple[Floats, Floats]:
    """The two photographs, (H, W, 3) in 0..1."""
    folder = Path(skimage.__file__).parent / "data"
    left, right = (
        io.imread(folder / f"motorcycle_{side}.png")[..., :3] / 255.0 for side in ("left", "right")
    )
    return left, right


def shrink(picture: Floats, factor: int) -> Singles:
    """Averages blocks of factor x factor pixels: (H, W, C) to (C, H / factor, W / factor)."""
    height, width = (size // factor for size in picture.shape[:2])
    blocks: Floats = picture[: height * factor, : width * factor].reshape(height, factor, width, factor, -1)
    small: Floats = blocks.mean(axis=(1, 3))
    return small.transpose(2, 0, 1).astype(np.float32)


def spline_weights(size: int, points: int) -> Floats:
    """Weights (size, points) of uniform cubic B-splines, so that weights @ control is smooth."""
    position = np.linspace(0, points - 3, size)
    first = np.minimum(position.astype(int), points - 4)
    u = position - first
    basis = (
        np.stack([(1 - u) ** 3, 3 * u**3 - 6 * u**2 + 4, -3 * u**3 + 3 * u**2 + 3 * u + 1, u**3], axis=1) / 6
    )
    weights = np.zeros((size, points))
    for offset in range(4):
        weights[np.arange(size), first + offset] = basis[:, offset]
    return weights


def make_level(left: Floats, right: Floats, factor: int) -> Level:
    """Both pictures and the splines at one resolution."""
    small = shrink(left, factor)
    _, height, width = small.shape
    y, x = ((2 * np.arange(size) + 1) / size - 1 for size in (height, width))
    return Level(
        left=small,
        right=shrink(right, factor),
        rows=spline_weights(height, CONTROL_POINTS[0]),
        columns=spline_weights(width, CONTROL_POINTS[1]),
        identity=np.stack(np.meshgrid(x, y), axis=-1),
    )


def displaced_grid(level: Level, control: Floats) -> Singles:
    """Sampling positions (H, W, 2) in -1..1 for control points (2, rows, columns)."""
    field: Floats = np.einsum("hm,kmn,wn->hwk", level.rows, control, level.columns)
    return (level.identity + field).astype(np.float32)


def sample(picture: Singles, grid: Singles) -> Singles:
    """Bilinear sampling with border padding, `align_corners` false: (C, H, W) at (OH, OW, 2)."""
    _, height, width = picture.shape
    x = np.clip(((grid[..., 0] + 1) * width - 1) / 2, 0, width - 1)
    y = np.clip(((grid[..., 1] + 1) * height - 1) / 2, 0, height - 1)
    x0, y0 = np.minimum(x.astype(int), width - 2), np.minimum(y.astype(int), height - 2)
    u, v = x - x0, y - y0
    top = picture[:, y0, x0] * (1 - u) + picture[:, y0, x0 + 1] * u
    bottom = picture[:, y0 + 1, x0] * (1 - u) + picture[:, y0 + 1, x0 + 1] * u
    sampled: Floats = top * (1 - v) + bottom * v
    return sampled.astype(np.float32)


def control_gradient(client: Client, level: Level, control: Floats) -> Floats:
    """Gradient of the mean squared error with respect to the control points, (2, rows, columns)."""
    grid = displaced_grid(level, control)
    error = sample(level.right, grid) - level.left
    gradients = client.grid_sampler_2d_backward(
        grad_output=(2 * error / error.size)[np.newaxis],
        input=level.right[np.newaxis],
        grid=grid[np.newaxis],
        interpolation_mode="bilinear",
        padding_mode="border",
        align_corners=False,
        output_mask=(False, True),
        label="register_images",
    )
    at_pixels = np.asarray(gradients.grid_grad)[0]
    at_control: Floats = np.einsum("hm,hwk,wn->kmn", level.rows, at_pixels, level.columns)
    return at_control


def bending_gradient(control: Floats) -> Floats:
    """Gradient of the sum of squared second differences of the control points along both axes."""
    down, across = (np.diff(np.eye(points), n=2, axis=0) for points in CONTROL_POINTS)
    return 2 * (down.T @ down @ control + control @ across.T @ across)


def penalised_gradient(client: Client, level: Level, control: Floats) -> Floats:
    """The gradient of the descent: that of the error, from the service, and that of the bending."""
    return control_gradient(client, level, control) + BENDING * bending_gradient(control)


def adam(gradient: Callable[[Floats], Floats], start: Floats, steps: int, rate: float) -> Floats:
    """Runs Adam with the usual constants (0.9, 0.99) for a number of steps."""
    point, mean, square = start, np.zeros_like(start), np.zeros_like(start)
    for step in range(1, steps + 1):
        slope = gradient(point)
        mean, square = 0.9 * mean + 0.1 * slope, 0.99 * square + 0.01 * slope**2
        point = point - rate * (mean / (1 - 0.9**step)) / (np.sqrt(square / (1 - 0.99**step)) + 1e-12)
    return point


def mean_squared_error(level: Level, control: Floats) -> float:
    """Error of the displaced right picture against the left one."""
    return float(np.mean((sample(level.right, displaced_grid(level, control)) - level.left) ** 2))


def save_picture(path: Path, level: Level, control: Floats) -> None:
    """Writes six tiles. Above: left, right, right moved. Below: difference before and after, displacement."""
    moved = sample(level.right, displaced_grid(level, control))
    field = np.linalg.norm(displaced_grid(level, control) - level.identity, axis=-1)
    shift = np.broadcast_to(field / max(float(field.max()), 1e-12), level.left.shape)
    before, after = np.abs(level.right - level.left), np.abs(moved - level.left)
    rows = [
        np.concatenate(tiles, axis=2) for tiles in ((level.left, level.right, moved), (before, after, shift))
    ]
    pixels = np.clip(np.concatenate(rows, axis=1).transpose(1, 2, 0), 0, 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    io.imsave(path, (pixels * 255).astype(np.uint8), check_contrast=False)


def register(client: Client, out: Path) -> tuple[float, float]:
    """Registers the pair and writes the picture; returns the error before and after."""
    left, right = load_pair()
    control = np.zeros((2, *CONTROL_POINTS))
    for factor, steps, rate in LEVELS:
        level = make_level(left, right, factor)
        control = adam(partial(penalised_gradient, client, level), control, steps, rate)
        height, width = level.left.shape[1:]
        print(
            f"  {width:3d} x {height:3d}: error {mean_squared_error(level, control):.5f} after {steps} steps",
            flush=True,
        )
    level = make_level(left, right, SHOWN_FACTOR)
    save_picture(out, level, control)
    return mean_squared_error(level, np.zeros_like(control)), mean_squared_error(level, control)


def main() -> int:
    """Command line; the exit status tells whether the error at least halved."""
    parser = argparse.ArgumentParser(description="Register two photographs with gradients from the service.")
    parser.add_argument("--target", action="append", help="address of the server; again for another one")
    parser.add_argument("--tls", action="store_true", help="encrypt")
    parser.add_argument("--tls-ca", help="PEM file of the server's authority; the system's by default")
    parser.add_argument("--tls-certificate", help="PEM file of the certificate to show, for mutual TLS")
    parser.add_argument("--tls-key", help="PEM file of its private key")
    parser.add_argument("--out", type=Path, default=Path("build/registration.png"), help="picture to write")
    options = parser.parse_args()
    files = {name: getattr(options, f"tls_{name}") for name in ("ca", "certificate", "key")}
    how = Tls(**files) if options.tls or any(files.values()) else None
    with Client(options.target or ["localhost:50051"], tls=how) as client:
        before, after = register(client, options.out)
    halved = after <= before / 2
    print(f"mean squared error {before:.5f} before, {after:.5f} after ({before / after:.1f} times smaller)")
    print(f"picture: {options.out}")
    return 0 if halved else 1


if __name__ == "__main__":
    sys.exit(main())
