"""Workloads of aclnnLayerNormBackward: sizes of models, and variants of small calls."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from npugrad.dtypes import DType
from npugrad.workloads import Example, Filled, Workload, Workloads, named

_MASKS = tuple(mask for mask in itertools.product((False, True), repeat=3) if any(mask))


def _rows(*leading: int, of: int) -> dict[str, Any]:
    return {"leading": leading, "normalized": (of,)}


def _example() -> Filled:
    values = np.array([[2, 3], [4, 5]], np.float32)
    return Filled(
        operands={
            "grad_out": values,
            "input": values,
            "mean": np.array([[2], [3]], np.float32),
            "rstd": np.array([[4], [5]], np.float32),
            "weight": np.ones(2, np.float32),
            "bias": np.zeros(2, np.float32),
        },
        attrs={"normalized_shape": (2,), "output_mask": (True, True, True)},
        # The page prints none; by its formula, with (input - mean) * rstd being {0, 4} and {5, 10}.
        expected={
            "grad_input": np.array([[-2, -94], [-877.5, -1747.5]]),
            "grad_weight": np.array([20.0, 62.0]),
            "grad_bias": np.array([6.0, 8.0]),
        },
    )


WORKLOADS = Workloads(
    named=named(
        Workload(name="tiny", sizes=_rows(2, 4, of=16)),
        Workload(name="small", sizes=_rows(2, 64, of=32)),
        Workload(name="medium", sizes=_rows(2, 512, of=256)),
        Workload(name="large", sizes=_rows(8, 1024, of=768)),
        Workload(
            name="transformer",
            model="transformer, 8 sequences of 1024 tokens",
            sizes=_rows(8, 1024, of=768),
            simulated=_rows(2, 64, of=768),
            shown=True,
        ),
        Workload(
            name="language",
            model="language model, one sequence of 2048 tokens",
            sizes=_rows(1, 2048, of=4096),
            simulated=_rows(1, 64, of=1024),
        ),
        Workload(
            name="8x1024x768",
            sizes=_rows(8, 1024, of=768),
            raced=("float32", "float16", "bfloat16"),
        ),
    ),
    variants={"with_weight": (False, True), "with_bias": (False, True), "output_mask": _MASKS},
    uneven={"leading": (3, 7), "normalized": (5, 13)},
    canary={"leading": (3, 2), "normalized": (5, 3)},
    examples=(Example("", DType.FLOAT32, _example),),
)
