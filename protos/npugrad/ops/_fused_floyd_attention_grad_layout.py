"""Names, types and axes of the operands of aclnnFusedFloydAttentionGrad, and edits of them.

Each size is defined by one operand: B, H, N, K and D by key1, M by query.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npugrad.dtypes import DType, Format
from npugrad.meta import TensorMeta
from npugrad.products import Product
from npugrad.rules import Citations

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from npugrad.meta import CallMeta
    from npugrad.rules import Violate

DOCUMENT = "aclnnFusedFloydAttentionGrad"
CITE = Citations(DOCUMENT, "ops-transformer")
PRODUCTS = (Product.ATLAS_A2, Product.ATLAS_A3)
DTYPES: Mapping[Product, tuple[DType, ...]] = dict.fromkeys(PRODUCTS, (DType.FLOAT16, DType.BFLOAT16))
STATISTICS_DTYPES = (DType.FLOAT32,)
MASK_DTYPES = (DType.BOOL, DType.UINT8)
STATISTICS_REPEATS = 8
"""How often the statistics of a row are repeated on the last axis of softmax_max and softmax_sum."""

SIZES = {"B": "batch", "H": "heads", "N": "n", "M": "m", "K": "k", "D": "head_dim"}
"""Letters of the document for the sizes, and their names in the identifiers of constraints."""
LAYOUT: Mapping[str, str] = {
    "query": "BHNMD",
    "key1": "BHNKD",
    "value1": "BHNKD",
    "key2": "BHKMD",
    "value2": "BHKMD",
    "dy": "BHNMD",
    "atten_mask": "B1N1K",
    "softmax_max": f"BHNM{STATISTICS_REPEATS}",
    "softmax_sum": f"BHNM{STATISTICS_REPEATS}",
    "attention_in": "BHNMD",
}
"""Axes of every input, in the letters of the document."""
LIKE = {"dq": "query", "dk1": "key1", "dv1": "value1", "dk2": "key2", "dv2": "value2"}
"""The input of which each output is the gradient."""
C_NAMES = {
    **{name: name for name in ("query", "key1", "value1", "key2", "value2", "dy")},
    "atten_mask": "attenMaskOptional",
    "softmax_max": "softmaxMax",
    "softmax_sum": "softmaxSum",
    "attention_in": "attentionIn",
    "scale_value": "scaleValue",
    **{name: f"{name}Out" for name in LIKE},
}


def shape_of(name: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of an input for given B, H, N, M, K and D."""
    return tuple(int(axis) if axis.isdigit() else sizes[axis] for axis in LAYOUT[name])


def leader_of(axis: str) -> str:
    """The operand that defines B, H, N, M, K or D."""
    return "query" if axis == "M" else "key1"


def size_of(call: CallMeta, axis: str) -> int:
    """B, H, N, M, K or D of a call whose leader of that axis has rank 5."""
    leader = leader_of(axis)
    return call.tensor(leader).shape[LAYOUT[leader].index(axis)]


def expected_shape(call: CallMeta, name: str) -> tuple[int, ...]:
    """The shape an input should have, from the leaders of its axes, which must have rank 5."""
    return shape_of(name, {axis: size_of(call, axis) for axis in LAYOUT[name] if axis.isalpha()})


def leaders_of(name: str) -> tuple[str, ...]:
    """The operands that define the shape of an input."""
    return tuple(sorted({leader_of(axis) for axis in LAYOUT[name] if axis.isalpha()}))


# Functions that make a legal call illegal.


def edited(name: str, edit: Callable[[TensorMeta], TensorMeta]) -> Violate:
    """Edits an input, if the call has it, or declares an output as an edited copy of its input."""

    def violate(call: CallMeta) -> CallMeta | None:
        if name in LIKE:
            return call.with_outputs(**{name: edit(call.tensor(LIKE[name]))})
        meta = call.inputs[name]
        return None if meta is None else call.with_inputs(**{name: edit(meta)})

    return violate


def as_other_float(meta: TensorMeta) -> TensorMeta:
    """The other of float16 and bfloat16."""
    return TensorMeta(DType.BFLOAT16 if meta.dtype is DType.FLOAT16 else DType.FLOAT16, meta.shape)


def as_int32(meta: TensorMeta) -> TensorMeta:
    """A type that no operand takes."""
    return TensorMeta(DType.INT32, meta.shape)


def as_fractal(meta: TensorMeta) -> TensorMeta:
    """A format that no operand takes."""
    return TensorMeta(meta.dtype, meta.shape, Format.FRACTAL_NZ)


def with_axis_appended(meta: TensorMeta) -> TensorMeta:
    """One axis too many."""
    return TensorMeta(meta.dtype, (*meta.shape, 1))


def with_last_axis_longer(meta: TensorMeta) -> TensorMeta:
    """The right rank, another shape."""
    return TensorMeta(meta.dtype, (*meta.shape[:-1], meta.shape[-1] + 1))


def resized(names: tuple[str, ...], axis: str, size: int | None = None) -> Violate:
    """Gives some inputs another size on one axis, one more than the legal size if none is given."""

    def violate(call: CallMeta) -> CallMeta:
        sizes = {letter: size_of(call, letter) for letter in SIZES}
        sizes[axis] = sizes[axis] + 1 if size is None else size
        metas = ((name, call.inputs[name]) for name in names)
        return call.with_inputs(
            **{
                name: TensorMeta(meta.dtype, shape_of(name, sizes))
                for name, meta in metas
                if meta is not None
            }
        )

    return violate
