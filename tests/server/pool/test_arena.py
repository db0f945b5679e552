from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Iterator

import pytest
from tests.interpreter import printed

from npugrad_server.pool.arena import Arena, InputArena, OutputArena
from npugrad_server.pool.regions import Region

MIB = 1 << 20

_TRY_TO_WRITE = """
import mmap, os, sys
fd, size = int(sys.argv[1]), int(sys.argv[2])
def refused(attempt):
    try:
        attempt()
    except OSError:
        return True
    return False
shared = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
assert shared[:5] == b"hello"
again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
attempts = [
    lambda: mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE),
    lambda: mmap.mmap(again, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE),
    lambda: os.pwrite(fd, b"x", 0),
    lambda: os.pwrite(again, b"x", 0),
    lambda: os.ftruncate(again, 0),
    lambda: os.ftruncate(again, 2 * size),
]
print([refused(attempt) for attempt in attempts])
"""


@pytest.fixture
def inputs() -> Iterator[InputArena]:
    arena = InputArena(MIB)
    yield arena
    arena.close()


@pytest.mark.slow
def test_no_worker_can_write_operands_or_resize_their_arena(inputs: InputArena) -> None:
    inputs.view(Region(0, 64), 0, 5)[:] = b"hello"
    tried = printed(
        _TRY_TO_WRITE, inputs.worker_fd, inputs.nbytes, pass_fds=(inputs.worker_fd,), timeout_s=30
    )
    assert tried.strip() == str([True] * 6)
    assert bytes(inputs.view(Region(0, 64), 0, 5)) == b"hello"
    # The front goes on writing.
    inputs.view(Region(4096, 128), 64, 3)[:] = b"abc"
    with mmap.mmap(inputs.worker_fd, inputs.nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as seen:
        assert seen[4160:4164] == b"abc\0"


def test_results_can_be_written_by_a_worker_and_read_by_the_front() -> None:
    arena = OutputArena(MIB)
    with mmap.mmap(arena.fd, arena.nbytes, flags=mmap.MAP_SHARED) as worker:
        worker[0:2] = b"ok"
    view = arena.view(Region(0, 64), 0, 2)
    assert bytes(view) == b"ok"
    assert view.readonly
    for size in (0, 2 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    arena.close()


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 65), (64, 1), (-1, 2)])
def test_a_view_stays_in_its_region(inputs: InputArena, offset: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="expected 0 to 64"):
        inputs.view(Region(128, 64), offset, nbytes)


def _backed_bytes(arena: Arena) -> int:
    return os.fstat(arena.fd).st_blocks * 512


def test_memory_is_taken_where_it_was_asked_for_in_advance_and_nowhere_else(inputs: InputArena) -> None:
    arena = OutputArena(16 * MIB)
    assert _backed_bytes(arena) == 0
    arena.prefault(4 * MIB + 5, threading.Event())
    assert _backed_bytes(arena) == 4 * MIB
    stop = threading.Event()
    stop.set()
    arena.prefault(16 * MIB, stop)
    assert _backed_bytes(arena) == 4 * MIB
    arena.close()
    inputs.view(Region(0, 64), 0, 3)[:] = b"xyz"
    inputs.prefault(10 * MIB, threading.Event())
    assert _backed_bytes(inputs) == MIB
    assert bytes(inputs.view(Region(0, 64), 0, 3)) == b"xyz", "it keeps what was written"


def test_an_arena_is_closed_by_its_last_user_only_though_somebody_keeps_a_view() -> None:
    arena = OutputArena(MIB)
    kept = arena.view(Region(0, 64), 0, 1)
    arena.hold()
    assert not arena.release()
    assert arena.release()
    arena.close()
    arena.close()
    assert arena.fd == -1
    assert kept[0] == 0
