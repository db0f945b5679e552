"""The record of aclnnSiluBackward: the page of release 9.1.0, and checks in the vendor's ops-nn."""

from __future__ import annotations

from npugrad import rules
from npugrad.binding import TorchBinding
from npugrad.dtypes import Format
from npugrad.page import Page
from npugrad.products import Product
from npugrad.references.activations import silu
from npugrad.workloads import model

# fmt: off
DOCUMENT = "aclnnSiluBackward"
_ALL = "grad_output input grad_input"

p = Page(DOCUMENT, "ops-nn", dict.fromkeys(Product, DOCUMENT), release="9.1.0")
rules.only_on(p, Product.ATLAS_A2, Product.ATLAS_A3, until="9.0.0")
p.input("grad_output", rules.FLOATS, "(*S), rank 1 to 8. Gradient of the output.", axes="*shape")
p.input("input", "grad_output", "(*S), dtype of grad_output. The forward input.", c_name="self")
p.output("grad_input", "input", "(*S), dtype of grad_output. Gradient of input.")

p.rule(rules.not_null, _ALL, row=1, check=2)
p.rule(rules.dtype_in(), "grad_output", row=1, check=(3, 6))
p.rule(rules.same_dtype("grad_output"), "input grad_input", row=2, check=5)
p.rule(rules.rank_in(1, 8, is_low_checked=False), "grad_output", check=7)
p.rule(rules.same_shape("grad_output"), "input grad_input", row=3, check=8,
    pick="The document wants equal shapes and shapes to broadcast; the vendor's source broadcasts on "
    "another product only. npugrad: equal shapes.")
p.rule(rules.format_in(Format.ND), _ALL, **rules.SAID)

p.not_expressible("workspaceSize and executor are created by the service, never null", check=1)
p.not_expressible("types and shapes that differ are for Ascend 950, which the service does not serve",
    check=(4, 9))
p.not_expressible("empty operands are no error: empty results", check=10)
p.not_expressible("the operator is deterministic by default", entry=1)

SILU_BACKWARD = p.record("silu_backward", wire=7,
    summary="Gradient of SiLU, x * sigmoid(x), also called Swish.", reference=silu,
    models=(model("gated-mlp", "gated MLP of a language model, 512 tokens", shape=(512, 11008)),
        model("unet-silu", "diffusion UNet block", shape=(2, 320, 64, 64))), min_cann="8.5",
    binding=TorchBinding("aten.silu_backward", ("grad_output", "input")))
"""The record; order of parameters is the order of aclnnSiluBackwardGetWorkspaceSize."""
