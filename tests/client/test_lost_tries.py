"""Tries that end half-way: what is sent again, and what becomes of the caller's arrays meanwhile."""

from __future__ import annotations

import asyncio
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from tests.client.fake_service import (
    STREAMED,
    Context,
    abort_with,
    chunk_frame,
    decoded,
    fake_service,
    group_norm,
    header_frame,
    read_header,
    response,
)

from npugrad.errors import NpugradError
from npugrad_client import (
    AsyncClient,
    Client,
    ConnectError,
    DeadlineExceeded,
    InvalidOperand,
    MalformedRequest,
    RetryPolicy,
    ServerBusy,
    _async_transport,
)
from npugrad_client._attempt import Attempt
from npugrad_client._retry import RETRY

REFUSALS = [
    InvalidOperand("group: found 3", code=161002, operator="group_norm_backward"),
    MalformedRequest("chunk: found 9; expected 1", operator="group_norm_backward", operand="input"),
    ServerBusy("the queue is full", retry_after_s=60, operator="group_norm_backward"),
    DeadlineExceeded("a frame did not come in time", operator="group_norm_backward"),
]


@pytest.mark.parametrize("is_async", [False, True], ids=["threads", "asyncio"])
def test_a_retry_sends_the_operands_as_they_were_though_results_go_into_one_of_them(is_async: bool) -> None:
    """The first server is lost half-way through its reply; `out` is an operand's own array."""
    sent: list[bytes] = []

    def execute(frames: Any, context: Context) -> Iterator[Any]:
        record, request = read_header(frames)
        wanted = decoded(record, request)
        operand = record.param_index("grad_out")
        sent.append(b"".join(f.chunk.data for f in frames if f.chunk.operand == operand))
        message, follow = response(record, wanted, chunk_from_bytes=2**16)
        yield header_frame(record, message)
        for place, data in follow:
            yield chunk_frame(place, 0, bytes(data)[: 2**16])
            if len(sent) == 1:
                context.abort(grpc.StatusCode.UNAVAILABLE, "lost")
            yield chunk_frame(place, 2**16, bytes(data)[2**16 :])

    call = group_norm(hxw=10_000)
    call["output_mask"] = (True, False, False)
    before = call["grad_out"].tobytes()
    out = {"grad_input": call["grad_out"]}
    policy = RetryPolicy(initial_backoff_s=0.001)

    async def work(address: str) -> Any:
        async with AsyncClient(address, timeout_s=20, stream_from_bytes=STREAMED, retry=policy) as client:
            return await client.group_norm_backward(**call, out=out)

    with fake_service(execute=execute) as service:
        if is_async:
            grads = asyncio.run(work(service.address))
        else:
            with Client(service.address, timeout_s=20, stream_from_bytes=STREAMED, retry=policy) as client:
                grads = client.group_norm_backward(**call, out=out)
    assert grads.info.tries == 2
    assert sent[0] == before
    assert sent[1] == before, "the retry sent what the first reply had left behind"
    assert grads.grad_input is call["grad_out"]
    assert not grads.grad_input.any()


@pytest.mark.parametrize("is_async", [False, True], ids=["threads", "asyncio"])
def test_an_upload_that_passes_the_deadline_of_its_try_is_sent_again_from_its_start(is_async: bool) -> None:
    """The first server reads one frame of 17 and no more, so that the upload stands still."""
    received: list[dict[int, list[bytes]]] = []
    end = threading.Event()

    def stall(frames: Any, context: Context) -> Iterator[Any]:
        read_header(frames)
        end.wait(30)
        yield from ()

    def take(frames: Any, context: Context) -> Iterator[Any]:
        record, request = read_header(frames)
        found: dict[int, list[bytes]] = {}
        for frame in frames:
            chunk = frame.chunk
            assert chunk.offset == sum(map(len, found.get(chunk.operand, [])))
            found.setdefault(chunk.operand, []).append(chunk.data)
        received.append(found)
        message, follow = response(record, decoded(record, request), chunk_from_bytes=1)
        yield header_frame(record, message)
        for operand, data in follow:
            yield chunk_frame(operand, 0, bytes(data))

    call = group_norm(n=2, c=64, hxw=16_384)
    policy = RetryPolicy(try_timeout_s=5.0)

    async def work(targets: list[str]) -> Any:
        async with AsyncClient(targets, timeout_s=30, retry=policy) as client:
            return await client.group_norm_backward(**call)

    with fake_service(execute=stall) as stuck, fake_service(execute=take) as good:
        targets = [stuck.address, good.address]
        if is_async:
            grads = asyncio.run(work(targets))
        else:
            with Client(targets, timeout_s=30, retry=policy) as client:
                grads = client.group_norm_backward(**call)
        end.set()
    assert grads.info.tries >= 2
    sent = [b"".join(chunks) for chunks in received[-1].values()]
    assert sent == [call["grad_out"].tobytes(), call["input"].tobytes()]


