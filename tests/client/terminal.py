"""A program on a pseudo terminal, and a service that stays in each stage of a call until it may go on."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from tests.client.fake_service import Context, chunk_frame, decoded, header_frame, read_header, response

STAGES = ("sending", "waiting", "receiving")
_STYLES = re.compile(r"\x1b\[[0-9;]*m")


class Terminal:
    """A Python program whose standard error is a terminal of 100 columns; ended with the block."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        shown, stderr = pty.openpty()
        fcntl.ioctl(stderr, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        # What is on the environment wins over the terminal's size, and tests inherit it of who runs them.
        variables = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "24", **environment}
        self._shown, self._text = shown, ""
        self._process = subprocess.Popen(
            [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=stderr, text=True, env=variables
        )
        os.close(stderr)
        self._watchdog = threading.Timer(60, self._process.kill)  # which ends what is read as well
        self._watchdog.start()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watchdog.cancel()
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        os.close(self._shown)

    def wait_for(self, pattern: str) -> None:
        """Reads what is shown until it matches; fails when the program ends before."""
        while not re.search(pattern, _STYLES.sub("", self._text)):
            assert self._read(), f"{pattern} was not shown: {self._text!r}"

    def end(self) -> tuple[int, str, str]:
        """Waits for the end; status, standard output, and what the terminal showed, without colours."""
        while self._read():
            pass
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            output = stdout.read()
        return self._process.wait(), output, _STYLES.sub("", self._text)

    def _read(self) -> bool:
        try:
            data = os.read(self._shown, 2**16)
        except OSError:  # nobody has it open any more
            return False
        self._text += data.decode(errors="replace")
        return bool(data)


class Staged:
    """A service whose streamed calls stand still in each stage until it is let go, or 30 s have passed."""

    def __init__(self) -> None:
        self.may_end = {stage: threading.Event() for stage in STAGES}

    def execute(self, frames: Iterator[Any], context: Context) -> Iterator[Any]:
        record, request = read_header(frames)
        self.may_end["sending"].wait(30)
        for _ in frames:
            pass
        self.may_end["waiting"].wait(30)
        message, follow = response(record, decoded(record, request), chunk_from_bytes=1)
        yield header_frame(record, message)
        self.may_end["receiving"].wait(30)
        for operand, data in follow:
            yield chunk_frame(operand, 0, bytes(data))
