"""Group normalisation."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from npugrad.usage import reports_usage
from npugrad_client._legality import require_client
from npugrad_client.jax._callback import Array, Service, like, wide

if TYPE_CHECKING:
    from npugrad_client import Client
    from npugrad_client._policy import Policies

OPERATOR = "group_norm_backward"


@reports_usage
def group_norm(
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    groups: int,
    client: Client,
    eps: float = 1e-5,
    policies: Policies | None = None,
    timeout_s: float | None = None,
    deterministic: bool = False,
    priority: int = 0,
    label: str = "",
    verify: bool = False,
) -> Array:
    """Group normalisation with a remote gradient.

    Args:
        x: (N, C, *), channels second. float32, float16 or bfloat16.
        scale: (C), dtype of x; None for ones.
        bias: (C), dtype of x; None for zeros.
        groups: Number of groups; must divide C.
        client: Client used in the backward pass.
        eps: Added to the variance.
        policies: What to do with calls that are small, rejected or fail; also counts calls. None sends every
            call and raises documented errors when the function is traced.
        timeout_s: Deadline of the call in seconds; None for the client's default.
        deterministic: Request bitwise reproducible results.
        priority: -100 to 100; calls of higher priority leave the queue first.
        label: Name of the caller or experiment.
        verify: Have the server recompute the call with its reference and fail if the result differs.

    Returns:
        Shape and dtype of x.

    Raises:
        NullOperand: 161001. x is None.
        InvalidOperand: 161002. The operands are inconsistent, or one violates a documented rule and the
            policy is to raise. Raised when the function is traced.
        WrongType: An argument is unknown or missing, or `client` is not a `Client`.

    Example:
        >>> def loss(x):
        ...     return (group_norm(x, groups=8, client=client) ** 2).mean()
        >>> jax.jit(jax.grad(loss))(jnp.ones((2, 64, 8, 8))).shape
        (2, 64, 8, 8)
    """
    require_client("group_norm", client)
    service = Service(client, policies, timeout_s, deterministic, priority, label, verify)
    attrs = _attrs(x, groups)
    statistics = like((attrs["n"], max(groups, 0)), x)
    operands = {
        "input": x,
        "grad_out": like(() if x is None else x.shape, x),
        "mean": statistics,
        "rstd": statistics,
        "gamma": scale,
    }
    service.require(OPERATOR, operands, attrs, beta=bias)
    if bias is not None:  # not among the documented operands
        service.require(OPERATOR, {**operands, "gamma": bias}, attrs, beta=scale)
    result: Array = _group_norm(service, groups, eps, x, scale, bias)
    return result


def _attrs(x: Array | None, groups: int) -> dict[str, Any]:
    shape = () if x is None else x.shape
    n, c = (*shape, 0, 0)[:2]
    return {"n": n, "c": c, "hxw": prod(shape[2:]), "group": groups, "output_mask": (True, True, True)}


def _apply(
    service: Service, groups: int, eps: float, x: Array, scale: Array | None, bias: Array | None
) -> Array:
    return _forward(service, groups, eps, x, scale, bias)[0]


def _forward(
    service: Service, groups: int, eps: float, x: Array, scale: Array | None, bias: Array | None
) -> tuple[Array, tuple[Array, ...]]:
    (n, c), dtype = x.shape[:2], wide(x, scale, bias)
    split = x.astype(dtype).reshape(n, groups, c // groups * prod(x.shape[2:]))
    mean = split.mean(-1)
    rstd = jax.lax.rsqrt(split.var(-1) + eps)
    normal = ((split - mean[..., None]) * rstd[..., None]).reshape(x.shape)
    channel = (1, c) + (1,) * (x.ndim - 2)
    if scale is not None:
        normal = normal * scale.astype(dtype).reshape(channel)
    if bias is not None:
        normal = normal + bias.astype(dtype).reshape(channel)
    kept = jnp.result_type(*(value.dtype for value in (x, scale, bias) if value is not None))
    return normal.astype(x.dtype), (x, mean.astype(kept), rstd.astype(kept), scale, bias)


def _backward(service: Service, groups: int, eps: float, saved: tuple[Array, ...], grad: Array) -> Any:
    x, mean, rstd, scale, bias = saved
    operands = {"grad_out": grad, "input": x, "mean": mean, "rstd": rstd, "gamma": scale}
    results = {"grad_input": x, "grad_gamma": scale, "grad_beta": bias}
    local = partial(_apply, service, groups, eps)
    return service.wanted_gradients(OPERATOR, operands, _attrs(x, groups), results, local, grad)


_group_norm: Any = jax.custom_vjp(_apply, nondiff_argnums=(0, 1, 2))
_group_norm.defvjp(_forward, _backward)
