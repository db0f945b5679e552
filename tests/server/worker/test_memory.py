"""Freed memory stays with the process, once: page faults and resident memory of real processes."""

from __future__ import annotations

import os
import platform

import pytest
from tests.interpreter import printed

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

# Threads that are there at once and use as much memory one after the other: what grpc's do with chunks.
_THREADS = """
import sys, threading
from pathlib import Path
from npugrad_server.worker.memory import keep_freed_memory, use_one_malloc_arena
keep_freed_memory()
if sys.argv[1] == "one":
    use_one_malloc_arena()
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1])
def work(turn, done, end):
    turn.wait()
    blocks = [b"x" * 2**20 for _ in range(12)]
    del blocks
    done.set()
    end.wait()
end, turns = threading.Event(), []
for _ in range(6):
    turn, done = threading.Event(), threading.Event()
    threading.Thread(target=work, args=(turn, done, end)).start()
    turns.append((turn, done))
found = []
for turn, done in turns:
    turn.set()
    done.wait()
    found.append(resident())
end.set()
print(found[-1] - found[0])
"""

# Many blocks that are freed below one that stays, so that none goes back by itself.
_FREED = """
import asyncio, sys
from npugrad_server.rpc import front_memory
from npugrad_server.worker import memory
memory.keep_freed_memory()
front_memory._LOOK_S = 0.0
async def main():
    before = memory.anonymous_bytes()
    used = int(sys.argv[1])
    giving = asyncio.create_task(front_memory.keep_giving_back(lambda: used))
    await asyncio.sleep(0)
    blocks = [b"x" * 2**16 for _ in range(1000)]
    last = b"x" * 2**16
    del blocks
    for _ in range(100):
        await asyncio.sleep(0)
    while not used and memory.anonymous_bytes() - before > 100 * 2**16:
        await asyncio.sleep(0.001)
    print(memory.anonymous_bytes() - before)
    giving.cancel()
asyncio.run(main())
"""

_GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc takes no notice")


def counted(program: str, how: str, **settings: str) -> int:
    plain = {
        name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_"))
    }
    return int(printed(program, how, env={**plain, **settings}))


@_GLIBC
def test_blocks_are_reused_without_page_faults() -> None:
    pages = 10 * 12 * 2**20 // os.sysconf("SC_PAGE_SIZE")
    kept, plain = counted(_PROGRAM, "keep"), counted(_PROGRAM, "plain")
    assert plain > pages / 2, "glibc keeps what is freed by itself: the function is not needed any more"
    assert kept < pages / 20, f"{kept} page faults; {plain} without"


@_GLIBC
def test_threads_reuse_what_others_freed() -> None:
    pages = 5 * 12 * 2**20 // os.sysconf("SC_PAGE_SIZE")
    one, several = counted(_THREADS, "one"), counted(_THREADS, "several")
    assert several > pages / 2, "threads reuse it by themselves: the function is not needed any more"
    assert one < pages / 10, f"{one} more pages resident; {several} without"


@_GLIBC
@pytest.mark.parametrize(
    ("name", "value"), [("MALLOC_ARENA_MAX", "8"), ("GLIBC_TUNABLES", "glibc.malloc.arena_max=8")]
)
def test_arenas_that_somebody_asked_for_stay(name: str, value: str) -> None:
    pages = 5 * 12 * 2**20 // os.sysconf("SC_PAGE_SIZE")
    assert counted(_THREADS, "one", **{name: value}) > pages / 2


@_GLIBC
def test_freed_memory_that_nobody_needs_is_given_back() -> None:
    assert counted(_FREED, str(2**27)) > 900 * 2**16
    assert counted(_FREED, "0") < 100 * 2**16
