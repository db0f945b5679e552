"""Futures and many calls at once: results in their places, cancellation that reaches the server, bounds."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.client.both import BOTH, WAYS, Looped, Make, failures
from tests.client.fake_service import Context, Gate, Seen, abort_with, fake_service, group_norm
from tests.fix_server import ServerProcess

from npugrad import OPERATORS
from npugrad.errors import ServerBusy
from npugrad_client import (
    AsyncClient,
    Cancelled,
    Client,
    InvalidOperand,
    NpugradError,
    RetryPolicy,
    WrongType,
)

Array = npt.NDArray[Any]


@contextmanager
def held() -> Iterator[tuple[Gate, str]]:
    gate = Gate()
    with fake_service(before=gate.hold) as seen:
        try:
            yield gate, seen.address
        finally:
            gate.open()


# ------------------------------------------------------------------------------------------------ futures


def test_a_method_of_submit_takes_what_the_client_takes() -> None:
    for operator in OPERATORS:
        plain, started = (
            inspect.signature(getattr(cls, operator)) for cls in (Client, type(Client("localhost:1").submit))
        )
        parameters = dict(started.parameters)
        assert parameters.pop("copy").default is False
        assert parameters == dict(plain.parameters)
        assert started.return_annotation == f"Future[{plain.return_annotation}]"


def test_any_method_can_be_started_and_its_errors_come_out_of_the_future(server: ServerProcess) -> None:
    with Client(server.address, timeout_s=60) as client:
        assert client.submit(client.server_info).result(60).operators == tuple(OPERATORS)
        assert client.submit(client.list_operators, timeout_s=20).result(60)
        with pytest.raises(InvalidOperand):
            client.submit.group_norm_backward(**{**group_norm(), "group": 0}).result(60)


def test_no_more_calls_are_in_flight_than_there_are_threads() -> None:
    with held() as (gate, address), Client(address, timeout_s=30, threads=3) as client:
        flying = [client.submit.group_norm_backward(**group_norm()) for _ in range(12)]
        for _ in range(3):
            gate.wait_for_call()
        gate.open()
        assert not wait(flying, 30).not_done
        assert gate.most == 3
    with pytest.raises(ValueError, match="threads: found 0; expected 1 or more"):
        Client("localhost:1", threads=0)


@WAYS
@BOTH
def test_cancelling_a_call_in_flight_reaches_the_server(make: Make, way: int) -> None:
    with held() as (gate, address), make(address, timeout_s=30, stream_from_bytes=way) as client:
        future = client.submit.group_norm_backward(**group_norm())
        gate.wait_for_call()
        assert future.cancel()
        with pytest.raises((Cancelled, CancelledError)) as caught:
            future.result(20)
        gate.wait_until_given_up()
        if make is Client:
            assert "group_norm_backward" in str(caught.value)
            assert not future.cancel()


def full(context: Context) -> None:
    """Asks to wait for much longer than a test may take."""
    abort_with(context, ServerBusy("full", retry_after_s=20.0))


@BOTH
@pytest.mark.parametrize("policy", [RetryPolicy(), RetryPolicy(hedge_after_s=60)], ids=["plain", "hedged"])
@pytest.mark.parametrize("end", ["close", "cancel", "close under a plain call"])
def test_a_call_that_waits_for_its_next_try_can_be_ended(
    make: Make, policy: RetryPolicy, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = failures(monkeypatch)
    with (
        fake_service(before=full) as service,
        ThreadPoolExecutor(1) as pool,
        make(service.address, retry=policy) as client,
    ):
        if end == "close under a plain call":
            future = pool.submit(client.group_norm_backward, **group_norm())
        else:
            future = client.submit.group_norm_backward(**group_norm())
        assert failed.acquire(timeout=20)
        if end == "cancel":
            assert future.cancel()
        else:
            client.close()
        with pytest.raises((Cancelled, CancelledError) if end == "cancel" else Cancelled):
            future.result(5)  # far from when the server asked for the next try
    assert len(service.methods) == 1


def test_a_hedged_call_is_cancelled_with_all_its_tries() -> None:
    policy = RetryPolicy(hedge_after_s=0.01, max_tries=2)
    with held() as (gate, address), Client(address, timeout_s=30, retry=policy) as client:
        future = client.submit.group_norm_backward(**group_norm())
        for _ in range(2):
            gate.wait_for_call()
        assert future.cancel()
        with pytest.raises(Cancelled):
            future.result(20)
        for _ in range(2):
            gate.wait_until_given_up()


def test_a_call_that_has_not_begun_is_never_sent() -> None:
    gate = Gate()
    with fake_service(before=gate.hold) as seen, Client(seen.address, timeout_s=30, threads=1) as client:
        first, second = (client.submit.group_norm_backward(**group_norm()) for _ in range(2))
        gate.wait_for_call()
        assert second.cancel()
        with pytest.raises(CancelledError):
            second.result(20)
        gate.open()
        first.result(20)
        assert len(seen.methods) == 1


def test_who_waits_for_futures_hears_of_those_that_a_closed_client_never_began() -> None:
    with held() as (gate, address):
        client = Client(address, timeout_s=30, threads=2)
        flying = [client.submit.group_norm_backward(**group_norm()) for _ in range(6)]
        for _ in range(2):
            gate.wait_for_call()
        assert flying[3].cancel()
        client.close()
        assert not wait(flying, 10).not_done
        for future in flying:
            with pytest.raises((Cancelled, CancelledError, RuntimeError)):
                future.result()
        with pytest.raises(RuntimeError, match=f"the client for {address} is closed"):
            client.submit.group_norm_backward(**group_norm())


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
    with fake_service() as service:
        client = Client(service.address, timeout_s=20, threads=1)

        def third(future: Any) -> None:
            client.close()
            done.set()

        def second(future: Any) -> None:
            client.group_norm_backward(**group_norm())
            client.submit.group_norm_backward(**group_norm()).add_done_callback(third)

        client.submit.group_norm_backward(**group_norm()).add_done_callback(second)
        assert done.wait(20)
    assert len(service.methods) == 3


# ------------------------------------------------------------------------------------- many calls at once


def many(make: Make, address: str, calls: Any, **options: Any) -> Any:
    with make(address, timeout_s=30, retry=None) as client:
        return client.run_many(client.group_norm_backward, calls, **options)


@BOTH
def test_results_have_the_order_of_the_calls(server: ServerProcess, make: Make) -> None:
    calls = [group_norm(hxw=8 if seed % 3 else 30_000, seed=seed) for seed in range(12)]
    found = many(make, server.address, iter(calls), concurrency=6)
    with Client(server.address, timeout_s=60) as client:
        for call, grads in zip(calls, found, strict=True):
            expected = client.group_norm_backward(**call)
            assert grads.grad_input.tobytes() == expected.grad_input.tobytes()


@BOTH
def test_an_error_keeps_its_place_and_so_does_what_is_no_call(server: ServerProcess, make: Make) -> None:
    calls: list[Any] = [group_norm(seed=n) for n in range(7)]
    calls[2]["group"] = 0
    calls[4]["nonsense"] = 1
    calls[5] = None
    found = many(make, server.address, calls, concurrency=2, on_error="return", copy=True)
    kinds = [None, None, InvalidOperand, None, WrongType, WrongType, None]
    assert [type(f) if isinstance(f, Exception) else None for f in found] == kinds


@BOTH
def test_the_first_error_ends_a_batch_and_cancels_what_is_in_flight(make: Make) -> None:
    taken = 0

    def calls() -> Iterator[dict[str, Any]]:
        nonlocal taken
        for taken in range(1, 100):
            yield {**group_norm(), "priority": 1000 if taken == 4 else 0}

    with held() as (_, address):
        with pytest.raises(NpugradError, match="priority"):
            many(make, address, calls(), concurrency=4)
        assert taken == 4, "calls were begun after the error"


@BOTH
def test_calls_are_taken_as_others_end(make: Make) -> None:
    taken: list[int] = []
    with held() as (gate, address), ThreadPoolExecutor(1) as pool:

        def calls() -> Iterator[dict[str, Any]]:
            for number in range(9):
                taken.append(number)
                yield group_norm()

        running = pool.submit(many, make, address, calls(), concurrency=3)
        for _ in range(3):
            gate.wait_for_call()
        assert taken == [0, 1, 2]
        gate.open()
        assert len(running.result(30)) == 9
        assert gate.most <= 3


@BOTH
def test_no_calls_have_no_results_and_what_cannot_be_meant_is_refused(make: Make) -> None:
    assert many(make, "127.0.0.1:1", []) == []
    with pytest.raises(ValueError, match="concurrency: found 0; expected 1 or more"):
        many(make, "127.0.0.1:1", [group_norm()], concurrency=0)
    with pytest.raises(ValueError, match="on_error: found 'ignore'; expected"):
        many(make, "127.0.0.1:1", [group_norm()], on_error="ignore")


@BOTH
@pytest.mark.parametrize("kind", [list, iter], ids=["list", "generator"])
def test_a_bar_shows_how_many_are_done(
    make: Make, kind: Callable[[Any], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_service() as service:
        many(make, service.address, kind([group_norm()] * 5), progress="gradients")
    said = capsys.readouterr().out
    assert "gradients" in said
    assert "5/5" in said


def refilled(buffer: Array, filled: Any) -> Iterator[dict[str, Any]]:
    """Calls that all have one buffer, which is filled again for each, and once more after the last."""
    for number in range(1, 4):
        buffer[...] = number
        yield {**group_norm(), "grad_out": buffer}
    buffer[...] = 4
    filled.set()


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize(
    ("make", "way"), [(Client, "submit"), (Client, "run_many"), (Looped, "run_many")], ids=str
)
def test_a_buffer_can_be_filled_again_if_it_is_copied(
    server: ServerProcess, make: Make, way: str, copy: bool
) -> None:
    """No call reads it before: without a copy, all results are of what was filled in last."""
    buffer, filled = np.empty_like(group_norm()["grad_out"]), threading.Event()
    calls = refilled(buffer, filled)
    with Client(server.address, timeout_s=60, threads=1) as plain, make(server.address) as client:

        def late(**call: Any) -> Any:
            assert filled.wait(60)
            return client.group_norm_backward(**call)

        async def later(**call: Any) -> Any:
            assert await asyncio.to_thread(filled.wait, 60)
            return await client.client.group_norm_backward(**call)

        if way == "submit":
            plain.submit(filled.wait)  # takes the only thread
            futures = [plain.submit.group_norm_backward(**call, copy=copy) for call in calls]
            found = [future.result(60) for future in futures]
        else:
            found = client.run_many(late if make is Client else later, calls, concurrency=4, copy=copy)
        for grads, number in zip(found, (1, 2, 3) if copy else (4, 4, 4), strict=True):
            buffer[...] = number
            expected = plain.group_norm_backward(**{**group_norm(), "grad_out": buffer})
            assert grads.grad_input.tobytes() == expected.grad_input.tobytes()


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