def calls(
    is_async: bool, address: str, times: int, call: dict[str, Any], policy: RetryPolicy = RETRY
) -> list[Any]:
    """Makes the same call so many times, one after the other: results, or errors."""

    async def work() -> list[Any]:
        async with AsyncClient(address, timeout_s=30, retry=policy) as client:
            return await client.run_many(
                client.group_norm_backward, [call] * times, concurrency=1, on_error="return"
            )

    if is_async:
        return asyncio.run(asyncio.wait_for(work(), 60))
    with Client(address, timeout_s=30, retry=policy) as client:
        return client.run_many(client.group_norm_backward, [call] * times, concurrency=1, on_error="return")


@pytest.mark.parametrize("is_async", [False, True], ids=["threads", "asyncio"])
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda error: type(error).__name__)
def test_a_refusal_in_the_middle_of_an_upload_is_raised_as_the_server_gave_it(
    refusal: NpugradError, is_async: bool
) -> None:
    """The server reads two frames of 17 and refuses, while more are being sent."""

    def execute(frames: Any, context: Context) -> Iterator[Any]:
        read_header(frames)
        next(frames)
        yield from ()
        abort_with(context, refusal)

    with fake_service(execute=execute) as service:
        found = calls(is_async, service.address, 40, group_norm(n=2, c=64, hxw=16_384))
    assert {type(error) for error in found} == {type(refusal)}, found
    for error in found:
        assert (str(error), error.operator, error.request_id) == (str(refusal), refusal.operator, "abc123")
        assert error.tries == 1
        for name in ("code", "operand", "retry_after_s"):
            assert getattr(error, name, None) == getattr(refusal, name, None)
    assert len(service.methods) == 40, "a call was sent again that no retry helps"


def test_a_refusal_in_the_middle_of_an_upload_arrives_in_a_loop_that_has_much_to_do() -> None:
    def execute(frames: Any, context: Context) -> Iterator[Any]:
        read_header(frames)
        yield from ()
        abort_with(context, REFUSALS[0])

    async def work(address: str) -> list[Any]:
        async def keep_busy() -> None:
            while True:
                threading.Event().wait(0.01)  # as a step of somebody's training does: the loop stands still
                await asyncio.sleep(0)

        busy = asyncio.ensure_future(keep_busy())
        try:
            async with AsyncClient(address, timeout_s=30) as client:
                call = group_norm(n=2, c=64, hxw=16_384)
                return await client.run_many(client.group_norm_backward, [call] * 8, on_error="return")
        finally:
            busy.cancel()

    with fake_service(execute=execute) as service:
        found = asyncio.run(asyncio.wait_for(work(service.address), 60))
    assert {(type(error), str(error)) for error in found} == {(InvalidOperand, str(REFUSALS[0]))}


