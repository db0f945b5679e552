"""The record of aclnnGroupNormBackward.

Sources: the official page "aclnnGroupNormBackward" (Atlas training series, Atlas A2) and, where cited
as such, the vendor's public source (ops-nn), which also adds the Atlas A3 series.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from npugrad.binding import TorchBinding
from npugrad.dtypes import DType
from npugrad.generators import Draw
from npugrad.meta import CallMeta, TensorMeta
from npugrad.operator import AttrParam, OpRecord, Sample, TensorParam
from npugrad.ops._group_norm_backward_layout import C_NAMES, DOCUMENT, DTYPES, OUTPUTS, build, output_metas
from npugrad.ops._group_norm_backward_rules import CONSTRAINTS, NOT_EXPRESSIBLE
from npugrad.ops._group_norm_backward_workloads import WORKLOADS
from npugrad.products import Product
from npugrad.references.group_norm_backward import reference

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

    from npugrad.operator import Arrays


_NORMAL = Draw("normal")


def _input(name: str, doc: str, *, optional: bool = False, draw: Draw = _NORMAL) -> TensorParam:
    return TensorParam(
        name=name, c_name=C_NAMES[name], role="input", doc=doc, dtypes=DTYPES, optional=optional, draw=draw
    )


def _size(name: str, doc: str) -> AttrParam:
    return AttrParam(name=name, c_name=C_NAMES[name], type="int64", doc=doc)


def _output(name: str, doc: str) -> TensorParam:
    index = OUTPUTS.index(name)
    return TensorParam(
        name=name, c_name=C_NAMES[name], role="output", doc=doc, dtypes=DTYPES, masked_by=index
    )


_SAME = "rank 0 to 8, dtype of grad_out."
_LIKE_GAMMA = "Shape of gamma, (c) without gamma, dtype of grad_out."
_PARAMS = (
    _input("grad_out", "n*c*hxw elements in any shape of rank 0 to 8. Gradient of the normalised output."),
    _input("input", f"n*c*hxw elements in any shape of {_SAME} The forward input."),
    _input(
        "mean",
        f"n*group elements, {_SAME} Mean of each group of each sample.",
        draw=Draw("normal", (0.0, 0.1)),
    ),
    _input(
        "rstd",
        f"n*group elements, {_SAME} Reciprocal standard deviation of each group of each sample.",
        draw=Draw("uniform", (0.5, 2.0)),
    ),
    _input(
        "gamma",
        f"c elements, {_SAME} Scale of each channel, ones when null.",
        optional=True,
        draw=Draw("normal", (1.0, 0.25)),
    ),
    _size("n", "Number of samples."),
    _size("c", "Number of channels, a multiple of group."),
    _size("hxw", "Elements of one channel of one sample."),
    _size("group", "Number of groups, above 0."),
    AttrParam(
        name="output_mask",
        c_name=C_NAMES["output_mask"],
        type="bool_array",
        doc="Three bools: compute grad_input, grad_gamma, grad_beta.",
    ),
    _output("grad_input", "Shape of input, dtype of grad_out. Gradient of input."),
    _output("grad_gamma", f"{_LIKE_GAMMA} Gradient of gamma."),
    _output("grad_beta", f"{_LIKE_GAMMA} Gradient of beta."),
)

_NORMALISED = ("grad_out", "input", "mean", "rstd")
_READS = {
    "grad_input": (*_NORMALISED, "gamma"),
    "grad_gamma": _NORMALISED,
    "grad_beta": ("grad_out",),
}


def _samples(product: Product) -> Iterator[Sample]:
    for dtype in DTYPES[product]:
        yield Sample(f"{dtype}", build(dtype=dtype, product=product))
        yield Sample(f"{dtype}-no_gamma", build(dtype=dtype, product=product, with_gamma=False))
    for mask in ((True, False, False), (False, True, False), (False, False, True), (False, False, False)):
        bits = "".join("01"[bit] for bit in mask)
        yield Sample(f"mask{bits}", build(product=product, output_mask=mask))
    yield Sample("one_group_of_one", build(product=product, n=1, c=1, hxw=1, group=1, shape=()))
    yield Sample("rank8", build(product=product, n=1, c=4, hxw=8, group=2, shape=(1, 4, 2, 1, 2, 1, 2, 1)))
    yield Sample("empty_n", build(product=product, n=0))
    yield Sample("empty_hxw", build(product=product, hxw=0))
    flat = TensorMeta(DType.FLOAT32, (48,))
    yield Sample("flat_grad_out", build(product=product).with_inputs(grad_out=flat))
    strided = TensorMeta(DType.FLOAT32, (2, 6, 4), strides=(0, 1, 6))
    yield Sample("strided", build(product=product).with_inputs(grad_out=strided))


def _make_inputs(call: CallMeta, rng: np.random.Generator) -> dict[str, npt.NDArray[Any] | None]:
    """Normal data with statistics that fit it, as a forward pass would leave them."""
    n, c, hxw, group = (call.integer(name) for name in ("n", "c", "hxw", "group"))
    values = rng.standard_normal((n, group, c // group * hxw), dtype=np.float32) * 2 + 0.5
    mean = values.mean(axis=2) if values.size else np.zeros((n, group), np.float32)
    variance = values.var(axis=2) if values.size else np.ones((n, group), np.float32)
    made: dict[str, npt.NDArray[Any]] = {
        "grad_out": rng.standard_normal(n * c * hxw, dtype=np.float32),
        "input": values,
        "mean": mean,
        "rstd": 1 / np.sqrt(variance + 1e-5),
        "gamma": rng.standard_normal(c, dtype=np.float32) + 1,
    }
    return {
        name: None if meta is None else made[name].reshape(meta.shape).astype(meta.dtype.numpy)
        for name, meta in call.inputs.items()
    }


def _extra_tolerance(inputs: Arrays, attrs: Mapping[str, Any], output: str) -> float:
    """grad_input is a difference of large terms: 8 eps of the largest one, max|rstd * grad_out * gamma|."""
    grad_out, rstd, gamma = inputs["grad_out"], inputs["rstd"], inputs["gamma"]
    if output != "grad_input" or grad_out is None or rstd is None or not grad_out.size:
        return 0.0
    n, c, group = attrs["n"], attrs["c"], attrs["group"]
    # One pass over the data: its largest magnitude for each (n, c), where rstd and gamma are constant.
    largest = np.abs(grad_out.reshape(n, c, -1)).max(axis=2).astype(np.float64)
    scale = np.abs(np.repeat(rstd.reshape(n, group).astype(np.float64), c // group, axis=1))
    weight = 1.0 if gamma is None else np.abs(gamma.reshape(1, c).astype(np.float64))
    eps = float(ml_dtypes.finfo(grad_out.dtype).eps)  # type: ignore[no-untyped-call]
    return 8 * eps * float(np.max(largest * scale * weight))


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
    ),
)
"""The record; order of params is the order of aclnnGroupNormBackwardGetWorkspaceSize."""
