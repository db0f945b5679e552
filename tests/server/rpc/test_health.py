from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from npugrad_server.pool import DeviceState, DeviceStatus
from npugrad_server.rpc.health import LIVENESS, WATCHES, Health, register_health

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE = "npugrad.v1.BackwardService"
OPERATORS = {f"{SERVICE}/{name}": name for name in ("one", "other")}


def device(state: DeviceState, *unavailable: str) -> DeviceStatus:
    return DeviceStatus("cpu:0", "cpu", "", False, state, 0, "", unavailable=frozenset(unavailable))


def become(health: Health, *states: DeviceState) -> None:
    """The only device goes through some states."""
    for state in states:
        health.update([device(state)])


class Caller:
    """A client of a Health behind a real socket."""

    def __init__(self, channel: Any, target: str = "") -> None:
        self._channel, self.target = channel, target

    def _method(self, name: str, kind: str) -> Any:
        return getattr(self._channel, kind)(
            f"/grpc.health.v1.Health/{name}",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )

    async def check(self, *services: str) -> list[Any]:
        check = self._method("Check", "unary_unary")
        return [(await check(health_pb2.HealthCheckRequest(service=service))).status for service in services]

    def watch(self, service: str = "") -> Any:
        return self._method("Watch", "unary_stream")(health_pb2.HealthCheckRequest(service=service))


@asynccontextmanager
async def served(down_limit_s: float | None = None) -> AsyncIterator[tuple[Health, Caller]]:
    health = Health([SERVICE], down_limit_s, OPERATORS)
    server = grpc.aio.server()
    register_health(server, health)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    target = f"127.0.0.1:{port}"
    async with grpc.aio.insecure_channel(target) as channel:
        yield health, Caller(channel, target)
    await server.stop(None)


async def next_of(answers: Any) -> Any:
    return (await asyncio.wait_for(answers.read(), 30)).status


@pytest.mark.parametrize(
    ("states", "serving"),
    [
        ([], False),
        ([DeviceState.STARTING], False),
        ([DeviceState.RESTARTING, DeviceState.DOWN], False),
        ([DeviceState.DOWN, DeviceState.READY], True),
    ],
)
async def test_serving_means_that_some_device_is_ready(states: list[DeviceState], serving: bool) -> None:
    health = Health([])
    assert not health.is_serving
    health.update(map(device, states))
    assert health.is_serving == serving


async def test_draining_is_final_and_liveness_stays() -> None:
    async with served() as (health, caller):
        become(health, DeviceState.READY)
        assert await caller.check("", SERVICE) == [SERVING] * 2
        health.start_draining()
        become(health, DeviceState.READY)
        assert await caller.check("", SERVICE, LIVENESS) == [NOT_SERVING, NOT_SERVING, SERVING]


async def test_watchers_see_each_change_and_end_with_the_server() -> None:
    async with served() as (health, caller):
        answers = caller.watch()
        assert await next_of(answers) == NOT_SERVING
        for state, expected in ((DeviceState.READY, SERVING), (DeviceState.DOWN, NOT_SERVING)):
            become(health, state)
            assert await next_of(answers) == expected
        health.close()
        assert await answers.read() is grpc.aio.EOF


async def test_a_watcher_that_does_not_read_holds_up_nobody() -> None:
    async with served() as (health, caller):
        idle = [caller.watch() for _ in range(WATCHES)]
        for _ in range(2000):
            become(health, DeviceState.READY, DeviceState.DOWN)
            await asyncio.sleep(0)
        assert await caller.check("") == [NOT_SERVING]
        health.close()
        for answers in idle:
            answers.cancel()


async def test_a_connection_has_some_watch_streams_and_its_clients_are_served_with_more() -> None:
    """One that watches in vain takes the server for healthy: gateways have many clients on a connection."""
    config = {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}}
    options = [("grpc.service_config", json.dumps(config))]
    async with served() as (health, caller):
        become(health, DeviceState.READY)
        watching = [caller.watch() for _ in range(WATCHES)]
        assert [await next_of(answers) for answers in watching] == [SERVING] * WATCHES
        with pytest.raises(
            grpc.aio.AioRpcError, match=r"found 2 Watch streams .* expected at most 2"
        ) as told:
            await next_of(caller.watch())
        assert told.value.code() is grpc.StatusCode.UNIMPLEMENTED
        async with grpc.aio.insecure_channel(caller.target, options) as channel:  # on the same connection
            assert await Caller(channel).check("") == [SERVING]
        watching[0].cancel()
        while True:  # its end has arrived with a later call at the latest
            try:
                assert await next_of(caller.watch()) == SERVING
                break
            except grpc.aio.AioRpcError:
                await caller.check("")
        health.close()


async def test_liveness_ends_when_no_device_has_been_ready_for_too_long_and_comes_back_with_one() -> None:
    health, unlimited, draining = Health([], 0.01), Health([]), Health([], 0.01)
    become(health, DeviceState.STARTING)
    become(unlimited, DeviceState.READY)
    become(draining, DeviceState.READY)
    draining.start_draining()
    for other in (unlimited, draining):
        become(other, DeviceState.DOWN)
    await asyncio.sleep(0.05)
    seen = [health.is_alive, unlimited.is_alive, draining.is_alive]  # a start has limits of its own
    become(health, DeviceState.READY, DeviceState.DOWN, DeviceState.RESTARTING, DeviceState.DOWN)
    changed = health._changed
    seen.append(health.is_alive)
    await asyncio.wait_for(changed.wait(), 30)
    seen.append(health.is_alive)
    become(health, DeviceState.READY)
    assert [*seen, health.is_alive] == [True, True, True, True, False, True]


async def test_whoever_watches_liveness_hears_of_its_end() -> None:
    async with served(0.01) as (health, caller):
        answers = caller.watch(LIVENESS)
        assert await next_of(answers) == SERVING
        become(health, DeviceState.READY, DeviceState.DOWN)
        assert await next_of(answers) == NOT_SERVING
        health.close()


async def test_an_operator_is_served_where_a_ready_device_runs_it() -> None:
    async with served() as (health, caller):
        one, other = OPERATORS
        answers = caller.watch(one)
        assert await next_of(answers) == NOT_SERVING
        health.update([device(DeviceState.READY, "other"), device(DeviceState.QUARANTINED)])
        assert await next_of(answers) == SERVING
        assert await caller.check(one, other, "") == [SERVING, NOT_SERVING, SERVING]
        health.update([device(DeviceState.QUARANTINED), device(DeviceState.READY, "one")])
        assert await next_of(answers) == NOT_SERVING
        assert await caller.check(one, other, "") == [NOT_SERVING, SERVING, SERVING]
        health.start_draining()
        assert await caller.check(other) == [NOT_SERVING]
