"""Runs a scenario: starts the workers together, follows them, merges their measurements."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import platform
import time
from contextlib import contextmanager
from dataclasses import asdict, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import npugrad
from npugrad.errors import NpugradError
from npugrad_client import Client
from npugrad_client._tls import Servers
from npugrad_client.bench.engine import LoadProgress
from npugrad_client.bench.interrupts import Interrupts, TooEarly, held_back
from npugrad_client.bench.record import Record
from npugrad_client.bench.result import Result
from npugrad_client.bench.worker import Done, Failed, Ready, Start, Stop, work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection

    from npugrad_client import Tls
    from npugrad_client.bench.scenario import Scenario

    OnProgress = Callable[[float, LoadProgress], None]

_LEAD_S = 0.2
"""Time from the order to start until the first call, so that every worker gets the order."""
_END_S = 10.0
"""How long workers may take to end once their connections are closed."""
_INFO_S = 10.0


class WorkerDied(NpugradError):
    """A worker process of the load test ended before it was done."""


def run(
    scenario: Scenario,
    target: str | Sequence[str],
    on_progress: OnProgress | None = None,
    tls: Tls | None = None,
) -> Result:
    """Measures a server, or several to which calls go in turn.

    An interrupt (SIGINT or SIGTERM) stops sending, and the result is what was measured until then. A second
    one gives up. If a worker dies, the result is what the others measured. Either result says so.

    Args:
        scenario: What is sent.
        target: Address of the server, or of each server.
        on_progress: Called about twice a second for each worker, with the time in seconds since the measured
            part began (negative in the warm-up) and what happened since the worker's last report.
        tls: TLS settings; None for unencrypted connections.

    Raises:
        NpugradError: A first call failed, so there is nothing to measure.
        KeyboardInterrupt: It was interrupted a second time.
        ImportError: The extra `bench` is not installed.
    """
    Record(scenario.window_s)  # reports a missing extra before anything is started
    servers = Servers((target,) if isinstance(target, str) else tuple(target), tls)
    for one in servers.targets:  # likewise for a wrong address or certificate
        Client(one, tls=tls).close()
    with Interrupts().entered() as interrupts:
        try:
            with _workers(scenario, servers) as connections:
                for connection in connections:
                    _expect_ready(connection)
                environment = {**_environment(tls is not None), "servers": _told(servers)}
                measured = _measured(scenario, connections, on_progress, interrupts)
                return replace(measured, environment=environment)
        except TooEarly:
            return unmeasured(scenario, tls is not None, is_interrupted=True)


def unmeasured(
    scenario: Scenario, is_encrypted: bool, *, died: str = "", is_interrupted: bool = False
) -> Result:
    """The result of a run that ended before anything was measured, and why it did."""
    return Result(
        scenario.as_dict(),
        Record(scenario.window_s),
        0.0,
        is_interrupted=is_interrupted,
        died=died,
        environment=_environment(is_encrypted),
    )


@contextmanager
def _workers(scenario: Scenario, servers: Servers) -> Iterator[list[Connection]]:
    """Starts the workers, and makes sure that they end, however the block ends."""
    context = multiprocessing.get_context("spawn")
    processes: list[Any] = []
    connections: list[Connection] = []
    try:
        for worker in range(scenario.workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs, scenario, worker, servers), daemon=True)
            connections.append(ours)
            # Otherwise the first process would start it, and let interrupts through again.
            resource_tracker.ensure_running()
            with held_back():
                process.start()
                processes.append(process)
            theirs.close()
        yield connections
    finally:
        for connection in connections:  # a worker ends when its connection does
            connection.close()
        _end(processes)


def _end(processes: Sequence[Any]) -> None:
    last_s = time.monotonic() + _END_S
    for process in processes:
        process.join(max(0.0, last_s - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


def _expect_ready(connection: Connection) -> None:
    message = _receive(connection)
    if isinstance(message, Failed):
        raise message.error
    if not isinstance(message, Ready):
        raise WorkerDied(f"a worker sent {type(message).__name__}; expected Ready")


def _receive(connection: Connection) -> Any:
    try:
        return connection.recv()
    except (EOFError, OSError):
        raise WorkerDied("a worker process of the load test died") from None


def _measured(
    scenario: Scenario,
    connections: list[Connection],
    on_progress: OnProgress | None,
    interrupts: Interrupts,
) -> Result:
    epoch_s = time.monotonic() + _LEAD_S + scenario.warm_up_s
    follower = _Follower(connections, epoch_s, on_progress)
    with held_back():  # a worker must have started before it can be stopped
        interrupts.stop = follower.stop
        for connection in connections:
            with contextlib.suppress(OSError):  # it died; the follower notices that
                connection.send(Start(epoch_s))
    follower.follow()  # calls in flight end normally, even after an interrupt
    record = Record(scenario.window_s)
    for done in follower.done:
        record.merge(Record.from_dict(done.record))
    return Result(
        scenario.as_dict(),
        record,
        elapsed_s=max((done.ended_s for done in follower.done if done.ended_s > 0), default=0.0),
        cpus=tuple(done.cpu for done in follower.done),
        is_interrupted=follower.is_stopped,
        died=follower.died,
    )


class _Follower:
    """Reads the workers' messages until all are done.

    Attributes:
        done: Messages of the workers that finished.
        is_stopped: Whether an interrupt stopped sending.
        died: Why the first worker that did not finish died; empty if all finished.
    """

    def __init__(self, connections: list[Connection], epoch_s: float, on_progress: OnProgress | None) -> None:
        self._open, self._epoch_s, self._on_progress = list(connections), epoch_s, on_progress
        self.done: list[Done] = []
        self.is_stopped = False
        self.died = ""

    def follow(self) -> None:
        while self._open:
            for connection in wait(self._open):
                self._read(connection)  # type: ignore[arg-type]

    def _read(self, connection: Connection) -> None:
        try:
            message = _receive(connection)
        except WorkerDied as error:
            message = Failed(error)
        if isinstance(message, (Done, Failed)):
            self._open.remove(connection)
        if isinstance(message, Done):
            self.done.append(message)
        elif isinstance(message, Failed):
            self.died = self.died or str(message.error)
            self._stop_sending()  # the load is no longer as requested
        elif isinstance(message, LoadProgress) and self._on_progress is not None:
            self._on_progress(time.monotonic() - self._epoch_s, message)

    def stop(self) -> None:
        self.is_stopped = True
        self._stop_sending()

    def _stop_sending(self) -> None:
        for connection in self._open:
            with contextlib.suppress(OSError):  # it has just ended by itself
                connection.send(Stop())


def _environment(is_encrypted: bool) -> dict[str, Any]:
    """The environment of the measurement, without the servers' own descriptions."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "npugrad": npugrad.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "is_encrypted": is_encrypted,
    }


def _told(servers: Servers) -> list[dict[str, Any]]:
    return [_server(target, servers.tls) for target in servers.targets]


def _server(target: str, tls: Tls | None) -> dict[str, Any]:
    """A server's own description; only its address if it gives none."""
    with contextlib.suppress(NpugradError), Client(target, timeout_s=_INFO_S, tls=tls, retry=None) as client:
        info = client.server_info()
        devices = [asdict(device) for device in info.devices]
        return {
            "target": target,
            "version": info.version,
            "product": str(info.product),
            "devices": devices,
        }
    return {"target": target, "version": "", "product": "", "devices": []}
