"""Workloads of aclnnGridSampler3DBackward: sizes of models, and variants of small calls."""

from __future__ import annotations

import numpy as np

from npugrad.dtypes import DType
from npugrad.ops._grid_sampler import VARIANTS, example_attrs, ties
from npugrad.workloads import Example, Filled, Workload, Workloads, measured, named


# fmt: off
def _sizes(n: int, c: int, d: int, h: int = 0, w: int = 0, **modes: int) -> dict[str, int]:
    """Sizes with as many points as voxels; by default of a cube."""
    h, w = h or d, w or d
    return {"n": n, "c": c, "d": d, "h": h, "w": w, "od": d, "oh": h, "ow": w, **modes}


def _example() -> Filled:
    """The page prints no results; these follow from its formulas."""
    points = np.array([-1, -1, 0, -1, 1, -1, -1, 0, 0, 0, 1, 0], np.float32).reshape(1, 1, 2, 2, 3)
    image = np.arange(1, 10, dtype=np.float32).reshape(1, 1, 1, 3, 3)
    input_grad = np.array([0.25, 0, 0, 0.5, 0, 0, 0.125, 0.5, 0]).reshape(image.shape)
    grid_grad = np.array([0.75, 0.75, -0.125, 2.625, -2.625, 0.875, 6, 2.25, -1, 0.75, -12, -2])
    return Filled({"grad_output": np.ones((1, 1, 1, 2, 2), np.float32), "input": image, "grid": points},
        example_attrs(), {"input_grad": input_grad, "grid_grad": grid_grad.reshape(points.shape)})


_MODES = {"zeros": (0, 0), "border": (0, 1), "reflection": (0, 2), "nearest": (1, 0)}

WORKLOADS = Workloads(
    named=named(
        *measured(_sizes, (1, 3, 4), (1, 3, 8), (2, 3, 32), (2, 32, 48)),
        Workload(name="features", model="warped feature volumes", sizes=_sizes(2, 16, 24), shown=True),
        Workload(name="registration", model="registration of volumes", sizes=_sizes(1, 1, 80, 96, 112),
            reduced=_sizes(1, 1, 40, 48, 56), simulated=_sizes(1, 1, 10, 12, 14), shown=True),
        Workload(name="warp", model="warping of feature volumes",
            sizes=_sizes(1, 32, 48, padding_mode=1, align_corners=True),
            simulated=_sizes(1, 8, 8, 10, 12, padding_mode=1, align_corners=True)),
        *(Workload(name=f"2x32x64^3 {mode}", raced=("float32",), pattern="turned", sizes={**_sizes(2, 32, 64),
            "od": 16, "interpolation_mode": nearest, "padding_mode": padding})
            for mode, (nearest, padding) in _MODES.items())),
    variants=VARIANTS, uneven={"n": 2, "c": 19, "d": 5, "h": 7, "w": 9, "od": 4, "oh": 6, "ow": 11},
    canary={"n": 1, "c": 3, "d": 3, "h": 4, "w": 5, "od": 2, "oh": 3, "ow": 7},
    examples=(Example("", DType.FLOAT32, _example),), ties=ties)
