"""The kinds of rules that pages use: each says what it checks, in which words, and how it can be broken."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from npugrad import changes
from npugrad.error_table import PARAM_NULLPTR
from npugrad.operator import AttrParam, Finding, TensorParam
from npugrad.page import Page, Rule
from npugrad.products import Product

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from npugrad.changes import Candidates
    from npugrad.dtypes import DType, Format
    from npugrad.meta import CallMeta, TensorMeta
    from npugrad.page import Check

    Kind = Callable[[Page, str], Rule]
    Shape = tuple[int, ...]

_NONE: Candidates = lambda call: ()  # noqa: E731 -- the rule itself says what breaks it


def listed(items: Iterable[object]) -> str:
    """Formats a list as ``a, b or c``."""
    words = [str(item) for item in items]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]


def shape_text(shape: Iterable[int]) -> str:
    """Formats a shape as ``[2, 3]``."""
    return "[" + ", ".join(map(str, shape)) + "]"


def present(call: CallMeta, name: str) -> TensorMeta | None:
    """Meta of an input or a declared output; None when null, inferred or unknown."""
    return call.inputs.get(name) or call.declared(name)


# -------------------------------------------------------------------------------- presence


def not_null(page: Page, name: str) -> Rule:
    """A required operand, or an output that is wanted, is not a null pointer."""
    param = page.params[name]
    text = "must not be a null pointer"
    if isinstance(param, TensorParam) and param.when_masked == "allocate":
        text += ", whatever outputMask says"

    def check(call: CallMeta) -> Finding | None:
        if isinstance(param, AttrParam):
            return Finding("null", "a value") if call.attrs[name] is None else None
        is_null = call.is_null_output(name) if page.is_output(name) else call.inputs[name] is None
        return Finding("null", "a tensor") if is_null else None

    return Rule(kind="not_null", text=text, check=check, breaks=changes.nulled(name), code=PARAM_NULLPTR)


def product(page: Page, name: str) -> Rule:
    """The product has the operator; decided first and alone."""
    known = tuple(page.products)
    lacking = next(each for each in Product if each not in known)

    def check(call: CallMeta) -> Finding | None:
        if call.product in known:
            return None
        return Finding(call.product.full_name, listed(each.full_name for each in known))

    return Rule(kind="supported", text="", check=check, breaks=changes.on(lacking))


# -------------------------------------------------------------------------------- types, formats


def dtype_in(*dtypes: DType, tolerated: tuple[DType, ...] = (), is_always: bool = False) -> Kind:
    """The type is one of those given, else one of those that the parameter has on the product.

    Args:
        dtypes: Types on every product.
        tolerated: Further types, about which another rule decides.
        is_always: Whether outputs that are masked out are looked at, too.
    """

    def kind(page: Page, name: str) -> Rule:
        by_product = page.tensor(name).dtypes
        anywhere = {dtypes} if dtypes else set(by_product.values())

        def check(call: CallMeta) -> Finding | None:
            meta, allowed = present(call, name), dtypes or by_product.get(call.product, ())
            if meta is None or meta.dtype in (*allowed, *tolerated):
                return None
            on_product = f" on {call.product.full_name}" if len(anywhere) > 1 else ""
            return Finding(f"dtype {meta.dtype}", f"{listed(allowed)}{on_product}")

        text = f"has data type {listed(*anywhere)}" if len(anywhere) == 1 else "has a supported data type"
        return Rule(
            kind="dtype",
            text=text + ", whatever outputMask says" * is_always,
            check=check,
            breaks=page.edited(name, changes.retyped()),
            is_always=is_always,
        )

    return kind


def same_dtype(leader: str, allowed: Callable[[CallMeta, str], tuple[DType, ...]] | None = None) -> Kind:
    """The type is that of another operand, or one that `allowed` returns, in words `leader`."""

    def kind(page: Page, name: str) -> Rule:
        first, *words = re.split(r"\b", leader, maxsplit=2)[1:]
        page.follow(first, name)

        def check(call: CallMeta) -> Finding | None:
            meta = present(call, name)
            dtypes = allowed(call, name) if allowed else (call.tensor(first).dtype,)
            if meta is None or meta.dtype in dtypes:
                return None
            why = "" if allowed else f", the dtype of {leader}"
            return Finding(f"dtype {meta.dtype}", f"{listed(dict.fromkeys(dtypes))}{why}")

        return Rule(
            kind="same_dtype",
            text="".join(("has the data type of ", page.params[first].c_name, *words)),
            check=check,
            breaks=page.edited(name, changes.retyped()),
            about=() if allowed else (first,),
        )

    return kind


def format_in(*formats: Format) -> Kind:
    """The storage format is one of those given."""

    def kind(page: Page, name: str) -> Rule:
        def check(call: CallMeta) -> Finding | None:
            meta = present(call, name)
            if meta is None or meta.format in formats:
                return None
            return Finding(f"format {meta.format}", listed(formats))

        text, breaks = f"has format {listed(formats)}", page.edited(name, changes.stored())
        return Rule(kind="format", text=text, check=check, breaks=breaks)

    return kind


def format_not(storage: Format) -> Kind:
    """The storage format is any but one."""

    def kind(page: Page, name: str) -> Rule:
        def check(call: CallMeta) -> Finding | None:
            meta = present(call, name)
            if meta is None or meta.format is not storage:
                return None
            return Finding(f"format {storage}", "another format, such as ND")

        breaks = page.edited(name, changes.stored())
        return Rule(kind="format", text=f"is not stored as {storage}", check=check, breaks=breaks)

    return kind


# -------------------------------------------------------------------------------- shapes


def rank_in(low: int, high: int) -> Kind:
    """The rank is in a closed range."""
    expected = f"rank {low}" if low == high else f"rank {low} to {high}"

    def kind(page: Page, name: str) -> Rule:
        def check(call: CallMeta) -> Finding | None:
            meta = present(call, name)
            if meta is None or low <= meta.rank <= high:
                return None
            return Finding(f"rank {meta.rank}, shape {shape_text(meta.shape)}", expected)

        breaks = page.edited(name, changes.reranked())
        return Rule(kind="rank", text=f"has {expected}", check=check, breaks=breaks)

    return kind


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
        return page.shape_of(
            name, {axis: call.tensor(leader).shape[place] for axis, (leader, place) in defined.items()}
        )

    made = shape_is(shape, f"{sizes} of {' and '.join(leaders)}", *leaders, text=f"has the shape {sizes}")
    return replace(made(page, name), requires=tuple(f"{each}.rank" for each in (name, *leaders)))


def count(formula: str, number: Callable[[CallMeta], int] | None = None, *, text: str = "") -> Kind:
    """The number of elements is a product of attributes, such as ``n*c*hxw``, or what `number` counts."""
    factors = formula.split("*")
    counted = number or (lambda call: math.prod(map(call.integer, factors)))

    def kind(page: Page, name: str) -> Rule:
        def check(call: CallMeta) -> Finding | None:
            meta = call.inputs[name]
            if meta is None or meta.size == counted(call):
                return None
            found = f"{meta.size} elements, shape {shape_text(meta.shape)}"
            return Finding(found, f"{formula} = {counted(call)} elements")

        breaks = page.edited(name, changes.lengthened())
        return Rule(kind="count", text=text or f"has {formula} elements", check=check, breaks=breaks)

    return kind


def shape_is(shape: Callable[[CallMeta], Shape], meaning: str, *about: str, text: str = "") -> Kind:
    """The shape is what `shape` says of the call, in words `meaning`."""

    def kind(page: Page, name: str) -> Rule:
        def check(call: CallMeta) -> Finding | None:
            meta = present(call, name)
            if meta is None or meta.shape == shape(call):
                return None
            return Finding(f"shape {shape_text(meta.shape)}", f"{shape_text(shape(call))}, {meaning}")

        return Rule(
            kind="shape",
            text=text or f"has {meaning}",
            check=check,
            breaks=page.edited(name, changes.lengthened()),
            about=about,
        )

    return kind


def same_shape(leader: str) -> Kind:
    """The shape is that of another operand."""
    made = shape_is(lambda call: call.tensor(leader).shape, f"the shape of {leader}", leader)
    return lambda page, name: replace(made(page, name), text=f"has the shape of {page.params[leader].c_name}")


# -------------------------------------------------------------------------------- sizes of axes


def _on_axis(page: Page, name: str, size: str, judge: Callable[[CallMeta, int], str]) -> Check:
    """A check of the axis of an operand that has a size; `judge` says what is expected, or nothing."""
    axis = page.axes[name].index(size)

    def check(call: CallMeta) -> Finding | None:
        arranged, note = page.arranged(call)
        shape = arranged.tensor(name).shape
        expected = judge(arranged, shape[axis])
        return (
            Finding(f"{shape[axis]} on axis {axis} of shape {shape_text(shape)}{note}", expected)
            if expected
            else None
        )

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


# -------------------------------------------------------------------------------- attributes


def entries(low: int, high: int | None = None) -> Kind:
    """An array has a number of entries in a closed range, or exactly `low`."""
    high = low if high is None else high
    expected = f"{low}" if low == high else f"{low} to {high}"

    def kind(page: Page, name: str) -> Rule:
        def check(call: CallMeta) -> Finding | None:
            number = len(call.attrs[name] or ())  # type: ignore[arg-type]
            return None if low <= number <= high else Finding(f"{number} entries", f"{expected} entries")

        others = [(True,) * number for number in (low - 1, high + 1) if number >= 0]
        text = f"has {expected} entries"
        return Rule(kind="length", text=text, check=check, breaks=changes.numbered(name, others))

    return kind


def one_of_choices(*, tolerated: tuple[int, ...] = ()) -> Kind:
    """An attribute is one of the numbers that its parameter names, or one that another rule decides about."""

    def kind(page: Page, name: str) -> Rule:
        param = page.params[name]
        assert isinstance(param, AttrParam)
        known = (*param.choices.values(), *tolerated)
        expected = listed(f"{number} ({meaning})" for meaning, number in param.choices.items())

        def check(call: CallMeta) -> Finding | None:
            value = call.integer(name)
            return None if value in known else Finding(str(value), expected)

        others = changes.numbered(name, (max(known) + 1, -1))
        return Rule(kind="choice", text=f"is {expected}", check=check, breaks=others)

    return kind


def at_least(low: int, kind_name: str) -> Kind:
    """An integer is not below a number."""
    text, expected = f"is greater than {low - 1}", f"above {low - 1}"
    if not low:
        text, expected = "is not negative", "0 or more"

    def kind(page: Page, name: str) -> Rule:
        def check(call: CallMeta) -> Finding | None:
            return None if call.integer(name) >= low else Finding(str(call.integer(name)), expected)

        others = changes.numbered(name, range(low - 1, low - 9, -1))
        return Rule(kind=kind_name, text=text, check=check, breaks=others)

    return kind


def at_most(high: int, kind_name: str, *, per: str = "") -> Kind:
    """An integer, or its quotient by another, is not above a number; the rule says which call breaks it."""

    def kind(page: Page, name: str) -> Rule:
        def check(call: CallMeta) -> Finding | None:
            value = call.integer(name) // (call.integer(per) if per else 1)
            what = f"{name} / {per} = {value}" if per else str(value)
            return None if value <= high else Finding(what, f"at most {high}")

        text = f"is at most {high}" if not per else f"/ {page.params[per].c_name} is at most {high}"
        return Rule(kind=kind_name, text=text, check=check, breaks=_NONE, about=(per,) if per else ())

    return kind


def divisible_by(divisor: str) -> Kind:
    """An integer is divisible by another; the rule says which call breaks it."""

    def kind(page: Page, name: str) -> Rule:
        def check(call: CallMeta) -> Finding | None:
            value, by = call.integer(name), call.integer(divisor)
            found = Finding(f"{name} {value}, {divisor} {by}", f"{name} divisible by {divisor}")
            return found if value % by else None

        text = f"is divisible by {page.params[divisor].c_name}"
        return Rule(kind=f"multiple_of_{divisor}", text=text, check=check, breaks=_NONE, about=(divisor,))

    return kind


# -------------------------------------------------------------------------------- the rest


def special(kind: str, text: str, check: Check, breaks: Candidates, *about: str, **extra: Any) -> Kind:
    """What no other kind can say, by a named function; `extra` is passed on to `Rule`."""
    return lambda page, name: Rule(kind=kind, text=text, check=check, breaks=breaks, about=about, **extra)
