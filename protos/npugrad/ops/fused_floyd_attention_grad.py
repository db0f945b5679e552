"""The record of aclnnFusedFloydAttentionGrad.

Sources: the official page "aclnnFusedFloydAttentionGrad" (Atlas A2, Atlas A3) and, where cited as such, the
vendor's public source (ops-transformer). The constraints are in `_fused_floyd_attention_grad_rules` and
`_fused_floyd_attention_grad_tiling`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npugrad.binding import TorchBinding
from npugrad.dtypes import DType
from npugrad.generators import Draw
from npugrad.meta import CallMeta, TensorMeta
from npugrad.operator import AttrParam, OpRecord, Sample, TensorParam
from npugrad.ops._fused_floyd_attention_grad_data import make_inputs
from npugrad.ops._fused_floyd_attention_grad_layout import (
    C_NAMES,
    DOCUMENT,
    DTYPES,
    LAYOUT,
    LIKE,
    MASK_DTYPES,
    PRODUCTS,
    STATISTICS_DTYPES,
    STATISTICS_REPEATS,
    shape_of,
)
from npugrad.ops._fused_floyd_attention_grad_rules import CONSTRAINTS, NOT_EXPRESSIBLE
from npugrad.ops._fused_floyd_attention_grad_workloads import WORKLOADS
from npugrad.products import Product
from npugrad.references.fused_floyd_attention_grad import reference

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


_NORMAL = Draw("normal")


def _input(
    name: str,
    doc: str,
    *,
    dtypes: tuple[DType, ...] | None = None,
    optional: bool = False,
    draw: Draw = _NORMAL,
) -> TensorParam:
    return TensorParam(
        name=name,
        c_name=C_NAMES[name],
        role="input",
        doc=doc,
        dtypes=DTYPES if dtypes is None else dict.fromkeys(PRODUCTS, dtypes),
        optional=optional,
        draw=draw,
    )


def _output(name: str, doc: str) -> TensorParam:
    return TensorParam(name=name, c_name=C_NAMES[name], role="output", doc=doc, dtypes=DTYPES)


_PARAMS = (
    _input("query", "(B, H, N, M, D), float16 or bfloat16. Queries; M is a multiple of 128."),
    _input(
        "key1",
        "(B, H, N, K, D), dtype of query. First keys; N is a multiple of 16, K of 128, D is 32, 64 or 128.",
    ),
    _input("value1", "(B, H, N, K, D), dtype of query. First values."),
    _input("key2", "(B, H, K, M, D), dtype of query. Second keys."),
    _input("value2", "(B, H, K, M, D), dtype of query. Second values."),
    _input("dy", "(B, H, N, M, D), dtype of query. Gradient of the attention."),
    _input(
        "atten_mask",
        "(B, 1, N, 1, K), bool or uint8; None for no mask. 1 excludes a key for all heads and all of M. In a "
        "row without keys the gradient passes through the mask, by the vendor's formula; the functions for "
        "PyTorch and JAX give that of their own forward pass, the mean of the values.",
        dtypes=MASK_DTYPES,
        optional=True,
        draw=Draw("bernoulli", (0.25,)),
    ),
    _input(
        "softmax_max",
        "(B, H, N, M, 8), float32. Largest score of each row of the forward pass, repeated 8 times.",
        dtypes=STATISTICS_DTYPES,
        # With normal queries and keys and scale_value 1 / sqrt(D), scores have a standard deviation of 1.4:
        # no exponential of score - softmax_max comes near the largest float16.
        draw=Draw("uniform", (4.0, 7.0), STATISTICS_REPEATS),
    ),
    _input(
        "softmax_sum",
        "(B, H, N, M, 8), float32. Sum of exp(score - softmax_max) of each row, repeated 8 times.",
        dtypes=STATISTICS_DTYPES,
        draw=Draw("uniform", (1.0, 4.0), STATISTICS_REPEATS),
    ),
    _input(
        "attention_in",
        "(B, H, N, M, D), dtype of query. Attention, the result of the forward pass.",
        draw=Draw("normal", (0.0, 0.25)),
    ),
    AttrParam(
        name="scale_value",
        c_name=C_NAMES["scale_value"],
        type="double",
        doc="Factor of the scores, usually 1 / sqrt(D); no other scaling is applied.",
    ),
    _output("dq", "(B, H, N, M, D), dtype of query. Gradient of query."),
    _output("dk1", "(B, H, N, K, D), dtype of query. Gradient of key1."),
    _output("dv1", "(B, H, N, K, D), dtype of query. Gradient of value1."),
    _output("dk2", "(B, H, K, M, D), dtype of query. Gradient of key2."),
    _output("dv2", "(B, H, K, M, D), dtype of query. Gradient of value2."),
)

_SCORED = ("query", "key1", "key2", "dy", "atten_mask", "softmax_max", "softmax_sum")
_READS = {name: _SCORED if name in ("dv1", "dv2") else tuple(LAYOUT) for name in LIKE}


def build(
    *,
    dtype: DType | str = DType.FLOAT16,
    product: Product = Product.ATLAS_A2,
    b: int = 1,
    h: int = 1,
    n: int = 16,
    m: int = 128,
    k: int = 128,
    d: int = 32,
    with_mask: bool = False,
    mask_dtype: DType | str = DType.BOOL,
    scale_value: float | None = None,
) -> CallMeta:
    """A legal call in the sizes of the document; `scale_value` is 1 / sqrt(d) by default."""
    sizes = {"B": b, "H": h, "N": n, "M": m, "K": k, "D": d}
    own: dict[str, DType | str] = {
        "atten_mask": mask_dtype,
        "softmax_max": DType.FLOAT32,
        "softmax_sum": DType.FLOAT32,
    }
    inputs: dict[str, TensorMeta | None] = {
        name: TensorMeta(own.get(name, dtype), shape_of(name, sizes)) for name in LAYOUT
    }
    if not with_mask:
        inputs["atten_mask"] = None
    return CallMeta(
        inputs=inputs,
        attrs={"scale_value": float(max(d, 1) ** -0.5 if scale_value is None else scale_value)},
        product=product,
    )


def _output_metas(call: CallMeta) -> Mapping[str, TensorMeta]:
    return {
        name: (
            call.declared(name) or TensorMeta(call.tensor(like).dtype, call.tensor(like).shape)
        ).contiguous()
        for name, like in LIKE.items()
    }


def _samples(product: Product) -> Iterator[Sample]:
    """Few, because the smallest legal call already has 3 MiB of operands."""
    if product not in PRODUCTS:
        return
    yield Sample("float16", build(product=product))
    yield Sample("bfloat16-bool_mask", build(dtype=DType.BFLOAT16, product=product, with_mask=True))
    masked = build(product=product, h=2, with_mask=True, mask_dtype=DType.UINT8, scale_value=0.5)
    yield Sample("float16-uint8_mask-two_heads", masked)
    wide = build(dtype=DType.BFLOAT16, product=product, d=64)
    yield Sample(
        "bfloat16-d64-declared", wide.with_outputs(**{name: wide.tensor(LIKE[name]) for name in LIKE})
    )
    call = build(product=product)
    expanded = TensorMeta(DType.FLOAT16, call.tensor("dy").shape, strides=(0, 0, 0, 0, 0))
    yield Sample("strided", call.with_inputs(dy=expanded))


FUSED_FLOYD_ATTENTION_GRAD = OpRecord(
    name="fused_floyd_attention_grad",
    aclnn_name=DOCUMENT,
    summary="Gradients of Floyd attention, which attends over two sets of keys and values at once.",
    documents=(DOCUMENT,),
    repositories=("ops-transformer",),
    params=_PARAMS,
    products=dict.fromkeys(PRODUCTS, DOCUMENT),
    constraints=CONSTRAINTS,
    not_expressible=NOT_EXPRESSIBLE,
    output_metas=_output_metas,
    reads=lambda call: _READS,
    reference=reference,
    build=build,
    samples=_samples,
    workloads=WORKLOADS,
    make_inputs=make_inputs,
    extra_tolerance=lambda inputs, attrs, output: 0.0,
    determinism_check=lambda call, release: (
        "deterministic: found True; expected False, because the operator has no deterministic mode on an NPU"
    ),
    min_cann="9.0",
    binding=TorchBinding(
        "npu.npu_fused_floyd_attention_backward",
        ("dy", "query", "key1", "value1", "key2", "value2", "attention_in", "softmax_max", "softmax_sum"),
        ("atten_mask", "scale_value"),
    ),
)
"""The record; order of params is the order of aclnnFusedFloydAttentionGradGetWorkspaceSize."""
