"""The constraints of aclnnMultiScaleDeformableAttentionGrad: what its pages and the vendor's source refuse.

Each can turn a legal call into one that violates only it. If several operands determine one size, one of them
is the reference: bs, num_heads and channels come from value, num_levels from spatialShape, num_queries and
num_points from location; every other operand is compared with these.

Entries of the constraint sections: 1 channels, 2 num_queries, 3 num_levels, 4 num_heads, 5 num_points; the
A2/A3 edition has determinism before them and so counts one more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from npugrad.dtypes import DType, Format
from npugrad.error_table import INNER_NULLPTR, PARAM_INVALID, PARAM_NULLPTR
from npugrad.meta import TensorMeta
from npugrad.operator import Finding, NotExpressible
from npugrad.products import Product
from npugrad.rules import (
    Citations,
    axis_is,
    axis_multiple_of,
    axis_within,
    dtype_is,
    dtype_supported,
    input_not_null,
    invalid,
    output_not_null,
    product_supported,
    rank_within,
    same_dtype,
    shape_is,
    shape_text,
    with_inferred_outputs,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from npugrad.errors import Source
    from npugrad.meta import CallMeta
    from npugrad.operator import Constraint, VendorCode
    from npugrad.rules import Check, Violate

NAME = "aclnnMultiScaleDeformableAttentionGrad"
EDITION_A2 = f"{NAME} (A2 edition)"
EDITION_A3 = f"{NAME} (A2/A3 edition)"
PRODUCTS: Mapping[Product, str] = {Product.ATLAS_A2: EDITION_A2, Product.ATLAS_A3: EDITION_A3}
FLOATS = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
INDICES = (DType.INT32, DType.INT64)
CHANNELS_MULTIPLE_OF = 8
MAX_CHANNELS = 256
MAX_QUERIES = 499_999
MAX_LEVELS = MAX_HEADS = MAX_POINTS = 16

C_NAMES = {
    "value": "value",
    "spatial_shape": "spatialShape",
    "level_start_index": "levelStartIndex",
    "location": "location",
    "attn_weight": "attnWeight",
    "grad_output": "gradOutput",
    "grad_value": "gradValue",
    "grad_location": "gradLocation",
    "grad_attn_weight": "gradAttnWeight",
}
LIKE = {"grad_value": "value", "grad_location": "location", "grad_attn_weight": "attn_weight"}
"""The input of which each output is the gradient."""
AXES: Mapping[str, tuple[str, ...]] = {
    "value": ("bs", "num_keys", "num_heads", "channels"),
    "spatial_shape": ("num_levels", "2"),
    "level_start_index": ("num_levels",),
    "location": ("bs", "num_queries", "num_heads", "num_levels", "num_points", "2"),
    "attn_weight": ("bs", "num_queries", "num_heads", "num_levels", "num_points"),
    "grad_output": ("bs", "num_queries", "num_heads", "channels"),
}
"""The axes of every input, in the documents' words."""

_INDEX_INPUTS = ("spatial_shape", "level_start_index")
# Which axis of which input defines a size.
_REFERENCE = {
    "bs": ("value", 0),
    "num_keys": ("value", 1),
    "num_heads": ("value", 2),
    "channels": ("value", 3),
    "num_levels": ("spatial_shape", 0),
    "2": ("spatial_shape", 1),
    "num_queries": ("location", 1),
    "num_points": ("location", 4),
}
_GRAD_OUTPUT_RANKS = (3, 4)
_A2, _A3 = Citations(EDITION_A2, "ops-nn"), Citations(EDITION_A3, "ops-nn")
_VENDOR = Citations(NAME, "ops-nn")


def _codes(code: int, row: int = 1) -> tuple[Source, Source]:
    return _A2.code(code, row), _A3.code(code, row)


def _parameter(name: str) -> tuple[Source, Source]:
    return _A2.parameter(C_NAMES[name]), _A3.parameter(C_NAMES[name])


def _limit(entry: int) -> tuple[Source, ...]:
    return (_A2.entry(entry), _A3.entry(entry + 1), *_codes(PARAM_INVALID, 3), _VENDOR.check(5))


