"""Workloads of aclnnLayerNormBackward: sizes of models, and variants of small calls."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from npugrad.dtypes import DType
from npugrad.workloads import Example, Filled, Workload, Workloads, measured, named


# fmt: off
def _rows(leading: tuple[int, ...], of: int) -> dict[str, Any]:
    return {"leading": leading, "normalized": (of,)}


def _example() -> Filled:
    """The page prints no results; by its formula, with (input - mean) * rstd being {0, 4} and {5, 10}."""
    values, scale = np.array([[2, 3], [4, 5]], np.float32), {"weight": np.ones(2), "bias": np.zeros(2)}
    data = {"mean": np.array([[2], [3]]), "rstd": np.array([[4], [5]]), **scale}
    sums = {"grad_weight": [20.0, 62.0], "grad_bias": [6.0, 8.0]}
    return Filled({"grad_out": values, "input": values, **{n: a.astype(np.float32) for n, a in data.items()}},
        {"normalized_shape": (2,), "output_mask": (True, True, True)},
        {name: np.array(values) for name, values in
            {"grad_input": [[-2, -94], [-877.5, -1747.5]], **sums}.items()})


WORKLOADS = Workloads(
    named=named(
        *measured(_rows, ((2, 4), 16), ((2, 64), 32), ((2, 512), 256), ((8, 1024), 768)),
        Workload(name="transformer", model="transformer, 8 sequences of 1024 tokens", shown=True,
            sizes=_rows((8, 1024), 768), simulated=_rows((2, 64), 768)),
        Workload(name="language", model="language model, one sequence of 2048 tokens",
            sizes=_rows((1, 2048), 4096), simulated=_rows((1, 64), 1024)),
        Workload(name="8x1024x768", sizes=_rows((8, 1024), 768), raced=("float32", "float16", "bfloat16"))),
    variants={"with_weight": (False, True), "with_bias": (False, True),
        "output_mask": tuple(filter(any, itertools.product((False, True), repeat=3)))},
    uneven={"leading": (3, 7), "normalized": (5, 13)}, canary={"leading": (3, 2), "normalized": (5, 3)},
    examples=(Example("", DType.FLOAT32, _example),))
