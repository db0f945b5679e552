"""Kinds of rules about attributes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from npugrad import changes
from npugrad.operator import AttrParam, Finding
from npugrad.page import Page, Rule
from npugrad.rules._words import listed

if TYPE_CHECKING:
    from npugrad.changes import Candidates
    from npugrad.meta import CallMeta
    from npugrad.rules._words import Kind

_NONE: Candidates = lambda call: ()  # noqa: E731 -- the rule itself says what breaks it


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
    """An attribute is one of its parameter's numbers or strings, or one that another rule decides about."""

    def kind(page: Page, name: str) -> Rule:
        param = page.params[name]
        assert isinstance(param, AttrParam)
        known: tuple[Any, ...] = (*(param.choices.values() or page.values[name]), *tolerated)
        words = [f"{number} ({meaning})" for meaning, number in param.choices.items()]
        expected = listed(words or map(repr, known))

        def check(call: CallMeta) -> Finding | None:
            value = call.attrs[name]
            return None if value in known else Finding(ascii(value)[:80], expected)

        others = changes.numbered(name, (max(known) + type(known[0])(1), type(known[0])(-1)))
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


def dim_of(leader: str) -> Kind:
    """An integer is an axis of an operand, counted from either end; no axis counts as one."""

    def kind(page: Page, name: str) -> Rule:
        def check(call: CallMeta) -> Finding | None:
            axes = max(call.tensor(leader).rank, 1)
            if -axes <= call.integer(name) < axes:
                return None
            return Finding(f"{call.integer(name)}", f"{-axes} to {axes - 1}, an axis of {leader}")

        text = f"is an axis of {page.params[leader].c_name}"
        others = changes.numbered(name, (8, -9))
        return Rule(kind="range", text=text, check=check, breaks=others, about=(leader,))

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