# Functions that make a legal call illegal; outputs are not declared, see `with_inferred_outputs`.


def _retyped(meta: TensorMeta, dtype: DType) -> TensorMeta:
    return TensorMeta(dtype, meta.shape, meta.format)


def _other_float(call: CallMeta) -> DType:
    return DType.FLOAT16 if call.tensor("value").dtype is DType.FLOAT32 else DType.FLOAT32


def _all_double(call: CallMeta) -> CallMeta:
    floats = [name for name in call.inputs if name not in _INDEX_INPUTS]
    return call.with_inputs(**{name: _retyped(call.tensor(name), DType.FLOAT64) for name in floats})


def _with_dtype(name: str, dtype: DType) -> Violate:
    return lambda call: call.with_inputs(**{name: _retyped(call.tensor(name), dtype)})


def _with_other_float(name: str) -> Violate:
    def violate(call: CallMeta) -> CallMeta:
        meta = _retyped(call.tensor(LIKE.get(name, name)), _other_float(call))
        return call.with_outputs(**{name: meta}) if name in LIKE else call.with_inputs(**{name: meta})

    return violate


def _in_fractal_nz(name: str) -> Violate:
    def violate(call: CallMeta) -> CallMeta:
        meta = call.tensor(name)
        return call.with_inputs(**{name: TensorMeta(meta.dtype, meta.shape, Format.FRACTAL_NZ)})

    return violate


def _with_rank(name: str, rank: int) -> Violate:
    def violate(call: CallMeta) -> CallMeta:
        meta = call.tensor(name)
        return call.with_inputs(**{name: TensorMeta(meta.dtype, meta.shape + (1,) * (rank - meta.rank))})

    return violate


def _one_longer(name: str, axis: int) -> Violate:
    def violate(call: CallMeta) -> CallMeta:
        meta = call.tensor(name)
        shape = list(meta.shape)
        shape[axis] += 1
        return call.with_inputs(**{name: TensorMeta(meta.dtype, shape)})

    return violate


def _with_size(size: str, number: int) -> Violate:
    """Changes one size in every input that has it."""

    def shape(name: str, rank: int, sizes: Mapping[str, int]) -> tuple[int, ...]:
        full = tuple(sizes[axis] for axis in AXES[name])
        return full if rank == len(full) else (*full[:2], full[2] * full[3])

    def violate(call: CallMeta) -> CallMeta:
        sizes = {key: call.tensor(leader).shape[axis] for key, (leader, axis) in _REFERENCE.items()}
        sizes[size] = number
        metas = {name: call.tensor(name) for name in AXES}
        return call.with_inputs(
            **{name: TensorMeta(meta.dtype, shape(name, meta.rank, sizes)) for name, meta in metas.items()}
        )

    return violate


def _declared_longer(name: str) -> Violate:
    def violate(call: CallMeta) -> CallMeta:
        meta = call.tensor(LIKE[name])
        return call.with_outputs(**{name: TensorMeta(meta.dtype, (*meta.shape, 2))})

    return violate


def _product_rule() -> Constraint:
    return product_supported(
        PRODUCTS,
        INNER_NULLPTR,
        "The operator exists on the Atlas A2 and Atlas A3 series.",
        (_A2.products(), _A3.products()),
        vendor_code=_when_the_kernel_is_missing,
        pick="The documents list products and give no code; the vendor's source does not look at the product "
        "and the missing kernel surfaces as 561103 (from source, inferred), but an empty input succeeds "
        "before a kernel is looked for. npugrad: 561103, before any other check.",
    )


def _when_the_kernel_is_missing(call: CallMeta) -> VendorCode:
    is_empty = any(meta is not None and not meta.size for meta in call.inputs.values())
    return "accepts" if is_empty else INNER_NULLPTR


def _nulls() -> Iterator[Constraint]:
    for name, c_name in C_NAMES.items():
        make = output_not_null if name in LIKE else input_not_null
        sources = (*_codes(PARAM_NULLPTR), _VENDOR.check(1), *_parameter(name))
        yield make(name, f"{c_name} must not be a null pointer.", sources)


