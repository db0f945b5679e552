"""The log: one structured line per event on standard error, as JSON or for a person.

A separate thread formats and writes the lines, many at a time, so that neither formatting nor a slow reader
of standard error blocks the event loop; when it falls too far behind, lines are dropped and counted. Warnings
and errors do not wait for other lines. A reader that has stopped reading does not block the end of the
process either. The standard library's log, which gRPC and asyncio write to, goes the same way, and so does
what workers print.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import queue
import select
import sys
import threading
import time
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

import structlog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    from structlog.typing import EventDict, WrappedLogger

    Line: TypeAlias = "tuple[int, float, str, Callable[..., EventDict], tuple[object, ...]]"
    """Level, seconds since the epoch, event, what makes the fields, and its arguments."""
    Entry: TypeAlias = "logging.LogRecord | Line"

MAX_BACKLOG_LINES = 10_000
"""Lines that may wait for standard error before more are dropped."""
MAX_VALUE_CHARACTERS = 2048
"""Longest text in a line, tracebacks aside: callers choose parts of it."""
FAREWELL_S = 2.0
"""Seconds to write the remaining lines at the end; any left then are lost."""
PAUSE_S = 0.02
"""Seconds a line waits to be written with others; warnings and errors do not wait."""
MAX_BATCH_LINES = 256
"""Maximum number of lines written at once."""
_LEVEL_NAMES = {
    level: logging.getLevelName(level).lower()
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)
}
_RUSH_LINES = 64
"""Number of waiting lines at which they are written without waiting for more."""
_MAX_PRINTED_BYTES = 65536
"""Longest line of another process; longer ones are split."""
_COUNT = "lines"


class LogBacklog(logging.handlers.QueueHandler):
    """Passes entries to the writing thread and never waits.

    Attributes:
        lines: Entries that wait for the writing thread; None ends it.
        urgent: Set when the writing thread must not wait for more entries.
        dropped_lines: Lines lost, because standard error was not read, since this was last reported.
        all_dropped_lines: Lines lost so far by all backlogs of the process.
    """

    all_dropped_lines: ClassVar[int] = 0

    def __init__(self) -> None:
        self.lines: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        super().__init__(self.lines)
        self.urgent = threading.Event()
        self.dropped_lines = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Returns the record unchanged: the writing thread renders it."""
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queues the record, or drops it."""
        self.put(record, record.levelno)

    def put(self, entry: Entry, level: int) -> None:
        """Queues an entry, or drops it.

        Args:
            entry: The entry.
            level: Its level.
        """
        waiting = self.lines.qsize()
        if waiting >= MAX_BACKLOG_LINES:
            self._drop()
            return
        self.lines.put(entry)
        if level >= logging.WARNING or waiting == _RUSH_LINES:
            self.urgent.set()

    def _drop(self) -> None:
        self.acquire()
        try:
            self.dropped_lines += 1
            LogBacklog.all_dropped_lines += 1
        finally:
            self.release()

    def take(self, pause_s: float) -> list[Entry | None]:
        """Waits for an entry, then for more, and takes them.

        Args:
            pause_s: Seconds to wait for more, unless one is urgent.
        """
        found = [self.lines.get()]
        if pause_s and found[0] is not None:
            self.urgent.wait(pause_s)
            self.urgent.clear()
        while found[-1] is not None and len(found) < MAX_BATCH_LINES and not self.lines.empty():
            found.append(self.lines.get())
        if not self.lines.empty():
            self.urgent.set()  # the rest has waited already
        return found

    def take_dropped(self) -> logging.LogRecord | None:
        """A record of how many lines were dropped since the last one; None if none were."""
        self.acquire()
        try:
            count, self.dropped_lines = self.dropped_lines, 0
        finally:
            self.release()
        level = {"levelno": logging.WARNING, "levelname": "WARNING"}
        said = {"name": "npugrad_server", "msg": "log lines dropped", _COUNT: count, **level}
        return logging.makeLogRecord(said) if count else None

    def end(self) -> None:
        """Lets the writing thread end once it has written everything."""
        self.lines.put(None)
        self.urgent.set()


class LogWriter(threading.Thread):
    """Writes the lines of a backlog, however long that takes."""

    def __init__(
        self, backlog: LogBacklog, show: Callable[[Entry], str], stream: TextIO, pause_s: float = 0.0
    ) -> None:
        """Writes nothing yet.

        Args:
            backlog: Source of the entries.
            show: Formats an entry as a line.
            stream: Where they go.
            pause_s: Seconds a line waits for others.
        """
        super().__init__(name="log", daemon=True)
        self._backlog, self._show, self._pause_s = backlog, show, pause_s
        self._write = _writer(stream)
        self._left = False

    def run(self) -> None:
        """Writes until `close`. Holds no lock while writing, because process exit takes all locks."""
        lines = self._backlog.lines
        entries: list[Entry | None] = self._backlog.take(self._pause_s)
        while entries[-1] is not None:
            self._write("".join(map(self._line, entries)))
            if self._left:
                return
            # Reported only once everything before it is written: more often, it would crowd out the others.
            dropped = self._backlog.take_dropped() if lines.empty() else None
            entries = self._backlog.take(self._pause_s) if dropped is None else [dropped]
        entries[-1] = self._backlog.take_dropped()
        self._write("".join(self._line(entry) for entry in entries if entry is not None))

    def _line(self, entry: Entry | None) -> str:
        if entry is None:
            return ""
        try:
            return f"{self._show(entry)}\n"
        except Exception as error:  # one line that cannot be shown must not end the thread
            name = entry.name if isinstance(entry, logging.LogRecord) else entry[2]
            return f"a line of {name} cannot be shown: {error!r}\n"

    def close(self, timeout_s: float) -> None:
        """Ends the thread once it has written everything, or abandons it when the time is up."""
        self._backlog.end()
        self.join(timeout_s)
        self._left = True


def _writer(stream: TextIO) -> Callable[[str], object]:
    """Returns a function that writes to a stream, bypassing its buffer if it has a descriptor.

    At its end, the interpreter waits for the lock of standard error's buffer, which a thread stuck in a write
    would hold.
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
                except BlockingIOError:  # another user of the open file made it non-blocking
                    select.select([], [descriptor], [])
        except OSError:  # nobody will ever read it
            return

    return write


