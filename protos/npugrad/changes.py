"""Ways to break a rule: changes of legal calls, of which the first that breaks one rule alone is taken."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from npugrad.dtypes import DType, Format
from npugrad.meta import TensorMeta

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from npugrad.meta import CallMeta
    from npugrad.operator import Constraint, TensorParam
    from npugrad.products import Product

    Candidates = Callable[[CallMeta], Iterable[CallMeta]]
    """The changed calls to try, the likeliest first."""
    Edit = Callable[[str, TensorMeta], TensorMeta]
    """Another description of the operand of that name."""

MASK = "output_mask"
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


def shaped(*ways: Mapping[str, Callable[[CallMeta], tuple[int, ...]]]) -> Candidates:
    """Inputs of other shapes, by name, in one way or another."""

    def candidates(call: CallMeta) -> Iterator[CallMeta]:
        for way in ways:
            shapes = {name: shape(call) for name, shape in way.items()}
            yield call.with_inputs(**{n: TensorMeta(call.tensor(n).dtype, s) for n, s in shapes.items()})

    return candidates


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


class Breaking:
    """How the rules of a page are broken: the part of `Page` that changes legal calls.

    Attributes:
        axes, leaders, accepts_unchecked, unexamined: As in `Page`.
    """

    axes: dict[str, tuple[str, ...]]
    leaders: dict[str, tuple[str, int]]
    accepts_unchecked: Callable[[CallMeta], bool]
    unexamined: Callable[[CallMeta], bool]
    output_metas: Callable[[CallMeta], dict[str, TensorMeta]]
    tensor: Callable[[str], TensorParam]
    is_output: Callable[[str], bool]
    _constraints: dict[str, Constraint]
    _applying: dict[Product, dict[str, Constraint]]
    _followers: dict[str, list[str]]

    def violation(
        self, identifier: str, candidates: Candidates, vendor: object
    ) -> Callable[[CallMeta], CallMeta | None]:
        """Turns a legal call into one that breaks that rule alone; None if no candidate does."""

        def violate(call: CallMeta) -> CallMeta | None:
            if self.accepts_unchecked(call) or self.unexamined(call):
                return None
            changed = (each for each in candidates(call) if not self.accepts_unchecked(each))
            found = (each for each in changed if breaks_only(identifier, self._applied(each), each))
            if not callable(vendor):
                return next(found, None)
            # Where changes differ in the vendor's code, samples of different types show all of them.
            by_code = {vendor(each): each for each in reversed(list(found))}
            return [*reversed(by_code.values())][self._turn(call) % len(by_code)] if by_code else None

        return violate

    def _turn(self, call: CallMeta) -> int:
        """Place of the first input's type among those that it has on the call's product."""
        name, meta = next(iter(call.inputs.items()))
        dtypes = self.tensor(name).dtypes.get(call.product, ())
        return dtypes.index(meta.dtype) if meta and meta.dtype in dtypes else 0

    def is_legal(self, call: CallMeta) -> bool:
        """Whether it breaks no rule."""
        return not any(map(judge(self._applied(call), call), self._applied(call)))

    def _applied(self, call: CallMeta) -> dict[str, Constraint]:
        """The rules of the call's product."""
        if call.product not in self._applying:
            constraints = (each for each in self._constraints.values() if each.applies(call.product))
            self._applying[call.product] = {each.id: each for each in constraints}
        return self._applying[call.product]

    def edited(self, name: str, edits: Iterable[Edit]) -> Candidates:
        """Edits an operand alone, or with those that follow it, or all inputs alike: the fewest first."""
        ways = tuple(edits)

        def candidates(call: CallMeta) -> Iterator[CallMeta]:
            known = {**self.output_metas(call), **call.inputs}
            every = [each for each in call.inputs if each != name] + [name]
            for names in ([name], self._with_followers(name), every):
                given = {each: meta for each in names if (meta := known[each]) is not None}
                for edit in ways if given else ():
                    yield with_metas(call, {each: edit(each, meta) for each, meta in given.items()})

        return candidates

    def resized(self, name: str, size: str, *numbers: int) -> Candidates:
        """Sets a size, to one more by default: on an operand, with those of its shape, or everywhere."""

        def candidates(call: CallMeta) -> Iterator[CallMeta]:
            leader, place = self.leaders[size]
            old = call.tensor(leader).shape[place]
            having = [each for each, axes in self.axes.items() if size in axes and call.inputs[each]]
            like = [each for each in having if self.axes[each] == self.axes[name]]
            for group in ([name], like, having):
                for new in (number for number in numbers or (old + 1,) if number >= 0):
                    metas = {each: call.tensor(each) for each in group}
                    sized = {n: _with_size(meta, self.axes[n], size, old, new) for n, meta in metas.items()}
                    yield with_metas(call, sized)

        return candidates

    def built(self, build: Callable[..., CallMeta], **sizes: Any) -> Candidates:
        """A call of other sizes, with the type, product and mask of the call that it takes the place of."""

        def candidates(call: CallMeta) -> Iterator[CallMeta]:
            made = build(dtype=call.tensor(next(iter(call.inputs))).dtype, product=call.product, **sizes)
            yield made.with_attrs(**{MASK: call.attrs[MASK]}) if MASK in call.attrs else made

        return candidates

    def follow(self, leader: str, name: str) -> None:
        """Notes that an operand has the type of another: rules about the other change both."""
        self._followers.setdefault(leader, []).append(name)

    def _with_followers(self, name: str) -> list[str]:
        found = [each for each in self._followers.get(name, ()) if not self.is_output(each)]
        return [name, *chain.from_iterable(map(self._with_followers, found))]


def _with_size(meta: TensorMeta, axes: tuple[str, ...], size: str, old: int, new: int) -> TensorMeta:
    """Another size of an operand with these axes, whose last two may be one."""
    axis, shape = axes.index(size), list(meta.shape)
    if axis < meta.rank - (meta.rank < len(axes)):
        shape[axis] = new
    else:
        shape[-1] = shape[-1] // max(old, 1) * new
    return TensorMeta(meta.dtype, shape, meta.format)
