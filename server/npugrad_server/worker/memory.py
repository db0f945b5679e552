"""How this process's malloc treats freed memory; the server's front process uses this as well."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_KEPT_BYTES = 2**25 - 2**16
_M_ARENA_MAX = -8
"""From glibc's malloc.h."""
_STATM = Path("/proc/self/statm")


def keep_freed_memory() -> None:
    """Lets glibc's malloc reuse blocks of up to 32 MiB instead of giving them back to the kernel.

    Fresh memory costs a page fault for each 4 KiB, about ten times as much as a copy into mapped memory. By
    default, blocks from 128 KiB on are mapped anew, or trimmed from the heap when freed, and chunks and
    NumPy's temporaries are of that size. When a mapped block of up to 32 MiB is freed, glibc takes its size
    as the new threshold for mapping, and twice that for trimming: so one block, never touched, sets both for
    the life of the process.

    Costs up to 64 MiB that stay with each of malloc's arenas once used. If ``MALLOC_MMAP_THRESHOLD_``,
    ``MALLOC_TRIM_THRESHOLD_`` or glibc's tunables are set, they take precedence; another malloc is not
    affected.
    """
    bytes(_KEPT_BYTES)


def use_one_malloc_arena() -> None:
    """Lets all threads of this process allocate from one of glibc's arenas instead of one each.

    Freed memory returns to the arena it came from, and threads with another arena cannot reuse it. In the
    front process, grpc's threads take turns with the chunks of all calls, so each arena grew to as much as
    was ever in flight there. Call it before there are threads: an existing arena stays.

    If ``MALLOC_ARENA_MAX`` or ``glibc.malloc.arena_max`` is set, it takes precedence; a C library without
    such a setting is left alone.
    """
    if "MALLOC_ARENA_MAX" in os.environ or "glibc.malloc.arena_max" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def anonymous_bytes() -> int:
    """Resident memory of this process that is neither of files nor shared: ``RssAnon``, for less time."""
    _, resident, shared, *_ = _STATM.read_bytes().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def give_back_freed_memory() -> None:
    """Gives malloc's free pages back to the kernel, where the C library can; about 0.2 s for each GiB."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
