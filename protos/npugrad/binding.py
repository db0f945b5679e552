"""torch_npu's binding of an operator, for comparing results."""

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
        path: Its name below `torch.ops`.
        positional: Positional arguments, as names in the record.
        keyword: Keyword arguments, as names in the record.
        takes: Whether it passes a legal call on unchanged; some bindings do not.
    """

    path: str
    positional: tuple[str, ...]
    keyword: tuple[str, ...] = ()
    takes: Callable[[CallMeta], bool] = lambda call: True

    def call(self, ops: Any, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """Calls the function.

        Args:
            ops: `torch.ops`.
            values: Tensors on the device and attributes, by the record's names.

        Returns:
            The outputs in the order of the record.

        Raises:
            AttributeError: The installed torch_npu lacks it.
        """
        given = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        return tuple(
            attrgetter(self.path)(ops)(
                *(given[name] for name in self.positional), **{name: given[name] for name in self.keyword}
            )
        )
