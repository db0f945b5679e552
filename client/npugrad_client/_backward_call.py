"""Interface of a backward call for the policy engine, implemented for PyTorch and for JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping


class BackwardCall(Protocol):
    """One backward call in the words of the service."""

    @property
    def operator(self) -> str:
        """Name of the operator."""
        ...

    @property
    def inputs(self) -> Mapping[str, Any]:
        """Operands by name, in the caller's types; None for those that are not there."""
        ...

    @property
    def attrs(self) -> Mapping[str, Any]:
        """Attributes by name."""
        ...

    @property
    def odd(self) -> str | None:
        """Which operand is nothing to send, and what it is; None where all are dense, in CPU memory."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of operands and results; asked for where no operand is odd."""
        ...

    @property
    def is_mixed(self) -> bool:
        """Whether the operands have several types, all of which the service knows, and may not."""
        ...

    def operands(self) -> Mapping[str, Any]:
        """Operands by name, None for those that are not there; mixed types as float32."""
        ...

    def give_back(self, found: Mapping[str, Any]) -> tuple[Any, ...]:
        """Results of the service in the caller's order and dtypes; None for results not computed."""
        ...


class TracedCall(BackwardCall, Protocol):
    """One that may have no values yet."""

    def require_legal(self) -> None:
        """Refuses what no product takes.

        Raises:
            OperatorError: The documents refuse the call.
        """
        ...
