"""The record of aclnnGridSampler3DBackward.

Sources: the official page (release 9.1.0) and, where cited as a check, the vendor's public source (ops-cv).
The format of input determines the axis of the channels in input and grad_output: last in NDHWC, else second.
Rules number the axes as in NCDHW.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from npugrad import rules
from npugrad.changes import retyped, stored
from npugrad.coordinates import GRID_3D_RULES
from npugrad.dtypes import DType, Format
from npugrad.meta import TensorMeta
from npugrad.operator import Finding
from npugrad.ops import _grid_sampler
from npugrad.ops._grid_sampler_3d_backward_workloads import WORKLOADS
from npugrad.ops._grid_sampler_points import sampled
from npugrad.page import Rule
from npugrad.products import Product
from npugrad.references.grid_sampler_3d_backward import reference

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npugrad.meta import CallMeta
    from npugrad.page import Page
    from npugrad.releases import CannRelease

# fmt: off
DOCUMENT = "aclnnGridSampler3DBackward"
DTYPES = {product: (*dtypes, DType.FLOAT64) for product, dtypes in rules.FLOATS.items()}
_DOCS = {"grad_output": "(N, C, OD, OH, OW), dtype of input. Gradient of the sampled output.",
    "input": "(N, C, D, H, W) with D, H and W above 0, float32, float16, float64 or (not on the Atlas "
    "training series) bfloat16. The sampled volumes.",
    "grid": "(N, OD, OH, OW, 3), dtype of input. Sampling points (x, y, z), inside the volume from -1 to 1.",
    "input_grad": "(N, C, D, H, W), dtype of input. Gradient of input.",
    "grid_grad": "(N, OD, OH, OW, 3), dtype of input. Gradient of grid."}


def channels_first(meta: TensorMeta) -> tuple[int, ...]:
    """Order of an image's axes that gives N, C, D, H, W, by its format."""
    axes = tuple(range(meta.rank))
    return (0, 4, 1, 2, 3) if meta.format is Format.NDHWC and meta.rank == 5 else axes


def _arranged(call: CallMeta) -> tuple[CallMeta, str]:
    """The call with its images as N, C, D, H, W if input is stored as NDHWC."""
    image, gradient = call.inputs["input"], call.inputs["grad_output"]
    if not image or not gradient or image.format is not Format.NDHWC or gradient.rank != image.rank:
        return call, ""
    axes = channels_first(image)
    images = {"input": image.permuted(axes), "grad_output": gradient.permuted(axes)}
    return call.with_inputs(**images), ", of NDHWC taken as NCDHW"


p = _grid_sampler.page(DOCUMENT, dict.fromkeys(Product, DOCUMENT), DTYPES, _DOCS, "depth height width",
    release="9.1.0", order=channels_first, arranged=_arranged)


def _is_not_bfloat16(call: CallMeta) -> Finding | None:
    if call.tensor("input").dtype is not DType.BFLOAT16:
        return None
    return Finding("dtype bfloat16", f"{rules.listed(DTYPES[call.product])} on {call.product.full_name}")


def _same_format(page: Page, name: str) -> Rule:
    def check(call: CallMeta) -> Finding | None:
        meta, leader = rules.present(call, name), call.tensor("input").format
        if meta is None or (meta.format is Format.NDHWC) == (leader is Format.NDHWC):
            return None
        expected = Format.NDHWC if leader is Format.NDHWC else f"{Format.ND} or {Format.NCDHW}"
        return Finding(f"format {meta.format}", f"{expected}, as input")

    return Rule(kind="same_format", text="has its channels where input has them: last in NDHWC, else second",
        check=check, breaks=page.edited(name, stored()), about=("input",),
        requires=(f"{name}.format", "input.format"))


def _double_format(call: CallMeta) -> Finding | None:
    image = call.tensor("input")
    if (image.dtype, image.format) != (DType.FLOAT64, Format.NDHWC):
        return None
    return Finding(f"format {image.format} with {image.dtype}", f"{Format.ND} or {Format.NCDHW}")


def _channels_last(call: CallMeta) -> Iterator[CallMeta]:
    moved = {name: call.tensor(name).permuted((0, 2, 3, 4, 1)) for name in ("grad_output", "input")}
    last = {name: TensorMeta(meta.dtype, meta.shape, Format.NDHWC) for name, meta in moved.items()}
    yield replace(call, outputs={}).with_inputs(**last)


