"""Conversion of operands and results: NumPy, ml_dtypes, the array protocol, DLPack, torch CPU tensors.

torch is never imported here; if a tensor is passed, it is already imported.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, Union

import ml_dtypes
import numpy as np
import numpy.typing as npt

from npugrad import layout
from npugrad.dtypes import DType, dtype_from_name
from npugrad.errors import WrongType
from npugrad.meta import TensorMeta
from npugrad.recipe import Recipe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import ModuleType

T = TypeVar("T")

_DLPACK_HOST_DEVICES = (1, 3)
"""`kDLCPU` and `kDLCUDAHost` of the DLPack header: memory that the CPU can read."""


class SupportsArray(Protocol):
    """Any object with NumPy's array protocol."""

    def __array__(self) -> npt.NDArray[Any]:
        """The values as an array."""
        ...


class SupportsDLPack(Protocol):
    """Any object with the DLPack protocol, in CPU memory."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """A capsule over the values."""
        ...

    def __dlpack_device__(self) -> Any:
        """Type and number of the device that holds them."""
        ...


ArrayLike = Union["npt.NDArray[Any]", SupportsArray, SupportsDLPack]
"""Accepted as an array: NumPy and ml_dtypes arrays, torch CPU tensors, array protocol, DLPack."""

Operand = ArrayLike | Recipe
"""Accepted as an operand: an array, or a recipe from which the server generates it."""


def is_torch(value: object) -> bool:
    """Whether a value is a torch tensor."""
    tensor = getattr(_torch(), "Tensor", None)  # absent while another thread is still importing torch
    return tensor is not None and isinstance(value, tensor)


def has_torch(values: Iterable[object]) -> bool:
    """Whether any of the values is a torch tensor."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    if tensor is not None:
        for value in values:
            if isinstance(value, tensor):
                return True
    return False


def _torch() -> ModuleType | None:
    return sys.modules.get("torch")


def to_numpy(value: object, operator: str, name: str) -> npt.NDArray[Any]:
    """Converts an operand to a NumPy array of a supported dtype, without a copy if possible.

    Args:
        value: The operand.
        operator: Name for the error message.
        name: Name of the operand, also for the error message.

    Raises:
        WrongType: It is not an array, its dtype is unsupported, or it is not in CPU memory.
    """
    array = _torch_to_numpy(value, operator, name) if is_torch(value) else _foreign(value, operator, name)
    _dtype(array, operator, name)
    return array


def _dtype(array: npt.NDArray[Any], operator: str, name: str) -> DType:
    try:
        return dtype_from_name(array.dtype)
    except (ValueError, TypeError):  # NumPy raises TypeError: its newer types have no byte order
        raise WrongType(
            f"{operator}: {name}: found dtype {array.dtype}; expected float32, float16, bfloat16, float64, "
            "an integer type or bool"
        ) from None


def _foreign(value: object, operator: str, name: str) -> npt.NDArray[Any]:
    if isinstance(value, np.ma.MaskedArray):
        raise WrongType(
            f"{operator}: {name}: found a masked array; expected one without a mask, so call .filled()"
        )
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value)
    try:
        if hasattr(value, "__array__"):
            return np.asarray(value)
        if hasattr(value, "__dlpack__"):
            return _from_dlpack(value)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise WrongType(
            f"{operator}: {name}: found {type(value).__name__} that cannot be converted to an array: {error}"
        ) from error
    raise WrongType(
        f"{operator}: {name}: found {type(value).__name__}; expected a NumPy array, a torch CPU tensor or "
        "anything with __array__ or __dlpack__"
    )


def _from_dlpack(value: Any) -> npt.NDArray[Any]:
    device = value.__dlpack_device__()
    if device[0] not in _DLPACK_HOST_DEVICES:
        raise BufferError(f"it is on DLPack device {tuple(map(int, device))}; expected CPU memory")
    return np.from_dlpack(value)


