"""Kinds of rules about ranks, shapes and the sizes of axes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from npugrad import changes
from npugrad.error_table import PARAM_INVALID
from npugrad.operator import Finding
from npugrad.page import Page, Rule
from npugrad.rules._words import listed, of_tensor, present, shape_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from npugrad.meta import CallMeta, TensorMeta
    from npugrad.operator import VendorCode
    from npugrad.page import Check
    from npugrad.rules._words import Kind, Said, Shape


_ACCEPTS_LOW = "The document says rank {} to {}; the vendor's source has no least rank. npugrad: refused."


def rank_in(low: int, high: int, *, is_low_checked: bool = True) -> Kind:
    """The rank is in a closed range, of which the vendor's source may check the upper end only."""
    expected = f"rank {low}" if low == high else f"rank {low} to {high}"

    def judge(call: CallMeta, meta: TensorMeta) -> Said:
        found = f"rank {meta.rank}, shape {shape_text(meta.shape)}"
        return None if low <= meta.rank <= high else (found, expected)

    made = of_tensor("rank", f"has {expected}", judge, changes.reranked)

    def half_checked(page: Page, name: str) -> Rule:
        def code(call: CallMeta) -> VendorCode:
            meta = present(call, name)
            return PARAM_INVALID if meta is None or meta.rank > high else "accepts"

        return replace(made(page, name), vendor=(code, _ACCEPTS_LOW.format(low, high)))

    return made if is_low_checked else half_checked


def has_axes(page: Page, name: str) -> Rule:
    """The rank is the number of axes that the parameter names."""
    rank = len(page.axes[name])
    return replace(rank_in(rank, rank)(page, name), text=f"has the axes ({', '.join(page.axes[name])})")


def of_sizes(page: Page, name: str) -> Rule:
    """The shape is what the sizes on the axes of other inputs make it."""
    axes = page.axes[name]
    leaders = tuple(sorted({page.leaders[axis][0] for axis in axes if not axis.isdigit()}))
    sizes = f"({', '.join(axes)})"

    def shape(call: CallMeta) -> Shape:
        defined = {axis: page.leaders[axis] for axis in axes if not axis.isdigit()}
        shapes = {axis: (call.tensor(leader).shape, place) for axis, (leader, place) in defined.items()}
        return page.shape_of(name, {page.size(axis): found[place] for axis, (found, place) in shapes.items()})

    made = shape_is(shape, f"{sizes} of {' and '.join(leaders)}", *leaders, text=f"has the shape {sizes}")
    return replace(made(page, name), requires=tuple(f"{each}.rank" for each in (name, *leaders)))


def count(formula: str, number: Callable[[CallMeta], int] | None = None, *, text: str = "") -> Kind:
    """The number of elements is a product of attributes, such as ``n*c*hxw``, or what `number` counts."""
    factors = formula.split("*")
    counted = number or (lambda call: math.prod(map(call.integer, factors)))

    def judge(call: CallMeta, meta: TensorMeta) -> Said:
        said = (
            f"{meta.size} elements, shape {shape_text(meta.shape)}",
            f"{formula} = {counted(call)} elements",
        )
        return None if meta.size == counted(call) else said

    return of_tensor("count", text or f"has {formula} elements", judge, changes.lengthened)


def shape_is(shape: Callable[[CallMeta], Shape], meaning: str, *about: str, text: str = "") -> Kind:
    """The shape is what `shape` says of the call, in words `meaning`."""

    def judge(call: CallMeta, meta: TensorMeta) -> Said:
        said = f"shape {shape_text(meta.shape)}", f"{shape_text(shape(call))}, {meaning}"
        return None if meta.shape == shape(call) else said

    return of_tensor("shape", text or f"has {meaning}", judge, changes.lengthened, *about)


def broadcast(*shapes: Shape) -> Shape | None:
    """The shape to which all of these are broadcast; None if they cannot be."""
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        return None


