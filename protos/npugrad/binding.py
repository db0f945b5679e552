"""PyTorch's operator of a record: torch_npu's, or one of `torch.ops.aten`, which the CPU may have, too."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from npugrad.attributes import Scalar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from npugrad.meta import CallMeta

ATEN = "aten."


@dataclass(frozen=True)
class TorchBinding:
    """A function below `torch.ops`.

    Example:
        >>> binding = TorchBinding(
        ...     "aten._softmax_backward_data",
        ...     ("grad_output", "output", "dim", "input_dtype"),
        ...     made={"input_dtype": lambda given: given["output"].dtype},
        ... )
        >>> binding.is_aten
        True

    Attributes:
        path: Its name below `torch.ops`.
        positional: Positional arguments, as names in the record or in `made`.
        keyword: Keyword arguments, likewise; each has this name in PyTorch, too.
        made: Arguments that are not simply the record's: constants, keywords of another name, numbers that
            stand for texts. Each has a function of the record's values, arrays of numbers being lists.
        results: Which of the function's results are the record's outputs, in their order; empty for all.
        back: Parameters that are not simply arguments when autograd calls the function. Each has
            a function of the arguments by name.
        takes: Whether it passes a legal call on unchanged; some bindings do not. Operators of `aten` check
            less than `torch.nn` does: one that would read a null operand must not be given such a call.
            Nor do they check indices; the record's `data_check` has to.
        is_compared: Whether an NPU's results by this function are compared with the service's, bit for bit.
            torch_npu may run another function, or round gradients otherwise.
    """

    path: str
    positional: tuple[str, ...]
    keyword: tuple[str, ...] = ()
    made: Mapping[str, Callable[[Mapping[str, Any]], Any]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    results: tuple[int, ...] = ()
    back: Mapping[str, Callable[[Mapping[str, Any]], Any]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    takes: Callable[[CallMeta], bool] = lambda call: True
    is_compared: bool = True

    @property
    def is_aten(self) -> bool:
        """Whether it is PyTorch's own, which the CPU may have, too."""
        return self.path.startswith(ATEN)

    def arguments(self, values: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments of a call; for its own arguments see `call`."""
        given = {name: _plain(value) for name, value in values.items()}

        def argument(name: str) -> Any:
            return self.made[name](given) if name in self.made else given[name]

        return [argument(name) for name in self.positional], {name: argument(name) for name in self.keyword}

    def call(self, ops: Any, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """Calls the function.

        Args:
            ops: `torch.ops`.
            values: Tensors on the device and attributes, by the record's names.

        Returns:
            The outputs in the order of the record; None for some that are not wanted.

        Raises:
            AttributeError: The installed PyTorch or torch_npu lacks it.
        """
        function = attrgetter(self.path)(ops)
        positional, keyword = self.arguments(values)
        found = function(*positional, **keyword)
        results = tuple(found) if isinstance(found, (tuple, list)) else (found,)
        return tuple(results[index] for index in self.results) if self.results else results


def _plain(value: Any) -> Any:
    """An attribute as PyTorch takes it."""
    if isinstance(value, Scalar):
        return value.value
    return list(value) if isinstance(value, tuple) else value
