"""Helpers of this package's functions: dtypes and shapes for the validator."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import Tensor

from npugrad.errors import WrongType
from npugrad.meta import TensorMeta
from npugrad_client import _arrays

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


def require_tensors(operator: str, operands: Mapping[str, Tensor | None]) -> None:
    """Rejects operands that are not tensors, such as NumPy arrays, which the service would accept.

    Raises:
        WrongType: An operand is neither a tensor nor None.
    """
    for name, operand in operands.items():
        if operand is not None and not isinstance(operand, Tensor):
            raise WrongType(
                f"{operator}: {name}: found {type(operand).__name__}; expected a torch CPU tensor"
            )


def cast_given(operands: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The operands in another type; None stays None, which `metas` and the validator report as null."""
    given: tuple[Tensor | None, ...] = operands
    return tuple(cast("Tensor", None if tensor is None else tensor.to(dtype)) for tensor in given)


def metas(operator: str, inputs: Mapping[str, Tensor | None]) -> dict[str, TensorMeta | None]:
    """Dtype and shape of each tensor, without touching its data.

    Raises:
        WrongType: A dtype is unsupported.
    """
    return {
        name: None if tensor is None else _meta(operator, name, tensor) for name, tensor in inputs.items()
    }


def _meta(operator: str, name: str, tensor: Tensor) -> TensorMeta:
    array = _arrays.to_numpy(tensor, operator, name)
    return TensorMeta(array.dtype, array.shape)
