"""The record of aclnnNLLLossBackward: the page of release 9.1.0, and checks in the vendor's ops-nn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from npugrad import rules
from npugrad.binding import TorchBinding
from npugrad.dtypes import DType, Format
from npugrad.error_table import PARAM_INVALID
from npugrad.generators import Draw
from npugrad.meta import TensorMeta
from npugrad.operator import Finding
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
_TARGETS = dict.fromkeys(Product, (DType.INT64, DType.UINT8, DType.INT32))
_ALL = "grad_output input target weight total_weight grad_input"
NONE, MEAN = 0, 1


def _batch(call: CallMeta) -> Shape:
    return call.tensor("input").shape[:-1]


def _classes(call: CallMeta) -> Shape:
    return call.tensor("input").shape[-1:]


def _one(call: CallMeta) -> Sequence[Shape]:
    return (1,), ()


def _gradients(call: CallMeta) -> Sequence[Shape]:
    return [_batch(call)] if call.attrs["reduction"] == NONE and _batch(call) else _one(call)


p = Page(DOCUMENT, "ops-nn", dict.fromkeys(Product, DOCUMENT))
p.input(
    "grad_output",
    rules.FLOATS,
    "(N) if reduction is 0 and input is (N, C), else (1) or (). Gradient of the loss.",
)
p.input(
    "input",
    rules.FLOATS,
    "(N, C) or (C), dtype of grad_output. The forward input, not read.",
    axes="*n c",
    c_name="self",
)
p.input(
    "target",
    _TARGETS,
    "(N) or (), input without C. Class of each sample: 0 to C - 1, or ignore_index.",
    axes="*n",
    below=lambda call: _classes(call)[0],
)
p.input(
    "weight",
    rules.FLOATS,
    "(C), dtype of input. Weight of each class; ones where PyTorch has none.",
    axes="c",
)
p.attr(
    "reduction",
    "int64",
    "Of the loss: 0 (none), 1 (mean) or 2 (sum).",
    choices={"none": NONE, "mean": MEAN, "sum": 2},
)
p.attr("ignore_index", "int64", "Target whose samples have no gradient.", (-100, 1))
p.input(
    "total_weight",
    rules.FLOATS,
    "(1) or (), dtype of input. Sum of the weights of the targets, used if reduction is mean.",
    axes="1",
    draw=Draw("uniform", (0.5, 2.0)),
    device_view=lambda meta: meta.shape or (1,),  # the only one on the page
)
p.output("grad_input", "input", "Shape and dtype of input. Gradient of input.", c_name="out")


def _vendor_on_out(call: CallMeta) -> VendorCode:
    out = call.declared("grad_input")
    return "accepts" if out is not None and "float" in out.dtype else PARAM_INVALID


def _has_classes(call: CallMeta) -> Finding | None:
    return (
        None
        if _classes(call) != (0,) or 0 in _batch(call)
        else Finding("0", "1 or more, as there are targets")
    )


def _without_classes(call: CallMeta) -> list[CallMeta]:
    shapes = {"input": (*_batch(call), 0), "weight": (0,)}
    return [call.with_inputs(**{name: TensorMeta(call.tensor(name).dtype, s) for name, s in shapes.items()})]


def _vendor_on_target(call: CallMeta) -> VendorCode:
    """Of self (C), a target (N) is taken if N is C."""
    return "accepts" if call.tensor("target").shape == call.tensor("input").shape else PARAM_INVALID


p.rule(rules.not_null, _ALL, row=1, check=1)
p.rule(
    rules.dtype_in(),
    "input",
    row=1,
    check=6,
    pick="The document lists BFLOAT16; the vendor's source has none on Atlas training. npugrad: nor has it.",
)
p.rule(rules.dtype_in(), "target", row=1, check=7)
p.rule(rules.same_dtype("input"), "grad_output weight total_weight", row=(1, 2), check=[3, 2, 4])
p.rule(
    rules.same_dtype("input"),
    "grad_input",
    check=5,
    vendor=_vendor_on_out,
    pick="The document wants the data type of self; the vendor's source casts to others. npugrad: refused.",
)
p.rule(rules.one_of_choices(), "reduction", row=4, check=8)
p.rule(rules.rank_in(1, 2), "input", row=3, check=9)
p.rule(
    rules.shape_is(
        _batch, "that of input without C", "input", text="has the shape of self without its last axis"
    ),
    "target",
    check=(10, 11),
    requires=("input.rank",),
    breaks=lambda call: [
        call.with_inputs(target=TensorMeta(call.tensor("target").dtype, shape))
        for shape in (_classes(call), (9, 9))
    ],
    vendor=_vendor_on_target,
    pick="The document wants () for self (C); the vendor's source takes (C) as well. npugrad: refused.",
)
p.rule(
    rules.shape_is(_classes, "(C) of input", "input", text="has one element for each class"),
    "weight",
    row=3,
    check=12,
    requires=("input.rank",),
)
p.rule(
    rules.shape_among(_one, "has shape (1) or ()"),
    "total_weight",
    row=3,
    check=13,
    vendor=lambda call: "accepts" if call.tensor("total_weight").size == 1 else PARAM_INVALID,
    pick="The document says (1), PyTorch passes (), the vendor's source counts elements. npugrad: (1) or ().",
)
p.rule(
    rules.shape_among(
        _gradients, "has shape (N) if reduction is 0 and self is (N, C), else (1) or ()", "input"
    ),
    "grad_output",
    row=3,
    check=14,
    requires=("input.rank", "reduction.choice"),
)
p.rule(rules.same_shape("input"), "grad_input", row=3, check=15)
p.rule(
    rules.special("classes", "has a class for each target", _has_classes, _without_classes),
    "input",
    requires=("input.rank",),
    vendor="accepts",
    pick="The document has targets below C; the vendor's source takes an empty self. npugrad: refused.",
)
p.rule(rules.format_in(Format.ND), _ALL, **rules.SAID)

p.not_expressible("an empty self is no error: there is nothing to compute", check=16)
p.not_expressible("any number can be ignored", name="ignore_index")
p.not_expressible("the operator is deterministic by default", entry=1)


def _finished(call: CallMeta) -> CallMeta:
    gradient = TensorMeta(call.tensor("input").dtype, _gradients(call)[0])
    return call.with_inputs(grad_output=gradient)


def _reads(call: CallMeta) -> dict[str, tuple[str, ...]]:
    mean = ("total_weight",) if call.attrs["reduction"] == MEAN else ()
    return {"grad_input": ("grad_output", "target", "weight", *mean)}


def _ones(given: Mapping[str, Any]) -> Any:
    data, weight = given["input"], given["weight"]
    return data.new_ones(data.shape[-1]) if weight is None else weight


NLL_LOSS_BACKWARD = p.record(
    NAME,
    wire=12,
    summary="Gradient of the negative log likelihood loss with respect to its input.",
    reads=_reads,
    reference=reference,
    sizes={"n": (3,), "c": 4},
    finished=_finished,
    models=(
        model("language", "language model, 256 of 32000 words", n=(256,), c=32000, reduction=MEAN),
        model(
            "classes", "image classification, 256 images of 1000 classes", n=(256,), c=1000, reduction=MEAN
        ),
    ),
    min_cann="8.5",
    data_check=_indices.check(
        NAME, "target", lambda inputs, attrs: inputs["input"].shape[-1], "C", ignored="ignore_index"
    ),
    checked_operands=("target",),
    unsafe="UNSAFE_INDICES",
    binding=TorchBinding(
        "aten.nll_loss_backward",
        tuple(name for name in p.params if not p.is_output(name)),
        made={"target": lambda given: given["target"].long()},
        back={"weight": _ones},
    ),
)
"""The record; order of parameters is the order of aclnnNLLLossBackwardGetWorkspaceSize."""
