from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc.aio
import pytest

from npugrad.v1 import server_pb2
from npugrad_server.rpc.register import Garbage, register, tolerant_deserializer

if TYPE_CHECKING:
    from npugrad_server.rpc.register import Deserializer

SERVICE = server_pb2.DESCRIPTOR.services_by_name["ServerService"]


def test_good_bytes_become_a_message_and_bad_ones_garbage() -> None:
    parse = tolerant_deserializer(server_pb2.ListOperatorsRequest)
    message = server_pb2.ListOperatorsRequest(product=server_pb2.ListOperatorsRequest().product)
    assert parse(message.SerializeToString()) == message
    assert parse(b"\xff" * 5) == Garbage(5, "npugrad.v1.ListOperatorsRequest")


async def _handler(request: Any, context: Any) -> Any:
    return server_pb2.GetServerInfoResponse(version=repr(request))


def test_methods_and_handlers_must_be_the_same_set() -> None:
    async def run() -> None:
        with pytest.raises(
            ValueError, match=r"found handlers \['GetServerInfo'\]; expected \['GetServerInfo', 'List"
        ):
            register(grpc.aio.server(), SERVICE, {"GetServerInfo": _handler})

    asyncio.run(run())


def test_a_deserializer_can_be_swapped_for_one_method() -> None:
    async def run() -> None:
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

    asyncio.run(run())
