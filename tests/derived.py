"""Calls that tests of every operator make of its record: uneven ones, smaller, longer, laid out otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from npugrad.ops import OPERATORS
from npugrad.validation import validate_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from npugrad.meta import CallMeta
    from npugrad.operator import OpRecord

    Array = npt.NDArray[Any]
    Operands = dict[str, Array | None]

FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Derived:
    """A kind of call of an operator.

    Attributes:
        record: Its operator.
        sizes: Keywords of the record's `build`.
        name: For test identifiers.
    """

    record: OpRecord
    sizes: Mapping[str, Any]
    name: str

    def __str__(self) -> str:
        return f"{self.record.name}-{self.name}"

    def call(self, dtype: str = "float32", **changed: Any) -> CallMeta:
        """The call in a type."""
        return self.record.build(**{"dtype": dtype, **self.sizes, **changed})

    def operands(self, call: CallMeta, seed: int = 1) -> Operands:
        """Data for it."""
        return dict(self.record.make_inputs(call, np.random.default_rng(seed)))


def varied(record: OpRecord, divisor: int = 1) -> list[Derived]:
    """The uneven call, its sizes divided, with each value of each variant at least once."""
    sizes, variants = smaller(record, divisor).sizes, record.workloads.variants
    count = max(map(len, variants.values()), default=1)
    return [
        Derived(
            record,
            {
                **sizes,
                **{key: values[i % len(values)] for key, values in variants.items() if key not in sizes},
            },
            f"variant{i}",
        )
        for i in range(count)
    ]


def smaller(record: OpRecord, divisor: int) -> Derived:
    """The uneven call with each size divided where that breaks no further constraint; none gets below 2."""
    sizes = dict(record.workloads.uneven)
    for key, value in sizes.items():
        if type(value) is int and divisor > 1:
            changed = {**sizes, key: max(2, value // divisor)}
            sizes = sizes if _complaints(record, changed) - _complaints(record, sizes) else changed
    return Derived(record, sizes, "smaller")


def longer(record: OpRecord, elements: int, divisor: int = 1) -> list[Derived]:
    """The uneven call with one size so long that an operand has so many elements, for each size that may."""
    base = smaller(record, divisor).sizes
    allowed, found = _complaints(record, base), []
    for key, value in base.items():
        sizes, factor = dict(base), 1
        while type(value) is not bool and factor < 2**20:
            factor *= 2
            sizes[key] = _multiplied(value, factor)
            if _complaints(record, sizes) - allowed:
                break
            if (
                max(meta.size for meta in record.build(**sizes).inputs.values() if meta is not None)
                >= elements
            ):
                found.append(Derived(record, sizes, f"long_{key}"))
                break
    return found


def each(derive: Callable[[OpRecord], list[Derived]]) -> Iterator[Derived]:
    """What is derived of every record."""
    for record in OPERATORS.values():
        yield from derive(record)


def _multiplied(value: Any, factor: int) -> Any:
    """A size, or the first one in a nest of them, multiplied."""
    if isinstance(value, int):
        return value * factor
    return (_multiplied(value[0], factor), *value[1:])


def _complaints(record: OpRecord, sizes: Mapping[str, Any]) -> set[str]:
    return {violation.id for violation in validate_call(record, record.build(**sizes)).violations}


def _transposed(array: Array) -> Array:
    return np.ascontiguousarray(array.T).T


def _axis_1_last(array: Array) -> Array:
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(array, 1, -1)), -1, 1) if array.ndim > 1 else array


def _gaps(array: Array) -> Array:
    """Reversed axes, and a place that is no number between any two elements."""
    odd = np.nan if array.dtype.kind not in "iub?" else 7
    room = np.full([2 * size + 1 for size in reversed(array.shape)], odd, array.dtype)
    view = room.T[tuple(slice(1, 2 * size + 1, 2) for size in array.shape)]
    view[...] = array
    return view


def every_second(array: Array) -> Array:
    """Each second place of the last axis left out."""
    room = np.full((*array.shape[:-1], array.shape[-1] * 2), 7, array.dtype)
    room[..., ::2] = array
    return room[..., ::2]


def _axes_swapped(array: Array) -> Array:
    """Two axes before the last one swapped."""
    axes = (-3, -2) if array.ndim > 2 else (0, -1)
    return np.ascontiguousarray(array.swapaxes(*axes)).swapaxes(*axes)


def _slice(array: Array) -> Array:
    """In the middle of a larger array."""
    room = np.full([size + 3 for size in array.shape], 7, array.dtype)
    view = room[tuple(slice(1, size + 1) for size in array.shape)]
    view[...] = array
    return view


LAYOUTS: Mapping[str, Callable[[Array], Array]] = {
    "transposed": _transposed,
    "axis_1_last": _axis_1_last,
    "axes_swapped": _axes_swapped,
    "every_second": every_second,
    "gaps": _gaps,
    "slice": _slice,
}
"""Each lays the same elements out in another way, none with negative strides."""


def relaid(operands: Mapping[str, Array | None], layout: Callable[[Array], Array]) -> Operands:
    """Operands in another layout, with the same elements."""
    found = {name: None if array is None else layout(array) for name, array in operands.items()}
    for name, array in operands.items():
        moved = found[name]
        assert (array is None) == (moved is None)
        assert array is None or moved is None or array.tobytes() == moved.tobytes()
    return found
