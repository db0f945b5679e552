"""Multi-scale deformable attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from npugrad.usage import reports_usage
from npugrad_client._legality import DEFORMABLE_ATTENTION as OPERATOR
from npugrad_client._legality import require_client
from npugrad_client.jax._callback import Array, Service, like, vjp, wide, zero_tangent

if TYPE_CHECKING:
    from npugrad_client import Client
    from npugrad_client._policy import Policies


@reports_usage
def multi_scale_deformable_attention(
    value: Array,
    spatial_shape: Array,
    level_start_index: Array,
    location: Array,
    attn_weight: Array,
    *,
    client: Client,
    policies: Policies | None = None,
    timeout_s: float | None = None,
    deterministic: bool = False,
    priority: int = 0,
    label: str = "",
    verify: bool = False,
) -> Array:
    """Multi-scale deformable attention with a remote gradient.

    The forward pass is computed in float32, or in float64 if an operand is float64, and needs memory for four
    arrays of shape (bs, nq, nh, nl, np, ch). Levels that extend beyond `value` are clipped, because the
    values of spatial_shape are unknown at compile time. Operands of mixed dtypes are sent as float32; each
    gradient has the dtype of its operand.

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
        policies: What to do with calls that are small, rejected or fail; also counts calls. None sends every
            call and raises documented errors when the function is traced.
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
            policy is to raise. Raised when the function is traced.
        WrongType: An argument is unknown or missing, or `client` is not a `Client`.

    Example:
        >>> value = jnp.ones((1, 20, 2, 8))
        >>> spatial_shape, level_start_index = jnp.array([[4, 4], [2, 2]]), jnp.array([0, 16])
        >>> location, attn_weight = jnp.full((1, 5, 2, 2, 4, 2), 0.4), jnp.full((1, 5, 2, 2, 4), 0.125)
        >>> def loss(value):
        ...     return multi_scale_deformable_attention(
        ...         value, spatial_shape, level_start_index, location, attn_weight, client=client).sum()
        >>> jax.jit(jax.grad(loss))(value).shape
        (1, 20, 2, 8)
    """
    require_client("multi_scale_deformable_attention", client)
    operands = {
        "value": value,
        "spatial_shape": spatial_shape,
        "level_start_index": level_start_index,
        "location": location,
        "attn_weight": attn_weight,
    }
    service = Service(client, policies, timeout_s, deterministic, priority, label, verify)
    service.require(OPERATOR, {**operands, "grad_output": _grad_output(value, location)}, {})
    result: Array = _attention(service, *operands.values())
    return result


def _grad_output(value: Array | None, location: Array | None) -> Array | None:
    if value is None or location is None:
        return None
    return like((*location.shape[:2], value.shape[-2] * value.shape[-1]) if value.ndim == 4 else (), value)


def attend(value: Array, shapes: Array, starts: Array, location: Array, weight: Array) -> Array:
    """The attention itself; operands as above."""
    bs, nq = location.shape[:2]
    dtype = wide(value, location, weight)
    sizes = shapes.astype(dtype)
    # (bs, nq, nh, nl, np): position in pixels of its level.
    x = location[..., 0].astype(dtype) * sizes[:, 1, None] - 0.5
    y = location[..., 1].astype(dtype) * sizes[:, 0, None] - 0.5
    is_near = (x > -1) & (y > -1) & (x < sizes[:, 1, None]) & (y < sizes[:, 0, None])
    x, y = jnp.where(is_near, x, 0), jnp.where(is_near, y, 0)
    weights = jnp.where(is_near, weight.astype(dtype), 0)  # 0 times NaN would be NaN
    left, top = jnp.floor(x), jnp.floor(y)
    tx, ty = x - left, y - top
    total = jnp.zeros((bs, nq, *value.shape[2:]), dtype)
    for down, right, share in (
        (0, 0, (1 - tx) * (1 - ty)),
        (0, 1, tx * (1 - ty)),
        (1, 0, (1 - tx) * ty),
        (1, 1, tx * ty),
    ):
        row, column = (top + down).astype(jnp.int32), (left + right).astype(jnp.int32)
        height, width = shapes[:, 0, None], shapes[:, 1, None]
        inside = is_near & (row >= 0) & (row < height) & (column >= 0) & (column < width)
        key = jnp.clip(starts[:, None] + row * width + column, 0, max(value.shape[1] - 1, 0))
        key = jnp.where(inside, key, value.shape[1])  # no valid key: reads 0 instead of 0 times a value
        total += _gather(value, key, jnp.where(inside, share * weights, 0))
    return total.reshape(bs, nq, value.shape[2] * value.shape[3]).astype(value.dtype)


def _gather(value: Array, key: Array, factor: Array) -> Array:
    """(bs, nq, nh, ch): sum over levels and points of the value at each key (0 if none) times its factor."""

    def head(values: Array, keys: Array, factors: Array) -> Array:  # (nk, ch), (nq, nl, np), (nq, nl, np)
        read = values.at[keys].get(mode="fill", fill_value=0)
        return jnp.einsum("qlpc,qlp->qc", read.astype(factors.dtype), factors)

    if value.shape[1] == 0:
        return jnp.zeros((*key.shape[:3], value.shape[3]), factor.dtype)
    return jax.vmap(jax.vmap(head, in_axes=(1, 1, 1), out_axes=1))(value, key, factor)


def _apply(service: Service, *operands: Array) -> Array:
    return attend(*operands)


def _forward(service: Service, *operands: Array) -> tuple[Array, tuple[Array, ...]]:
    return attend(*operands), operands


def _backward(service: Service, saved: tuple[Array, ...], grad: Array) -> Any:
    value, shapes, starts, location, weight = saved
    operands = {
        "value": value,
        "spatial_shape": shapes,
        "level_start_index": starts,
        "location": location,
        "attn_weight": weight,
        "grad_output": grad,
    }
    wanted = {"grad_value": value, "grad_location": location, "grad_attn_weight": weight}

    def here() -> tuple[Array, ...]:
        def forward(value: Array, location: Array, weight: Array) -> Array:
            return attend(value, shapes, starts, location, weight)

        return vjp(forward, (value, location, weight), grad)

    grads = service.gradients(OPERATOR, operands, {}, wanted, here)
    return grads[0], zero_tangent(shapes), zero_tangent(starts), grads[1], grads[2]


_attention: Any = jax.custom_vjp(_apply, nondiff_argnums=(0,))
_attention.defvjp(_forward, _backward)
