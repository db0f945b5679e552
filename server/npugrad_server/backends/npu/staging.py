"""Pinned memory between the arenas and the device: taken once, grown when needed, reused by every call.

A queued copy is asynchronous only from or to pinned memory. A call larger than the limit is copied in turns,
each waiting for the one before.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from npugrad_server.acl.runtime import concerning

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from npugrad_server.acl.runtime import Runtime
    from npugrad_server.backends.npu.bringup import NpuDevice, PinnedBuffer

    Bytes = npt.NDArray[np.uint8]
    Arriving = list[tuple[Bytes, Bytes]]

LIMIT_VARIABLE = "NPUGRAD_WORKER_STAGING_BYTES"
"""Environment variable: limit of pinned memory per stream and direction, in bytes."""
_DEFAULT_LIMIT_BYTES = 256 * 2**20
_LEAST_BYTES = 2**20
_PIECE_BYTES = 16 * 2**20
"""Bytes copied on the host before the device's copy is queued, so that both copy at the same time."""
_ALIGNMENT = 4096
"""A page, so that the host never writes to one that a queued copy reads."""


class TensorCopy(NamedTuple):
    """One tensor to copy.

    Attributes:
        name: Name of the parameter.
        data: Its bytes on the host.
        address: Its address in device memory.
    """

    name: str
    data: Bytes
    address: int


class Staging:
    """The pinned memory of one stream in one direction; for the thread of that stream."""

    def __init__(self, device: NpuDevice) -> None:
        """Takes nothing yet.

        Args:
            device: Where pinned memory comes from.

        Raises:
            ValueError: The environment variable is not a number.
        """
        self._device = device
        self._limit_bytes = max(_LEAST_BYTES, int(os.environ.get(LIMIT_VARIABLE, _DEFAULT_LIMIT_BYTES)))
        self._buffer: PinnedBuffer | None = None

    def reserve(self, parts: Sequence[TensorCopy]) -> PinnedBuffer:
        """Takes memory for these parts, or up to the limit. No copy from or to it may be under way.

        Raises:
            AclError: There is not enough.
        """
        wanted = min(_total(parts), self._limit_bytes)
        if self._buffer is None or self._buffer.data.nbytes < wanted:
            self._buffer = None  # released first, so that a call never needs both
            size = min(max(_LEAST_BYTES, 1 << (wanted - 1).bit_length()), self._limit_bytes)
            with concerning(f"pinned memory for copies ({size} bytes)"):
                self._buffer = self._device.pinned(size)
        return self._buffer

    def copy_in(
        self,
        runtime: Runtime,
        parts: Sequence[TensorCopy],
        stream: int,
        turn: Callable[[], None],
    ) -> None:
        """Queues copies to the device; they may still be running when this returns.

        Args:
            runtime: Queues the copies.
            parts: What to copy.
            stream: Raw stream.
            turn: Waits until everything queued has run; called when the memory is used up.

        Raises:
            AclError: A copy could not be queued, or a wait failed.
        """
        area, used = self.reserve(parts), 0
        for name, source, address in parts:
            for start, stop in _pieces(source.nbytes, area.data.nbytes):
                if used + (stop - start) > area.data.nbytes:
                    turn()
                    used = 0
                area.data[used : used + stop - start] = source[start:stop]
                with concerning(name):
                    runtime.copy_in(address + start, area.address + used, stop - start, stream)
                used += _aligned(stop - start)

    def copy_out(
        self,
        runtime: Runtime,
        parts: Sequence[TensorCopy],
        stream: int,
        turn: Callable[[], None],
    ) -> Arriving:
        """Queues copies from the device; arguments and errors as for `copy_in`.

        Returns:
            What `deliver` must copy once the stream was waited for; nothing may read it before.
        """
        area, used = self.reserve(parts), 0
        arriving: Arriving = []
        for name, target, address in parts:
            for start, stop in _pieces(target.nbytes, area.data.nbytes):
                if used + (stop - start) > area.data.nbytes:
                    turn()
                    deliver(arriving)
                    used = 0
                with concerning(name):
                    runtime.copy_out(area.address + used, address + start, stop - start, stream)
                arriving.append((target[start:stop], area.data[used : used + stop - start]))
                used += _aligned(stop - start)
        return arriving


def deliver(arriving: Arriving) -> None:
    """Copies what has arrived to its target, and clears the list."""
    for target, source in arriving:
        target[:] = source
    arriving.clear()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _total(parts: Sequence[TensorCopy]) -> int:
    return max(1, sum(_aligned(part.data.nbytes) for part in parts))


def _pieces(nbytes: int, area_bytes: int) -> list[tuple[int, int]]:
    step = min(_PIECE_BYTES, area_bytes)
    return [(start, min(start + step, nbytes)) for start in range(0, nbytes, step)]


def span_bytes(array: npt.NDArray[Any]) -> Bytes:
    """The bytes from an array's first element to its last, in memory order; strides must not be negative."""
    if not array.size:
        return np.empty(0, np.uint8)
    if array.flags.c_contiguous:
        whole: Bytes = array.reshape(-1).view(np.uint8)
        return whole
    steps = zip(array.shape, array.strides, strict=True)
    span = sum((size - 1) * step for size, step in steps) // array.itemsize + 1
    writeable = bool(array.flags.writeable)
    flat = np.lib.stride_tricks.as_strided(array, (span,), (array.itemsize,), writeable=writeable)
    found: Bytes = flat.view(np.uint8)
    return found
