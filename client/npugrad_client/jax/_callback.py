"""The way from JAX to the service: a callback on the host that touches NumPy only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from npugrad.meta import TensorMeta

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from npugrad_client import Client

Array = Any
"""An array of JAX, or a tracer of one."""


@dataclass(frozen=True)
class Service:
    """A client with the options of its calls; hashable, as what JAX compiles for must be.

    Attributes:
        client: Who calls the service.
        timeout_s: Deadline of each call in seconds; None for the client's default.
        deterministic: Whether results must not depend on the order of summation.
        priority: Calls of higher priority leave the queue first; -100 to 100.
        label: Name of the caller or experiment.
        verify: Whether the server recomputes each call and refuses a result that differs.
    """

    client: Client
    timeout_s: float | None = None
    deterministic: bool = False
    priority: int = 0
    label: str = ""
    verify: bool = False

    def gradients(
        self,
        operator: str,
        operands: Mapping[str, Array | None],
        attrs: Mapping[str, Any],
        results: Mapping[str, Array],
    ) -> tuple[Array, ...]:
        """Calls an operator when the program runs.

        Args:
            operator: Name of the operator.
            operands: Operands by name; None for those that are not there.
            attrs: Attributes by name.
            results: By name of the result, in the order that is wanted, an array of its shape and type.
        """
        names = [name for name, value in operands.items() if value is not None]
        method = getattr(self.client, operator)
        options = {
            "timeout_s": self.timeout_s,
            "deterministic": self.deterministic,
            "priority": self.priority,
            "label": self.label,
            "verify": self.verify,
        }

        def call(*values: Any) -> tuple[Any, ...]:
            arrays = {name: np.asarray(value) for name, value in zip(names, values, strict=True)}
            found = method(**arrays, **attrs, **options)
            return tuple(getattr(found, name) for name in results)

        shapes = tuple(jax.ShapeDtypeStruct(like.shape, like.dtype) for like in results.values())
        given = [operands[name] for name in names]
        return tuple(jax.pure_callback(call, shapes, *given, vmap_method="sequential"))

    def wanted_gradients(
        self,
        operator: str,
        operands: Mapping[str, Array | None],
        attrs: Mapping[str, Any],
        results: Mapping[str, Array | None],
    ) -> tuple[Array | None, ...]:
        """The same of an operator with a mask; a result like None is not wanted, and None."""
        wanted = {name: value for name, value in results.items() if value is not None}
        masked = {**attrs, "output_mask": tuple(name in wanted for name in results)}
        found = dict(zip(wanted, self.gradients(operator, operands, masked, wanted), strict=True))
        return tuple(found.get(name) for name in results)


def like(shape: Sequence[int], value: Array | None) -> jax.ShapeDtypeStruct:
    """An operand of the backward pass only, of the type of `value`; None is what is refused, not this."""
    return jax.ShapeDtypeStruct(tuple(shape), np.float32 if value is None else value.dtype)


def metas(operator: str, operands: Mapping[str, Array | None]) -> dict[str, TensorMeta | None]:
    """Type and shape of each operand, which are known when a function is traced.

    Raises:
        TypeError: The service knows nothing like the type of one of them.
    """
    return {name: None if value is None else _meta(operator, name, value) for name, value in operands.items()}


def _meta(operator: str, name: str, value: Array) -> TensorMeta:
    try:
        return TensorMeta(np.dtype(value.dtype), value.shape)
    except (TypeError, ValueError):  # a key of JAX's generators; one of its narrow floats
        raise TypeError(
            f"{operator}: {name}: found {value.dtype}; expected float32, float16, bfloat16, float64, an "
            "integer type or bool"
        ) from None


def zero_tangent(value: Array) -> Any:
    """The cotangent of an operand that has none, such as integers."""
    return np.zeros(value.shape, jax.dtypes.float0)
