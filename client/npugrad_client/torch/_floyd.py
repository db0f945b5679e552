"""Floyd attention: the forward pass here, in blocks; its gradient from the service.

For each batch and head, with queries (N, M, D), first keys and values (N, K, D), second ones (K, M, D):

    score[n, m, k] = scale * (query[n, m] . key1[n, k] + query[n, m] . key2[k, m])      masked: -FLT_MAX
    weight = softmax(score) over k
    attention[n, m] = sum over k of weight[n, m, k] * (value1[n, k] + value2[k, m])

Scores have N*M*K elements for N*M*D of the result; never more than a block of them exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from npugrad_client._legality import FLOYD_ATTENTION as OPERATOR
from npugrad_client._legality import (
    LANES,
    default_floyd_scale,
    require_client,
    require_legal_floyd_attention,
)
from npugrad_client._policy import Options
from npugrad_client.torch._calls import cast_given, metas, require_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from npugrad_client import Client

_NAMES = ("query", "key1", "value1", "key2", "value2", "atten_mask")
_BLOCK_BYTES = 32 * 2**20
"""Scores of one block, in float32; some three such blocks live at a time."""
_MASKED = torch.finfo(torch.float32).min


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
    timeout_s: float | None = None,
    priority: int = 0,
    label: str = "",
    verify: bool = False,
) -> Tensor:
    """Floyd attention, which scores and weighs two sets of keys and values together; gradient remote.

    The forward pass runs here, accumulates in float32, and needs some 100 MiB beside operands, their copies
    of one head in float32, and the result. Saved for the gradient are the operands, the result, and two
    float32 values for each row. The gradient has no gradient of its own.

    Args:
        query: (B, H, N, M, D), float16 or bfloat16. Queries; M is a multiple of 128.
        key1: (B, H, N, K, D), dtype of query. First keys; N is a multiple of 16, K of 128, D is 32, 64 or
            128.
        value1: (B, H, N, K, D), dtype of query. First values.
        key2: (B, H, K, M, D), dtype of query. Second keys.
        value2: (B, H, K, M, D), dtype of query. Second values.
        client: Who calls the service in the backward pass.
        atten_mask: (B, 1, N, 1, K), bool or uint8; None for no mask. 1 takes a key out.
        scale: Factor of the scores; None for 1 / sqrt(D).
        compute_dtype: float16 or bfloat16 to cast the five operands to, so that float32 ones can be used;
            the result has the type of query again. None casts nothing, and float32 is an error.
        timeout_s: Deadline of the call in seconds; None for the client's default.
        priority: Calls of higher priority leave the queue first; -100 to 100.
        label: Name of the caller or experiment.
        verify: Have the server recompute the call and refuse a result that differs.

    Returns:
        (B, H, N, M, D), dtype of query.

    Raises:
        NullOperand: 161001. An operand other than the mask is None.
        InvalidOperand: 161002. A type that the documents do not allow; from here, before anything is
            computed.
        TilingError: 561002. Sizes that the documents do not allow, or that do not fit together.
        TypeError: An operand is no dense CPU tensor, or the client no `Client`.

    Example:
        >>> out = fused_floyd_attention(query, key1, value1, key2, value2, client=client)  # doctest: +SKIP
        >>> out.float().sum().backward()                                                   # doctest: +SKIP
    """
    require_client("fused_floyd_attention", client)
    options = Options(timeout_s=timeout_s, priority=priority, label=label, verify=verify)
    operands: tuple[Tensor, ...] = (query, key1, value1, key2, value2)
    require_tensors(OPERATOR, dict(zip(_NAMES, (*operands, atten_mask), strict=True)))
    if compute_dtype is not None:
        operands = cast_given(operands, compute_dtype)
    factor = default_floyd_scale(query) if scale is None else scale
    result: Tensor = _FloydAttention.apply(  # type: ignore[no-untyped-call]
        *operands, atten_mask, factor, client, options
    )
    return result.to(query.dtype)


class _FloydAttention(Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        query, key1, value1, key2, value2, mask, ctx.scale, ctx.client, ctx.options = arguments
        operands = (query, key1, value1, key2, value2)
        given: dict[str, Tensor | None] = dict(zip(_NAMES, (*operands, mask), strict=True))
        require_legal_floyd_attention(metas(OPERATOR, given), ctx.scale)
        result = forward(query, key1, value1, key2, value2, mask=mask, scale=ctx.scale)
        # Repeated without memory of their own: on the wire too each value travels once.
        largest, total = (
            rows.unsqueeze(-1).expand(*rows.shape, LANES) for rows in (result.largest, result.total)
        )
        ctx.save_for_backward(*operands, mask, largest, total, result.attention)
        return result.attention

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator takes ctx its name
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        query, key1, value1, key2, value2, mask, largest, total, attention = ctx.saved_tensors
        grads = ctx.client.fused_floyd_attention_grad(
            query=query,
            key1=key1,
            value1=value1,
            key2=key2,
            value2=value2,
            dy=grad_outputs[0],
            atten_mask=mask,
            softmax_max=largest,
            softmax_sum=total,
            attention_in=attention,
            scale_value=ctx.scale,
            **ctx.options,
        )
        return grads.dq, grads.dk1, grads.dv1, grads.dk2, grads.dv2, None, None, None, None


@dataclass(frozen=True)
class Forward:
    """Results of the forward pass.

    Attributes:
        attention: (B, H, N, M, D), dtype of query.
        largest: (B, H, N, M), float32. Largest score of each row.
        total: (B, H, N, M), float32. Sum of exp(score - largest) of each row.
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
    """The attention itself, of any sizes and types; operands as above."""
    b, h, n, m, _ = query.shape
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        largest = query.new_empty((b, h, n, m), dtype=torch.float32)
        result = Forward(torch.empty_like(query), largest, torch.empty_like(largest))
        for batch in range(b):
            for head in range(h):
                tensors = (query, key1, value1, key2, value2)
                one = _Head(*(tensor[batch, head].float() for tensor in tensors))
                gone = None if mask is None else mask[batch, 0].bool()  # (N, 1, K)
                for rows, columns in _blocks(n, m, key1.shape[3], block_bytes):
                    here = (batch, head, rows, columns)
                    attention, result.largest[here], result.total[here] = _attend(
                        one, gone, scale, rows, columns
                    )
                    result.attention[here] = attention
        return result


@dataclass(frozen=True)
class _Head:
    """Operands of one head of one sample, in float32."""

    query: Tensor
    key1: Tensor
    value1: Tensor
    key2: Tensor
    value2: Tensor


def _blocks(n: int, m: int, k: int, block_bytes: int) -> Iterator[tuple[slice, slice]]:
    """Spans of N and of M whose scores fit into a block; a row of K is never divided."""
    fitting = max(1, block_bytes // (4 * max(1, k)))
    columns = min(m, fitting)
    rows = max(1, fitting // max(1, columns))
    for first in range(0, n, rows):
        for left in range(0, m, max(1, columns)):
            yield slice(first, first + rows), slice(left, left + columns)


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
        score.masked_fill_(gone[rows], _MASKED)
    largest = score.amax(-1)
    weight = score.sub_(largest.unsqueeze(-1)).exp_()
    total = weight.sum(-1)
    weight /= total.unsqueeze(-1)
    attention = weight @ value1
    attention += (weight.transpose(0, 1) @ value2).transpose(0, 1)
    return attention, largest, total
