"""Float64 reference of aclnnLayerNormBackward.

A row is normalised like a group of group normalisation that has one channel of one pixel for each element of
the row: weight is gamma, and the sums over the rows are those over the samples.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from npugrad.references import group_norm_backward
from npugrad.references._blocks import SCRATCH_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

_NAMES = {"grad_input": "grad_input", "grad_weight": "grad_gamma", "grad_bias": "grad_beta"}


def reference(
    inputs: Mapping[str, npt.NDArray[Any] | None],
    attrs: Mapping[str, Any],
    outputs: Mapping[str, npt.NDArray[Any]],
    *,
    scratch_bytes: int = SCRATCH_BYTES,
) -> None:
    """Compute the gradients of layer normalisation with respect to its input, weight and bias.

    Args:
        inputs: `grad_out` and `input`, (A1, ..., Ai, R1, ..., Rj); `mean` and `rstd`, any shapes of A1*...*Ai
            elements; `weight`, (R1, ..., Rj), or None for ones. `bias` is not read. Any float dtypes and
            any strides.
        attrs: `normalized_shape`, (R1, ..., Rj); others are not read.
        outputs: C-contiguous arrays of any float dtype to fill, each of which may be absent: `grad_input`,
            `grad_weight` and `grad_bias`. They become zeros if input is empty.
        scratch_bytes: Maximum scratch memory, in bytes, apart from a few numbers per row.
    """
    mean = inputs["mean"]
    sizes = {"n": 0 if mean is None else mean.size, "c": math.prod(attrs["normalized_shape"])}
    group_norm_backward.reference(
        {**inputs, "gamma": inputs["weight"]},
        {**sizes, "hxw": 1, "group": 1},
        {_NAMES[name]: output for name, output in outputs.items()},
        scratch_bytes=scratch_bytes,
    )
