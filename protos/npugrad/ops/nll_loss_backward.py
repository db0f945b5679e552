"""The record of aclnnNLLLossBackward: the page of release 9.1.0, and checks in the vendor's ops-nn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from npugrad import rules
from npugrad.binding import TorchBinding
from npugrad.changes import shaped
from npugrad.dtypes import DType, Format
from npugrad.error_table import PARAM_INVALID
from npugrad.generators import Draw
from npugrad.meta import TensorMeta
from npugrad.ops import _indices
from npugrad.page import Page
from npugrad.products import Product
from npugrad.references.nll_loss_backward import reference
from npugrad.workloads import model

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from npugrad.meta import CallMeta
    from npugrad.operator import VendorCode

    Shape = tuple[int, ...]

NAME, DOCUMENT = "nll_loss_backward", "aclnnNLLLossBackward"
_F, _TARGETS = rules.FLOATS, dict.fromkeys(Product, (DType.INT64, DType.UINT8, DType.INT32))
_ALL = "grad_output input target weight total_weight grad_input"
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def _batch(call: CallMeta) -> Shape:
    return call.tensor("input").shape[:-1]


def _classes(call: CallMeta) -> Shape:
    return call.tensor("input").shape[-1:]


def _one(call: CallMeta) -> Sequence[Shape]:
    return (1,), ()


def _gradients(call: CallMeta) -> Sequence[Shape]:
    return [_batch(call)] if _batch(call) and not call.attrs["reduction"] else _one(call)


def _vendor_on_target(call: CallMeta) -> VendorCode:
    return "accepts" if call.tensor("target").shape == call.tensor("input").shape else PARAM_INVALID


def _vendor_on_one(call: CallMeta) -> VendorCode:
    return "accepts" if call.tensor("total_weight").size == 1 else PARAM_INVALID


def _finished(call: CallMeta) -> CallMeta:
    return call.with_inputs(grad_output=TensorMeta(call.tensor("input").dtype, _gradients(call)[0]))


# fmt: off
p = Page(DOCUMENT, "ops-nn", dict.fromkeys(Product, DOCUMENT), finished=_finished, release="9.1.0")
rules.only_on(p, Product.ATLAS_A2, Product.ATLAS_A3, until="9.0.0")
p.input("grad_output", _F, "(N) if reduction is 0 and input is (N, C), else (1) or (). Gradient of the loss.")
p.input("input", _F, "(N, C) or (C), dtype of grad_output. Forward input, not read.", axes="*n c",
    c_name="self")
p.input("target", _TARGETS, "Shape of input without C. Class of each sample, 0 to C - 1, or ignore_index.",
    axes="*n", below=lambda call: _classes(call)[0])
p.input("weight", _F, "(C), dtype of input. Weight of each class; PyTorch's default is ones.", axes="c")
p.attr("reduction", "int64", "Of the loss: 0 (none), 1 (mean) or 2 (sum).", choices=_REDUCTIONS)
p.attr("ignore_index", "int64", "Target whose samples have no gradient.", (-100, 1))
_TOTAL = "(1) or (), dtype of input. Sum of the weights of the targets, used if reduction is mean."
p.input("total_weight", _F, _TOTAL, axes="1", draw=Draw("uniform", (0.5, 2.0)),
        device_view=lambda meta: meta.shape or (1,))  # the only one on the page
p.output("grad_input", "input", "Shape and dtype of input. Gradient of input.", c_name="out")

_RANKED = ("input.rank",)
p.rule(rules.not_null, _ALL, row=1, check=1)
p.rule(rules.dtype_in(), "input", row=1, check=6,
    pick="The document lists BFLOAT16; the vendor's source has none on Atlas training. npugrad: nor has it.")
p.rule(rules.dtype_in(), "target grad_input", row=[1, None], check=[7, 5])
p.rule(rules.same_dtype("input"), "grad_output weight total_weight", row=(1, 2), check=[3, 2, 4])
p.rule(rules.same_dtype("input"), "grad_input", requires=("input.dtype", "grad_input.dtype"), **rules.SAID)
p.rule(rules.one_of_choices(), "reduction", row=4, check=8)
p.rule(rules.rank_in(1, 2), "input", row=3, check=9)
p.rule(rules.shape_is(_batch, "that of input without C", "input", text="has the shape of self without C"),
    "target", check=(10, 11), breaks=shaped({"target": _classes}, {"target": lambda call: (9, 9)}),
    vendor=_vendor_on_target,
    pick="The document wants () for self (C); the vendor's source takes (C) as well. npugrad: refused.",
    requires=_RANKED)
_IS_C = rules.shape_is(_classes, "(C) of input", "input", text="has one element for each class")
p.rule(_IS_C, "weight", row=3, check=12, requires=_RANKED)
p.rule(rules.shape_among(_one, "has shape (1) or ()"), "total_weight", row=3, check=13, vendor=_vendor_on_one,
    pick="The document says (1), PyTorch passes (), the vendor's source counts elements. npugrad: (1) or ().")
p.rule(rules.shape_among(_gradients, "has shape (N) if reduction is 0 and self (N, C), else (1) or ()",
        "input"), "grad_output", row=3, check=14, requires=("input.rank", "reduction.choice"))
p.rule(rules.same_shape("input"), "grad_input", row=3, check=15)
p.rule(rules.in_range("C", shaped({"input": lambda call: (*_batch(call), 0), "weight": lambda call: (0,)})),
    "target", vendor="accepts",
    pick="The document has targets below C; the vendor's source takes an empty self. npugrad: refused.",
    requires=_RANKED)
p.rule(rules.format_in(Format.ND), _ALL, **rules.SAID)

p.not_expressible("an empty self is no error: there is nothing to compute", check=16)
p.not_expressible("any number can be ignored", name="ignore_index")
p.not_expressible("the operator is deterministic by default", entry=1)


def _reads(call: CallMeta) -> dict[str, tuple[str, ...]]:
    mean = ("total_weight",) * (call.attrs["reduction"] == _REDUCTIONS["mean"])
    return {"grad_input": ("grad_output", "target", "weight", *mean)}


def _weight(given: Mapping[str, Any]) -> Any:
    data, weight = given["input"], given["weight"]
    return data.new_ones(data.shape[-1]) if weight is None else weight


NLL_LOSS_BACKWARD = p.record(NAME, wire=12,
    summary="Gradient of the negative log likelihood loss with respect to its input.", reads=_reads,
    reference=reference, sizes={"n": (3,), "c": 4},
    models=(model("language", "language model, 256 of 32000 words", n=(256,), c=32000, reduction=1),
        model("classes", "image classification, 256 images of 1000 classes", n=(256,), c=1000, reduction=1)),
    min_cann="8.5",
    **_indices.checked(NAME, "target", lambda inputs, attrs: inputs["input"].shape[-1], "C", "ignore_index"),
    binding=TorchBinding("aten.nll_loss_backward", tuple(name for name in p.params if not p.is_output(name)),
        made={"target": lambda given: given["target"].long()}, back={"weight": _weight}))
"""The record; order of parameters is the order of aclnnNLLLossBackwardGetWorkspaceSize."""
