"""Copies bytes to the device and back through pinned memory, computing nothing in between.

Order: ``device``, ``staging_bytes``, ``sizes``, ``concurrent_bytes``. The answer has one entry for each
check: ``name``, ``nbytes``, ``wrong`` (number of wrong bytes), ``in_s``, ``out_s``.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad_server.acl.libraries import Cann
from npugrad_server.acl.runtime import Runtime
from npugrad_server.backends.npu.bringup import NpuDevice
from npugrad_server.backends.npu.staging import LIMIT_VARIABLE, Staging, TensorCopy, deliver
from npugrad_server.backends.npu.trials.exchange import run_trial

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy.typing as npt

    from npugrad_server.backends.npu.bringup import Stream

    Bytes = npt.NDArray[np.uint8]

_WAIT_S = 120.0
_GUARD_BYTES = 64
_PIECES = 8


class Copies:
    """One device with two streams."""

    def __init__(self, index: int) -> None:
        """Takes the device."""
        self._runtime = Runtime(Cann().runtime)
        self._device = NpuDevice(index, 2)
        self._streams = (self._device.stream(), self._device.stream())
        self._random = np.random.default_rng(0)

    def _wait(self, stream: Stream) -> None:
        self._runtime.wait(stream.raw, time.monotonic() + _WAIT_S)

    def _bytes(self, nbytes: int) -> Bytes:
        return self._random.integers(0, 256, nbytes, np.uint8)

    def staged(self, sizes: list[int]) -> Iterator[dict[str, Any]]:
        """Copies each size to the device and back as calls do: pieces, turns, reused pinned memory."""
        stream = self._streams[0]
        incoming, outgoing = Staging(self._device), Staging(self._device)
        for nbytes in sizes:
            sent, got = self._bytes(nbytes), np.zeros(nbytes, np.uint8)
            buffer = self._device.empty(nbytes)
            start = time.perf_counter()
            there = [TensorCopy("bytes", sent, buffer.address)]
            incoming.copy_in(self._runtime, there, stream.raw, lambda: self._wait(stream))
            self._wait(stream)
            between = time.perf_counter()
            back = [TensorCopy("bytes", got, buffer.address)]
            arriving = outgoing.copy_out(self._runtime, back, stream.raw, lambda: self._wait(stream))
            self._wait(stream)
            deliver(arriving)
            end = time.perf_counter()
            yield _entry("there and back", sent, got, between - start, end - between)

    def zeroed(self, nbytes: int) -> Iterator[dict[str, Any]]:
        """Checks that zeroing stays within its bounds, and that copies leave their neighbours alone."""
        stream, whole = self._streams[0].raw, nbytes + 2 * _GUARD_BYTES
        pinned, buffer = self._device.pinned(whole), self._device.empty(whole)
        sent = self._bytes(whole)
        pinned.data[:whole] = sent
        self._runtime.copy_in(buffer.address, pinned.address, whole, stream)
        self._runtime.zero(buffer.address + _GUARD_BYTES, nbytes, stream)
        back = self._device.pinned(whole)
        self._runtime.copy_out(back.address, buffer.address, whole, stream)
        self._wait(self._streams[0])
        sent[_GUARD_BYTES : _GUARD_BYTES + nbytes] = 0
        yield _entry("filled with zeros between guards", sent, back.data[:whole].copy())

    def both_ways(self, nbytes: int) -> Iterator[dict[str, Any]]:
        """Copies in on one stream while another copies out, piece by piece, without waiting in between."""
        first, second = (stream.raw for stream in self._streams)
        there = [self._device.empty(nbytes) for _ in range(2)]
        host = [self._device.pinned(nbytes) for _ in range(4)]
        source, target, known, back = host
        expected = self._bytes(nbytes)
        known.data[:nbytes] = expected
        self._runtime.copy_in(there[1].address, known.address, nbytes, first)
        self._wait(self._streams[0])
        sent = self._bytes(nbytes)
        source.data[:nbytes] = sent
        back.data[:nbytes] = 0
        start, step = time.perf_counter(), -(-nbytes // _PIECES)
        for at in range(0, nbytes, step):
            size = min(step, nbytes - at)
            self._runtime.copy_in(there[0].address + at, source.address + at, size, first)
            self._runtime.copy_out(back.address + at, there[1].address + at, size, second)
        queued = time.perf_counter()
        for stream in self._streams:
            self._wait(stream)
        end = time.perf_counter()
        yield _entry("out on one stream", expected, back.data[:nbytes].copy(), 0.0, end - start)
        self._runtime.copy_out(target.address, there[0].address, nbytes, second)
        self._wait(self._streams[1])
        found = _entry("in on another stream meanwhile", sent, target.data[:nbytes].copy(), end - start, 0.0)
        yield found | {"queued_s": queued - start}


def _entry(name: str, expected: Bytes, found: Bytes, in_s: float = 0.0, out_s: float = 0.0) -> dict[str, Any]:
    wrong = int(np.count_nonzero(expected != found))
    return {"name": name, "nbytes": expected.nbytes, "wrong": wrong, "in_s": in_s, "out_s": out_s}


def trial(order: Any, folder: Path) -> Any:
    """Runs every check."""
    os.environ[LIMIT_VARIABLE] = str(order["staging_bytes"])
    copies = Copies(order["device"])
    return [
        *copies.staged(order["sizes"]),
        *copies.zeroed(4097),
        *copies.both_ways(order["concurrent_bytes"]),
    ]


if __name__ == "__main__":
    run_trial(trial)
