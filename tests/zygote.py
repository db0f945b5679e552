"""Starts programs as forks of a process that has imported theirs: a server's takes a second of a processor.

What is forked runs as ``python -m npugrad_server`` does, or as another module: arguments, environment,
folder, output and end are its own. Only what libraries read of the environment while they are imported is
the zygote's.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from io import RawIOBase
from pathlib import Path
from typing import IO, Protocol

_MAX_REQUEST_BYTES = 128 * 1024
_NUMBER = struct.Struct("i")
_ROOT = Path(__file__).parents[1]


class Process(Protocol):
    """What tests do with a process: that of `subprocess.Popen`, and a fork."""

    @property
    def pid(self) -> int:
        """Its number."""

    @property
    def stdout(self) -> IO[str] | None:
        """What it writes to standard output."""

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its exit code."""

    def send_signal(self, sig: int) -> None:
        """Sends a signal unless it has ended."""

    def kill(self) -> None:
        """Sends SIGKILL unless it has ended."""


class Fork:
    """A process that a zygote has forked; see `Process`."""

    def __init__(self, report: RawIOBase, stdout: IO[str]) -> None:
        """Takes the process over.

        Args:
            report: Where its number comes from, and its exit code in the end.
            stdout: What it writes to standard output.
        """
        self.pid, self.stdout, self._report = _told(report), stdout, report
        self._lock = threading.Lock()
        self._code: int | None = None

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its exit code.

        Raises:
            subprocess.TimeoutExpired: It still runs after so many seconds.
        """
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def _ended(self, timeout_s: float | None) -> int | None:
        with self._lock:
            if self._code is None and select.select([self._report], [], [], timeout_s)[0]:
                with self._report:
                    self._code = _told(self._report)
            return self._code

    def send_signal(self, sig: int) -> None:
        """Sends a signal unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def kill(self) -> None:
        """Sends SIGKILL unless it has ended."""
        self.send_signal(signal.SIGKILL)


def _told(report: RawIOBase) -> int:
    """The next number of a report; it comes whole, as it is shorter than the buffer of a pipe."""
    return int(_NUMBER.unpack(report.read(_NUMBER.size) or b"")[0])


class Zygote:
    """A process that has imported a program, and waits for what to run it with; ends with this one."""

    def __init__(
        self,
        python: str,
        env: Mapping[str, str],
        program: str,
        *imported: str,
    ) -> None:
        """Starts it.

        Args:
            python: Interpreter.
            env: Environment while it imports.
            program: Module that runs in the end.
            imported: Modules that are imported before, with all that they import.
        """
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [python, "-m", __name__, str(theirs.fileno()), program, *imported],
                pass_fds=[theirs.fileno()],
                stdout=subprocess.DEVNULL,
                cwd=_ROOT,
                env=dict(env),
            )
        atexit.register(self.close)

    def close(self) -> None:
        """Ends it; what it has forked goes on."""
        self._control.close()
        self._process.wait()

    def fork(
        self, arguments: Sequence[str], env: Mapping[str, str], stderr: IO[str], program: str = ""
    ) -> Fork:
        """Runs the program.

        Args:
            arguments: Of its command line.
            env: Its environment.
            stderr: File for its standard error.
            program: Another module that runs in its place.
        """
        request = json.dumps([list(arguments), dict(env), str(Path.cwd()), program]).encode()
        (output, to_output), (report, to_report) = os.pipe(), os.pipe()
        try:
            with self._lock:
                socket.send_fds(self._control, [request], [to_output, stderr.fileno(), to_report])
        finally:
            os.close(to_output)
            os.close(to_report)
        return Fork(open(report, "rb", buffering=0), open(output))


def _serve(control: socket.socket) -> str:
    """Forks at each request; returns in what was forked, to run what it names, and exits at the end."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, _MAX_REQUEST_BYTES, 3)
        if not data:
            sys.exit()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not os.fork():
            control.close()
            return _begin(json.loads(data), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _begin(request: tuple[list[str], dict[str, str], str, str], descriptors: list[int]) -> str:
    """Forks once more, to wait for the end and to tell it; returns which program is asked for."""
    (arguments, env, folder, program), (output, errors, report) = request, descriptors
    if pid := os.fork():
        os.write(report, _NUMBER.pack(pid))
        os.close(output)
        os.close(errors)
        # Told before its number is free for another process: who has not read it may still send a signal.
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        status = 0 if ended is None else ended.si_status
        is_killed = ended is not None and ended.si_code != os.CLD_EXITED
        os.write(report, _NUMBER.pack(-status if is_killed else status))
        os.waitpid(pid, 0)
        os._exit(0)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    for descriptor in descriptors:
        os.close(descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv[1:] = arguments
    return program


def main(descriptor: int, program: str, *imported: str) -> None:
    """Runs a zygote, and then whatever it has become."""
    with socket.socket(fileno=descriptor) as control:
        for name in imported:
            importlib.import_module(name)
        # Ctrl-C at a terminal is for the tests, and for what was forked.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        asked = _serve(control)
    runpy.run_module(asked or program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
