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
    from npugrad.operator import Arrays

DOCUMENT = "aclnnBatchNormBackward"
_F, _MEAN, _RSTD = rules.FLOATS, normalisation.MEAN, normalisation.RSTD
_FORMATS = {2: Format.NC, 3: Format.NCL, 4: Format.NCHW, 5: Format.NCDHW}
_DATA = "grad_out input grad_input"
_CHANNELS = "weight running_mean running_var save_mean save_invstd grad_weight grad_bias"


def _is_empty(call: CallMeta) -> bool:
    return any(meta is not None and not meta.size for meta in (call.inputs["grad_out"], call.inputs["input"]))


def _channels(call: CallMeta) -> tuple[int, ...]:
    return call.tensor("input").shape[1:2]


def _saved(call: CallMeta) -> list[tuple[int, ...]]:
    return [_channels(call)] if call.attrs["training"] else [_channels(call), (0,)]


def _like_weight(call: CallMeta) -> TensorMeta:
    return TensorMeta(call.tensor("grad_out").dtype, _channels(call))


p = Page(DOCUMENT, "ops-nn", dict.fromkeys(Product, DOCUMENT), keeps_format=True, unexamined=_is_empty)
p.input("grad_out", _F, "(N, C, ...), rank 2 to 8. Gradient of the output.", axes="n c *spatial")
p.input("input", "grad_out", "Shape, dtype and format of grad_out. The forward input.")
for _name, _draw, _doc in (
    ("weight", normalisation.SCALE, "Scale, ones when null."),
    ("running_mean", _MEAN, "Mean if training is false, zeros when null."),
    ("running_var", _RSTD, "Variance if training is false, not negative, ones when null."),
    ("save_mean", _MEAN, "Mean if training is true, zeros when null; else (0) will do."),
    (
        "save_invstd",
        _RSTD,
        "Reciprocal standard deviation if training is true, ones when null; else (0) will do.",
    ),
):
    p.input(_name, _F, f"(C), dtype of grad_out. {_doc}", axes="c", optional=True, draw=_draw)
p.attr("training", "bool", "Whether the saved statistics were used, or the running ones.", (True, False))
p.attr("eps", "double", "Added to running_var if training is false.", (1e-5,))
p.attr("output_mask", "bool_array", "Three bools: compute grad_input, grad_weight, grad_bias.")
p.output("grad_input", "input", "Shape, dtype and format of grad_out. Gradient of input.")
# The vendor's source leaves these as they are if input is empty, though they are not.
for _name, _doc in (("grad_weight", "weight"), ("grad_bias", "the shift")):
    p.output(
        _name, "weight", f"(C), dtype of grad_out. Gradient of {_doc}.", meta=_like_weight, zero_init=True
    )

_950: dict[str, Any] = {
    "vendor": "accepts",
    "pick": "The document says so; the vendor's source checks it on Ascend 950 only. npugrad: refused.",
}
_TYPES, _RANKS = ("{}.dtype", "grad_out.dtype"), ("{}.rank", "grad_out.rank")

