"""Multi-scale deformable attention: the forward pass here, in blocks; its gradient from the service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import grid_sample

from npugrad_client._legality import DEFORMABLE_ATTENTION as OPERATOR
from npugrad_client._legality import require_client, require_legal_deformable_attention
from npugrad_client._policy import Options
from npugrad_client.errors import UnsafeLevels
from npugrad_client.torch._calls import cast_given, metas, require_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from npugrad_client import Client, MultiScaleDeformableAttentionGradResult

_NAMES = ("value", "spatial_shape", "level_start_index", "location", "attn_weight")
_BLOCK_BYTES = 32 * 2**20
"""Samples of one block of queries, in float32."""
_OUTSIDE = 4.0
"""A coordinate of `grid_sample` so far out that no corner of any level is near."""


def multi_scale_deformable_attention(
    value: Tensor,
    spatial_shape: Tensor,
    level_start_index: Tensor,
    location: Tensor,
    attn_weight: Tensor,
    *,
    client: Client,
    compute_dtype: torch.dtype | None = None,
    timeout_s: float | None = None,
    deterministic: bool = False,
    priority: int = 0,
    label: str = "",
    verify: bool = False,
) -> Tensor:
    """Multi-scale deformable attention whose gradient the service computes.

    The forward pass runs here, in float32 whatever the types, and needs some 32 MiB beside its operands. The
    gradient has no gradient of its own.

    Args:
        value: (bs, nk, nh, ch), ch a multiple of 8 up to 256, nh up to 16. The feature maps of all levels.
            float32, float16 or bfloat16.
        spatial_shape: (nl, 2), nl up to 16. Height and width of each level. int32 or int64.
        level_start_index: (nl). First key of each level. int32 or int64.
        location: (bs, nq, nh, nl, np, 2), nq below 500000, np up to 16, dtype of value. Sampling points
            (x, y), 0 to 1 across a level. One outside of the level, or at NaN, reads nothing.
        attn_weight: (bs, nq, nh, nl, np), dtype of value. Attention weight of each sampling point. That of a
            point that reads nothing does not matter, be it NaN or infinite.
        client: Who calls the service in the backward pass.
        compute_dtype: Type to cast value, location and attn_weight to, so that others than the three above,
            and several at once, can be used; the result has the type of value again. None casts nothing.
        timeout_s: Deadline of the call in seconds; None for the client's default.
        deterministic: Ask for results that do not depend on the order of summation.
        priority: Calls of higher priority leave the queue first; -100 to 100.
        label: Name of the caller or experiment.
        verify: Have the server recompute the call and refuse a result that differs.

    Returns:
        (bs, nq, nh*ch), dtype of value.

    Raises:
        NullOperand: 161001. An operand is None.
        InvalidOperand: 161002. An operand breaks a documented rule; from here, before anything is computed.
        UnsafeLevels: A level reaches outside of value.
        TypeError: An operand is no dense CPU tensor, or the client no `Client`.

    Example:
        >>> out = multi_scale_deformable_attention(                        # doctest: +SKIP
        ...     value, spatial_shape, level_start_index, location, attn_weight, client=client)
        >>> out.sum().backward()                                           # doctest: +SKIP
    """
    require_client("multi_scale_deformable_attention", client)
    options = Options(
        timeout_s=timeout_s, deterministic=deterministic, priority=priority, label=label, verify=verify
    )
    given = (value, spatial_shape, level_start_index, location, attn_weight)
    require_tensors(OPERATOR, dict(zip(_NAMES, given, strict=True)))
    floats: tuple[Tensor, ...] = (value, location, attn_weight)
    if compute_dtype is not None:
        floats = cast_given(floats, compute_dtype)
    operands = (floats[0], spatial_shape, level_start_index, *floats[1:])
    result: Tensor = _DeformableAttention.apply(*operands, client, options)  # type: ignore[no-untyped-call]
    return result.to(value.dtype)


class _DeformableAttention(Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *operands, ctx.client, ctx.options = arguments
        result = forward(*operands)
        ctx.save_for_backward(*operands)
        return result

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator takes ctx its name
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        grads = gradients(ctx.client, ctx.options, *ctx.saved_tensors, *grad_outputs)
        return grads.grad_value, None, None, grads.grad_location, grads.grad_attn_weight, None, None


def gradients(
    client: Client, options: Options, *operands: Tensor, out: dict[str, Tensor] | None = None
) -> MultiScaleDeformableAttentionGradResult:
    """Calls the service with the six operands in the order of the documents."""
    value, spatial_shape, level_start_index, location, attn_weight, grad_output = operands
    return client.multi_scale_deformable_attention_grad(
        value=value,
        spatial_shape=spatial_shape,
        level_start_index=level_start_index,
        location=location,
        attn_weight=attn_weight,
        grad_output=grad_output,
        out=out,
        **options,
    )


def forward(
    value: Tensor, spatial_shape: Tensor, level_start_index: Tensor, location: Tensor, attn_weight: Tensor
) -> Tensor:
    """The attention itself, (bs, nq, nh*ch) in the type of value; operands and errors as above."""
    operands = (value, spatial_shape, level_start_index, location, attn_weight)
    require_legal_deformable_attention(metas(OPERATOR, dict(zip(_NAMES, operands, strict=True))))
    levels = list(_levels(spatial_shape, level_start_index, value.shape[1]))
    bs, nq = location.shape[:2]
    _, _, nh, ch = value.shape
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        result = value.new_zeros((bs, nq, nh, ch), dtype=torch.float32)
        for sample in range(bs):
            for number, (start, height, width) in enumerate(levels):
                keys = value[sample, start : start + height * width]
                maps = keys.reshape(height, width, nh, ch).permute(2, 3, 0, 1).float().contiguous()
                _add_level(
                    result[sample], maps, location[sample, :, :, number], attn_weight[sample, :, :, number]
                )
        return result.reshape(bs, nq, nh * ch).to(value.dtype)


def _add_level(result: Tensor, maps: Tensor, location: Tensor, weight: Tensor) -> None:
    """Adds what one level of one sample contributes.

    Args:
        result: (nq, nh, ch), added to.
        maps: (nh, ch, height, width).
        location: (nq, nh, np, 2).
        weight: (nq, nh, np).
    """
    nq, nh, count, _ = location.shape
    if not maps.numel():
        return
    sizes = torch.tensor((maps.shape[3], maps.shape[2]), dtype=torch.float32)  # as x, y
    block = max(1, _BLOCK_BYTES // (4 * max(1, maps.shape[1] * nh * count)))
    for begin in range(0, nq, block):
        span = slice(begin, begin + block)
        points = location[span].float()
        pixels = points * sizes - 0.5
        # What is outside contributes nothing, however far: not even NaN, as 0 times an infinite weight would.
        # The test is that of the CUDA kernels of Deformable-DETR (ms_deform_im2col_cuda.cuh) and mmcv.
        is_outside = ~((pixels > -1) & (pixels < sizes)).all(-1)
        grid = (2 * points - 1).nan_to_num(nan=_OUTSIDE).clamp(-_OUTSIDE, _OUTSIDE)
        samples = grid_sample(maps, grid.transpose(0, 1), align_corners=False)  # (nh, ch, block, np)
        weights = weight[span].float().masked_fill(is_outside, 0).transpose(0, 1).unsqueeze(1)
        result[span] += (samples * weights).sum(-1).permute(2, 0, 1)


def _levels(spatial_shape: Tensor, level_start_index: Tensor, keys: int) -> Iterator[tuple[int, int, int]]:
    """First key, height and width of each level, all inside of value."""
    pairs = zip(level_start_index.tolist(), spatial_shape.tolist(), strict=True)
    for number, (start, (height, width)) in enumerate(pairs):
        if height < 0 or width < 0 or start < 0 or start + height * width > keys:
            raise UnsafeLevels(
                f"{OPERATOR}: spatial_shape: found level {number} of {height} x {width} from key {start}; "
                f"expected one inside of value, which has {keys} keys",
                operator=OPERATOR,
                operand="spatial_shape",
            )
        yield start, height, width
