"""The record of aclnnLayerNormBackward.

Sources: the official page "aclnnLayerNormBackward" (release 9.1.0) and, where cited as such, the vendor's
public source (ops-nn).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from npugrad.binding import TorchBinding
from npugrad.dtypes import DType
from npugrad.meta import CallMeta, TensorMeta
from npugrad.operator import OpRecord, Sample
from npugrad.ops._layer_norm_backward_rules import (
    CONSTRAINTS,
    DOCUMENT,
    DTYPES,
    NOT_EXPRESSIBLE,
    OPTIONAL,
    SIGNATURE,
    normalized,
    output_metas,
)
from npugrad.ops._layer_norm_backward_workloads import WORKLOADS
from npugrad.ops._normalisation import extra_tolerance, make_inputs, masked_samples
from npugrad.products import Product
from npugrad.references.layer_norm_backward import reference

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np
    import numpy.typing as npt

    from npugrad.operator import Arrays


_tensor = SIGNATURE.tensor
_ROWS = "A1*...*Ai elements, rank 1 to 8, a dtype no narrower than that of input."
_SCALE = "(R1, ..., Rj), dtype of input or float32."
_PARAMS = (
    _tensor("grad_out", "(A1, ..., Ai, R1, ..., Rj), rank 1 to 8. Gradient of the normalised output."),
    _tensor("input", "(A1, ..., Ai, R1, ..., Rj), dtype of grad_out. The forward input."),
    SIGNATURE.attr(
        "normalized_shape",
        "int64_array",
        "(R1, ..., Rj), 1 to 8 entries: the trailing axes of input, over which it is normalised.",
    ),
    _tensor("mean", f"{_ROWS} Mean of each row."),
    _tensor("rstd", "Shape and dtype of mean. Reciprocal standard deviation of each row."),
    _tensor("weight", f"{_SCALE} Scale of each element of a row, ones when null."),
    _tensor("bias", f"{_SCALE} Shift of each element of a row; its values do not affect the results."),
    SIGNATURE.mask(),
    _tensor("grad_input", "Shape and dtype of input. Gradient of input."),
    _tensor("grad_weight", "(R1, ..., Rj), dtype of weight, of input without it. Gradient of weight."),
    _tensor("grad_bias", "(R1, ..., Rj), dtype of weight, of input without it. Gradient of bias."),
)


def build(
    *,
    dtype: DType | str = DType.FLOAT32,
    product: Product = Product.ATLAS_A2,
    leading: tuple[int, ...] = (2, 3),
    normalized: tuple[int, ...] = (4,),
    with_weight: bool = True,
    with_bias: bool = True,
    is_mixed: bool = False,
    output_mask: tuple[bool, ...] = (True, True, True),
) -> CallMeta:
    """A legal call on input with the axes `leading` and `normalized`; mixed: all but the data is float32."""
    data, other = TensorMeta(dtype, (*leading, *normalized)), DType.FLOAT32 if is_mixed else dtype
    statistics, scale = TensorMeta(other, (*leading, *(1,) * len(normalized))), TensorMeta(other, normalized)
    return CallMeta(
        inputs={
            **dict.fromkeys(("grad_out", "input"), data),
            **dict.fromkeys(("mean", "rstd"), statistics),
            "weight": scale if with_weight else None,
            "bias": scale if with_bias else None,
        },
        attrs={"normalized_shape": normalized, "output_mask": output_mask},
        product=product,
    )


def _samples(product: Product) -> Iterator[Sample]:
    for dtype in DTYPES[product]:
        yield Sample(f"{dtype}", build(dtype=dtype, product=product))
        yield Sample(f"{dtype}-no_weight", build(dtype=dtype, product=product, with_weight=False))
    narrow = DTYPES[product][-1]
    yield Sample("mixed", build(dtype=narrow, product=product, is_mixed=True, normalized=(2, 4)))
    mean = TensorMeta(narrow, (2, 3, 1))
    two = build(dtype=DType.FLOAT16, product=product, with_bias=False).with_inputs(mean=mean, rstd=mean)
    yield Sample("two_narrow_types", two)
    yield from masked_samples(build, product)
    yield Sample("one_of_one", build(product=product, leading=(), normalized=(1,)))
    yield Sample("rank8", build(product=product, leading=(1, 2, 1, 3), normalized=(2, 1, 2, 1)))
    yield Sample("empty_rows", build(product=product, leading=(0, 3)))
    yield Sample("rows_of_nothing", build(product=product, normalized=(2, 0)))
    flat = TensorMeta(DType.FLOAT32, (6,))
    yield Sample("flat_statistics", build(product=product).with_inputs(mean=flat, rstd=flat))
    strided = TensorMeta(DType.FLOAT32, (2, 3, 4), strides=(0, 1, 3))
    yield Sample("strided", build(product=product).with_inputs(grad_out=strided))


# A row is normalised like a group with a channel of one element for each element of the row.


def _make_inputs(call: CallMeta, rng: np.random.Generator) -> dict[str, npt.NDArray[Any] | None]:
    return make_inputs(call, rng, (call.tensor("mean").size, 1, math.prod(normalized(call)), 1))


def _extra_tolerance(inputs: Arrays, attrs: Mapping[str, Any], output: str) -> float:
    rstd = inputs["rstd"]
    if output != "grad_input" or rstd is None:
        return 0.0
    sizes = (rstd.size, 1, math.prod(attrs["normalized_shape"]), 1)
    return extra_tolerance(inputs["grad_out"], rstd, inputs["weight"], sizes)


def _is_bound(call: CallMeta) -> bool:
    """Whether torch_npu passes the call on unchanged.

    It gives the statistics the rank of input, creates null operands with other kernels, and returns gradients
    of weight and bias in float32 only.
    """
    scales = [call.inputs[name] for name in OPTIONAL]
    has_rank = call.tensor("mean").rank == call.tensor("input").rank
    return has_rank and all(meta is not None and meta.dtype is DType.FLOAT32 for meta in scales)


_READS = SIGNATURE.reads()

LAYER_NORM_BACKWARD = OpRecord(
    name="layer_norm_backward",
    aclnn_name=DOCUMENT,
    summary="Gradients of layer normalisation with respect to its input, weight and bias.",
    documents=(DOCUMENT,),
    repositories=("ops-nn",),
    params=_PARAMS,
    products=dict.fromkeys(Product, DOCUMENT),
    constraints=CONSTRAINTS,
    not_expressible=NOT_EXPRESSIBLE,
    output_metas=output_metas,
    reads=lambda call: _READS,
    reference=reference,
    build=build,
    samples=_samples,
    workloads=WORKLOADS,
    make_inputs=_make_inputs,
    extra_tolerance=_extra_tolerance,
    determinism_check=lambda call, release: None,  # by the pages of 8.5.0 to 9.2.0-beta.1
    min_cann="8.5",
    binding=TorchBinding(
        "aten.native_layer_norm_backward",
        ("grad_out", "input", "normalized_shape", "mean", "rstd", "weight", "bias", "output_mask"),
        takes=_is_bound,
    ),
)
"""The record; order of params is the order of aclnnLayerNormBackwardGetWorkspaceSize."""
