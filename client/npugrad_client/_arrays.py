"""Operands in, results out: NumPy, ml_dtypes, the array protocol, and torch CPU tensors.

torch is never imported here: if a tensor was passed, its module is there already.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol, Union

import ml_dtypes
import numpy as np
import numpy.typing as npt

from npugrad.dtypes import dtype_from_name

if TYPE_CHECKING:
    from types import ModuleType


class SupportsArray(Protocol):
    """Anything that speaks NumPy's array protocol."""

    def __array__(self) -> npt.NDArray[Any]:
        """The values as an array."""


ArrayLike = Union["npt.NDArray[Any]", SupportsArray]
"""What is accepted as an operand: NumPy and ml_dtypes arrays, torch CPU tensors, the array protocol."""


def torch_module() -> ModuleType | None:
    """The torch module if the program has imported it."""
    return sys.modules.get("torch")


def is_torch(value: object) -> bool:
    """Whether a value is a torch tensor."""
    torch = torch_module()
    return torch is not None and isinstance(value, torch.Tensor)


def to_numpy(value: object, operator: str, name: str) -> npt.NDArray[Any]:
    """An operand as a NumPy array; no copy where its memory can be used as it is.

    Args:
        value: The operand.
        operator: Named in the error.
        name: Name of the operand.

    Raises:
        TypeError: It is no array, its dtype does not travel, or it is not in CPU memory.
    """
    if is_torch(value):
        return torch_to_numpy(value, operator, name)
    if not isinstance(value, (np.ndarray, np.generic)) and not hasattr(value, "__array__"):
        raise TypeError(
            f"{operator}: {name}: found {type(value).__name__}; expected a NumPy array, "
            "a torch CPU tensor or anything with __array__"
        )
    array = np.asarray(value)
    try:
        dtype_from_name(array.dtype)
        travels = dtype_from_name(array.dtype).has_data
    except ValueError:
        travels = False
    if not travels:
        raise TypeError(
            f"{operator}: {name}: found dtype {array.dtype}, whose data cannot travel; expected float32, "
            "float16, bfloat16, float64, an integer type or bool"
        )
    return array


def torch_to_numpy(value: Any, operator: str, name: str) -> npt.NDArray[Any]:
    """The memory of a torch CPU tensor as an array: detached, conj and neg resolved, bf16 bit for bit."""
    torch: Any = torch_module()
    if value.device.type != "cpu":
        raise TypeError(
            f"{operator}: {name}: found a tensor on {value.device}; expected CPU memory, so call .cpu()"
        )
    if value.layout is not torch.strided:
        raise TypeError(
            f"{operator}: {name}: found layout {value.layout}; expected a dense tensor, so call .to_dense()"
        )
    plain = value.detach().resolve_conj().resolve_neg()
    if plain.dtype is torch.bfloat16:
        return plain.view(torch.int16).numpy().view(ml_dtypes.bfloat16)  # type: ignore[no-any-return]
    try:
        return plain.numpy()  # type: ignore[no-any-return]
    except TypeError:
        raise TypeError(f"{operator}: {name}: found dtype {value.dtype}, whose data cannot travel") from None


def to_torch(array: npt.NDArray[Any]) -> Any:
    """A torch CPU tensor over the memory of an array; bf16 bit for bit."""
    torch: Any = torch_module()
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def fill(target: object, values: npt.NDArray[Any], operator: str, name: str) -> None:
    """Copies results into an array or tensor that the caller gave as `out`."""
    writable = to_numpy(target, operator, name)
    if writable.ctypes.data != values.ctypes.data:
        writable[...] = values
