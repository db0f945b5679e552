"""Tries that end half-way: what is sent again, and what becomes of the caller's arrays meanwhile."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from tests.client.fake_service import (
    STREAMED,
    Context,
    chunk_frame,
    decoded,
    fake_service,
    group_norm,
    header_frame,
    read_header,
    response,
)

from npugrad_client import AsyncClient, Client, RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.mark.parametrize("is_async", [False, True], ids=["threads", "asyncio"])
def test_a_retry_sends_the_operands_as_they_were_though_results_go_into_one_of_them(is_async: bool) -> None:
    """The first server is lost half-way through its reply; `out` is an operand's own array."""
    sent: list[bytes] = []

    def execute(frames: Any, context: Context) -> Iterator[Any]:
        spec, request = read_header(frames)
        wanted = decoded(spec, request)
        operand = spec.param_index("grad_out")
        sent.append(b"".join(f.chunk.data for f in frames if f.chunk.operand == operand))
        message, follow = response(spec, wanted, chunk_from_bytes=2**16)
        yield header_frame(spec, message)
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
        spec, request = read_header(frames)
        found: dict[int, list[bytes]] = {}
        for frame in frames:
            chunk = frame.chunk
            assert chunk.offset == sum(map(len, found.get(chunk.operand, [])))
            found.setdefault(chunk.operand, []).append(chunk.data)
        received.append(found)
        message, follow = response(spec, decoded(spec, request), chunk_from_bytes=1)
        yield header_frame(spec, message)
        for operand, data in follow:
            yield chunk_frame(operand, 0, bytes(data))

    call = group_norm(n=2, c=64, hxw=16_384)
    policy = RetryPolicy(try_timeout_s=2.0)

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
    assert grads.info.tries == 2
    sent = [b"".join(chunks) for chunks in received[-1].values()]
    assert sent == [call["grad_out"].tobytes(), call["input"].tobytes()]


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
