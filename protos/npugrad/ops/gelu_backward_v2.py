"""The record of aclnnGeluBackwardV2: the page of release 9.1.0, and checks in the vendor's ops-nn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npugrad import rules
from npugrad.binding import TorchBinding
from npugrad.dtypes import Format
from npugrad.error_table import PARAM_INVALID
from npugrad.meta import TensorMeta
from npugrad.page import Page
from npugrad.products import Product
from npugrad.references.activations import gelu
from npugrad.workloads import model

if TYPE_CHECKING:
    from npugrad.meta import CallMeta
    from npugrad.operator import VendorCode

# fmt: off
DOCUMENT = "aclnnGeluBackwardV2"
_ALL = "grad_output input grad_input"


def _together(call: CallMeta) -> TensorMeta:
    """What both operands are promoted and broadcast to."""
    both = call.tensor("grad_output"), call.tensor("input")
    return TensorMeta(rules.promoted(*(m.dtype for m in both)),
        rules.broadcast(*(m.shape for m in both)) or ())


def _vendor_on_dtype(call: CallMeta) -> VendorCode:
    """Only the type to which both are promoted is compared with the supported ones."""
    return "accepts" if _together(call).dtype in rules.FLOATS[call.product] else PARAM_INVALID


p = Page(DOCUMENT, "ops-nn", dict.fromkeys(Product, DOCUMENT), release="9.1.0")
rules.only_on(p, Product.ATLAS_A2, Product.ATLAS_A3, until="9.0.0")
p.input("grad_output", rules.FLOATS, "(*S), rank 0 to 8. Gradient of the output.", axes="*shape")
p.input("input", "grad_output", "Broadcast with grad_output, rank 0 to 8. The forward input.", c_name="self")
p.attr("approximate", "string", 'Formula: "none" for erf, "tanh" for its approximation.', ("none", "tanh"))
p.output("grad_input", "input", "Shape and dtype of both together. Gradient of input.", meta=_together)

p.rule(rules.not_null, f"{_ALL} approximate", row=1, check=[1, 1, 1, 2])
p.rule(rules.dtype_in(), "grad_output input", row=1, check=(3, 4, 5), vendor=_vendor_on_dtype,
    pick="The document lists the types of each operand; the vendor's source looks only at the one to which "
    "both are promoted. npugrad: each.")
p.rule(rules.promoted_dtype("grad_output", "input"), "grad_input", row=(1, 3), check=6)
p.rule(rules.rank_in(0, 8), "grad_output input", vendor="accepts",
    pick="The document says rank 0 to 8; the vendor's source checks no rank. npugrad: refused.")
p.rule(rules.broadcastable("grad_output"), "input", row=2, check=7)
p.rule(rules.shape_is(lambda call: _together(call).shape,
        "the shape to which grad_output and input are broadcast"), "grad_input", row=5, check=8,
    requires=("input.broadcast",))
p.rule(rules.one_of_choices(), "approximate", row=4, check=9)
p.rule(rules.format_in(Format.ND), _ALL, **rules.SAID)

p.not_expressible("empty operands are no error: empty results", check=10)
p.not_expressible("the operator is deterministic by default", entry=1)

GELU_BACKWARD_V2 = p.record("gelu_backward_v2", wire=8,
    summary="Gradient of GELU, exact or approximated by tanh.", reference=gelu,
    models=(model("encoder-mlp", "MLP of a vision transformer, 8 pictures of 197 patches",
            shape=(8, 197, 3072)),
        model("language-mlp", "MLP of a language model, 512 tokens", shape=(512, 4096), approximate="tanh")),
    min_cann="8.5", binding=TorchBinding("aten.gelu_backward", ("grad_output", "input"), ("approximate",),
        takes=lambda call: call.tensor("grad_output").shape == call.tensor("input").shape,
        is_compared=False))  # torch_npu runs aclnnGeluBackward
"""The record; order of parameters is the order of aclnnGeluBackwardV2GetWorkspaceSize."""
