"""The layout of a call in device memory, a pure function of the record and the metas.

Operands keep their strides where that saves work, because the operators take strided tensors: a transposed or
an expanded operand takes no more bytes to the device than the caller sent. Outputs are contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from npugrad.dtypes import Format
from npugrad.meta import TensorMeta

if TYPE_CHECKING:
    from npugrad.meta import CallMeta
    from npugrad.operator import OpRecord, TensorParam

_MOST_GAPS = 2
"""An operand that spans more than this many times its size is packed: copying it would cost more."""


@dataclass(frozen=True)
class Slot:
    """One tensor of a call in device memory.

    Attributes:
        name: Name of the parameter.
        meta: How it is passed to the operator; its memory begins with its first element.
        packed: For an operand, whether the host makes it contiguous first.
        zeroed: For an output, whether its memory is zeroed first.
        wanted: For an output, whether the caller wants it; the operator may need memory for others, too.
    """

    name: str
    meta: TensorMeta
    packed: bool = False
    zeroed: bool = False
    wanted: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes it takes, gaps included."""
        return self.meta.content_bytes


@dataclass(frozen=True)
class Arrangement:
    """All tensors of a call in device memory.

    Attributes:
        inputs: Operands in the record's order, without null ones.
        outputs: Outputs in the record's order, without those passed as null.
    """

    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(slot.nbytes for slot in self.inputs + self.outputs)


def arrange(record: OpRecord, call: CallMeta) -> Arrangement:
    """Decides how each tensor lies in device memory.

    Args:
        record: The operator.
        call: A legal call; operands with the strides they arrived with.
    """
    inputs = tuple(
        _operand(param, meta) for param in record.inputs if (meta := call.inputs[param.name]) is not None
    )
    # Operators return at once when an operand is empty, and leave the outputs as they are.
    untouched = any(not slot.meta.size for slot in inputs)
    return Arrangement(inputs, tuple(_outputs(record, call, untouched)))


def _operand(param: TensorParam, meta: TensorMeta) -> Slot:
    shape = meta.shape if param.device_view is None else param.device_view(meta)
    strides = None if meta.is_contiguous else _kept_strides(meta, shape)
    packed = not (meta.is_contiguous or strides)
    if packed or not meta.size:
        strides = None
    return Slot(param.name, TensorMeta(meta.dtype, shape, Format.ND, strides), packed)


def _kept_strides(meta: TensorMeta, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Strides under which the device sees a strided operand; None if it must be packed."""
    if not meta.size:
        return None
    span = meta.content_bytes // meta.dtype.itemsize - meta.storage_offset
    if span > _MOST_GAPS * meta.size:
        return None
    return view_strides(meta.shape, meta.element_strides, shape)


def view_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], new_shape: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Strides of a tensor viewed in another shape with as many elements, without moving any.

    Args:
        shape: Sizes, none of them 0.
        strides: Strides in elements.
        new_shape: Sizes of the view.

    Returns:
        The strides, or None when elements would have to move.
    """
    if shape == new_shape:
        return strides
    blocks = _blocks(shape, strides)
    found: list[int] = []
    for size in reversed(new_shape):
        while blocks and blocks[-1][0] == 1:
            blocks.pop()
        if size == 1 or not blocks:
            found.append(0)
            continue
        left, step = blocks.pop()
        if left % size:
            return None
        found.append(step)
        blocks.append((left // size, step * size))
    return tuple(reversed(found))


def _blocks(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[tuple[int, int]]:
    """Axes joined where one continues the next: (size, stride of its last element) of each run of axes."""
    blocks: list[tuple[int, int]] = []
    for size, step in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if blocks and blocks[-1][1] == step * size:
            blocks[-1] = (blocks[-1][0] * size, step)
        else:
            blocks.append((size, step))
    return blocks


def _outputs(record: OpRecord, call: CallMeta, untouched: bool) -> list[Slot]:
    wanted, allocated = record.infer(call), record.allocated(call)
    slots = []
    for param in record.outputs:
        meta = allocated.get(param.name)
        if meta is None:
            continue
        shape = meta.shape if param.device_view is None else param.device_view(meta)
        zeroed, asked = param.zero_init or untouched, wanted[param.name] is not None
        slots.append(Slot(param.name, TensorMeta(meta.dtype, shape), zeroed=zeroed, wanted=asked))
    return slots
