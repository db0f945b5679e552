"""Runs one call in the worker: views over the arenas, the backend, and what went wrong as a message."""

from __future__ import annotations

import contextlib
import mmap
import time
import traceback
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from npugrad import get_operator
from npugrad.errors import DeviceError, NpugradError, OperatorError, RequestError
from npugrad.layout import view
from npugrad.meta import CallMeta
from npugrad.tolerance import compare
from npugrad_server.backends.base import CallAbandoned, CallPostponed, DeviceCall, DeviceLost
from npugrad_server.worker.protocol import CallDeferred, CallDone, CallFailed, CallPlanned, MemoryFound

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from npugrad.operator import OpRecord
    from npugrad_server.backends.base import Backend
    from npugrad_server.worker.conversation import Conversation
    from npugrad_server.worker.protocol import Answer, AskMemory, OpenDevice, PlanCall, RunCall

    Array = npt.NDArray[Any]

_Answer = TypeVar("_Answer", "CallDone", "CallPlanned", "MemoryFound")
_GRACE_SHARE = 0.75
"""Part of the pool's grace after which a backend gives up, so that its own report comes before the end."""
_MAX_TRACE = 16_000  # the end of a trace tells most; the whole must fit a message
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # Linux 5.14; `mmap` does not name them


class Arenas:
    """The worker's mappings: operands to read, results to write."""

    def __init__(self, opening: OpenDevice) -> None:
        """Maps both.

        Raises:
            OSError: A descriptor is not what the message says.
        """
        inputs = mmap.mmap(opening.input_fd, opening.input_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        outputs = mmap.mmap(opening.output_fd, opening.output_bytes, flags=mmap.MAP_SHARED)
        _populate(inputs, _MADV_POPULATE_READ, opening.prefault_bytes)
        _populate(outputs, _MADV_POPULATE_WRITE, opening.prefault_bytes)
        self.opening = opening
        self._zeros = memoryview(b"")
        self.inputs, self.outputs = memoryview(inputs), memoryview(outputs)

    def zeros(self, nbytes: int) -> memoryview:
        """So many bytes of 0, which take no memory: the kernel shows one page of it wherever nobody wrote.

        Raises:
            MemoryError: There is no room for them among the process's addresses.
        """
        zeros = self._zeros
        if len(zeros) < nbytes:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            try:
                self._zeros = zeros = memoryview(mmap.mmap(-1, nbytes, flags=flags, prot=mmap.PROT_READ))
            except (OSError, OverflowError) as error:
                raise MemoryError(f"found no room to map {nbytes} bytes") from error
        return zeros[:nbytes]


def _populate(arena: mmap.mmap, advice: int, nbytes: int) -> None:
    whole = min(nbytes, len(arena)) // mmap.PAGESIZE * mmap.PAGESIZE
    with contextlib.suppress(OSError):  # an older kernel: pages are mapped at first use instead
        arena.madvise(mmap.MADV_HUGEPAGE)
        if whole:
            arena.madvise(advice, 0, whole)


def execute(backend: Backend, arenas: Arenas, talk: Conversation, stream: int) -> Answer:
    """Runs a call; whatever an operator or a device does wrong becomes an answer.

    Args:
        backend: Runs it.
        arenas: Operands and results.
        talk: The call, and how the pool is asked about it.
        stream: Which of the worker's streams runs it.

    Raises:
        DeviceLost: The process has to go.
    """
    order = talk.order
    try:
        return _answered(order, lambda: _execute(backend, arenas, talk, stream))
    except CallPostponed as postponed:
        return CallDeferred(order.call, postponed.workspace_bytes)
    except CallAbandoned:
        return CallFailed(order.call, "CANCELLED", f"{order.operator}: nobody waits for the call any more")


def plan(backend: Backend, order: PlanCall) -> CallPlanned | CallFailed:
    """Asks the device what a call would need; errors as for `execute`."""
    return _answered(
        order,
        lambda: CallPlanned(order.call, _workspace_bytes(backend, order)),
    )


def memory(backend: Backend, order: AskMemory) -> MemoryFound | CallFailed:
    """Asks the device how its memory stands; errors as for `execute`."""

    def ask() -> MemoryFound:
        free, total = backend.memory_now(give_back=order.give_back) or (None, None)
        return MemoryFound(order.call, free, total)

    return _answered(order, ask)


def _answered(order: RunCall | PlanCall | AskMemory, work: Callable[[], _Answer]) -> _Answer | CallFailed:
    try:
        return work()
    except (DeviceLost, CallPostponed, CallAbandoned):
        raise
    except MemoryError:
        message = f"{order.operator}: the device has no memory for the call now"
        return CallFailed(order.call, "DEVICE_OUT_OF_MEMORY", message)
    except NpugradError as error:
        return CallFailed(order.call, error.reason, str(error), _metadata(error))
    except Exception as error:
        # The exception's own words may quote the data, so the caller gets its type only.
        message = f"{order.operator}: the backend failed with {type(error).__name__}"
        return CallFailed(order.call, "INTERNAL", message, trace=traceback.format_exc()[-_MAX_TRACE:])


def _workspace_bytes(backend: Backend, order: PlanCall) -> int | None:
    record = _record(backend, order)
    return backend.workspace_bytes(record, record.ordered(order.meta))


def _record(backend: Backend, order: RunCall | PlanCall) -> OpRecord:
    return get_operator(order.operator, backend.records)


def _execute(backend: Backend, arenas: Arenas, talk: Conversation, stream: int) -> CallDone:
    order, start = talk.order, time.perf_counter()
    record = _record(backend, order)
    talk.check_wanted()  # it may have waited in this process
    if all(meta is None for meta in order.outputs.values()):
        # Nothing is wanted. An operator may accept such a call before it looks at anything else, so the
        # operands may be anything and are not looked at here either.
        return CallDone(order.call, 0.0, 0.0, 0.0, 0, backend.name)
    meta = record.ordered(order.meta)
    inputs = _operands(meta, order, arenas, backend.strided)
    if not backend.strided:
        meta = _contiguous(meta)
    results = _results(record, order, arenas)
    # Where a format puts axes in another order than the formula's, they are not contiguous.
    outputs = {
        name: array if array.flags.c_contiguous else np.empty(array.shape, array.dtype)
        for name, array in results.items()
    }
    packed_s = time.perf_counter() - start
    call = DeviceCall(
        meta,
        inputs,
        outputs,
        order.options,
        stream,
        give_up_s=_give_up_s(order, arenas.opening),
        deadline_s=order.deadline_s,
        reserve_workspace=talk.reserve_workspace,
        check_wanted=talk.check_wanted,
    )
    timings = backend.run(record, call)
    if order.options.verify:
        _verify(record, inputs, order, outputs)
    for name, array in results.items():
        if array is not outputs[name]:
            array[...] = outputs[name]
    return CallDone(
        order.call,
        timings.copy_in_s + packed_s,
        timings.run_s,
        timings.copy_out_s,
        timings.workspace_bytes,
        timings.backend or backend.name,
    )


def _give_up_s(order: RunCall, opening: OpenDevice) -> float:
    """When a device that still runs the call is to be given up: nobody can wait for it any more."""
    limit_s = time.monotonic() + opening.run_limit_s
    if order.deadline_s is None:
        return limit_s
    return min(limit_s, order.deadline_s + _GRACE_SHARE * opening.hang_grace_s)


def _contiguous(call: CallMeta) -> CallMeta:
    metas = {name: None if meta is None else meta.contiguous() for name, meta in call.inputs.items()}
    return CallMeta(metas, call.attrs, product=call.product)


def _operands(call: CallMeta, order: RunCall, arenas: Arenas, strided: bool) -> dict[str, Array | None]:
    """Views of the operands; unless strides may stay, those that have some become contiguous copies.

    One that has no place in the arena is zeros: none of its values is used.
    """
    operands: dict[str, Array | None] = {}
    for name, meta in call.inputs.items():
        if meta is None:
            operands[name] = None
            continue
        offset = order.input_offsets.get(name)
        if offset is None:
            operands[name] = view(meta, arenas.zeros(meta.nbytes))
            continue
        array = view(meta, arenas.inputs, offset)
        operands[name] = array if strided or meta.is_contiguous else np.ascontiguousarray(array)
    return operands


def _results(record: OpRecord, order: RunCall, arenas: Arenas) -> dict[str, Array]:
    """Views of the wanted outputs, their axes in the order of the formula."""
    return {
        param.name: view(param.ordered(wanted), arenas.outputs, order.output_offsets[param.name])
        for param in record.outputs
        if (wanted := order.outputs[param.name]) is not None
    }


def _verify(
    record: OpRecord, inputs: Mapping[str, Array | None], order: RunCall, outputs: Mapping[str, Array]
) -> None:
    """Computes the call again with the reference and compares.

    Raises:
        DeviceError: VERIFICATION_FAILED, a result is outside the tolerance.
    """
    golden = {name: np.empty(array.shape, np.float64) for name, array in outputs.items()}
    record.reference(inputs, order.meta.attrs, golden)
    for name, array in outputs.items():
        extra = record.extra_tolerance(inputs, order.meta.attrs, name)
        found = compare(golden[name], array, extra)
        if not found.ok:
            raise DeviceError(
                f"{record.name}: {name}: found a result {found}; expected that of the reference",
                reason="VERIFICATION_FAILED",
                operator=record.name,
                source="device",
            )


def _metadata(error: NpugradError) -> dict[str, str]:
    """What the exception carries besides its message, as the error table's details name it."""
    metadata: dict[str, str] = {"source": "device"}
    if isinstance(error, RequestError) and error.operand:
        metadata["operand"] = error.operand
    if isinstance(error, OperatorError):
        if error.code is not None:
            metadata["code"] = str(error.code)
        if error.constraint:
            metadata["constraint"] = error.constraint
    return metadata
