"""The constraints of aclnnFusedFloydAttentionGrad: what the official page and the vendor's source refuse.

Each can turn a legal call into one that violates only it. This module has the rules for product, null
pointers, types and formats; those for sizes and shapes are in `_fused_floyd_attention_grad_tiling`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from npugrad.dtypes import Format
from npugrad.error_table import FIND_KERNEL_ERROR, PARAM_INVALID, PARAM_NULLPTR, TILING_ERROR
from npugrad.operator import NotExpressible
from npugrad.ops._fused_floyd_attention_grad_layout import (
    C_NAMES,
    CITE,
    DTYPES,
    LAYOUT,
    LIKE,
    MASK_DTYPES,
    PRODUCTS,
    STATISTICS_DTYPES,
    as_fractal,
    as_int32,
    as_other_float,
    edited,
)
from npugrad.ops._fused_floyd_attention_grad_tiling import tiling_rules
from npugrad.rules import (
    dtype_is,
    dtype_supported,
    format_is,
    input_not_null,
    invalid,
    output_not_null,
    product_supported,
    same_dtype,
    with_inferred_outputs,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from npugrad.errors import Source
    from npugrad.meta import CallMeta
    from npugrad.operator import Constraint

_REQUIRED = ("query", "key1", "value1", "key2", "value2", "dy")
_STATISTICS = ("softmax_max", "softmax_sum")
# Required by the document, optional in the vendor's operator definition: refused late, and hardly checked.
_LATE = (*_STATISTICS, "attention_in")
_TYPED_LIKE_QUERY = (*_REQUIRED[1:], "attention_in")
_LATE_NULL = (
    "The document requires it, so a null is 161001; the vendor's source returns 561002. npugrad: 161001."
)


def _floats_as_int32(call: CallMeta) -> CallMeta:
    return call.with_inputs(**{name: as_int32(call.tensor(name)) for name in ("query", *_TYPED_LIKE_QUERY)})


def _nulls() -> Iterator[Constraint]:
    for name in (*_REQUIRED, *LIKE, *_LATE):
        is_late = name in _LATE
        factory = output_not_null if name in LIKE else input_not_null
        yield factory(
            name,
            f"{C_NAMES[name]} must not be a null pointer.",
            (CITE.code(PARAM_NULLPTR), CITE.check(6 if is_late else 1), CITE.parameter(C_NAMES[name])),
            vendor_code=TILING_ERROR if is_late else PARAM_NULLPTR,
            pick=_LATE_NULL if is_late else "",
        )


def _dtype_rules() -> Iterator[Constraint]:
    yield invalid(
        "query.dtype",
        "query has data type FLOAT16 or BFLOAT16.",
        (CITE.code(PARAM_INVALID), CITE.check(4), CITE.parameter("query")),
        ("query",),
        dtype_supported("query", DTYPES),
        _floats_as_int32,
        requires=("query.not_null",),
        pick="The document lists FLOAT16 and BFLOAT16; the vendor's operator definition lists FLOAT as well, "
        "but no kernel has it. npugrad: FLOAT is refused like every other type.",
    )
    for name in (*_TYPED_LIKE_QUERY, *LIKE):
        yield invalid(
            f"{name}.same_dtype",
            f"{C_NAMES[name]} has the data type of query.",
            (*_dtype_sources(name), CITE.parameter(C_NAMES[name])),
            (name, "query"),
            same_dtype(name, "query"),
            edited(name, as_other_float),
            requires=("query.not_null", f"{name}.not_null"),
            **_unless_looked_at(name),
        )
    for name in _STATISTICS:
        yield invalid(
            f"{name}.dtype",
            f"{C_NAMES[name]} has data type FLOAT.",
            (*_dtype_sources(name), CITE.parameter(C_NAMES[name])),
            (name,),
            dtype_is(name, STATISTICS_DTYPES),
            edited(name, as_int32),
            requires=(f"{name}.not_null",),
            **_unless_looked_at(name),
        )
    yield invalid(
        "atten_mask.dtype",
        "attenMaskOptional has data type BOOL or UINT8.",
        (CITE.code(PARAM_INVALID), CITE.check(9), CITE.parameter(C_NAMES["atten_mask"])),
        ("atten_mask",),
        dtype_is("atten_mask", MASK_DTYPES),
        edited("atten_mask", as_int32),
        vendor_code=TILING_ERROR,
        pick="The document gives 161002; the vendor's source returns 561002. npugrad: 161002.",
    )


def _format_rules() -> Iterator[Constraint]:
    for name in (*LAYOUT, *LIKE):
        yield invalid(
            f"{name}.format",
            f"{C_NAMES[name]} has data format ND.",
            (*_dtype_sources(name), CITE.parameter(C_NAMES[name])),
            (name,),
            format_is(name, (Format.ND,)),
            edited(name, as_fractal),
            **_unless_looked_at(name),
        )


def _dtype_sources(name: str) -> tuple[Source, ...]:
    """The vendor's check of types and formats covers what its operator definition requires."""
    row = (CITE.code(PARAM_INVALID),)
    return row if _is_optional_to_vendor(name) else (*row, CITE.check(4))


def _unless_looked_at(name: str) -> Mapping[str, str]:
    if not _is_optional_to_vendor(name):
        return {}
    pick = "The document gives 161002; the vendor's source does not look at it. npugrad: 161002."
    return {"vendor_code": "accepts", "pick": pick}


def _is_optional_to_vendor(name: str) -> bool:
    return name in (*_LATE, "atten_mask")


def _constraints() -> Iterator[Constraint]:
    text = "The product is of the Atlas A2 or the Atlas A3 series."
    yield product_supported(PRODUCTS, FIND_KERNEL_ERROR, text, (CITE.products(), CITE.check(3)))
    yield from _nulls()
    yield from _dtype_rules()
    yield from _format_rules()
    yield from tiling_rules()


CONSTRAINTS = tuple(replace(c, violate=with_inferred_outputs(c.violate)) for c in _constraints())
"""In the order in which they are reported within a class of codes."""

NOT_EXPRESSIBLE = (
    NotExpressible(CITE.check(2), "workspaceSize and executor are created by the service, never null"),
    NotExpressible(
        CITE.entry(1), "no operand breaks it; the deterministic option is refused for the operator"
    ),
    NotExpressible(CITE.entry(2), "versions of the packages on the server, which its own check looks at"),
    NotExpressible(CITE.entry(15), "advice: from M*D or K*D of 65536 on the operator is slow, but right"),
    NotExpressible(CITE.parameter(C_NAMES["scale_value"]), "every double is legal, and none can be null"),
    *CITE.made_by_service(),
)
"""Rows of the page and of the check table that no call can break."""
