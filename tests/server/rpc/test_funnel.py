"""The funnel over a real socket: handlers that fail in every way, behind a server on the test's own loop."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from copy import copy
from types import SimpleNamespace
from typing import Any, cast

import grpc.aio
import pytest
import structlog
from grpc_status import rpc_status
from tests.http2 import frame, message, start_call
from tests.server.pool.pools import until

from npugrad.errors import (
    DeviceError,
    ErrorDetails,
    InvalidOperand,
    MalformedTensor,
    NpugradError,
    ServerBusy,
    Violation,
    WorkerLost,
)
from npugrad.ops import get_operator
from npugrad.status import MAX_STATUS_BYTES, decode_status
from npugrad.v1 import server_pb2
from npugrad_server.metrics import Metrics
from npugrad_server.rpc import rpc_call
from npugrad_server.rpc.funnel import REQUEST_ID_KEY, Funnel, RpcCall
from npugrad_server.rpc.identity import Identities
from npugrad_server.rpc.register import register
from npugrad_server.tenants import LiveTenants

SERVICE = server_pb2.DESCRIPTOR.services_by_name["ServerService"]
METHOD = f"/{SERVICE.full_name}/GetServerInfo"


@pytest.fixture(autouse=True)
def lines() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as captured:
        yield captured


def anybody() -> Identities:
    """Each caller is a tenant by its address."""
    return Identities(LiveTenants(), "x-npugrad-tenant", verified=False)


class Harness:
    """A server whose GetServerInfo does what a test says."""

    def __init__(self) -> None:
        self.metrics = Metrics("0", "atlas-a2")
        self.funnel = Funnel(self.metrics, anybody())
        self.act: Callable[[RpcCall], Awaitable[Any]] = self.wait
        self.hold: Callable[[], Awaitable[None]] | None = None
        self.started, self.go_on = asyncio.Event(), asyncio.Event()
        self.stub: Any = None

    async def handler(self, message: Any, call: RpcCall) -> Any:
        self.started.set()
        return await self.act(call)

    async def wait(self, call: RpcCall) -> Any:
        await self.go_on.wait()
        return server_pb2.GetServerInfoResponse(version="7")

    async def call(self, timeout_s: float = 20, **options: Any) -> Any:
        return await self.stub(server_pb2.GetServerInfoRequest(), timeout=timeout_s, **options)

    def begin(self, **options: Any) -> asyncio.Task[Any]:
        return asyncio.create_task(self.call(**options))

    def count(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def served(handler: Any, funnel: Funnel | None = None, parse: Any = None) -> AsyncIterator[int]:
    """Serves GetServerInfo by a handler, perhaps in a funnel; the port."""
    server = grpc.aio.server(interceptors=() if funnel is None else (funnel,))
    parsers = {} if parse is None else {"GetServerInfo": parse}
    register(server, SERVICE, {"GetServerInfo": handler, "ListOperators": handler}, parsers)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield port
    await server.stop(None)


@asynccontextmanager
async def serving() -> AsyncIterator[Harness]:
    harness = Harness()
    funnelled: Any = harness.funnel.unary("GetServerInfo", harness.handler)

    async def handler(requests: Any, context: Any) -> Any:
        answer = await funnelled(requests, context)
        if harness.hold is not None:
            await harness.hold()
        return answer

    async with served(handler) as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        harness.stub = channel.unary_unary(
            METHOD,
            request_serializer=server_pb2.GetServerInfoRequest.SerializeToString,
            response_deserializer=server_pb2.GetServerInfoResponse.FromString,
        )
        yield harness


async def status_of(harness: Harness, error: Exception) -> tuple[grpc.StatusCode, ErrorDetails, int]:
    """What a client sees of an error: code, details, and length of the serialized status."""

    async def fail(_: RpcCall) -> Any:
        raise error

    harness.act = fail
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await harness.call(metadata=((REQUEST_ID_KEY, "r1"),))
    status = rpc_status.from_call(caught.value)  # type: ignore[arg-type]
    assert status is not None
    details = decode_status(status)
    assert details is not None
    assert details.metadata["request_id"] == "r1"
    assert dict(caught.value.trailing_metadata())[REQUEST_ID_KEY] == "r1"
    return caught.value.code(), details, len(status.SerializeToString())


def of(lines: list[Any], event: str) -> list[Any]:
    return [line for line in lines if line["event"] == event]


async def test_each_error_becomes_its_status(lines: list[Any]) -> None:
    cases = [
        (MalformedTensor("t"), "INVALID_ARGUMENT", "MALFORMED_TENSOR"),
        (InvalidOperand("i", code=161002), "INVALID_ARGUMENT", "ACLNN_ERR_PARAM_INVALID"),
        (ServerBusy("b", retry_after_s=2.5), "RESOURCE_EXHAUSTED", "QUEUE_FULL"),
        (ServerBusy("n", reason="NO_DEVICE"), "UNAVAILABLE", "NO_DEVICE"),
        (WorkerLost("w", source="device"), "UNAVAILABLE", "WORKER_LOST"),
        (
            DeviceError("d", code=561003, source="device"),
            "FAILED_PRECONDITION",
            "ACLNN_ERR_INNER_FIND_KERNEL_ERROR",
        ),
        (
            DeviceError("d", code=361001, source="device", operator="group_norm_backward"),
            "INTERNAL",
            "ACLNN_ERR_RUNTIME_ERROR",
        ),
    ]
    async with serving() as harness:
        for error, status, reason in cases:
            code, details, _ = await status_of(harness, error)
            assert (code.name, details.reason) == (status, reason)
            labels = {"method": "GetServerInfo", "operator": error.operator or "", "device": ""}
            assert harness.count("npugrad_calls_total", status=status, reason=reason, **labels) == 1
            if isinstance(error, ServerBusy):
                assert details.retry_after_s == error.retry_after_s
    calls = of(lines, "call")
    assert [line["reason"] for line in calls] == [reason for _, _, reason in cases]
    # Lines can be written as JSON.
    shown = json.loads(json.dumps(calls[-1]))
    fields = "request_id method peer status reason seconds operator error code"
    assert {*fields.split()} <= set(shown)
    assert (shown["code"], shown["log_level"]) == (361001, "error")


async def test_unexpected_error_is_internal_with_the_request_id_and_the_server_goes_on(
    lines: list[Any],
) -> None:
    """Also one that cannot be encoded."""
    strange = NpugradError("x")
    strange.operator = 3  # type: ignore[assignment]
    async with serving() as harness:
        code, details, _ = await status_of(harness, RuntimeError("secret of the caller"))
        assert (code, details.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
        assert "secret" not in details.message
        assert "r1" in details.message
        (line,) = of(lines, "unexpected error")
        assert isinstance(line["exc_info"], RuntimeError)
        assert (line["request_id"], line["log_level"]) == ("r1", "error")
        code, details, _ = await status_of(harness, strange)
        assert (code, details.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
        assert len(of(lines, "unexpected error")) == 2
        harness.act = harness.wait
        harness.go_on.set()
        assert (await harness.call()).version == "7"


async def test_device_that_refuses_what_the_validator_passed_is_counted_as_a_fault_of_the_record() -> None:
    name = "group_norm_backward"
    async with serving() as harness:
        for code in (161002, 561002, 561003, 361001):
            await status_of(harness, DeviceError("d", code=code, source="device", operator=name))
        await status_of(harness, InvalidOperand("i", code=161002, operator=name))
        for code, count in ((161002, 1), (561002, 1), (561003, 0), (361001, 0)):
            labels = {"operator": name, "code": str(code)}
            assert harness.count("npugrad_device_rejections_total", **labels) == count


async def test_status_of_any_number_of_violations_fits() -> None:
    violations = [
        Violation(f"constraint.{i}", 161002, ("operand",) * 11, "f" * 3000, "\u00e9" * 3000, "t" * 3000)
        for i in range(200)
    ]
    error = InvalidOperand("m" * 5000, code=161002, constraint="c" * 500, violations=violations)
    async with serving() as harness:
        _, details, nbytes = await status_of(harness, error)
        assert nbytes <= MAX_STATUS_BYTES
        assert details.metadata["violations_total"] == "200"
        assert details.violations[0].id == "constraint.0"


class Large:
    """Stands for a large message; can be watched."""


@pytest.mark.parametrize("error", [None, MalformedTensor("t"), RuntimeError("r")])
async def test_large_message_is_let_go_without_the_garbage_collector(error: Exception | None) -> None:
    watched: list[weakref.ref[Large]] = []
    funnel = Funnel(Metrics("0", "atlas-a2"), anybody())

    async def handler(message: Any, call: RpcCall) -> Any:
        watched.append(weakref.ref(message))
        if error is not None:
            raise copy(error)
        return server_pb2.GetServerInfoResponse()

    gc.disable()
    try:
        handle = funnel.unary("GetServerInfo", handler)
        async with (
            served(handle, parse=lambda data: Large()) as port,
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            call: Any = channel.unary_unary(METHOD)
            with suppress(grpc.aio.AioRpcError):
                await call(b"", timeout=20)
            await funnel.settle()
            await asyncio.sleep(0)
            assert [ref() for ref in watched] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize("way", ["CANCELLED", "DEADLINE_EXCEEDED"])
async def test_call_that_nobody_waits_for_is_only_counted(
    way: str, lines: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_call, "_LATENCY_S", 1.0)  # on a busy machine it is longer than usual
    ended = asyncio.Event()

    async def wait(_: RpcCall) -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with serving() as harness:
        harness.go_on.set()
        await harness.call()  # connects, which may take longer than the timeout
        harness.started.clear()
        harness.act = wait
        pending = harness.begin(timeout_s=3 if way == "DEADLINE_EXCEEDED" else 20)
        await asyncio.wait_for(harness.started.wait(), 60)
        if way == "CANCELLED":
            pending.cancel()
        await ended.wait()
        await harness.funnel.settle()
        await asyncio.gather(pending, return_exceptions=True)
        labels = {"method": "GetServerInfo", "operator": "", "device": "", "status": way, "reason": way}
        assert harness.count("npugrad_calls_total", **labels) == 1
        assert harness.count("npugrad_active_calls", method="GetServerInfo") == 0
    assert not of(lines, "unexpected error")


@pytest.mark.parametrize(("left_s", "is_late"), [(None, False), (10.0, False), (0.106, False), (0.104, True)])
def test_a_call_is_late_when_next_to_nothing_of_its_time_is_left(left_s: float | None, is_late: bool) -> None:
    """A hundredth of what was granted, by which it may have been rounded up, and 5 ms in transit."""
    left = iter([10.0, left_s])
    call = rpc_call.RpcCall(cast("Any", SimpleNamespace(time_remaining=lambda: next(left))), "m", "r")
    assert call.is_late is is_late


async def is_held(settled: asyncio.Future[None]) -> bool:
    """Whether it is still waited for calls."""
    await asyncio.sleep(0)
    return not settled.done()


async def test_settle_waits_for_the_calls_in_progress_and_for_no_later_one() -> None:
    async with serving() as harness:
        await asyncio.wait_for(harness.funnel.settle(), 10)
        pending = harness.begin()
        await harness.started.wait()
        settled = asyncio.ensure_future(harness.funnel.settle())
        assert await is_held(settled)
        harness.go_on.set()
        await asyncio.wait_for(settled, 10)
        await pending


async def test_call_that_comes_as_grpc_ends_is_waited_for() -> None:
    """Its task ends a moment after gRPC did; a drain that did not wait for it took it for cut short."""
    async with serving() as harness:
        ending = asyncio.get_running_loop().create_future()
        settled = asyncio.ensure_future(harness.funnel.settle_last(ending, 20))
        await asyncio.sleep(0)
        pending = harness.begin()
        await harness.started.wait()
        ending.set_result(None)
        done, _ = await asyncio.wait([settled], timeout=0.1)
        assert not done
        harness.go_on.set()
        await asyncio.wait_for(settled, 10)
        assert harness.funnel.active_count == 0
        await pending


async def test_call_that_has_its_answer_is_not_active_though_its_task_still_runs() -> None:
    """A second signal right after an answer took that call for cut off."""
    async with serving() as harness:
        answered = asyncio.Event()

        async def answer(_: RpcCall) -> Any:
            assert harness.funnel.active_count == 1
            return server_pb2.GetServerInfoResponse()

        async def hold() -> None:
            answered.set()
            await harness.go_on.wait()

        harness.act, harness.hold = answer, hold
        pending = harness.begin()
        await answered.wait()
        assert harness.funnel.active_count == 0
        settled = asyncio.ensure_future(harness.funnel.settle())
        assert await is_held(settled)
        harness.go_on.set()
        await settled
        await pending


async def test_call_whose_message_is_still_on_its_way_is_in_progress() -> None:
    """The end of a server waits for it as well; half a message was sent, and then the connection closed."""
    funnel = Funnel(Metrics("0", "atlas-a2"), anybody())
    async with served(funnel.unary("GetServerInfo", lambda message, call: asyncio.sleep(0)), funnel) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(start_call(METHOD.encode()) + frame(0, 0, 1, message(1000, b"abc")))
        await until(lambda: funnel.active_count)
        settled = asyncio.ensure_future(funnel.settle())
        assert await is_held(settled)
        writer.close()
        await asyncio.wait_for(settled, 30)
        assert funnel.active_count == 0


async def test_each_call_is_logged_with_its_own_operands(lines: list[Any]) -> None:
    record = get_operator("group_norm_backward")
    shapes = [n % 10 + 1 for n in range(40)]
    shared = record.build(n=2)
    metas = [shared if n == 2 else record.build(n=n) for n in shapes]
    coming = iter(metas)

    async def answer(rpc: RpcCall) -> Any:
        rpc.operator = record.name
        rpc.describe(next(coming))
        return server_pb2.GetServerInfoResponse()

    async with serving() as harness:
        harness.act = answer
        for _ in metas:
            await harness.call()
    expected = []
    for meta in metas:
        tensors = [f"{name}={tensor}" for name, tensor in meta.inputs.items() if tensor is not None]
        expected.append(", ".join([*tensors, *(f"{k}={v}" for k, v in meta.attrs.items())])[:512])
    assert [line["operands"] for line in of(lines, "call")] == expected
