"""Factories for checks and constraints that several operators share.

A check is a pure function that returns None if it holds, else what it found and expected.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from npugrad.error_table import PARAM_INVALID, PARAM_NULLPTR
from npugrad.errors import Source
from npugrad.operator import Constraint, Finding, NotExpressible
from npugrad.products import Product

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from npugrad.dtypes import DType, Format
    from npugrad.meta import CallMeta, TensorMeta

    Check = Callable[[CallMeta], "Finding | None"]
    Violate = Callable[[CallMeta], "CallMeta | None"]

NULL = Finding("null", "a tensor")


@dataclass(frozen=True)
class Citations:
    """Creates the sources of one record, with the same spelling in all records.

    Attributes:
        document: Official name of the operator's page.
        repository: The vendor's public repository with the operator's checks.
    """

    document: str
    repository: str

    def code(self, code: int, row: int = 1) -> Source:
        """A row of the error table; rows count from 1 for each code."""
        return Source(self.document, f"return codes, {code}", f"row {row}")

    def parameter(self, c_name: str) -> Source:
        """What the parameter section says about one parameter."""
        return Source(self.document, "parameters", c_name)

    def entry(self, number: int) -> Source:
        """An entry of the constraint section, from 1."""
        return Source(self.document, "constraints", f"entry {number}")

    def check(self, number: int) -> Source:
        """A check of the first phase in the vendor's source, from 1."""
        return Source(f"vendor source ({self.repository})", f"checks of {self.document}", f"check {number}")

    def products(self) -> Source:
        """The list of products that have the operator."""
        return Source(self.document, "supported products", "list")

    def made_by_service(self) -> tuple[NotExpressible, ...]:
        """Parameters of the two phases that are not part of a call: the service creates them, never null."""
        names = ("workspaceSize", "executor", "workspace", "stream")
        return tuple(
            NotExpressible(self.parameter(name), "created by the service, never null") for name in names
        )


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


def input_not_null(name: str, text: str, sources: tuple[Source, ...], **extra: Any) -> Constraint:
    """161001: a required input is not null."""
    return Constraint(
        id=f"{name}.not_null",
        code=PARAM_NULLPTR,
        text=text,
        sources=sources,
        operands=(name,),
        check=lambda call: NULL if call.inputs[name] is None else None,
        violate=lambda call: call.with_inputs(**{name: None}),
        **{"vendor_code": PARAM_NULLPTR, **extra},
    )


def attr_not_null(name: str, text: str, sources: tuple[Source, ...], **extra: Any) -> Constraint:
    """161001: a required attribute of a pointer kind is not null."""
    return Constraint(
        id=f"{name}.not_null",
        code=PARAM_NULLPTR,
        text=text,
        sources=sources,
        operands=(name,),
        check=lambda call: Finding("null", "a value") if call.attrs[name] is None else None,
        violate=lambda call: call.with_attrs(**{name: None}),
        **{"vendor_code": PARAM_NULLPTR, **extra},
    )


def output_not_null(
    name: str,
    text: str,
    sources: tuple[Source, ...],
    wanted: Callable[[CallMeta], bool] = lambda call: True,
    **extra: Any,
) -> Constraint:
    """161001: a wanted output was not declared null."""
    return Constraint(
        id=f"{name}.not_null",
        code=PARAM_NULLPTR,
        text=text,
        sources=sources,
        operands=(name,),
        check=lambda call: NULL if wanted(call) and call.is_null_output(name) else None,
        violate=lambda call: call.with_outputs(**{name: None}) if wanted(call) else None,
        **{"vendor_code": PARAM_NULLPTR, **extra},
    )


def product_supported(
    products: Iterable[Product], code: int, text: str, sources: tuple[Source, ...], **extra: Any
) -> Constraint:
    """The product has the operator; checked first, and if violated, nothing else is checked."""
    known = tuple(products)
    lacking = next(product for product in Product if product not in known)

    def check(call: CallMeta) -> Finding | None:
        if call.product in known:
            return None
        return Finding(call.product.full_name, listed(product.full_name for product in known))

    return Constraint(
        id="product.supported",
        code=code,
        text=text,
        sources=sources,
        operands=("product",),
        check=check,
        violate=lambda call: replace(call, product=lacking),
        alone=True,
        **{"vendor_code": code, **extra},
    )


def with_inferred_outputs(violate: Violate) -> Violate:
    """Drops declared outputs, so that they follow from the changed call and violate nothing themselves."""
    return lambda call: violate(replace(call, outputs={}))


def dtype_supported(name: str, dtypes: Mapping[Product, tuple[DType, ...]]) -> Check:
    """The dtype is one the product supports."""

    def check(call: CallMeta) -> Finding | None:
        allowed = dtypes.get(call.product, ())
        if call.tensor(name).dtype in allowed:
            return None
        return Finding(f"dtype {call.tensor(name).dtype}", f"{listed(allowed)} on {call.product.full_name}")

    return check


