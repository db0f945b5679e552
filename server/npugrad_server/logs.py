"""The log: one structured line an event on standard error, as JSON or for a person.

Lines are written by a thread of their own, so that a slow reader of standard error never holds up the
event loop; when it falls too far behind, lines are dropped and counted. Nor does one that reads nothing at
all hold up the end of the process. The standard library's log, which gRPC and asyncio write to, goes the
same way, and so does what workers print.
"""

from __future__ import annotations

import logging
import logging.handlers
import os
import queue
import select
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

import structlog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from structlog.typing import EventDict, WrappedLogger

MAX_BACKLOG_LINES = 10_000
"""Lines that may wait for standard error before others are dropped."""
MAX_VALUE_CHARACTERS = 2048
"""Longest text in a line, tracebacks aside: callers choose parts of it."""
FAREWELL_S = 2.0
"""Seconds that lines have to be written at the end; those left then are lost."""
_MAX_PRINTED_BYTES = 65536
"""Longest line of another process; a longer one becomes several."""
_COUNT = "lines"


class LogBacklog(logging.handlers.QueueHandler):
    """Hands records to the writing thread and never waits.

    Attributes:
        lines: Records that wait for the writing thread; None ends it.
        dropped_lines: Lines lost because standard error was not read, since that was last said.
    """

    def __init__(self) -> None:
        self.lines: queue.Queue[logging.LogRecord | None] = queue.Queue(MAX_BACKLOG_LINES)
        super().__init__(self.lines)
        self.dropped_lines = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """The record as it is: rendering is the writing thread's work."""
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queues the record, or drops it."""
        try:
            self.lines.put_nowait(record)
        except queue.Full:
            self.dropped_lines += 1

    def take_dropped(self) -> logging.LogRecord | None:
        """What says how many lines were dropped; None when none were, or it was said before."""
        self.acquire()
        try:
            count, self.dropped_lines = self.dropped_lines, 0
        finally:
            self.release()
        level = {"levelno": logging.WARNING, "levelname": "WARNING"}
        said = {"name": "npugrad_server", "msg": "log lines dropped", _COUNT: count, **level}
        return logging.makeLogRecord(said) if count else None


class LogWriter(threading.Thread):
    """Writes the lines of a backlog, however long that takes."""

    def __init__(self, backlog: LogBacklog, formatter: logging.Formatter, stream: TextIO) -> None:
        """Writes nothing yet.

        Args:
            backlog: Where the lines come from.
            formatter: Makes a line of a record.
            stream: Where they go.
        """
        super().__init__(name="log", daemon=True)
        self._backlog, self._formatter = backlog, formatter
        self._write = _writer(stream)
        self._left = False

    def run(self) -> None:
        """Writes until `close`. Takes no lock while it does, as the end of the process takes them all."""
        lines, record = self._backlog.lines, None
        while record is not None or (record := lines.get()) is not None:
            self._write(self._line(record))
            if self._left:
                return
            # Said when everything before was written: more often, it would crowd out the others.
            record = self._backlog.take_dropped() if lines.empty() else None
        if (record := self._backlog.take_dropped()) is not None:
            self._write(self._line(record))

    def _line(self, record: logging.LogRecord) -> str:
        try:
            return f"{self._formatter.format(record)}\n"
        except Exception as error:  # the thread must not end for what one line cannot show
            return f"a line of {record.name} cannot be shown: {error!r}\n"

    def close(self, timeout_s: float) -> None:
        """Ends the thread when it has written what there is, or leaves it behind when the time is over."""
        end_s = time.monotonic() + timeout_s
        try:
            self._backlog.lines.put(None, timeout=timeout_s)
            self.join(max(0.0, end_s - time.monotonic()))
        except queue.Full:
            pass
        self._left = True


def _writer(stream: TextIO) -> Callable[[str], object]:
    """What writes to a stream; past its buffer if it has a descriptor.

    The end of the interpreter waits for the lock of the buffer of standard error, which a thread that is
    stuck in a write would have.
    """
    try:
        descriptor = stream.fileno()
    except (OSError, AttributeError):  # not a file
        return stream.write

    def write(text: str) -> None:
        left = memoryview(text.encode(errors="backslashreplace"))
        try:
            while left:
                try:
                    left = left[os.write(descriptor, left) :]
                except BlockingIOError:  # whoever shares the open file has made it so
                    select.select([], [descriptor], [])
        except OSError:  # nobody will ever read it
            return

    return write


@contextmanager
def relayed(stream: TextIO | None = None) -> Iterator[int]:
    """Passes on what other processes print; they never wait for a slow reader.

    Args:
        stream: Where to; standard error by default.

    Yields:
        The descriptor they are to print to, for the time of the block.
    """
    ours, theirs = os.pipe()
    backlog = LogBacklog()
    writer = LogWriter(backlog, logging.Formatter("%(message)s"), stream or sys.stderr)
    reader = threading.Thread(target=_read_lines, args=(ours, backlog), name="relay", daemon=True)
    writer.start()
    reader.start()
    try:
        yield theirs
    finally:
        os.close(theirs)
        reader.join(FAREWELL_S)  # until the last of them has ended
        writer.close(FAREWELL_S)


def _read_lines(descriptor: int, backlog: LogBacklog) -> None:
    with os.fdopen(descriptor, "rb") as pipe:
        while line := pipe.readline(_MAX_PRINTED_BYTES):
            text = line.decode(errors="backslashreplace").removesuffix("\n")
            backlog.handle(logging.makeLogRecord({"msg": text}))


def configure(log_format: str, level: str, stream: TextIO | None = None) -> Callable[[], None]:
    """Sets up the log of the process.

    Args:
        log_format: ``"json"``, ``"console"`` or ``"auto"`` (console on a terminal).
        level: Least level that is written, such as ``"info"``.
        stream: Where to write; standard error by default.

    Returns:
        What writes the remaining lines, within `FAREWELL_S`, and ends the thread.
    """
    target: TextIO = stream or sys.stderr
    shared: list[Any] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _shorten,
    ]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            structlog.stdlib.add_logger_name,
            structlog.stdlib.ExtraAdder(allow=[_COUNT]),
            *shared,
        ],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            *_renderer(log_format, target),
        ],
    )
    backlog = LogBacklog()
    writer = LogWriter(backlog, formatter, target)
    writer.start()
    root = logging.getLogger()
    root.handlers[:] = [backlog]
    root.setLevel(level.upper())
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )

    def close() -> None:
        writer.close(FAREWELL_S)
        root.handlers.remove(backlog)

    return close


def _renderer(log_format: str, stream: TextIO) -> list[Any]:
    if log_format == "console" or (log_format == "auto" and stream.isatty()):
        return [structlog.dev.ConsoleRenderer(colors=stream.isatty())]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]


def _shorten(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    for name, value in event.items():
        if isinstance(value, str) and len(value) > MAX_VALUE_CHARACTERS:
            event[name] = value[: MAX_VALUE_CHARACTERS - 3] + "..."
    return event


def get_logger() -> structlog.stdlib.BoundLogger:
    """The server's logger."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger("npugrad_server")
    return logger
