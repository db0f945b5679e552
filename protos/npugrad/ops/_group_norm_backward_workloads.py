"""Workloads of aclnnGroupNormBackward: sizes of models, and variants of small calls."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from npugrad.dtypes import DType
from npugrad.workloads import Example, Filled, Workload, Workloads, measured, model, named


# fmt: off
def _sizes(n: int, c: int, hxw: int, group: int, **shape: tuple[int, ...]) -> dict[str, Any]:
    return {"n": n, "c": c, "hxw": hxw, "group": group, **shape}


def _example() -> Filled:
    """Its grad_input is pure cancellation: zero but for rounding."""
    values = np.arange(1, 25, dtype=np.float32).reshape(2, 3, 4)
    mean, rstd = np.array([[6.5], [18.5]], np.float32), np.full((2, 1), 0.2896827, np.float32)
    return Filled(
        {"grad_out": values, "input": values, "mean": mean, "rstd": rstd, "gamma": np.ones(3, np.float32)},
        {**_sizes(2, 3, 4, 1), "output_mask": (True, True, True)},
        {"grad_input": np.zeros((2, 3, 4)), "grad_gamma": np.array([-75.896867, 2.896827, 155.849293]),
            "grad_beta": np.array([68.0, 100.0, 132.0])},
        expected_atol=2e-5)


# The first of those that kernels race on is of a diffusion model, the second larger than any cache.
_RACED = ((8, 320, 64, 32), (2, 128, 512, 32), (64, 64, 8, 32), (64, 64, 8, 8), (1, 64, 512, 1))
_LATENT = "U-Net of latent diffusion, at"

WORKLOADS = Workloads(
    named=named(
        *measured(_sizes, (2, 8, 16, 4), (2, 32, 64, 8), (2, 128, 1024, 32), (8, 320, 4096, 32)),
        Workload(name="unet-block", model="diffusion UNet block", shown=True,
            sizes=_sizes(8, 320, 4096, 32, shape=(8, 320, 64, 64))),
        model("unet-64", f"{_LATENT} 64 x 64", **_sizes(2, 320, 4096, 32)),
        model("unet-32", f"{_LATENT} 32 x 32", **_sizes(2, 640, 1024, 32)),
        model("unet-16", f"{_LATENT} 16 x 16", **_sizes(2, 1280, 256, 32)),
        Workload(name="diffusion", model="wide diffusion UNet block",
            sizes=_sizes(8, 512, 4096, 32, shape=(8, 512, 64, 64)),
            simulated=_sizes(2, 128, 256, 32, shape=(2, 128, 16, 16))),
        Workload(name="detector", model="finest level of a detector, pictures of 800 x 1066 pixels",
            sizes=_sizes(2, 256, 13400, 32, shape=(2, 256, 100, 134)),
            simulated=_sizes(2, 64, 650, 32, shape=(2, 64, 25, 26))),
        *(Workload(name=f"{n}x{c}x{size}x{size} G{group}", sizes=_sizes(n, c, size * size, group),
            raced=("float32", "float16", "bfloat16")) for n, c, size, group in _RACED)),
    variants={"with_gamma": (False, True), "group": (1, 3),
        "output_mask": tuple(filter(any, itertools.product((False, True), repeat=3)))},
    uneven=_sizes(2, 6, 1037, 2), canary=_sizes(2, 6, 19, 2),
    examples=(Example("", DType.FLOAT32, _example),))
