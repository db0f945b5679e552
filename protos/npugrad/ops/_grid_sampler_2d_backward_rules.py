"""The constraints of aclnnGridSampler2DBackward: what the official page and the vendor's source refuse.

Each turns a legal call into one that breaks it alone. The page names ND as the storage format but no code for
another one, and the vendor's source takes any: formats are not checked.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from npugrad.dtypes import DType
from npugrad.error_table import PARAM_INVALID, PARAM_NULLPTR
from npugrad.meta import TensorMeta
from npugrad.operator import Finding, NotExpressible
from npugrad.products import Product
from npugrad.rules import (
    Citations,
    axis_is,
    input_not_null,
    integer_in,
    invalid,
    listed,
    output_not_null,
    rank_within,
    same_dtype,
    shape_is,
    shape_text,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from npugrad.meta import CallMeta
    from npugrad.operator import Constraint
    from npugrad.rules import Check, Violate

DOCUMENT = "aclnnGridSampler2DBackward"
RANK = 4
INTERPOLATION_MODES = {"bilinear": 0, "nearest": 1}
PADDING_MODES = {"zeros": 0, "border": 1, "reflection": 2}
DTYPES: Mapping[Product, tuple[DType, ...]] = {
    Product.ATLAS_TRAINING: (DType.FLOAT32, DType.FLOAT16),
    Product.ATLAS_A2: (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16),
    Product.ATLAS_A3: (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16),
}
C_NAMES = {
    "grad_output": "gradOutput",
    "input": "input",
    "grid": "grid",
    "interpolation_mode": "interpolationMode",
    "padding_mode": "paddingMode",
    "align_corners": "alignCorners",
    "output_mask": "outputMask",
    "input_grad": "inputGrad",
    "grid_grad": "gridGrad",
}
LIKE = {"input_grad": "input", "grid_grad": "grid"}
"""Which input an output is the gradient of, in the order of output_mask."""
_BICUBIC = 2
_CITE = Citations(DOCUMENT, "ops-cv")


def accepts_unchecked(call: CallMeta) -> bool:
    """Whether output_mask is null: the operator then succeeds before it looks at anything else."""
    return call.mask() is None


# How a legal call is made illegal; see `_on_checked_calls` for what such a call is like.


def _other_dtype(call: CallMeta) -> DType:
    return DType.FLOAT16 if call.tensor("input").dtype is DType.FLOAT32 else DType.FLOAT32


def _retyped(name: str) -> Violate:
    return lambda call: call.with_inputs(**{name: TensorMeta(_other_dtype(call), call.tensor(name).shape)})


def _all_of(dtype: DType) -> Violate:
    def violate(call: CallMeta) -> CallMeta:
        return call.with_inputs(**{name: TensorMeta(dtype, call.tensor(name).shape) for name in call.inputs})

    return violate


def _resized(name: str, axis: int, size: int | None = None) -> Violate:
    """Sets one axis of an input, or makes it one longer."""

    def violate(call: CallMeta) -> CallMeta:
        meta = call.tensor(name)
        changed = list(meta.shape)
        changed[axis] = meta.shape[axis] + 1 if size is None else size
        return call.with_inputs(**{name: TensorMeta(meta.dtype, changed)})

    return violate


def _with_axis_appended(name: str) -> Violate:
    def violate(call: CallMeta) -> CallMeta:
        meta = call.tensor(name)
        return call.with_inputs(**{name: TensorMeta(meta.dtype, (*meta.shape, 1))})

    return violate


def _declared_wrong(name: str, *, dtype: bool = False, shape: bool = False) -> Violate:
    def violate(call: CallMeta) -> CallMeta:
        like = call.tensor(LIKE[name])
        declared_dtype = _other_dtype(call) if dtype else like.dtype
        declared_shape = (*like.shape, 2) if shape else like.shape
        return call.with_outputs(**{name: TensorMeta(declared_dtype, declared_shape)})

    return violate


def _nulls() -> Iterator[Constraint]:
    for name in ("grad_output", "input", "grid"):
        c_name = C_NAMES[name]
        sources = (_CITE.code(PARAM_NULLPTR), _CITE.check(3), _CITE.parameter(c_name))
        yield input_not_null(name, f"{c_name} must not be a null pointer.", sources)
    for name in LIKE:
        c_name = C_NAMES[name]
        sources = (_CITE.code(PARAM_NULLPTR), _CITE.check(3), _CITE.parameter(c_name))
        text = f"{c_name} must not be a null pointer, whatever outputMask says."
        yield output_not_null(name, text, sources)


def _dtype_rules() -> Iterator[Constraint]:
    for name in ("grad_output", "grid", *LIKE):
        yield invalid(
            f"{name}.same_dtype",
            f"{C_NAMES[name]} has the data type of input.",
            (_CITE.code(PARAM_INVALID, 1), _CITE.check(4), _CITE.parameter(C_NAMES[name])),
            (name, "input"),
            same_dtype(name, "input"),
            _declared_wrong(name, dtype=True) if name in LIKE else _retyped(name),
            requires=("input.not_null", f"{name}.not_null"),
        )
    sources = (_CITE.code(PARAM_INVALID, 1), _CITE.check(5), _CITE.parameter("input"))
    yield invalid(
        "input.dtype",
        "input has a supported data type.",
        sources,
        ("input",),
        _dtype_check(tolerate_double=True),
        _all_of(DType.INT32),
        requires=("input.not_null",),
    )
    yield invalid(
        "input.not_double",
        "DOUBLE is not among the supported data types.",
        sources,
        ("input",),
        _dtype_check(tolerate_double=False),
        _all_of(DType.FLOAT64),
        requires=("input.not_null", "input.dtype"),
        vendor_code="accepts",
        pick="The document does not list DOUBLE; the vendor's source accepts it. Taken: refused.",
    )


def _dtype_check(*, tolerate_double: bool) -> Check:
    """Whether the type of input is supported; DOUBLE, which the vendor accepts, has its own rule."""

    def check(call: CallMeta) -> Finding | None:
        dtype, allowed = call.tensor("input").dtype, DTYPES[call.product]
        if dtype in allowed or (tolerate_double and dtype is DType.FLOAT64):
            return None
        return Finding(f"dtype {dtype}", f"{listed(allowed)} on {call.product.full_name}")

    return check


def _mode_rules() -> Iterator[Constraint]:
    interpolation = integer_in("interpolation_mode", INTERPOLATION_MODES)
    sources = (_CITE.code(PARAM_INVALID, 3), _CITE.check(6), _CITE.parameter("interpolationMode"))
    yield invalid(
        "interpolation_mode.choice",
        "interpolationMode is 0 (bilinear) or 1 (nearest).",
        sources,
        ("interpolation_mode",),
        lambda call: None if call.integer("interpolation_mode") == _BICUBIC else interpolation(call),
        lambda call: call.with_attrs(interpolation_mode=3),
    )
    yield invalid(
        "interpolation_mode.not_bicubic",
        "interpolationMode 2 (bicubic) is not among the supported values.",
        sources,
        ("interpolation_mode",),
        interpolation,
        lambda call: call.with_attrs(interpolation_mode=_BICUBIC),
        requires=("interpolation_mode.choice",),
        vendor_code="accepts",
        pick="The document lists 0 and 1, as the vendor's source did in its time; newer source accepts 2. "
        "Taken: refused.",
    )
    yield invalid(
        "padding_mode.choice",
        "paddingMode is 0 (zeros), 1 (border) or 2 (reflection).",
        (_CITE.code(PARAM_INVALID, 3), _CITE.check(7), _CITE.parameter("paddingMode")),
        ("padding_mode",),
        integer_in("padding_mode", PADDING_MODES),
        lambda call: call.with_attrs(padding_mode=3),
    )


def _shape_rules() -> Iterator[Constraint]:
    for name in ("input", "grid", "grad_output"):
        yield invalid(
            f"{name}.rank",
            f"{C_NAMES[name]} has rank 4.",
            (_CITE.code(PARAM_INVALID, 2), _CITE.check(8), _CITE.parameter(C_NAMES[name])),
            (name,),
            rank_within(name, RANK, RANK),
            _with_axis_appended(name),
            requires=(f"{name}.not_null",),
        )
    for name in ("grid", "grad_output"):
        yield _axis_rule(f"{name}.batch", (name, 0), ("input", 0), row=4, check=9)
    yield _axis_rule("grad_output.channels", ("grad_output", 1), ("input", 1), row=5, check=10)
    for axis, side in ((2, "height"), (3, "width")):
        yield _positive_rule(f"input.{side}", axis)
    yield _axis_rule("grid.out_height", ("grid", 1), ("grad_output", 2), row=6, check=11)
    yield _axis_rule("grid.out_width", ("grid", 2), ("grad_output", 3), row=7, check=11)
    yield invalid(
        "grid.coordinates",
        "The last axis of grid has size 2.",
        (_CITE.code(PARAM_INVALID, 9), _CITE.check(11), _CITE.parameter("grid")),
        ("grid",),
        axis_is("grid", 3, lambda call: 2, "x and y"),
        _resized("grid", 3, 3),
        requires=("grid.rank",),
    )
    for name, like in LIKE.items():
        yield _output_shape_rule(name, like)


def _axis_rule(
    constraint_id: str, axis_of: tuple[str, int], axis_like: tuple[str, int], *, row: int, check: int
) -> Constraint:
    """One axis of an input is as long as one of another input, which leads."""
    (name, axis), (leader, leader_axis) = axis_of, axis_like

    def size(call: CallMeta) -> int:
        return call.tensor(leader).shape[leader_axis]

    return invalid(
        constraint_id,
        f"Axis {axis} of {C_NAMES[name]} is as long as axis {leader_axis} of {C_NAMES[leader]}.",
        (_CITE.code(PARAM_INVALID, row), _CITE.check(check), _CITE.parameter(C_NAMES[name])),
        (name, leader),
        axis_is(name, axis, size, f"as on axis {leader_axis} of {leader}"),
        _resized(name, axis),
        requires=(f"{name}.rank", f"{leader}.rank"),
    )


def _positive_rule(constraint_id: str, axis: int) -> Constraint:
    def check(call: CallMeta) -> Finding | None:
        shape = call.tensor("input").shape
        return None if shape[axis] else Finding(f"0 on axis {axis} of shape {shape_text(shape)}", "above 0")

    return invalid(
        constraint_id,
        f"Axis {axis} of input is not 0.",
        (_CITE.code(PARAM_INVALID, 8), _CITE.check(10), _CITE.parameter("input")),
        ("input",),
        check,
        _resized("input", axis, 0),
        requires=("input.rank",),
    )


def _output_shape_rule(name: str, like: str) -> Constraint:
    return invalid(
        f"{name}.shape",
        f"{C_NAMES[name]} has the shape of {like}.",
        (_CITE.code(PARAM_INVALID, 10), _CITE.check(12), _CITE.parameter(C_NAMES[name])),
        (name, like),
        shape_is(name, lambda call: call.tensor(like).shape, f"the shape of {like}"),
        _declared_wrong(name, shape=True),
        requires=(f"{like}.not_null", f"{name}.not_null"),
    )


def _mask_rule() -> Constraint:
    def check(call: CallMeta) -> Finding | None:
        mask = call.mask()
        return None if mask is None or len(mask) == len(LIKE) else Finding(f"{len(mask)} bools", "two bools")

    return invalid(
        "output_mask.length",
        "outputMask has size 2.",
        (_CITE.check(13), _CITE.parameter("outputMask")),
        ("output_mask",),
        check,
        lambda call: call.with_attrs(output_mask=(True, True, True)),
        pick="The document describes two entries and gives no code for another number; the vendor's source "
        "returns 161002, older source read past the end. Taken: 161002.",
    )


def _on_checked_calls(violate: Violate) -> Violate:
    """Skips calls with a null mask, in which nothing is wrong; leaves outputs to follow from what changes."""
    return lambda call: None if accepts_unchecked(call) else violate(replace(call, outputs={}))


CONSTRAINTS = tuple(
    replace(constraint, violate=_on_checked_calls(constraint.violate))
    for constraint in (*_nulls(), *_dtype_rules(), *_mode_rules(), *_shape_rules(), _mask_rule())
)
"""In the order in which they are reported inside a class of codes."""

NOT_EXPRESSIBLE = (
    NotExpressible(_CITE.check(1), "workspaceSize and executor are made by the service itself, never null"),
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
