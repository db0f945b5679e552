"""How this process's malloc treats memory that is freed; the server's front process uses it as well."""

from __future__ import annotations

_KEPT_BYTES = 2**25 - 2**16


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
