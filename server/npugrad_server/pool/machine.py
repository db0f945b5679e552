"""What this host, or the container around this process, has: processors and memory."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def cpu_count() -> int:
    """Processors this process may use: its affinity, cut by the container's quota; at least 1."""
    allowed = len(os.sched_getaffinity(0))
    quota = _cpu_quota()
    return allowed if quota is None else max(1, min(allowed, round(quota)))


def _cpu_quota() -> float | None:
    """Processors' worth of time that the container may use; None when it is not limited."""
    words = _words(_CGROUP / "cpu.max")
    if not words:
        words = _words(_CGROUP / "cpu/cpu.cfs_quota_us") + _words(_CGROUP / "cpu/cpu.cfs_period_us")
    if len(words) != 2 or not words[0].isdigit() or int(words[1]) == 0:
        return None  # "max", or -1 in the older form
    return int(words[0]) / int(words[1])


def memory_bytes() -> int:
    """Memory of the host, or the container's limit where that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [_CGROUP / "memory.max", _CGROUP / "memory/memory.limit_in_bytes"]
    found = [int(word) for path in limits for word in _words(path) if word.isdigit()]
    return min([total, *found])


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
