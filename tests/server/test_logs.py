from __future__ import annotations

import io
import json
import logging
from typing import TYPE_CHECKING

import pytest
import structlog

from npugrad_server import logs

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """Put pytest's own handlers back after each test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def written(log_format: str = "json", level: str = "info") -> tuple[io.StringIO, Iterator[None]]:
    stream = io.StringIO()
    close = logs.configure(log_format, level, stream)

    def end() -> Iterator[None]:
        close()
        yield

    return stream, end()


def test_json_lines_carry_event_fields_time_and_level() -> None:
    stream, end = written()
    logs.get_logger().info("call", request_id="abc", seconds=0.5)
    next(end)
    (line,) = map(json.loads, stream.getvalue().splitlines())
    assert line.pop("timestamp").endswith("Z")
    assert line == {"event": "call", "request_id": "abc", "seconds": 0.5, "level": "info"}


def test_level_holds_for_ours_and_for_the_standard_log() -> None:
    stream, end = written(level="warning")
    logs.get_logger().info("quiet")
    logging.getLogger("grpc").info("quiet")
    logging.getLogger("grpc").warning("found %d", 3)
    next(end)
    (line,) = map(json.loads, stream.getvalue().splitlines())
    assert (line["event"], line["logger"], line["level"]) == ("found 3", "grpc", "warning")


def test_traceback_is_part_of_the_line() -> None:
    stream, end = written()
    try:
        raise RuntimeError("boom")
    except RuntimeError as error:
        logs.get_logger().error("unexpected error", exc_info=error)
    next(end)
    (line,) = map(json.loads, stream.getvalue().splitlines())
    assert "RuntimeError: boom" in line["exception"]


def test_line_breaks_of_a_caller_make_no_new_line() -> None:
    stream, end = written()
    logs.get_logger().info("call", error='x\n{"event": "forged"}')
    next(end)
    assert len(stream.getvalue().splitlines()) == 1


def test_long_values_are_cut() -> None:
    stream, end = written()
    logs.get_logger().info("call", error="x" * 100_000)
    next(end)
    assert len(stream.getvalue()) < 2 * logs.MAX_VALUE_CHARACTERS


def test_console_form_is_for_people() -> None:
    stream, end = written("console")
    logs.get_logger().info("listening", address="127.0.0.1:1")
    next(end)
    assert "listening" in stream.getvalue()
    assert not stream.getvalue().startswith("{")


def test_backlog_drops_lines_and_counts_them_instead_of_waiting() -> None:
    backlog = logs.LogBacklog()
    record = logging.LogRecord("n", logging.INFO, "f", 1, "m", None, None)
    for _ in range(logs.MAX_BACKLOG_LINES + 7):
        backlog.enqueue(record)
    assert backlog.dropped_lines == 7
