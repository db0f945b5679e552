"""Kinds of rules about presence, type and storage format."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from npugrad import changes
from npugrad.dtypes import DType
from npugrad.error_table import INNER_NULLPTR, PARAM_NULLPTR
from npugrad.operator import AttrParam, Finding, TensorParam
from npugrad.page import Page, Rule
from npugrad.products import Product
from npugrad.rules._words import listed, of_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from npugrad.changes import Candidates
    from npugrad.dtypes import Format
    from npugrad.meta import CallMeta, TensorMeta
    from npugrad.page import Check
    from npugrad.rules._words import Kind, Said


def special(kind: str, text: str, check: Check, breaks: Candidates, *about: str, **extra: Any) -> Kind:
    """What no other kind can say, by a named function; `extra` is passed on to `Rule`."""
    return lambda page, name: Rule(kind=kind, text=text, check=check, breaks=breaks, about=about, **extra)


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


def only_on(page: Page, *products: Product, **span: Any) -> None:
    """The pages of some releases of CANN list these products alone; `span` is `since` and `until` of rows."""
    page.on(*products, **span)
    page.rule(
        product,
        "product",
        code=INNER_NULLPTR,
        text="The page of the CANN release lists the product.",
        vendor="accepts",
        alone=True,
        pick="The page of this release lists other products, and gives no code; the vendor's source does not "
        "look at the product. npugrad: 561103, before any other check.",
        **span,
    )


def dtype_in(*dtypes: DType, tolerated: tuple[DType, ...] = (), is_always: bool = False) -> Kind:
    """The type is one of those given, else one of those that the parameter has on the product.

    Args:
        dtypes: Types on every product.
        tolerated: Further types, about which another rule decides.
        is_always: Whether outputs that are masked out are looked at, too.
    """

    def kind(page: Page, name: str) -> Rule:
        by_product, uncarried = page.tensor(name).dtypes, page.tensor(name).uncarried
        anywhere = {dtypes} if dtypes else set(by_product.values())

        def judge(call: CallMeta, meta: TensorMeta) -> Said:
            allowed = dtypes or by_product.get(call.product, ())
            on_product = f" on {call.product.full_name}" if len(anywhere) > 1 else ""
            is_legal = meta.dtype in (*allowed, *tolerated, *uncarried)
            return None if is_legal else (f"dtype {meta.dtype}", f"{listed(allowed)}{on_product}")

        text = f"has data type {listed(*anywhere)}" if len(anywhere) == 1 else "has a supported data type"
        text += ", whatever outputMask says" * is_always
        return of_tensor("dtype", text, judge, changes.retyped, is_always=is_always)(page, name)

    return kind


def same_dtype(leader: str, allowed: Callable[[CallMeta, str], tuple[DType, ...]] | None = None) -> Kind:
    """The type is that of another operand, or one that `allowed` returns, in words `leader`."""
    first, *words = re.split(r"\b", leader, maxsplit=2)[1:]
    why = "" if allowed else f", the dtype of {leader}"

    def kind(page: Page, name: str) -> Rule:
        def judge(call: CallMeta, meta: TensorMeta) -> Said:
            dtypes = allowed(call, name) if allowed else (call.tensor(first).dtype,)
            said = f"dtype {meta.dtype}", f"{listed(dict.fromkeys(dtypes))}{why}"
            return None if meta.dtype in dtypes else said

        page.follow(first, name)
        # Types that some product has, of which the vendor's own checks know nothing.
        edits = partial(changes.retyped, tuple(chain(*page.tensor(name).dtypes.values())))
        made = of_tensor("same_dtype", "".join(("has the data type of {}", *words)), judge, edits, first)
        return replace(made(page, name), about=() if allowed else (first,))

    return kind


def promoted(*dtypes: DType) -> DType:
    """The type in which operands of these types are computed: the widest float, else the widest integer."""
    if {*dtypes} == {DType.FLOAT16, DType.BFLOAT16}:
        return DType.FLOAT32
    return max(dtypes, key=lambda dtype: ("float" in dtype, dtype.itemsize))


def promoted_dtype(*names: str) -> Kind:
    """The type is the one in which operands are computed together."""

    def judge(call: CallMeta, meta: TensorMeta) -> Said:
        dtype = promoted(*(call.tensor(each).dtype for each in names))
        return None if meta.dtype is dtype else (f"dtype {meta.dtype}", f"{dtype}, as promoted")

    text = "has the data type to which those of {} and {} promote"
    requires = tuple(f"{each}.dtype" for each in names)
    return of_tensor("same_dtype", text, judge, changes.retyped, *names, requires=requires)


def format_in(*formats: Format) -> Kind:
    """The storage format is one of those given."""

    def judge(call: CallMeta, meta: TensorMeta) -> Said:
        return None if meta.format in formats else (f"format {meta.format}", listed(formats))

    return of_tensor("format", f"has format {listed(formats)}", judge, changes.stored)


def format_not(storage: Format) -> Kind:
    """The storage format is any but one."""

    def judge(call: CallMeta, meta: TensorMeta) -> Said:
        return (f"format {storage}", "another format, such as ND") if meta.format is storage else None

    return of_tensor("format", f"is not stored as {storage}", judge, changes.stored)
