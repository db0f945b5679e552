"""The asynchronous client: the same methods, results and errors as the blocking one, and cancellation."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from tests.calls import fill, sample
from tests.client.fake_service import (
    INFO,
    STREAMED,
    UNARY,
    Context,
    Gate,
    abort_with,
    decoded,
    fake_service,
    group_norm,
    response,
    stream_zeros,
    zeros,
)
from tests.client.test_transport import assert_waited
from tests.fix_server import ServerProcess, StartServer

from npugrad import OPERATORS, codec
from npugrad.errors import ServerBusy
from npugrad.operator import OpRecord
from npugrad.v1 import backward_pb2_grpc
from npugrad_client import (
    AsyncClient,
    Cancelled,
    Client,
    ConnectError,
    DeadlineExceeded,
    InvalidOperand,
    NullOperand,
)

WAYS = pytest.mark.parametrize("stream_from_bytes", [UNARY, STREAMED], ids=["unary", "streamed"])


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine, with an end."""
    return asyncio.run(asyncio.wait_for(work, 60))


# ------------------------------------------------------------------------------------------ one surface


def surface(cls: type) -> dict[str, str]:
    """Signatures by method; what a coroutine gives back counts as given back."""
    return {
        name: str(inspect.signature(value)).replace("Awaitable[R]", "R")
        for name, value in inspect.getmembers(cls, inspect.isfunction)
        if not name.startswith("_")
    }


def doc_of(cls: type, method: str) -> str:
    """The docstring but for its example, which awaits in one of them."""
    return (inspect.getdoc(getattr(cls, method)) or "").partition("\nExample:")[0]


def test_both_clients_have_the_same_methods_with_the_same_signatures() -> None:
    assert surface(AsyncClient) == surface(Client)
    for name in surface(AsyncClient).keys() - {"profile"}:  # which waits for nothing
        assert inspect.iscoroutinefunction(getattr(AsyncClient, name)), name


def test_only_the_blocking_client_has_threads() -> None:
    blocking, asynchronous = (dict(inspect.signature(cls).parameters) for cls in (Client, AsyncClient))
    del blocking["threads"]
    assert asynchronous == blocking
    properties = {name for name, value in vars(Client).items() if isinstance(value, property)}
    assert properties == {"submit"}


def test_both_clients_say_the_same_of_their_methods() -> None:
    for name in surface(Client):
        assert doc_of(AsyncClient, name) == doc_of(Client, name), name


# ------------------------------------------------------------------------------------- results and errors


@WAYS
@pytest.mark.parametrize("operator", OPERATORS)
def test_each_operator_answers_with_the_references_results(
    server: ServerProcess, operator: str, stream_from_bytes: int
) -> None:
    call = sample(operator, seed=3)

    async def work() -> Any:
        async with AsyncClient(server.address, timeout_s=60, stream_from_bytes=stream_from_bytes) as client:
            return await getattr(client, operator)(**call.arrays, **call.call.attrs)

    grads = run(work())
    assert {n: getattr(grads, n).tobytes() for n in call.outputs} == call.reference()
    assert grads.info.device == "cpu:0"


def test_the_small_services_answer_as_the_blocking_client_says(server: ServerProcess) -> None:
    record = OPERATORS["group_norm_backward"]
    call = record.build()
    what: dict[str, Any] = {"inputs": dict(call.inputs), "attrs": {**call.attrs, "group": 0}}

    async def work() -> Any:
        async with AsyncClient(server.address, timeout_s=60) as client:
            return await asyncio.gather(
                client.validate(record.name, **what), client.list_operators(), client.server_info()
            )

    verdict, operators, info = run(work())
    with Client(server.address, timeout_s=60) as blocking:
        assert verdict == blocking.validate(record.name, **what)
        assert operators == blocking.list_operators()
        assert info.devices == blocking.server_info().devices


@WAYS
def test_errors_are_those_of_the_blocking_client(server: ServerProcess, stream_from_bytes: int) -> None:
    wrong = [{**group_norm(), "mean": None}, {**group_norm(), "group": 0}, {**group_norm(), "priority": 101}]

    async def work() -> list[Any]:
        async with AsyncClient(server.address, timeout_s=60, stream_from_bytes=stream_from_bytes) as client:
            calls = [client.group_norm_backward(**call) for call in wrong]
            answers: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
            return answers

    found = run(work())
    assert [type(error) for error in found[:2]] == [NullOperand, InvalidOperand]
    with Client(server.address, timeout_s=60, stream_from_bytes=stream_from_bytes) as client:
        for error, call in zip(found, wrong, strict=True):
            with pytest.raises(type(error)) as caught:
                client.group_norm_backward(**call)
            assert str(caught.value) == str(error)


