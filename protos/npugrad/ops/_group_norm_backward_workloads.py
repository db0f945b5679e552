"""Workloads of aclnnGroupNormBackward: sizes of models, and variants of small calls."""

from __future__ import annotations

import itertools

import numpy as np

from npugrad.dtypes import DType
from npugrad.workloads import Example, Filled, Workload, Workloads, named

_ALL = ("float32", "float16", "bfloat16")
_MASKS = tuple(mask for mask in itertools.product((False, True), repeat=3) if any(mask))


def _maps(n: int, c: int, size: int, group: int) -> dict[str, int]:
    return {"n": n, "c": c, "hxw": size * size, "group": group}


def _example() -> Filled:
    values = np.arange(1, 25, dtype=np.float32).reshape(2, 3, 4)
    return Filled(
        operands={
            "grad_out": values,
            "input": values,
            "mean": np.array([[6.5], [18.5]], np.float32),
            "rstd": np.full((2, 1), 0.2896827, np.float32),
            "gamma": np.ones(3, np.float32),
        },
        attrs={"n": 2, "c": 3, "hxw": 4, "group": 1, "output_mask": (True, True, True)},
        # grad_input is pure cancellation: zero but for rounding.
        expected={
            "grad_input": np.zeros((2, 3, 4)),
            "grad_gamma": np.array([-75.896867, 2.896827, 155.849293]),
            "grad_beta": np.array([68.0, 100.0, 132.0]),
        },
        expected_atol=2e-5,
    )


WORKLOADS = Workloads(
    named=named(
        Workload(name="tiny", sizes={"n": 2, "c": 8, "hxw": 16, "group": 4}),
        Workload(name="small", sizes={"n": 2, "c": 32, "hxw": 64, "group": 8}),
        Workload(name="medium", sizes={"n": 2, "c": 128, "hxw": 1024, "group": 32}),
        Workload(name="large", sizes={"n": 8, "c": 320, "hxw": 4096, "group": 32}),
        Workload(
            name="unet-block",
            model="diffusion UNet block",
            sizes={"n": 8, "c": 320, "hxw": 4096, "group": 32, "shape": (8, 320, 64, 64)},
            shown=True,
        ),
        Workload(
            name="unet-64",
            model="U-Net of latent diffusion, at 64 x 64",
            sizes={"n": 2, "c": 320, "hxw": 4096, "group": 32},
        ),
        Workload(
            name="unet-32",
            model="U-Net of latent diffusion, at 32 x 32",
            sizes={"n": 2, "c": 640, "hxw": 1024, "group": 32},
        ),
        Workload(
            name="unet-16",
            model="U-Net of latent diffusion, at 16 x 16",
            sizes={"n": 2, "c": 1280, "hxw": 256, "group": 32},
        ),
        Workload(
            name="diffusion",
            model="wide diffusion UNet block",
            sizes={"n": 8, "c": 512, "hxw": 4096, "group": 32, "shape": (8, 512, 64, 64)},
            simulated={"n": 2, "c": 128, "hxw": 256, "group": 32, "shape": (2, 128, 16, 16)},
        ),
        Workload(
            name="detector",
            model="finest level of a detector, pictures of 800 x 1066 pixels",
            sizes={"n": 2, "c": 256, "hxw": 13400, "group": 32, "shape": (2, 256, 100, 134)},
            simulated={"n": 2, "c": 64, "hxw": 650, "group": 32, "shape": (2, 64, 25, 26)},
        ),
        *(
            Workload(name=f"{n}x{c}x{size}x{size} G{group}", sizes=_maps(n, c, size, group), raced=_ALL)
            for n, c, size, group in (
                (8, 320, 64, 32),  # of a diffusion model
                (2, 128, 512, 32),  # larger than any cache
                (64, 64, 8, 32),
                (64, 64, 8, 8),
                (1, 64, 512, 1),
            )
        ),
    ),
    variants={"with_gamma": (False, True), "group": (1, 3), "output_mask": _MASKS},
    uneven={"n": 2, "c": 6, "hxw": 1037, "group": 2},
    canary={"n": 2, "c": 6, "hxw": 19, "group": 2},
    examples=(Example("", DType.FLOAT32, _example),),
)
