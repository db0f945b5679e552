from __future__ import annotations

import fcntl
import io
import json
import logging
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

import pytest
import structlog

from npugrad_server import logs


@pytest.fixture
def few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backlog that is soon full."""
    monkeypatch.setattr(logs, "MAX_BACKLOG_LINES", 200)


def small_pipe() -> tuple[int, int]:
    """A pipe that takes fewer than 100 lines."""
    ours, theirs = os.pipe()
    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, 4096)
    return ours, theirs


@pytest.fixture(autouse=True)
def structured() -> Iterator[None]:
    """Put the defaults of structlog back after each test."""
    yield
    structlog.reset_defaults()


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are written at the end however busy the machine is."""
    monkeypatch.setattr(logs, "FAREWELL_S", 60.0)


@contextmanager
def written(log_format: str = "json", level: str = "info") -> Iterator[list[str]]:
    """What is written of what a block logs: lines that are there at its end."""
    stream, lines = io.StringIO(), list[str]()
    close = logs.configure(log_format, level, stream)
    yield lines
    close()
    lines += stream.getvalue().splitlines()


def test_json_lines_carry_event_fields_time_and_level() -> None:
    """And a traceback; long values are cut, and line breaks of a caller make no new line."""
    with written() as lines:
        logs.get_logger().info("call", request_id="abc", seconds=0.5)
        try:
            raise RuntimeError("boom")
        except RuntimeError as error:
            logs.get_logger().error("unexpected error", exc_info=error)
        logs.get_logger().info("call", error='x\n{"event": "forged"}')
        logs.get_logger().info("call", error="x" * 100_000)
    line, traced, _, cut = map(json.loads, lines)
    assert line.pop("timestamp").endswith("Z")
    assert line == {"event": "call", "request_id": "abc", "seconds": 0.5, "level": "info"}
    assert "RuntimeError: boom" in traced["exception"]
    assert len(cut["error"]) < 2 * logs.MAX_VALUE_CHARACTERS


def test_level_holds_for_ours_and_for_the_standard_log() -> None:
    with written(level="warning") as lines:
        logs.get_logger().info("quiet")
        logging.getLogger("grpc").info("quiet")
        logging.getLogger("grpc").warning("found %d", 3)
    (line,) = map(json.loads, lines)
    assert (line["event"], line["logger"], line["level"]) == ("found 3", "grpc", "warning")


def test_console_form_is_for_people() -> None:
    with written("console") as lines:
        logs.get_logger().info("listening", address="127.0.0.1:1")
    assert "listening" in lines[0]
    assert not lines[0].startswith("{")


@pytest.mark.parametrize("log_format", ["json", "console"])
@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING, logging.ERROR])
def test_line_that_is_made_later_is_the_same(log_format: str, level: int) -> None:
    fields = {"request_id": "a b", "seconds": 0.25, "error": "\u00e9" * 5000, "code": None, "device": ""}
    with written(log_format) as lines:
        logs.get_logger().log(level, "call", **fields)
        logs.log_later(level, "call", dict, fields)
    time = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z")
    assert all(time.search(line) for line in lines)
    at_once, later = (time.sub("TIME", line) for line in lines)
    assert at_once == later


def test_line_that_is_made_later_is_of_its_time_and_below_the_level_is_none() -> None:
    made: list[int] = []

    def make(number: int) -> dict[str, Any]:
        made.append(number)
        return {"number": number}

    with written(level="warning") as lines:
        logs.log_later(logging.INFO, "quiet", make, 1)
        before = datetime.now(timezone.utc)
        logs.log_later(logging.WARNING, "loud", make, 2)
        after = datetime.now(timezone.utc)
    (line,) = map(json.loads, lines)
    assert made == [2]
    assert before <= datetime.fromisoformat(line["timestamp"].replace("Z", "+00:00")) <= after


def test_line_that_cannot_be_made_is_told_and_the_next_one_is_written() -> None:
    with written() as lines:
        logs.log_later(logging.INFO, "call", dict, 3)
        logs.log_later(logging.INFO, "call", dict)
    broken, line = lines
    assert broken.startswith("a line of call cannot be shown: TypeError")
    assert json.loads(line)["event"] == "call"