@WAYS
def test_what_grpc_raises_is_translated(stream_from_bytes: int) -> None:
    def busy(context: Context) -> None:
        abort_with(context, ServerBusy("no room", retry_after_s=7, operator="group_norm_backward"))

    def unary(record: OpRecord, request: Any, context: Context) -> Any:
        busy(context)

    def execute(frames: Any, context: Context) -> Iterator[Any]:
        busy(context)
        yield

    async def work(address: str) -> Any:
        async with AsyncClient(address, stream_from_bytes=stream_from_bytes, retry=None) as client:
            return await asyncio.gather(
                client.group_norm_backward(**group_norm()),
                client.group_norm_backward(**group_norm(), timeout_s=0),
                client.server_info(),
                return_exceptions=True,
            )

    with fake_service(unary, execute) as service:
        refused, late, unknown = run(work(service.address))
    assert isinstance(refused, ServerBusy)
    assert refused.retry_after_s == 7
    assert isinstance(late, DeadlineExceeded)
    assert "the server does not know this method of npugrad.v1" in str(unknown)
    assert isinstance(run(work(service.address))[0], ConnectError)


@WAYS
def test_a_deadline_ends_a_call(stream_from_bytes: int) -> None:
    gate = Gate()

    async def work(address: str) -> None:
        async with AsyncClient(address, stream_from_bytes=stream_from_bytes) as client:
            with pytest.raises(DeadlineExceeded) as caught:
                await client.group_norm_backward(**group_norm(), timeout_s=2)
        assert_waited(caught.value, address, 2)

    with fake_service(gate.unary, gate.execute) as service:
        run(work(service.address))
        gate.open()


def test_large_results_land_in_the_callers_arrays(server: ServerProcess) -> None:
    call = group_norm(n=2, c=64, hxw=16_384)  # 8 MiB an operand
    given = np.full((2, 64, 16_384), 9, np.float32)

    async def work() -> Any:
        async with AsyncClient(server.address, timeout_s=60) as client:
            return await client.group_norm_backward(**call, out={"grad_input": given})

    with Client(server.address, timeout_s=60) as client:
        expected = client.group_norm_backward(**call)
    grads = run(work())
    assert grads.grad_input is given
    assert given.tobytes() == expected.grad_input.tobytes()


def test_the_loop_turns_at_least_once_for_each_chunk_of_a_large_call(server: ServerProcess) -> None:
    call = group_norm(n=2, c=64, hxw=32_768)  # 16 MiB an operand: 32 chunks out, 16 back
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def work() -> None:
        nonlocal turns
        async with AsyncClient(server.address, timeout_s=60) as client:
            await client.server_info()
            counting = asyncio.ensure_future(count())
            turns = 0
            await client.group_norm_backward(**call)
            counting.cancel()

    run(work())
    assert turns >= 48


# -------------------------------------------------------------------------------------------- cancellation


@WAYS
def test_cancelling_the_task_cancels_the_call_on_the_server(stream_from_bytes: int) -> None:
    arrived, given_up = threading.Event(), threading.Event()

    def hold(context: Context) -> None:
        context.add_callback(given_up.set)
        arrived.set()
        given_up.wait(30)

    def unary(record: OpRecord, request: Any, context: Context) -> Any:
        hold(context)
        return zeros(record, request, context)

    def execute(frames: Any, context: Context) -> Iterator[Any]:
        hold(context)
        yield from stream_zeros(frames, context)

    async def work(address: str) -> None:
        async with AsyncClient(address, stream_from_bytes=stream_from_bytes) as client:
            task = asyncio.ensure_future(client.group_norm_backward(**group_norm()))
            await asyncio.to_thread(arrived.wait, 20)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(given_up.wait, 20), "the server never heard of it"

    with fake_service(unary, execute) as service:
        run(work(service.address))


async def until(client: AsyncClient, is_reached: Callable[[int], bool]) -> None:
    """Asks the server for its queue until it is as it should be."""
    while True:
        info = await client.server_info()
        if is_reached(info.queue_depth):
            return


def test_a_server_gives_cancelled_calls_up(start_server: StartServer) -> None:
    running = start_server("--max-queue-depth", "8", devices="test:1?ms=12000")  # too long to run them all

    async def work() -> None:
        async with AsyncClient(running.address, timeout_s=60) as client:
            tasks = [asyncio.ensure_future(client.group_norm_backward(**group_norm())) for _ in range(8)]
            await until(client, lambda queued: queued >= 6)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until(client, lambda queued: queued == 0)
            await client.group_norm_backward(**group_norm())

    run(work())


