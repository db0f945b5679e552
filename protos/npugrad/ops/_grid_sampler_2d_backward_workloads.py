"""Calls that are made of aclnnGridSampler2DBackward: sizes of models, and what small calls vary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from npugrad.dtypes import DType
from npugrad.ties import settle
from npugrad.workloads import Example, Filled, Workload, Workloads, named

if TYPE_CHECKING:
    from npugrad.meta import CallMeta
    from npugrad.operator import Arrays


def _sizes(n: int, c: int, h: int, w: int | None = None) -> dict[str, int]:
    """As many points as pixels."""
    w = h if w is None else w
    return {"n": n, "c": c, "h": h, "w": w, "oh": h, "ow": w}


def _settle(call: CallMeta, operands: Arrays) -> None:
    image, grid = call.tensor("input"), operands["grid"]
    if grid is None:
        return
    for axis, size in ((0, image.shape[3]), (1, image.shape[2])):
        # For corners aligned and not, so that the same data serves either; nearest jumps at the halves.
        for scale in (size, size - 1):
            settle(grid[..., axis], scale / 2, (size - 1) / 2, steps=2)


def _example() -> Filled:
    points = np.array([-1, -1, 0, -1, 1, -1, -1, 0, 0, 0, 1, 0, -1, 1, 0, 1, 1, 1], np.float32)
    edge, middle, zero = [0.25, 0, 0, 0.25, 0.25, 0, 0, 0.25], [0.5, 0, 0, 0.5, 0.5, 0, 0, 0.5], [0] * 8
    grid_grad = [2, 1.25, 2, 11.25, -16, 10, 68, 10, 4, 20, -96, 10, 66, -41.25, 2, -91.25, -80, -50]
    return Filled(
        operands={
            "grad_output": np.ones((1, 1, 3, 3), np.float32),
            "input": np.arange(1, 41, dtype=np.float32).reshape(1, 1, 5, 8),
            "grid": points.reshape(1, 3, 3, 2),
        },
        attrs={
            "interpolation_mode": 0,
            "padding_mode": 0,
            "align_corners": False,
            "output_mask": (True, True),
        },
        expected={
            "input_grad": np.array([edge, zero, middle, zero, edge]).reshape(1, 1, 5, 8),
            "grid_grad": np.array(grid_grad).reshape(1, 3, 3, 2),
        },
    )


WORKLOADS = Workloads(
    named=named(
        Workload(name="tiny", sizes=_sizes(1, 3, 8)),
        Workload(name="small", sizes=_sizes(1, 3, 16)),
        Workload(name="medium", sizes=_sizes(4, 3, 128)),
        Workload(name="large", sizes=_sizes(4, 64, 128)),
        Workload(name="pictures", model="spatial transformer", sizes=_sizes(8, 3, 224), shown=True),
        Workload(name="features", model="feature warping", sizes=_sizes(4, 64, 64), shown=True),
        Workload(
            name="warping",
            model="warped feature maps",
            sizes={
                **_sizes(4, 64, 64),
                "interpolation_mode": 0,
                "padding_mode": 1,
                "align_corners": True,
            },
        ),
        Workload(
            name="warp",
            model="warping of large feature maps",
            sizes=_sizes(4, 64, 160),
            simulated={"n": 2, "c": 16, "h": 60, "w": 50, "oh": 50, "ow": 40},
        ),
        Workload(
            name="flow",
            model="optical flow of pictures",
            sizes=_sizes(8, 3, 480, 640),
            simulated=_sizes(2, 3, 90, 120),
        ),
    ),
    variants={
        "interpolation_mode": (0, 1),
        "padding_mode": (0, 1, 2),
        "align_corners": (False, True),
        "output_mask": ((True, True), (True, False), (False, True)),
    },
    uneven={"n": 2, "c": 21, "h": 13, "w": 19, "oh": 11, "ow": 23},
    examples=(Example("", DType.FLOAT32, _example),),
    settle=_settle,
)