def broadcastable(leader: str) -> Kind:
    """The shape can be broadcast with that of another operand."""

    def judge(call: CallMeta, meta: TensorMeta) -> Said:
        shape = call.tensor(leader).shape
        said = f"shape {shape_text(meta.shape)}", f"one to broadcast with {shape_text(shape)}"
        return said if broadcast(meta.shape, shape) is None else None

    text = "has a shape that can be broadcast with that of {}"
    return of_tensor("broadcast", text, judge, changes.lengthened, leader)


def same_shape(leader: str) -> Kind:
    """The shape is that of another operand."""
    meaning = f"the shape of {leader}"
    return shape_is(lambda call: call.tensor(leader).shape, meaning, leader, text="has the shape of {}")


def _on_axis(page: Page, name: str, size: str, judge: Callable[[CallMeta, int], str]) -> Check:
    """A check of the axis of an operand that has a size; `judge` says what is expected, or nothing."""
    axis = page.axes[name].index(size)

    def check(call: CallMeta) -> Finding | None:
        arranged, note = page.arranged(call)
        shape = arranged.tensor(name).shape
        expected = judge(arranged, shape[axis])
        found = f"{shape[axis]} on axis {axis} of shape {shape_text(shape)}{note}"
        return Finding(found, expected) if expected else None

    return check


def same_size(size: str) -> Kind:
    """An axis is as long as that of the input which defines the size."""

    def kind(page: Page, name: str) -> Rule:
        axis, (leader, leader_axis) = page.axes[name].index(size), page.leaders[size]

        def judge(call: CallMeta, found: int) -> str:
            expected = call.tensor(leader).shape[leader_axis]
            return "" if found == expected else f"{expected}, as on axis {leader_axis} of {leader}"

        c_names = page.params[name].c_name, page.params[leader].c_name
        return Rule(
            kind=size,
            text=f"Axis {axis} of {c_names[0]} is as long as axis {leader_axis} of {c_names[1]}.",
            check=_on_axis(page, name, size, judge),
            breaks=page.resized(name, size),
            about=(leader,),
            requires=(f"{name}.rank", f"{leader}.rank"),
        )

    return kind


def size_in(
    size: str,
    low: int = 0,
    high: int | None = None,
    *,
    step: int = 1,
    kind_name: str = "",
    among: Sequence[int] = (),
) -> Kind:
    """A size is in a closed range, a multiple of `step`, and `among` some numbers, if any are given."""
    words = [f"above {low - 1}" if low else "", f"at most {high}", f"{low} to {high}"]
    parts = [words[0] if high is None else words[2 if low else 1]]
    parts += [f"a multiple of {step}"] if step > 1 else []
    expected = listed(among) if among else ", ".join(filter(None, parts))

    def kind(page: Page, name: str) -> Rule:
        known = page.limits.get(page.size(size), range(2**62))
        if isinstance(known, range) and not among:
            least, steps = max(low, known.start), max(step, known.step)
            known = range(-(-least // steps) * steps, min(known.stop, (high or 2**62) + 1), steps)
        page.limits[page.size(size)] = among or known

        def judge(call: CallMeta, found: int) -> str:
            is_in = low <= found <= (found if high is None else high) and found % step == 0
            return "" if is_in and (not among or found in among) else expected

        axis, c_name = page.axes[name].index(size), page.params[name].c_name
        others = (
            max(low - 1, 0),
            *(() if high is None else (high + 1, high + 8, high + 128)),
            step + 1,
            step + 4,
            *(3 * each for each in among),
        )
        return Rule(
            kind=kind_name or size,
            text=f"Axis {axis} of {c_name} is not 0." if expected == "above 0" else f"{size} is {expected}.",
            check=_on_axis(page, name, size, judge),
            breaks=page.resized(name, size, *others),
            requires=(f"{name}.rank",),
        )

    return kind


def last_axis(size: int, kind_name: str, meaning: str) -> Kind:
    """The last axis has a fixed size."""

    def kind(page: Page, name: str) -> Rule:
        c_name = page.params[name].c_name
        said = f"{size}, {meaning}"
        return Rule(
            kind=kind_name,
            text=f"The last axis of {c_name} has size {size}.",
            check=_on_axis(page, name, str(size), lambda call, found: "" if found == size else said),
            breaks=page.edited(name, changes.lengthened()),
            requires=(f"{name}.rank",),
        )

    return kind
