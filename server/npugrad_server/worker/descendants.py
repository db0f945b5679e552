"""What a worker leaves behind: vendor libraries fork helpers that keep its memory, socket and device.

A helper may have changed its group, its session and its parent, so it is recognized by a mark in its initial
environment. Finding and killing it are microseconds apart, and the kernel hands out process numbers in
sequence, so no unrelated process is hit.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from pathlib import Path
from typing import NamedTuple, NoReturn

MARK = "NPUGRAD_WORKER_MARK"
"""Environment variable that tells the descendants of one worker from all other processes."""
OWN_TIMEOUT_S = 1.0
"""Seconds that an exiting worker waits for its descendants."""
_PAUSE_S = 0.01
_DEAD = ("Z", "X")


class Stat(NamedTuple):
    """What the kernel says about a process.

    Attributes:
        pid: Its number.
        state: A letter; Z when it has ended and nobody has waited for it.
        parent: Number of its parent.
        session: Number of its session.
        start: Clock ticks from the boot to its start; tells it from a later process of the same number.
    """

    pid: int
    state: str
    parent: int
    session: int
    start: int


def processes() -> list[Stat]:
    """Every visible process.

    Raises:
        OSError: This process is out of descriptors.
    """
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal() and (text := _read(name, "stat")):
            # From the third field of proc(5) on; the second one, a name, may hold anything.
            state, parent, _, session, *more = text.rpartition(b")")[2].split()
            start = more[15]  # the 22nd field
            found.append(Stat(int(name), state.decode(), int(parent), int(session), int(start)))
    return found


def _read(pid: str, name: str) -> bytes:
    """What the kernel says about a process; nothing if it has ended, or is another user's."""
    try:
        return Path("/proc", pid, name).read_bytes()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return b""


def end_descendants(mark: str, worker: int, timeout_s: float) -> list[int]:
    """Kills the processes that a worker has left behind, and waits until they are gone.

    Args:
        mark: The worker's value of `MARK`.
        worker: Its process number, also that of its session. It is not killed.
        timeout_s: Seconds to wait.

    Returns:
        Those that are still there.

    Raises:
        OSError: This process was out of descriptors until the timeout.
    """
    end_s = time.monotonic() + timeout_s
    killed = set[tuple[int, int]]()
    while True:
        try:
            alive = [each for each in processes() if each.pid != worker and each.state not in _DEAD]
            found = [each for each in alive if each.session == worker or _has_mark(each.pid, mark)]
        except OSError:
            if time.monotonic() >= end_s:
                raise
        else:
            for each in found:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(each.pid, signal.SIGKILL)
            killed |= {(each.pid, each.start) for each in found}
            # A process that ends gives back its memory, which holds the mark, before its files.
            left = [each.pid for each in alive if (each.pid, each.start) in killed]
            if not left or time.monotonic() >= end_s:
                return left
        time.sleep(_PAUSE_S)


def _has_mark(pid: int, mark: str) -> bool:
    return f"{MARK}={mark}".encode() in _read(str(pid), "environ").split(b"\0")


def leave(status: int) -> NoReturn:
    """Ends this worker with all its descendants, since the pool may be gone.

    Args:
        status: Exit status.
    """
    try:
        mark = os.environ.get(MARK)
        if mark and os.getsid(0) == os.getpid():
            end_descendants(mark, os.getpid(), OWN_TIMEOUT_S)
    finally:
        os._exit(status)


def keep_from_programs() -> None:
    """Keeps programs that this process starts from inheriting any but the standard descriptors."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if int(name) > 2:
                os.set_inheritable(int(name), False)
        except OSError:  # the listing's own descriptor
            continue
