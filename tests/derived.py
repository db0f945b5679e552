"""Calls that tests of every operator make of its record: uneven ones, smaller, longer, laid out otherwise."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from allpairspy import AllPairs
from hypothesis import settings
from hypothesis import strategies as st

from npugrad.meta import CallMeta
from npugrad.operator import OpRecord
from npugrad.ops import OPERATORS
from npugrad.recipe import recipes
from npugrad.validation import validate_call

Array = npt.NDArray[Any]
Operands = dict[str, Array | None]

FLOATS = ("float32", "float16", "bfloat16")
NO_PLACES = (
    *(np.nan, np.inf, -np.inf, 1e9, -1e9, 3e38, -3e38, 1e-38, 4.1e15, -6.1e8, 3e16, 7.7e30, -0.0, 6e4, -6e4),
    *(0.0, 0.5, 1.0, -1.0, -0.5, 1.5, 1e-7),
)
"""Coordinates that are odd or none at all."""
SEEDS = st.integers(0, 2**32 - 1)
"""Of what is drawn: one number, because hypothesis takes far longer to draw each size."""
_SIZES = (1, 1, 2, 3, 5, 7, 8, 15, 16, 17, 24, 31, 33, 40, 64, 67, 129, 257)


def turns(count: int) -> pytest.MarkDecorator:
    """Parametrizes `turn`: cases whose last axis goes round have the first turn in `make test`, then each."""
    later = [pytest.param(turn, marks=pytest.mark.deep) for turn in range(1, count)]
    return pytest.mark.parametrize("turn", [0, *later], ids=lambda turn: f"turn{turn}")


def random_cases(count: int) -> settings:
    """So many examples for hypothesis in `make test-all`, and in `make test` a fifth, as its profile has."""
    full = settings.get_profile("deep").max_examples
    return settings(max_examples=max(1, count * settings().max_examples // full))


def pairs(*axes: Sequence[Any]) -> list[list[Any]]:
    """Combinations of one value of each axis that have each pair of two axes' values."""
    return [
        list(row)
        for row in (AllPairs([list(axis) for axis in axes]) if axes[1:] else zip(*axes, strict=True))
    ]


@contextmanager
def told(case: object) -> Iterator[None]:
    """Says of a failure in a loop which case it was."""
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:
        raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, eq=False)
class Derived:
    """A kind of call of an operator: sizes for its record's `build`, and a name for test identifiers."""

    record: OpRecord
    sizes: Mapping[str, Any]
    name: str

    def __str__(self) -> str:
        return f"{self.record.name}-{self.name}"

    def call(self, dtype: str = "float32", **changed: Any) -> CallMeta:
        """The call in a type."""
        return self.record.build(**{"dtype": dtype, **self.sizes, **changed})

    def operands(self, call: CallMeta, seed: int = 1) -> Operands:
        """Data for it, as of a forward pass."""
        fixed = self.record.workloads.fixed
        made = self.record.make_inputs(call, np.random.default_rng(seed))
        return {**made, **(fixed(self.sizes) if fixed is not None else {})}

    def unrelated(self, call: CallMeta, seed: int) -> Operands:
        """Data for it, each operand drawn by itself: like those of no forward pass."""
        drawn = recipes(self.record, call, seed)
        return {**self.operands(call, seed), **{name: r.array().copy() for name, r in drawn.items()}}

    def nothing(self, call: CallMeta) -> Operands:
        """NaN wherever it may be: for a call of which nothing is left to compute."""
        return {
            name: None
            if meta is None
            else np.full(meta.shape, np.nan if "float" in meta.dtype else 0, meta.dtype.numpy)
            for name, meta in call.inputs.items()
        }

    def on_ties(self, call: CallMeta, operands: Operands) -> Operands:
        """The operands, copied, where gradients jump."""
        moved = {name: None if array is None else array.copy() for name, array in operands.items()}
        if self.record.workloads.ties is not None:
            self.record.workloads.ties(call, moved)
        return moved


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


def combined(record: OpRecord, divisor: int = 1) -> list[Derived]:
    """The uneven call, its sizes divided, with each combination of variants that are no sizes."""
    sizes = smaller(record, divisor).sizes
    variants = {
        key: values
        for key, values in record.workloads.variants.items()
        if isinstance(sizes.get(key, True), bool)
    }
    return [
        Derived(record, {**sizes, **dict(zip(variants, chosen, strict=True))}, f"combination{number}")
        for number, chosen in enumerate(itertools.product(*variants.values()))
    ]


