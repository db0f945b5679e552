"""How this process's malloc treats memory that is freed; the server's front process uses it as well."""

from __future__ import annotations

import ctypes
import os

_KEPT_BYTES = 2**25 - 2**16
_M_ARENA_MAX = -8
"""From glibc's malloc.h."""


def keep_freed_memory() -> None:
    """Lets glibc's malloc reuse blocks of up to 32 MiB instead of giving them back to the kernel.

    Fresh memory costs about ten times as much as a copy into memory that is there: a page fault for each
    4 KiB. By default blocks from 128 KiB on are mapped anew, or trimmed from the heap when they are freed,
    and that is the size of chunks and of what NumPy makes in between. When a mapped block of up to 32 MiB is
    freed, glibc takes its size as the new limit for mapping, and twice that for trimming: so one block,
    never touched, sets both for the life of the process.

    Costs up to 64 MiB that stay with each of malloc's arenas once they were used. Where somebody set
    ``MALLOC_MMAP_THRESHOLD_``, ``MALLOC_TRIM_THRESHOLD_`` or glibc's tunables, those hold, and another
    malloc takes no notice.
    """
    bytes(_KEPT_BYTES)


def use_one_malloc_arena() -> None:
    """Lets all threads of this process allocate from one of glibc's arenas instead of one each.

    What is freed goes back to the arena that it came from, and threads with another one cannot reuse it. In
    the front process grpc's threads take turns with the chunks of all calls, so that each arena came to hold
    as much as was ever in flight there. To be called before there are threads: an arena that is there stays.

    Where somebody set ``MALLOC_ARENA_MAX`` or ``glibc.malloc.arena_max``, that holds; a C library without
    such a setting is left alone.
    """
    if "MALLOC_ARENA_MAX" in os.environ or "glibc.malloc.arena_max" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
