"""Real servers for tests: `npugrad-server serve` as a subprocess on loopback, ended by SIGTERM and looked at.

`server` is one server on ``cpu:0`` that a whole run shares: tests may load it, but not hurt it.
`start_server` starts others with any flags, devices and environment. Either way the end is part of the
test: no arena byte may be in use when the last call is over, and the exit code must be 0.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from http.client import HTTPConnection, HTTPMessage
from pathlib import Path
from typing import IO, Any, Protocol

import grpc
import pytest
from tests.worker_forks import WORKER_IMPORTS
from tests.zygote import Process, Zygote

from npugrad.v1 import server_pb2, server_pb2_grpc

SERVER_PYTHON = os.environ.get("NPUGRAD_TEST_SERVER_PYTHON", sys.executable)
"""Interpreter of the servers: another one proves other versions of the libraries with the same tests."""
SERVER_PROGRAM = ("-m", "npugrad_server")
"""What it runs."""
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 120.0
_WITH_FORKED_WORKERS = "tests.server_program"
_EVENT_TIMEOUT_S = 60.0
_LET_GO_S = 10.0
_READY = "listening on "
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 2**31 - 1),
    ("grpc.max_send_message_length", 2**31 - 1),
    # A channel of a test must not share its connection with another one's.
    ("grpc.use_local_subchannel_pool", 1),
)
_READ_LATE = ("NPUGRAD_", "OTEL_")
"""How variables begin that nothing reads while it is imported, so that a fork reads its own."""
# Small, so that several servers fit beside the tests of two cores.
_SMALL = {
    "--input-arena-bytes": "256MiB",
    "--output-arena-bytes": "128MiB",
    "--prefault-bytes": "0",
    "--metrics-listen": "",
    "--log-format": "json",
}


class ServerProcess:
    """One running server.

    Attributes:
        address: What a client connects to, such as ``"127.0.0.1:40123"`` or ``"unix:/..."``.
        process: The front process.
        credentials: What its callers need; None for plaintext.
    """

    def __init__(
        self,
        process: Process,
        log_path: Path,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self.process = process
        self.credentials = credentials
        self.address = ""
        self._log_path = log_path
        self._log_bytes = 0
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stdout:
            for line in stdout:
                self._lines.put(line)
        self._lines.put(None)

    def wait_ready(self) -> None:
        """Waits for the line that tells the address; fails with the log when the server ends before it."""
        try:
            while (line := self._lines.get(timeout=START_TIMEOUT_S)) is not None:
                if line.startswith(_READY):
                    self.address = line.removeprefix(_READY).strip()
                    return
        except queue.Empty:
            pass
        code = self.process.poll()
        pytest.fail(f"the server is not ready (exit code {code}); its log:\n{self.log_text()}")

    def channel(self) -> grpc.Channel:
        """A channel of its own; close it, or use it as a context manager."""
        if self.credentials is not None:
            return grpc.secure_channel(self.address, self.credentials, options=_CHANNEL_OPTIONS)
        return grpc.insecure_channel(self.address, options=_CHANNEL_OPTIONS)

    def info(self) -> server_pb2.GetServerInfoResponse:
        """What GetServerInfo answers now."""
        with self.channel() as channel:
            stub = server_pb2_grpc.ServerServiceStub(channel)
            return stub.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=30, wait_for_ready=True)

    def log_text(self) -> str:
        """All of standard error so far."""
        return self._log_path.read_text(errors="replace")

    def later_log_text(self) -> str:
        """What came to standard error since this was last asked; all of it the first time."""
        with self._log_path.open("rb") as log:
            log.seek(self._log_bytes)
            data = log.read()
        self._log_bytes += len(data)
        return data.decode(errors="replace")

    def log_lines(self, event: str | None = None) -> list[dict[str, Any]]:
        """The structured lines so far, of one event or of all."""
        found = []
        for line in self.log_text().splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict) and event in (None, entry.get("event")):
                found.append(entry)
        return found

    def find_log(self, event: str, **fields: Any) -> dict[str, Any]:
        """The line of an event with these fields; waits for the thread that writes the log."""
        end = time.monotonic() + _EVENT_TIMEOUT_S
        while time.monotonic() < end:
            for line in self.log_lines(event):
                if fields.items() <= line.items():
                    return line
            self.info()  # a round trip, so that nothing has to sleep
        pytest.fail(f"no line {event!r} with {fields}; the log:\n{self.log_text()}")

    def wait_accepted(self, count: int) -> None:
        """Waits until so many calls were admitted."""
        end = time.monotonic() + _EVENT_TIMEOUT_S
        while (found := self.info().accepted_calls) < count:
            if time.monotonic() > end:
                pytest.fail(f"found {found} calls admitted; expected {count}")

    @property
    def metrics_address(self) -> str:
        """Where the pages of a server are that was started with ``--metrics-listen 127.0.0.1:0``."""
        return str(self.find_log("listening")["metrics_address"])

    def page(self, path: str) -> tuple[int, str]:
        """Status and text of one of them, such as ``"/readyz"``."""
        return fetch_page(self.metrics_address, path)[:2]

    def metric(self, name: str, *labels: str) -> float:
        """The sum of the samples of this name with these labels, such as ``'status="OK"'``."""
        lines = (line.rpartition(" ") for line in self.page("/metrics")[1].splitlines())
        return sum(
            float(value)
            for sample, _, value in lines
            if sample.partition("{")[0] == name and all(label in sample for label in labels)
        )

    def assert_nothing_leaked(self) -> None:
        """No arena byte is in use and no call waits, or soon: one that was just cancelled takes a moment.

        Call it when no call is in progress.
        """
        end, pause = time.monotonic() + _LET_GO_S, threading.Event()
        while any(used := self._in_use()) and time.monotonic() < end:
            pause.wait(0.02)
        assert used == (0, 0, 0), f"input bytes, output bytes and queue depth still in use: {used}"

    def _in_use(self) -> tuple[int, int, int]:
        info = self.info()
        return info.input_arena_used_bytes, info.output_arena_used_bytes, info.queue_depth

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Sends a signal to the front process."""
        self.process.send_signal(number)

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Waits for the end; returns the exit code."""
        return self.process.wait(timeout_s)

    def stop(self, expect: int = 0) -> None:
        """SIGTERM, then the end; nothing leaked before, and the exit code is as expected."""
        if self.process.poll() is None:
            self.assert_nothing_leaked()
            self.signal()
        code = self.wait()
        assert code == expect, f"exit code {code}; expected {expect}; the log:\n{self.log_text()}"

    def kill(self) -> None:
        """Makes sure that the process is gone, however the test went."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(STOP_TIMEOUT_S)


