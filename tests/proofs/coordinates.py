"""Shows that kernels and references choose PyTorch's pixels: `make prove-coordinates`.

Millions of finite points for each padding and alignment, of images and volumes, against PyTorch's float32
kernels for AVX2 and for AVX-512 where the processor has them: identity grids, lattices, random points, points
a few roundings from pixels' edges, and far ones. The input is quadratic along the axis, so the gradient of a
point names its pixel and its slope, exactly; in mode nearest the gradient of the input counts the points of a
pixel. Deformable attention is held against mmcv's formula in PyTorch's operations. By PyTorch's kernels
without fused operations (level `default`) the rule `torch-unfused` is tried.

With --level a process tries one level of PyTorch's kernels, which the environment must ask for.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from npugrad import OPERATORS
from npugrad.coordinates import CoordinateRule, GridAxis
from npugrad_server.backends.cpu.kernels import Kernels, cpu_flags

Float32Array = npt.NDArray[np.float32]
Array = npt.NDArray[Any]

CAPABILITY = "ATEN_CPU_CAPABILITY"
"""Environment variable by which PyTorch picks its kernels."""
LEVELS = {
    "default": set[str](),
    "avx2": {"avx2", "fma"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
}
"""Levels of them, with the flags of a processor that each needs."""
PADDINGS = ("zeros", "border", "reflection")
_SIZES = "1 2 3 4 5 7 14 16 31 32 37 49 64 77 100 127 128 199 256 257 320 512 777 1000 1024"
SIZES = tuple(map(int, _SIZES.split()))
"""Pixels of an axis; every sum stays exact in float32."""
_BLOCK = 1 << 16


def usable_levels() -> list[str]:
    """Levels of PyTorch's kernels that this processor can run."""
    return [name for name, flags in LEVELS.items() if flags <= cpu_flags()]


