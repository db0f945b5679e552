"""Futures and many calls at once: results in their places, cancellation that reaches the server, bounds."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from tests.calls import sample
from tests.client.fake_service import (
    STREAMED,
    UNARY,
    Context,
    Seen,
    abort_with,
    fake_service,
    group_norm,
    stream_zeros,
    zeros,
)
from tests.fix_server import ServerProcess

from npugrad import OPERATORS
from npugrad.errors import ServerBusy
from npugrad.operator import OpRecord
from npugrad_client import AsyncClient, Cancelled, Client, InvalidOperand, NpugradError, RetryPolicy

WAYS = pytest.mark.parametrize("way", [UNARY, STREAMED], ids=["unary", "streamed"])


class Held:
    """A service that holds calls until it is told to answer, and counts."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.arrived, self.given_up = threading.Semaphore(0), threading.Semaphore(0)
        self.most = self._now = 0
        self._lock = threading.Lock()
        self.address = ""

    def hold(self, context: Context) -> None:
        ended = threading.Event()

        def end() -> None:
            if not self.open.is_set():
                self.given_up.release()
            ended.set()

        context.add_callback(end)
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        self.arrived.release()
        while not (self.open.is_set() or ended.wait(0.01)):
            pass
        with self._lock:
            self._now -= 1

    def unary(self, record: OpRecord, request: Any, context: Context) -> Any:
        self.hold(context)
        return zeros(record, request, context)

    def execute(self, frames: Any, context: Context) -> Iterator[Any]:
        self.hold(context)
        yield from stream_zeros(frames, context)


@contextmanager
def held() -> Iterator[Held]:
    service = Held()
    with fake_service(service.unary, service.execute) as seen:
        service.address = seen.address
        try:
            yield service
        finally:
            service.open.set()


# ------------------------------------------------------------------------------------------------ futures


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_future_has_the_methods_result(server: ServerProcess, operator: str) -> None:
    call = sample(operator, seed=3)
    with Client(server.address, timeout_s=60) as client:
        future = getattr(client.submit, operator)(**call.arrays, **call.call.attrs)
        grads = future.result(60)
        assert {n: getattr(grads, n).tobytes() for n in call.outputs} == call.reference()


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_method_of_submit_takes_what_the_client_takes(operator: str) -> None:
    plain, started = (
        inspect.signature(getattr(cls, operator)) for cls in (Client, type(Client("localhost:1").submit))
    )
    assert started.parameters == plain.parameters
    assert started.return_annotation == f"Future[{plain.return_annotation}]"


def test_any_method_can_be_started(server: ServerProcess) -> None:
    with Client(server.address, timeout_s=60) as client:
        assert client.submit(client.server_info).result(60).operators == tuple(OPERATORS)
        assert client.submit(client.list_operators, timeout_s=20).result(60)


def test_errors_come_out_of_the_future(server: ServerProcess) -> None:
    with Client(server.address, timeout_s=60) as client:
        future = client.submit.group_norm_backward(**{**group_norm(), "group": 0})
        with pytest.raises(InvalidOperand):
            future.result(60)


def test_no_more_calls_are_in_flight_than_there_are_threads() -> None:
    with held() as service, Client(service.address, timeout_s=30, threads=3) as client:
        flying = [client.submit.group_norm_backward(**group_norm()) for _ in range(12)]
        for _ in range(3):
            assert service.arrived.acquire(timeout=20)
        service.open.set()
        assert not wait(flying, 30).not_done
        assert service.most == 3


@WAYS
def test_cancelling_a_call_in_flight_reaches_the_server(way: int) -> None:
    with held() as service, Client(service.address, timeout_s=30, stream_from_bytes=way) as client:
        future = client.submit.group_norm_backward(**group_norm())
        assert service.arrived.acquire(timeout=20)
        assert future.cancel()
        with pytest.raises(Cancelled, match="group_norm_backward"):
            future.result(20)
        assert service.given_up.acquire(timeout=20)
        assert not future.cancel()


def test_a_call_that_waits_for_its_next_try_can_be_cancelled() -> None:
    def unary(record: OpRecord, request: Any, context: Context) -> Any:
        abort_with(context, ServerBusy("full", retry_after_s=20))

    with fake_service(unary) as service, Client(service.address) as client:
        future = client.submit.group_norm_backward(**group_norm())
        while not service.methods:
            pass
        assert future.cancel()
        with pytest.raises(Cancelled):
            future.result(10)
    assert len(service.methods) == 1


def test_a_hedged_call_is_cancelled_with_all_its_tries() -> None:
    policy = RetryPolicy(hedge_after_s=0.01, max_tries=2)
    with held() as service, Client(service.address, timeout_s=30, retry=policy) as client:
        future = client.submit.group_norm_backward(**group_norm())
        for _ in range(2):
            assert service.arrived.acquire(timeout=20)
        assert future.cancel()
        with pytest.raises(Cancelled):
            future.result(20)
        for _ in range(2):
            assert service.given_up.acquire(timeout=20)


def test_a_call_that_has_not_begun_is_never_sent() -> None:
    with held() as service, Client(service.address, timeout_s=30, threads=1) as client:
        first, second = (client.submit.group_norm_backward(**group_norm()) for _ in range(2))
        assert service.arrived.acquire(timeout=20)
        assert second.cancel()
        with pytest.raises(CancelledError):
            second.result(20)
        service.open.set()
        first.result(20)
        assert not service.arrived.acquire(blocking=False)


