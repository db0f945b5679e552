"""The record of aclnnBatchNormBackward: the page of release 9.1.0, and checks in the vendor's ops-nn.

Instance normalisation arrives as this, with input of shape (1, N*C, ...) and without running statistics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad import rules
from npugrad.binding import TorchBinding
from npugrad.changes import numbered
from npugrad.dtypes import Format
from npugrad.error_table import PARAM_NULLPTR
from npugrad.meta import TensorMeta
from npugrad.ops import _normalisation as normalisation
from npugrad.page import Page
from npugrad.products import Product
from npugrad.references.batch_norm_backward import reference
from npugrad.workloads import model

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npugrad.meta import CallMeta
    from npugrad.operator import Arrays, VendorCode

# fmt: off
DOCUMENT = "aclnnBatchNormBackward"
_MEAN, _RSTD = normalisation.MEAN, normalisation.RSTD
_FORMATS = {2: Format.NC, 3: Format.NCL, 4: Format.NCHW, 5: Format.NCDHW}
_DATA = "grad_out input grad_input"
_INPUTS = "weight running_mean running_var save_mean save_invstd"
_OUTPUTS = "grad_weight grad_bias"


def _channels(call: CallMeta) -> tuple[int, ...]:
    return call.tensor("input").shape[1:2]


def _saved(call: CallMeta) -> list[tuple[int, ...]]:
    return [_channels(call)] if call.attrs["training"] else [_channels(call), (0,)]


def _like_weight(call: CallMeta) -> TensorMeta:
    return TensorMeta(call.tensor("grad_out").dtype, _channels(call))


def _vendor_on_mask(call: CallMeta) -> VendorCode:
    return "accepts" if call.mask() else PARAM_NULLPTR


_EMPTY = rules.any_empty("grad_out", "input")
p = Page(DOCUMENT, "ops-nn", dict.fromkeys(Product, DOCUMENT), keeps_format=True, unexamined=_EMPTY,
    release="9.1.0")
rules.only_on(p, Product.ATLAS_A2, Product.ATLAS_A3, until="9.0.0")
p.note("constraints", "determinism is said for each product", since="9.2.0-beta.2")
p.input("grad_out", rules.FLOATS, "(N, C, ...), rank 2 to 8. Gradient of the output.", axes="n c *spatial")
p.input("input", "grad_out", "Shape, dtype and format of grad_out. The forward input.")
_C: dict[str, Any] = {"axes": "c", "optional": True}
p.input("weight", "grad_out", "(C), dtype of grad_out. Scale, ones when null.", draw=normalisation.SCALE,
    **_C)
_IF = "(C), dtype of grad_out. If training is"
p.input("running_mean", "grad_out", f"{_IF} false: the mean, zeros when null.", draw=_MEAN, **_C)
p.input("running_var", "grad_out", f"{_IF} false: the variance, ones when null.", draw=_RSTD, **_C)
p.input("save_mean", "grad_out", f"{_IF} true: the mean, zeros when null; else (0) will do.", draw=_MEAN,
    **_C)
_DEVIATION = f"{_IF} true: reciprocal standard deviation, ones when null; else (0) will do."
p.input("save_invstd", "grad_out", _DEVIATION, draw=_RSTD, **_C)
p.attr("training", "bool", "Whether the saved statistics were used, or the running ones.", (True, False))
p.attr("eps", "double", "Added to running_var if training is false.", (1e-5,))
p.attr("output_mask", "bool_array", "Three bools: compute grad_input, grad_weight, grad_bias.")
p.output("grad_input", "input", "Shape, dtype and format of grad_out. Gradient of input.")
_GRAD = "(C), dtype of grad_out. Gradient of"
# The vendor's source leaves these as they are if input is empty, though they are not.
p.output("grad_weight", "weight", f"{_GRAD} weight.", meta=_like_weight, zero_init=True)
p.output("grad_bias", "weight", f"{_GRAD} the shift.", meta=_like_weight, zero_init=True)

p.rule(rules.not_null, "grad_out input", row=1, check=1)
_SAYS = "The document gives no code; the vendor's source returns 161001. npugrad: 161001."
p.rule(rules.not_null, "output_mask", check=3, pick=_SAYS)
_SAYS = (
    "The document says 161002; the vendor's source returns 161001 for none, and takes more. npugrad: 161002."
)
_MASKS = numbered("output_mask", [(), (True,) * 4])
p.rule(rules.entries(3), "output_mask", row=3, check=4, breaks=_MASKS, vendor=_vendor_on_mask, pick=_SAYS)
p.rule(rules.not_null, f"grad_input {_OUTPUTS}", row=[2, 3, 4], check=5)
p.rule(rules.dtype_in(), _DATA, row=[1, 1, 4], check=[6, 6, 8])
p.rule(rules.dtype_in(), _INPUTS, row=2, check=9)
p.rule(rules.dtype_in(), _OUTPUTS, row=[5, 6], check=8)
_AS_DATA: dict[str, Any] = {"requires": ("{}.dtype", "grad_out.dtype")}
p.rule(rules.same_dtype("grad_out"), "input", row=9, check=7, **_AS_DATA)
p.rule(rules.same_dtype("grad_out"), "grad_input", row=9, **_AS_DATA, **rules.SAID)
_SAYS = "The document says so; the vendor's source and tests take FLOAT beside FLOAT16. npugrad: refused."
p.rule(rules.same_dtype("grad_out"), f"{_INPUTS} {_OUTPUTS}", vendor="accepts", pick=_SAYS, **_AS_DATA)
p.rule(rules.rank_in(2, 8), _DATA, row=10, check=12)
_SAYS = "The document has one a rank, its example ND; the vendor's source takes public ones. npugrad: both."
p.rule(rules.format_by_rank(_FORMATS), _DATA, row=[1, 1, 4], check=11, pick=_SAYS)
p.rule(rules.same_format("grad_out"), "input grad_input", row=8, check=10)
p.rule(rules.format_in(Format.ND), f"{_INPUTS} {_OUTPUTS}", row=[2, 2, 2, 2, 2, 5, 6], **rules.SAID)
_RANKS = ("{}.rank", "grad_out.rank")
p.rule(rules.same_shape("grad_out"), "input grad_input", row=10, check=[13, 14], requires=_RANKS)
_AS_INPUT: dict[str, Any] = {"requires": ("input.shape", "input.rank")}
_ONE_EACH = "has one element for each channel"
_IS_C = rules.shape_is(_channels, "(C) of input", "input", text=_ONE_EACH)
p.rule(_IS_C, "weight running_mean running_var", row=(2, 7), check=15, **_AS_INPUT)
_IS_SAVED = rules.shape_among(_saved, f"{_ONE_EACH}, or none if training is false", "input", "training")
p.rule(_IS_SAVED, "save_mean save_invstd", row=(2, 7), **_AS_INPUT, **rules.SAID)
p.rule(_IS_C, _OUTPUTS, row=[(5, 7), (6, 7)], **_AS_INPUT, **rules.SAID)

p.not_expressible("an empty input or gradOut is no error, whatever else there is: zeros", check=2)
p.not_expressible("rules of Ascend 950, which the service does not serve", check=16)
p.not_expressible("any number can be added", name="eps")
p.not_expressible("determinism is an option of the call, not a precondition", entry=1)


def _statistics(call: CallMeta) -> tuple[str, str]:
    return ("save_mean", "save_invstd") if call.attrs["training"] else ("running_mean", "running_var")


def _reads(call: CallMeta) -> dict[str, tuple[str, ...]]:
    mean, deviation = _statistics(call)
    data = ("grad_out", "input", mean, deviation)
    own = data if call.attrs["training"] else ("grad_out", deviation)
    return {"grad_input": (*own, "weight"), "grad_weight": data, "grad_bias": ("grad_out",)}


def _extra_tolerance(inputs: Arrays, attrs: Mapping[str, Any], output: str) -> float:
    gradient, *factors = (inputs[name] for name in ("grad_out", "save_invstd", "weight"))
    if output != "grad_input" or not attrs["training"] or gradient is None:
        return 0.0
    (n, c), given = gradient.shape[:2], [np.asarray(each, float) for each in factors if each is not None]
    scale = np.ones(c) * np.prod(given, axis=0)
    return normalisation.extra_tolerance(gradient, np.ones(n), scale, (n, 1, c, -1))


_STYLE = {"n": 1, "c": 256, "spatial": (64, 64), "with_running_mean": False, "with_running_var": False}
BATCH_NORM_BACKWARD = p.record(
    "batch_norm_backward",
    wire=10,
    summary="Gradients of batch normalisation with respect to its input, weight and bias.",
    reads=_reads,
    reference=reference,
    models=(
        model("residual", "residual network, 8 images of 56x56 in 64 channels", n=8, c=64, spatial=(56, 56)),
        model("instances", "style transfer, instance norm of 2 images of 64x64 in 128 channels", **_STYLE),
    ),
    extra_tolerance=_extra_tolerance,
    min_cann="8.5",
    binding=TorchBinding(
        "aten.native_batch_norm_backward",
        ("grad_out", "input", *_INPUTS.split(), "training", "eps", "output_mask"),
        takes=lambda call: None not in [call.inputs[name] for name in _statistics(call)],  # it reads those
        is_compared=False,  # torch_npu has gradients of weight and bias in float32
    ),
)
"""The record; order of parameters is the order of aclnnBatchNormBackwardGetWorkspaceSize."""
