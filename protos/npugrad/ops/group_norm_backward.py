"""The record of aclnnGroupNormBackward.

Sources: the official page "aclnnGroupNormBackward" (Atlas training series, Atlas A2) and, where cited
as such, the vendor's public source (ops-nn), which also adds the Atlas A3 series.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from npugrad.binding import TorchBinding
from npugrad.dtypes import DType
from npugrad.meta import CallMeta, TensorMeta
from npugrad.operator import OpRecord, Sample
from npugrad.ops._group_norm_backward_layout import DOCUMENT, DTYPES, SIGNATURE, build, output_metas
from npugrad.ops._group_norm_backward_rules import CONSTRAINTS, NOT_EXPRESSIBLE
from npugrad.ops._group_norm_backward_workloads import WORKLOADS
from npugrad.ops._normalisation import extra_tolerance, make_inputs, masked_samples
from npugrad.products import Product
from npugrad.references.group_norm_backward import reference

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np
    import numpy.typing as npt

    from npugrad.operator import Arrays


_tensor = SIGNATURE.tensor
_READS = SIGNATURE.reads()
_SAME = "rank 0 to 8, dtype of grad_out."
_LIKE_GAMMA = "Shape of gamma, (c) without gamma, dtype of grad_out."
_PARAMS = (
    _tensor("grad_out", "n*c*hxw elements in any shape of rank 0 to 8. Gradient of the normalised output."),
    _tensor("input", f"n*c*hxw elements in any shape of {_SAME} The forward input."),
    _tensor("mean", f"n*group elements, {_SAME} Mean of each group of each sample."),
    _tensor("rstd", f"n*group elements, {_SAME} Reciprocal standard deviation of each group of each sample."),
    _tensor("gamma", f"c elements, {_SAME} Scale of each channel, ones when null."),
    SIGNATURE.attr("n", "int64", "Number of samples."),
    SIGNATURE.attr("c", "int64", "Number of channels, a multiple of group."),
    SIGNATURE.attr("hxw", "int64", "Elements of one channel of one sample."),
    SIGNATURE.attr("group", "int64", "Number of groups, above 0."),
    SIGNATURE.mask(),
    _tensor("grad_input", "Shape of input, dtype of grad_out. Gradient of input."),
    _tensor("grad_gamma", f"{_LIKE_GAMMA} Gradient of gamma. 0 if hxw is 0, where PyTorch gives NaN."),
    _tensor("grad_beta", f"{_LIKE_GAMMA} Gradient of beta."),
)


def _samples(product: Product) -> Iterator[Sample]:
    for dtype in DTYPES[product]:
        yield Sample(f"{dtype}", build(dtype=dtype, product=product))
        yield Sample(f"{dtype}-no_gamma", build(dtype=dtype, product=product, with_gamma=False))
    yield from masked_samples(build, product)
    yield Sample("one_group_of_one", build(product=product, n=1, c=1, hxw=1, group=1, shape=()))
    yield Sample("rank8", build(product=product, n=1, c=4, hxw=8, group=2, shape=(1, 4, 2, 1, 2, 1, 2, 1)))
    yield Sample("empty_n", build(product=product, n=0))
    yield Sample("empty_hxw", build(product=product, hxw=0))
    flat = TensorMeta(DType.FLOAT32, (48,))
    yield Sample("flat_grad_out", build(product=product).with_inputs(grad_out=flat))
    strided = TensorMeta(DType.FLOAT32, (2, 6, 4), strides=(0, 1, 6))
    yield Sample("strided", build(product=product).with_inputs(grad_out=strided))


def _make_inputs(call: CallMeta, rng: np.random.Generator) -> dict[str, npt.NDArray[Any] | None]:
    return make_inputs(call, rng, _sizes(call.attrs))


def _extra_tolerance(inputs: Arrays, attrs: Mapping[str, Any], output: str) -> float:
    if output != "grad_input":
        return 0.0
    return extra_tolerance(inputs["grad_out"], inputs["rstd"], inputs["gamma"], _sizes(attrs))


def _sizes(attrs: Mapping[str, Any]) -> tuple[int, int, int, int]:
    return attrs["n"], attrs["group"], attrs["c"] // attrs["group"], attrs["hxw"]


GROUP_NORM_BACKWARD = OpRecord(
    name="group_norm_backward",
    aclnn_name=DOCUMENT,
    summary="Gradients of group normalisation with respect to its input, scale and shift.",
    documents=(DOCUMENT,),
    repositories=("ops-nn",),
    params=_PARAMS,
    products={
        Product.ATLAS_TRAINING: DOCUMENT,
        Product.ATLAS_A2: DOCUMENT,
        Product.ATLAS_A3: "newer vendor documents and source",
    },
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
    determinism_check=lambda call, release: None,  # by the pages of 8.5.0 to 9.2.0-beta.2
    min_cann="8.0",
    binding=TorchBinding(
        "aten.native_group_norm_backward",
        ("grad_out", "input", "mean", "rstd", "gamma", "n", "c", "hxw", "group", "output_mask"),
        # It takes the options of gamma's and beta's gradients from gamma even if that is null, and fails.
        takes=lambda call: call.inputs["gamma"] is not None or not any((call.mask() or ())[1:]),
    ),
)
"""The record; order of params is the order of aclnnGroupNormBackwardGetWorkspaceSize."""
