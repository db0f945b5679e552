"""Names, types and shapes of group_norm_backward that the record and its rules share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npugrad.dtypes import DType
from npugrad.meta import CallMeta, TensorMeta
from npugrad.ops._normalisation import NormalisationParams
from npugrad.products import Product

if TYPE_CHECKING:
    from collections.abc import Mapping

DOCUMENT = "aclnnGroupNormBackward"
C_NAMES = {
    "grad_out": "gradOut",
    "input": "input",
    "mean": "mean",
    "rstd": "rstd",
    "gamma": "gamma",
    "n": "N",
    "c": "C",
    "hxw": "HxW",
    "group": "group",
    "output_mask": "outputMask",
    "grad_input": "gradInput",
    "grad_gamma": "gradGammaOut",
    "grad_beta": "gradBetaOut",
}
"""Names in the C signature, in its order."""
OUTPUTS = ("grad_input", "grad_gamma", "grad_beta")
"""Outputs in the order of the mask."""
DTYPES: Mapping[Product, tuple[DType, ...]] = {
    Product.ATLAS_TRAINING: (DType.FLOAT32, DType.FLOAT16),
    Product.ATLAS_A2: (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16),
    Product.ATLAS_A3: (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16),
}
SIGNATURE = NormalisationParams(C_NAMES, DTYPES, ("gamma",), OUTPUTS)


def build(
    *,
    dtype: DType | str = DType.FLOAT32,
    product: Product = Product.ATLAS_A2,
    n: int = 2,
    c: int = 6,
    hxw: int = 4,
    group: int = 3,
    shape: tuple[int, ...] | None = None,
    with_gamma: bool = True,
    output_mask: tuple[bool, ...] = (True, True, True),
) -> CallMeta:
    """A legal call: n samples, c channels in `group` groups of hxw elements; `shape`: (n, c, hxw)."""
    data = TensorMeta(dtype, (n, c, hxw) if shape is None else shape)
    statistics = TensorMeta(dtype, (n, group))
    return CallMeta(
        inputs={
            "grad_out": data,
            "input": data,
            "mean": statistics,
            "rstd": statistics,
            "gamma": TensorMeta(dtype, (c,)) if with_gamma else None,
        },
        attrs={"n": n, "c": c, "hxw": hxw, "group": group, "output_mask": output_mask},
        product=product,
    )


def output_metas(call: CallMeta) -> Mapping[str, TensorMeta]:
    """Metas of all outputs."""
    dtype = call.tensor("grad_out").dtype
    shapes = {
        "grad_input": call.tensor("input").shape,
        "grad_gamma": gamma_shape(call),
        "grad_beta": gamma_shape(call),
    }
    return {
        name: (call.declared(name) or TensorMeta(dtype, shape)).contiguous() for name, shape in shapes.items()
    }


def gamma_shape(call: CallMeta) -> tuple[int, ...]:
    """Shape of gamma, (c) without gamma."""
    gamma = call.inputs["gamma"]
    return (call.integer("c"),) if gamma is None else gamma.shape
