"""The processors and memory that this process may use, within the limits of its control groups."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOT = Path("/")


def cpu_count(root: Path = _ROOT) -> int:
    """Number of processors this process may use: its affinity or the lowest quota of its control groups.

    Args:
        root: Root of the file system; another one in tests.

    Returns:
        The smaller of the two, rounded, at least 1.
    """
    counts = [float(len(os.sched_getaffinity(0)))]
    for group in _groups(root, "cpu"):
        words = _words(group / "cpu.max") or [
            *_words(group / "cpu.cfs_quota_us"),
            *_words(group / "cpu.cfs_period_us"),
        ]
        # Without a quota, this is "max", or -1 in version 1.
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]) > 0:
            counts.append(int(words[0]) / int(words[1]))
    return max(1, round(min(counts)))


def memory_bytes(root: Path = _ROOT) -> int:
    """Bytes of memory this process may use: the host's, or the lowest limit of its control groups.

    Args:
        root: Root of the file system; another one in tests.
    """
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for group in _groups(root, "memory"):
        words = [*_words(group / "memory.max"), *_words(group / "memory.limit_in_bytes")]
        limits += [int(word) for word in words if word.isdigit()]
    return min(limits)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's control group and its ancestors, of either version."""
    base = root / "sys/fs/cgroup"
    # A container sees its own group here, whatever its path on the host.
    yield base
    yield base / controller
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        group = Path(path.lstrip("/"))
        if controllers == "":
            yield from (base / folder for folder in (group, *group.parents))
        elif controller in controllers.split(","):
            yield from (base / controller / folder for folder in (group, *group.parents))


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
