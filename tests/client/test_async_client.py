"""The asynchronous client's surface and loops, many calls in flight, and how calls and their clients end."""

from __future__ import annotations

import asyncio
import inspect
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import pytest
from tests.calls import fill
from tests.client import programs
from tests.client.both import WAYS
from tests.client.fake_service import (
    INFO,
    Context,
    Gate,
    abort_with,
    decoded,
    fake_service,
    group_norm,
    response,
)
from tests.fix_server import ServerProcess, StartServer

from npugrad import OPERATORS
from npugrad.errors import InvalidOperand
from npugrad.v1 import backward_pb2_grpc
from npugrad_client import AsyncClient, Client, RetryPolicy


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


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_an_interrupt_ends_a_batch_and_cancels_its_calls() -> None:
    gate = Gate()
    program = """
    import sys, warnings
    warnings.simplefilter("error")
    from tests.client.fake_service import group_norm
    from npugrad_client import Client
    with Client(sys.argv[1]) as client:
        try:
            client.run_many(client.group_norm_backward, [group_norm()] * 9, concurrency=3)
        except KeyboardInterrupt:
            print("interrupted")
    """
    with fake_service(before=gate.hold) as service, tempfile.TemporaryFile("w+") as stderr:
        process = programs.start(program, service.address, stderr=stderr)
        try:
            for _ in range(3):
                gate.wait_for_call()
            process.send_signal(signal.SIGINT)
            for _ in range(3):
                gate.wait_until_given_up()
            status = process.wait(20)
        finally:
            process.kill()
            gate.open()
        assert process.stdout is not None
        with process.stdout as stdout:
            output = stdout.read()
        stderr.seek(0)
        assert (output, stderr.read(), status) == ("interrupted\n", "", 0)


@WAYS
@pytest.mark.parametrize("ends", [("no", "no"), ("no", "yes"), ("yes", "yes")], ids=" ".join)
def test_both_tries_of_a_race_may_end_at_once(ends: tuple[str, str], way: int) -> None:
    """The loop is kept busy until both servers have answered."""
    gate, left = Gate(), [threading.Event(), threading.Event()]

    def end(place: int) -> Callable[[Context], None]:
        def act(context: Context) -> None:
            context.add_callback(left[place].set)
            gate.hold()
            if ends[place] == "no":
                abort_with(context, InvalidOperand("no", code=161002))

        return act

    hedged = RetryPolicy(hedge_after_s=0.0, max_tries=2)

    async def work(targets: list[str]) -> Any:
        async with AsyncClient(targets, timeout_s=20, retry=hedged, stream_from_bytes=way) as client:
            task = asyncio.ensure_future(client.group_norm_backward(**group_norm()))
            for _ in range(2):
                await asyncio.to_thread(gate.wait_for_call)
            gate.open()
            for event in left:
                assert event.wait(20)  # in the loop's own thread: it turns only afterwards
            threading.Event().wait(0.05)  # nothing tells that what was sent has been read
            return (await asyncio.gather(task, return_exceptions=True))[0]

    with fake_service(before=end(0)) as one, fake_service(before=end(1)) as two:
        found = asyncio.run(asyncio.wait_for(work([one.address, two.address]), 30))
    if "yes" in ends:
        assert isinstance(found, InvalidOperand) or found.info.device == "test:0"
    else:
        assert isinstance(found, InvalidOperand), repr(found)


def test_clients_that_are_left_behind_leave_nothing_and_say_nothing() -> None:
    program = """
    import asyncio, gc, os, sys, time, warnings
    warnings.simplefilter("error")
    from tests.client.fake_service import STREAMED, group_norm
    from npugrad_client import AsyncClient, Client, RetryPolicy

    HEDGED = RetryPolicy(hedge_after_s=0)


    def use(policy):
        for way in ({}, {"stream_from_bytes": STREAMED}):
            client = Client(sys.argv[1], timeout_s=20, retry=policy, **way)
            client.group_norm_backward(**group_norm())
            client.submit.group_norm_backward(**group_norm(hxw=10_000)).result()


    async def use_async(policy):
        for way in ({}, {"stream_from_bytes": STREAMED}):
            client = AsyncClient(sys.argv[1], timeout_s=20, retry=policy, **way)
            await client.group_norm_backward(**group_norm(hxw=10_000))


    def held():
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


    def is_little():
        return max(held()) <= 12


    for policy in (None, HEDGED):
        for act in (use, lambda policy: asyncio.run(use_async(policy))):
            for _ in range(4):
                act(policy)
            gc.collect()
            for _ in range(4000):
                if is_little():
                    break
                time.sleep(0.01)
            print(is_little(), held())
    left = Client(sys.argv[1], retry=HEDGED)
    left.group_norm_backward(**group_norm())
    flying = left.submit.group_norm_backward(**group_norm())


    async def leave():
        global other
        other = AsyncClient(sys.argv[1])
        await other.group_norm_backward(**group_norm())
        asyncio.ensure_future(other.group_norm_backward(**group_norm(hxw=1_000_000)))
        await asyncio.sleep(0)

    asyncio.run(leave())
    """
    with fake_service() as service:
        ran = programs.run(program, service.address)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert [line.split()[0] for line in ran.stdout.splitlines()] == ["True"] * 4, ran.stdout


def test_many_calls_in_flight_hold_little_memory() -> None:
    """Beside its operands, which are the caller's, a small call in flight holds some tens of KiB."""
    program = """
    import asyncio, resource, sys
    from tests.client.fake_service import group_norm
    from npugrad_client import AsyncClient


    async def work():
        async with AsyncClient(sys.argv[1], timeout_s=60) as client:
            call = group_norm()
            await client.group_norm_backward(**call)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            await asyncio.gather(*(client.group_norm_backward(**call) for _ in range(400)))
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)

    asyncio.run(work())
    """
    with fake_service() as service:
        ran = programs.run(program, service.address)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < 40 * 1024, "KiB for 400 calls"
