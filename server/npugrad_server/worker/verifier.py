"""The verifier: a process that recomputes calls with the reference and compares, so that no device waits.

It is a worker process with `NAME` in place of a device's name, and uses four of a worker's messages:

    OpenDevice  ->         only its arena of operands counts
    RunCall     ->         one at a time, each with a descriptor of the arena in which its results lie
                <-         CallDone with the findings, or CallFailed: VERIFICATION_FAILED and others

Results that differ from the reference are not wrong for that: no arithmetic gets a sum right whose terms
cancel each other. So such a call is computed once more, by the CPU's kernels or PyTorch. If these agree
with the reference, the device is wrong (`WRONG` in the answer's metadata); if not, or if they do not compute
such calls, nobody knows (`DOUBTFUL`).
"""

from __future__ import annotations

import mmap
import os
import socket
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from npugrad.agreement import agreement, unwritten
from npugrad.call import CallOptions
from npugrad.ops import OPERATORS
from npugrad_server.backends.base import REFERENCE, DeviceCall
from npugrad_server.backends.cpu import CpuBackend
from npugrad_server.devices import parse_device
from npugrad_server.worker.execute import Arenas, failure_of
from npugrad_server.worker.packets import MAX_MESSAGE_BYTES, decode, encode
from npugrad_server.worker.plans import WorkerPlan, arrays, lowest
from npugrad_server.worker.protocol import CallDone, CallFailed, OpenDevice, RunCall

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from npugrad.agreement import Agreement
    from npugrad.operator import OpRecord
    from npugrad_server.worker.plans import PreparedOperands

    Array = npt.NDArray[Any]


NAME = "verifier"
"""Takes the place of a worker's device name."""
JUDGED, WRONG, DOUBTFUL = "recomputed", "right", "different"
"""Key in the metadata of VERIFICATION_FAILED, and what the CPU path's results then were."""


OPERATORS.load()  # now, and not while a call waits


@dataclass
class _Reference:
    """The references, which read the operands here and take any layout."""

    records: Mapping[str, OpRecord]
    strided: bool = True


class Verifier:
    """The one thread of a verifier."""

    def __init__(self, control: socket.socket, records: Mapping[str, OpRecord] = OPERATORS) -> None:
        """Takes nothing yet.

        Args:
            control: Packet socket to the pool.
            records: The operators by name.
        """
        self._control, self._reference = control, _Reference(records)
        self._cpu: CpuBackend | None = None

    def serve(self) -> int:
        """Compares until the socket is closed; returns the exit status."""
        arenas: Arenas | None = None
        while True:
            packet, descriptors, _, _ = socket.recv_fds(self._control, MAX_MESSAGE_BYTES, 1)
            if not packet:
                return 0
            message = decode(packet)
            if isinstance(message, OpenDevice):
                arenas = Arenas(replace(message, prefault_bytes=0))
            elif isinstance(message, RunCall) and arenas is not None and descriptors:
                arenas.outputs = _mapped(descriptors[0])
                answer = self._compare(arenas, message)
                arenas.outputs = memoryview(b"")
                self._control.send(encode(answer))

    def _compare(self, arenas: Arenas, order: RunCall) -> CallDone | CallFailed:
        start = time.monotonic()
        try:
            prepared = WorkerPlan(order).prepared(self._reference)
            operands, results = lowest(order.input_offsets), lowest(order.output_offsets)
            inputs = {**prepared.nulls, **arrays(prepared.operands, arenas.inputs, operands)}
            if prepared.unused:
                nbytes = max(place.end for place in prepared.unused)
                inputs |= arrays(prepared.unused, arenas.zeros(nbytes), 0)
            outputs = arrays(prepared.results, arenas.outputs, results)
            found = agreement(prepared.record, inputs, prepared.meta.attrs, outputs)
            if not found.ok:
                return self._failed(order, prepared, inputs, found)
        except Exception as error:
            return failure_of(order, error)
        taken_s, errors = time.monotonic() - start, _errors(found)
        return CallDone(order.call, 0.0, 0.0, 0.0, 0, "reference", start, taken_s, found.explanation, errors)

    def _failed(
        self,
        order: RunCall,
        prepared: PreparedOperands,
        inputs: Mapping[str, Array | None],
        found: Agreement,
    ) -> CallFailed:
        """A result is outside the tolerance and no pixel edge explains it: VERIFICATION_FAILED."""
        name, differs = next(iter(found.wrong.items()))
        tried = f"; {found.tried}" if found.tried else ""
        verdict, said = self._recomputed(prepared, inputs, found)
        message = f"{name}: found a result {differs}{tried}; expected that of the reference{said}"
        metadata = {"source": "device", JUDGED: verdict}
        return CallFailed(order.call, "VERIFICATION_FAILED", f"{order.operator}: {message}", metadata)

    def _recomputed(
        self, prepared: PreparedOperands, inputs: Mapping[str, Array | None], found: Agreement
    ) -> tuple[str, str]:
        """Computes a call with the CPU backend and compares; returns the verdict, and says it."""
        record, meta = prepared.record, prepared.meta
        if self._cpu is None:
            self._cpu = CpuBackend(self._reference.records)
            self._cpu.open(parse_device("cpu:0"), meta.product, 1)
        wanted = {
            name: each for name, each in record.infer(meta).items() if name in found.comparisons and each
        }
        results = {name: unwritten(each) for name, each in wanted.items()}
        ran = self._cpu.run(record, DeviceCall(meta, inputs, results, CallOptions(), 0))
        if ran.backend == REFERENCE:
            return DOUBTFUL, "; no other path computes such calls"
        if agreement(record, inputs, meta.attrs, results).ok:
            return WRONG, ", with which the CPU path agrees"
        return (
            DOUBTFUL,
            ", from which the CPU path differs as well: such calls lose more digits than tolerated",
        )


def _errors(found: Agreement) -> dict[str, Sequence[float]]:
    """The figures of results that are right, as in `CallDone.verified`."""
    return {
        name: [seen.max_absolute_error, seen.max_relative_error, seen.worst]
        for name, seen in found.comparisons.items()
    }


def _mapped(descriptor: int) -> memoryview:
    """Maps the arena of a descriptor, and closes the descriptor."""
    try:
        nbytes = os.fstat(descriptor).st_size
        return memoryview(mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))
    finally:
        os.close(descriptor)