class StartServer(Protocol):
    """Starts a server; see `run_server` for the arguments, and `run_quick_server` for what is quick."""

    def __call__(
        self,
        *flags: str,
        devices: str = "cpu:0",
        env: Mapping[str, str] | None = None,
        listen: str = "127.0.0.1:0",
        wait: bool = True,
        check_end: bool = True,
        credentials: grpc.ChannelCredentials | None = None,
        quick: bool = True,
    ) -> ServerProcess:
        """The running server, ready to be called."""


def fetch_page(address: str, path: str, method: str = "GET") -> tuple[int, str, HTTPMessage]:
    """Status, text and headers of a page."""
    connection = HTTPConnection(address, timeout=30)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers
    finally:
        connection.close()


def server_command(
    *flags: str,
    devices: str = "cpu:0",
    listen: str = "127.0.0.1:0",
    program: Sequence[str] = SERVER_PROGRAM,
) -> list[str]:
    """The command line of a small server; flags given here win over the small defaults."""
    return [SERVER_PYTHON, *program, "serve", *server_flags(*flags, devices=devices, listen=listen)]


def server_flags(*flags: str, devices: str = "cpu:0", listen: str = "127.0.0.1:0") -> list[str]:
    """The flags of a small server; those given here win over the small defaults."""
    named = {flag.partition("=")[0] for flag in flags}
    small = itertools.chain(*(pair for pair in _SMALL.items() if pair[0] not in named))
    return ["--listen", listen, "--devices", devices, *small, *flags]


