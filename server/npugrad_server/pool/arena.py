"""Arenas: memory shared by the front process and its workers, divided by a `RegionAllocator`.

They are memfds, because a container's /dev/shm is limited to 64 MiB by default. They are sparse: memory is
allocated when first touched, and then kept, since fresh memory costs about ten times as much as a copy into
existing memory.

Guarantees
    - No process can shrink an arena that another one uses (it is sealed), so no access to it can fault.
    - Workers cannot write operands: the front process maps the input arena, then seals it against writing.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import threading

    from npugrad_server.pool.regions import Region

if sys.platform != "linux":
    raise ImportError(f"the server runs on Linux only; found platform {sys.platform!r}")

_log = logging.getLogger(__name__)

_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; in `fcntl` from Python 3.13 on
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # Linux 5.14; not in `mmap`
_PREFAULT_STEP = 64 * 2**20
_POPULATE_STEP = 2**20  # mapping pages holds the interpreter's lock, so it is done in small steps


class Arena:
    """One memfd and this process's mapping of it."""

    def __init__(self, name: str, nbytes: int, *, writable: bool) -> None:
        """Creates the arena, with no memory allocated yet.

        Args:
            name: Shown in the kernel's list of open files.
            nbytes: Size; rounded up to whole pages.
            writable: Whether this process, the front process, maps it for writing.

        Raises:
            OSError: The kernel does not support memfds, or no address space is left.
        """
        self.nbytes = max(mmap.PAGESIZE, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        self._writable = writable
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.nbytes)
            prot = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
            self._map = mmap.mmap(self.fd, self.nbytes, flags=mmap.MAP_SHARED, prot=prot)
            self._seal()
        except BaseException:
            os.close(self.fd)
            raise
        with contextlib.suppress(OSError):  # a kernel without huge pages for shared memory
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._memory = memoryview(self._map)

    def _seal(self) -> None:
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)

    def view(self, region: Region, offset: int, nbytes: int) -> memoryview:
        """Returns a view of bytes of a region.

        Args:
            region: The region.
            offset: First byte, relative to the start of the region.
            nbytes: How many bytes.

        Raises:
            ValueError: The bytes are not all in the region.
        """
        if offset < 0 or offset + nbytes > region.nbytes:
            raise ValueError(f"found bytes {offset} to {offset + nbytes}; expected 0 to {region.nbytes}")
        start = region.offset + offset
        return self._memory[start : start + nbytes]

    def prefault(self, nbytes: int, stop: threading.Event) -> None:
        """Allocates and maps the memory of the first bytes; run it in a thread, because it takes a while.

        Args:
            nbytes: How many bytes; capped at the size of the arena.
            stop: Set to end early.
        """
        end = min(nbytes, self.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        for start in range(0, end, _PREFAULT_STEP):
            if stop.is_set():
                return
            step = min(_PREFAULT_STEP, end - start)
            os.posix_fallocate(self.fd, start, step)
            self._populate(start, step)

    def _populate(self, start: int, nbytes: int) -> None:
        advice = _MADV_POPULATE_WRITE if self._writable else _MADV_POPULATE_READ
        with contextlib.suppress(OSError, ValueError):  # an older kernel, or closed meanwhile: only slower
            for offset in range(start, start + nbytes, _POPULATE_STEP):
                self._map.madvise(advice, offset, min(_POPULATE_STEP, start + nbytes - offset))

    def close(self) -> None:
        """Frees the memory once no view of it is left. Idempotent."""
        if self.fd < 0:
            return
        self._memory.release()
        with contextlib.suppress(BufferError):  # a view is left: releasing it unmaps the memory
            self._map.close()
        fd, self.fd = self.fd, -1
        os.close(fd)


class InputArena(Arena):
    """Arena of the operands: the front process writes them, workers can only read them."""

    def __init__(self, nbytes: int) -> None:
        """Creates and seals the arena; errors as for `Arena`."""
        super().__init__("npugrad-input", nbytes, writable=True)
        self.worker_fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def _seal(self) -> None:
        super()._seal()
        try:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
        except OSError as error:
            # The workers' descriptor is still read-only; only a hostile worker could reopen it for writing.
            _log.warning("operands are not sealed against writing: this kernel is older than 5.1 (%s)", error)

    def close(self) -> None:
        """As for `Arena`."""
        if self.fd >= 0:
            os.close(self.worker_fd)
        super().close()


class OutputArena(Arena):
    """Arena of one worker process's results: the worker writes them, the front process reads them.

    It outlives its process while a reply is being made from it: `hold` and `release` count its users.
    """

    def __init__(self, nbytes: int) -> None:
        """Creates the arena with one user; errors as for `Arena`."""
        super().__init__("npugrad-output", nbytes, writable=False)
        self._holders = 1

    def _seal(self) -> None:
        super()._seal()
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)

    def hold(self) -> None:
        """Adds a user."""
        self._holders += 1

    def release(self) -> bool:
        """Removes a user; returns whether it was the last, so that the caller must close the arena."""
        self._holders -= 1
        return self._holders == 0