def test_without_a_log_of_the_process_a_line_is_made_at_once() -> None:
    with structlog.testing.capture_logs() as captured:
        logs.log_later(logging.ERROR, "call", dict, {"code": 3})
    assert captured == [{"code": 3, "event": "call", "log_level": "error"}]


def test_a_warning_waits_for_no_others_and_nor_does_what_was_said_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logs, "PAUSE_S", 3600.0)
    ours, theirs = os.pipe()
    with open(ours, "rb") as read, open(theirs, "w") as stream:
        close = logs.configure("json", "info", stream)
        for number in range(3 * logs.MAX_BATCH_LINES):  # more than are written at once
            logs.log_later(logging.INFO, "call", dict, {"number": number})
        logging.getLogger("npugrad_server.pool").warning("cpu:0: its worker was killed")
        found = [json.loads(read.readline()) for _ in range(3 * logs.MAX_BATCH_LINES + 1)]
        assert found[-1]["event"] == "cpu:0: its worker was killed"
        assert [line["number"] for line in found[:-1]] == list(range(3 * logs.MAX_BATCH_LINES))
        logs.log_later(logging.INFO, "call", dict)
        close()
        assert json.loads(read.readline())["event"] == "call"


@pytest.mark.usefixtures("few_lines")
def test_backlog_drops_lines_and_counts_them_instead_of_waiting() -> None:
    before, backlog = logs.LogBacklog.all_dropped_lines, logs.LogBacklog()
    record = logging.LogRecord("n", logging.INFO, "f", 1, "m", None, None)
    for _ in range(logs.MAX_BACKLOG_LINES + 7):
        backlog.enqueue(record)
    assert backlog.dropped_lines == 7
    another = logs.LogBacklog()
    for _ in range(logs.MAX_BACKLOG_LINES + 7):
        another.put((logging.INFO, 0.0, "call", dict, ()), logging.INFO)
    assert logs.LogBacklog.all_dropped_lines == before + 14


@pytest.mark.usefixtures("few_lines")
def test_dropped_lines_are_told_once_somebody_reads_again() -> None:
    """A pipe that nobody reads holds up neither those who log nor the end; then it is read."""
    ours, theirs = small_pipe()
    with open(ours, "rb") as read, open(theirs, "w") as stream:
        close = logs.configure("json", "info", stream)
        log = logs.get_logger()
        count = logs.MAX_BACKLOG_LINES + 1000  # more than fit the backlog and the pipe
        for number in range(count):
            log.info("line", number=number)
        found: list[dict[str, Any]] = []
        while not found or found[-1]["event"] != "log lines dropped":
            found.append(json.loads(read.readline()))
        close()
    assert found[-1]["lines"] == count - (len(found) - 1) > 0


@pytest.mark.usefixtures("few_lines")
def test_what_others_print_is_passed_on_and_they_never_wait() -> None:
    ours, theirs = small_pipe()
    with open(ours, "rb") as read, open(theirs, "w") as stream, logs.relayed(stream) as print_fd:
        count = 20_000  # more than fit the backlog and both pipes, of which one is of the usual size
        subprocess.run(["seq", str(count)], stdout=print_fd, check=True, timeout=60)
        found: list[bytes] = []
        while not found or found[-1] != b"last \\xff words\n":
            found.append(read.readline())
            if found[-1] == b"log lines dropped\n":  # there was room again, for a moment at least
                os.write(print_fd, b"last \xff words\n")
    assert found[:3] == [b"1\n", b"2\n", b"3\n"]
    assert len(found) < count


@pytest.mark.usefixtures("few_lines")
def test_the_end_does_not_wait_for_a_reader_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "FAREWELL_S", 0.1)
    ours, theirs = small_pipe()
    with open(theirs, "w") as stream:
        close = logs.configure("json", "info", stream)
        for _ in range(logs.MAX_BACKLOG_LINES + 1000):
            logs.get_logger().info("line")
        close()
        (left,) = [thread for thread in threading.enumerate() if thread.name == "log"]
        os.close(ours)
        left.join(30)
        assert not left.is_alive()
