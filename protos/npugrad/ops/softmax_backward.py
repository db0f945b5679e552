"""The record of aclnnSoftmaxBackward: the page of release 9.1.0, and checks in the vendor's ops-nn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from npugrad import rules
from npugrad.binding import TorchBinding
from npugrad.dtypes import Format
from npugrad.generators import Draw
from npugrad.page import Page
from npugrad.products import Product
from npugrad.references.softmax_backward import reference
from npugrad.workloads import model

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npugrad.operator import Arrays

# fmt: off
DOCUMENT = "aclnnSoftmaxBackward"
_ALL = "grad_output output grad_input"
_EMPTY = rules.any_empty("grad_output", "output")

p = Page(DOCUMENT, "ops-nn", dict.fromkeys(Product, DOCUMENT), unexamined=_EMPTY, release="9.1.0")
rules.only_on(p, Product.ATLAS_A2, Product.ATLAS_A3, until="9.0.0")
p.input("grad_output", rules.FLOATS, "(*S), rank 0 to 8. Gradient of the output.", axes="*shape")
p.input("output", "grad_output", "(*S), dtype of grad_output. The forward output.", draw=Draw("uniform"))
p.attr("dim", "int64", "Axis of the softmax, from -rank to rank - 1.", (-1, 0))
p.output("grad_input", "output", "(*S), a type of grad_output. Gradient of the input.", c_name="out")

p.rule(rules.not_null, _ALL, row=1, check=1)
p.rule(rules.dtype_in(), "grad_output", row=2, check=(3, 4),
    pick="The document has BFLOAT16 on every product; the vendor's source refuses it on the Atlas training "
    "series. npugrad: refused.")
p.rule(rules.dtype_in(), "grad_input", vendor="accepts", pick="The document lists three types and names "
    "others in a note; the vendor's source casts to any. npugrad: those listed.")
p.rule(rules.same_dtype("grad_output"), "output", row=3, check=(5, 6))
p.rule(rules.dim_of("grad_output"), "dim", row=1, check=7)
p.rule(rules.rank_in(0, 8), "grad_output", check=8)
p.rule(rules.same_shape("grad_output"), "output grad_input", row=4, check=[9, 10])
p.rule(rules.format_in(Format.ND), _ALL, **rules.SAID)

p.not_expressible("empty operands succeed before any other check; npugrad checks them", check=2)
p.not_expressible("the operator is deterministic by default", entry=1)


def _extra_tolerance(inputs: Arrays, attrs: Mapping[str, Any], output: str) -> float:
    """Differences of terms: 8 eps of max|grad_output| * max|output|."""
    arrays = [array for array in inputs.values() if array is not None and array.size]
    eps = float(ml_dtypes.finfo(arrays[0].dtype).eps) if arrays else 0.0  # type: ignore[no-untyped-call]
    return 8 * eps * float(np.prod([np.abs(array).max().astype(np.float64) for array in arrays]))


SOFTMAX_BACKWARD = p.record("softmax_backward", wire=9,
    summary="Gradient of softmax along one axis, from its output.", reference=reference,
    models=(model("attention", "attention of a transformer, 8 heads of 512 tokens", shape=(1, 8, 512, 512)),
        model("vision-attention", "attention of a vision transformer, 12 heads", shape=(8, 12, 197, 197))),
    extra_tolerance=_extra_tolerance, min_cann="8.5",
    binding=TorchBinding("aten._softmax_backward_data", ("grad_output", "output", "dim", "input_dtype"),
        made={"input_dtype": lambda given: given["output"].dtype}))
"""The record; order of parameters is the order of aclnnSoftmaxBackwardGetWorkspaceSize."""
