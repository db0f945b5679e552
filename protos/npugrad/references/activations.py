"""Float64 references of activations: formulae of single elements, in blocks of a few arrays each."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad.references._blocks import SCRATCH_BYTES, store, tiles

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    Array = npt.NDArray[np.float64]
    Arrays = Mapping[str, npt.NDArray[Any] | None]
    Formula = Callable[[Array], Array]

_ELEMENT_BYTES = 80
"""Of the arrays that a formula needs at once, and of the integers and floats that Python's erfc makes."""


def elementwise(
    derivative: Formula, inputs: Arrays, output: npt.NDArray[Any], *, scratch_bytes: int = SCRATCH_BYTES
) -> None:
    """Write `grad_output` times the derivative at `input`, both broadcast, into an output.

    Args:
        derivative: Of float64 values, which it may overwrite; returns as many.
        inputs: `grad_output` and `input`, of any float dtypes and strides, broadcast to the output's shape.
        output: Array of any float dtype to fill.
        scratch_bytes: Maximum scratch memory, in bytes.
    """
    views = [np.broadcast_to(inputs[name], output.shape) for name in ("grad_output", "input")]  # type: ignore[arg-type]
    for tile in tiles(output.shape, _ELEMENT_BYTES, scratch_bytes):
        gradient, values = (np.array(view[tile], np.float64, order="C") for view in views)
        with np.errstate(all="ignore"):
            place: Any = (*tile, ...)  # a view, also where there are no axes
            store(output[place], gradient * derivative(values))


def silu(inputs: Arrays, attrs: Mapping[str, Any], outputs: Mapping[str, Any], **options: int) -> None:
    """Compute the gradient of x * sigmoid(x): s(x) * (1 + x * (1 - s(x)))."""

    def derivative(x: Array) -> Array:
        sigmoid = 1 / (1 + np.exp(-x))
        return sigmoid * (1 + x * (1 - sigmoid))

    for output in outputs.values():
        elementwise(derivative, inputs, output, **options)


def gelu(inputs: Arrays, attrs: Mapping[str, Any], outputs: Mapping[str, Any], **options: int) -> None:
    """Compute the gradient of x * Phi(x), or of its approximation by tanh, as `approximate` says."""

    def exact(x: Array) -> Array:
        erfc = np.fromiter(map(math.erfc, (x * -math.sqrt(0.5)).flat), np.float64, x.size).reshape(x.shape)
        return erfc / 2 + x * np.exp(x * x / -2) / math.sqrt(2 * math.pi)

    def approximate(x: Array) -> Array:
        slope, square = math.sqrt(2 / math.pi), x * x
        tanh = np.tanh(slope * x * (1 + 0.044715 * square))
        slopes: Array = (1 + tanh) / 2 + x / 2 * (1 - tanh * tanh) * slope * (1 + 3 * 0.044715 * square)
        return slopes

    for output in outputs.values():
        elementwise(approximate if attrs["approximate"] == "tanh" else exact, inputs, output, **options)