@WAYS
def test_closing_cancels_calls_in_flight(stream_from_bytes: int) -> None:
    gate = Gate()

    async def work(address: str) -> None:
        client = AsyncClient(address, timeout_s=30, stream_from_bytes=stream_from_bytes)
        task = asyncio.ensure_future(client.group_norm_backward(**group_norm()))
        await asyncio.to_thread(gate.wait_for_call)
        await client.close()
        await client.close()
        with pytest.raises(Cancelled, match="group_norm_backward"):
            await task
        for act in (lambda: client.group_norm_backward(**group_norm()), client.server_info):
            with pytest.raises(RuntimeError, match=f"the client for {address} is closed"):
                await act()

    with fake_service(gate.unary, gate.execute) as service:
        run(work(service.address))
        gate.open()


# --------------------------------------------------------------------------------------------------- loops


def test_a_client_may_be_used_in_one_loop_after_the_other() -> None:
    with fake_service() as service:
        client = AsyncClient(service.address, timeout_s=20)
        for _ in range(3):
            assert run(client.group_norm_backward(**group_norm())).info.device == "test:0"


def test_a_client_in_two_running_loops_is_an_error_that_says_so() -> None:
    async def work(address: str) -> None:
        async with AsyncClient(address, timeout_s=20) as client:
            await client.group_norm_backward(**group_norm())
            with pytest.raises(RuntimeError, match="in use by another event loop"):
                await asyncio.to_thread(asyncio.run, client.group_norm_backward(**group_norm()))

    with fake_service() as service:
        run(work(service.address))


# ------------------------------------------------------------------------------------------ many in flight


def test_a_thousand_calls_are_in_flight_at_once() -> None:
    """The server answers none before the last has arrived."""
    number = 1000

    async def work() -> list[Any]:
        everyone, arrived = asyncio.Event(), 0

        async def hold(request: Any, context: Any) -> Any:
            nonlocal arrived
            arrived += 1
            if arrived == number:
                everyone.set()
            await everyone.wait()
            record = OPERATORS["group_norm_backward"]
            return response(record, decoded(record, request))[0]

        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        servicer = type("Held", (backward_pb2_grpc.BackwardServiceServicer,), {})()
        servicer.GroupNormBackward = hold
        backward_pb2_grpc.add_BackwardServiceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with AsyncClient(f"127.0.0.1:{port}", timeout_s=50) as client:
                calls = [client.group_norm_backward(**group_norm(seed=n % 7)) for n in range(number)]
                answers: list[Any] = await asyncio.gather(*calls)
                return answers
        finally:
            await server.stop(None)

    answers = run(work())
    assert len(answers) == number
    assert all(answer.info == INFO for answer in answers)


def test_a_real_server_answers_a_thousand_at_once_each_with_its_own_result(start_server: StartServer) -> None:
    running = start_server("--max-queue-depth", "2000", devices="cpu:0")
    record = OPERATORS["group_norm_backward"]
    calls = [fill(record, record.build(n=2, c=4, hxw=8, group=2), seed) for seed in range(50)]

    async def work() -> list[Any]:
        async with AsyncClient(running.address, timeout_s=50) as client:
            chosen = [calls[n % 50] for n in range(1000)]
            sent = [client.group_norm_backward(**call.arrays, **call.call.attrs) for call in chosen]  # type: ignore[arg-type]
            answers: list[Any] = await asyncio.gather(*sent)
            return answers

    expected = [call.reference() for call in calls]
    for n, grads in enumerate(run(work())):
        found = {name: getattr(grads, name).tobytes() for name in expected[n % 50]}
        assert found == expected[n % 50], n


def test_requests_are_those_of_the_blocking_client() -> None:
    async def work(address: str, stream_from_bytes: int) -> None:
        async with AsyncClient(address, timeout_s=20, stream_from_bytes=stream_from_bytes) as client:
            await client.group_norm_backward(**group_norm(hxw=40_000), label="same")

    for way in (UNARY, STREAMED):
        with fake_service() as service:
            run(work(service.address, way))
            with Client(service.address, timeout_s=20, stream_from_bytes=way) as client:
                client.group_norm_backward(**group_norm(hxw=40_000), label="same")
        assert service.methods[0] == service.methods[1]
        half = len(service.frames) // 2
        assert service.frames[:half] == service.frames[half:]
        assert len(service.headers) in (0, 2)
        assert service.headers[:1] == service.headers[1:]
    assert codec.CHUNK_BYTES == 2**20