def blocks(count: int, align_corners: bool) -> Iterator[tuple[int, Float32Array]]:
    """Sizes in turn, each with points on its axis, until there are so many points."""
    rng = np.random.default_rng(15)
    block, made = min(_BLOCK, -(-count // len(SIZES))), 0
    for size in itertools.cycle(SIZES):
        points = _points(size, align_corners, min(block, count - made), rng)
        made += len(points)
        yield size, points
        if made == count:
            return


def _points(size: int, align_corners: bool, count: int, rng: np.random.Generator) -> Float32Array:
    import torch

    part = -(-count // 5)
    # As every spatial transformer starts, of as many points as pixels or of others.
    columns = size * int(rng.integers(1, 4)) if rng.integers(2) else int(rng.integers(2, 2000))
    theta = torch.eye(2, 3)[None]
    identity = torch.nn.functional.affine_grid(theta, [1, 1, 2, max(2, columns)], align_corners=align_corners)
    lattice = np.linspace(-3, 3, int(rng.integers(2, part + 3)))
    halves = rng.integers(-5 * size, 6 * size, part) / 2
    edges = 2 * halves / max(1, size - 1) - 1 if align_corners else (2 * halves + 1) / size - 1
    edges = edges.astype(np.float32)
    edges += rng.integers(-3, 4, part) * np.spacing(edges)
    # Not so far that positions overflow: PyTorch 2.13 crashes on reflected infinities.
    far = rng.choice([-1.0, 1.0], part) * 10 ** rng.uniform(0, 30, part)
    inside = rng.uniform(-1.2, 1.2, part)
    families = (np.resize(identity[0, 0, :, 0].numpy(), part), np.resize(lattice, part), inside, edges, far)
    return np.concatenate([family.astype(np.float32) for family in families])[:count]


class GridCall:
    """Points along the last axis of an image or a volume that is one pixel wide along the others."""

    def __init__(self, axes: int, size: int, points: Float32Array, weights: Float32Array) -> None:
        """Makes the operands: `weights` are those of the points in grad_output."""
        ones = (1,) * (axes - 1)
        self.record = OPERATORS[f"grid_sampler_{axes}d_backward"]
        self.input = (np.arange(size, dtype=np.float32) ** 2).reshape(1, 1, *ones, size)
        self.grid = np.zeros((1, *ones, len(points), axes), np.float32)
        self.grid[..., 0] = points
        self.grad_output = weights.reshape(1, 1, *ones, -1)

    def by_kernel(
        self, kernels: Kernels, mode: int, padding: int, align_corners: bool
    ) -> tuple[Array, Array]:
        """Gradients of the input and of the points, from the service's kernel."""
        inputs = {"grad_output": self.grad_output, "input": self.input, "grid": self.grid}
        outputs = {"input_grad": np.empty_like(self.input), "grid_grad": np.empty_like(self.grid)}
        names = ("interpolation_mode", "padding_mode", "align_corners", "output_mask")
        attrs = dict(zip(names, (mode, padding, align_corners, (True, True)), strict=True))
        kernels.run(self.record, inputs, attrs, outputs)
        return outputs["input_grad"].reshape(-1), outputs["grid_grad"][..., 0].reshape(-1)

    def by_torch(self, mode: int, padding: int, align_corners: bool) -> tuple[Array, Array]:
        import torch

        operands = map(torch.from_numpy, (self.grad_output, self.input, self.grid))
        backward: Any = getattr(torch.ops.aten, self.record.name)
        found = backward(*operands, mode, padding, align_corners, [True, True])
        return found[0].numpy().reshape(-1), found[1].numpy()[..., 0].reshape(-1)


def by_rule(axis: GridAxis, points: Float32Array, rule: CoordinateRule) -> Array:
    """The gradient of the points that the rule's pixels and slopes give."""
    position, slope = axis.locate(points, rule)
    before = np.floor(position)

    def value(pixel: Array) -> Array:
        return np.where((pixel >= 0) & (pixel < axis.size), pixel**2, 0)

    gradient: Array = (value(before + 1) - value(before)) * slope
    return gradient.astype(np.float32)


@dataclass
class Row:
    """Points that were tried, and for how many of them kernel and rule differ from PyTorch."""

    tried: int = 0
    of_kernel: int = 0
    of_rule: int = 0


def grid_row(
    axis: GridAxis, count: int, kernels: Kernels | None, rule: CoordinateRule = CoordinateRule.TORCH
) -> Row:
    """Tries so many points, whatever the axis' size; no kernel where there is none with this rule."""
    row, rng = Row(), np.random.default_rng(16)
    ways = axis.padding_mode, axis.align_corners
    for size, points in blocks(count, axis.align_corners):
        call = GridCall(axis.axes, size, points, np.ones(len(points), np.float32))
        _, expected = call.by_torch(0, *ways)
        row.tried += len(points)
        row.of_rule += int((by_rule(replace(axis, size=size), points, rule) != expected).sum())
        if kernels is None:
            continue
        row.of_kernel += int((call.by_kernel(kernels, 0, *ways)[1] != expected).sum())
        call = GridCall(axis.axes, size, points, rng.integers(1, 64, len(points)).astype(np.float32))
        row.of_kernel += int((call.by_kernel(kernels, 1, *ways)[0] != call.by_torch(1, *ways)[0]).sum())
    return row


def attention_by_kernel(kernels: Kernels, size: int, points: Float32Array, levels: int = 1) -> Array:
    """The difference of values on either side of each location, from the service's kernel.

    Levels beyond the first lie over it, which the kernel computes in another way; nothing reaches them.
    """
    inputs = {
        "value": np.zeros((1, size, 1, 8), np.float32),
        "spatial_shape": np.array([[1, size]] * levels, np.int32),
        "level_start_index": np.zeros(levels, np.int32),
        "location": np.full((1, len(points), 1, levels, 1, 2), -9, np.float32),
        "attn_weight": np.ones((1, len(points), 1, levels, 1), np.float32),
        "grad_output": np.zeros((1, len(points), 8), np.float32),
    }
    inputs["value"][0, :, 0, 0] = np.arange(size) ** 2
    inputs["location"][:, :, :, 0] = np.stack((points, np.full_like(points, 0.5)), -1).reshape(1, -1, 1, 1, 2)
    inputs["grad_output"][..., 0] = 1
    outputs = {"grad_location": np.empty_like(inputs["location"])}
    kernels.run(OPERATORS["multi_scale_deformable_attention_grad"], inputs, {}, outputs)
    # Products with the size are beyond what float32 sums exactly; the differences are whole numbers.
    return np.asarray(np.rint(outputs["grad_location"][0, :, 0, 0, 0, 0] / size))


def attention_row(kernels: Kernels, count: int) -> Row:
    """Tries so many points against mmcv's formula."""
    import torch

    row = Row()
    for size, grid in blocks(count, align_corners=False):
        points = (grid + np.float32(1)) / np.float32(2)
        pixel = torch.from_numpy(points) * size - 0.5
        is_reached = (pixel > -1) & (pixel < size)
        before = torch.floor(torch.where(is_reached, pixel, 0)).double()
        first, second = (torch.where((k >= 0) & (k < size), k**2, 0) for k in (before, before + 1))
        expected = torch.where(is_reached, second - first, 0).numpy()
        row.of_kernel += int((attention_by_kernel(kernels, size, points) != expected).sum())
        row.tried += len(points)
    return row


def prove(level: str, count: int) -> bool:
    """Prints a line for each row; whether nothing differs."""
    import torch

    torch.set_num_threads(1)
    found = torch.backends.cpu.get_cpu_capability().lower()
    if found != level:
        raise SystemExit(
            f"found PyTorch's kernels for {found}; expected {level}, as {CAPABILITY} can ask for"
        )
    kernels, different = Kernels(1), 0
    for axes, padding, align in product((2, 3), range(3), (False, True)):
        is_fused = axes == 3 or level != "default"
        rule = CoordinateRule.TORCH if is_fused else CoordinateRule.TORCH_UNFUSED
        row = grid_row(GridAxis(1, padding, align, axes), count, kernels if is_fused else None, rule)
        by_kernel = f"{row.of_kernel} of the kernel ({kernels.variant}), " if is_fused else ""
        print(
            f"coordinates: PyTorch {torch.__version__} {level}, {axes}-D, {PADDINGS[padding]}, "
            f"align_corners={align}: {row.tried} points, different: {by_kernel}{row.of_rule} of rule {rule}",
            flush=True,
        )
        different += row.of_kernel + row.of_rule
    row = attention_row(kernels, count)
    print(
        f"coordinates: mmcv's formula, attention: {row.tried} points, different: {row.of_kernel} of the "
        f"kernel ({kernels.variant})"
    )
    kernels.close()
    return different + row.of_kernel == 0


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--points", type=int, default=10**7, help="points of each row; default 10000000")
    options.add_argument("--level", choices=LEVELS, help="this level only, in this process")
    given = options.parse_args()
    if given.level:
        return 0 if prove(given.level, given.points) else 1
    command = [sys.executable, "-m", "tests.proofs.coordinates", "--points", str(given.points), "--level"]
    codes = [
        subprocess.run([*command, level], env={**os.environ, CAPABILITY: level}, check=False).returncode
        for level in usable_levels()
    ]
    return max(codes, default=0)


if __name__ == "__main__":
    sys.exit(main())
