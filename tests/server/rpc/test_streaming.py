from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npugrad.errors import MalformedTensor
from npugrad.frames import Chunk, encode_chunk
from npugrad.ops import get_operator
from npugrad.registry import REGISTRY
from npugrad_server.rpc.funnel import RpcCall
from npugrad_server.rpc.pace import PaceLimits
from npugrad_server.rpc.register import register
from npugrad_server.rpc.streaming import Frames
from npugrad_server.rpc.upload import Upload

RECORD = get_operator("group_norm_backward")
GRAD_OUT, INPUT, MEAN = (RECORD.param_index(name) for name in ("grad_out", "input", "mean"))


@given(st.data())
def test_exactly_the_sequences_that_tile_every_operand_are_taken(data: st.DataObject) -> None:
    """Against a model that keeps the bytes themselves."""
    announced = {name: data.draw(st.integers(0, 12), name) for name in ("grad_out", "input")}
    frames = data.draw(
        st.lists(st.tuples(st.sampled_from([GRAD_OUT, INPUT]), st.integers(0, 12), st.integers(0, 6)))
    )
    upload = Upload(RECORD, announced)
    stored = {RECORD.param_index(name): [False] * nbytes for name, nbytes in announced.items()}
    for operand, offset, nbytes in frames:
        room = stored[operand]
        legal = nbytes >= 1 and offset == sum(room) and offset + nbytes <= len(room)
        if not legal:
            with pytest.raises(MalformedTensor):
                upload.place(operand, offset, nbytes)
            continue
        upload.place(operand, offset, nbytes)
        room[offset : offset + nbytes] = [True] * nbytes
    assert upload.missing_bytes == sum(room.count(False) for room in stored.values())
    if upload.missing_bytes:
        with pytest.raises(MalformedTensor):
            upload.finish()
    else:
        upload.finish()


# ---------------------------------------------------------------------------------------------- frames


def serve(handle: Callable[[Any, Any], Coroutine[Any, Any, None]], use: Callable[[Any], None]) -> None:
    """Serves Execute by a handler, and uses a blocking stub of it in a thread."""
    service = REGISTRY.backward

    def connect(port: int) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            use(channel.stream_stream(f"/{service.full_name}/Execute", bytes, bytes))

    async def run() -> None:
        server = grpc.aio.server()
        register(server, service, dict.fromkeys(service.methods_by_name, handle))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        await asyncio.to_thread(connect, port)
        await server.stop(None)

    asyncio.run(run())


def test_frames_take_no_task_each() -> None:
    count, echoed, tasks = 200, 0, 0

    async def handle(_: Any, context: Any) -> None:
        nonlocal echoed

        def note(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
            nonlocal tasks
            tasks += 1
            return asyncio.Task(coroutine, loop=loop, **options)

        asyncio.get_running_loop().set_task_factory(note)
        with Frames(RpcCall(context, "Execute", "id"), PaceLimits(60), PaceLimits(60)) as frames:
            while (frame := await frames.read()) is not None:
                await frames.write(frame)
                echoed += 1

    def use(execute: Any) -> None:
        sent = [encode_chunk(Chunk(1, number, b"content")) for number in range(count)]
        assert list(execute(iter(sent), timeout=60)) == sent

    serve(handle, use)
    assert echoed == count
    assert tasks < count / 10
