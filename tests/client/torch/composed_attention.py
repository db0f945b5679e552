"""Modules with deformable attention composed of `grid_sample`, under names that `remote` knows and others.

Written for these tests after the interfaces of transformers, mmcv and Mask2Former.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

Tensor = Any  # with its own type, each `grad` would have to be shown not to be None

FUNCTION = """
import torch
from torch.nn.functional import grid_sample

def {name}({parameters}):
    bs, _, nh, ch = {value}.shape
    _, nq, _, nl, points, _ = {locations}.shape
    maps = {value}.split([h * w for h, w in {shapes}], dim=1)
    sampled = []
    for level, (h, w) in enumerate({shapes}):
        image = maps[level].flatten(2).transpose(1, 2).reshape(bs * nh, ch, h, w)
        grid = (2 * {locations} - 1)[:, :, :, level].transpose(1, 2).flatten(0, 1)
        sampled.append(grid_sample(image, grid, mode="bilinear", padding_mode="zeros", align_corners=False))
    weights = {weights}.transpose(1, 2).reshape(bs * nh, 1, nq, nl * points)
    out = (torch.stack(sampled, dim=-2).flatten(-2) * weights).sum(-1)
    return out.view(bs, nh * ch, nq).transpose(1, 2).contiguous()
"""
NAMES = {
    "parameters": "value, value_spatial_shapes, sampling_locations, attention_weights",
    "value": "value",
    "shapes": "value_spatial_shapes",
    "locations": "sampling_locations",
    "weights": "attention_weights",
}
METHOD = """
class MultiScaleDeformableAttention(torch.nn.Module):
    def forward(self, value, value_spatial_shapes, value_spatial_shapes_list, level_start_index,
                sampling_locations, attention_weights, im2col_step):
        return _compose(value, value_spatial_shapes_list, sampling_locations, attention_weights)
"""
MMCV = ("mmcv.ops.multi_scale_deform_attn", "multi_scale_deformable_attn_pytorch")
FUNCTIONS = [
    MMCV,
    ("transformers.models.oneformer.modeling_oneformer", "multi_scale_deformable_attention"),
    ("mask2former.modeling.pixel_decoder.ops.functions.ms_deform_attn_func", "ms_deform_attn_core_pytorch"),
    ("models.ops.functions.ms_deform_attn_func", "ms_deform_attn_core_pytorch"),
    ("kornia.models.rt_detr.architecture.rtdetr_head", "_deformable_attention_kernel"),
    ("ultralytics.nn.modules.utils", "multi_scale_deformable_attn_pytorch"),
]
TRANSFORMERS = "transformers.models.deformable_detr.modeling_deformable_detr"
LEVELS = ((9, 7), (4, 5), (2, 1))


def module(patch: pytest.MonkeyPatch, name: str, source: str) -> Any:
    """A module of that name, imported for the time of a test."""
    made = ModuleType(name)
    exec(source, vars(made))
    patch.setitem(sys.modules, name, made)
    return made


def library(patch: pytest.MonkeyPatch, name: str = MMCV[0], function: str = MMCV[1], **names: str) -> Any:
    """A module with one function."""
    return module(patch, name, FUNCTION.format(name=function, **{**NAMES, **names}))


def transformers(patch: pytest.MonkeyPatch) -> Any:
    """A module with transformers' class."""
    return module(patch, TRANSFORMERS, FUNCTION.format(name="_compose", **NAMES) + METHOD)


def operands(
    dtype: Any = torch.float32, *, ch: int = 8, nq: int = 11, levels: Any = LEVELS, seed: int = 7
) -> list[Any]:
    """Value, shapes, locations and weights; no point is near an edge between pixels, some are outside."""
    draw = torch.Generator().manual_seed(seed)
    bs, nh, points = 2, 3, 2
    sizes = torch.tensor(levels)
    value = torch.randn(bs, int(sizes.prod(1).sum()), nh, ch, generator=draw)
    shape = (bs, nq, nh, len(levels), points, 2)
    inside = torch.rand(shape, generator=draw) * 0.7 + 0.15
    pixel = torch.randint(-1, 9, shape, generator=draw) % (sizes.flip(1)[:, None] + 1) - 1
    location = (pixel + inside + 0.5) / sizes.flip(1)[:, None]
    weight = torch.rand(shape[:-1], generator=draw)
    floats = [t.to(dtype).requires_grad_() for t in (value, location, weight)]
    return [floats[0], [(int(h), int(w)) for h, w in levels], *floats[1:]]


def gradients(call: list[Any], out: Tensor) -> list[Tensor]:
    """Of a fixed loss, by value, locations and weights."""
    grad = torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out.dtype)
    return list(torch.autograd.grad(out, [call[0], call[2], call[3]], grad))
