"""Calls and operands of a case, the same in every process; needs NumPy and the contract alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from npugrad.meta import CallMeta, TensorMeta
from npugrad.ops import get_operator

Array = npt.NDArray[Any]
Call = Callable[[], Mapping[str, Array]]
Operands = Mapping[str, Array | None]


def made(case: Mapping[str, Any]) -> tuple[CallMeta, dict[str, Array | None]]:
    """The call of a case and its operands.

    Args:
        case: `operator`, `dtype`, and as `sizes` the keywords of the record's `build`. `pattern` is
            ``"turned"`` for the grid of a turned image; else operands are drawn as those of samples are.
    """
    record = get_operator(case["operator"])
    call = record.build(dtype=case["dtype"], **case["sizes"])
    operands = record.make_inputs(call, np.random.default_rng(11))
    if case.get("pattern") == "turned":
        operands["grid"] = _turned(call)
    return call, operands


def _turned(call: CallMeta, angle: float = 0.3, jitter_pixels: float = 1.0) -> Array:
    """Sampling points of a turned image or volume, each moved a little: neighbours stay near each other."""
    meta = call.tensor("grid")
    sizes = meta.shape[1:-1]
    *deep, y, x = np.meshgrid(*(np.linspace(-1, 1, size) for size in sizes), indexing="ij")
    turned = [np.cos(angle) * x - np.sin(angle) * y, np.sin(angle) * x + np.cos(angle) * y]
    points = np.stack([*turned, *deep], -1)
    moved = np.random.default_rng(12).uniform(-1, 1, meta.shape) * jitter_pixels / np.array(sizes[::-1])
    return np.asarray(points + moved).astype(meta.dtype.numpy)


def results_of(case: Mapping[str, Any], call: CallMeta) -> dict[str, TensorMeta]:
    """What each result is that the call has."""
    metas = get_operator(case["operator"]).infer(call)
    return {name: meta for name, meta in metas.items() if meta is not None}


def empty_outputs(case: Mapping[str, Any], call: CallMeta, dtype: Any = None) -> dict[str, Array]:
    """New memory for each result, of its own type unless another one is named."""
    metas = results_of(case, call)
    return {name: np.empty(meta.shape, dtype or meta.dtype.numpy) for name, meta in metas.items()}
