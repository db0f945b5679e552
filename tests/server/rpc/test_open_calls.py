"""Places of calls in progress: whose call gives one up, and what its caller is told."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st
from tests.http2 import DATA, call_headers, frame, message, start_call
from tests.server.rpc.test_front_memory import call_of
from tests.server.rpc.test_funnel import SERVICE, anybody

from npugrad.errors import ServerBusy
from npugrad_server.addresses import Address
from npugrad_server.metrics import Metrics
from npugrad_server.pool.tenant import Tenant
from npugrad_server.rpc.front_memory import FrontLimits, FrontMemory
from npugrad_server.rpc.funnel import Funnel
from npugrad_server.rpc.health import Health, register_health, register_reflection
from npugrad_server.rpc.open_calls import OpenCalls
from npugrad_server.rpc.register import register
from npugrad_server.rpc.rpc_call import RpcCall

MANY, HEAVY, FEW = Tenant("many"), Tenant("heavy", 2.0), Tenant("few")


class Places:
    """Places whose calls are in a list."""

    def __init__(self, limit: int) -> None:
        self.memory = FrontMemory(FrontLimits(calls=limit))
        self.places, self.calls = OpenCalls(self.memory), list[RpcCall]()

    def enter(self, *tenants: Tenant) -> list[RpcCall]:
        entered = []
        for tenant in tenants:
            call = call_of(self.memory, tenant=tenant)
            call.task = Task()  # type: ignore[assignment]
            self.places.enter(call)
            entered.append(call)
        self.calls += entered
        return entered

    @property
    def ended(self) -> list[int]:
        return [number for number, call in enumerate(self.calls) if call.failure is not None]


class Task:
    def cancel(self) -> None:
        pass


def test_the_tenant_with_the_most_for_its_weight_gives_its_youngest_idle_call_up() -> None:
    found = Places(5)
    found.enter(HEAVY, MANY, MANY, MANY, HEAVY)
    found.calls[3].reply_bytes = 1  # it has all of its request, so it does not wait for its caller
    found.enter(FEW)
    assert found.ended == [2]
    assert str(found.calls[2].failure) == (
        "Unary: ended for a call of another tenant: found 5 calls in progress, 3 of them of this tenant; "
        "expected fewer than 5, or others with more for their weight (setting max_calls)"
    )
    found.enter(HEAVY)
    assert found.ended == [1, 2]
    found.calls[3].reply_bytes = 0
    with pytest.raises(ServerBusy, match=r"Unary: found 5 calls in progress, 1 of them of this tenant"):
        found.enter(MANY)
    assert found.memory.refused["slot"] == 3


def test_where_no_call_waits_for_its_caller_the_youngest_goes() -> None:
    found = Places(2)
    for call in found.enter(MANY, MANY):
        call.reply_bytes = 1
    found.enter(FEW)
    assert found.ended == [1]


@given(st.integers(1, 6), st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60))
def test_in_any_history_no_tenant_is_kept_from_its_share(limit: int, steps: list[tuple[int, bool]]) -> None:
    found, tenants = Places(limit), [Tenant(str(number), number + 1.0) for number in range(4)]
    held = Counter[str]()
    for number, is_over in steps:
        tenant = tenants[number]
        if is_over:
            for call in [c for c in found.calls if c.tenant is tenant and c.failure is None][:1]:
                found.places.leave(call)
                found.calls.remove(call)
        else:
            others = max((held[t.name] / t.weight for t in tenants if t is not tenant), default=0.0)
            is_refused = held.total() == limit and (held[tenant.name] + 1) / tenant.weight >= others
            try:
                found.enter(tenant)
                assert not is_refused
            except ServerBusy:
                assert is_refused
        held = Counter(call.tenant.name for call in found.calls if call.failure is None)
        assert held.total() <= limit


# --------------------------------------------------------------------------------------- over real sockets


@asynccontextmanager
async def serving(places: int, late_s: float = 60.0) -> AsyncIterator[tuple[int, Any]]:
    """A server with so many places for calls about itself; its port, and Check over a channel."""
    limits = FrontLimits(calls=4 * places, upload_timeout_s=late_s)
    funnel = Funnel(Metrics("0", "atlas-a2"), anybody(), memory=FrontMemory(limits))
    server, queries = grpc.aio.server(interceptors=(funnel,)), funnel.queries
    info = funnel.unary("GetServerInfo", lambda message, call: asyncio.sleep(0), queries)
    register(server, SERVICE, {"GetServerInfo": info, "ListOperators": info})
    register_health(server, Health([], places=queries))
    register_reflection(server, [], queries)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined]
        watching = asyncio.create_task(queries.memory.watch(funnel.calls, Address("127.0.0.1", port)))
        yield port, lambda: check(health_pb2.HealthCheckRequest(), timeout=20)
        watching.cancel()
    await server.stop(None)


QUERIES = (
    "npugrad.v1.ServerService/GetServerInfo",
    "grpc.health.v1.Health/Check",
    "grpc.health.v1.Health/List",
    "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)
WATCH = "grpc.health.v1.Health/Watch"


@pytest.mark.parametrize("method", QUERIES)
async def test_an_idle_call_ends_for_one_of_another_address_and_is_told_why(method: str) -> None:
    path, cut = f"/{method}".encode(), message(1000, b"abc")
    name = method.rpartition("/")[2]
    async with serving(2) as (port, check):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))

        async def until_told(text: str) -> None:
            await asyncio.wait_for(reader.readuntil(f"{name}: {text}".encode()), 30)

        writer.write(start_call(path) + frame(DATA, 0, 1, cut))
        for stream in (3, 5):
            writer.write(call_headers(path, stream) + frame(DATA, 0, stream, cut))
        await until_told("found 2 calls in progress, 2 of them of this tenant")
        await check()
        await until_told("ended for a call of another tenant: found 2 calls in progress")
        writer.close()


@pytest.mark.parametrize("method", [*QUERIES, WATCH])
async def test_a_message_that_does_not_come_ends_the_call(method: str) -> None:
    async with serving(2, late_s=0.0) as (port, check):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
        writer.write(start_call(f"/{method}".encode()) + frame(DATA, 0, 1, message(1000, b"abc")))
        text = f"{method.rpartition('/')[2]}: the request had not arrived completely after"
        await asyncio.wait_for(reader.readuntil(text.encode()), 30)
        await check()
        writer.close()


async def test_a_watcher_that_may_send_more_is_refused() -> None:
    async with serving(2) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(start_call(f"/{WATCH}".encode()) + 2 * frame(DATA, 0, 1, message(0, b"")))
        await asyncio.wait_for(reader.readuntil(b"expected grpc.health.v1.HealthCheckRequest"), 30)
        writer.close()