def smaller(record: OpRecord, divisor: int) -> Derived:
    """The uneven call with each size divided where it is taken then; none gets below 2."""
    sizes = dict(record.workloads.uneven)
    for key, value in sizes.items():
        if type(value) is int and divisor > 1:
            changed = {**sizes, key: max(2, value // divisor)}
            sizes = changed if _is_taken(record, changed) else sizes
    return Derived(record, sizes, "smaller")


def ones(record: OpRecord) -> list[Derived]:
    """The uneven call with each size 1 in turn, and with all of them."""
    base = smaller(record, 2).sizes
    one = {key: _replaced(value, 1) for key, value in base.items() if type(value) is not bool}
    alone = [Derived(record, {**base, key: value}, f"one_{key}") for key, value in one.items()]
    found = [*alone, Derived(record, {**base, **one}, "ones")]
    return [derived for derived in found if _is_taken(record, derived.sizes)]


def emptied(record: OpRecord) -> list[Derived]:
    """The uneven call with each size 0 in turn, also where only a device refuses it."""
    found = []
    for key, value in (base := smaller(record, 3).sizes).items():
        for index, nothing in enumerate([_replaced(value, 0), *[()][: isinstance(value, tuple)]]):
            derived = Derived(record, {**base, key: nothing}, f"no_{key}{index or ''}")
            if type(value) is not bool and _is_taken(record, derived.sizes) and _has_nothing(derived):
                found.append(derived)
    return found


def _has_nothing(derived: Derived) -> bool:
    return any(meta is not None and not meta.size for meta in derived.call().inputs.values())


def longer(record: OpRecord, elements: int, divisor: int = 1) -> list[Derived]:
    """The uneven call with one size so long that an operand has so many elements, for each size that may."""
    base = smaller(record, divisor).sizes
    allowed, found = _complaints(record, base).keys(), []
    for key, value in base.items():
        sizes, factor = dict(base), 1
        while type(value) is not bool and factor < 2**20:
            factor *= 2
            sizes[key] = _multiplied(value, factor)
            if _complaints(record, sizes).keys() - allowed:
                break
            if _most_elements(record, sizes) >= elements:
                found.append(Derived(record, sizes, f"long_{key}"))
                break
    return found


def drawn(
    record: OpRecord, seed: int, dtypes: Sequence[str] = FLOATS, *, most: int = 10_000, with_ties: bool = True
) -> tuple[CallMeta, Operands]:
    """A call of any sizes, variants and factors, with operands of no forward pass.

    Its first operand has one of the types, its largest so many elements at most, where that is possible.
    """
    rng = np.random.default_rng(seed)
    sizes, variants = dict(smaller(record, 5).sizes), record.workloads.variants
    chosen = {key: _axes(rng) if _is_axes(value) else _like(value, rng) for key, value in sizes.items()}
    for key, values in variants.items():
        if key not in sizes or rng.random() < 0.3:
            chosen[key] = values[int(rng.integers(len(values)))]
    if not _is_small(record, {**sizes, **chosen}, most):  # as many of them as may be
        for key in rng.permutation(list(chosen)).tolist():
            changed = {**sizes, key: chosen[key]}
            sizes = changed if _is_small(record, changed, most) else sizes
        chosen = {}
    derived = Derived(record, {**sizes, **chosen}, "drawn")
    call = derived.call(dtypes[int(rng.integers(len(dtypes)))])
    for attr in record.attrs:
        if attr.type in ("double", "float"):
            call = call.with_attrs(**{attr.name: float(rng.choice((1, 0, -0.5))) * call.number(attr.name)})
    operands = derived.unrelated(call, seed)
    spread = rng.choice((1, 1, 2, 9))
    for name in places(derived, call) if spread > 1 else ():
        operands[name] *= operands[name].dtype.type(spread)  # type: ignore[union-attr]
    return call, derived.on_ties(call, operands) if with_ties and rng.random() < 0.5 else operands


def _is_axes(value: Any) -> bool:
    """Whether a size is a list of axes, of which there may be others."""
    return isinstance(value, tuple) and not isinstance(value[0], tuple)


def _axes(rng: np.random.Generator) -> tuple[int, ...]:
    """Up to four axes, fewer long ones than short ones, so that many calls are small."""
    sizes = rng.choice(_SIZES[: rng.choice((5, 5, len(_SIZES)))], rng.integers(0, 5))
    return tuple(sizes.tolist())


def _like(value: Any, rng: np.random.Generator) -> Any:
    """Sizes of the same form; of a nest, as many rows as there are or others."""
    if isinstance(value, bool):
        return rng.random() < 0.5
    if isinstance(value, int):
        return int(rng.choice(_SIZES))
    count = rng.integers(1, 5) if isinstance(value[0], tuple) else len(value)
    return tuple(_like(value[i % len(value)], rng) for i in range(count))


def _is_small(record: OpRecord, sizes: Mapping[str, Any], most: int) -> bool:
    return _is_taken(record, sizes) and _most_elements(record, sizes) <= most


def places(derived: Derived, call: CallMeta) -> list[str]:
    """The operands that say where others are read: those that the record can put on ties."""
    operands = derived.operands(call)
    moved = derived.on_ties(call, operands)
    return [name for name, array in operands.items() if not np.array_equal(array, moved[name])]  # type: ignore[arg-type]


def each(derive: Callable[[OpRecord], list[Derived]]) -> Iterator[Derived]:
    """What is derived of every record."""
    for record in OPERATORS.values():
        yield from derive(record)


def _multiplied(value: Any, factor: int) -> Any:
    """A size, or the first one in a nest of them, multiplied."""
    if isinstance(value, int):
        return value * factor
    return (_multiplied(value[0], factor), *value[1:])


def _replaced(value: Any, size: int) -> Any:
    """A size, or all in a nest of them, replaced."""
    if isinstance(value, tuple):
        return tuple(_replaced(part, size) for part in value)
    return value if isinstance(value, bool) else size


def _most_elements(record: OpRecord, sizes: Mapping[str, Any]) -> int:
    return max(meta.size for meta in record.build(**sizes).inputs.values() if meta is not None)


def _is_taken(record: OpRecord, sizes: Mapping[str, Any]) -> bool:
    """Whether a call breaks only what the uneven one breaks: the limits of a device, by their code."""
    try:
        return set(_complaints(record, sizes).values()) <= _codes_of_uneven(record)
    except ArithmeticError:  # such as no channel of a group
        return False


@cache
def _codes_of_uneven(record: OpRecord) -> set[int]:
    return set(_complaints(record, record.workloads.uneven).values())


def _complaints(record: OpRecord, sizes: Mapping[str, Any]) -> dict[str, int]:
    """Codes by constraint."""
    return {v.id: v.code for v in validate_call(record, record.build(**sizes)).violations}


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
