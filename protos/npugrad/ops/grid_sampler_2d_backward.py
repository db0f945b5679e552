"""The record of aclnnGridSampler2DBackward.

Sources: the official page (Atlas training series, Atlas A2) and, where cited as a check, the vendor's public
source (ops-cv), which also adds the Atlas A3 series.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from npugrad import rules
from npugrad.changes import numbered, retyped
from npugrad.coordinates import GRID_2D_RULES
from npugrad.dtypes import DType
from npugrad.operator import Finding
from npugrad.ops import _grid_sampler
from npugrad.ops._grid_sampler import BICUBIC
from npugrad.ops._grid_sampler_2d_backward_workloads import WORKLOADS
from npugrad.ops._grid_sampler_points import sampled
from npugrad.products import Product
from npugrad.references.grid_sampler_2d_backward import reference

if TYPE_CHECKING:
    from npugrad.meta import CallMeta

# fmt: off
DOCUMENT = "aclnnGridSampler2DBackward"
_DOCS = {"grad_output": "(N, C, OH, OW), dtype of input. Gradient of the sampled output.",
    "input": "(N, C, H, W) with H and W above 0, float32, float16 or (not on the Atlas training series) "
    "bfloat16. The sampled images.",
    "grid": "(N, OH, OW, 2), dtype of input. Sampling points (x, y), inside the image from -1 to 1.",
    "input_grad": "(N, C, H, W), dtype of input. Gradient of input.", "grid_grad": "(N, OH, OW, 2), dtype "
    "of input. Gradient of grid. With padding zeros it is 0 at a point outside the image, even if "
    "grad_output is NaN or infinite there; PyTorch on a CPU gives NaN."}


_PRODUCTS = {Product.ATLAS_TRAINING: DOCUMENT, Product.ATLAS_A2: DOCUMENT,
    Product.ATLAS_A3: "newer vendor documents and source"}
p = _grid_sampler.page(DOCUMENT, _PRODUCTS, rules.FLOATS, _DOCS, "height width")
_TRAINING = Product.ATLAS_TRAINING
p.types("grad_output input grid input_grad grid_grad", {product: types + (DType.FLOAT64,) *
    (product is not _TRAINING) for product, types in rules.FLOATS.items()}, since="8.5.0")
p.note("values", "2 (bicubic) for interpolationMode is not carried by npugrad", since="9.1.0")


def _is_not_double(call: CallMeta) -> Finding | None:
    is_double = call.tensor("input").dtype is DType.FLOAT64
    return (
        Finding("dtype float64", f"{rules.listed(rules.FLOATS[call.product])} on {call.product.full_name}")
        if is_double
        else None
    )


def _is_not_bicubic(call: CallMeta) -> Finding | None:
    mode = call.integer("interpolation_mode")
    return Finding(str(mode), "0 (bilinear) or 1 (nearest)") if mode == BICUBIC else None


# The page names ND as the storage format but gives no code for others, and the vendor's source accepts any:
# formats are not checked.
p.rule(rules.not_null, "grad_output input grid input_grad grid_grad", row=1, check=3)
p.rule(rules.same_dtype("input"), "grad_output grid input_grad grid_grad", row=1, check=4)
p.rule(rules.dtype_in(tolerated=(DType.FLOAT64,)), "input", row=1, check=5)
_where: dict[str, Any]
for _where in ({"until": "8.5.0"}, {"since": "9.0.0", "products": frozenset({_TRAINING})}):
    p.rule(rules.special("not_double", "does not have data type DOUBLE", _is_not_double,
            p.edited("input", retyped())), "input", row=1, check=5, requires=("input.dtype",),
        vendor="accepts", pick="The document does not list DOUBLE; the vendor's source accepts it. "
        "npugrad: refused.", **_where)
p.rule(rules.one_of_choices(tolerated=(BICUBIC,)), "interpolation_mode", row=3, check=6)
p.rule(rules.special("not_bicubic", "is not 2 (bicubic)", _is_not_bicubic,
        numbered("interpolation_mode", (2,))), "interpolation_mode", row=3, check=6,
    requires=("interpolation_mode.choice",), vendor="accepts", pick="The document lists 0 and 1, as the "
    "vendor's source did in its time; newer source accepts 2. npugrad: refused.")
p.rule(rules.one_of_choices(), "padding_mode", row=3, check=7)
p.rule(rules.rank_in(4, 4), "input grid grad_output", row=2, check=8)
p.rule(rules.same_size("batch"), "grid grad_output", row=4, check=9)
p.rule(rules.same_size("channels"), "grad_output", row=5, check=10)
p.rule(rules.size_in("height", 1), "input", row=8, check=10)
p.rule(rules.size_in("width", 1), "input", row=8, check=10)
p.rule(rules.same_size("out_height"), "grid", row=6, check=11)
p.rule(rules.same_size("out_width"), "grid", row=7, check=11)
p.rule(rules.last_axis(2, "coordinates", "x and y"), "grid", row=9, check=11)
p.rule(rules.same_shape("input"), "input_grad", row=10, check=12)
p.rule(rules.same_shape("grid"), "grid_grad", row=10, check=12)
p.rule(rules.entries(2), "output_mask", check=13, pick=_grid_sampler.MASK_PICK)
_grid_sampler.not_expressible(p, empty=14)


GRID_SAMPLER_2D_BACKWARD = p.record("grid_sampler_2d_backward", wire=2,
    summary="Gradients of two-dimensional grid sampling with respect to the sampled images and the grid.",
    reads=_grid_sampler.reads, reference=reference,
    references_by_rule={rule: partial(reference, rule=rule) for rule in GRID_2D_RULES},
    samples=partial(_grid_sampler.samples, p), workloads=WORKLOADS, make_inputs=_grid_sampler.make_inputs,
    determinism_check=_grid_sampler.determinism_check, min_cann="8.0",
    binding=_grid_sampler.binding("grid_sampler_2d_backward"), sampled=sampled)
"""The record; order of parameters is the order of aclnnGridSampler2DBackwardGetWorkspaceSize."""
