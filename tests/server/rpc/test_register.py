from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc.aio
import pytest

from npugrad.frames import Chunk
from npugrad.v1 import backward_pb2, server_pb2
from npugrad_server.rpc.register import Garbage, register, tolerant_deserializer

if TYPE_CHECKING:
    from npugrad_server.rpc.register import Deserializer

BACKWARD = backward_pb2.DESCRIPTOR.services_by_name["BackwardService"]
SERVICE = server_pb2.DESCRIPTOR.services_by_name["ServerService"]


def test_good_bytes_become_a_message_and_bad_ones_garbage() -> None:
    parse = tolerant_deserializer(server_pb2.ListOperatorsRequest)
    message = server_pb2.ListOperatorsRequest(product=server_pb2.ListOperatorsRequest().product)
    assert parse(message.SerializeToString()) == message
    assert parse(b"\xff" * 5) == Garbage(5, "npugrad.v1.ListOperatorsRequest")


async def _handler(request: Any, context: Any) -> Any:
    return server_pb2.GetServerInfoResponse(version=repr(await context.read()))


async def test_methods_and_handlers_must_be_the_same_set() -> None:
    with pytest.raises(
        ValueError, match=r"found handlers \['GetServerInfo'\]; expected \['GetServerInfo', 'List"
    ):
        register(grpc.aio.server(), SERVICE, {"GetServerInfo": _handler})


async def test_a_deserializer_can_be_swapped_for_one_method() -> None:
    server = grpc.aio.server()
    swapped: dict[str, Deserializer] = {"GetServerInfo": lambda data: f"raw {data!r}"}
    register(server, SERVICE, {"GetServerInfo": _handler, "ListOperators": _handler}, swapped)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: Any = channel.unary_unary(
            f"/{SERVICE.full_name}/GetServerInfo",
            response_deserializer=server_pb2.GetServerInfoResponse.FromString,
        )
        answer = await call(b"\xff\xff", timeout=20)
    await server.stop(None)
    assert answer.version == repr("raw b'\\xff\\xff'")


def test_a_stream_has_chunks_and_messages_both_ways() -> None:
    header = backward_pb2.ExecuteRequest(header=backward_pb2.ExecuteHeader())
    reply = backward_pb2.ExecuteResponse(header=backward_pb2.ExecuteResponseHeader())
    chunk = backward_pb2.Chunk(operand=3, offset=2**40, data=b"content")
    came: list[Any] = []

    async def handle(_: Any, context: Any) -> None:
        while (frame := await context.read()) is not grpc.aio.EOF:
            came.append(frame)
        await context.write(reply)
        await context.write(Chunk(3, 2**40, memoryview(b"content")))

    async def run() -> list[Any]:
        server = grpc.aio.server()
        register(server, BACKWARD, dict.fromkeys(BACKWARD.methods_by_name, handle))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call: Any = channel.stream_stream(
                f"/{BACKWARD.full_name}/Execute",
                response_deserializer=backward_pb2.ExecuteResponse.FromString,
            )
            whole = backward_pb2.ExecuteRequest(chunk=chunk).SerializeToString()
            frames = [header.SerializeToString(), whole, whole[:-1], b""]
            answered = [frame async for frame in call(iter(frames), timeout=20)]
        await server.stop(None)
        return answered

    assert asyncio.run(run()) == [reply, backward_pb2.ExecuteResponse(chunk=chunk)]
    assert came[1]._replace(data=bytes(came[1].data)) == Chunk(3, 2**40, b"content")
    assert [came[0], *came[2:]] == [
        header,
        Garbage(len(chunk.SerializeToString()) + 1, "npugrad.v1.ExecuteRequest"),
        backward_pb2.ExecuteRequest(),
    ]
