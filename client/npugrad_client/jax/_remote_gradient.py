"""Any forward pass whose operands, or result, are all that the operator of its gradient needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from npugrad.errors import WrongValue
from npugrad.ops import get_operator
from npugrad.usage import reports_usage
from npugrad_client._legality import require_client
from npugrad_client.jax._callback import Array, Service, vjp

if TYPE_CHECKING:
    from collections.abc import Callable

    from npugrad.operator import OpRecord
    from npugrad_client import Client
    from npugrad_client._policy import Policies

RESULT = "output"
"""The forward result, in records whose operators take it."""


@reports_usage
def remote_gradient(
    forward: Callable[..., Array],
    operator: str,
    *,
    client: Client,
    policies: Policies | None = None,
    timeout_s: float | None = None,
    deterministic: bool = False,
    priority: int = 0,
    label: str = "",
    verify: bool = False,
    **attrs: Any,
) -> Callable[..., Array]:
    """A function with a remote gradient, by an operator that needs its arrays or its result and no more.

    These are activations and softmax, such as `silu_backward`, `gelu_backward_v2` and `softmax_backward`.

    Args:
        forward: The function. It takes as many arrays as the operator has results.
        operator: Operator that computes its gradient.
        client: Client used in the backward pass.
        policies: What to do with calls that are small, rejected or fail; also counts calls. None sends every
            call and raises documented errors when the function is traced.
        timeout_s: Deadline of the call in seconds; None for the client's default.
        deterministic: Request bitwise reproducible results.
        priority: -100 to 100; calls of higher priority leave the queue first.
        label: Name of the caller or experiment.
        verify: Have the server recompute the call with its reference and fail if the result differs.
        attrs: Attributes of the operator, for the same function.

    Returns:
        A function of the same arrays with the same result.

    Raises:
        UnsupportedOperator: Unknown operator.
        WrongValue: The operator needs more than the arrays and the result of a forward pass.
        WrongType: An argument is unknown or missing, or `client` is not a `Client`.

    Example:
        >>> silu = remote_gradient(jax.nn.silu, "silu_backward", client=client)
        >>> jax.jit(jax.grad(lambda x: silu(x).sum()))(jnp.zeros(2))
        Array([0.5, 0.5], dtype=float32)
    """
    require_client("remote_gradient", client)
    service = Service(client, policies, timeout_s, deterministic, priority, label, verify)
    like, record = _likes(operator), get_operator(operator)

    def operands(arrays: tuple[Array, ...], result: Array, grad: Array) -> dict[str, Array]:
        known = {record.inputs[0].name: grad, RESULT: result, **dict(zip(like, arrays, strict=True))}
        return {param.name: result if param.name == RESULT else known[param.name] for param in record.inputs}

    def forwards(*arrays: Array) -> tuple[Array, tuple[tuple[Array, ...], Array]]:
        result = forward(*arrays)
        return result, (arrays, result)

    def backwards(saved: tuple[tuple[Array, ...], Array], grad: Array) -> tuple[Array, ...]:
        arrays, result = saved
        results = dict(zip((param.name for param in record.outputs), arrays, strict=True))
        given = operands(arrays, result, grad)
        return service.gradients(operator, given, attrs, results, lambda: vjp(forward, arrays, grad))

    # Of JAX's own functions it would take the defaults for further arrays.
    differentiable: Any = jax.custom_vjp(lambda *arrays: forward(*arrays))
    differentiable.defvjp(forwards, backwards)

    def checked(*arrays: Array) -> Array:
        result = jax.eval_shape(forward, *arrays)
        service.require(operator, operands(arrays, result, result), attrs)
        return differentiable(*arrays)

    return checked


def _likes(operator: str) -> list[str]:
    """For each result of an operator, the forward operand that it is the gradient of."""
    record: OpRecord = get_operator(operator)
    grad, *saved = (param.name for param in record.inputs)
    like = [param.like for param in record.outputs]
    is_masked = any(param.masked_by is not None for param in record.outputs)
    if not grad.startswith("grad") or is_masked or not {*saved} <= {*like, RESULT}:
        needed = ", ".join(param.name for param in record.inputs)
        raise WrongValue(
            f"remote_gradient: operator: found {operator}, which needs {needed}; expected one that needs a "
            "gradient and the arrays or the result of a forward pass"
        )
    return like
