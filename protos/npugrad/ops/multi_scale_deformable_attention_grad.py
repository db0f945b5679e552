"""The record of aclnnMultiScaleDeformableAttentionGrad.

Sources: the two editions of the official page "aclnnMultiScaleDeformableAttentionGrad" (Atlas A2; Atlas A2
and A3) and, where cited as such, the vendor's public source (ops-nn). The constraints are in
`_multi_scale_deformable_attention_grad_rules`, the code for values in `..._data`. Sizes: bs, nk = num_keys,
nq = num_queries, nh = num_heads, ch = channels, nl = num_levels, np = num_points.
"""

from __future__ import annotations

import math
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from npugrad.coordinates import ATTENTION_RULES
from npugrad.dtypes import DType, Format
from npugrad.generators import Draw
from npugrad.meta import CallMeta, TensorMeta
from npugrad.operator import OpRecord, Sample, TensorParam
from npugrad.ops._multi_scale_deformable_attention_grad_data import OPERATOR, check_levels, make_inputs
from npugrad.ops._multi_scale_deformable_attention_grad_points import Sampled
from npugrad.ops._multi_scale_deformable_attention_grad_rules import (
    C_NAMES,
    CONSTRAINTS,
    EDITION_A2,
    EDITION_A3,
    FLOATS,
    INDICES,
    LIKE,
    MAX_CHANNELS,
    MAX_HEADS,
    MAX_LEVELS,
    MAX_POINTS,
    NAME,
    NOT_EXPRESSIBLE,
    PRODUCTS,
)
from npugrad.ops._multi_scale_deformable_attention_grad_workloads import WORKLOADS
from npugrad.products import Product
from npugrad.references.multi_scale_deformable_attention_grad import reference
from npugrad.releases import CannRelease

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from npugrad.operator import Arrays

_DETERMINISTIC_UNTIL, _DETERMINISTIC_AGAIN = 9, CannRelease.parse("9.2.0-beta.2")
"""The pages of the releases in between, from any 9.0 on, say that the operator has no deterministic mode."""


def _flat_heads(meta: TensorMeta) -> tuple[int, ...]:
    """(bs, nq, nh*ch), all that the device takes; a rank 4 tensor has the same elements in the same order."""
    return (*meta.shape[:2], math.prod(meta.shape[2:]))


_NORMAL = Draw("normal")


def _input(
    name: str,
    doc: str,
    dtypes: tuple[DType, ...] = FLOATS,
    device_view: Callable[[TensorMeta], tuple[int, ...]] | None = None,
    draw: Draw | None = _NORMAL,
) -> TensorParam:
    return TensorParam(
        name=name,
        c_name=C_NAMES[name],
        role="input",
        doc=doc,
        dtypes=dict.fromkeys(PRODUCTS, dtypes),
        device_view=device_view,
        draw=draw,
    )


def _output(name: str, doc: str) -> TensorParam:
    return TensorParam(
        name=name,
        c_name=C_NAMES[name],
        role="output",
        doc=doc,
        dtypes=dict.fromkeys(PRODUCTS, FLOATS),
        zero_init=True,  # kernels add into them, and the vendor's own callers zero them first
    )


_PARAMS = (
    _input(
        "value",
        "(bs, nk, nh, ch), ch a multiple of 8 up to 256, nh up to 16. The feature maps of all levels.",
    ),
    _input("spatial_shape", "(nl, 2), nl up to 16. Height and width of each level.", INDICES, draw=None),
    _input("level_start_index", "(nl). First key of each level.", INDICES, draw=None),
    _input(
        "location",
        "(bs, nq, nh, nl, np, 2), nq below 500000, np up to 16, dtype of value. Sampling points (x, y), "
        "0 to 1 across a level.",
        draw=Draw("uniform", (-0.15, 1.15)),  # most inside
    ),
    _input(
        "attn_weight",
        "(bs, nq, nh, nl, np), dtype of value. Attention weight of each sampling point. The weight of a "
        "point outside its level, or at NaN, is ignored, even if NaN or infinite.",
        draw=Draw("uniform", (0.0, 0.125)),  # the sum is about 1 over four levels of four points
    ),
    _input(
        "grad_output",
        "(bs, nq, nh, ch) or (bs, nq, nh*ch), dtype of value. Gradient of the forward output.",
        device_view=_flat_heads,
    ),
    _output("grad_value", "(bs, nk, nh, ch), dtype of value. Gradient of value."),
    _output("grad_location", "(bs, nq, nh, nl, np, 2), dtype of value. Gradient of location."),
    _output("grad_attn_weight", "(bs, nq, nh, nl, np), dtype of value. Gradient of attn_weight."),
)

_PLACES = ("spatial_shape", "level_start_index", "location")
_READS = {
    "grad_value": (*_PLACES, "attn_weight", "grad_output"),
    "grad_location": ("value", *_PLACES, "attn_weight", "grad_output"),
    "grad_attn_weight": ("value", *_PLACES, "grad_output"),
}


