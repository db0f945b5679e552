"""A module in the style of Deformable-DETR's code, and one in mmcv's: what `drop_in` stands in for.

Written for these tests after the two projects' interfaces: an autograd function around a compiled
extension, and a module that makes locations and weights from queries.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from torch import Tensor


class DetrFunction(Function):
    """Calls the extension the way Deformable-DETR does: gradients come back."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        *operands, ctx.im2col_step = arguments
        extension = importlib.import_module("MultiScaleDeformableAttention")
        ctx.save_for_backward(*operands)
        return extension.ms_deform_attn_forward(*operands, ctx.im2col_step)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        extension = importlib.import_module("MultiScaleDeformableAttention")
        value, locations, weights = extension.ms_deform_attn_backward(
            *ctx.saved_tensors, grad_output, ctx.im2col_step
        )
        return value, None, None, locations, weights, None


class MmcvFunction(Function):
    """Calls the extension the way mmcv does: gradients are filled in place, and the step has its name."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        *operands, ctx.im2col_step = arguments
        extension = importlib.import_module("mmcv._ext")
        ctx.save_for_backward(*operands)
        return extension.ms_deform_attn_forward(*operands, im2col_step=ctx.im2col_step)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        value, shapes, starts, locations, weights = ctx.saved_tensors
        grads = [torch.zeros_like(t) for t in (value, locations, weights)]
        importlib.import_module("mmcv._ext").ms_deform_attn_backward(
            *(value, shapes, starts, locations, weights, grad_output.contiguous(), *grads),
            im2col_step=ctx.im2col_step,
        )
        return grads[0], None, None, grads[1], grads[2], None


def composed(value: Any, shapes: Any, starts: Any, locations: Any, weights: Any, _: int = 0) -> Any:
    """The same by `grid_sample` and autograd, as the papers' own code has it, in any type."""
    bs, _keys, heads, channels = value.shape
    queries, points = locations.shape[1], locations.shape[4]
    sampled = []
    for level, ((h, w), start) in enumerate(zip(shapes.tolist(), starts.tolist(), strict=True)):
        maps = value[:, start : start + h * w].permute(0, 2, 3, 1).reshape(bs * heads, channels, h, w)
        grid = (2 * locations[:, :, :, level] - 1).transpose(1, 2).reshape(bs * heads, queries, points, 2)
        sampled.append(F.grid_sample(maps, grid, align_corners=False))
    flat = weights.transpose(1, 2).reshape(bs * heads, 1, queries, -1)
    return (torch.cat(sampled, -1) * flat).sum(-1).reshape(bs, heads * channels, queries).transpose(1, 2)


class PlainFunction:
    """In place of the two functions."""

    apply = staticmethod(composed)


class Attention(nn.Module):
    """Multi-scale deformable attention of queries over flattened feature maps."""

    def __init__(
        self, function: Any, width: int = 32, heads: int = 4, levels: int = 2, points: int = 2
    ) -> None:
        super().__init__()
        self.function, self.heads, self.levels, self.points = function, heads, levels, points
        self.offsets = nn.Linear(width, heads * levels * points * 2)
        self.weights = nn.Linear(width, heads * levels * points)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, query: Tensor, reference: Tensor, maps: Tensor, shapes: Tensor) -> Any:
        bs, queries, width = query.shape
        starts = torch.cat((shapes.new_zeros(1), shapes.prod(1).cumsum(0)[:-1]))
        value = self.value(maps).reshape(bs, -1, self.heads, width // self.heads)
        per_point = (bs, queries, self.heads, self.levels, self.points)
        offsets = self.offsets(query).reshape(*per_point, 2) / shapes.flip(1)[:, None]
        weights = self.weights(query).reshape(*per_point[:3], -1).softmax(-1).reshape(per_point)
        locations = reference[:, :, None, None, None] + offsets
        return self.out(self.function.apply(value, shapes, starts, locations, weights, 64))