def test_closing_the_client_ends_all_futures() -> None:
    with held() as service:
        client = Client(service.address, timeout_s=30, threads=2)
        flying = [client.submit.group_norm_backward(**group_norm()) for _ in range(6)]
        for _ in range(2):
            assert service.arrived.acquire(timeout=20)
        client.close()
        for future in flying:
            with pytest.raises((Cancelled, CancelledError, RuntimeError)):
                future.result(20)


def test_threads_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="threads: found 0; expected 1 or more"):
        Client("localhost:1", threads=0)


# ------------------------------------------------------------------------------------- many calls at once


def many(address: str, calls: Any, is_async: bool, **options: Any) -> Any:
    """The same `run_many` of either client."""
    if not is_async:
        with Client(address, timeout_s=30, retry=None) as client:
            return client.run_many(client.group_norm_backward, calls, **options)

    async def work() -> Any:
        async with AsyncClient(address, timeout_s=30, retry=None) as client:
            return await client.run_many(client.group_norm_backward, calls, **options)

    return asyncio.run(asyncio.wait_for(work(), 60))


BOTH = pytest.mark.parametrize("is_async", [False, True], ids=["threads", "asyncio"])


@BOTH
def test_results_have_the_order_of_the_calls(server: ServerProcess, is_async: bool) -> None:
    calls = [group_norm(hxw=8 if seed % 3 else 30_000, seed=seed) for seed in range(24)]
    found = many(server.address, iter(calls), is_async, concurrency=6)
    with Client(server.address, timeout_s=60) as client:
        for call, grads in zip(calls, found, strict=True):
            expected = client.group_norm_backward(**call)
            assert grads.grad_input.tobytes() == expected.grad_input.tobytes()


@BOTH
def test_an_error_keeps_its_place(server: ServerProcess, is_async: bool) -> None:
    calls: list[dict[str, Any]] = [group_norm(seed=n) for n in range(6)]
    calls[2]["group"] = 0
    calls[4]["nonsense"] = 1
    found = many(server.address, calls, is_async, concurrency=2, on_error="return")
    kinds = [InvalidOperand if n == 2 else TypeError if n == 4 else None for n in range(6)]
    assert [type(f) if isinstance(f, Exception) else None for f in found] == kinds


@BOTH
def test_the_first_error_ends_a_batch_and_cancels_what_is_in_flight(is_async: bool) -> None:
    taken = 0

    def calls() -> Iterator[dict[str, Any]]:
        nonlocal taken
        for taken in range(1, 100):
            yield {**group_norm(), "priority": 1000 if taken == 4 else 0}

    with held() as service:
        with pytest.raises(NpugradError, match="priority"):
            many(service.address, calls(), is_async, concurrency=4)
        assert taken == 4, "calls were begun after the error"


@BOTH
def test_calls_are_taken_as_others_end(is_async: bool) -> None:
    taken: list[int] = []
    with held() as service, ThreadPoolExecutor(1) as pool:

        def calls() -> Iterator[dict[str, Any]]:
            for number in range(9):
                taken.append(number)
                yield group_norm()

        running = pool.submit(many, service.address, calls(), is_async, concurrency=3)
        for _ in range(3):
            assert service.arrived.acquire(timeout=20)
        assert taken == [0, 1, 2]
        service.open.set()
        assert len(running.result(30)) == 9
        assert service.most <= 3


@BOTH
def test_no_calls_have_no_results(is_async: bool) -> None:
    assert many("127.0.0.1:1", [], is_async) == []


@BOTH
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concurrency": 0}, "concurrency: found 0; expected 1 or more"),
        ({"on_error": "ignore"}, "on_error: found 'ignore'; expected"),
    ],
)
def test_what_cannot_be_meant_is_refused(is_async: bool, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        many("127.0.0.1:1", [group_norm()], is_async, **options)


@BOTH
@pytest.mark.parametrize("kind", [list, iter], ids=["list", "generator"])
def test_a_bar_shows_how_many_are_done(
    is_async: bool, kind: Callable[[Any], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_service() as service:
        many(service.address, kind([group_norm()] * 5), is_async, progress="gradients")
    said = capsys.readouterr().out
    assert "gradients" in said
    assert "5/5" in said


def test_many_threads_may_run_batches_of_one_client(server: ServerProcess) -> None:
    with Client(server.address, timeout_s=60) as client, ThreadPoolExecutor(4) as pool:

        def work(seed: int) -> list[Any]:
            return client.run_many(client.group_norm_backward, [group_norm(seed=seed)] * 5, concurrency=3)

        for seed, found in enumerate(pool.map(work, range(4))):
            expected = client.group_norm_backward(**group_norm(seed=seed))
            assert all(np.array_equal(grads.grad_input, expected.grad_input) for grads in found)


def test_a_client_works_in_a_running_loop_as_in_a_cell_of_a_notebook() -> None:
    """A notebook runs its cells inside a loop; the blocking client must not need one, or mind it."""

    async def cell(seen: Seen) -> None:
        with Client(seen.address, timeout_s=20) as client:
            client.group_norm_backward(**group_norm())
            client.run_many(client.group_norm_backward, [group_norm()] * 3)
            await asyncio.wrap_future(client.submit.group_norm_backward(**group_norm()))
        async with AsyncClient(seen.address, timeout_s=20) as asynchronous:
            await asynchronous.group_norm_backward(**group_norm())

    with fake_service() as seen:
        asyncio.run(asyncio.wait_for(cell(seen), 60))
    assert len(seen.methods) == 6
