"""The constraints of aclnnGridSampler3DBackward: what the page (9.1.0) and the vendor's source refuse.

The format of input determines the axis of the channels in input and grad_output: last in NDHWC, else second.
Constraints number the axes as in NCDHW.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from npugrad.dtypes import DType, Format
from npugrad.meta import CallMeta, TensorMeta
from npugrad.operator import Constraint, Finding, NotExpressible
from npugrad.ops._grid_sampler_rules import (
    C_NAMES,
    INTERPOLATION_MODES,
    LIKE,
    Rules,
    all_of,
    on_checked_calls,
)
from npugrad.products import Product
from npugrad.rules import Citations, format_is, integer_in, invalid, listed, present

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from npugrad.rules import Check, Violate

DOCUMENT = "aclnnGridSampler3DBackward"
DTYPES: Mapping[Product, tuple[DType, ...]] = {
    Product.ATLAS_TRAINING: (DType.FLOAT32, DType.FLOAT16, DType.FLOAT64),
    Product.ATLAS_A2: (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16, DType.FLOAT64),
    Product.ATLAS_A3: (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16, DType.FLOAT64),
}
_FORMATS = (Format.ND, Format.NCDHW, Format.NDHWC)
_IMAGES = ("grad_output", "input", "input_grad")
_CITE = Citations(DOCUMENT, "ops-cv")
_RULES = Rules(
    cite=_CITE,
    sides=("depth", "height", "width"),
    coordinates="x, y and z",
    rows={
        **{"same_dtype": (1, 4), "dtype": (1, 5), "interpolation": (2, 6), "padding": (2, 6), "rank": (3, 7)},
        **{"batch": (3, 8), "channels": (3, 9), "positive": (None, 14), "coordinates": (3, 11)},
        **{"out_depth": (3, 10), "out_height": (3, 10), "out_width": (3, 10), "shape": (3, 12)},
        **{"mask": (None, 13), "double": (None, 15), "same_format": (None, 16)},
    },
    positive={
        "vendor_code": "accepts",
        "pick": "The document says that D, H and W of input may not be 0, and gives no code; the vendor's "
        "source accepts it, and refuses the like in two dimensions with 161002. npugrad: 161002.",
    },
)


def channels_first(meta: TensorMeta) -> tuple[int, ...]:
    """Order of an image's axes that gives N, C, D, H, W, by its format."""
    axes = tuple(range(meta.rank))
    return (0, 4, 1, 2, 3) if meta.format is Format.NDHWC and meta.rank == _RULES.rank else axes


def _dtype_rules() -> Iterator[Constraint]:
    anywhere = DTYPES[Product.ATLAS_A2]

    def has(allowed: tuple[DType, ...]) -> Check:
        def check(call: CallMeta) -> Finding | None:
            dtype = call.tensor("input").dtype
            found = Finding(f"dtype {dtype}", f"{listed(allowed)} on {call.product.full_name}")
            return None if dtype in allowed else found

        return check

    yield invalid(
        "input.dtype",
        "input has a supported data type.",
        _RULES.sources("dtype", "input"),
        ("input",),
        has(anywhere),
        all_of(DType.INT32),
        requires=("input.not_null",),
    )
    yield invalid(
        "input.not_bfloat16",
        "input does not have data type BFLOAT16.",
        _RULES.sources("dtype", "input"),
        ("input",),
        has(DTYPES[Product.ATLAS_TRAINING]),
        all_of(DType.BFLOAT16),
        requires=("input.dtype",),
        products=frozenset({Product.ATLAS_TRAINING}),
        vendor_code="accepts",
        pick="The document excepts BFLOAT16 on the Atlas training series; the vendor's source accepts it. "
        "npugrad: refused.",
    )


def _interpolation_rule() -> Constraint:
    return invalid(
        "interpolation_mode.choice",
        "interpolationMode is 0 (bilinear) or 1 (nearest).",
        _RULES.sources("interpolation", "interpolationMode"),
        ("interpolation_mode",),
        integer_in("interpolation_mode", INTERPOLATION_MODES),
        lambda call: call.with_attrs(interpolation_mode=2),
    )


def _as(name: str, storage: Format) -> Violate:
    """Gives a tensor another format without changing its shape."""

    def violate(call: CallMeta) -> CallMeta:
        meta = call.tensor(LIKE.get(name, name))
        changed = {name: TensorMeta(meta.dtype, meta.shape, storage)}
        return call.with_outputs(**changed) if name in LIKE else call.with_inputs(**changed)

    return violate


