"""Ways to break a rule: changes of legal calls, of which the first that breaks one rule alone is taken."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from npugrad.dtypes import DType, Format
from npugrad.meta import TensorMeta

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from npugrad.meta import CallMeta
    from npugrad.operator import Constraint
    from npugrad.products import Product

    Candidates = Callable[[CallMeta], Iterable[CallMeta]]
    """The changed calls to try, the likeliest first."""
    Edit = Callable[[str, TensorMeta], TensorMeta]
    """Another description of the operand of that name."""

TYPES = (DType.INT32, DType.INT16, DType.FLOAT64, DType.FLOAT16, DType.FLOAT32, DType.BFLOAT16)
FORMATS = (Format.FRACTAL_NZ, Format.NCHW, Format.NDHWC)
"""The vendor's checks refuse the first where they refuse any."""


def judge(constraints: Mapping[str, Constraint], call: CallMeta) -> Callable[[str], bool]:
    """Whether a call breaks a constraint, by identifier; it is evaluated only if those that it requires hold.

    Args:
        constraints: All that apply to the call's product, by identifier.
        call: The call.
    """
    holds: dict[str, bool] = {}

    def is_reached(constraint: Constraint) -> bool:
        return all(is_kept(constraints[each]) for each in constraint.requires if each in constraints)

    def is_kept(constraint: Constraint) -> bool:
        if constraint.id not in holds:
            holds[constraint.id] = is_reached(constraint) and constraint.check(call) is None
        return holds[constraint.id]

    return lambda name: is_reached(constraints[name]) and not is_kept(constraints[name])


def breaks_only(name: str, constraints: Mapping[str, Constraint], call: CallMeta) -> bool:
    """Whether a call breaks one constraint and no other; those that are `alone` come before the others."""
    is_broken = judge(constraints, call)
    if name not in constraints or not is_broken(name):
        return False
    asked = (each.id for each in constraints.values() if each.alone or not constraints[name].alone)
    return not any(each != name and is_broken(each) for each in asked)


def with_metas(call: CallMeta, metas: Mapping[str, TensorMeta | None]) -> CallMeta:
    """The call with other inputs, and with these outputs alone declared."""
    inputs = {name: metas[name] for name in metas if name in call.inputs}
    outputs = {name: metas[name] for name in metas if name not in call.inputs}
    return replace(call, inputs={**call.inputs, **inputs}, outputs=outputs)


def nulled(name: str) -> Candidates:
    """Makes an operand or an attribute null."""
    return lambda call: [
        call.with_attrs(**{name: None}) if name in call.attrs else with_metas(call, {name: None})
    ]


def numbered(name: str, numbers: Iterable[Any]) -> Candidates:
    """Other values of an attribute."""
    values = tuple(numbers)
    return lambda call: (replace(call.with_attrs(**{name: value}), outputs={}) for value in values)


def edited(
    groups: Callable[[CallMeta], Iterable[Sequence[str]]],
    edits: Iterable[Edit],
    metas: Callable[[CallMeta], Mapping[str, TensorMeta]],
) -> Candidates:
    """Edits operands that change together; the smallest group that breaks nothing else is found first.

    Args:
        groups: Names of operands that are edited together, few first.
        edits: What is done to each of them.
        metas: The outputs of a legal call.
    """
    ways = tuple(edits)

    def candidates(call: CallMeta) -> Iterator[CallMeta]:
        known = {**metas(call), **call.inputs}
        for names in groups(call):
            given = {name: meta for name in names if (meta := known[name]) is not None}
            for edit in ways if given else ():
                yield with_metas(call, {name: edit(name, meta) for name, meta in given.items()})

    return candidates


def retyped(first: Iterable[DType] = ()) -> Iterator[Edit]:
    """Other types, some of them first."""
    return (partial(_described, dtype=dtype) for dtype in (*first, *TYPES))


def stored() -> Iterator[Edit]:
    """Other storage formats."""
    return (partial(_described, storage=storage) for storage in FORMATS)


def reshaped(*shapes: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Iterator[Edit]:
    """Other shapes, from the one that an operand has."""
    return (partial(_described, shape=shape) for shape in shapes)


def _described(
    name: str,
    meta: TensorMeta,
    dtype: DType | None = None,
    shape: Callable[[tuple[int, ...]], tuple[int, ...]] = tuple,
    storage: Format | None = None,
) -> TensorMeta:
    return TensorMeta(dtype or meta.dtype, shape(meta.shape), storage or meta.format)


def reranked() -> Iterator[Edit]:
    """Other ranks, with as many elements."""
    return reshaped(
        lambda shape: () if set(shape) <= {1} else shape,
        lambda shape: (*shape, 1),
        lambda shape: (*shape, 1, 1),
        lambda shape: (*shape, *(1,) * 9),
    )


def lengthened() -> Iterator[Edit]:
    """Other numbers of elements, then other shapes of as many."""
    return reshaped(
        lambda shape: (*shape[:-1], shape[-1] + 1) if shape else (2,),
        lambda shape: (shape[0] + 1, *shape[1:]) if shape else (2,),
        lambda shape: (*shape, 2),
        lambda shape: (1, *shape),
    )


def on(product: Product) -> Candidates:
    """The call for another product."""
    return lambda call: [replace(call, product=product)]


def with_size(
    meta: TensorMeta, name: str, axes: Mapping[str, Sequence[str]], size: str, old_new: tuple[int, int]
) -> TensorMeta:
    """Another size of an operand with sizes `axes`, whose last two axes may be one."""
    axis, shape, (old, new) = axes[name].index(size), list(meta.shape), old_new
    if axis < meta.rank - (meta.rank < len(axes[name])):
        shape[axis] = new
    else:
        shape[-1] = shape[-1] // max(old, 1) * new
    return TensorMeta(meta.dtype, shape, meta.format)
