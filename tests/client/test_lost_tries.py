"""Tries that end half-way: what is sent again, and what becomes of the caller's arrays meanwhile."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from tests.client.both import BOTH, Make, call_once, caught
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
    stream_zeros,
)

from npugrad.errors import NpugradError
from npugrad_client import (
    AsyncClient,
    ConnectError,
    DeadlineExceeded,
    InvalidOperand,
    MalformedRequest,
    RetryPolicy,
    ServerBusy,
    _async_transport,
)
from npugrad_client._attempt import Attempt

REFUSALS = [
    InvalidOperand("group: found 3", code=161002, operator="group_norm_backward"),
    MalformedRequest("chunk: found 9; expected 1", operator="group_norm_backward", operand="input"),
    ServerBusy("the queue is full", retry_after_s=60, operator="group_norm_backward"),
    DeadlineExceeded("a frame did not come in time", operator="group_norm_backward"),
]
QUICK = RetryPolicy(max_tries=2, initial_backoff_s=0.001, max_backoff_s=0.001)


def large(mib: int = 6) -> dict[str, Any]:
    """A call whose upload takes so many chunks: more than the 2 that pass while the server does not read."""
    return group_norm(n=2, c=64, hxw=1024 * mib)


@BOTH
def test_a_retry_sends_the_operands_as_they_were_though_results_go_into_one_of_them(make: Make) -> None:
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
    with fake_service(execute=execute) as service:
        grads = call_once(
            make, service.address, {**call, "out": out}, stream_from_bytes=STREAMED, retry=QUICK
        )
    assert grads.info.tries == 2
    assert sent[0] == before
    assert sent[1] == before, "the retry sent what the first reply had left behind"
    assert grads.grad_input is call["grad_out"]
    assert not grads.grad_input.any()


@BOTH
def test_an_upload_that_passes_the_deadline_of_its_try_is_sent_again_from_its_start(make: Make) -> None:
    """The first server reads one frame of 7 and no more, so that the upload stands still."""
    received: list[dict[int, list[bytes]]] = []
    end = threading.Event()

    def stall(frames: Any, context: Context) -> Iterator[Any]:
        read_header(frames)
        end.wait(30)
        yield from ()

    def take(frames: Any, context: Context) -> Iterator[Any]:
        header = next(frames)
        found: dict[int, list[bytes]] = {}
        for frame in frames:
            chunk = frame.chunk
            assert chunk.offset == sum(map(len, found.get(chunk.operand, [])))
            found.setdefault(chunk.operand, []).append(chunk.data)
        received.append(found)
        yield from stream_zeros(iter([header]), context)

    call = large()
    # So many tries that a machine which stands still for a while cannot use them up.
    policy = RetryPolicy(try_timeout_s=2.0, max_tries=20)
    with fake_service(execute=stall) as stuck, fake_service(execute=take) as good:
        grads = call_once(make, [stuck.address, good.address], call, retry=policy)
        end.set()
    assert grads.info.tries >= 2
    sent = [b"".join(chunks) for chunks in received[-1].values()]
    assert sent == [call["grad_out"].tobytes(), call["input"].tobytes()]


@BOTH
@pytest.mark.parametrize(
    ("refusal", "times"),
    [*((refusal, 5) for refusal in REFUSALS), pytest.param(REFUSALS[0], 40, marks=pytest.mark.deep)],
    ids=lambda value: type(value).__name__ if isinstance(value, NpugradError) else str(value),
)
def test_a_refusal_in_the_middle_of_an_upload_is_raised_as_the_server_gave_it(
    refusal: NpugradError, make: Make, times: int
) -> None:
    """The server reads two frames of 7 and refuses, while more are being sent."""

    def execute(frames: Any, context: Context) -> Iterator[Any]:
        read_header(frames)
        next(frames)
        yield from ()
        abort_with(context, refusal)

    call = large()
    with fake_service(execute=execute) as service, make(service.address, timeout_s=30) as client:
        found = [caught(lambda: client.group_norm_backward(**call)) for _ in range(times)]
    assert {type(error) for error in found} == {type(refusal)}, found
    for error in found:
        assert (str(error), error.operator, error.request_id) == (str(refusal), refusal.operator, "abc123")
        assert error.tries == 1
        for name in ("code", "operand", "retry_after_s"):
            assert getattr(error, name, None) == getattr(refusal, name, None)
    assert len(service.methods) == times, "a call was sent again that no retry helps"


def test_a_refusal_in_the_middle_of_an_upload_arrives_in_a_loop_that_has_much_to_do() -> None:
    async def work(address: str) -> list[Any]:
        async def keep_busy() -> None:
            while True:
                threading.Event().wait(0.01)  # as a step of somebody's training does: the loop stands still
                await asyncio.sleep(0)

        busy = asyncio.ensure_future(keep_busy())
        try:
            async with AsyncClient(address, timeout_s=30) as client:
                return await client.run_many(client.group_norm_backward, [large()] * 8, on_error="return")
        finally:
            busy.cancel()

    with fake_service(before=lambda context: abort_with(context, REFUSALS[0])) as service:
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


@BOTH
def test_results_count_that_a_server_gives_before_it_has_read_the_upload_to_its_end(make: Make) -> None:
    def execute(frames: Any, context: Context) -> Iterator[Any]:
        yield from stream_zeros(iter([next(frames)]), context)

    call = large()
    with fake_service(execute=execute) as service, make(service.address, timeout_s=30) as client:
        for _ in range(5):
            assert client.group_norm_backward(**call).grad_input.shape == (2, 64, 6144)


@BOTH
@pytest.mark.parametrize(("losses", "retry_for_s"), [(3, 60.0), (100, 0.0)], ids=["a while", "for good"])
def test_an_upload_whose_server_is_lost_is_sent_again_or_says_so(
    make: Make, losses: int, retry_for_s: float
) -> None:
    """However often, while there is time for it: here until the server is back, or not at all."""
    tries: list[None] = []

    def lose(context: Context) -> None:
        tries.append(None)
        if len(tries) <= losses:
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone for good")

    policy = RetryPolicy(max_tries=2, retry_for_s=retry_for_s, max_backoff_s=0.001)
    with fake_service(before=lose) as service:
        found = caught(lambda: call_once(make, service.address, large(), retry=policy))
    if retry_for_s:
        assert found.info.tries == 1 + losses > policy.max_tries
    else:
        assert isinstance(found, ConnectError), found
        assert "gone for good" in str(found)


@BOTH
def test_a_deadline_in_mid_upload_tells_how_much_had_gone(make: Make) -> None:
    """The server reads the header and two chunks, and says itself that the deadline has passed.

    What gRPC is given once it knows that, and before the client does, it drops: a few chunks count as sent.
    """

    def late(frames: Any, context: Context) -> Iterator[Any]:
        for _ in range(3):
            next(frames)  # a chunk counts as sent when gRPC asks for the one after it
        yield from ()
        context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    call, policy = large(mib=48), RetryPolicy(try_timeout_s=30.0, max_tries=1)
    with fake_service(execute=late) as service:
        error = caught(lambda: call_once(make, service.address, call, retry=policy))
    assert isinstance(error, DeadlineExceeded)
    found = re.fullmatch(
        rf"group_norm_backward: the deadline of 30 s passed after ([0-9.]+) MiB of 48 MiB had been sent to "
        rf"{service.address} at ([0-9.]+) ([KMG])iB/s; at that rate the upload alone takes ([0-9.e+-]+) s",
        str(error),
    )
    assert found, str(error)
    assert 0 < float(found[1]) < 48
    rate = float(found[2]) * {"K": 2**-10, "M": 1, "G": 2**10}[found[3]]
    assert float(found[4]) == pytest.approx(48 / rate, rel=0.06)  # of two digits


def test_a_deadline_before_anything_has_gone_says_so() -> None:
    attempt = Attempt("op", "there:1", timeout_s=2, upload_bytes=3 * 2**29)
    assert attempt.late_text() == "the deadline of 2 s passed before any of 1.5 GiB had been sent to there:1"


def test_nothing_is_written_into_the_callers_array_after_a_cancelled_call_has_ended() -> None:
    call = group_norm(n=2, c=64, hxw=32_768)  # 16 MiB: filled in a thread, slowly, because of its strides
    mine = np.full((32_768, 64, 2), 9, np.float32).transpose()

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
