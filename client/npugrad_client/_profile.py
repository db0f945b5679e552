"""Profile of a client: writes every finished call to a growing Chrome trace."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from npugrad_client._chrome_trace import Trace

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from npugrad_client._clock import CallClock, Sink

_LOG = logging.getLogger("npugrad_client")

_WRITE_EVERY_S = 1.0
"""Interval between writes: what a process that dies may lose."""
_WRITE_FROM = 256
"""Number of waiting calls from which they are written at once."""
_MOST_WAITING = 2**16
"""Maximum number of calls that wait for a slow disk; further ones are left out."""


@contextmanager
def profiling(path: str | os.PathLike[str], sinks: list[Sink]) -> Iterator[None]:
    """Writes each call that ends in the block to a file.

    Args:
        path: Output file; overwritten if it exists.
        sinks: The sinks that a client notifies of its calls.

    Raises:
        OSError: The file cannot be opened, or, at the end of the block, not everything could be written.
    """
    profile, is_well = Profile(path), False
    sinks.append(profile)
    try:
        yield
        is_well = True
    finally:
        sinks.remove(profile)
        error = profile.close()
        if error is not None and is_well:  # else the block's own exception matters more
            raise error


class Profile:
    """The file, and a thread that writes it, so that calls only pay for being recorded.

    Nothing is buffered, because a forked process would write its parent's buffer again.

    Thread safety: `ended` may be called by any number of threads.

    Processes: calls of a forked process are not written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Starts the file; raises `OSError` if it cannot be written."""
        self._path, self._process = os.fspath(path), os.getpid()
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115  # closed by `close`
        self._written_bytes = 0
        self._error: OSError | None = None
        self._trace = Trace()
        self._waiting: deque[tuple[CallClock, Mapping[str, Any]]] = deque()
        self._left_out_count, self._is_closing, self._wake = 0, False, threading.Event()
        try:
            self._put("[\n", self._trace.begin())
        except OSError:
            self._file.close()
            raise
        self._thread = threading.Thread(target=self._work, name="npugrad-profile", daemon=True)
        self._thread.start()

    def ended(self, clock: CallClock) -> None:
        """Records a call that has ended."""
        if os.getpid() != self._process or self._error is not None:
            return
        if len(self._waiting) >= _MOST_WAITING:
            self._left_out_count += 1
            return
        self._waiting.append((clock, _args(clock)))
        if len(self._waiting) >= _WRITE_FROM:
            self._wake.set()

    def close(self) -> OSError | None:
        """Ends the file; returns the error that occurred since it was started, if any."""
        if os.getpid() == self._process:
            self._is_closing = True
            self._wake.set()
            self._thread.join()
            self._write_waiting()
            self._write("\n]\n", ())
            if self._left_out_count:
                _LOG.warning("%s lacks %d calls: the disk was too slow", self._path, self._left_out_count)
        self._file.close()
        return self._error

    def _work(self) -> None:
        while not self._is_closing:
            self._wake.wait(_WRITE_EVERY_S)
            self._wake.clear()
            self._write_waiting()

    def _write_waiting(self) -> None:
        while self._waiting:
            events: list[str] = []
            for _ in range(min(len(self._waiting), _WRITE_FROM)):
                events += self._trace.events(*self._waiting.popleft())
                time.sleep(0)  # releases the GIL, for which a call would wait up to 5 ms
            self._write(",\n", events)

    def _write(self, text: str, events: Sequence[str]) -> None:
        """Writes a text and events; after an error, writes nothing more."""
        if self._error is not None:
            return
        try:
            self._put(text, events)
        except OSError as error:
            error.filename, self._error = self._path, error
            with suppress(OSError):  # no viewer can read half an event
                os.ftruncate(self._file.fileno(), self._written_bytes)
            _LOG.warning("the profile ends here: %s", error)

    def _put(self, text: str, events: Sequence[str]) -> None:
        data = (text + ",\n".join(events)).encode()
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]
        self._written_bytes += len(data)


def _args(clock: CallClock) -> dict[str, Any]:
    """What to show of a call besides its name and times."""
    error, info = clock.error, clock.info
    args: dict[str, Any] = {}
    if info is not None:
        args |= {"request_id": info.request_id, "device": info.device}
    if clock.prepared is not None:
        args["bytes"] = clock.prepared.nbytes
    if error is not None:
        request_id = getattr(error, "request_id", "")
        args |= {"request_id": request_id} if request_id else {}
        args["error"] = f"{type(error).__name__}: {error}"
    return args