def same_dtype(name: str, leader: str) -> Check:
    """An optional input or a declared output has the dtype of another operand."""

    def check(call: CallMeta) -> Finding | None:
        meta, expected = present(call, name), call.tensor(leader).dtype
        if meta is None or meta.dtype == expected:
            return None
        return Finding(f"dtype {meta.dtype}", f"{expected}, the dtype of {leader}")

    return check


def dtype_is(name: str, dtypes: tuple[DType, ...]) -> Check:
    """An optional input or a declared output has one of the dtypes."""

    def check(call: CallMeta) -> Finding | None:
        meta = present(call, name)
        if meta is None or meta.dtype in dtypes:
            return None
        return Finding(f"dtype {meta.dtype}", listed(dtypes))

    return check


def format_is(name: str, formats: tuple[Format, ...]) -> Check:
    """An optional input or a declared output has one of the storage formats."""

    def check(call: CallMeta) -> Finding | None:
        meta = present(call, name)
        if meta is None or meta.format in formats:
            return None
        return Finding(f"format {meta.format}", listed(formats))

    return check


def rank_within(name: str, low: int, high: int) -> Check:
    """An optional input or a declared output has a rank in the closed range."""

    def check(call: CallMeta) -> Finding | None:
        meta = present(call, name)
        if meta is None or low <= meta.rank <= high:
            return None
        expected = f"rank {low}" if low == high else f"rank {low} to {high}"
        return Finding(f"rank {meta.rank}, shape {shape_text(meta.shape)}", expected)

    return check


def element_count(name: str, count: Callable[[CallMeta], int], formula: str) -> Check:
    """An optional input has the number of elements that attributes determine."""

    def check(call: CallMeta) -> Finding | None:
        meta = call.inputs[name]
        if meta is None or meta.size == count(call):
            return None
        return Finding(
            f"{meta.size} elements, shape {shape_text(meta.shape)}", f"{formula} = {count(call)} elements"
        )

    return check


def shape_is(name: str, shape: Callable[[CallMeta], tuple[int, ...]], meaning: str) -> Check:
    """An optional input or a declared output has exactly this shape."""

    def check(call: CallMeta) -> Finding | None:
        meta = present(call, name)
        if meta is None or meta.shape == shape(call):
            return None
        return Finding(f"shape {shape_text(meta.shape)}", f"{shape_text(shape(call))}, {meaning}")

    return check


def axis_is(name: str, axis: int, size: Callable[[CallMeta], int], meaning: str) -> Check:
    """One axis of an input has the size that another operand determines."""

    def check(call: CallMeta) -> Finding | None:
        meta, expected = call.tensor(name), size(call)
        if meta.shape[axis] == expected:
            return None
        return Finding(
            f"{meta.shape[axis]} on axis {axis} of shape {shape_text(meta.shape)}", f"{expected}, {meaning}"
        )

    return check


def axis_within(name: str, axis: int, low: int, high: int, multiple_of: int = 1) -> Check:
    """The size of one axis of an input is in a closed range and a multiple of a number."""

    def check(call: CallMeta) -> Finding | None:
        size = call.tensor(name).shape[axis]
        if low <= size <= high and size % multiple_of == 0:
            return None
        multiple = f", a multiple of {multiple_of}" if multiple_of > 1 else ""
        return Finding(f"{size} on axis {axis}", f"{low} to {high}{multiple}")

    return check


def axis_multiple_of(name: str, axis: int, multiple: int) -> Check:
    """The size of one axis of an input is a multiple of a number."""

    def check(call: CallMeta) -> Finding | None:
        size = call.tensor(name).shape[axis]
        return Finding(f"{size} on axis {axis}", f"a multiple of {multiple}") if size % multiple else None

    return check


def integer_in(name: str, allowed: Mapping[str, int]) -> Check:
    """An attribute is one of the documented numbers."""

    def check(call: CallMeta) -> Finding | None:
        value = call.integer(name)
        if value in allowed.values():
            return None
        return Finding(str(value), listed(f"{number} ({meaning})" for meaning, number in allowed.items()))

    return check


def invalid(
    constraint_id: str,
    text: str,
    sources: tuple[Source, ...],
    operands: tuple[str, ...],
    check: Check,
    violate: Violate,
    **extra: Any,
) -> Constraint:
    """A constraint with code 161002 (or the one given in `extra`), by default the vendor's code as well."""
    code = extra.pop("code", PARAM_INVALID)
    return Constraint(
        id=constraint_id,
        code=code,
        text=text,
        sources=sources,
        operands=operands,
        check=check,
        violate=violate,
        **{"vendor_code": code, **extra},
    )
