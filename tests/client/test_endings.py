"""How calls end when several things happen at once: closing, cancelling, two answers."""

from __future__ import annotations

import asyncio
import contextvars
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, ProcessPoolExecutor, wait
from typing import Any

import pytest
from tests.client.fake_service import (
    STREAMED,
    UNARY,
    Context,
    Gate,
    abort_with,
    chunk_frame,
    decoded,
    fake_service,
    group_norm,
    header_frame,
    read_header,
    response,
    zeros,
)

from npugrad.errors import InvalidOperand, ServerBusy
from npugrad.operator import OpRecord
from npugrad_client import AsyncClient, Cancelled, Client, RetryPolicy

HEDGED = RetryPolicy(hedge_after_s=0.0, max_tries=2)
WAIT_S = 20.0
"""How long a full server asks to wait: much longer than a test may take."""


def full(record: OpRecord, request: Any, context: Context) -> Any:
    abort_with(context, ServerBusy("full", retry_after_s=WAIT_S))


def until_seen(methods: list[str]) -> None:
    while not methods:
        os.sched_yield()


# ------------------------------------------------------------------------------------------------ closing


@pytest.mark.parametrize("policy", [RetryPolicy(), RetryPolicy(hedge_after_s=60)], ids=["plain", "hedged"])
@pytest.mark.parametrize("is_submitted", [False, True], ids=["called", "submitted"])
def test_closing_ends_calls_that_wait_for_their_next_try(policy: RetryPolicy, is_submitted: bool) -> None:
    with fake_service(full) as service:
        client = Client(service.address, retry=policy)
        caught: list[BaseException | None] = []

        def work() -> None:
            try:
                if is_submitted:
                    client.submit.group_norm_backward(**group_norm()).result(WAIT_S)
                else:
                    client.group_norm_backward(**group_norm())
            except Exception as error:
                caught.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        until_seen(service.methods)
        threading.Event().wait(0.1)  # nothing tells that the refusal has arrived, and is waited upon
        client.close()
        thread.join(WAIT_S / 4)
        assert not thread.is_alive(), "the call went on waiting"
    assert isinstance(caught[0], Cancelled)
    assert len(service.methods) == 1


@pytest.mark.parametrize("policy", [RetryPolicy(), RetryPolicy(hedge_after_s=60)], ids=["plain", "hedged"])
def test_closing_ends_tasks_that_wait_for_their_next_try(policy: RetryPolicy) -> None:
    async def work(address: str, methods: list[str]) -> None:
        client = AsyncClient(address, retry=policy)
        task = asyncio.ensure_future(client.group_norm_backward(**group_norm()))
        await asyncio.to_thread(until_seen, methods)
        await asyncio.sleep(0.1)  # nothing tells that the refusal has arrived, and is waited upon
        await client.close()
        with pytest.raises(Cancelled):
            await asyncio.wait_for(task, WAIT_S / 4)

    with fake_service(full) as service:
        asyncio.run(work(service.address, service.methods))


def test_who_waits_for_futures_hears_of_those_that_a_closed_client_never_began() -> None:
    gate = Gate()
    with fake_service(gate.unary) as service:
        client = Client(service.address, timeout_s=30, threads=1)
        flying = [client.submit.group_norm_backward(**group_norm()) for _ in range(4)]
        gate.wait_for_call()
        assert flying[3].cancel()
        client.close()
        assert not wait(flying, 10).not_done
        with pytest.raises(RuntimeError, match=f"the client for {service.address} is closed"):
            client.submit.group_norm_backward(**group_norm())
        gate.open()


# -------------------------------------------------------------------------------------------- cancellation


def test_a_cancelled_future_never_has_a_result() -> None:
    """Cancelled by the very thread that makes the call, after its answer has come."""
    with fake_service() as service, Client(service.address, timeout_s=20) as client:
        started, go = threading.Event(), threading.Event()

        def call() -> Any:
            grads = client.group_norm_backward(**group_norm())
            started.set()
            assert go.wait(20)
            return grads

        future = client.submit(call)
        assert started.wait(20)
        assert future.cancel()
        go.set()
        with pytest.raises((Cancelled, CancelledError)):
            future.result(20)
        assert not future.cancel()


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_an_interrupt_ends_a_batch_and_cancels_its_calls() -> None:
    given_up, gate = threading.Semaphore(0), Gate()

    def hold(record: OpRecord, request: Any, context: Context) -> Any:
        context.add_callback(given_up.release)
        gate.hold()
        return zeros(record, request, context)

    program = """
    import sys
    from tests.client.fake_service import group_norm
    from npugrad_client import Client
    with Client(sys.argv[1]) as client:
        try:
            client.run_many(client.group_norm_backward, [group_norm()] * 9, concurrency=3)
        except KeyboardInterrupt:
            print("interrupted")
    """
    with fake_service(hold) as service:
        command = [sys.executable, "-W", "error", "-c", textwrap.dedent(program), service.address]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            for _ in range(3):
                gate.wait_for_call()
            process.send_signal(signal.SIGINT)
            for _ in range(3):
                assert given_up.acquire(timeout=20)
            out, err = process.communicate(timeout=20)
        finally:
            process.kill()
            process.wait()
            gate.open()
    assert (out, err, process.returncode) == ("interrupted\n", "", 0)


# ------------------------------------------------------------------------------------- two ends at one time