def _dtype_rules() -> Iterator[Constraint]:
    for name, c_name in C_NAMES.items():
        sources = (*_codes(PARAM_INVALID, 1), _VENDOR.check(2), *_parameter(name))
        if name == "value":
            yield invalid(
                "value.dtype",
                "value has data type FLOAT, FLOAT16 or BFLOAT16.",
                sources,
                (name,),
                dtype_supported(name, dict.fromkeys(PRODUCTS, FLOATS)),
                _all_double,
                requires=(f"{name}.not_null",),
            )
        elif name in _INDEX_INPUTS:
            yield invalid(
                f"{name}.dtype",
                f"{c_name} has data type INT32 or INT64.",
                sources,
                (name,),
                dtype_is(name, INDICES),
                _with_dtype(name, DType.INT16),
                requires=(f"{name}.not_null",),
            )
        else:
            yield _same_dtype_rule(name, (*sources, *_codes(PARAM_INVALID, 2)))


def _same_dtype_rule(name: str, sources: tuple[Source, ...]) -> Constraint:
    return invalid(
        f"{name}.same_dtype",
        f"{C_NAMES[name]} has the data type of value.",
        sources,
        (name, "value"),
        same_dtype(name, "value"),
        _with_other_float(name),
        requires=("value.not_null", f"{name}.not_null"),
        vendor_code="accepts",
        pick="The documents refuse float operands of different data types; the vendor's source accepts them, "
        "as it looks at each on its own and casts it. npugrad: refused.",
    )


def _format_rules() -> Iterator[Constraint]:
    for name in AXES:
        yield invalid(
            f"{name}.format",
            f"{C_NAMES[name]} is not stored as FRACTAL_NZ.",
            (_VENDOR.check(3), *_parameter(name)),
            (name,),
            _not_fractal_nz(name),
            _in_fractal_nz(name),
            requires=(f"{name}.not_null",),
            pick="The documents name ND without a code for another format; the vendor's source refuses "
            "FRACTAL_NZ only. npugrad: FRACTAL_NZ alone is refused.",
        )


def _not_fractal_nz(name: str) -> Check:
    def check(call: CallMeta) -> Finding | None:
        if call.tensor(name).format is not Format.FRACTAL_NZ:
            return None
        return Finding(f"format {Format.FRACTAL_NZ}", f"another format, such as {Format.ND}")

    return check


def _rank_rules() -> Iterator[Constraint]:
    for name, axes in AXES.items():
        low, high = _GRAD_OUTPUT_RANKS if name == "grad_output" else (len(axes), len(axes))
        flat = " or (bs, num_queries, num_heads*channels)" if name == "grad_output" else ""
        yield invalid(
            f"{name}.rank",
            f"{C_NAMES[name]} has the axes ({', '.join(axes)}){flat}.",
            (*_codes(PARAM_INVALID, 3), _VENDOR.check(4), *_parameter(name)),
            (name,),
            rank_within(name, low, high),
            _with_rank(name, high + 1),
            requires=(f"{name}.not_null",),
            pick="The documents state rank 4, though an example of theirs passes rank 3; the vendor's "
            "source requires rank 3 and refuses rank 4 with 161002. "
            "npugrad: both ranks, because their memory "
            "layout is the same."
            if flat
            else "",
        )
        if axes[-1] == "2":
            yield invalid(
                f"{name}.pairs",
                f"The last axis of {C_NAMES[name]} has size 2.",
                (*_codes(PARAM_INVALID, 3), _VENDOR.check(4), *_parameter(name)),
                (name,),
                axis_is(name, high - 1, lambda call: 2, "the documented size"),
                _one_longer(name, high - 1),
                requires=(f"{name}.rank",),
            )