def server_environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of this process without its own settings of the server, and what is given.

    Workers do without PyTorch, as importing it takes each of them seconds.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("NPUGRAD_")}
    return {**inherited, "OMP_NUM_THREADS": "1", "NPUGRAD_KERNELS_TORCH": "off", **(env or {})}


@cache
def _zygote() -> Zygote:
    imported = "npugrad_server.cli", _WITH_FORKED_WORKERS, *WORKER_IMPORTS
    return Zygote(SERVER_PYTHON, server_environment(), "npugrad_server", *imported)


def start_process(
    arguments: Sequence[str],
    stderr: IO[str],
    env: Mapping[str, str] | None = None,
    program: Sequence[str] = SERVER_PROGRAM,
    forked: str = "",
) -> Process:
    """Starts a program with arguments, as a fork where that is the same; see `run_server`.

    A fork may run another module, `forked`.
    """
    environment = server_environment(env)
    changed = {name for name, value in (env or {}).items() if server_environment().get(name) != value}
    if program == SERVER_PROGRAM and all(name.startswith(_READ_LATE) for name in changed):
        return _zygote().fork(arguments, environment, stderr, forked)
    command = [SERVER_PYTHON, *program, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)


def run_command(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs `npugrad-server` to its end."""
    with tempfile.TemporaryFile("w+") as stderr:
        process = start_process(arguments, stderr, env)
        assert process.stdout is not None
        watchdog = threading.Timer(START_TIMEOUT_S, process.kill)  # which ends its output as well
        watchdog.start()
        try:
            with process.stdout as stdout:
                output = stdout.read()
            code = process.wait(START_TIMEOUT_S)
        finally:
            watchdog.cancel()
            process.kill()
            process.wait(STOP_TIMEOUT_S)
        stderr.seek(0)
        return subprocess.CompletedProcess(arguments, code, output, stderr.read())


@contextmanager
def run_server(
    log_path: Path,
    *flags: str,
    devices: str = "cpu:0",
    env: Mapping[str, str] | None = None,
    listen: str = "127.0.0.1:0",
    wait: bool = True,
    check_end: bool = True,
    credentials: grpc.ChannelCredentials | None = None,
    program: Sequence[str] = SERVER_PROGRAM,
    start: Callable[..., Process] = start_process,
) -> Iterator[ServerProcess]:
    """Runs a server for a block.

    Args:
        log_path: File for its standard error.
        flags: Flags of ``serve`` beyond the small defaults, such as ``"--drain-timeout-s", "5"``.
        devices: Devices, such as ``"cpu:0,cpu:1"`` or ``"test:2?ms=20"``.
        env: Environment variables to add; most need an interpreter of their own, which is not forked.
        listen: Address; a free loopback port by default.
        wait: Whether to wait until calls are served.
        check_end: Whether to end it as `ServerProcess.stop` does; else the test ends it, or it is killed.
        credentials: What its callers need; None for plaintext.
        program: What Python runs; another one than the server itself for one that is not as it should be.
        start: What starts it, called as `start_process`.
    """
    arguments = ["serve", *server_flags(*flags, devices=devices, listen=listen)]
    with log_path.open("w") as log:
        process = start(arguments, log, env, program)
    running = ServerProcess(process, log_path, credentials)
    try:
        if wait:
            running.wait_ready()
        yield running
        if check_end:
            running.stop()
    finally:
        running.kill()


run_quick_server = partial(run_server, start=partial(start_process, forked=_WITH_FORKED_WORKERS))
"""The same for tests that are not about how workers start: each takes half a second of a processor less."""


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server on cpu:0 for the whole run; do not stop it and do not kill its worker."""
    log_path = tmp_path_factory.mktemp("server") / "server.log"
    with run_server(log_path, "--metrics-listen", "127.0.0.1:0") as running:
        yield running


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Starts servers of the test's own; each is ended, and checked, after the test."""
    with ExitStack() as stack:
        count = 0

        def start(*flags: str, quick: bool = True, **options: Any) -> ServerProcess:
            nonlocal count
            count += 1
            run = run_quick_server if quick else run_server
            return stack.enter_context(run(tmp_path / f"server{count}.log", *flags, **options))

        yield start
