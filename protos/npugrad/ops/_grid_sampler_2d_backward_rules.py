"""The constraints of aclnnGridSampler2DBackward: what the official page and the vendor's source refuse.

The page names ND as the storage format but gives no code for others, and the vendor's source accepts any, so
formats are not checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npugrad.dtypes import DType
from npugrad.operator import Finding, NotExpressible
from npugrad.ops._grid_sampler_rules import BICUBIC, INTERPOLATION_MODES, Rules, all_of, on_checked_calls
from npugrad.products import Product
from npugrad.rules import Citations, integer_in, invalid, listed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from npugrad.meta import CallMeta
    from npugrad.operator import Constraint
    from npugrad.rules import Check

DOCUMENT = "aclnnGridSampler2DBackward"
DTYPES: Mapping[Product, tuple[DType, ...]] = {
    Product.ATLAS_TRAINING: (DType.FLOAT32, DType.FLOAT16),
    Product.ATLAS_A2: (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16),
    Product.ATLAS_A3: (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16),
}
_CITE = Citations(DOCUMENT, "ops-cv")
_RULES = Rules(
    cite=_CITE,
    sides=("height", "width"),
    coordinates="x and y",
    rows={
        **{"same_dtype": (1, 4), "dtype": (1, 5), "interpolation": (3, 6), "padding": (3, 7), "rank": (2, 8)},
        **{"batch": (4, 9), "channels": (5, 10), "positive": (8, 10)},
        **{"out_height": (6, 11), "out_width": (7, 11), "coordinates": (9, 11)},
        **{"shape": (10, 12), "mask": (None, 13)},
    },
)


def _dtype_rules() -> Iterator[Constraint]:
    sources = _RULES.sources("dtype", "input")
    yield invalid(
        "input.dtype",
        "input has a supported data type.",
        sources,
        ("input",),
        _dtype_check(tolerate_double=True),
        all_of(DType.INT32),
        requires=("input.not_null",),
    )
    yield invalid(
        "input.not_double",
        "input does not have data type DOUBLE.",
        sources,
        ("input",),
        _dtype_check(tolerate_double=False),
        all_of(DType.FLOAT64),
        requires=("input.not_null", "input.dtype"),
        vendor_code="accepts",
        pick="The document does not list DOUBLE; the vendor's source accepts it. npugrad: refused.",
    )


def _dtype_check(*, tolerate_double: bool) -> Check:
    """Whether the type of input is supported; DOUBLE, which the vendor accepts, has its own rule."""

    def check(call: CallMeta) -> Finding | None:
        dtype, allowed = call.tensor("input").dtype, DTYPES[call.product]
        if dtype in allowed or (tolerate_double and dtype is DType.FLOAT64):
            return None
        return Finding(f"dtype {dtype}", f"{listed(allowed)} on {call.product.full_name}")

    return check


def _interpolation_rules() -> Iterator[Constraint]:
    interpolation = integer_in("interpolation_mode", INTERPOLATION_MODES)
    sources = _RULES.sources("interpolation", "interpolationMode")
    yield invalid(
        "interpolation_mode.choice",
        "interpolationMode is 0 (bilinear) or 1 (nearest).",
        sources,
        ("interpolation_mode",),
        lambda call: None if call.integer("interpolation_mode") == BICUBIC else interpolation(call),
        lambda call: call.with_attrs(interpolation_mode=3),
    )
    yield invalid(
        "interpolation_mode.not_bicubic",
        "interpolationMode is not 2 (bicubic).",
        sources,
        ("interpolation_mode",),
        interpolation,
        lambda call: call.with_attrs(interpolation_mode=BICUBIC),
        requires=("interpolation_mode.choice",),
        vendor_code="accepts",
        pick="The document lists 0 and 1, as the vendor's source did in its time; newer source accepts 2. "
        "npugrad: refused.",
    )


CONSTRAINTS = on_checked_calls(
    (
        *_RULES.nulls(),
        *_RULES.same_dtypes(),
        *_dtype_rules(),
        *_interpolation_rules(),
        _RULES.padding(),
        *_RULES.shapes(),
        _RULES.mask(),
    )
)
"""In the order in which they are reported within a class of codes."""

NOT_EXPRESSIBLE = (
    NotExpressible(_CITE.check(1), "workspaceSize and executor are created by the service, never null"),
    NotExpressible(
        _CITE.check(2), "a null outputMask is no error: status 0, nothing checked, nothing returned"
    ),
    NotExpressible(
        _CITE.check(14), "empty operands and all-false masks are no error; wanted outputs are zeros"
    ),
    NotExpressible(_CITE.parameter("alignCorners"), "both values of a bool are legal"),
    *_CITE.made_by_service(),
)
"""Rows of the page and of the check table that no call can break."""
