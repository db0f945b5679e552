"""Headers whose requests stay serialized, against the frames that protobuf makes of them."""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.calls import header_frame, sample
from tests.synthetic.record import REGISTRY as SYNTHETIC

from npugrad.errors import MalformedRequest
from npugrad.frames import Chunk
from npugrad.ops import get_operator
from npugrad.registry import REGISTRY
from npugrad.v1 import backward_pb2, server_pb2
from npugrad.varint import encode_varint
from npugrad_server.rpc.headers import Header, header_decoder
from npugrad_server.rpc.register import Garbage, frame_deserializer, register, tolerant_deserializer

NORM = get_operator("group_norm_backward")
PARSE = frame_deserializer(REGISTRY.execute_request)
DECODE = header_decoder(REGISTRY, PARSE)


def frame_of(message: Any) -> bytes:
    return bytes(header_frame(NORM, message).SerializeToString())


def delimited(number: int, data: bytes) -> bytes:
    return encode_varint(number << 3 | 2) + encode_varint(len(data)) + data


@pytest.mark.parametrize("registry", [REGISTRY, SYNTHETIC], ids=["contract", "synthetic"])
def test_the_header_of_any_operator_keeps_its_request_serialized(registry: Any) -> None:
    decode = header_decoder(registry, frame_deserializer(registry.execute_request))
    for name, record in registry.records.items():
        message = registry.requests[name]()
        message.options.label = "x" * 50
        data = header_frame(record, message).SerializeToString()
        header = decode(data)
        assert isinstance(header, Header)
        assert header.record is record
        assert header.data is data
        assert header.data[header.start :] == message.SerializeToString()
        assert header.read() == message


def test_other_frames_are_what_they_were() -> None:
    chunk = backward_pb2.ExecuteRequest(chunk=backward_pb2.Chunk(operand=1, data=b"ab"))
    found = DECODE(chunk.SerializeToString())
    assert isinstance(found, Chunk)
    assert (found.operand, bytes(found.data)) == (1, b"ab")
    assert DECODE(b"") == backward_pb2.ExecuteRequest()
    empty = backward_pb2.ExecuteRequest(header=backward_pb2.ExecuteHeader())
    assert DECODE(empty.SerializeToString()) == empty
    assert DECODE(b"\xff" * 7) == Garbage(7, "npugrad.v1.ExecuteRequest")
    parse, message = tolerant_deserializer(server_pb2.ListOperatorsRequest), server_pb2.ListOperatorsRequest()
    assert parse(message.SerializeToString()) == message
    assert parse(b"\xff" * 5) == Garbage(5, "npugrad.v1.ListOperatorsRequest")


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(delimited(1, delimited(99, b"")), id="an operator that is not known"),
        pytest.param(delimited(1, delimited(3, b"")) + delimited(1, delimited(3, b"")), id="two headers"),
        pytest.param(delimited(1, delimited(3, b"") + delimited(4, b"")), id="two calls"),
        pytest.param(delimited(1, delimited(3, b"") + b"\x98\x06\x01"), id="an unknown field"),
        pytest.param(b"\x0a\x82\x00\x1a\x00", id="a length in more bytes than it needs"),
        pytest.param(b"\x0a\x01\x1a\x00", id="a length that lies"),
        pytest.param(b"\x0a\x02\x1a\x05", id="a request that is cut off"),
        pytest.param(b"\x0a", id="no length"),
    ],
)
def test_what_is_not_plainly_a_header_is_left_to_protobuf(data: bytes) -> None:
    found = DECODE(data)
    assert not isinstance(found, Header)
    assert found == PARSE(data)


def test_a_request_that_does_not_parse_is_said_of_the_frame() -> None:
    header = DECODE(delimited(1, delimited(3, b"\x12\x05")))
    assert isinstance(header, Header)
    with pytest.raises(MalformedRequest, match="request: found 6 bytes that do not parse"):
        header.read()


@given(st.binary(max_size=6), st.integers(0, 400), st.integers(0, 4))
def test_a_header_means_what_protobuf_makes_of_it(patch: bytes, at: int, cut: int) -> None:
    data = bytearray(frame_of(sample().message(label="x")))
    data[at : at + cut] = patch
    found, expected = DECODE(bytes(data)), PARSE(bytes(data))
    if not isinstance(found, Header):
        assert found == expected
    elif isinstance(expected, Garbage):
        with pytest.raises(MalformedRequest, match=str(expected.nbytes)):
            found.read()
    else:
        assert expected.header.WhichOneof("call") == found.record.name
        assert found.read() == getattr(expected.header, found.record.name)


async def test_methods_and_handlers_must_be_the_same_set() -> None:
    service = server_pb2.DESCRIPTOR.services_by_name["ServerService"]
    told = r"found handlers \['GetServerInfo'\]; expected \['GetServerInfo', 'List"
    with pytest.raises(ValueError, match=told):
        register(grpc.aio.server(), service, {"GetServerInfo": None})  # type: ignore[dict-item]


async def test_a_stream_has_chunks_and_messages_both_ways() -> None:
    service = backward_pb2.DESCRIPTOR.services_by_name["BackwardService"]
    header = backward_pb2.ExecuteRequest(header=backward_pb2.ExecuteHeader())
    reply = backward_pb2.ExecuteResponse(header=backward_pb2.ExecuteResponseHeader())
    chunk = backward_pb2.Chunk(operand=3, offset=2**40, data=b"content")
    came: list[Any] = []

    async def handle(_: Any, context: Any) -> None:
        while (frame := await context.read()) is not grpc.aio.EOF:
            came.append(frame)
        await context.write(reply)
        await context.write(Chunk(3, 2**40, memoryview(b"content")))

    server = grpc.aio.server()
    register(server, service, dict.fromkeys(service.methods_by_name, handle))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: Any = channel.stream_stream(
            f"/{service.full_name}/Execute",
            response_deserializer=backward_pb2.ExecuteResponse.FromString,
        )
        whole = backward_pb2.ExecuteRequest(chunk=chunk).SerializeToString()
        frames = [header.SerializeToString(), whole, whole[:-1], b""]
        answered = [frame async for frame in call(iter(frames), timeout=20)]
    await server.stop(None)
    assert answered == [reply, backward_pb2.ExecuteResponse(chunk=chunk)]
    assert came[1]._replace(data=bytes(came[1].data)) == Chunk(3, 2**40, b"content")
    assert [came[0], *came[2:]] == [
        header,
        Garbage(len(chunk.SerializeToString()) + 1, "npugrad.v1.ExecuteRequest"),
        backward_pb2.ExecuteRequest(),
    ]
