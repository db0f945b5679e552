"""Interface of a backward call for the policy engine, implemented for PyTorch and for JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping


class BackwardCall(Protocol):
    """One backward call in the service's terms."""

    @property
    def operator(self) -> str:
        """Name of the operator."""
        ...

    @property
    def inputs(self) -> Mapping[str, Any]:
        """Operands by name, in the caller's types; None for missing ones."""
        ...

    @property
    def attrs(self) -> Mapping[str, Any]:
        """Attributes by name."""
        ...

    @property
    def odd(self) -> str | None:
        """Which operand cannot be sent, and what it is; None if all are dense and in CPU memory."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of operands and results; only read if no operand is odd."""
        ...

    @property
    def is_mixed(self) -> bool:
        """Whether the operands mix types that the service supports but that must not be mixed."""
        ...

    def operands(self) -> Mapping[str, Any]:
        """Operands by name, None for missing ones; mixed types as float32."""
        ...

    def give_back(self, found: Mapping[str, Any]) -> tuple[Any, ...]:
        """Results of the service in the caller's order and dtypes; None for results not computed."""
        ...


class TracedCall(BackwardCall, Protocol):
    """A call whose operands may have no values yet."""

    def require_legal(self) -> None:
        """Rejects a call that no product accepts.

        Raises:
            OperatorError: The documents refuse the call.
        """
        ...
