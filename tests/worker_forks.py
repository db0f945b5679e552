"""Forks workers from a process that has imported their program: a tenth of what it takes to start one.

They are children of whoever asks, as those that `subprocess` starts: it adopts what its template has forked.
Only their command line, and the environment that the kernel shows of them, are the template's; `comm` is
what they are for.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from npugrad_server.pool.process import WorkerProcess
from npugrad_server.pool.reaper import start_child

_WORKER = "npugrad_server.worker"
WORKER_IMPORTS = (
    *("npugrad_server.worker.loop", "npugrad_server.worker.memory", "npugrad_server.worker.verifier"),
    *("npugrad_server.backends.cpu", "npugrad_server.backends.test"),
)
_MAX_REQUEST_BYTES = 128 * 1024
_ADOPT_ORPHANS = 36
"""`PR_SET_CHILD_SUBREAPER`: whether orphaned descendants become children of this process."""


class ForkedWorker:
    """As much of `subprocess.Popen` as workers need.

    Attributes:
        pid: Process number.
        returncode: Its exit status once it was waited for.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end; returns its exit status."""
        if self.returncode is None:
            if timeout is not None:
                self._wait_until_ended(timeout)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def _wait_until_ended(self, timeout: float) -> None:
        descriptor = os.pidfd_open(self.pid)
        try:
            if not select.select([descriptor], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        finally:
            os.close(descriptor)

    def send_signal(self, sig: int) -> None:
        """Sends a signal unless it was waited for."""
        if self.returncode is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        """Kills it unless it was waited for."""
        self.send_signal(signal.SIGKILL)


class Template:
    """The process that is forked; ends with this one."""

    def __init__(
        self, imported: Sequence[str] = WORKER_IMPORTS, env: Mapping[str, str] | None = None
    ) -> None:
        """Starts it.

        Args:
            imported: Modules that it imports.
            env: Environment while it imports; None for that of this process.
        """
        with self.prepare() as theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), *imported],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**(os.environ if env is None else env), "OMP_NUM_THREADS": "1"},
            )
        atexit.register(self._close)

    def prepare(self) -> socket.socket:
        """Makes what this side needs; returns the other one's end."""
        self._lock = threading.Lock()
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return theirs

    def _close(self) -> None:
        self._control.close()
        self._process.wait()

    def fork(
        self,
        command: Sequence[str],
        descriptors: Sequence[int] = (),
        output_fd: int = 2,
        errors_fd: int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> ForkedWorker:
        """Runs a module.

        Args:
            command: Its name, and its arguments.
            descriptors: What it has by the same numbers as this process.
            output_fd: Descriptor of its standard output.
            errors_fd: Descriptor of its standard error; None for the same.
            env: Its environment; None for that of this process.
        """
        environment = dict(os.environ if env is None else env)
        request = json.dumps([list(command), list(descriptors), environment]).encode()
        printed = [output_fd, output_fd if errors_fd is None else errors_fd]
        report, to_report = os.pipe()
        with self._lock, open(report, "rb") as told:
            self._prctl(_ADOPT_ORPHANS, 1, 0, 0, 0)
            try:
                socket.send_fds(self._control, [request], [to_report, *printed, *descriptors])
                os.close(to_report)
                return ForkedWorker(int(told.read()))
            finally:
                self._prctl(_ADOPT_ORPHANS, 0, 0, 0, 0)


template = cache(Template)


def fork_worker(
    device: str, descriptors: Sequence[int], print_fd: int = 2, module: str = _WORKER
) -> ForkedWorker:
    """Forks a worker.

    Args:
        device: What it is for, as in its command line.
        descriptors: What it has by the same numbers as this process; first its socket.
        print_fd: Descriptor that it prints to.
        module: Module that it runs.
    """
    return template().fork([module, device, str(descriptors[0])], descriptors, print_fd)


@contextmanager
def forked_workers(parent: Template | None = None) -> Iterator[None]:
    """The workers of all pools are forked for a block, of the usual template or of another one."""
    found = parent or template()

    def spawn(self: Any, module: str, theirs: socket.socket, threads: int, print_fd: int) -> Any:
        descriptors = theirs.fileno(), self._inputs.worker_fd, self.outputs.fd
        command = [module, self.device, str(descriptors[0]), *self._release]
        start: Any = lambda: found.fork(command, descriptors, print_fd)  # noqa: E731
        return start_child(start)

    with mock.patch.object(WorkerProcess, "_spawn", spawn):
        yield


def serve(control: socket.socket) -> None:
    """Forks at each request; returns in what was forked."""
    while True:
        data, received, _, _ = socket.recv_fds(control, _MAX_REQUEST_BYTES, 16)
        if not data:
            sys.exit()
        report, *others = received
        if not (middle := os.fork()):
            # Its parent ends at once, so that it is adopted.
            if pid := os.fork():
                os.write(report, str(pid).encode())
                os._exit(0)
            control.close()
            os.close(report)
            _become(json.loads(data), others)
            return
        os.waitpid(middle, 0)
        for descriptor in received:
            os.close(descriptor)


def _become(request: list[Any], received: list[int]) -> None:
    command, numbers, environment = request
    os.setsid()
    os.dup2(received[0], 1)
    os.dup2(received[1], 2)
    # Out of the way of each other first.
    beyond = max(numbers, default=2) + 1
    kept = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, beyond) for descriptor in received[2:]]
    for descriptor in received:
        os.close(descriptor)
    for descriptor, number in zip(kept, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = command
    Path("/proc/self/comm").write_text(" ".join(command[1:2])[:15])


def main(descriptor: int, imported: Sequence[str]) -> None:
    """Runs the template, and then whatever it has become."""
    with socket.socket(fileno=descriptor) as control:
        for name in imported:
            importlib.import_module(name)
        gc.freeze()
        # Ctrl-C at a terminal is for the tests.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        serve(control)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
