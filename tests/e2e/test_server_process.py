"""The server as a process among others: its standard error, its descriptors, its children."""

from __future__ import annotations

import fcntl
import itertools
import os
import platform
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.calls import TIMEOUT_S, call_execute, call_unary, failure_of, sample
from tests.e2e.harness import Wire, eventually, workers_of
from tests.e2e.test_server_lifecycle import NOT_SERVING, SERVING, health_of, watch_health
from tests.fix_server import (
    ServerProcess,
    StartServer,
    server_command,
    server_environment,
    server_flags,
    start_process,
)

from npugrad.v1 import backward_pb2, backward_pb2_grpc, server_pb2, validation_pb2
from npugrad_server.worker.descendants import processes

_F_SETPIPE_SZ = getattr(fcntl, "F_SETPIPE_SZ", 1031)  # `fcntl` names it from Python 3.10 on
_PIPE_BYTES = 4096


# ------------------------------------------------------------------------------------ standard error


@pytest.fixture
def unread_server(tmp_path: Path) -> Iterator[tuple[ServerProcess, int]]:
    """A server whose standard error is a small pipe that nobody reads; the pipe's other end."""
    ours, theirs = os.pipe()
    fcntl.fcntl(theirs, _F_SETPIPE_SZ, _PIPE_BYTES)
    with open(theirs, "w") as stderr:
        flags = server_flags("--log-level", "debug", "--drain-timeout-s", "5")
        process = start_process(["serve", *flags], stderr)
    running = ServerProcess(process, tmp_path / "no.log")
    try:
        yield running, ours
    finally:
        running.kill()
        os.close(ours)


def test_a_server_whose_standard_error_nobody_reads_answers_and_ends(
    unread_server: tuple[ServerProcess, int],
) -> None:
    running, unread = unread_server
    running.wait_ready()
    made = sample()
    with running.channel() as channel:
        for _ in range(40):
            call_unary(channel, made.record, made.message())
        (worker,) = workers_of(running.process.pid)
        os.kill(worker, signal.SIGSEGV)  # its last words are many
        assert call_unary(channel, made.record, made.message()).info.device == "cpu:0"
        assert [device.restarts for device in running.info().devices] == [1]
    running.signal(signal.SIGTERM)
    assert running.wait() == 0
    with os.fdopen(os.dup(unread), "rb") as pipe:
        assert len(pipe.read()) > _PIPE_BYTES // 2, "the pipe was never full"


# ------------------------------------------------------------------------------------- hung processes


def test_workers_that_were_all_stopped_are_replaced(start_server: StartServer) -> None:
    """Nobody has a deadline, so only the server can notice. It is not serving meanwhile."""
    # The two may be killed one after the other. Then both die under the same call, and without the delay
    # the first would be back too soon.
    flags = ("--heartbeat-timeout-s", "2", "--circuit-deaths", "0")
    hung = start_server(*flags, devices="test:2?compute=1&open_ms=2000", quick=False)
    made = sample()
    with hung.channel() as channel:
        watch = watch_health(channel)
        assert next(watch).status == SERVING
        for pid in workers_of(hung.process.pid):
            os.kill(pid, signal.SIGSTOP)
        stub = backward_pb2_grpc.BackwardServiceStub(channel)
        call = stub.GroupNormBackward.future(made.message())
        assert next(watch).status == NOT_SERVING
        assert next(watch).status == SERVING
        assert call.result(TIMEOUT_S).info.attempts in (2, 3)
        watch.cancel()
    (first, second) = hung.info().devices
    assert first.restarts == second.restarts == 1
    assert len(hung.log_lines("test:0: killing its worker: the worker did not answer for 2 s")) == 1


# --------------------------------------------------------------------------------------- descriptors


def _use_up_descriptors(pid: int) -> None:
    """Lets a process open no descriptor any more; those that it has stay."""
    taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    lowest_free = next(number for number in range(len(taken) + 1) if number not in taken)
    _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest_free, most))


def test_no_call_opens_a_descriptor(start_server: StartServer) -> None:
    """A server that has none left goes on serving the connections that it has."""
    full = start_server(check_end=False, quick=False)
    made = sample()
    header = backward_pb2.ExecuteHeader(group_norm_backward=made.message())
    with full.channel() as channel:
        grpc.channel_ready_future(channel).result(TIMEOUT_S)
        _use_up_descriptors(full.process.pid)
        wire = Wire.of(channel)
        assert wire.info().version
        assert call_execute(channel, made.frames()).contents == made.reference()
        assert call_unary(channel, made.record, made.message()).info.attempts == 1
        listed = wire.server.ListOperators(server_pb2.ListOperatorsRequest(), timeout=TIMEOUT_S)
        assert listed.operators
        request = validation_pb2.ValidateRequest(call=header)
        assert wire.validation.Validate(request, timeout=TIMEOUT_S).status == 0
        bad = made.message()
        bad.group = 0
        assert failure_of(lambda: call_unary(channel, made.record, bad)).error.reason
        assert health_of(channel) == SERVING
    full.signal(signal.SIGTERM)
    assert full.wait() == 0
    assert "Traceback" not in full.log_text()