def _limit_rules() -> Iterator[Constraint]:
    yield invalid(
        "channels.multiple",
        f"channels is a multiple of {CHANNELS_MULTIPLE_OF}.",
        (*_limit(1), *_parameter("value")),
        ("value",),
        axis_multiple_of("value", 3, CHANNELS_MULTIPLE_OF),
        _with_size("channels", CHANNELS_MULTIPLE_OF + 4),
        requires=("value.rank",),
    )
    limits = {
        "channels": MAX_CHANNELS,
        "num_queries": MAX_QUERIES,
        "num_levels": MAX_LEVELS,
        "num_heads": MAX_HEADS,
        "num_points": MAX_POINTS,
    }
    for entry, (size, limit) in enumerate(limits.items(), start=1):
        name, axis = _REFERENCE[size]
        above = limit + (CHANNELS_MULTIPLE_OF if size == "channels" else 1)
        yield invalid(
            f"{size}.limit",
            # In the documents' words: queries are the only size with an exclusive limit.
            f"{size} is below {limit + 1}." if size == "num_queries" else f"{size} is at most {limit}.",
            (*_limit(entry), *_parameter(name)),
            (name,),
            axis_within(name, axis, 0, limit),
            _with_size(size, above),
            requires=(f"{name}.rank",),
        )


def _shared_size_rules() -> Iterator[Constraint]:
    for name, axes in AXES.items():
        for axis, size in enumerate(axes):
            leader, leader_axis = _REFERENCE[size]
            if leader == name or size == "2" or (name == "grad_output" and axis >= 2):
                continue
            yield invalid(
                f"{name}.{size}",
                f"{C_NAMES[name]} has the {size} of {C_NAMES[leader]}.",
                (*_codes(PARAM_INVALID, 3), _VENDOR.check(6), *_parameter(name)),
                (name, leader),
                _same_size(name, axis, leader, leader_axis),
                _one_longer(name, axis),
                requires=(f"{name}.rank", f"{leader}.rank"),
            )
    yield invalid(
        "grad_output.channels",
        "gradOutput ends with the num_heads and channels of value, apart or in one axis.",
        (*_codes(PARAM_INVALID, 3), _VENDOR.check(6), *_parameter("grad_output")),
        ("grad_output", "value"),
        _channels_of_grad_output,
        _one_longer("grad_output", -1),
        requires=("grad_output.rank", "value.rank"),
    )


def _same_size(name: str, axis: int, leader: str, leader_axis: int) -> Check:
    def size(call: CallMeta) -> int:
        return call.tensor(leader).shape[leader_axis]

    return axis_is(name, axis, size, f"as on axis {leader_axis} of {leader}")


def _channels_of_grad_output(call: CallMeta) -> Finding | None:
    found, (heads, channels) = call.tensor("grad_output").shape, call.tensor("value").shape[2:]
    expected = (heads * channels,) if len(found) == min(_GRAD_OUTPUT_RANKS) else (heads, channels)
    if found[2:] == expected:
        return None
    return Finding(
        f"{shape_text(found[2:])} from axis 2 of shape {shape_text(found)}",
        f"{shape_text(expected)}, num_heads and channels of value",
    )


def _output_shape_rules() -> Iterator[Constraint]:
    for name, leader in LIKE.items():
        yield invalid(
            f"{name}.shape",
            f"{C_NAMES[name]} has the shape of {C_NAMES[leader]}.",
            (_VENDOR.check(7), *_parameter(name)),
            (name, leader),
            _same_shape(name, leader),
            _declared_longer(name),
            requires=(f"{name}.not_null", f"{leader}.not_null"),
        )


def _same_shape(name: str, leader: str) -> Check:
    return shape_is(name, lambda call: call.tensor(leader).shape, f"the shape of {leader}")


CONSTRAINTS = tuple(
    replace(constraint, violate=with_inferred_outputs(constraint.violate))
    for constraint in (
        _product_rule(),
        *_nulls(),
        *_dtype_rules(),
        *_format_rules(),
        *_rank_rules(),
        *_limit_rules(),
        *_shared_size_rules(),
        *_output_shape_rules(),
    )
)
"""In the order in which they are reported within a class of codes."""

NOT_EXPRESSIBLE = (
    *_A2.made_by_service(),
    *_A3.made_by_service(),
    NotExpressible(_A3.entry(1), "determinism is an option of the call, not a precondition"),
    NotExpressible(_VENDOR.check(8), "empty inputs are no error; the outputs are zeros"),
)
"""Rows of the pages and of the check table that no call can break."""
