"""Host callback from JAX to the service, which handles NumPy arrays only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from npugrad.errors import WrongType, WrongValue
from npugrad.meta import TensorMeta
from npugrad_client._fitting import FLOATS, as_sent, fits, is_mixed
from npugrad_client._legality import require_legal
from npugrad_client._policy import STRICT, Options, PolicyEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from npugrad_client import Client
    from npugrad_client._policy import Policies

Array = Any
"""A JAX array, or a tracer of one."""
_MAY_MIX = ("layer_norm_backward", "fused_floyd_attention_grad")
"""Operators whose operands may have several types according to the documents."""


@dataclass(frozen=True)
class Service:
    """A client with policies and the options of its calls; hashable, as JAX requires for compilation.

    Attributes:
        client: Client to call the service with.
        policies: What to do with calls that are small, rejected or fail.
        timeout_s: Deadline of each call in seconds; None for the client's default.
        deterministic: Request bitwise reproducible results.
        priority: -100 to 100; calls of higher priority leave the queue first.
        label: Name of the caller or experiment.
        verify: Have the server recompute each call with its reference and fail if a result differs.
    """

    client: Client
    policies: Policies | None
    timeout_s: float | None = None
    deterministic: bool = False
    priority: int = 0
    label: str = ""
    verify: bool = False

    def __post_init__(self) -> None:
        """Rejects a policy that needs the local time of a call, which compiled code does not report."""
        if self.policies is not None and self.policies.policy != "always":
            raise WrongValue(f"policies: policy: found {self.policies.policy!r}; expected 'always' under JAX")

    def require(
        self, operator: str, operands: Mapping[str, Array | None], attrs: Mapping[str, Any], **known: Any
    ) -> None:
        """Rejects a forward pass at trace time that the policies cannot handle.

        Args:
            operator: Name of the operator of its gradient.
            operands: Its operands by name, including those that follow from others.
            attrs: Attributes by name.
            known: Operands of the local formula that the documents do not have.

        Raises:
            OperatorError: The documents do not allow the call.
            MalformedRequest: The operator has no such attribute.
            WrongType: An operand has an unsupported dtype.
        """
        given = metas(operator, operands)
        if (self.policies or STRICT).on_refused != "raise" and fits(
            operator, {**given, **metas(operator, known)}, attrs
        ):
            return
        require_legal(operator, given if operator in _MAY_MIX else as_sent(given), attrs)

    def gradients(
        self,
        operator: str,
        operands: Mapping[str, Array | None],
        attrs: Mapping[str, Any],
        results: Mapping[str, Array],
        local: Callable[[], Sequence[Array]],
    ) -> tuple[Array, ...]:
        """Calls an operator when the program runs, or computes its results here.

        Whatever is known at trace time is decided then: by size, and for calls that no product accepts.

        Args:
            operator: Name of the operator.
            operands: Operands by name; None for missing ones.
            attrs: Attributes by name.
            results: For each result by name, in the wanted order, an array of its shape and type.
            local: Computes the results here.
        """
        given = {name: value for name, value in operands.items() if value is not None}
        policies = self.policies or STRICT
        options = Options(
            timeout_s=self.timeout_s,
            deterministic=self.deterministic,
            priority=self.priority,
            label=self.label,
            verify=self.verify,
        )
        engine = PolicyEngine(self.client, options, policies)
        shapes = tuple(jax.ShapeDtypeStruct(like.shape, like.dtype) for like in results.values())
        wanted = dict(zip(results, shapes, strict=True))
        if engine.keeps(_Call(operator, given, attrs, wanted)):
            return tuple(local())

        def call(*values: Any) -> tuple[Any, ...]:
            arrays = {name: np.asarray(value) for name, value in zip(given, values, strict=True)}
            found = engine.run(_Call(operator, arrays, attrs, wanted), lambda: None)
            if found is not None:
                return np.True_, *found
            return np.False_, *(np.zeros(shape.shape, shape.dtype) for shape in shapes)

        flag = jax.ShapeDtypeStruct((), np.bool_)
        is_sent, *found = jax.pure_callback(call, (flag, *shapes), *given.values(), vmap_method="sequential")
        if policies is STRICT:  # then it was sent, or an error was raised
            return tuple(found)
        return tuple(jax.lax.cond(is_sent, lambda: tuple(found), lambda: tuple(local())))

    def wanted_gradients(
        self,
        operator: str,
        operands: Mapping[str, Array | None],
        attrs: Mapping[str, Any],
        results: Mapping[str, Array | None],
        local: Callable[..., Array],
        grad: Array,
    ) -> tuple[Array | None, ...]:
        """Does the same for an operator with an output mask; the gradient of an operand that is None is None.

        Args:
            operator: Name of the operator.
            operands: Operands by name; None for missing ones.
            attrs: Attributes by name.
            results: For each result by name, the operand of which it is the gradient; None if there is none.
            local: The forward pass, as a function of the operands that have a gradient.
            grad: Gradient of its result.
        """
        wanted = {name: value for name, value in results.items() if value is not None}
        masked = {**attrs, "output_mask": tuple(name in wanted for name in results)}

        def forward(*some: Array) -> Array:
            each = dict(zip(wanted, some, strict=True))
            return local(*(each.get(name) for name in results))

        def here() -> Sequence[Array]:
            return vjp(forward, tuple(wanted.values()), grad)

        found = dict(zip(wanted, self.gradients(operator, operands, masked, wanted, here), strict=True))
        return tuple(found.get(name) for name in results)


@dataclass(frozen=True)
class _Call:
    """A call for the engine: traced, with arrays that have no values yet, or with NumPy arrays."""

    operator: str
    inputs: Mapping[str, Array]
    attrs: Mapping[str, Any]
    results: Mapping[str, jax.ShapeDtypeStruct]
    odd: None = None

    @property
    def nbytes(self) -> int:
        """Bytes of operands and results."""
        every = (*self.inputs.values(), *self.results.values())
        return sum(int(np.prod(each.shape)) * each.dtype.itemsize for each in every)

    @property
    def is_mixed(self) -> bool:
        """Whether the operands have several types although they must not."""
        return self.operator not in _MAY_MIX and is_mixed(self.metas())

    def metas(self) -> dict[str, TensorMeta | None]:
        """Type and shape of each operand."""
        return metas(self.operator, self.inputs)

    def require_legal(self) -> None:
        """Rejects calls that no product accepts."""
        given = self.metas()
        require_legal(self.operator, as_sent(given) if self.is_mixed else given, self.attrs)

    def operands(self) -> dict[str, Array]:
        """The operands in one type: mixed ones as float32."""
        if not self.is_mixed:
            return dict(self.inputs)
        return {
            name: array.astype(np.float32) if array.dtype.name in FLOATS else array
            for name, array in self.inputs.items()
        }

    def give_back(self, found: Mapping[str, Any]) -> tuple[Any, ...]:
        """The results in the wanted order and types."""
        return tuple(found[name].astype(like.dtype, copy=False) for name, like in self.results.items())


def vjp(forward: Callable[..., Array], operands: Sequence[Array], grad: Array) -> tuple[Array, ...]:
    """Gradients of operands by a formula of elementary operators."""
    found: tuple[Array, ...] = jax.vjp(forward, *operands)[1](grad)
    return found


def wide(*values: Array | None) -> Any:
    """The type to compute in: float32, or float64 if a value is float64."""
    return jnp.result_type(jnp.float32, *(value.dtype for value in values if value is not None))


def like(shape: Sequence[int], value: Array | None) -> jax.ShapeDtypeStruct:
    """A backward-only operand of the type of `value`; if that is None, it is refused instead of this one."""
    return jax.ShapeDtypeStruct(tuple(shape), np.float32 if value is None else value.dtype)


def metas(operator: str, operands: Mapping[str, Array | None]) -> dict[str, TensorMeta | None]:
    """Type and shape of each operand, which are known when a function is traced.

    Raises:
        WrongType: The service does not know the type of one of them.
    """
    return {name: None if value is None else _meta(operator, name, value) for name, value in operands.items()}


def _meta(operator: str, name: str, value: Array) -> TensorMeta:
    try:
        return TensorMeta(np.dtype(value.dtype), value.shape)
    except (TypeError, ValueError):  # a JAX random key, or one of its narrow floats
        raise WrongType(
            f"{operator}: {name}: found {value.dtype}; expected float32, float16, bfloat16, float64, an "
            "integer type or bool"
        ) from None


def zero_tangent(value: Array) -> Any:
    """The cotangent of an operand without gradient, such as integers."""
    return np.zeros(value.shape, jax.dtypes.float0)