def await_health(answers: Any, status: int) -> None:
    """Reads until a watch says so; whatever it says before is skipped."""
    while next(answers).status != status:
        pass


@pytest.mark.slow
def test_devices_are_back_once_the_host_has_descriptors_again(start_server: StartServer) -> None:
    """A device is down after two losses in a row, and liveness half a second later."""
    server = start_server(
        *("--max-respawns", "1", "--respawn-backoff-s", "0.02", "--respawn-backoff-max-s", "0.2"),
        *("--liveness-down-limit-s", "0.5"),
        devices="test:2?compute=1",
        quick=False,
    )
    pid, made = server.process.pid, sample()
    with server.channel() as channel:
        ready, alive = watch_health(channel), watch_health(channel, "liveness")
        await_health(ready, SERVING)
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))
        for worker in workers_of(pid):
            os.kill(worker, signal.SIGKILL)
        await_health(ready, NOT_SERVING)
        await_health(alive, NOT_SERVING)
        eventually(
            lambda: all(f"test:{index}: down" in server.log_text() for index in (0, 1)),
            "both are down",
            server,
        )
        failure = failure_of(lambda: call_unary(channel, made.record, made.message()))
        assert (failure.status, failure.error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_DEVICE")
        assert "Too many open files" in str(failure.error)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        await_health(ready, SERVING)
        await_health(alive, SERVING)
        call_unary(channel, made.record, made.message())
    eventually(lambda: len(workers_of(pid)) == 2, "both devices have a worker", server)


# ------------------------------------------------------------------------------------------- memory


def _malloc_arenas(pid: int) -> list[str]:
    """Heaps of glibc's arenas other than the first: 64 MiB at a multiple of that, the rest not accessible.

    A kernel that aligns mappings to huge pages puts others there, too, but with nothing of that kind behind.
    """
    found, size = [], 2**26
    lines = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    for (where, access, _, _, inode, *_), (behind, access_behind, *_) in itertools.pairwise(lines):
        begin, end = (int(each, 16) for each in where.split("-"))
        begin_behind, end_behind = (int(each, 16) for each in behind.split("-"))
        is_reserved = access_behind == "---p" and begin_behind == end and end_behind >= begin + size
        if (access, inode) == ("rw-p", "0") and begin % size == 0 and (is_reserved or end == begin + size):
            found.append(where)
    return found


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc has no such arenas")
def test_all_threads_of_the_front_process_share_what_is_freed(
    server: ServerProcess, server_channel: grpc.Channel
) -> None:
    """What each thread keeps for itself adds up: 100 MiB and more after thousands of calls of 4 MiB."""
    made = sample()
    for _ in range(3):
        call_execute(server_channel, made.frames())
    assert _malloc_arenas(server.process.pid) == []


# ------------------------------------------------------------------------------- the first of a container


def _first_of_a_container() -> list[str]:
    """What makes a command the first process of a namespace of its own, as in a container."""
    return ["unshare", "--fork", "--pid", "--mount-proc", "--kill-child=SIGKILL"]


@pytest.fixture
def first_server(tmp_path: Path) -> Iterator[tuple[ServerProcess, int]]:
    """A server that is process 1, and its number outside."""
    if subprocess.run([*_first_of_a_container(), "true"], capture_output=True, check=False).returncode:
        pytest.skip("no right to make a namespace for processes")
    command = server_command("--respawn-backoff-s", "0.01", devices="test:1?children=1&crash=die")
    with (tmp_path / "server.log").open("w") as log:
        process = subprocess.Popen(
            [*_first_of_a_container(), *command],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=server_environment(),
        )
    running = ServerProcess(process, tmp_path / "server.log")
    try:
        running.wait_ready()
        (inside,) = [found.pid for found in processes() if found.parent == process.pid]
        yield running, inside
    finally:
        running.kill()


def test_the_first_process_of_a_container_waits_for_orphans_and_ends_when_told(
    first_server: tuple[ServerProcess, int],
) -> None:
    running, pid = first_server
    made = sample()
    with running.channel() as channel:
        failure = failure_of(lambda: call_unary(channel, made.record, made.message(label="die")))
        assert failure.error.reason == "WORKER_LOST"
        assert "SIGABRT" in str(failure.error)  # nobody else waited for the workers
    ready = server_pb2.DeviceState.DEVICE_STATE_READY
    eventually(lambda: running.info().devices[0].state == ready, "there is another worker", running)
    eventually(
        lambda: [found for found in processes() if found.parent == pid and found.state == "Z"] == [],
        "what three workers left behind was waited for",
        running,
    )
    (worker,) = [found.pid for found in processes() if found.parent == pid]
    assert len([found for found in processes() if found.parent == worker]) == 3
    os.kill(pid, signal.SIGTERM)
    assert running.wait() == 0
