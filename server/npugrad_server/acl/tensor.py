"""Handles of tensors, arrays and scalars: made together, destroyed together, each exactly once."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from npugrad.attributes import Scalar

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from npugrad.attributes import AttrType, AttrValue
    from npugrad.meta import TensorMeta
    from npugrad_server.acl.libraries import Functions
    from npugrad_server.acl.runtime import Runtime


@dataclass(frozen=True)
class DeviceTensor:
    """A tensor in device memory.

    Attributes:
        meta: Type, shape, format, and strides (in elements) if it is not contiguous.
        address: Where its content starts; CANN requires 32-byte alignment.
    """

    meta: TensorMeta
    address: int


class Handles:
    """Handles of one launch; leaving the context destroys them.

    They may be destroyed once the second phase has returned: until then, the executor reads addresses from
    them.
    """

    def __init__(self, runtime: Runtime, functions: Functions) -> None:
        """Takes the bound functions of `symbols.TENSORS`."""
        self._runtime = runtime
        self._functions = functions
        self._live: list[tuple[Any, int]] = []

    def tensor(self, tensor: DeviceTensor) -> int:
        """A new aclTensor.

        Raises:
            AclError: CANN could not make one.
        """
        meta = tensor.meta
        storage = _storage_shape(meta)
        return self._made(
            "Tensor",
            _int64s(meta.shape),
            meta.rank,
            meta.dtype.acl,
            _int64s(meta.element_strides),
            meta.storage_offset,
            meta.format.acl,
            _int64s(storage),
            len(storage),
            tensor.address,
        )

    def attribute(self, kind: AttrType, value: AttrValue) -> Any:
        """An attribute as phase 1 takes it.

        Arrays and scalars become new handles, which copy their contents; a string lives as long as the
        returned object.

        Raises:
            AclError: CANN could not make one.
            SymbolMissing: No library has the function that makes it.
        """
        if isinstance(value, tuple):
            name, entry = _ARRAYS[kind]
            return self._made(name, (entry * len(value))(*value), len(value))
        if isinstance(value, Scalar):
            content = ctypes.create_string_buffer(value.content, len(value.content))
            return self._made("Scalar", content, value.dtype.acl)
        return ctypes.create_string_buffer(value.encode()) if isinstance(value, str) else value

    def _made(self, name: str, *arguments: Any) -> int:
        handle = self._runtime.created(self._functions[f"aclCreate{name}"], *arguments)
        self._live.append((self._functions[f"aclDestroy{name}"], handle))
        return handle

    def close(self) -> None:
        """Destroys all of them; may be called again.

        Raises:
            AclError: CANN refused to destroy one; the others are destroyed all the same.
        """
        refused: Exception | None = None
        while self._live:
            destroy, handle = self._live.pop()
            try:
                self._runtime.call(destroy, handle)
            except Exception as error:
                refused = error
        if refused is not None:
            raise refused

    def __enter__(self) -> Handles:
        """The handles, none yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Destroys them; an error from the block takes precedence over one raised here."""
        try:
            self.close()
        except Exception:
            if error is None:
                raise


_ARRAYS: dict[AttrType, tuple[str, Any]] = {
    "bool_array": ("BoolArray", ctypes.c_bool),
    "int64_array": ("IntArray", ctypes.c_int64),
    "float_array": ("FloatArray", ctypes.c_float),
}
"""CANN's name for each kind of array, and the type of its entries."""


def _int64s(values: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(values))(*values)


def _storage_shape(meta: TensorMeta) -> tuple[int, ...]:
    """The documents' examples give a contiguous tensor its own shape; anything else is one flat axis."""
    if meta.is_contiguous and meta.shape:
        return meta.shape
    return (meta.content_bytes // meta.dtype.itemsize,)
