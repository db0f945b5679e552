"""Files that may change while a server runs: a read that hangs holds nobody up, half a file is not taken."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import threading
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

_T = TypeVar("_T")
LOOK_INTERVAL_S = 1.0
"""Seconds between two checks of a file."""
UNCHANGED_LOOKS = 2
"""Checks in a row that must find the same again: a half-written file is not taken for a whole one."""
ANSWER_S = 5.0
"""Seconds for a file to be read: one on a network file system may not answer at all."""

_lock = threading.Lock()
_unanswered: dict[str, Future[bytes | OSError]] = {}


def read_file(path: str) -> bytes:
    """Reads a regular file, by the links that lead to it.

    Raises:
        OSError: It cannot be read, is no regular file, or gave no answer in `ANSWER_S`.
    """
    [found] = read_files([path])
    if isinstance(found, OSError):
        raise found
    return found


def read_files(paths: Iterable[str]) -> list[bytes | OSError]:
    """Reads some files at once: the contents of each, or the error that `read_file` raises.

    A read that does not answer in time goes on, and later calls wait for that one: a file system that hangs
    costs one thread for each file.
    """
    paths = list(paths)
    with _lock:
        readings = {path: _unanswered.get(path) or _begun(partial(_contents, path)) for path in paths}
        _unanswered.update(readings)
    answered, _ = wait(readings.values(), ANSWER_S)
    with _lock:
        for path, reading in readings.items():
            if reading in answered and _unanswered.get(path) is reading:
                del _unanswered[path]
    late = TimeoutError(errno.ETIMEDOUT, f"no answer within {ANSWER_S:g} s")
    return [readings[path].result() if readings[path] in answered else late for path in paths]


def _contents(path: str) -> bytes | OSError:
    try:
        # A pipe without a writer would keep even `open` waiting.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return OSError(errno.EINVAL, "not a regular file", path)
            return file.read()
    except OSError as error:
        return error


def _begun(work: Callable[[], _T]) -> Future[_T]:
    """Runs `work` on a daemon thread: the end of the process would wait for one of an executor."""
    future: Future[_T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="npugrad-file").start()
    return future


async def aside(work: Callable[[], _T]) -> _T:
    """Runs `work` on a thread that neither the loop nor the end of the process waits for."""
    return await asyncio.wrap_future(_begun(work))


class FileWatch(Generic[_T]):
    """Looks at files again and again.

    What is found is compared, so it does not matter how a change came about: by a rename, by swapping a
    symbolic link above the files, as Kubernetes does, or by writing into them.

    Attributes:
        look_count: Number of checks since the start.
    """

    def __init__(self, read: Callable[[], _T], interval_s: float = LOOK_INTERVAL_S) -> None:
        """Stores the arguments.

        Args:
            read: Reads the files; what it returns can be compared. Called on a thread.
            interval_s: Seconds between two checks.
        """
        self._read, self._interval_s = read, interval_s
        self._asked = asyncio.Event()
        self.look_count = 0

    def look_now(self) -> None:
        """Checks at once, and takes what is found as it is."""
        self._asked.set()

    async def settled(self) -> AsyncIterator[_T]:
        """What the files hold, at each check that finds them unchanged for a while, or that was asked for."""
        seen: _T | None = None
        same = 0
        while True:
            at_once = await self._pause()
            found = await aside(self._read)
            same = same + 1 if found == seen else 0
            seen = found
            if at_once or same >= UNCHANGED_LOOKS:
                yield found
            self.look_count += 1

    async def _pause(self) -> bool:
        try:
            await asyncio.wait_for(self._asked.wait(), self._interval_s)
        except asyncio.TimeoutError:
            return False
        self._asked.clear()
        return True
