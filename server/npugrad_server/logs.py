"""The log: one structured line an event on standard error, as JSON or for a person.

Lines are written by a thread of their own, so that a slow reader of standard error never holds up the
event loop; when it falls too far behind, lines are dropped and counted. The standard library's log,
which gRPC and asyncio write to, goes the same way.
"""

from __future__ import annotations

import logging
import logging.handlers
import queue
import sys
from typing import TYPE_CHECKING, Any, TextIO

import structlog

if TYPE_CHECKING:
    from collections.abc import Callable

    from structlog.typing import EventDict, WrappedLogger

MAX_BACKLOG_LINES = 10_000
"""Lines that may wait for standard error before others are dropped."""
MAX_VALUE_CHARACTERS = 2048
"""Longest text in a line, tracebacks aside: callers choose parts of it."""


class LogBacklog(logging.handlers.QueueHandler):
    """Hands records to the writing thread and never waits.

    Attributes:
        dropped_lines: Lines lost because standard error was not read.
    """

    def __init__(self) -> None:
        super().__init__(queue.Queue(MAX_BACKLOG_LINES))
        self.dropped_lines = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """The record as it is: rendering is the writing thread's work."""
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queues the record, or drops it."""
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped_lines += 1


def configure(log_format: str, level: str, stream: TextIO | None = None) -> Callable[[], None]:
    """Sets up the log of the process.

    Args:
        log_format: ``"json"``, ``"console"`` or ``"auto"`` (console on a terminal).
        level: Least level that is written, such as ``"info"``.
        stream: Where to write; standard error by default.

    Returns:
        What writes the remaining lines and ends the thread.
    """
    target: TextIO = stream or sys.stderr
    shared: list[Any] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _shorten,
    ]
    writer = logging.StreamHandler(target)
    writer.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_renderer(log_format, target),
            ],
        )
    )
    backlog = LogBacklog()
    listener = logging.handlers.QueueListener(backlog.queue, writer)
    listener.start()
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
        if backlog.dropped_lines:
            structlog.stdlib.get_logger().warning("log lines dropped", lines=backlog.dropped_lines)
        listener.stop()
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
