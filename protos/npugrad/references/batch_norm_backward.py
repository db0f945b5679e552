"""Float64 reference of aclnnBatchNormBackward.

With the channels first, every channel c of M elements has, from the statistics of the batch in training and
else the running ones,

    xh          = (input - mean) * invstd
    grad_bias   = sum of grad_out
    grad_weight = sum of grad_out * xh
    grad_input  = weight * invstd * (grad_out - (grad_bias + xh * grad_weight) / M)   in training, else
                  weight * invstd * grad_out
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
_ELEMENT_BYTES = 40  # grad_out and xh in float64, two products, and a strided run before its cast
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
    data = {name: np.moveaxis(_given(inputs, name), 1, 0) for name in ("grad_out", "input")}
    if not data["input"].size:
        for output in outputs.values():
            output.fill(0)
        return
    with np.errstate(all="ignore"):  # NaN and infinite data are computed without warnings
        for block in spans(len(data["input"]), _CHANNEL_BYTES, scratch_bytes // 4):
            part = {name: array[block] for name, array in data.items()}
            wanted = {name: np.moveaxis(a, 1, 0) if a.ndim > 1 else a for name, a in outputs.items()}
            mean, invstd = _statistics(inputs, attrs, block)
            weight = _channel(inputs, "weight", block, 1.0)
            sums = _sums(part, mean, scratch_bytes // 4 * 3)
            for name, values in (("grad_bias", sums[0]), ("grad_weight", sums[1] * invstd)):
                if name in wanted:
                    store(wanted[name][block], values)
            if "grad_input" in wanted:
                count = part["input"][0].size
                means = (sums[0] / count, mean, sums[1] * invstd**2 / count) if attrs["training"] else ()
                output = wanted["grad_input"][block]
                _grad_input(part, weight * invstd, means, output, scratch_bytes // 4 * 3)


def _given(inputs: Mapping[str, Array | None], name: str) -> Array:
    array = inputs[name]
    assert array is not None, name
    return array


def _channel(inputs: Mapping[str, Array | None], name: str, block: slice, default: float) -> Array:
    array = inputs[name]
    return np.full(block.stop - block.start, default) if array is None else np.array(array[block], np.float64)


def _statistics(
    inputs: Mapping[str, Array | None], attrs: Mapping[str, Any], block: slice
) -> tuple[Array, Array]:
    if attrs["training"]:
        return _channel(inputs, "save_mean", block, 0.0), _channel(inputs, "save_invstd", block, 1.0)
    variance = _channel(inputs, "running_var", block, 1.0)
    return _channel(inputs, "running_mean", block, 0.0), 1 / np.sqrt(variance + attrs["eps"])


def _read(array: Array, tile: tuple[slice, ...]) -> Array:
    """A copy in C order, in which sums are the same whatever the strides."""
    return np.array(array[tile], np.float64, order="C")


def _along(numbers: Array, tile: tuple[slice, ...]) -> Array:
    """Numbers of the tile's channels, to be combined with its elements."""
    return numbers[tile[0]].reshape(-1, *(1,) * (len(tile) - 1))


def _sums(data: Mapping[str, Array], mean: Array, scratch_bytes: int) -> Array:
    """Of each channel, the sum of grad_out and that of grad_out * (input - mean)."""
    sums = np.zeros((2, len(mean)))
    for tile in tiles(data["input"].shape, _ELEMENT_BYTES, scratch_bytes):
        gradient, axes = _read(data["grad_out"], tile), tuple(range(1, len(tile)))
        sums[0, tile[0]] += gradient.sum(axis=axes)
        gradient *= _read(data["input"], tile) - _along(mean, tile)
        sums[1, tile[0]] += gradient.sum(axis=axes)
    return sums


def _grad_input(
    data: Mapping[str, Array],
    scale: Array,
    means: tuple[Array, ...],
    output: Array,
    scratch_bytes: int,
) -> None:
    """`means`, in training: of grad_out, of input, and of grad_out * xh * invstd."""
    for tile in tiles(data["input"].shape, _ELEMENT_BYTES, scratch_bytes):
        values = _read(data["grad_out"], tile)
        if means:
            gradient, mean, share = (_along(each, tile) for each in means)
            values -= gradient
            values -= (_read(data["input"], tile) - mean) * share
        store(output[tile], values * _along(scale, tile))
