"""The verifier: a process that recomputes calls with the reference and compares, so that no device waits.

It is a worker process with `NAME` in place of a device's name, and uses four of a worker's messages:

    OpenDevice  ->         only its arena of operands counts
    RunCall     ->         one at a time, each with a descriptor of the arena in which its results lie
                <-         CallDone with the findings, or CallFailed: VERIFICATION_FAILED and others
"""

from __future__ import annotations

import mmap
import os
import socket
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from npugrad.agreement import agreement
from npugrad.errors import DeviceError
from npugrad.ops import OPERATORS
from npugrad_server.worker.execute import Arenas, failure_of
from npugrad_server.worker.packets import MAX_MESSAGE_BYTES, decode, encode
from npugrad_server.worker.plans import WorkerPlan, arrays, lowest
from npugrad_server.worker.protocol import CallDone, OpenDevice, RunCall

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from npugrad.operator import OpRecord
    from npugrad_server.worker.plans import PreparedOperands
    from npugrad_server.worker.protocol import CallFailed

    Array = npt.NDArray[Any]


NAME = "verifier"
"""Takes the place of a worker's device name."""


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
            explanation, errors = _verify(prepared, inputs, outputs)
        except Exception as error:
            return failure_of(order, error)
        taken_s = time.monotonic() - start
        return CallDone(order.call, 0.0, 0.0, 0.0, 0, "reference", start, taken_s, explanation, errors)


def _mapped(descriptor: int) -> memoryview:
    """Maps the arena of a descriptor, and closes the descriptor."""
    try:
        nbytes = os.fstat(descriptor).st_size
        return memoryview(mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))
    finally:
        os.close(descriptor)


def _verify(
    prepared: PreparedOperands, inputs: Mapping[str, Array | None], outputs: Mapping[str, Array]
) -> tuple[str, dict[str, Sequence[float]]]:
    """Recomputes the call with the reference and compares.

    Returns:
        `verification` and `verified` of `CallDone`.

    Raises:
        DeviceError: VERIFICATION_FAILED, a result is outside the tolerance and no pixel edge explains it.
    """
    record = prepared.record
    found = agreement(record, inputs, prepared.meta.attrs, outputs)
    if found.ok:
        errors: dict[str, Sequence[float]] = {
            name: [seen.max_absolute_error, seen.max_relative_error, seen.worst]
            for name, seen in found.comparisons.items()
        }
        return found.explanation, errors
    name, differs = next(iter(found.wrong.items()))
    tried = f"; {found.tried}" if found.tried else ""
    raise DeviceError(
        f"{record.name}: {name}: found a result {differs}{tried}; expected that of the reference",
        reason="VERIFICATION_FAILED",
        operator=record.name,
        source="device",
    )
