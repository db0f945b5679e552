"""Float64 reference of aclnnSoftmaxBackward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad.references._blocks import SCRATCH_BYTES, spans, store, tiles

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

_ELEMENT_BYTES = 32


def reference(
    inputs: Mapping[str, Any],
    attrs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    *,
    scratch_bytes: int = SCRATCH_BYTES,
) -> None:
    """Compute (grad_output - sum(grad_output * output)) * output, the sum being over the axis `dim`.

    Args:
        inputs: `grad_output` and `output`, (*S), of any float dtypes and strides.
        attrs: `dim`, an axis counted from either end.
        outputs: `grad_input`, (*S), of any float dtype to fill; it may be absent.
        scratch_bytes: Maximum scratch memory, in bytes.
    """
    for target in outputs.values():
        arrays = (inputs["grad_output"], inputs["output"], target)
        gradient, values, result = (np.moveaxis(np.atleast_1d(array), attrs["dim"], -1) for array in arrays)
        *rows, length = result.shape
        parts = [*spans(length, _ELEMENT_BYTES, scratch_bytes)]
        row_bytes = min(length * _ELEMENT_BYTES, scratch_bytes) + 16
        for tile in tiles(tuple(rows), row_bytes, scratch_bytes):
            blocks = [(*tile, part) for part in parts]
            total = sum(np.sum(_read(gradient[b]) * _read(values[b]), axis=-1, keepdims=True) for b in blocks)
            for block in blocks:
                with np.errstate(all="ignore"):
                    store(result[block], (_read(gradient[block]) - total) * _read(values[block]))


def _read(array: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    return np.array(array, np.float64, order="C")
