"""Freed memory stays with the process: page faults of real processes, counted by the kernel."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

# Blocks of the size of a chunk, more than one at a time: what transport and NumPy do.
_PROGRAM = """
import resource, sys
if sys.argv[1] == "keep":
    from npugrad_server.worker.memory import keep_freed_memory
    keep_freed_memory()
def work():
    blocks = [b"x" * 2**20 for _ in range(12)]
for _ in range(3):
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    plain = {
        name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_"))
    }
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, how],
        env=plain,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc takes no notice")
def test_blocks_are_reused_without_page_faults() -> None:
    pages = 10 * 12 * 2**20 // os.sysconf("SC_PAGE_SIZE")
    kept, plain = faults("keep"), faults("plain")
    assert plain > pages / 2, "glibc keeps what is freed by itself: the function is not needed any more"
    assert kept < pages / 20, f"{kept} page faults; {plain} without"
