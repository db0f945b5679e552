"""Floyd attention, one query row at a time, so that only part of the scores is in memory."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from npugrad.usage import reports_usage
from npugrad_client._legality import FLOYD_ATTENTION as OPERATOR
from npugrad_client._legality import (
    LANES,
    default_floyd_scale,
    require_client,
)
from npugrad_client.jax._callback import Array, Service, vjp, wide, zero_tangent

if TYPE_CHECKING:
    from npugrad_client import Client
    from npugrad_client._policy import Policies

_MASKED = float(jnp.finfo(jnp.float32).min)


@reports_usage
def fused_floyd_attention(
    query: Array,
    key1: Array,
    value1: Array,
    key2: Array,
    value2: Array,
    *,
    client: Client,
    atten_mask: Array | None = None,
    scale: float | None = None,
    policies: Policies | None = None,
    timeout_s: float | None = None,
    priority: int = 0,
    label: str = "",
    verify: bool = False,
) -> Array:
    """Floyd attention, over two sets of keys and values at once, with a remote gradient.

    The forward pass accumulates in float32 and keeps the scores of one n in memory, (B, H, M, K).

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
        policies: What to do with calls that are small, rejected or fail; also counts calls. None sends every
            call and raises documented errors when the function is traced.
        timeout_s: Deadline of the call in seconds; None for the client's default.
        priority: -100 to 100; calls of higher priority leave the queue first.
        label: Name of the caller or experiment.
        verify: Have the server recompute the call with its reference and fail if the result differs.

    Returns:
        (B, H, N, M, D), dtype of query.

    Raises:
        NullOperand: 161001. An operand other than the mask is None.
        InvalidOperand: 161002. A dtype is not allowed, such as float32. Raised when the function is traced.
        TilingError: 561002. Sizes are not allowed or inconsistent.
        WrongType: An argument is unknown or missing, or `client` is not a `Client`.

    Example:
        >>> query = key1 = value1 = jnp.ones((1, 1, 16, 128, 32), "bfloat16")
        >>> key2 = value2 = jnp.ones((1, 1, 128, 128, 32), "bfloat16")
        >>> def loss(query):
        ...     out = fused_floyd_attention(query, key1, value1, key2, value2, client=client)
        ...     return out.astype("float32").sum()
        >>> jax.jit(jax.grad(loss))(query).shape
        (1, 1, 16, 128, 32)
    """
    require_client("fused_floyd_attention", client)
    factor = default_floyd_scale(query) if scale is None else scale
    operands = _operands((query, key1, value1, key2, value2), atten_mask)
    service = Service(client, policies, timeout_s, priority=priority, label=label, verify=verify)
    rows = None if query is None else jax.ShapeDtypeStruct((*query.shape[:4], LANES), jnp.float32)
    saved = {"dy": query, "softmax_max": rows, "softmax_sum": rows, "attention_in": query}
    service.require(OPERATOR, {**operands, **saved}, {"scale_value": factor})
    result: Array = _attention(service, float(factor), query, key1, value1, key2, value2, atten_mask)
    return result


def _operands(tensors: tuple[Array, ...], mask: Array | None) -> dict[str, Array | None]:
    names = ("query", "key1", "value1", "key2", "value2")
    return {**dict(zip(names, tensors, strict=True)), "atten_mask": mask}


def attend(
    query: Array, key1: Array, value1: Array, key2: Array, value2: Array, *, mask: Array | None, scale: float
) -> tuple[Array, Array, Array]:
    """Attention, and the largest score and the sum of each row, (B, H, N, M) in the wide type."""
    dtype = wide(query, key1, value1, key2, value2)
    second_key, second_value = key2.astype(dtype), value2.astype(dtype)
    exact = partial(jnp.einsum, precision="highest")

    def row(_: None, n: tuple[Array, ...]) -> tuple[None, tuple[Array, ...]]:
        q, k, v = (each.astype(dtype) for each in n[:3])  # (B, H, M or K, D)
        score = exact("bhmd,bhkd->bhmk", q, k) + exact("bhmd,bhkmd->bhmk", q, second_key)
        score = jnp.where(n[3].astype(bool), _MASKED, score * scale) if len(n) > 3 else score * scale
        largest = score.max(-1, keepdims=True)
        weight = jnp.exp(score - largest)
        total = weight.sum(-1, keepdims=True)
        weight = weight / total
        out = exact("bhmk,bhkd->bhmd", weight, v) + exact("bhmk,bhkmd->bhmd", weight, second_value)
        return None, (out.astype(query.dtype), largest[..., 0], total[..., 0])

    by_row = [query, key1, value1] if mask is None else [query, key1, value1, mask]
    _, found = jax.lax.scan(row, None, tuple(jnp.moveaxis(each, 2, 0) for each in by_row))
    attention, largest, total = (jnp.moveaxis(each, 0, 2) for each in found)
    return attention, largest, total


def _apply(service: Service, scale: float, *operands: Array) -> Array:
    return _forward(service, scale, *operands)[0]


def _forward(service: Service, scale: float, *operands: Array) -> tuple[Array, tuple[Array, ...]]:
    query, key1, value1, key2, value2, mask = operands
    attention, largest, total = attend(query, key1, value1, key2, value2, mask=mask, scale=scale)
    return attention, (*operands, largest, total, attention)


def _backward(service: Service, scale: float, saved: tuple[Array, ...], dy: Array) -> Any:
    *tensors, mask, largest, total, attention = saved
    # The mean of the values, where all keys of a row are masked: the service lets the gradient pass the mask.
    closed = False if mask is None else mask.astype(bool).all(-1, keepdims=True)
    operands = {
        **_operands(tuple(tensors), mask),
        "dy": jnp.where(closed, 0, dy),
        "softmax_max": _repeated(largest),
        "softmax_sum": _repeated(total),
        "attention_in": attention,
    }
    wanted = dict(zip(("dq", "dk1", "dv1", "dk2", "dv2"), tensors, strict=True))

    def here() -> tuple[Array, ...]:
        def forward(*five: Array) -> Array:
            return _apply(service, scale, *five, mask)

        return vjp(forward, tensors, operands["dy"])

    grads = service.gradients(OPERATOR, operands, {"scale_value": scale}, wanted, here)
    if mask is None:
        return (*grads, None)
    dq, dk1, dv1, dk2, dv2 = grads
    share = jnp.where(closed, dy, 0).astype(wide(dv1, dv2)) / dv1.shape[3]
    dv1, dv2 = ((dv + share.sum(axis, keepdims=True)).astype(dv.dtype) for dv, axis in ((dv1, 3), (dv2, 2)))
    return dq, dk1, dv1, dk2, dv2, zero_tangent(mask)


def _repeated(rows: Array) -> Array:
    return jnp.broadcast_to(rows[..., None], (*rows.shape, LANES))


_attention: Any = jax.custom_vjp(_apply, nondiff_argnums=(0, 1))
_attention.defvjp(_forward, _backward)
