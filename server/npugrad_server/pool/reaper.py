"""Children of this process: those it started, and those it inherited because it is the first of a container.

The kernel hands a process whose parent has ended to the first one, which has to wait for it: else it stays in
the table of processes. Those that were started here are waited for by whoever started them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from typing import TYPE_CHECKING

from npugrad_server.worker.descendants import processes

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

REAP_PAUSE_S = 2.0
"""Seconds between two looks for inherited processes that have ended."""
_started: set[int] = set()
_lock = threading.Lock()


def start_child(start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """Starts a process that `reap_inherited` leaves alone until `collect_child`.

    Args:
        start: Starts it.

    Raises:
        OSError: It cannot be started.
    """
    with _lock:  # a child must not be taken for an orphan before it is known
        process = start()
        _started.add(process.pid)
    return process


def collect_child(process: subprocess.Popen[bytes]) -> int:
    """Waits for a process of `start_child`; returns its exit status."""
    status = process.wait()
    _started.discard(process.pid)  # not before: until then it may look like an orphan
    return status


def reap_inherited() -> int:
    """Waits for every inherited child that has ended; returns how many there were.

    Raises:
        OSError: This process has no descriptor left to look with.
    """
    count = 0
    with _lock:
        for process in processes():
            if process.parent == os.getpid() and process.state == "Z" and process.pid not in _started:
                with contextlib.suppress(ChildProcessError):
                    count += os.waitpid(process.pid, os.WNOHANG)[0] == process.pid
    return count


async def keep_reaping() -> None:
    """Waits for inherited processes until it is cancelled; returns at once where there can be none."""
    while os.getpid() == 1:
        await asyncio.sleep(REAP_PAUSE_S)
        with contextlib.suppress(OSError):  # no descriptor is left to look with: next time
            await asyncio.to_thread(reap_inherited)
