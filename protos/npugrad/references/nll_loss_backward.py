"""Float64 reference of aclnnNLLLossBackward: each sample has one element that counts, that of its class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad.references._blocks import SCRATCH_BYTES, flat_float64, spans, store

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

_SAMPLE_BYTES = 96  # class, place, whether it counts, gradient, weight and result, and what is kept of them
_MEAN = 1


def reference(
    inputs: Mapping[str, npt.NDArray[Any] | None],
    attrs: Mapping[str, Any],
    outputs: Mapping[str, npt.NDArray[Any]],
    *,
    scratch_bytes: int = SCRATCH_BYTES,
) -> None:
    """Compute the gradient of the negative log likelihood loss with respect to its input.

    Args:
        inputs: `grad_output`, (N) or one element; `target`, (N) or (), of an integer dtype; `weight`, (C);
            `total_weight`, one element. `input` is not read. Any float dtypes and any strides.
        attrs: `reduction`, 0 (none), 1 (mean) or 2 (sum), and `ignore_index`. A target of that number, or
            outside 0 to C - 1, leaves its row zero.
        outputs: `grad_input`, (N, C) or (C), a C-contiguous array of any float dtype to fill.
        scratch_bytes: Maximum scratch memory, in bytes.
    """
    operands = (inputs[name] for name in ("grad_output", "target", "weight", "total_weight"))
    gradient, target, weight, total_weight = (np.asarray(array) for array in operands)
    for output in outputs.values():
        output.fill(0)
        rows = output.reshape(target.size, -1) if output.size else output.reshape(0, 1)
        for block in spans(len(rows), _SAMPLE_BYTES, scratch_bytes):
            classes = np.array(target.reshape(-1)[block], np.int64)
            is_in = (classes != attrs["ignore_index"]) & (classes >= 0) & (classes < rows.shape[1])
            place = block if gradient.size == target.size else slice(0, 1)
            values = -flat_float64(gradient, place.start, place.stop)
            with np.errstate(all="ignore"):  # NaN and infinite data are computed without warnings
                if attrs["reduction"] == _MEAN:
                    values /= flat_float64(total_weight, 0, 1)
                values = np.broadcast_to(values, classes.shape)[is_in] * weight[classes[is_in]].astype(
                    np.float64
                )
            stored = np.empty(values.shape, rows.dtype)
            store(stored, values)
            rows[block][np.flatnonzero(is_in), classes[is_in]] = stored