p.rule(rules.not_null, "grad_output input grid input_grad grid_grad", row=1, check=3)
p.rule(rules.same_dtype("input"), "grad_output grid input_grad grid_grad", row=1, check=4)
p.rule(rules.dtype_in(tolerated=(DType.BFLOAT16,)), "input", row=1, check=5)
p.rule(rules.special("not_bfloat16", "does not have data type BFLOAT16", _is_not_bfloat16,
        p.edited("input", retyped())), "input", row=1, check=5, requires=("input.dtype",),
    products=frozenset({Product.ATLAS_TRAINING}), vendor="accepts", pick="The document excepts BFLOAT16 on "
    "the Atlas training series; the vendor's source accepts it. npugrad: refused.")
p.rule(rules.one_of_choices(), "padding_mode interpolation_mode", row=2, check=6)
p.rule(rules.rank_in(5, 5), "input grid grad_output", row=3, check=7)
p.rule(rules.same_size("batch"), "grid grad_output", row=3, check=8)
p.rule(rules.same_size("channels"), "grad_output", row=3, check=9)
for _side in ("depth", "height", "width"):
    p.rule(rules.size_in(_side, 1), "input", check=14, vendor="accepts",
        pick="The document says that D, H and W of input may not be 0, and gives no code; the vendor's "
        "source accepts it, and refuses the like in two dimensions with 161002. npugrad: 161002.")
for _side in ("depth", "height", "width"):
    p.rule(rules.same_size(f"out_{_side}"), "grid", row=3, check=10)
p.rule(rules.last_axis(3, "coordinates", "x, y and z"), "grid", row=3, check=11)
p.rule(rules.same_shape("input"), "input_grad", row=3, check=12)
p.rule(rules.same_shape("grid"), "grid_grad", row=3, check=12)
p.rule(rules.entries(2), "output_mask", check=13, pick=_grid_sampler.MASK_PICK)
p.rule(rules.format_in(Format.ND, Format.NCDHW, Format.NDHWC), "grad_output input grid input_grad grid_grad",
    vendor="accepts", pick="The document lists NCDHW and NDHWC, for grid and gridGrad NDHWC alone, passes "
    "ND in its example, and gives no code for others; the vendor's source accepts any. npugrad: others "
    "refused.")
p.rule(_same_format, "grad_output input_grad", check=16, vendor="accepts",
    pick="The document wants inputGrad in the format of input, without a code; the vendor's source reads "
    "all by the format of input and accepts another. npugrad: 161002, for gradOutput as well.")
p.rule(rules.special("double_format", "", _double_format, _channels_last), "input",
    text="With DOUBLE, gradOutput, input and inputGrad are not stored as NDHWC.", check=15,
    cite="grad_output input_grad", requires=("input.format",), vendor="accepts",
    pick="The document excepts NDHWC for DOUBLE, and gives no code; the vendor's source accepts it. "
    "npugrad: 161002.")
_grid_sampler.not_expressible(p, empty=17)
p.not_expressible("determinism is an option of the call, not a precondition", entry=1)


def _determinism_check(call: CallMeta, release: CannRelease | None) -> str | None:
    checked = call if _grid_sampler.accepts_unchecked(call) else GRID_SAMPLER_3D_BACKWARD.ordered(call)
    return _grid_sampler.determinism_check(checked, release)


GRID_SAMPLER_3D_BACKWARD = p.record("grid_sampler_3d_backward", wire=6,
    summary="Gradients of three-dimensional grid sampling with respect to the sampled volumes and the grid.",
    reads=_grid_sampler.reads, reference=reference,
    references_by_rule={rule: partial(reference, rule=rule) for rule in GRID_3D_RULES},
    samples=partial(_grid_sampler.samples, p), workloads=WORKLOADS, make_inputs=_grid_sampler.make_inputs,
    determinism_check=_determinism_check, min_cann="8.5",
    binding=_grid_sampler.binding("grid_sampler_3d_backward"), sampled=sampled)
"""The record; order of parameters is the order of aclnnGridSampler3DBackwardGetWorkspaceSize."""
