"""Floyd attention as a formula of elementary operators, and its gradient from that.

For calls that are not sent: any consistent sizes, any floating-point types, differentiable again. Computes in
float32, or in float64 if an operand is float64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

MASKED = torch.finfo(torch.float32).min
_BLOCK_BYTES = 32 * 2**20
"""Size of the scores of one block, in the type of the computation; about six blocks exist at once."""


def wide(*tensors: Tensor) -> torch.dtype:
    """The type to compute in."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def blocks(n: int, m: int, row_bytes: int, block_bytes: int) -> Iterator[tuple[slice, slice]]:
    """Spans of N and of M whose scores fit into a block; a row of K is never divided."""
    fitting = max(1, block_bytes // max(1, row_bytes))
    columns = min(m, fitting)
    rows = max(1, fitting // max(1, columns))
    for first in range(0, n, rows):
        for left in range(0, m, max(1, columns)):
            yield slice(first, first + rows), slice(left, left + columns)


def attend(*operands: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """The attention, (B, H, N, M, D) in the type of query, differentiable any number of times.

    It needs memory for all scores, about six times (B, H, N, M, K).
    """
    dtype = wide(*operands)
    with torch.autocast("cpu", enabled=False):
        heads = [
            _attend([tensor[b, h].to(dtype) for tensor in operands], _gone(mask, b), scale)
            for b in range(operands[0].shape[0])
            for h in range(operands[0].shape[1])
        ]
        found = torch.stack(heads) if heads else operands[0]
        return found.reshape(operands[0].shape).to(operands[0].dtype)


def gradients(*operands: Tensor, mask: Tensor | None, scale: float, upstream: Tensor) -> tuple[Tensor, ...]:
    """Gradients of the five operands in their types, computed in blocks of queries.

    Args:
        operands: query, key1, value1, key2, value2.
        mask: (B, 1, N, 1, K), bool or uint8; None for no mask.
        scale: Factor of the scores.
        upstream: (B, H, N, M, D). Gradient of the result.
    """
    dtype = wide(*operands)
    b, h, n, m, _ = operands[0].shape
    row_bytes = dtype.itemsize * operands[1].shape[3]
    grads = [torch.zeros_like(tensor, dtype=dtype) for tensor in operands]
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        for batch in range(b):
            gone = _gone(mask, batch)
            for head in range(h):
                for rows, columns in blocks(n, m, row_bytes, _BLOCK_BYTES):
                    parts = (
                        (rows, columns),
                        (rows,),
                        (rows,),
                        (slice(None), columns),
                        (slice(None), columns),
                    )
                    here = [(batch, head, *part) for part in parts]
                    pairs = zip(operands, here, strict=True)
                    leaves = [t[part].detach().to(dtype).requires_grad_() for t, part in pairs]
                    out = _attend(leaves, None if gone is None else gone[rows], scale)
                    found = torch.autograd.grad(out, leaves, upstream[here[0]].detach().to(dtype))
                    for grad, part, one in zip(grads, here, found, strict=True):
                        grad[part] += one
    return tuple(grad.to(tensor.dtype) for grad, tensor in zip(grads, operands, strict=True))


def gradients_of_gradients(
    *operands: Tensor, mask: Tensor | None, scale: float, upstream: Tensor, second: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Gradients of the five operands and of upstream, from those of the results of `gradients`."""
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in (*operands, upstream)]
        out = attend(*leaves[:5], mask=mask, scale=scale)
        first = torch.autograd.grad(out, leaves[:5], leaves[5], create_graph=True, materialize_grads=True)
        return torch.autograd.grad(first, leaves, second, materialize_grads=True)


def _gone(mask: Tensor | None, batch: int) -> Tensor | None:
    """(N, 1, K): which keys are excluded."""
    return None if mask is None else mask[batch, 0].bool()


def _attend(operands: Sequence[Tensor], gone: Tensor | None, scale: float) -> Tensor:
    """(N, M, D): the attention of one head, or of a block of its queries."""
    query, key1, value1, key2, value2 = operands
    score = query @ key1.transpose(1, 2)
    score = score + (query.transpose(0, 1) @ key2.permute(1, 2, 0)).transpose(0, 1)
    score = score * scale
    if gone is not None:
        score = score.masked_fill(gone, MASKED)
    weight = score.softmax(-1)
    return weight @ value1 + (weight.transpose(0, 1) @ value2.transpose(0, 1)).transpose(0, 1)
