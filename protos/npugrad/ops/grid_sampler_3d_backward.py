"""The record of aclnnGridSampler3DBackward.

Sources: the official page "aclnnGridSampler3DBackward" of 9.1.0 and, where cited as such, the vendor's public
source (ops-cv). The constraints are in `_grid_sampler_3d_backward_rules`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from npugrad.coordinates import GRID_3D_RULES
from npugrad.dtypes import DType
from npugrad.meta import CallMeta, TensorMeta
from npugrad.operator import OpRecord, TensorParam
from npugrad.ops import _grid_sampler
from npugrad.ops._grid_sampler_3d_backward_rules import (
    CONSTRAINTS,
    DOCUMENT,
    DTYPES,
    NOT_EXPRESSIBLE,
    channels_first,
)
from npugrad.ops._grid_sampler_3d_backward_workloads import WORKLOADS
from npugrad.ops._grid_sampler_rules import LIKE, accepts_unchecked
from npugrad.products import Product
from npugrad.references.grid_sampler_3d_backward import reference

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npugrad.releases import CannRelease

_DOCS = {
    "grad_output": "(N, C, OD, OH, OW), dtype of input. Gradient of the sampled output.",
    "input": "(N, C, D, H, W) with D, H and W above 0, float32, float16, float64 or (not on the Atlas "
    "training series) bfloat16. The sampled volumes.",
    "grid": "(N, OD, OH, OW, 3), dtype of input. Sampling points (x, y, z), inside the volume from -1 to 1.",
    "input_grad": "(N, C, D, H, W), dtype of input. Gradient of input.",
    "grid_grad": "(N, OD, OH, OW, 3), dtype of input. Gradient of grid.",
}
_PARAMS = tuple(
    replace(param, axes=channels_first)
    if isinstance(param, TensorParam) and not param.name.startswith("grid")
    else param
    for param in _grid_sampler.params(_DOCS, DTYPES)
)


def build(
    *,
    dtype: DType | str = DType.FLOAT32,
    product: Product = Product.ATLAS_A2,
    n: int = 2,
    c: int = 3,
    d: int = 3,
    h: int = 4,
    w: int = 5,
    od: int = 2,
    oh: int = 3,
    ow: int = 2,
    interpolation_mode: int = 0,
    padding_mode: int = 0,
    align_corners: bool = False,
    output_mask: tuple[bool, ...] | None = (True, True),
) -> CallMeta:
    """A legal call: n volumes of c channels and d x h x w voxels, each sampled at od x oh x ow points."""
    return CallMeta(
        inputs={
            "grad_output": TensorMeta(dtype, (n, c, od, oh, ow)),
            "input": TensorMeta(dtype, (n, c, d, h, w)),
            "grid": TensorMeta(dtype, (n, od, oh, ow, 3)),
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
    metas = {name: call.declared(name) or call.tensor(like) for name, like in LIKE.items()}
    return {name: meta.contiguous() for name, meta in metas.items()}


def _determinism_check(call: CallMeta, release: CannRelease | None) -> str | None:
    checked = call if accepts_unchecked(call) else GRID_SAMPLER_3D_BACKWARD.ordered(call)
    return _grid_sampler.determinism_check(checked, release)


GRID_SAMPLER_3D_BACKWARD = OpRecord(
    name="grid_sampler_3d_backward",
    aclnn_name=DOCUMENT,
    summary="Gradients of three-dimensional grid sampling with respect to the sampled volumes and the grid.",
    documents=(DOCUMENT,),
    repositories=("ops-cv",),
    params=_PARAMS,
    products=dict.fromkeys((Product.ATLAS_TRAINING, Product.ATLAS_A2, Product.ATLAS_A3), DOCUMENT),
    constraints=CONSTRAINTS,
    not_expressible=NOT_EXPRESSIBLE,
    output_metas=_output_metas,
    reads=_grid_sampler.reads,
    reference=reference,
    references_by_rule={rule: partial(reference, rule=rule) for rule in GRID_3D_RULES},
    build=build,
    samples=partial(_grid_sampler.samples, build, DTYPES, "dhw"),
    workloads=WORKLOADS,
    make_inputs=_grid_sampler.make_inputs,
    extra_tolerance=lambda inputs, attrs, output: 0.0,
    determinism_check=_determinism_check,
    min_cann="8.5",
    binding=_grid_sampler.binding("grid_sampler_3d_backward"),
    accepts_unchecked=accepts_unchecked,
)
"""The record; order of params is the order of aclnnGridSampler3DBackwardGetWorkspaceSize."""
