"""Runs a scenario: starts the workers, lets them begin together, follows them, merges what they measured."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import platform
import time
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import npugrad
from npugrad.errors import NpugradError
from npugrad_client import Client
from npugrad_client.bench.engine import Cpu, Progress
from npugrad_client.bench.record import Record
from npugrad_client.bench.result import Result
from npugrad_client.bench.worker import Done, Failed, Ready, Start, Stop, work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

    from npugrad_client.bench.scenario import Scenario

    OnProgress = Callable[[float, Progress], None]

_LEAD_S = 0.2
"""From the order to start to the first call: time for every worker to hear it."""
_END_S = 10.0


class WorkerDied(NpugradError):
    """A worker process of the load test ended before it was done."""


def run(scenario: Scenario, target: str, on_progress: OnProgress | None = None) -> Result:
    """Measures a server.

    Args:
        scenario: What is sent.
        target: Address of the server.
        on_progress: Called about twice a second for each worker, with the time in seconds since the measured
            part began (negative in the warm-up) and what happened since its last one.

    Raises:
        NpugradError: A first call failed, so there is nothing to measure, or a worker died.
        ImportError: The extra `bench` is not installed.
    """
    Record(scenario.window_s)  # says that the extra is missing before anything is started
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        connections = []
        for worker in range(scenario.workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs, scenario, worker, target), daemon=True)
            stack.enter_context(_ended(process, ours))
            process.start()
            theirs.close()
            connections.append(ours)
        for connection in connections:
            _expect_ready(connection, scenario.timeout_s)
        return _measured(scenario, connections, on_progress, _environment(target, scenario.timeout_s))


@contextmanager
def _ended(process: Any, connection: Connection) -> Iterator[None]:
    """Sees that a worker has gone, however the block ends: it ends when its connection does."""
    try:
        yield
    finally:
        connection.close()
        if process.pid is not None:
            process.join(_END_S)
            if process.is_alive():
                process.kill()
                process.join()
        process.close()


def _expect_ready(connection: Connection, timeout_s: float) -> None:
    message = _receive(connection)
    if isinstance(message, Failed):
        raise message.error
    if not isinstance(message, Ready):
        raise WorkerDied(f"a worker said {type(message).__name__}; expected Ready within {timeout_s:g} s")


def _receive(connection: Connection) -> Any:
    try:
        return connection.recv()
    except (EOFError, OSError):
        raise WorkerDied("a worker process of the load test died; expected it to run to its end") from None


def _measured(
    scenario: Scenario,
    connections: list[Connection],
    on_progress: OnProgress | None,
    environment: dict[str, Any],
) -> Result:
    epoch_s = time.monotonic() + _LEAD_S + scenario.warm_up_s
    for connection in connections:
        connection.send(Start(epoch_s))
    follower = _Follower(connections, epoch_s, on_progress)
    is_interrupted = False
    try:
        follower.follow()
    except KeyboardInterrupt:
        is_interrupted = True
        follower.stop()
        follower.follow()  # calls in flight end as they would; a second interrupt gives them up
    elapsed_s = max(0.0, *(done.ended_s for done in follower.done))
    record = Record(scenario.window_s)
    for done in follower.done:
        record.merge(Record.from_dict(done.record))
    cpus: tuple[Cpu, ...] = tuple(done.cpu for done in follower.done)
    return Result(scenario.as_dict(), record, elapsed_s, cpus, is_interrupted, environment)


class _Follower:
    """Reads what the workers say until all are done."""

    def __init__(self, connections: list[Connection], epoch_s: float, on_progress: OnProgress | None) -> None:
        self._open, self._epoch_s, self._on_progress = list(connections), epoch_s, on_progress
        self.done: list[Done] = []

    def follow(self) -> None:
        while self._open:
            for connection in wait(self._open):
                message = _receive(connection)  # type: ignore[arg-type]
                if isinstance(message, Failed):
                    raise message.error
                if isinstance(message, Done):
                    self.done.append(message)
                    self._open.remove(connection)  # type: ignore[arg-type]
                elif isinstance(message, Progress) and self._on_progress is not None:
                    self._on_progress(time.monotonic() - self._epoch_s, message)

    def stop(self) -> None:
        for connection in self._open:
            with contextlib.suppress(OSError):  # it has just ended by itself
                connection.send(Stop())


def _environment(target: str, timeout_s: float) -> dict[str, Any]:
    """What the figures belong to."""
    found: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "npugrad": npugrad.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "target": target,
    }
    with contextlib.suppress(NpugradError), Client(target, timeout_s=timeout_s) as client:
        info = client.server_info()
        found["server"] = {
            "version": info.version,
            "product": str(info.product),
            "devices": [asdict(device) for device in info.devices],
        }
    return found