def _format_rules() -> Iterator[Constraint]:
    for name, c_name in ((name, C_NAMES[name]) for name in ("grad_output", "input", "grid", *LIKE)):
        yield invalid(
            f"{name}.format",
            f"{c_name} is stored as ND, NCDHW or NDHWC.",
            (_CITE.parameter(c_name),),
            (name,),
            format_is(name, _FORMATS),
            _as(name, Format.NCHW),
            requires=(f"{name}.not_null",),
            vendor_code="accepts",
            pick="The document lists NCDHW and NDHWC, for grid and gridGrad NDHWC alone, passes ND in its "
            "example, and gives no code for others; the vendor's source accepts any. "
            "npugrad: others refused.",
        )
    for name in ("grad_output", "input_grad"):
        yield invalid(
            f"{name}.same_format",
            f"{C_NAMES[name]} has its channels where input has them: last in NDHWC, else second.",
            _RULES.sources("same_format", C_NAMES[name]),
            (name, "input"),
            _same_format(name),
            _as(name, Format.NDHWC),
            requires=(f"{name}.format", "input.format"),
            vendor_code="accepts",
            pick="The document wants inputGrad in the format of input, without a code; the vendor's source "
            "reads all by the format of input and accepts another. npugrad: 161002, for gradOutput as well.",
        )
    sources = _RULES.sources("double", "input")
    yield invalid(
        "input.double_format",
        "With DOUBLE, gradOutput, input and inputGrad are not stored as NDHWC.",
        (*sources, _CITE.parameter("gradOutput"), _CITE.parameter("inputGrad")),
        ("input",),
        _double_format,
        _double_channels_last,
        requires=("input.format",),
        vendor_code="accepts",
        pick="The document excepts NDHWC for DOUBLE, and gives no code; the vendor's source accepts it. "
        "npugrad: 161002.",
    )


def _same_format(name: str) -> Check:
    def check(call: CallMeta) -> Finding | None:
        meta, leader = present(call, name), call.tensor("input").format
        if meta is None or (meta.format is Format.NDHWC) == (leader is Format.NDHWC):
            return None
        expected = Format.NDHWC if leader is Format.NDHWC else f"{Format.ND} or {Format.NCDHW}"
        return Finding(f"format {meta.format}", f"{expected}, as input")

    return check


def _double_format(call: CallMeta) -> Finding | None:
    image = call.tensor("input")
    if (image.dtype, image.format) != (DType.FLOAT64, Format.NDHWC):
        return None
    return Finding(f"format {image.format} with {image.dtype}", f"{Format.ND} or {Format.NCDHW}")


def _double_channels_last(call: CallMeta) -> CallMeta | None:
    if call.tensor("input").dtype is not DType.FLOAT64:
        return None
    metas = {name: call.tensor(name) for name in _IMAGES if name not in LIKE}
    moved = {name: meta.permuted((0, 2, 3, 4, 1)) for name, meta in metas.items()}
    return call.with_inputs(
        **{name: TensorMeta(meta.dtype, meta.shape, Format.NDHWC) for name, meta in moved.items()}
    )


def _by_format(constraint: Constraint) -> Constraint:
    """Makes a constraint on axes see N, C, D, H, W if input is stored as NDHWC."""

    def check(call: CallMeta) -> Finding | None:
        image, gradient = call.inputs["input"], call.inputs["grad_output"]
        if not image or not gradient or image.format is not Format.NDHWC or gradient.rank != image.rank:
            return constraint.check(call)
        axes = channels_first(image)
        found = constraint.check(
            call.with_inputs(input=image.permuted(axes), grad_output=gradient.permuted(axes))
        )
        return found and replace(found, found=f"{found.found}, of NDHWC taken as NCDHW")

    return replace(constraint, check=check)


def _shape_rules() -> Iterator[Constraint]:
    for constraint in _RULES.shapes():
        is_of_axes = constraint.id.split(".")[1] not in ("rank", "shape", "coordinates")
        yield _by_format(constraint) if is_of_axes else constraint


CONSTRAINTS = on_checked_calls(
    (
        *_RULES.nulls(),
        *_RULES.same_dtypes(),
        *_dtype_rules(),
        _RULES.padding(),
        _interpolation_rule(),
        *_shape_rules(),
        _RULES.mask(),
        *_format_rules(),
    )
)
"""In the order in which they are reported within a class of codes."""

NOT_EXPRESSIBLE = (
    NotExpressible(_CITE.check(1), "workspaceSize and executor are created by the service, never null"),
    NotExpressible(
        _CITE.check(2), "a null outputMask is no error: status 0, nothing checked, nothing returned"
    ),
    NotExpressible(
        _CITE.check(17), "empty operands and all-false masks are no error; wanted outputs are zeros"
    ),
    NotExpressible(_CITE.parameter("alignCorners"), "both values of a bool are legal"),
    NotExpressible(_CITE.entry(1), "determinism is an option of the call, not a precondition"),
    *_CITE.made_by_service(),
)
"""Rows of the page and of the check table that no call can break."""
