"""Multi-scale deformable attention: local forward pass in blocks, gradient from the service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import grid_sample

from npugrad.usage import reports_usage
from npugrad_client._fitting import as_sent, fits
from npugrad_client._legality import DEFORMABLE_ATTENTION as OPERATOR
from npugrad_client._legality import require_client, require_legal_deformable_attention
from npugrad_client._policy import STRICT, Options, PolicyEngine
from npugrad_client.torch._calls import cast_given, metas, require_tensors
from npugrad_client.torch._deformable_gradient import (
    gradients,
    gradients_of_gradients,
    is_near,
    levels_of,
    wide,
)
from npugrad_client.torch._translation import AutogradCall

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from npugrad_client import Client
    from npugrad_client._policy import Policies

_NAMES: tuple[str, ...] = ("value", "spatial_shape", "level_start_index", "location", "attn_weight")
_FLOATS = ("value", "location", "attn_weight")
_BLOCK_BYTES = 32 * 2**20
"""Size of the samples of one block of queries, in the type of the computation."""
_OUTSIDE = 4.0
"""A coordinate of `grid_sample` so far out that no corner of any level is near."""


@reports_usage
def multi_scale_deformable_attention(
    value: Tensor,
    spatial_shape: Tensor,
    level_start_index: Tensor,
    location: Tensor,
    attn_weight: Tensor,
    *,
    client: Client,
    compute_dtype: torch.dtype | None = None,
    policies: Policies | None = None,
    timeout_s: float | None = None,
    deterministic: bool = False,
    priority: int = 0,
    label: str = "",
    verify: bool = False,
) -> Tensor:
    """Multi-scale deformable attention with a remote gradient.

    The forward pass runs locally in float32, or in float64 if an operand is float64, and needs about 32 MiB
    plus a copy of one sample of value. Operands of mixed dtypes are sent as float32; each gradient has the
    dtype of its operand. Second derivatives are computed locally.

    Args:
        value: (bs, nk, nh, ch), ch a multiple of 8 up to 256, nh up to 16. The feature maps of all levels.
            float32, float16 or bfloat16.
        spatial_shape: (nl, 2), nl up to 16. Height and width of each level. int32 or int64.
        level_start_index: (nl). First key of each level. int32 or int64.
        location: (bs, nq, nh, nl, np, 2), nq below 500000, np up to 16, dtype of value. Sampling points (x,
            y), 0 to 1 across a level. A point outside its level, or at NaN, reads nothing.
        attn_weight: (bs, nq, nh, nl, np), dtype of value. Attention weight of each sampling point. The weight
            of a point that reads nothing is ignored, even if NaN or infinite.
        client: Client used in the backward pass.
        compute_dtype: Dtype to cast value, location and attn_weight to, so that dtypes other than the three
            above can be used; the result has the dtype of value. None for no cast.
        policies: What to do with calls that are small, rejected or fail; also counts calls. None sends every
            call and raises documented errors before computing anything.
        timeout_s: Deadline of the call in seconds; None for the client's default.
        deterministic: Request bitwise reproducible results.
        priority: -100 to 100; calls of higher priority leave the queue first.
        label: Name of the caller or experiment.
        verify: Have the server recompute the call with its reference and fail if the result differs.

    Returns:
        (bs, nq, nh*ch), dtype of value.

    Raises:
        NullOperand: 161001. An operand is None.
        InvalidOperand: 161002. The operands are inconsistent, or one violates a documented rule and the
            policy is to raise. Raised by this call, before anything is computed.
        UnsafeLevels: A level extends beyond `value`.
        WrongType: An operand is not a dense CPU tensor, or `client` is not a `Client`.

    Example:
        >>> value = torch.rand(1, 20, 2, 8, requires_grad=True)
        >>> spatial_shape, level_start_index = torch.tensor([[4, 4], [2, 2]]), torch.tensor([0, 16])
        >>> location, attn_weight = torch.rand(1, 5, 2, 2, 4, 2), torch.rand(1, 5, 2, 2, 4)
        >>> out = multi_scale_deformable_attention(
        ...     value, spatial_shape, level_start_index, location, attn_weight, client=client)
        >>> out.sum().backward()
        >>> value.grad.shape
        torch.Size([1, 20, 2, 8])
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
    engine = PolicyEngine(client, options, policies or STRICT)
    operands = (floats[0], spatial_shape, level_start_index, *floats[1:])
    return differentiable(engine, *operands).to(value.dtype)


class Decides(Protocol):
    """Decides where a gradient is computed, such as a `PolicyEngine`."""

    @property
    def on_refused(self) -> str:
        """What to do with calls that the documents do not allow."""
        ...

    def run(self, request: AutogradCall, local: Callable[[], Any]) -> Any:
        """Returns the results of `local` or of the service."""
        ...