def build(
    *,
    dtype: DType | str = DType.FLOAT32,
    product: Product = Product.ATLAS_A2,
    bs: int = 2,
    nq: int = 3,
    nh: int = 2,
    ch: int = 8,
    levels: tuple[tuple[int, int], ...] = ((3, 4), (2, 2)),
    points: int = 2,
    index_dtype: DType | str = DType.INT32,
    grad_output_rank: int = 4,
) -> CallMeta:
    """A legal call: bs batches, nq queries, nh heads of ch channels, `points` sampling points in each level.

    `levels` has (height, width) of each level; value has one key for each of their pixels. `grad_output_rank`
    is 4 for (bs, nq, nh, ch) and 3 for (bs, nq, nh*ch).
    """
    nl, nk = len(levels), sum(height * width for height, width in levels)
    gradient = (bs, nq, nh, ch) if grad_output_rank == 4 else (bs, nq, nh * ch)
    return CallMeta(
        inputs={
            "value": TensorMeta(dtype, (bs, nk, nh, ch)),
            "spatial_shape": TensorMeta(index_dtype, (nl, 2)),
            "level_start_index": TensorMeta(index_dtype, (nl,)),
            "location": TensorMeta(dtype, (bs, nq, nh, nl, points, 2)),
            "attn_weight": TensorMeta(dtype, (bs, nq, nh, nl, points)),
            "grad_output": TensorMeta(dtype, gradient),
        },
        attrs={},
        product=product,
    )


def _output_metas(call: CallMeta) -> Mapping[str, TensorMeta]:
    return {
        name: (call.declared(name) or _inferred(call.tensor(like))).contiguous()
        for name, like in LIKE.items()
    }


def _inferred(like: TensorMeta) -> TensorMeta:
    return TensorMeta(like.dtype, like.shape)


def _samples(product: Product) -> Iterator[Sample]:
    if product not in PRODUCTS:
        return
    for dtype in FLOATS:
        for rank in (4, 3):
            yield Sample(f"{dtype}-rank{rank}", build(dtype=dtype, product=product, grad_output_rank=rank))
    call = build(product=product)
    yield Sample("int64", build(product=product, index_dtype=DType.INT64))
    yield Sample("mixed_indices", call.with_inputs(level_start_index=TensorMeta(DType.INT64, (2,))))
    for rank in (3, 4):  # the sizes of the documents' example programs
        example = build(product=product, bs=1, nq=32, nh=1, levels=((1, 1),), points=1, grad_output_rank=rank)
        yield Sample(f"example-rank{rank}", example)
    yield Sample(
        "limits",
        build(
            product=product,
            bs=1,
            nq=2,
            nh=MAX_HEADS,
            ch=MAX_CHANNELS,
            levels=((2, 1),) * MAX_LEVELS,
            points=MAX_POINTS,
        ),
    )
    yield from _empty_samples(product)
    yield Sample("declared", call.with_outputs(**_output_metas(call)))
    expanded = TensorMeta(DType.FLOAT32, call.tensor("grad_output").shape, strides=(0, 0, 0, 0))
    heads_first = TensorMeta(DType.FLOAT32, call.tensor("value").shape, Format.NCHW, strides=(256, 8, 128, 1))
    yield Sample("strided", call.with_inputs(grad_output=expanded, value=heads_first))


def _empty_samples(product: Product) -> Iterator[Sample]:
    yield Sample("empty_bs", build(product=product, bs=0))
    yield Sample("empty_nk", build(product=product, levels=((0, 3), (2, 0))))
    yield Sample("empty_nq", build(product=product, nq=0))
    yield Sample("empty_nh", build(product=product, nh=0))
    yield Sample("empty_ch", build(product=product, ch=0))
    yield Sample("empty_nl", build(product=product, levels=()))
    yield Sample("empty_np", build(product=product, points=0))


def _determinism_check(call: CallMeta, release: CannRelease | None) -> str | None:
    if release is not None and (release.major < _DETERMINISTIC_UNTIL or release >= _DETERMINISTIC_AGAIN):
        return None
    return (
        f"deterministic: found True; expected False with CANN {release or 'of unknown release'}, because the "
        f"operator's pages offer it before {_DETERMINISTIC_UNTIL}.0 and from {_DETERMINISTIC_AGAIN}"
    )


@wraps(reference)
def _reference(inputs: Arrays, attrs: Mapping[str, Any], outputs: Mapping[str, Any], **how: Any) -> None:
    """The reference, which takes any levels, after the check that comes before the operator everywhere."""
    check_levels(inputs)
    reference(inputs, attrs, outputs, **how)


MULTI_SCALE_DEFORMABLE_ATTENTION_GRAD = OpRecord(
    name=OPERATOR,
    aclnn_name=NAME,
    summary="Gradients of multi-scale deformable attention with respect to values, locations and weights.",
    documents=(EDITION_A2, EDITION_A3),
    repositories=("ops-nn",),
    params=_PARAMS,
    products=PRODUCTS,
    constraints=CONSTRAINTS,
    not_expressible=NOT_EXPRESSIBLE,
    output_metas=_output_metas,
    reads=lambda call: _READS,
    reference=_reference,
    references_by_rule={rule: partial(_reference, rule=rule) for rule in ATTENTION_RULES},
    build=build,
    samples=_samples,
    workloads=WORKLOADS,
    make_inputs=make_inputs,
    extra_tolerance=lambda inputs, attrs, output: 0.0,
    determinism_check=_determinism_check,
    min_cann="8.0",
    data_check=check_levels,
    sampled=Sampled,
    checked_operands=("spatial_shape", "level_start_index"),
)
"""The record; order of params is the order of aclnnMultiScaleDeformableAttentionGradGetWorkspaceSize."""
