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
from npugrad.rules._words import listed, of_attr, of_tensor, present, shape_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from npugrad.changes import Candidates
    from npugrad.meta import CallMeta, TensorMeta
    from npugrad.operator import VendorCode
    from npugrad.rules._words import Kind, Said, Shape

_PRIVATE = (Format.FRACTAL_NZ, Format.FRACTAL_Z, Format.NC1HWC0, Format.NDC1HWC0, Format.FRACTAL_Z_3D)
"""Storage formats that only the vendor's own kernels know."""


def shape_among(shapes: Callable[[CallMeta], Sequence[Shape]], text: str, *about: str) -> Kind:
    """The shape is one of several, which may depend on the call; `text` says on what."""

    def judge(call: CallMeta, meta: TensorMeta) -> Said:
        said = f"shape {shape_text(meta.shape)}", listed(map(shape_text, shapes(call)))
        return None if meta.shape in shapes(call) else said

    return of_tensor("shape", text, judge, changes.lengthened, *about)


def format_by_rank(formats: Mapping[int, Format]) -> Kind:
    """The storage format is ND, or the one that belongs to the rank."""

    def judge(call: CallMeta, meta: TensorMeta) -> Said:
        allowed = dict.fromkeys((Format.ND, formats.get(meta.rank, Format.ND)))
        said = f"format {meta.format}", f"{listed(allowed)} with rank {meta.rank}"
        return None if meta.format in allowed else said

    text = "has format ND, or " + listed(f"{each} with rank {rank}" for rank, each in formats.items())
    return of_tensor("format", text, judge, changes.stored, requires=("{}.rank",))


def same_format(leader: str) -> Kind:
    """The storage format is that of another operand."""

    def judge(call: CallMeta, meta: TensorMeta) -> Said:
        expected = call.tensor(leader).format
        said = f"format {meta.format}", f"{expected}, the format of {leader}"
        return None if meta.format is expected else said

    requires = ("{}.format", f"{leader}.format")
    return of_tensor("same_format", "has the format of {}", judge, changes.stored, leader, requires=requires)


def nd_or_public(page: Page, name: str) -> Rule:
    """The storage format is ND, though the vendor's source refuses private ones only."""

    def vendor(call: CallMeta) -> VendorCode:
        meta = present(call, name)
        return PARAM_INVALID if meta is not None and meta.format in _PRIVATE else "accepts"

    pick = "The document says ND; the vendor's source refuses private formats only. npugrad: ND."
    return replace(format_in(Format.ND)(page, name), vendor=(vendor, pick))


def first_axis_of(output: str, row_bytes: Callable[[CallMeta], int]) -> Kind:
    """A number is the first axis of an output, of no more bytes than a tensor can hold."""

    def judge(call: CallMeta, name: str) -> Said:
        most, value = INT64_MAX // max(row_bytes(call), 1), call.integer(name)
        return None if value <= most else (str(value), f"at most {most}, as a tensor can hold")

    def kind(page: Page, name: str) -> Rule:
        text = f"rows of {page.params[output].c_name} are at most 2^63 - 1 bytes"
        return of_attr("limit", text, judge, (INT64_MAX + 1,))(page, name)

    return kind


def in_range(stop: str, breaks: Candidates) -> Kind:
    """Where there are indices, there is something that they can be: the end of their range is not 0."""

    def kind(page: Page, name: str) -> Rule:
        def check(call: CallMeta) -> Finding | None:
            is_in = not call.tensor(name).size or page.bounds[name](call) > 0
            return None if is_in else Finding(f"{stop} 0", f"1 or more, as {name} is not empty")

        return Rule(kind="range", text=f"has elements only if {stop} is above 0", check=check, breaks=breaks)

    return kind
