"""Runs one call in the worker: views of the arenas, the backend, and failures as messages."""

from __future__ import annotations

import contextlib
import mmap
import time
import traceback
from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad import get_operator
from npugrad.errors import NpugradError, OperatorError, RequestError
from npugrad_server.backends.base import CallAbandoned, CallPostponed, DeviceLost
from npugrad_server.worker.canary_messages import CanaryRun
from npugrad_server.worker.plans import arrays
from npugrad_server.worker.protocol import (
    CallDeferred,
    CallDone,
    CallFailed,
    MemoryFound,
    WorkspaceFound,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from npugrad_server.backends.base import Backend
    from npugrad_server.backends.canary import Canaries
    from npugrad_server.worker.call import WorkerCall
    from npugrad_server.worker.canary_messages import RunCanary
    from npugrad_server.worker.protocol import AskMemory, AskWorkspace, CallAnswer, OpenDevice, RunCall

    Array = npt.NDArray[Any]

_GRACE_SHARE = 0.75
"""Share of the pool's grace after which a backend gives up, so that it reports before the worker is ended."""
_MAX_TRACE = 16_000  # the end of a trace says most; the whole must fit in a message
_MAX_DETAIL = 2000
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
        """This many bytes of 0, which take no memory: the kernel maps one zero page wherever nobody wrote.

        Raises:
            MemoryError: There is no room for them in the process's address space.
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


def execute(backend: Backend, arenas: Arenas, call: WorkerCall, stream: int) -> CallAnswer:
    """Runs a call; any failure of an operator or a device becomes an answer.

    Args:
        backend: Runs it.
        arenas: Operands and results.
        call: The call.
        stream: Which of the worker's streams runs it.

    Raises:
        DeviceLost: The process must exit.
    """
    try:
        return _execute(backend, arenas, call, stream)
    except DeviceLost:
        raise
    except CallPostponed as postponed:
        return CallDeferred(call.call, postponed.workspace_bytes)
    except CallAbandoned:
        return CallFailed(call.call, "CANCELLED", f"{call.operator}: the caller no longer waits for the call")
    except Exception as error:
        return failure_of(call, error)


def plan(backend: Backend, order: AskWorkspace) -> WorkspaceFound | CallFailed:
    """Asks the device what a call would need; errors as for `execute`."""
    try:
        record = get_operator(order.operator, backend.records)
        return WorkspaceFound(order.call, backend.workspace_bytes(record, record.ordered(order.meta)))
    except DeviceLost:
        raise
    except Exception as error:
        return failure_of(order, error)


def memory(backend: Backend, order: AskMemory) -> MemoryFound | CallFailed:
    """Asks the device for its free and total memory; errors as for `execute`."""
    try:
        free, total = backend.memory_now(give_back=order.give_back) or (None, None)
        return MemoryFound(order.call, free, total)
    except DeviceLost:
        raise
    except Exception as error:
        return failure_of(order, error)


def canary(canaries: Canaries, order: RunCanary, stream: int) -> CanaryRun:
    """Runs a canary on a stream and compares it; raises DeviceLost if the process must exit."""
    found = canaries.run(order.number, stream)
    return CanaryRun(order.number, found.operator, found.result.value, found.detail[:_MAX_DETAIL])


def failure_of(order: WorkerCall | AskWorkspace | AskMemory | RunCall, error: Exception) -> CallFailed:
    """Turns an error into an answer; called while the error is being handled."""
    if isinstance(error, MemoryError):
        message = f"{order.operator}: the device has no memory for the call now"
        return CallFailed(order.call, "DEVICE_OUT_OF_MEMORY", message)
    if isinstance(error, NpugradError):
        return CallFailed(order.call, error.reason, str(error), _metadata(error))
    # The exception's text may quote the data, so the caller gets only its type.
    message = f"{order.operator}: the backend failed with {type(error).__name__}"
    return CallFailed(order.call, "INTERNAL", message, trace=traceback.format_exc()[-_MAX_TRACE:])


def _execute(backend: Backend, arenas: Arenas, call: WorkerCall, stream: int) -> CallDone:
    start = time.monotonic()
    prepared = call.plan.prepared(backend)
    call.check_wanted()  # it may have waited in this process
    if prepared.wants_nothing:
        # An operator may accept such a call before it looks at anything else, so the operands may be
        # anything and are not checked here either.
        return CallDone(call.call, 0.0, 0.0, 0.0, 0, backend.name, start)
    inputs = {**prepared.nulls, **arrays(prepared.operands, arenas.inputs, call.input_offset)}
    if prepared.unused:
        nbytes = max(place.end for place in prepared.unused)
        inputs |= arrays(prepared.unused, arenas.zeros(nbytes), 0)
    for name in prepared.record.checked_operands:  # the copies that are checked are out of the caller's reach
        inputs[name] = np.array(inputs[name])
    prepared.record.data_check(inputs, prepared.meta.attrs)
    results = arrays(prepared.results, arenas.outputs, call.output_offset)
    outputs = dict(results)
    for name in prepared.moved:
        outputs[name] = np.empty(results[name].shape, results[name].dtype)
    call.meta, call.inputs, call.outputs, call.stream = prepared.meta, inputs, outputs, stream
    call.give_up_s = _give_up_s(call.deadline_s, arenas.opening)
    packed_s = time.monotonic() - start
    timings = backend.run(prepared.record, call)
    for name in prepared.moved:
        results[name][...] = outputs[name]
    return CallDone(
        call.call,
        timings.copy_in_s + packed_s,
        timings.run_s,
        timings.copy_out_s,
        timings.workspace_bytes,
        timings.backend or backend.name,
        start,
    )


def _give_up_s(deadline_s: float | None, opening: OpenDevice) -> float:
    """When to give up a device that still runs the call: nobody can wait for it any more by then."""
    limit_s = time.monotonic() + opening.run_limit_s
    if deadline_s is None:
        return limit_s
    return min(limit_s, deadline_s + _GRACE_SHARE * opening.hang_grace_s)


def _metadata(error: NpugradError) -> dict[str, str]:
    """What the exception carries besides its message, by the names in the error table's details."""
    metadata: dict[str, str] = {"source": "device"}
    if isinstance(error, RequestError) and error.operand:
        metadata["operand"] = error.operand
    if isinstance(error, OperatorError):
        if error.code is not None:
            metadata["code"] = str(error.code)
        if error.constraint:
            metadata["constraint"] = error.constraint
    return metadata
