"""How torch_npu itself binds an operator: another caller of the same function, to compare results with."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from npugrad.meta import CallMeta


@dataclass(frozen=True)
class TorchBinding:
    """A function below `torch.ops`.

    Example:
        >>> TorchBinding("aten.native_layer_norm", ("input", "sizes"), ("eps",)).path
        'aten.native_layer_norm'

    Attributes:
        path: Its name there.
        positional: The record's names of what it takes, in its own order.
        keyword: The record's names of what it takes by these names.
        takes: Whether it hands a legal call down as it is, which some do not.
    """

    path: str
    positional: tuple[str, ...]
    keyword: tuple[str, ...] = ()
    takes: Callable[[CallMeta], bool] = lambda call: True

    def call(self, ops: Any, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """Calls it.

        Args:
            ops: `torch.ops`.
            values: Tensors on the device and attributes, by the record's names.

        Returns:
            The outputs in the order of the record.

        Raises:
            AttributeError: This torch_npu does not have it.
        """
        given = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        return tuple(
            attrgetter(self.path)(ops)(
                *(given[name] for name in self.positional), **{name: given[name] for name in self.keyword}
            )
        )
