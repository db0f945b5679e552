"""Kinds of rules that other operands decide: one of several shapes, formats by rank, sizes of results."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from npugrad import changes
from npugrad.dtypes import Format
from npugrad.error_table import PARAM_INVALID
from npugrad.meta import INT64_MAX
from npugrad.operator import Finding
from npugrad.page import Page, Rule
from npugrad.rules._operands import format_in
from npugrad.rules._words import listed, present, shape_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from npugrad.meta import CallMeta
    from npugrad.operator import VendorCode
    from npugrad.rules._words import Kind, Shape

_PRIVATE = (Format.FRACTAL_NZ, Format.FRACTAL_Z, Format.NC1HWC0, Format.NDC1HWC0, Format.FRACTAL_Z_3D)
"""Storage formats that only the vendor's own kernels know."""


def shape_among(shapes: Callable[[CallMeta], Sequence[Shape]], text: str, *about: str) -> Kind:
    """The shape is one of several, which may depend on the call; `text` says on what."""

    def kind(page: Page, name: str) -> Rule:
        def check(call: CallMeta) -> Finding | None:
            meta = present(call, name)
            if meta is None or meta.shape in shapes(call):
                return None
            return Finding(f"shape {shape_text(meta.shape)}", listed(map(shape_text, shapes(call))))

        breaks = page.edited(name, changes.lengthened())
        return Rule(kind="shape", text=text, check=check, breaks=breaks, about=about)

    return kind


def format_by_rank(formats: Mapping[int, Format]) -> Kind:
    """The storage format is ND, or the one that belongs to the rank."""

    def kind(page: Page, name: str) -> Rule:
        def check(call: CallMeta) -> Finding | None:
            meta = present(call, name)
            if meta is None or meta.format in (Format.ND, formats.get(meta.rank)):
                return None
            allowed = dict.fromkeys((Format.ND, formats.get(meta.rank, Format.ND)))
            return Finding(f"format {meta.format}", f"{listed(allowed)} with rank {meta.rank}")

        text = "has format ND, or " + listed(f"{each} with rank {rank}" for rank, each in formats.items())
        breaks, requires = page.edited(name, changes.stored()), (f"{name}.rank",)
        return Rule(kind="format", text=text, check=check, breaks=breaks, requires=requires)

    return kind


def same_format(leader: str) -> Kind:
    """The storage format is that of another operand."""

    def kind(page: Page, name: str) -> Rule:
        def check(call: CallMeta) -> Finding | None:
            meta, expected = present(call, name), call.tensor(leader).format
            if meta is None or meta.format is expected:
                return None
            return Finding(f"format {meta.format}", f"{expected}, the format of {leader}")

        return Rule(
            kind="same_format",
            text=f"has the format of {page.params[leader].c_name}",
            check=check,
            breaks=page.edited(name, changes.stored()),
            about=(leader,),
            requires=(f"{name}.format", f"{leader}.format"),
        )

    return kind


def nd_or_public(page: Page, name: str) -> Rule:
    """The storage format is ND, though the vendor's source refuses private ones only."""

    def vendor(call: CallMeta) -> VendorCode:
        meta = present(call, name)
        return PARAM_INVALID if meta is not None and meta.format in _PRIVATE else "accepts"

    pick = "The document says ND; the vendor's source refuses private formats only. npugrad: ND."
    return replace(format_in(Format.ND)(page, name), vendor=(vendor, pick))


def first_axis_of(output: str, row_bytes: Callable[[CallMeta], int]) -> Kind:
    """A number is the first axis of an output, of no more bytes than a tensor can hold."""

    def kind(page: Page, name: str) -> Rule:
        def check(call: CallMeta) -> Finding | None:
            most = INT64_MAX // max(row_bytes(call), 1)
            value = call.integer(name)
            return None if value <= most else Finding(str(value), f"at most {most}, as a tensor can hold")

        text = f"rows of {page.params[output].c_name} are at most 2^63 - 1 bytes"
        breaks = changes.numbered(name, (INT64_MAX + 1,))
        return Rule(kind="limit", text=text, check=check, breaks=breaks)

    return kind
