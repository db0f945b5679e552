"""Calls of CPU kernels as C takes them: `npugrad_call` and all that it points to, in one block of memory.

Making a ctypes object for each tensor would take longer than a small kernel. A block belongs to one call: a
thread makes its own, even while it is in another call.
"""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING, Any

from npugrad.dtypes import DATA_DTYPES, dtype_from_name
from npugrad.operator import AttrParam, TensorParam

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    from npugrad.attributes import AttrType
    from npugrad.operator import OpRecord

    Arrays = Mapping[str, npt.NDArray[Any] | None]

# Bytes of a word, and the 64-bit words of a call and of a tensor. Two 32-bit numbers share a word, the first
# in its lower half: every machine that has kernels is little-endian.
_WORD, _CALL_WORDS, _TENSOR_WORDS = 8, 8, 4
_ADDRESS = struct.Struct("q")
_POINTER = ctypes.c_int64.from_address


class Layout:
    """What all calls of an operator share: parameter names by kind, in the record's order.

    Attributes:
        record: The operator's record.
        tensors: Names of its tensors, inputs and outputs.
        roles: The same names, and whether each is an input.
    """

    def __init__(self, record: OpRecord) -> None:
        """Sorts the record's parameters; raises TypeError for an attribute kind that kernels do not take."""
        self.record = record
        tensors = [param for param in record.params if isinstance(param, TensorParam)]
        attrs = [param for param in record.params if isinstance(param, AttrParam)]
        self.tensors = tuple(param.name for param in tensors)
        self.roles = tuple((param.name, param.role == "input") for param in tensors)
        self._integers = _of_kinds(attrs, {"int64", "int32", "int8"}, "int64_array")
        self._reals = _of_kinds(attrs, {"double", "float"}, "float_array")
        self._bools = _of_kinds(attrs, {"bool"}, "bool_array")
        if len(attrs) > len(self._integers) + len(self._reals) + len(self._bools):
            raise TypeError(f"{record.name}: found an attribute of a kind that C kernels are not given")

    def arrays(self, inputs: Arrays, outputs: Arrays) -> list[npt.NDArray[Any] | None]:
        """Operands and results; None for null and for unwanted ones."""
        return [(inputs if is_input else outputs).get(name) for name, is_input in self.roles]

    def integers(self, attrs: Mapping[str, Any]) -> list[int]:
        """Values of the attributes of signed integer types and of integer arrays, all in one list."""
        return _listed(self._integers, attrs)

    def reals(self, attrs: Mapping[str, Any]) -> list[float]:
        """Values of the attributes of types double and float, and of float arrays."""
        return _listed(self._reals, attrs)

    def bools(self, attrs: Mapping[str, Any]) -> bytes:
        """Values of the attributes of type bool and of bool arrays, a byte each."""
        return bytes(_listed(self._bools, attrs))


def _of_kinds(
    attrs: Iterable[AttrParam], plain: set[AttrType], array: AttrType
) -> tuple[tuple[str, bool], ...]:
    """Name of each attribute of these kinds, and whether it is an array."""
    return tuple((p.name, p.type == array) for p in attrs if p.type == array or p.type in plain)


def _listed(names: Iterable[tuple[str, bool]], attrs: Mapping[str, Any]) -> list[Any]:
    """Their values; none for a null array."""
    values: list[Any] = []
    for name, several in names:
        if several:
            values += attrs[name] or ()
        else:
            values.append(attrs[name])
    return values


