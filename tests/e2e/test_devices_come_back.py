"""Nothing but damage takes a device away for good: each cause is there for a while, goes, and all is well."""

from __future__ import annotations

import os
import resource
import signal
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.calls import TIMEOUT_S, call_unary, failure_of, sample
from tests.e2e.harness import eventually, workers_of

if TYPE_CHECKING:
    from tests.fix_server import StartServer

pytestmark = pytest.mark.slow

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
FRAGILE = (
    *("--max-respawns", "1", "--respawn-backoff-s", "0.02", "--respawn-backoff-max-s", "0.2"),
    *("--liveness-down-limit-s", "0.5"),
)
"""Flags with which a device is down after two losses in a row."""


def watch_health(channel: grpc.Channel, service: str = "") -> Any:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return stub.Watch(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S)


def await_health(answers: Any, status: int) -> None:
    """Reads until a watch says so; whatever it says before is skipped."""
    while next(answers).status != status:
        pass


def test_devices_are_back_once_the_host_has_descriptors_again(start_server: StartServer) -> None:
    server = start_server(*FRAGILE, devices="test:2?compute=1")
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


def test_neither_idle_workers_killed_nor_calls_that_kill_take_a_device_away(
    start_server: StartServer,
) -> None:
    server, made = start_server(*FRAGILE, devices="test:1?crash=bad&compute=1&open_ms=200"), sample()
    with server.channel() as channel:
        ready = watch_health(channel)
        # The next process is hardly ever there before the deadline of such a call.
        bad = made.message(label="bad")
        for _ in range(3):
            await_health(ready, SERVING)
            with pytest.raises(grpc.RpcError):
                call_unary(channel, made.record, bad, timeout=0.25)
            await_health(ready, NOT_SERVING)
        await_health(ready, SERVING)
        assert "test:0: down" not in server.log_text()
        for _ in range(3):
            (worker,) = workers_of(server.process.pid)
            os.kill(worker, signal.SIGKILL)
            await_health(ready, NOT_SERVING)
            await_health(ready, SERVING)
        assert "test:0: down" in server.log_text()
        call_unary(channel, made.record, made.message(label="good"))