def differentiable(engine: Decides, *operands: Tensor) -> Tensor:
    """The attention, (bs, nq, nh*ch) in the type of value; the engine decides where its gradient is computed.

    Args:
        engine: Decides, and counts.
        operands: The five operands of the function above; errors as there.
    """
    result: Tensor = _Attention.apply(engine, *operands)  # type: ignore[no-untyped-call]
    return result


def differentiate(engine: Decides, *operands: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of value, location and attn_weight, in their types; the engine decides where they run.

    Args:
        engine: Decides, and counts.
        operands: The six documented operands, in their order.
    """
    grads: tuple[Tensor, Tensor, Tensor] = _Gradients.apply(  # type: ignore[no-untyped-call]
        engine, *operands
    )
    return grads


def request_of(*operands: Tensor) -> AutogradCall:
    """The call of six operands in the service's terms."""
    given = dict(zip((*_NAMES, "grad_output"), operands, strict=True))
    results = {f"grad_{name}": given[name].dtype for name in _FLOATS}
    return AutogradCall(OPERATOR, given, {}, results, takes_subclasses=True)


def require(on_refused: str, *operands: Tensor) -> None:
    """Rejects, before anything is computed, operands that the policies cannot handle.

    Raises:
        NullOperand: 161001. An operand is None.
        InvalidOperand: 161002. The operands are inconsistent, or one violates a documented rule and
            `on_refused` is ``"raise"``.
        WrongType: An operand is not a dense CPU tensor.
    """
    given = dict(zip(_NAMES, operands, strict=True))
    require_tensors(OPERATOR, given)
    known = metas(OPERATOR, given)
    if on_refused == "raise" or not fits(OPERATOR, known, {}):
        require_legal_deformable_attention(as_sent(known))


class _Attention(Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        ctx.engine, *operands = arguments
        require(ctx.engine.on_refused, *operands)
        ctx.save_for_backward(*operands)
        return forward(*operands)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grads = differentiate(ctx.engine, *ctx.saved_tensors, *grad_outputs)
        return None, grads[0], None, None, grads[1], grads[2]


class _Gradients(Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        engine, *operands = arguments
        ctx.save_for_backward(*operands)
        found: tuple[Tensor, ...] = engine.run(request_of(*operands), lambda: gradients(*operands))
        return found

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator takes ctx its name
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        value, location, weight, upstream = gradients_of_gradients(*ctx.saved_tensors, second=grad_outputs)
        return None, value, None, None, location, weight, upstream


def forward(
    value: Tensor, spatial_shape: Tensor, level_start_index: Tensor, location: Tensor, attn_weight: Tensor
) -> Tensor:
    """The attention itself, (bs, nq, nh*ch) in the type of value, for all consistent sizes."""
    levels = levels_of(value, spatial_shape, level_start_index)
    bs, nq, nh, _, points, _ = location.shape
    ch, dtype = value.shape[3], wide(value, location, attn_weight)
    block = max(1, _BLOCK_BYTES // (dtype.itemsize * max(1, ch * nh * len(levels) * points)))
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        result = value.new_zeros((bs, nq, nh, ch), dtype=dtype)
        for sample in range(bs):
            maps = [_map(value[sample].to(dtype), *level) for level in levels]
            for begin in range(0, nq, block):
                here = (sample, slice(begin, begin + block))
                result[here] = _attend(maps, location[here].to(dtype), attn_weight[here].to(dtype))
        return result.reshape(bs, nq, nh * ch).to(value.dtype)


def _map(keys: Tensor, start: int, height: int, width: int) -> Tensor:
    """(nh, ch, height, width): one level of one sample."""
    level = keys[start : start + height * width]
    return level.reshape(height, width, *keys.shape[1:]).permute(2, 3, 0, 1).contiguous()


def _attend(maps: Sequence[Tensor], location: Tensor, weight: Tensor) -> Tensor:
    """(nq, nh, ch): the attention of a block of queries of one sample.

    Args:
        maps: The levels, each (nh, ch, height, width).
        location: (nq, nh, nl, np, 2), in the type of maps.
        weight: (nq, nh, nl, np), in the type of maps.
    """
    samples, weights = [], []
    for number, level in enumerate(maps):
        points = location[:, :, number].transpose(0, 1)  # (nh, nq, np, 2)
        near = is_near(points, *level.shape[2:])
        # Points outside contribute nothing, not even NaN, as 0 times an infinite weight would.
        weights.append(weight[:, :, number].transpose(0, 1).where(near, 0))
        grid = (2 * points - 1).where(near.unsqueeze(-1), _OUTSIDE)
        nothing = level.new_zeros((*level.shape[:2], *grid.shape[1:3]))
        samples.append(grid_sample(level, grid, align_corners=False) if level.numel() else nothing)
    if not maps:
        return location.new_zeros(())
    weighted = torch.cat(samples, -1) * torch.cat(weights, -1).unsqueeze(1)
    return weighted.sum(-1).permute(2, 0, 1)