def described(
    layout: Layout, arrays: Sequence[npt.NDArray[Any] | None], attrs: Mapping[str, Any], ask: int
) -> bytearray:
    """A call with all that it points to, except the arrays' elements, which the caller keeps alive.

    In the block's order: the call, pointers to the tensors, tensors, attributes, shapes and strides.

    Args:
        layout: The operator's layout.
        arrays: As `layout.arrays` orders them, None for null.
        attrs: Attributes by name.
        ask: Address of the C function to poll with the call's address; 0 for none.

    Raises:
        ValueError: Strides are negative or no multiple of an element.
    """
    integers, reals, bools = layout.integers(attrs), layout.reals(attrs), layout.bools(attrs)
    axes = sum(array.ndim for array in arrays if array is not None)
    attributes = _CALL_WORDS + (1 + _TENSOR_WORDS) * len(arrays)
    sizes = attributes + len(integers) + len(reals) + -(-len(bools) // _WORD)
    call = bytearray(_WORD * (sizes + 2 * axes))
    start = address_of(call)
    tensor, size = start + _WORD * (_CALL_WORDS + len(arrays)), start + _WORD * sizes
    pointers: list[int] = []
    tensors: list[int] = []
    steps: list[int] = []
    for array in arrays:
        pointers.append(0 if array is None else tensor)
        tensor += _WORD * _TENSOR_WORDS
        if array is None:
            tensors += (0,) * _TENSOR_WORDS
            continue
        rank = array.ndim
        tensors += (array.ctypes.data, _acl(array.dtype) | rank << 32, size, size + _WORD * rank)
        size += 2 * _WORD * rank
        steps += array.shape
        steps += _steps(array)
    first = start + _WORD * attributes
    values = first, first + _WORD * len(integers), first + _WORD * (len(integers) + len(reals))
    counts = len(arrays) | len(integers) << 32, len(reals) | len(bools) << 32
    words = (start + _WORD * _CALL_WORDS, *values, *counts, ask, start, *pointers, *tensors, *integers)
    struct.pack_into(f"{len(words)}q{len(reals)}d{len(bools)}B", call, 0, *words, *reals, *bools)
    struct.pack_into(f"{len(steps)}q", call, _WORD * sizes, *steps)
    return call


class Block:
    """A described call whose arrays can be replaced by others of the same types, shapes and strides.

    For one call at a time.

    Attributes:
        address: Address of the call.
    """

    def __init__(self, layout: Layout, arrays: Sequence[npt.NDArray[Any] | None], call: bytearray) -> None:
        """Takes what `described` made of the arrays.

        Args:
            layout: The operator's layout.
            arrays: As `layout.arrays` orders them.
            call: The described call.
        """
        self._call = call
        self.address = address_of(call)
        first = _WORD * (_CALL_WORDS + len(arrays))
        self._slots = tuple(
            (name, is_input, first + _WORD * _TENSOR_WORDS * index, array.dtype, array.shape, array.strides)
            for index, ((name, is_input), array) in enumerate(zip(layout.roles, arrays, strict=True))
            if array is not None
        )

    def point_to(self, inputs: Arrays, outputs: Mapping[str, npt.NDArray[Any]]) -> None:
        """Replaces the arrays; the caller keeps the new ones alive.

        Raises:
            ValueError: One of them differs from its predecessor in type, shape or strides.
        """
        for name, is_input, place, *like in self._slots:
            array = inputs[name] if is_input else outputs[name]
            if array is None or [array.dtype, array.shape, array.strides] != like:
                raise ValueError(f"found {name} of another type, shape or strides; expected those before")
            _ADDRESS.pack_into(self._call, place, _data_of(array))


def _data_of(array: npt.NDArray[Any]) -> int:
    """The address of an array's data: what NumPy itself offers takes longer than the rest of a small call.

    In NumPy's C interface an array begins with the head of every Python object, and then this address.
    """
    return int(_POINTER(id(array) + object.__basicsize__).value)


def address_of(block: bytearray) -> int:
    """The address of a block."""
    return ctypes.addressof(ctypes.c_char.from_buffer(block))


def _steps(array: npt.NDArray[Any]) -> Sequence[int]:
    """Strides in elements."""
    itemsize = array.itemsize
    steps = [step // itemsize for step in array.strides]
    if any(step < 0 or step * itemsize != given for step, given in zip(steps, array.strides, strict=True)):
        raise ValueError("found strides that are negative or no multiple of an element")
    return steps


_ACL = {dtype.numpy: dtype.acl for dtype in DATA_DTYPES}


def _acl(dtype: np.dtype[Any]) -> int:
    found = _ACL.get(dtype)
    return dtype_from_name(dtype).acl if found is None else found
