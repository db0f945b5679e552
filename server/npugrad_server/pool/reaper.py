"""Reaps child processes: those that this process started, and those it inherits as a container's process 1.

The kernel hands orphans to process 1, which must wait for them or they stay in the process table. Children
started here are waited for by whoever started them.
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
"""Seconds between two searches for inherited processes that have ended."""
_started: set[int] = set()
_lock = threading.Lock()


def start_child(start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """Starts a process that `reap_inherited` leaves alone until `collect_child`.

    Args:
        start: Starts the process.

    Raises:
        OSError: It cannot be started.
    """
    with _lock:  # a child must not be taken for an orphan before it is registered
        process = start()
        _started.add(process.pid)
    return process


def collect_child(process: subprocess.Popen[bytes]) -> int:
    """Waits for a process of `start_child`; returns its exit status."""
    status = process.wait()
    _started.discard(process.pid)  # not before: until then it may look like an orphan
    return status


def reap_inherited() -> int:
    """Reaps every inherited child that has ended; returns how many there were.

    Raises:
        OSError: This process is out of descriptors.
    """
    count = 0
    with _lock:
        for process in processes():
            if process.parent == os.getpid() and process.state == "Z" and process.pid not in _started:
                with contextlib.suppress(ChildProcessError):
                    count += os.waitpid(process.pid, os.WNOHANG)[0] == process.pid
    return count


async def keep_reaping() -> None:
    """Reaps inherited processes until cancelled; returns at once if there can be none."""
    while os.getpid() == 1:
        await asyncio.sleep(REAP_PAUSE_S)
        with contextlib.suppress(OSError):  # out of descriptors: try again next time
            await asyncio.to_thread(reap_inherited)