@contextmanager
def relayed(stream: TextIO | None = None) -> Iterator[int]:
    """Relays what other processes print; they never wait for a slow reader.

    Args:
        stream: Where to write; standard error by default.

    Yields:
        The descriptor for them to print to, within the block.
    """
    ours, theirs = os.pipe()
    backlog = LogBacklog()
    writer = LogWriter(backlog, _as_printed, stream or sys.stderr)
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
            backlog.put(logging.makeLogRecord({"msg": text}), logging.NOTSET)


def _as_printed(entry: Entry) -> str:
    return entry.getMessage() if isinstance(entry, logging.LogRecord) else entry[2]


def configure(log_format: str, level: str, stream: TextIO | None = None) -> Callable[[], None]:
    """Sets up the log of the process.

    Args:
        log_format: ``"json"``, ``"console"`` or ``"auto"`` (console on a terminal).
        level: Lowest level that is written, such as ``"info"``.
        stream: Where to write; standard error by default.

    Returns:
        A function that writes the remaining lines, within `FAREWELL_S`, and ends the thread.
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
    show = _show_with(formatter, _renderer(log_format, target)[-1])
    writer = LogWriter(backlog, show, target, PAUSE_S)
    writer.start()
    root = logging.getLogger()
    root.handlers[:] = [backlog]
    root.setLevel(level.upper())
    _Later.backlog, _Later.level = backlog, root.level
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
        if _Later.backlog is backlog:
            _Later.backlog = None
        writer.close(FAREWELL_S)
        root.handlers.remove(backlog)

    return close


def _renderer(log_format: str, stream: TextIO) -> list[Any]:
    if log_format == "console" or (log_format == "auto" and stream.isatty()):
        return [structlog.dev.ConsoleRenderer(colors=stream.isatty())]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(_to_json)]


def _to_json(event: EventDict, default: Callable[[Any], Any]) -> str:
    return _encoder(default).encode(event)


@cache
def _encoder(default: Callable[[Any], Any]) -> json.JSONEncoder:
    """A cached encoder; `json.dumps` would make a new one for every line."""
    return json.JSONEncoder(default=default)


def _show_with(formatter: logging.Formatter, render: Callable[..., Any]) -> Callable[[Entry], str]:
    """Returns a function that formats any entry: a record and a `Line` with the same fields alike."""

    def show(entry: Entry) -> str:
        if isinstance(entry, logging.LogRecord):
            return formatter.format(entry)
        level, time_s, event, make, facts = entry
        name = _LEVEL_NAMES[level]
        when = datetime.fromtimestamp(time_s, timezone.utc).isoformat().replace("+00:00", "Z")
        fields = {**make(*facts), "event": event, "level": name, "timestamp": when}
        return str(render(None, name, _shorten(None, name, fields)))

    return show


class _Later:
    """Where `log_later` puts its lines.

    Attributes:
        backlog: The writing thread's; None while the log of the process is not set up.
        level: Lowest level that is written.
    """

    backlog: LogBacklog | None = None
    level: int = logging.NOTSET


def log_later(level: int, event: str, make: Callable[..., EventDict], *facts: object) -> None:
    """Logs a line that the writing thread formats, for events so frequent that formatting matters.

    Args:
        level: Level as in the standard library, such as `logging.INFO`.
        event: What happened.
        make: Makes the fields, in their order, on another thread.
        facts: Its arguments; they must not change afterwards, and are kept until the line is written.
    """
    backlog = _Later.backlog
    if backlog is None:
        get_logger().log(level, event, **make(*facts))
    elif level >= _Later.level:
        backlog.put((level, time.time(), event, make, facts), level)


def _shorten(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    for name, value in event.items():
        if isinstance(value, str) and len(value) > MAX_VALUE_CHARACTERS:
            event[name] = value[: MAX_VALUE_CHARACTERS - 3] + "..."
    return event


def get_logger() -> structlog.stdlib.BoundLogger:
    """The server's logger."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger("npugrad_server")
    return logger