@pytest.mark.parametrize("is_told", [True, False], ids=["late", "never"])
def test_the_status_of_a_stream_that_ended_under_a_write_is_waited_for_but_not_forever(
    is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wait passes as if the loop had stood still in it."""
    monkeypatch.setattr(_async_transport, "_STATUS_WAIT_S", 0.0)

    async def work() -> None:
        ended = EndedUnderAWrite()
        stream = _async_transport._Stream(ended)
        ended.end(grpc.StatusCode.INTERNAL, "Internal error from Core")
        if is_told:
            asyncio.get_running_loop().call_later(0, ended.end, grpc.StatusCode.ABORTED, "its own word")
        async for _ in stream.replies():
            pass

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        asyncio.run(asyncio.wait_for(work(), 20))
    said = "its own word" if is_told else "Internal error from Core"
    assert caught.value.details() == said


class EndedUnderAWrite:
    """A stream of grpc.aio that has ended: it calls back for each status, and raises the first."""

    def __init__(self) -> None:
        self._statuses: list[tuple[grpc.StatusCode, str]] = []
        self._callbacks: list[Callable[[EndedUnderAWrite], None]] = []

    def add_done_callback(self, callback: Callable[[EndedUnderAWrite], None]) -> None:
        self._callbacks.append(callback)

    def end(self, code: grpc.StatusCode, details: str) -> None:
        self._statuses.append((code, details))
        for callback in self._callbacks:
            callback(self)

    async def code(self) -> grpc.StatusCode:
        return self._statuses[-1][0]

    async def details(self) -> str:
        return self._statuses[-1][1]

    async def initial_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata()

    trailing_metadata = initial_metadata

    def __aiter__(self) -> EndedUnderAWrite:
        return self

    async def __anext__(self) -> Any:
        code, details = self._statuses[0]
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


@pytest.mark.parametrize("is_async", [False, True], ids=["threads", "asyncio"])
def test_results_count_that_a_server_gives_before_it_has_read_the_upload_to_its_end(is_async: bool) -> None:
    def execute(frames: Any, context: Context) -> Iterator[Any]:
        record, request = read_header(frames)
        message, follow = response(record, decoded(record, request), chunk_from_bytes=1)
        yield header_frame(record, message)
        for operand, data in follow:
            yield chunk_frame(operand, 0, bytes(data))

    with fake_service(execute=execute) as service:
        found = calls(is_async, service.address, 20, group_norm(n=2, c=64, hxw=16_384))
    assert [getattr(grads, "grad_input", grads).shape for grads in found] == [(2, 64, 16_384)] * 20


@pytest.mark.parametrize("is_async", [False, True], ids=["threads", "asyncio"])
def test_an_upload_whose_server_is_lost_says_so(is_async: bool) -> None:
    def execute(frames: Any, context: Context) -> Iterator[Any]:
        read_header(frames)
        yield from ()
        context.abort(grpc.StatusCode.UNAVAILABLE, "gone for good")

    with fake_service(execute=execute) as service:
        brief = RetryPolicy(max_tries=2, retry_for_s=5.0, max_backoff_s=0.5)
        found = calls(is_async, service.address, 2, group_norm(n=2, c=64, hxw=16_384), brief)
    assert all(isinstance(error, ConnectError) and "gone for good" in str(error) for error in found), found
    assert min(error.tries for error in found) > 2


@pytest.mark.parametrize("is_async", [False, True], ids=["threads", "asyncio"])
def test_a_deadline_in_mid_upload_tells_how_much_had_gone(is_async: bool) -> None:
    """The server reads the header and a chunk and no more, so that a window's worth goes."""
    end = threading.Event()

    def stall(frames: Any, context: Context) -> Iterator[Any]:
        read_header(frames)
        next(frames)  # while it waits for this, the chunk passes at once, however little the window has grown
        end.wait(30)
        yield from ()

    call = group_norm(n=2, c=64, hxw=65_536)
    with fake_service(execute=stall) as service:
        policy = RetryPolicy(try_timeout_s=4.0, max_tries=1)
        (error,) = calls(is_async, service.address, 1, call, policy)
        end.set()
    assert isinstance(error, DeadlineExceeded)
    found = re.fullmatch(
        rf"group_norm_backward: the deadline of 4 s passed after ([0-9.]+) MiB of 64 MiB had been sent to "
        rf"{service.address} at ([0-9.]+) [KM]iB/s; at that rate the upload alone takes ([0-9.e+]+) s",
        str(error),
    )
    assert found, str(error)
    assert 0 < float(found[1]) < 64
    assert float(found[3]) > 4


def test_a_deadline_before_anything_has_gone_says_so() -> None:
    attempt = Attempt("op", "there:1", timeout_s=2, upload_bytes=3 * 2**29)
    assert attempt.late_text() == "the deadline of 2 s passed before any of 1.5 GiB had been sent to there:1"


def test_a_refused_task_lets_its_operands_go() -> None:
    def execute(frames: Any, context: Context) -> Iterator[Any]:
        read_header(frames)
        yield from ()
        abort_with(context, REFUSALS[0])

    async def work(address: str) -> None:
        released = asyncio.Event()
        call = group_norm(n=8, c=64, hxw=2**15)
        weakref.finalize(call["input"], released.set)
        async with AsyncClient(address, timeout_s=30) as client:
            error: BaseException | None = None
            try:
                await client.group_norm_backward(**call)
            except InvalidOperand as caught:
                error = caught.with_traceback(None)
            del call
            assert isinstance(error, InvalidOperand)
            await asyncio.wait_for(released.wait(), 20)  # held by whatever still waits to send them

    with fake_service(execute=execute) as service:
        asyncio.run(work(service.address))


def test_nothing_is_written_into_the_callers_array_after_a_cancelled_call_has_ended() -> None:
    call = group_norm(n=2, c=64, hxw=65_536)  # 32 MiB: filled in a thread, slowly, because of its strides
    mine = np.full((65_536, 64, 2), 9, np.float32).transpose()

    async def work(address: str) -> None:
        async with AsyncClient(address, timeout_s=30) as client:
            task = asyncio.ensure_future(client.group_norm_backward(**call, out={"grad_input": mine}))

            def until_begun() -> None:
                while mine[0, 0, 0] == 9 and not task.done():
                    os.sched_yield()

            await asyncio.to_thread(until_begun)
            task.cancel()
            await asyncio.wait([task])
            assert not mine.any(), "the call has ended, and its array is still being filled"

    with fake_service() as service:
        asyncio.run(asyncio.wait_for(work(service.address), 60))
