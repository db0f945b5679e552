"""The asynchronous client: the surface of the blocking one, loops, cancelled tasks, many calls in flight."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import pytest
from tests.calls import fill
from tests.client.fake_service import INFO, decoded, fake_service, group_norm, response
from tests.fix_server import ServerProcess, StartServer

from npugrad import OPERATORS
from npugrad.v1 import backward_pb2_grpc
from npugrad_client import AsyncClient, Client


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine, with an end."""
    return asyncio.run(asyncio.wait_for(work, 60))


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


def test_both_clients_have_the_same_methods_with_the_same_signatures_and_docstrings() -> None:
    assert surface(AsyncClient) == surface(Client)
    for name in surface(Client):
        assert doc_of(AsyncClient, name) == doc_of(Client, name), name
        # One of them waits for nothing.
        assert inspect.iscoroutinefunction(getattr(AsyncClient, name)) is (name != "profile"), name


def test_only_the_blocking_client_has_threads() -> None:
    blocking, asynchronous = (dict(inspect.signature(cls).parameters) for cls in (Client, AsyncClient))
    del blocking["threads"]
    assert asynchronous == blocking
    properties = {name for name, value in vars(Client).items() if isinstance(value, property)}
    assert properties == {"submit"}


def test_the_loop_turns_at_least_once_for_each_chunk_of_a_large_call(server: ServerProcess) -> None:
    call = group_norm(n=2, c=64, hxw=16_384)  # 8 MiB an operand: 16 chunks out, 8 back
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
    assert turns >= 24


async def until(client: AsyncClient, is_reached: Callable[[int], bool]) -> None:
    """Asks the server for its queue until it is as it should be."""
    while True:
        info = await client.server_info()
        if is_reached(info.queue_depth):
            return


def test_a_server_gives_cancelled_calls_up(start_server: StartServer) -> None:
    running = start_server("--max-queue-depth", "64", devices="test:1?ms=1500")  # too long to run them all

    async def work() -> None:
        async with AsyncClient(running.address, timeout_s=60) as client:
            tasks = [asyncio.ensure_future(client.group_norm_backward(**group_norm())) for _ in range(60)]
            await until(client, lambda queued: queued >= 40)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until(client, lambda queued: queued == 0)
            await client.group_norm_backward(**group_norm())

    run(work())


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


@pytest.mark.parametrize("number", [200, pytest.param(1000, marks=pytest.mark.deep)])
def test_all_calls_are_in_flight_at_once(number: int) -> None:
    """The server answers none before the last has arrived."""

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


def test_a_real_server_answers_many_calls_at_once_each_with_its_own_result(server: ServerProcess) -> None:
    record = OPERATORS["group_norm_backward"]
    calls = [fill(record, record.build(n=2, c=4, hxw=8, group=2), seed) for seed in range(25)]

    async def work() -> list[Any]:
        async with AsyncClient(server.address, timeout_s=50) as client:
            sent = [client.group_norm_backward(**call.arrays, **call.call.attrs) for call in calls * 8]  # type: ignore[arg-type]
            answers: list[Any] = await asyncio.gather(*sent)
            return answers

    expected = [call.reference() for call in calls]
    for n, grads in enumerate(run(work())):
        found = {name: getattr(grads, name).tobytes() for name in expected[n % 25]}
        assert found == expected[n % 25], n
