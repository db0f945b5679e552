"""Parts that the normalisations share: parameters, consistent data, and how far right results may differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from npugrad.generators import Draw
from npugrad.operator import Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from npugrad.meta import CallMeta
    from npugrad.products import Product

    Array = npt.NDArray[Any]
    Sizes = tuple[int, int, int, int]
    """Samples, groups of channels, channels of a group, elements of a channel of a sample."""

MEAN, RSTD, SCALE = Draw("normal", (0.0, 0.1)), Draw("uniform", (0.5, 2.0)), Draw("normal", (1.0, 0.25))
_NORMALISED = ("grad_out", "input", "mean", "rstd")
_MASKS = ((True, False, False), (False, True, False), (False, False, True), (False, False, False))


def reads(scale: str, *outputs: str) -> dict[str, tuple[str, ...]]:
    """Operands that the gradients of input, scale and shift depend on."""
    return dict(zip(outputs, ((*_NORMALISED, scale), _NORMALISED, ("grad_out",)), strict=True))


def masked_samples(build: Callable[..., CallMeta], product: Product) -> Iterator[Sample]:
    """Yields samples with one output wanted, or none."""
    for mask in _MASKS:
        yield Sample("mask" + "".join("01"[bit] for bit in mask), build(product=product, output_mask=mask))


def make_inputs(call: CallMeta, rng: np.random.Generator, sizes: Sizes) -> dict[str, Array | None]:
    """Creates normal data with consistent statistics, as a forward pass would leave them."""
    samples, groups, channels, elements = sizes
    values = rng.standard_normal((samples, groups, channels * elements), dtype=np.float32) * 2 + 0.5
    mean = values.mean(axis=2) if values.size else np.zeros((samples, groups), np.float32)
    variance = values.var(axis=2) if values.size else np.ones((samples, groups), np.float32)
    grad_out = rng.standard_normal(values.size, dtype=np.float32)
    scale = rng.standard_normal(groups * channels, dtype=np.float32) + 1
    bias = rng.standard_normal(scale.size, dtype=np.float32)
    made = {"grad_out": grad_out, "input": values, "mean": mean, "rstd": 1 / np.sqrt(variance + 1e-5)}
    made |= {"gamma": scale, "weight": scale, "bias": bias}
    return {
        name: None if meta is None else made[name].reshape(meta.shape).astype(meta.dtype.numpy)
        for name, meta in call.inputs.items()
    }


def extra_tolerance(grad_out: Array | None, rstd: Array | None, scale: Array | None, sizes: Sizes) -> float:
    """grad_input is a difference of large terms: 8 eps of the largest one, max|rstd * grad_out * scale|."""
    if grad_out is None or rstd is None or not grad_out.size:
        return 0.0
    samples, groups, channels, _ = sizes
    # One pass over the data: its largest magnitude in each channel, in which the other factors are constant.
    largest = np.abs(grad_out.reshape(samples, groups, channels, -1)).max(axis=3).astype(np.float64)
    largest *= np.abs(rstd.reshape(samples, groups, 1).astype(np.float64))
    if scale is not None:
        largest *= np.abs(scale.reshape(groups, channels).astype(np.float64))
    eps = float(ml_dtypes.finfo(grad_out.dtype).eps)  # type: ignore[no-untyped-call]
    return 8 * eps * float(np.max(largest))
