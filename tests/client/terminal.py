"""A program on a pseudo terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios

from tests.client.programs import start

_STYLES = re.compile(r"\x1b\[[0-9;]*m")


class Terminal:
    """A program whose standard error is a terminal of 100 columns; ended with the block."""

    def __init__(self, code: str, *arguments: str, **environment: str) -> None:
        self._shown, stderr = pty.openpty()
        fcntl.ioctl(stderr, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        # What is in the environment wins over the terminal's size, and tests inherit it of who runs them.
        variables = {"TERM": "xterm", "COLUMNS": "100", "LINES": "24", **environment}
        with os.fdopen(stderr, "w") as end:
            self._process = start(code, *arguments, stderr=end, **variables)
        self._text = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
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
