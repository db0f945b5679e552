"""What a figure depends on besides the code: processor, memory settings, allocator, versions, other load."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

_VECTOR_FLAGS = re.compile(r"^(sse4_2|avx|avx2|fma|f16c|avx512\w*|avx_vnni|amx_\w+|asimd\w*|sve\w*|bf16)$")
_QUIET = 0.9
_PACKAGES = ("npugrad", "grpcio", "protobuf", "numpy", "ml_dtypes", "torch")
_ALLOCATORS = ("tcmalloc", "jemalloc", "mimalloc")
_SETTINGS = (
    "LD_PRELOAD",
    "GLIBC_TUNABLES",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "OPENBLAS_CORETYPE",
    "PYTHONMALLOC",
)


def environment() -> dict[str, str]:
    facts = {
        "cpu": _cpu_field("model name") or platform.processor() or platform.machine(),
        "cores": f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}",
        "vector flags": " ".join(sorted(filter(_VECTOR_FLAGS.match, _cpu_field("flags").split()))),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "allocator": allocator(),
        "huge pages": _text(Path("/sys/kernel/mm/transparent_hugepage/enabled")) or "unknown",
        "versions": ", ".join(f"{name} {_version(name)}" for name in _PACKAGES),
        "idle before the start": _idle(),
    }
    settings = [
        f"{name}={os.environ[name]}" for name in (*_SETTINGS, *_malloc_settings()) if name in os.environ
    ]
    return {**facts, "environment": ", ".join(settings) or "nothing that matters is set"}


def _idle() -> str:
    seen = psutil.cpu_times_percent(0.5)
    share = (seen.idle + seen.iowait) / 100  # well below 1, something else runs
    return f"{share:.0%} of the cores" + (
        "" if share > _QUIET else ": OTHER WORK RUNS, do not quote the figures"
    )


def allocator() -> str:
    """Which malloc this process, and so what it starts, uses."""
    maps = _text(Path("/proc/self/maps"))
    preloaded = [name for name in _ALLOCATORS if name in maps]
    return ", ".join(preloaded) or " ".join(filter(None, platform.libc_ver())) or "unknown"


def _malloc_settings() -> list[str]:
    return sorted(name for name in os.environ if name.startswith("MALLOC_"))


def _cpu_field(field: str) -> str:
    found = re.search(rf"^{field}\s*:\s*(.*)$", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    return found.group(1) if found else ""


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"
