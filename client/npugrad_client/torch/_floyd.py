"""Floyd attention: local forward pass in blocks, gradient from the service.

For each batch and head, with queries (N, M, D), first keys and values (N, K, D), second ones (K, M, D):

    score[n, m, k] = scale * (query[n, m] . key1[n, k] + query[n, m] . key2[k, m])      masked: -FLT_MAX
    weight = softmax(score) over k
    attention[n, m] = sum over k of weight[n, m, k] * (value1[n, k] + value2[k, m])

There are N*M*K scores for a result of N*M*D elements; only one block of them exists at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from npugrad.usage import reports_usage
from npugrad_client._fitting import fits
from npugrad_client._legality import FLOYD_ATTENTION as OPERATOR
from npugrad_client._legality import (
    LANES,
    default_floyd_scale,
    require_client,
    require_legal_floyd_attention,
)
from npugrad_client._policy import STRICT, Options, PolicyEngine
from npugrad_client.torch._calls import cast_given, metas, require_tensors
from npugrad_client.torch._floyd_gradient import (
    MASKED,
    blocks,
    gradients,
    gradients_of_gradients,
    wide,
)
from npugrad_client.torch._translation import AutogradCall

if TYPE_CHECKING:
    from torch import Tensor

    from npugrad_client import Client
    from npugrad_client._policy import Policies

_NAMES = ("query", "key1", "value1", "key2", "value2", "atten_mask")
_SAVED = ("softmax_max", "softmax_sum", "attention_in", "dy")
_RESULTS = ("dq", "dk1", "dv1", "dk2", "dv2")
_BLOCK_BYTES = 32 * 2**20
"""Size of the scores of one block, in the type of the computation; about three blocks exist at once."""


@reports_usage
def fused_floyd_attention(
    query: Tensor,
    key1: Tensor,
    value1: Tensor,
    key2: Tensor,
    value2: Tensor,
    *,
    client: Client,
    atten_mask: Tensor | None = None,
    scale: float | None = None,
    compute_dtype: torch.dtype | None = None,
    policies: Policies | None = None,
    timeout_s: float | None = None,
    priority: int = 0,
    label: str = "",
    verify: bool = False,
) -> Tensor:
    """Floyd attention, over two sets of keys and values at once, with a remote gradient.

    The forward pass runs locally, accumulates in float32, or in float64 if an operand is float64, and needs
    about 100 MiB besides the operands, a copy of one head in the wider dtype, and the result. The operands,
    the result and two values per row are saved for the gradient. Second derivatives are computed locally.

    Args:
        query: (B, H, N, M, D), float16 or bfloat16. Queries; M is a multiple of 128.
        key1: (B, H, N, K, D), dtype of query. First keys; N is a multiple of 16, K of 128, D is 32, 64 or
            128.
        value1: (B, H, N, K, D), dtype of query. First values.
        key2: (B, H, K, M, D), dtype of query. Second keys.
        value2: (B, H, K, M, D), dtype of query. Second values.
        client: Client used in the backward pass.
        atten_mask: (B, 1, N, 1, K), bool or uint8; 1 excludes a key. None for no mask.
        scale: Factor of the scores; None for 1 / sqrt(D).
        compute_dtype: float16 or bfloat16 to cast the five operands to, so that float32 operands can be used;
            the result has the dtype of query. None for no cast.
        policies: What to do with calls that are small, rejected or fail; also counts calls. None sends every
            call and raises documented errors, such as for float32, before computing anything.
        timeout_s: Deadline of the call in seconds; None for the client's default.
        priority: -100 to 100; calls of higher priority leave the queue first.
        label: Name of the caller or experiment.
        verify: Have the server recompute the call with its reference and fail if the result differs.

    Returns:
        (B, H, N, M, D), dtype of query.

    Raises:
        NullOperand: 161001. An operand other than the mask is None.
        InvalidOperand: 161002. A dtype is not allowed and the policy is to raise. Raised by this call, before
            anything is computed.
        TilingError: 561002. Sizes are inconsistent, or not allowed and the policy is to raise.
        WrongType: An operand is not a dense CPU tensor, or `client` is not a `Client`.

    Example:
        >>> query, key1, value1 = torch.rand(3, 1, 1, 16, 128, 32, dtype=torch.bfloat16)
        >>> key2, value2 = torch.rand(2, 1, 1, 128, 128, 32, dtype=torch.bfloat16)
        >>> out = fused_floyd_attention(
        ...     query.requires_grad_(), key1, value1, key2, value2, client=client)
        >>> out.float().sum().backward()
        >>> query.grad.shape
        torch.Size([1, 1, 16, 128, 32])
    """
    require_client("fused_floyd_attention", client)
    options = Options(timeout_s=timeout_s, priority=priority, label=label, verify=verify)
    operands: tuple[Tensor, ...] = (query, key1, value1, key2, value2)
    require_tensors(OPERATOR, dict(zip(_NAMES, (*operands, atten_mask), strict=True)))
    if compute_dtype is not None:
        operands = cast_given(operands, compute_dtype)
    factor = default_floyd_scale(query) if scale is None else scale
    engine = PolicyEngine(client, options, policies or STRICT)
    result: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        engine, factor, *operands, atten_mask
    )
    return result.to(query.dtype)


def _require(on_refused: str, scale: float, *operands: Tensor, mask: Tensor | None) -> None:
    given: dict[str, Tensor | None] = dict(zip(_NAMES, (*operands, mask), strict=True))
    known = metas(OPERATOR, given)
    if on_refused == "raise" or not fits(OPERATOR, known, {}):
        require_legal_floyd_attention(known, scale)


class _Attention(Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        ctx.engine, ctx.scale, *operands, mask = arguments
        _require(ctx.engine.on_refused, ctx.scale, *operands, mask=mask)
        query, key1, value1, key2, value2 = operands
        result = forward(query, key1, value1, key2, value2, mask=mask, scale=ctx.scale)
        # Repeated without extra memory: each value is also sent only once.
        rows = (each.unsqueeze(-1).expand(*each.shape, LANES) for each in (result.largest, result.total))
        ctx.save_for_backward(*operands, mask, *rows, result.attention)
        return result.attention

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grads: tuple[Tensor, ...] = _Gradients.apply(  # type: ignore[no-untyped-call]
            ctx.engine, ctx.scale, *ctx.saved_tensors, *grad_outputs
        )
        return None, None, *grads, None


class _Gradients(Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        engine, ctx.scale, *operands, mask, largest, total, attention, upstream = arguments
        ctx.save_for_backward(*operands, mask, upstream)
        closed = _closed(mask)
        sent = upstream if closed is None else upstream.masked_fill(closed, 0)
        tensors = (*operands, mask, largest, total, attention, sent)
        results = {name: tensor.dtype for name, tensor in zip(_RESULTS, operands, strict=True)}
        request = AutogradCall(
            OPERATOR,
            dict(zip((*_NAMES, *_SAVED), tensors, strict=True)),
            {"scale_value": ctx.scale},
            results,
            may_mix=True,  # statistics are float32, the others not
            takes_subclasses=True,
        )
        found: tuple[Tensor, ...] = engine.run(
            request, lambda: gradients(*operands, mask=mask, scale=ctx.scale, upstream=sent)
        )
        return found if closed is None else _with_means(found, upstream.masked_fill(~closed, 0))

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator takes ctx its name
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        *operands, mask, upstream = ctx.saved_tensors
        found = gradients_of_gradients(
            *operands, mask=mask, scale=ctx.scale, upstream=upstream, second=grad_outputs
        )
        return None, None, *found[:5], None, None, None, None, found[5]


def _closed(mask: Tensor | None) -> Tensor | None:
    """Rows all of whose keys are masked, (B, 1, N, 1, 1); None if there are none.

    Their result is the mean of the values, which is not what the service differentiates:
    aclnnFusedFloydAttentionGrad lets the gradient pass through the mask.
    """
    closed = None if mask is None else mask.bool().all(-1, keepdim=True)
    return closed if closed is not None and bool(closed.any()) else None


def _with_means(grads: tuple[Tensor, ...], upstream: Tensor) -> tuple[Tensor, ...]:
    """Gradients of the operands, with what the means of values add; `upstream` is 0 in all other rows."""
    dq, dk1, dv1, dk2, dv2 = grads
    share = upstream.to(wide(dv1, dv2)) / dv1.shape[3]
    dv1, dv2 = ((dv + share.sum(axis, keepdim=True)).to(dv.dtype) for dv, axis in ((dv1, 3), (dv2, 2)))
    return dq, dk1, dv1, dk2, dv2


@dataclass(frozen=True)
class Forward:
    """Results of the forward pass.

    Attributes:
        attention: (B, H, N, M, D), dtype of query.
        largest: (B, H, N, M), in the type of the computation. Largest score of each row.
        total: (B, H, N, M), in the same type. Sum of exp(score - largest) of each row.
    """

    attention: Tensor
    largest: Tensor
    total: Tensor


def forward(
    query: Tensor,
    key1: Tensor,
    value1: Tensor,
    key2: Tensor,
    value2: Tensor,
    *,
    mask: Tensor | None,
    scale: float,
    block_bytes: int = _BLOCK_BYTES,
) -> Forward:
    """The attention itself, for any sizes and types; operands as above."""
    (b, h, n, m, _), dtype = query.shape, wide(query, key1, value1, key2, value2)
    row_bytes = dtype.itemsize * key1.shape[3]
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        largest = query.new_empty((b, h, n, m), dtype=dtype)
        result = Forward(torch.empty_like(query), largest, torch.empty_like(largest))
        for batch in range(b):
            for head in range(h):
                tensors = (query, key1, value1, key2, value2)
                one = _Head(*(tensor[batch, head].to(dtype) for tensor in tensors))
                gone = None if mask is None else mask[batch, 0].bool()  # (N, 1, K)
                for rows, columns in blocks(n, m, row_bytes, block_bytes):
                    here = (batch, head, rows, columns)
                    attention, result.largest[here], result.total[here] = _attend(
                        one, gone, scale, rows, columns
                    )
                    result.attention[here] = attention
        return result


@dataclass(frozen=True)
class _Head:
    """Operands of one head of one sample, in the type of the computation."""

    query: Tensor
    key1: Tensor
    value1: Tensor
    key2: Tensor
    value2: Tensor


def _attend(
    one: _Head, gone: Tensor | None, scale: float, rows: slice, columns: slice
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention, largest score and sum of a block of queries."""
    query = one.query[rows, columns]
    key1, value1 = one.key1[rows], one.value1[rows]
    key2, value2 = one.key2[:, columns].transpose(0, 1), one.value2[:, columns].transpose(0, 1)  # (M, K, D)
    score = query @ key1.transpose(1, 2)
    score += (query.transpose(0, 1) @ key2.transpose(1, 2)).transpose(0, 1)
    score *= scale
    if gone is not None:
        score.masked_fill_(gone[rows], MASKED)
    largest = score.amax(-1)
    weight = score.sub_(largest.unsqueeze(-1)).exp_()
    total = weight.sum(-1)
    weight /= total.unsqueeze(-1)
    attention = weight @ value1
    attention += (weight.transpose(0, 1) @ value2).transpose(0, 1)
    return attention, largest, total
