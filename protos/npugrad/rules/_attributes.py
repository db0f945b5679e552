"""Kinds of rules about attributes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from npugrad.operator import AttrParam
from npugrad.rules._words import listed, of_attr

if TYPE_CHECKING:
    from npugrad.meta import CallMeta
    from npugrad.page import Page, Rule
    from npugrad.rules._words import Kind, Said


def entries(low: int, high: int | None = None) -> Kind:
    """An array has a number of entries in a closed range, or exactly `low`."""
    high = low if high is None else high
    expected = f"{low} entries" if low == high else f"{low} to {high} entries"

    def judge(call: CallMeta, name: str) -> Said:
        number = len(call.attrs[name] or ())  # type: ignore[arg-type]
        return None if low <= number <= high else (f"{number} entries", expected)

    others = [(True,) * number for number in (low - 1, high + 1) if number >= 0]
    return of_attr("length", f"has {expected}", judge, others)


def one_of_choices(*, tolerated: tuple[int, ...] = ()) -> Kind:
    """An attribute is one of its parameter's numbers or strings, or one that another rule decides about."""

    def kind(page: Page, name: str) -> Rule:
        param = page.params[name]
        assert isinstance(param, AttrParam)
        known: tuple[Any, ...] = (*(param.choices.values() or page.values[name]), *tolerated)
        words = [f"{number} ({meaning})" for meaning, number in param.choices.items()]
        expected, cls = listed(words or map(repr, known)), type(known[0])

        def judge(call: CallMeta, name: str) -> Said:
            value = call.attrs[name]
            return None if value in known else (ascii(value)[:80], expected)

        return of_attr("choice", f"is {expected}", judge, (max(known) + cls(1), cls(-1)))(page, name)

    return kind


def at_least(low: int, kind_name: str) -> Kind:
    """An integer is not below a number."""

    def judge(call: CallMeta, name: str) -> Said:
        value = call.integer(name)
        return None if value >= low else (str(value), f"above {low - 1}" if low else "0 or more")

    text = f"is greater than {low - 1}" if low else "is not negative"
    return of_attr(kind_name, text, judge, range(low - 1, low - 9, -1))


def at_most(high: int, kind_name: str, *, per: str = "") -> Kind:
    """An integer, or its quotient by another, is not above a number; the rule says which call breaks it."""

    def judge(call: CallMeta, name: str) -> Said:
        value = call.integer(name) // (call.integer(per) if per else 1)
        what = f"{name} / {per} = {value}" if per else str(value)
        return None if value <= high else (what, f"at most {high}")

    return of_attr(kind_name, f"{'/ {} ' * bool(per)}is at most {high}", judge, (), *filter(None, [per]))


def dim_of(leader: str) -> Kind:
    """An integer is an axis of an operand, counted from either end; no axis counts as one."""

    def judge(call: CallMeta, name: str) -> Said:
        axes, value = max(call.tensor(leader).rank, 1), call.integer(name)
        return None if -axes <= value < axes else (str(value), f"{-axes} to {axes - 1}, an axis of {leader}")

    return of_attr("range", "is an axis of {}", judge, (8, -9), leader)


def divisible_by(divisor: str) -> Kind:
    """An integer is divisible by another; the rule says which call breaks it."""

    def judge(call: CallMeta, name: str) -> Said:
        value, by = call.integer(name), call.integer(divisor)
        return (f"{name} {value}, {divisor} {by}", f"{name} divisible by {divisor}") if value % by else None

    return of_attr(f"multiple_of_{divisor}", "is divisible by {}", judge, (), divisor)
