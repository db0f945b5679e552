"""The limits of aclnnFusedFloydAttentionGrad that give 561002: ranks, sizes, and shapes that must agree.

The entries of the page's constraint section are counted sentence by sentence: 1 determinism, 2 package
versions, 3 to 8 the ranges of B, H, N, M, K and D, 9 to 13 the operands that share axes or shapes, 14 D
again, 15 speed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npugrad.error_table import TILING_ERROR
from npugrad.operator import Finding
from npugrad.ops._fused_floyd_attention_grad_layout import (
    C_NAMES,
    CITE,
    LAYOUT,
    LIKE,
    SIZES,
    edited,
    expected_shape,
    leader_of,
    leaders_of,
    resized,
    size_of,
    with_axis_appended,
    with_last_axis_longer,
)
from npugrad.rules import axis_is, axis_multiple_of, axis_within, invalid, listed, rank_within, shape_is

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from npugrad.errors import Source
    from npugrad.meta import CallMeta
    from npugrad.operator import Constraint, VendorCode
    from npugrad.rules import Check, Violate

RANK = 5
HEAD_DIMS = (32, 64, 128)
_MILLION = 2**20
_OTHER_AXES = "The document names axes 0, 2 and 4; the vendor's source compares axes 0, 1 and 4. "
_SHAPE_NOT_CHECKED = (
    "The document gives the shape; the vendor's source does not check it. npugrad: the document, 561002."
)


def tiling_rules() -> Iterator[Constraint]:
    """All constraints with code 561002, in the order of the vendor's checks."""
    yield from _rank_rules()
    yield from _query_rules()
    yield from _size_rules()
    yield from _shape_rules()


def _limit(  # noqa: PLR0917 -- a row of a table
    constraint_id: str,
    text: str,
    sources: tuple[Source, ...],
    operands: tuple[str, ...],
    check: Check,
    violate: Violate,
    requires: tuple[str, ...],
    vendor_code: VendorCode | Callable[[CallMeta], VendorCode] = TILING_ERROR,
    pick: str = "",
) -> Constraint:
    """A constraint with code 561002; the page has one row of its error table for them all."""
    return invalid(
        constraint_id,
        text,
        (CITE.code(TILING_ERROR), *sources),
        operands,
        check,
        violate,
        requires=requires,
        code=TILING_ERROR,
        vendor_code=vendor_code,
        pick=pick,
    )


def _rank_rules() -> Iterator[Constraint]:
    checks = {"atten_mask": 12, "softmax_max": 13, "softmax_sum": 13}
    for name in LAYOUT:
        yield _limit(
            f"{name}.rank",
            f"{C_NAMES[name]} has rank {RANK}.",
            (CITE.check(checks.get(name, 11)), CITE.parameter(C_NAMES[name])),
            (name,),
            rank_within(name, RANK, RANK),
            edited(name, with_axis_appended),
            requires=() if name == "atten_mask" else (f"{name}.not_null",),
        )


def _query_rules() -> Iterator[Constraint]:
    yield _axis_rule("query", "B", (CITE.entry(9), CITE.check(7)))
    pick = _OTHER_AXES + "npugrad: axis 1 as well, as the documented shapes have it."
    yield _axis_rule("query", "H", (CITE.check(7),), pick=pick)
    pick = _OTHER_AXES + "npugrad: axis 2 as well, the document."
    yield _axis_rule("query", "N", (CITE.entry(9),), vendor_code="accepts", pick=pick)
    yield _axis_rule("query", "D", (CITE.entry(9), CITE.check(7)))


def _axis_rule(
    name: str, axis: str, sources: tuple[Source, ...], vendor_code: VendorCode = TILING_ERROR, pick: str = ""
) -> Constraint:
    """One axis of query or key2 has the size of the operand that defines it."""
    leader, position = leader_of(axis), LAYOUT[name].index(axis)
    same_shape = ("query", "dy", "attention_in") if name == "query" else ("key2", "value2")
    return _limit(
        f"{name}.{SIZES[axis]}",
        f"Axis {position} of {name} is {axis} of {leader}.",
        (*sources, CITE.parameter(name)),
        (name, leader),
        axis_is(name, position, lambda call: size_of(call, axis), f"{axis} of {leader}"),
        resized(same_shape, axis),
        (f"{name}.rank", f"{leader}.rank"),
        vendor_code,
        pick,
    )


def _size_rules() -> Iterator[Constraint]:
    yield _range_rule("B", 1, 2048, step=1, entry=3, check=5)
    yield _range_rule("H", 1, 256, step=1, entry=4, check=5)
    for axis, step, entry in (("N", 16, 5), ("M", 128, 6), ("K", 128, 7)):
        yield _range_rule(axis, step, _MILLION, step=step, entry=entry, check=8)
        yield _multiple_rule(axis, step, entry)
    yield _head_dim_rule()