p.rule(rules.not_null, "grad_out input", row=1, check=1)
p.rule(
    rules.not_null,
    "output_mask",
    check=3,
    pick="The document gives no code; the vendor's source returns 161001. npugrad: 161001.",
)
p.rule(
    rules.entries(3),
    "output_mask",
    row=3,
    check=4,
    breaks=numbered("output_mask", [(), (True,) * 4]),
    vendor=lambda call: "accepts" if call.mask() else PARAM_NULLPTR,
    pick="The document says 161002; the vendor's source returns 161001 for none and takes any other number "
    "of entries. npugrad: 161002.",
)
p.rule(rules.not_null, "grad_input grad_weight grad_bias", row=[2, 3, 4], check=5)
p.rule(rules.dtype_in(), _DATA, row=[1, 1, 4], check=[6, 6, 8])
p.rule(rules.dtype_in(), _CHANNELS, row=[2, 2, 2, 2, 2, 5, 6], check=[9, 9, 9, 9, 9, 8, 8])
p.rule(rules.same_dtype("grad_out"), "input", row=9, check=7, requires=_TYPES)
p.rule(rules.same_dtype("grad_out"), "grad_input", row=9, requires=_TYPES, **_950)
p.rule(
    rules.same_dtype("grad_out"),
    _CHANNELS,
    requires=_TYPES,
    vendor="accepts",
    pick="The document wants the data type of gradOut; the vendor's source and tests take FLOAT beside it. "
    "npugrad: refused.",
)
p.rule(rules.rank_in(2, 8), _DATA, row=10, check=12)
p.rule(
    rules.format_by_rank(_FORMATS),
    _DATA,
    row=[1, 1, 4],
    check=11,
    pick="The document names a format for each rank but passes ND in its example; the vendor's source takes "
    "all but private ones. npugrad: either.",
)
p.rule(rules.same_format("grad_out"), "input grad_input", row=8, check=10)
p.rule(rules.format_in(Format.ND), _CHANNELS, row=[2, 2, 2, 2, 2, 5, 6], **rules.SAID)
p.rule(rules.same_shape("grad_out"), "input grad_input", row=10, check=[13, 14], requires=_RANKS)
_AS_INPUT = ("input.shape", "input.rank")
_IS_C = rules.shape_is(_channels, "(C) of input", "input", text="has one element for each channel")
_IS_SAVED = rules.shape_among(
    _saved, "has one element for each channel, or none if training is false", "input", "training"
)
p.rule(_IS_C, "weight running_mean running_var", row=(2, 7), check=15, requires=_AS_INPUT)
p.rule(_IS_SAVED, "save_mean save_invstd", row=(2, 7), requires=_AS_INPUT, **_950)
p.rule(_IS_C, "grad_weight grad_bias", row=[(5, 7), (6, 7)], requires=_AS_INPUT, **_950)

p.not_expressible("an empty input or gradOut is no error, whatever else there is: zeros", check=2)
p.not_expressible("rules of Ascend 950, which the service does not serve", check=16)
p.not_expressible("any number can be added", name="eps")
p.not_expressible("determinism is an option of the call, not a precondition", entry=1)


def _statistics(is_training: object) -> tuple[str, str]:
    return ("save_mean", "save_invstd") if is_training else ("running_mean", "running_var")


def _reads(call: CallMeta) -> dict[str, tuple[str, ...]]:
    used = _statistics(call.attrs["training"])
    data = ("grad_out", "input", *used)
    own = (*data, "weight") if call.attrs["training"] else ("grad_out", used[1], "weight")
    return {"grad_input": own, "grad_weight": data, "grad_bias": ("grad_out",)}


def _extra_tolerance(inputs: Arrays, attrs: Mapping[str, Any], output: str) -> float:
    gradient, *factors = (inputs[name] for name in ("grad_out", "save_invstd", "weight"))
    if output != "grad_input" or not attrs["training"] or gradient is None:
        return 0.0
    n, c = gradient.shape[:2]
    scale = np.ones(c)
    for factor in (each for each in factors if each is not None):
        scale *= factor.astype(np.float64)
    return normalisation.extra_tolerance(gradient, np.ones(n), scale, (n, 1, c, -1))


BATCH_NORM_BACKWARD = p.record(
    "batch_norm_backward",
    wire=10,
    summary="Gradients of batch normalisation with respect to its input, weight and bias.",
    reads=_reads,
    reference=reference,
    models=(
        model("residual", "residual network, 8 images of 56x56 in 64 channels", n=8, c=64, spatial=(56, 56)),
        model(
            "instances",
            "style transfer, instance norm of 2 images of 64x64 in 128 channels",
            **{"n": 1, "c": 256, "spatial": (64, 64), "with_running_mean": False, "with_running_var": False},
        ),
    ),
    extra_tolerance=_extra_tolerance,
    min_cann="8.5",
    binding=TorchBinding(
        "aten.native_batch_norm_backward",
        ("grad_out", "input", *_CHANNELS.split()[:5], "training", "eps", "output_mask"),
        # It wants the statistics that it uses.
        takes=lambda call: None not in [call.inputs[name] for name in _statistics(call.attrs["training"])],
    ),
)
"""The record; order of parameters is the order of aclnnBatchNormBackwardGetWorkspaceSize."""
