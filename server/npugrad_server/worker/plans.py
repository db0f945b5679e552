"""What follows from a call regardless of its contents, place and time: made once, used by many calls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from npugrad import get_operator

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import numpy.typing as npt

    from npugrad.call import CallOptions
    from npugrad.meta import CallMeta, TensorMeta
    from npugrad.operator import OpRecord
    from npugrad_server.worker.protocol import RunCall

    Array = npt.NDArray[Any]


class OperandReader(Protocol):
    """Takes the operands of calls.

    Attributes:
        records: Operators that it may be asked for, by name.
        strided: Whether it takes operands with the strides they arrived with.
    """

    records: Mapping[str, OpRecord]
    strided: bool


class Place(NamedTuple):
    """Where and how a tensor lies in an arena, relative to the base of its call.

    Attributes:
        name: Name of the parameter.
        meta: Its meta, for messages.
        dtype: Type of its elements.
        shape: Size of each axis.
        strides: Steps in bytes; None for an empty tensor, which has no memory.
        content: First byte of its content.
        start: First byte of its first element.
        end: End of its content.
        packed: Whether it is copied to make it contiguous.
    """

    name: str
    meta: TensorMeta
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    content: int
    start: int
    end: int
    packed: bool


@dataclass(frozen=True)
class PreparedOperands:
    """What a backend needs of a call that is the same for every call of a plan.

    Attributes:
        record: Record of the operator.
        wants_nothing: Whether no output is wanted: the operands may then be anything, and are left out.
        meta: Metas of the operands as the backend gets them, attributes and product.
        nulls: None for each operand, in their order.
        operands: Where each operand that is not null lies, relative to the first.
        unused: Operands that are not in the arena: none of their values is used, so they are zeros.
        results: Where each wanted output lies, its axes in the order of the formula.
        moved: Names of results that are not contiguous, because a format puts axes in another order.
    """

    record: OpRecord
    wants_nothing: bool
    meta: CallMeta
    nulls: Mapping[str, None]
    operands: tuple[Place, ...]
    unused: tuple[Place, ...]
    results: tuple[Place, ...]
    moved: tuple[str, ...]


class WorkerPlan:
    """A call that was sent whole; `RunAgain` refers to it. Any number of streams may run it at once.

    Attributes:
        order: The call it was made from.
        memo: The backend's cache for it.
    """

    def __init__(self, order: RunCall) -> None:
        """Keeps the call, without looking at it yet."""
        self.order = order
        self.memo: dict[Any, Any] = {}
        self._prepared: PreparedOperands | None = None
        self._options = order.options

    def prepared(self, backend: OperandReader) -> PreparedOperands:
        """What follows from the call.

        Args:
            backend: Runs it; always the same one.

        Raises:
            UnsupportedOperator: The backend has no such operator.
        """
        if self._prepared is None:  # two streams may both make it, with the same result
            self._prepared = _prepare(backend, self.order)
        return self._prepared

    def options(self, priority: int, label: str) -> CallOptions:
        """The options of a call with this priority and label; mostly those of the call before."""
        options = self._options
        if options.label != label or options.priority != priority:
            self._options = options = replace(options, label=label, priority=priority)
        return options


def _prepare(backend: OperandReader, order: RunCall) -> PreparedOperands:
    record = get_operator(order.operator, backend.records)
    if all(meta is None for meta in order.outputs.values()):
        return PreparedOperands(record, True, order.meta, {}, (), (), (), ())
    call = record.ordered(order.meta)
    first, first_result = lowest(order.input_offsets), lowest(order.output_offsets)
    given = [(name, meta, order.input_offsets.get(name)) for name, meta in call.inputs.items() if meta]
    operands = tuple(
        _place(name, meta, offset - first, backend.strided and name not in record.checked_operands)
        for name, meta, offset in given
        if offset is not None
    )
    unused = tuple(_place(name, meta, 0, True) for name, meta, offset in given if offset is None)
    wanted = [(param, meta) for param in record.outputs if (meta := order.outputs[param.name]) is not None]
    results = tuple(
        _place(param.name, param.ordered(meta), order.output_offsets[param.name] - first_result, True)
        for param, meta in wanted
    )
    packed = record.checked_operands if backend.strided else call.inputs
    moved = tuple(place.name for place in results if not place.meta.is_contiguous)
    return PreparedOperands(
        record,
        False,
        _contiguous(call, packed),
        dict.fromkeys(call.inputs),
        operands,
        unused,
        results,
        moved,
    )


def lowest(offsets: Mapping[str, int]) -> int:
    """Where the tensors of a call begin in their arena; 0 if there are none."""
    return min(offsets.values(), default=0)


def _place(name: str, meta: TensorMeta, content: int, strided: bool) -> Place:
    """The place of a tensor whose content begins at this byte; packed if it is strided and must not be."""
    dtype = meta.dtype.numpy
    itemsize = dtype.itemsize
    return Place(
        name=name,
        meta=meta,
        dtype=dtype,
        shape=meta.shape,
        strides=tuple(step * itemsize for step in meta.element_strides) if meta.size else None,
        content=content,
        start=content + meta.storage_offset * itemsize,
        end=content + meta.content_bytes,
        packed=not strided and not meta.is_contiguous,
    )


def _contiguous(call: CallMeta, names: Iterable[str]) -> CallMeta:
    """The call with these operands contiguous."""
    metas = {name: meta.contiguous() for name in names if (meta := call.inputs[name]) is not None}
    return call.with_inputs(**metas)


def arrays(places: Iterable[Place], memory: memoryview, base: int) -> dict[str, Array]:
    """Views of tensors by name, or contiguous copies of those that are packed; writable if the memory is.

    Args:
        places: Where they lie.
        memory: The arena.
        base: First byte of the call in it.

    Raises:
        ValueError: A content would leave the arena.
    """
    found: dict[str, Array] = {}
    for name, meta, dtype, shape, strides, content, start, end, packed in places:
        if base + content < 0 or base + end > len(memory):
            available = len(memory) - base - content
            raise ValueError(f"found {available} bytes for {meta}; expected {meta.content_bytes}")
        if strides is None:
            found[name] = np.empty(shape, dtype)
            continue
        array: Array = np.ndarray(shape, dtype, memory, base + start, strides)
        found[name] = np.ascontiguousarray(array) if packed else array
    return found