def _range_rule(axis: str, low: int, high: int, *, step: int, entry: int, check: int) -> Constraint:
    name = leader_of(axis)
    one_million = f", reading 1M as {high}" if high == _MILLION else ""
    return _limit(
        f"{name}.{SIZES[axis]}_range",
        f"{axis} is {low} to {'1M' if one_million else high}.",
        (CITE.entry(entry), CITE.check(check), CITE.parameter(name)),
        (name,),
        axis_within(name, LAYOUT[name].index(axis), low, high),
        resized(tuple(LAYOUT), axis, high + step),
        requires=(f"{name}.rank",),
        vendor_code="accepts",
        pick="The document gives the range; the vendor's source has no upper limit, and with a size of 0 it "
        f"succeeds without computing. npugrad: the document{one_million}.",
    )


def _multiple_rule(axis: str, multiple: int, entry: int) -> Constraint:
    name = leader_of(axis)
    return _limit(
        f"{name}.{SIZES[axis]}_multiple",
        f"{axis} is a multiple of {multiple}.",
        (CITE.entry(entry), CITE.check(10), CITE.parameter(name)),
        (name,),
        axis_multiple_of(name, LAYOUT[name].index(axis), multiple),
        resized(tuple(LAYOUT), axis, multiple + 1),
        requires=(f"{name}.rank",),
    )


def _head_dim_rule() -> Constraint:
    def check(call: CallMeta) -> Finding | None:
        size = size_of(call, "D")
        return None if size in HEAD_DIMS else Finding(f"D = {size}", listed(HEAD_DIMS))

    def with_another(call: CallMeta) -> CallMeta | None:
        return resized(tuple(LAYOUT), "D", 96 if size_of(call, "D") < 64 else 0)(call)

    return _limit(
        "key1.head_dim",
        "D is 32, 64 or 128.",
        (CITE.entry(8), CITE.entry(14), CITE.check(5), CITE.check(10), CITE.parameter("key1")),
        ("key1",),
        check,
        with_another,
        requires=("key1.rank",),
        vendor_code=lambda call: TILING_ERROR if size_of(call, "D") else "accepts",
        pick="The document and the vendor's source agree but for D = 0, where all outputs are empty and the "
        "vendor's source succeeds without computing. npugrad: the document, 561002.",
    )


def _shape_rules() -> Iterator[Constraint]:
    for axis in LAYOUT["key2"]:
        yield _axis_rule("key2", axis, (), "accepts", _SHAPE_NOT_CHECKED)
    for name, like, entry in (
        ("value1", "key1", 10),
        ("value2", "key2", 11),
        ("dy", "query", 12),
        ("attention_in", "query", 12),
    ):
        sources = (CITE.entry(entry), CITE.check(11))
        yield _like_rule(name, like, sources, (f"{like}.rank", f"{name}.rank"))
    yield _expected_rule("atten_mask", (CITE.check(12),))
    for name in ("softmax_sum", "softmax_max"):
        yield _expected_rule(name, (CITE.entry(13), CITE.check(13)))
    for name, like in LIKE.items():
        requires = (f"{like}.not_null", f"{name}.not_null")
        yield _like_rule(name, like, (), requires, "accepts", _SHAPE_NOT_CHECKED)


def _like_rule(
    name: str,
    like: str,
    sources: tuple[Source, ...],
    requires: tuple[str, ...],
    vendor_code: VendorCode = TILING_ERROR,
    pick: str = "",
) -> Constraint:
    """An input or a declared output has the shape of an input."""
    return _limit(
        f"{name}.shape",
        f"{C_NAMES[name]} has the shape of {like}.",
        (*sources, CITE.parameter(C_NAMES[name])),
        (name, like),
        shape_is(name, lambda call: call.tensor(like).shape, f"the shape of {like}"),
        edited(name, with_last_axis_longer),
        requires,
        vendor_code,
        pick,
    )


def _expected_rule(name: str, sources: tuple[Source, ...]) -> Constraint:
    """An input has the shape that query and key1 determine."""
    leaders = leaders_of(name)
    axes = f"[{', '.join(LAYOUT[name])}]"
    return _limit(
        f"{name}.shape",
        f"{C_NAMES[name]} has the shape {axes}.",
        (*sources, CITE.parameter(C_NAMES[name])),
        (name, *leaders),
        shape_is(name, lambda call: expected_shape(call, name), f"{axes} of {' and '.join(leaders)}"),
        edited(name, with_last_axis_longer),
        (f"{name}.rank", *(f"{leader}.rank" for leader in leaders)),
    )