@pytest.mark.parametrize("way", [UNARY, STREAMED], ids=["unary", "streamed"])
@pytest.mark.parametrize("ends", [("no", "no"), ("no", "yes"), ("yes", "yes")], ids=" ".join)
def test_both_tries_of_a_race_may_end_at_once(ends: tuple[str, str], way: int) -> None:
    """The loop is kept busy until both servers have answered."""
    gate, left = Gate(), [threading.Event(), threading.Event()]

    def handlers(place: int) -> Any:
        def end(context: Context) -> None:
            context.add_callback(left[place].set)
            gate.hold()
            if ends[place] == "no":
                abort_with(context, InvalidOperand("no", code=161002))

        def unary(record: OpRecord, request: Any, context: Context) -> Any:
            end(context)
            return zeros(record, request, context)

        def execute(frames: Any, context: Context) -> Iterator[Any]:
            record, request = read_header(frames)
            for _ in frames:
                pass
            end(context)
            message, follow = response(record, decoded(record, request), chunk_from_bytes=1)
            yield header_frame(record, message)
            for operand, data in follow:
                yield chunk_frame(operand, 0, bytes(data))

        return {"unary": unary, "execute": execute}

    async def work(targets: list[str]) -> Any:
        async with AsyncClient(targets, timeout_s=20, retry=HEDGED, stream_from_bytes=way) as client:
            task = asyncio.ensure_future(client.group_norm_backward(**group_norm()))
            for _ in range(2):
                await asyncio.to_thread(gate.wait_for_call)
            gate.open()
            for event in left:
                assert event.wait(20)  # in the loop's own thread: it turns only afterwards
            threading.Event().wait(0.05)  # nothing tells that what was sent has been read
            return (await asyncio.gather(task, return_exceptions=True))[0]

    with fake_service(**handlers(0)) as one, fake_service(**handlers(1)) as two:
        found = asyncio.run(asyncio.wait_for(work([one.address, two.address]), 30))
    if "yes" in ends:
        assert isinstance(found, InvalidOperand) or found.info.device == "test:0"
    else:
        assert isinstance(found, InvalidOperand), repr(found)


# ----------------------------------------------------------------------------------------- where calls run


def test_submitted_calls_see_the_context_of_who_starts_them() -> None:
    request: contextvars.ContextVar[str] = contextvars.ContextVar("request", default="none")
    with Client("127.0.0.1:1") as client:
        request.set("a")
        future = client.submit(request.get)
        request.set("b")
        assert future.result(10) == "a"
        assert client.run_many(lambda: request.get(), [{}] * 3, concurrency=2) == ["b"] * 3


def test_a_callback_may_call_submit_and_close() -> None:
    done = threading.Event()
    found: list[Any] = []
    with fake_service() as service:
        client = Client(service.address, timeout_s=20, threads=1)

        def third(future: Any) -> None:
            client.close()
            done.set()

        def second(future: Any) -> None:
            found.append(client.group_norm_backward(**group_norm()))
            client.submit.group_norm_backward(**group_norm()).add_done_callback(third)

        client.submit.group_norm_backward(**group_norm()).add_done_callback(second)
        assert done.wait(20)
    assert len(service.methods) == 3


def _fail(address: str) -> None:
    with Client(address, timeout_s=20, retry=RetryPolicy(max_tries=2, initial_backoff_s=0)) as client:
        client.group_norm_backward(**group_norm())


def _refused(record: OpRecord, request: Any, context: Context) -> Any:
    abort_with(context, ServerBusy("full", retry_after_s=0.01, operator=record.name))


def test_errors_of_another_process_arrive_whole() -> None:
    with (
        fake_service(_refused) as service,
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool,
        pytest.raises(ServerBusy, match="full") as caught,
    ):
        pool.submit(_fail, service.address).result(60)
    error = caught.value
    assert (error.tries, error.retry_after_s, error.operator) == (2, 0.01, "group_norm_backward")
    assert error.request_id == "abc123"


@pytest.mark.parametrize("is_async", [False, True], ids=["threads", "asyncio"])
def test_what_is_no_call_ends_no_batch_silently(is_async: bool) -> None:
    def one(**arguments: Any) -> int:
        return len(arguments)

    async def one_async(**arguments: Any) -> int:
        return len(arguments)

    calls: list[Any] = [{"a": 1}, None, {"a": 1, "b": 2}]
    if is_async:
        found = asyncio.run(AsyncClient("127.0.0.1:1").run_many(one_async, calls, on_error="return"))
    else:
        found = Client("127.0.0.1:1").run_many(one, calls, on_error="return")
    assert found[0::2] == [1, 2]
    assert isinstance(found[1], TypeError)


# --------------------------------------------------------------------------------------- clients left behind


def test_clients_that_are_left_behind_leave_nothing_and_say_nothing() -> None:
    program = """
    import asyncio, gc, os, sys, time
    from tests.client.fake_service import group_norm
    from npugrad_client import AsyncClient, Client, RetryPolicy

    HEDGED = RetryPolicy(hedge_after_s=0)


    def use(policy):
        client = Client(sys.argv[1], timeout_s=20, retry=policy)
        client.group_norm_backward(**group_norm())
        client.submit.group_norm_backward(**group_norm(hxw=100_000)).result()


    async def use_async(policy):
        client = AsyncClient(sys.argv[1], timeout_s=20, retry=policy)
        await client.group_norm_backward(**group_norm())
        await client.group_norm_backward(**group_norm(hxw=100_000))


    def held():
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


    def is_little():
        return max(held()) <= 12


    for policy in (None, HEDGED):
        for act in (use, lambda policy: asyncio.run(use_async(policy))):
            for _ in range(8):
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
        command = [sys.executable, "-W", "error", "-c", textwrap.dedent(program), service.address]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)
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
            await asyncio.gather(*(client.group_norm_backward(**call) for _ in range(1000)))
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)

    asyncio.run(work())
    """
    with fake_service() as service:
        command = [sys.executable, "-c", textwrap.dedent(program), service.address]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < 100 * 1024, "KiB for 1,000 calls"