def _torch_to_numpy(value: Any, operator: str, name: str) -> npt.NDArray[Any]:
    """The memory of a torch CPU tensor: detached, conj and neg resolved, bfloat16 bit for bit."""
    torch: Any = _torch()
    if value.device.type != "cpu":
        is_meta = value.is_meta
        found = "a meta tensor, which holds no data" if is_meta else f"a tensor on {value.device}"
        hint = "a tensor with values" if is_meta else "CPU memory, so call .cpu()"
        raise WrongType(f"{operator}: {name}: found {found}; expected {hint}")
    if value.layout is not torch.strided or value.is_nested:
        kind = "a nested tensor" if value.is_nested else f"layout {value.layout}"
        raise WrongType(f"{operator}: {name}: found {kind}; expected a dense tensor")
    try:
        plain = value.detach().resolve_conj().resolve_neg()
        if plain.dtype is torch.bfloat16:
            return plain.view(torch.int16).numpy().view(ml_dtypes.bfloat16)  # type: ignore[no-any-return]
        return plain.numpy()  # type: ignore[no-any-return]
    except (TypeError, RuntimeError) as error:  # a dtype that NumPy lacks; a tensor without memory
        raise WrongType(
            f"{operator}: {name}: found a {type(value).__name__} of {value.dtype} that NumPy cannot read: "
            f"{error}"
        ) from None


def detached(value: Any) -> Any:
    """The value; a tensor without its part in autograd."""
    return value.detach() if is_torch(value) else value


def is_recording() -> bool:
    """Whether autograd, if there is one, records what this thread does."""
    torch: Any = _torch()
    return torch is None or bool(torch.is_grad_enabled())


def keeping_grad_mode(call: Callable[[], T]) -> Callable[[], T]:
    """The call as another thread is to make it: under `torch.no_grad` where this thread is."""
    torch: Any = _torch()
    return call if is_recording() else torch.no_grad()(call)


def pack_operand(value: object, operator: str, name: str) -> tuple[TensorMeta, memoryview | Recipe | None]:
    """Meta and content of an operand, or the recipe for it; errors as for `to_numpy`."""
    if isinstance(value, Recipe):
        return value.meta, value
    return pack(to_numpy(value, operator, name))


def pack(array: npt.NDArray[Any]) -> tuple[TensorMeta, memoryview | None]:
    """Meta and content of an operand.

    A dtype whose data is never sent, such as complex64, has no content; the server rejects it with the
    documented code.
    """
    dtype = dtype_from_name(array.dtype)
    if not dtype.has_data:
        return TensorMeta(dtype, array.shape), None
    return layout.content(array)


def copied(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call with copies of its operands, of the same layout.

    What cannot be converted is left as it is: the call says what is wrong with it.
    """
    return {name: _copied(value, name) for name, value in arguments.items()}


def _copied(value: Any, name: str) -> Any:
    is_array = is_torch(value) or hasattr(value, "__array__") or hasattr(value, "__dlpack__")
    if not is_array or isinstance(value, np.generic):
        return value
    try:
        meta, content = pack(to_numpy(value, "", name))
    except TypeError:
        return value
    if content is None:  # it is refused by its type
        return value
    array = layout.view(meta, bytearray(content))
    return to_torch(array) if is_torch(value) else array


def writable(value: object, operator: str, name: str) -> npt.NDArray[Any]:
    """Returns the memory of an array or tensor given as `out`.

    Raises:
        WrongType: It is not writable, or writes would not be visible to the caller.
    """
    if is_torch(value):
        array = _torch_to_numpy(value, operator, name)
        if value.is_neg() or value.is_conj():  # type: ignore[attr-defined]
            raise WrongType(f"{operator}: {name}: found a lazily negated tensor in out; expected a plain one")
    elif isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray):
        array = value
    else:
        raise WrongType(
            f"{operator}: {name}: found {type(value).__name__} in out; expected TensorMeta, None, a NumPy "
            "array or a torch CPU tensor"
        )
    _dtype(array, operator, name)
    if not array.flags.writeable:
        raise WrongType(f"{operator}: {name}: found a read-only array in out; expected a writable one")
    if any(step == 0 and size > 1 for step, size in zip(array.strides, array.shape, strict=True)):
        raise WrongType(
            f"{operator}: {name}: found an expanded array in out; expected memory for every element"
        )
    return array


def to_torch(array: npt.NDArray[Any]) -> Any:
    """A torch CPU tensor over the memory of an array; bfloat16 bit for bit."""
    torch: Any = _torch()
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
