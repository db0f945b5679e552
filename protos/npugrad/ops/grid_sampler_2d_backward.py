"""The record of aclnnGridSampler2DBackward.

Sources: the official page "aclnnGridSampler2DBackward" (Atlas training series, Atlas A2) and, where cited
as such, the vendor's public source (ops-cv), which also adds the Atlas A3 series. The
constraints are in `_grid_sampler_2d_backward_rules`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from npugrad.coordinates import GRID_2D_RULES
from npugrad.dtypes import DType
from npugrad.meta import CallMeta, TensorMeta
from npugrad.operator import OpRecord
from npugrad.ops import _grid_sampler
from npugrad.ops._grid_sampler_2d_backward_rules import CONSTRAINTS, DOCUMENT, DTYPES, NOT_EXPRESSIBLE
from npugrad.ops._grid_sampler_2d_backward_workloads import WORKLOADS
from npugrad.ops._grid_sampler_points import sampled
from npugrad.ops._grid_sampler_rules import LIKE, accepts_unchecked
from npugrad.products import Product
from npugrad.references.grid_sampler_2d_backward import reference

if TYPE_CHECKING:
    from collections.abc import Mapping

_DOCS = {
    "grad_output": "(N, C, OH, OW), dtype of input. Gradient of the sampled output.",
    "input": "(N, C, H, W) with H and W above 0, float32, float16 or (not on the Atlas training series) "
    "bfloat16. The sampled images.",
    "grid": "(N, OH, OW, 2), dtype of input. Sampling points (x, y), inside the image from -1 to 1.",
    "input_grad": "(N, C, H, W), dtype of input. Gradient of input.",
    "grid_grad": "(N, OH, OW, 2), dtype of input. Gradient of grid. With padding zeros it is 0 at a "
    "point outside the image, even if grad_output is NaN or infinite there; PyTorch on a CPU gives NaN.",
}


def build(
    *,
    dtype: DType | str = DType.FLOAT32,
    product: Product = Product.ATLAS_A2,
    n: int = 2,
    c: int = 3,
    h: int = 4,
    w: int = 5,
    oh: int = 3,
    ow: int = 2,
    interpolation_mode: int = 0,
    padding_mode: int = 0,
    align_corners: bool = False,
    output_mask: tuple[bool, ...] | None = (True, True),
) -> CallMeta:
    """A legal call: n images of c channels and h x w pixels, each sampled at oh x ow points."""
    return CallMeta(
        inputs={
            "grad_output": TensorMeta(dtype, (n, c, oh, ow)),
            "input": TensorMeta(dtype, (n, c, h, w)),
            "grid": TensorMeta(dtype, (n, oh, ow, 2)),
        },
        attrs={
            "interpolation_mode": interpolation_mode,
            "padding_mode": padding_mode,
            "align_corners": align_corners,
            "output_mask": output_mask,
        },
        product=product,
    )


def _output_metas(call: CallMeta) -> Mapping[str, TensorMeta]:
    return {
        name: (call.declared(name) or _inferred(call.tensor(like))).contiguous()
        for name, like in LIKE.items()
    }


def _inferred(like: TensorMeta) -> TensorMeta:
    return TensorMeta(like.dtype, like.shape)


GRID_SAMPLER_2D_BACKWARD = OpRecord(
    name="grid_sampler_2d_backward",
    aclnn_name=DOCUMENT,
    summary="Gradients of two-dimensional grid sampling with respect to the sampled images and the grid.",
    documents=(DOCUMENT,),
    repositories=("ops-cv",),
    params=_grid_sampler.params(_DOCS, DTYPES),
    products={
        Product.ATLAS_TRAINING: DOCUMENT,
        Product.ATLAS_A2: DOCUMENT,
        Product.ATLAS_A3: "newer vendor documents and source",
    },
    constraints=CONSTRAINTS,
    not_expressible=NOT_EXPRESSIBLE,
    output_metas=_output_metas,
    reads=_grid_sampler.reads,
    reference=reference,
    references_by_rule={rule: partial(reference, rule=rule) for rule in GRID_2D_RULES},
    build=build,
    samples=partial(_grid_sampler.samples, build, DTYPES, "hw"),
    workloads=WORKLOADS,
    make_inputs=_grid_sampler.make_inputs,
    extra_tolerance=lambda inputs, attrs, output: 0.0,
    determinism_check=_grid_sampler.determinism_check,
    min_cann="8.0",
    binding=_grid_sampler.binding("grid_sampler_2d_backward"),
    sampled=sampled,
    accepts_unchecked=accepts_unchecked,
)
"""The record; order of params is the order of aclnnGridSampler2DBackwardGetWorkspaceSize."""
