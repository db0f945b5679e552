"""Float64 reference of aclnnBatchNormBackward.

With xh = (input - mean) * invstd, the statistics being saved or running, each channel of M elements has

    grad_bias = sum of grad_out;  grad_weight = sum of grad_out * xh
    grad_input = weight * invstd * (grad_out, in training less (grad_bias + xh * grad_weight) / M)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad.references._blocks import SCRATCH_BYTES, spans, store, tiles

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    Array = npt.NDArray[Any]

# Peak scratch memory of an element and of a channel of a block, in bytes.
_ELEMENT_BYTES = 40  # grad_out and input in float64, two products, and a strided run before its cast
_CHANNEL_BYTES = 96  # mean, invstd, weight, both sums, and what is computed of them


def reference(
    inputs: Mapping[str, Array | None],
    attrs: Mapping[str, Any],
    outputs: Mapping[str, Array],
    *,
    scratch_bytes: int = SCRATCH_BYTES,
) -> None:
    """Compute the gradients of batch normalisation with respect to its input, weight and bias.

    Args:
        inputs: `grad_out` and `input`, (N, C, ...); the others (C), or None for ones (`weight`,
            `running_var`, `save_invstd`) and zeros (`running_mean`, `save_mean`). Any float dtypes.
        attrs: `training` and, if it is false, `eps`; others are not read.
        outputs: C-contiguous arrays of any float dtype to fill, each of which may be absent: `grad_input`,
            `grad_weight` and `grad_bias`. Sums of nothing are zeros.
        scratch_bytes: Maximum scratch memory, in bytes.
    """
    given = {**inputs, **outputs}.items()
    arrays = {name: np.moveaxis(a, 1, 0) if a.ndim > 1 else a for name, a in given if a is not None}
    for output in outputs.values():
        output.fill(0)
    with np.errstate(all="ignore"):  # NaN and infinite data are computed without warnings
        channels = len(arrays["input"]) if arrays["input"].size else 0
        for block in spans(channels, _CHANNEL_BYTES, scratch_bytes // 4):
            _channels({name: a[block] for name, a in arrays.items()}, attrs, scratch_bytes // 4 * 3)


def _channels(arrays: Mapping[str, Array], attrs: Mapping[str, Any], scratch_bytes: int) -> None:
    shape = arrays["input"].shape
    sums, axes = np.zeros((2, shape[0])), tuple(range(1, len(shape)))

    def numbers(name: str, default: float) -> Array:
        return np.array(arrays[name], np.float64) if name in arrays else np.full(shape[0], default)

    def read(name: str, tile: tuple[slice, ...]) -> Array:
        return np.array(arrays[name][tile], np.float64, order="C")  # whose sums do not depend on strides

    def along(each: Array, tile: tuple[slice, ...]) -> Array:
        return each[tile[0]].reshape(-1, *(1,) * len(axes))

    if attrs["training"]:
        mean, invstd = numbers("save_mean", 0.0), numbers("save_invstd", 1.0)
    else:
        mean, invstd = numbers("running_mean", 0.0), (numbers("running_var", 1.0) + attrs["eps"]) ** -0.5
    for tile in tiles(shape, _ELEMENT_BYTES, scratch_bytes):
        gradient = read("grad_out", tile)
        sums[0, tile[0]] += gradient.sum(axis=axes)
        gradient *= read("input", tile) - along(mean, tile)
        sums[1, tile[0]] += gradient.sum(axis=axes)
    for name, values in (("grad_bias", sums[0]), ("grad_weight", sums[1] * invstd)):
        if name in arrays:
            store(arrays[name], values)
    scale, sums = numbers("weight", 1.0) * invstd, sums / arrays["input"][0].size
    for tile in tiles(shape, _ELEMENT_BYTES, scratch_bytes) if "grad_input" in arrays else ():
        gradient = read("grad_out", tile)
        if attrs["training"]:
            gradient -= along(sums[0], tile)
            gradient -= (read("input", tile) - along(mean, tile)) * along(sums[1] * invstd**2, tile)
        store(arrays["grad_input"][tile], gradient * along(scale, tile))
