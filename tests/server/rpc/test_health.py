from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from npugrad_server.pool import DeviceState, DeviceStatus
from npugrad_server.rpc.health import LIVENESS, Health, register_health

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


OPERATORS = {f"npugrad.v1.BackwardService/{name}": name for name in ("one", "other")}


def device(state: DeviceState, *unavailable: str) -> DeviceStatus:
    return DeviceStatus("cpu:0", "cpu", "", False, state, 0, "", unavailable=frozenset(unavailable))


def with_health(act: Callable[[Health, Any], Awaitable[None]], down_limit_s: float | None = None) -> None:
    """Runs a test against a Health behind a real socket, on one loop."""

    async def run() -> None:
        health = Health(["npugrad.v1.BackwardService"], down_limit_s, OPERATORS)
        server = grpc.aio.server()
        register_health(server, health)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await asyncio.wait_for(act(health, channel), 30)
        await server.stop(None)

    asyncio.run(run())


async def check(channel: Any, service: str = "") -> Any:
    call = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    return (await call(health_pb2.HealthCheckRequest(service=service))).status


def watch(channel: Any, service: str = "") -> Any:
    call = channel.unary_stream(
        "/grpc.health.v1.Health/Watch",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    return call(health_pb2.HealthCheckRequest(service=service))


@pytest.mark.parametrize(
    ("states", "serving"),
    [
        ([], False),
        ([DeviceState.STARTING], False),
        ([DeviceState.RESTARTING, DeviceState.DOWN], False),
        ([DeviceState.DOWN, DeviceState.READY], True),
    ],
)
def test_serving_means_that_some_device_is_ready(states: list[DeviceState], serving: bool) -> None:
    async def run() -> None:
        health = Health([])
        assert not health.is_serving
        health.update(map(device, states))
        assert health.is_serving == serving

    asyncio.run(run())


def test_draining_is_final_and_liveness_stays() -> None:
    async def act(health: Health, channel: Any) -> None:
        health.update([device(DeviceState.READY)])
        assert await check(channel) == await check(channel, "npugrad.v1.BackwardService") == SERVING
        health.start_draining()
        health.update([device(DeviceState.READY)])
        assert await check(channel) == await check(channel, "npugrad.v1.BackwardService") == NOT_SERVING
        assert await check(channel, LIVENESS) == SERVING

    with_health(act)


def test_watchers_see_each_change_and_end_with_the_server() -> None:
    async def act(health: Health, channel: Any) -> None:
        answers = watch(channel)
        assert (await answers.read()).status == NOT_SERVING
        for state, expected in ((DeviceState.READY, SERVING), (DeviceState.DOWN, NOT_SERVING)):
            health.update([device(state)])
            assert (await answers.read()).status == expected
        health.close()
        assert await answers.read() is grpc.aio.EOF

    with_health(act)


def test_a_watcher_that_does_not_read_holds_up_nobody() -> None:
    async def act(health: Health, channel: Any) -> None:
        idle = [watch(channel) for _ in range(5)]
        for _ in range(2000):
            health.update([device(DeviceState.READY)])
            health.update([device(DeviceState.DOWN)])
            await asyncio.sleep(0)
        assert await check(channel) == NOT_SERVING
        health.close()
        for answers in idle:
            answers.cancel()

    with_health(act)


def test_liveness_ends_when_no_device_has_been_ready_for_too_long_and_comes_back_with_one() -> None:
    seen = []

    async def run() -> None:
        health = Health([], down_limit_s=0.01)
        health.update([device(DeviceState.STARTING)])
        await asyncio.sleep(0.05)
        seen.append(health.is_alive)  # the start has limits of its own
        health.update([device(DeviceState.READY), device(DeviceState.DOWN)])
        for state in (DeviceState.RESTARTING, DeviceState.DOWN):
            health.update([device(state)])
        changed = health._changed
        seen.append(health.is_alive)
        await asyncio.wait_for(changed.wait(), 30)
        seen.append(health.is_alive)
        health.update([device(DeviceState.READY)])
        seen.append(health.is_alive)

    asyncio.run(run())
    assert seen == [True, True, False, True]


def test_liveness_never_ends_without_a_limit_nor_while_the_server_drains() -> None:
    async def run() -> None:
        unlimited, draining = Health([]), Health([], down_limit_s=0.01)
        for health in (unlimited, draining):
            health.update([device(DeviceState.READY)])
        draining.start_draining()
        for health in (unlimited, draining):
            health.update([device(DeviceState.DOWN)])
        await asyncio.sleep(0.05)
        assert unlimited.is_alive
        assert draining.is_alive

    asyncio.run(run())


def test_whoever_watches_liveness_hears_of_its_end() -> None:
    async def act(health: Health, channel: Any) -> None:
        answers = watch(channel, LIVENESS)
        assert (await answers.read()).status == SERVING
        health.update([device(DeviceState.READY)])
        health.update([device(DeviceState.DOWN)])
        assert (await answers.read()).status == NOT_SERVING
        health.close()

    with_health(act, down_limit_s=0.01)


def test_an_operator_is_served_where_a_ready_device_runs_it() -> None:
    async def act(health: Health, channel: Any) -> None:
        one, other = OPERATORS
        answers = watch(channel, one)
        assert (await answers.read()).status == NOT_SERVING
        health.update([device(DeviceState.READY, "other"), device(DeviceState.QUARANTINED)])
        assert (await answers.read()).status == SERVING
        assert [await check(channel, name) for name in (one, other, "")] == [SERVING, NOT_SERVING, SERVING]
        health.update([device(DeviceState.QUARANTINED), device(DeviceState.READY, "one")])
        assert (await answers.read()).status == NOT_SERVING
        assert [await check(channel, name) for name in (one, other, "")] == [NOT_SERVING, SERVING, SERVING]
        health.start_draining()
        assert await check(channel, other) == NOT_SERVING

    with_health(act)
