"""Multi-scale deformable attention as a formula of elementary operators, and its gradient from that.

For calls that are not sent: any consistent sizes, any floating-point types, differentiable again. Coordinates
are those of the compiled operators, location * size - 0.5. Computes in float32, or in float64 if an operand
is float64.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from npugrad.ops import get_operator
from npugrad_client._legality import DEFORMABLE_ATTENTION as OPERATOR

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    Level = tuple[int, int, int]

_BLOCK_BYTES = 32 * 2**20
"""Size of what one corner of one level reads for a block of queries; about five exist at once per level."""


def levels_of(value: Tensor, spatial_shape: Tensor, level_start_index: Tensor) -> list[Level]:
    """First key, height and width of each level, all inside value.

    Raises:
        UnsafeLevels: One is not, as the service would say.
    """
    operands: dict[str, Any] = {
        "value": value,
        "spatial_shape": spatial_shape.numpy(),
        "level_start_index": level_start_index.numpy(),
    }
    get_operator(OPERATOR).data_check(operands, {})
    pairs = zip(level_start_index.tolist(), spatial_shape.tolist(), strict=True)
    return [(start, height, width) for start, (height, width) in pairs]


def wide(*tensors: Tensor) -> torch.dtype:
    """The type to compute in."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def is_near(location: Tensor, height: int, width: int) -> Tensor:
    """Whether points (*, 2), (x, y), are near enough to a level to read anything from it; NaN is not.

    The test is that of the CUDA kernels of Deformable-DETR (ms_deform_im2col_cuda.cuh) and mmcv.
    """
    size = location.new_tensor((width, height))
    at = location * size - 0.5
    return ((at > -1) & (at < size)).all(-1)


def attend(
    value: Tensor, spatial_shape: Tensor, level_start_index: Tensor, location: Tensor, attn_weight: Tensor
) -> Tensor:
    """The attention, (bs, nq, nh*ch) in the type of value, differentiable any number of times.

    It needs memory for everything it reads, about ten times (bs, nq, nh, nl, np, ch).
    """
    levels = levels_of(value, spatial_shape, level_start_index)
    dtype = wide(value, location, attn_weight)
    with torch.autocast("cpu", enabled=False):
        padded, points, weights = _padded(value.to(dtype)), location.to(dtype), attn_weight.to(dtype)
        samples = [_attend(*each, levels) for each in zip(padded, points, weights, strict=True)]
        shape = (*location.shape[:2], value.shape[2] * value.shape[3])
        return (torch.stack(samples) if samples else padded[:, :0]).reshape(shape).to(value.dtype)


def gradients(
    value: Tensor,
    spatial_shape: Tensor,
    level_start_index: Tensor,
    location: Tensor,
    attn_weight: Tensor,
    grad_output: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of value, location and attn_weight in their types, computed in blocks of queries."""
    levels = levels_of(value, spatial_shape, level_start_index)
    dtype = wide(value, location, attn_weight)
    _, _, nh, ch = value.shape
    grads = [torch.zeros_like(t, dtype=dtype) for t in (value, location, attn_weight)]
    reads = max(1, nh * ch * location.shape[4]) * dtype.itemsize
    block = max(1, _BLOCK_BYTES // reads)
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        for sample in range(value.shape[0]):
            keys = _leaf(_padded(value[sample : sample + 1].detach().to(dtype))[0])
            for begin in range(0, location.shape[1], block):
                here = (sample, slice(begin, begin + block))
                points, weights = (_leaf(t[here].detach().to(dtype)) for t in (location, attn_weight))
                out = _attend(keys, points, weights, levels)
                upstream = grad_output[here].detach().to(dtype).reshape(out.shape)
                found = torch.autograd.grad(out, (keys, points, weights), upstream, materialize_grads=True)
                grads[0][sample] += found[0][:-1]
                grads[1][here], grads[2][here] = found[1:]
    return grads[0].to(value.dtype), grads[1].to(location.dtype), grads[2].to(attn_weight.dtype)


def gradients_of_gradients(*operands: Tensor, second: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Gradients of value, location, attn_weight and grad_output, from those of the results of `gradients`."""
    with torch.enable_grad():
        value, shapes, starts, location, weight, upstream = (
            _leaf(t.detach()) if t.is_floating_point() else t for t in operands
        )
        out, floats = attend(value, shapes, starts, location, weight), (value, location, weight)
        first = torch.autograd.grad(out, floats, upstream, create_graph=True, materialize_grads=True)
        return torch.autograd.grad(first, (*floats, upstream), second, materialize_grads=True)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.requires_grad_()


def _padded(value: Tensor) -> Tensor:
    """(bs, nk + 1, nh, ch): with a last key of zeros, for corners outside a level."""
    return torch.cat((value, value.new_zeros((value.shape[0], 1, *value.shape[2:]))), 1)


def _attend(keys: Tensor, location: Tensor, weight: Tensor, levels: Sequence[Level]) -> Tensor:
    """(nq, nh, ch): the attention of one sample.

    Args:
        keys: (nk + 1, nh, ch), padded; of the type of the others.
        location: (nq, nh, nl, np, 2).
        weight: (nq, nh, nl, np).
        levels: First key, height and width of each.
    """
    last, heads = keys.shape[0] - 1, torch.arange(keys.shape[1]).unsqueeze(1)
    flat = keys.flatten(0, 1)
    total = keys[-1].expand(location.shape[0], *keys.shape[1:])  # zeros
    for number, (start, height, width) in enumerate(levels):
        points = location[:, :, number]
        near = is_near(points, height, width)
        # Neither a point outside nor its weight may enter a product: 0 times NaN is NaN.
        weights = weight[:, :, number].where(near, 0)
        at = (points * points.new_tensor((width, height)) - 0.5).where(near.unsqueeze(-1), 0)
        first = at.detach().floor()
        share, column, row = at - first, first[..., 0].long(), first[..., 1].long()
        for right, down in itertools.product((0, 1), repeat=2):
            x, y = column + right, row + down
            inside = near & (x >= 0) & (x < width) & (y >= 0) & (y < height)
            key = (start + y * width + x).where(inside, last)
            part = (share[..., 0] if right else 1 - share[..., 0]) * (
                share[..., 1] if down else 1 - share[..., 1]
            )
            read = flat[key * keys.shape[1] + heads]  # (nq, nh, np, ch)
            total = total + (read * (part * weights).unsqueeze(-1)).sum(2)
    return total
