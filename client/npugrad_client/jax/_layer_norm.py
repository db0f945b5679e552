"""Layer normalisation."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from npugrad.usage import reports_usage
from npugrad_client._legality import require_client
from npugrad_client.jax._callback import Array, Service, like, wide

if TYPE_CHECKING:
    from npugrad_client import Client
    from npugrad_client._policy import Policies

OPERATOR = "layer_norm_backward"


@reports_usage
def layer_norm(
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    client: Client,
    axes: int = 1,
    eps: float = 1e-5,
    policies: Policies | None = None,
    timeout_s: float | None = None,
    deterministic: bool = False,
    priority: int = 0,
    label: str = "",
    verify: bool = False,
) -> Array:
    """Layer normalisation with a remote gradient.

    Args:
        x: Rank 1 to 8. float32, float16 or bfloat16.
        scale: Shape of the normalised axes, dtype of x or float32; None for ones.
        bias: Shape of the normalised axes, dtype of scale; None for zeros.
        client: Client used in the backward pass.
        axes: Number of trailing axes of x to normalise over; 1 or more.
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
        ...     return (layer_norm(x, client=client) ** 2).mean()
        >>> jax.jit(jax.grad(loss))(jnp.ones((2, 64, 8, 8))).shape
        (2, 64, 8, 8)
    """
    require_client("layer_norm", client)
    service = Service(client, policies, timeout_s, deterministic, priority, label, verify)
    shape = () if x is None else x.shape
    count = max(len(shape) - axes, 0) if axes > 0 else len(shape)
    statistics = jax.ShapeDtypeStruct((*shape[:count], *(1,) * (len(shape) - count)), jnp.float32)
    given = {"grad_out": like(shape, x), "input": x, "mean": statistics, "rstd": statistics}
    missing = (1,) * (axes - len(shape))  # which the documents refuse
    attrs = {"normalized_shape": missing + shape[count:], "output_mask": (True, True, True)}
    service.require(OPERATOR, {**given, "weight": scale, "bias": bias}, attrs)
    result: Array = _layer_norm(service, count, eps, x, scale, bias)
    return result


def _apply(
    service: Service, count: int, eps: float, x: Array, scale: Array | None, bias: Array | None
) -> Array:
    return _forward(service, count, eps, x, scale, bias)[0]


def _forward(
    service: Service, count: int, eps: float, x: Array, scale: Array | None, bias: Array | None
) -> tuple[Array, tuple[Array, ...]]:
    dtype, axes = wide(x, scale, bias), tuple(range(count, x.ndim))
    data = x.astype(dtype)
    mean = data.mean(axes, keepdims=True)
    rstd = jax.lax.rsqrt(data.var(axes, keepdims=True) + eps)
    normal = (data - mean) * rstd
    if scale is not None:
        normal = normal * scale.astype(dtype)
    if bias is not None:
        normal = normal + bias.astype(dtype)
    return normal.astype(x.dtype), (x, mean, rstd, scale, bias)


def _backward(service: Service, count: int, eps: float, saved: tuple[Array, ...], grad: Array) -> Any:
    x, mean, rstd, scale, bias = saved
    weight = jnp.ones_like(bias) if scale is None and bias is not None else scale  # with the type of bias
    operands = {"grad_out": grad, "input": x, "mean": mean, "rstd": rstd, "weight": weight, "bias": bias}
    results = {"grad_input": x, "grad_weight": scale, "grad_bias": bias}
    attrs, local = {"normalized_shape": x.shape[count:]}, partial(_apply, service, count, eps)
    return service.wanted_gradients(OPERATOR, operands, attrs, results, local, grad)


_layer_norm: Any = jax.custom_vjp(_apply, nondiff_argnums=(0, 1, 2))
_layer_norm.defvjp(_forward, _backward)
