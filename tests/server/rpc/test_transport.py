"""What connections may do, seen by a client that speaks HTTP/2 by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from tests.http2 import ACK, GOAWAY, HEADERS, PING, PREFACE, SETTINGS, frame, message, start_call

from npugrad_server.config import LEAST_MESSAGE_BYTES, ServerSettings
from npugrad_server.rpc.transport import ping_options, server_options

TIMEOUT_S = 30
PATH = b"/test/Wait"
CALL = start_call(PATH) + frame(0, 1, 1, message(0, b""))
"""A connection with a call that is never answered."""
NO_CALL = PREFACE + frame(SETTINGS, 0, 0)


@asynccontextmanager
async def connected(options: Iterable[tuple[str, int]], start: bytes) -> AsyncIterator[Any]:
    """A connection to a server with these options, on which something was said."""

    async def wait(request: bytes, context: Any) -> bytes:
        await asyncio.Event().wait()
        return b""

    server = grpc.aio.server(options=tuple(options))
    methods: Any = {"Wait": grpc.unary_unary_rpc_method_handler(wait)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(start)
        yield reader, writer
    finally:
        writer.close()
        await server.stop(None)


async def answered_pings(options: Iterable[tuple[str, int]], start: bytes, number: int, gap_s: float) -> Any:
    """Pings a server, each time after the last answer and a gap.

    Returns:
        How many were answered, and what the server said when it ended the connection, or nothing.
    """
    async with connected(options, start) as (reader, writer):
        for done in range(number):
            writer.write(frame(PING, 0, 0, bytes(8)))
            goodbye = await _answer(reader)
            if goodbye:
                return done, goodbye
            await asyncio.sleep(gap_s)  # the time between pings is what this is about
        return number, b""


async def _answer(reader: asyncio.StreamReader) -> bytes:
    """Reads until a ping is answered; what the server said if it ends the connection instead."""
    while True:
        head = await reader.readexactly(9)
        payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
        if head[3] == PING and head[4] & ACK:
            return b""
        if head[3] == GOAWAY:
            return payload[8:]


def ping(*arguments: Any) -> Any:
    return asyncio.run(asyncio.wait_for(answered_pings(*arguments), TIMEOUT_S))


@pytest.mark.slow
@pytest.mark.parametrize("start", [CALL, NO_CALL], ids=["quiet call", "no call"])
def test_a_quiet_connection_may_be_pinged_again_and_again_at_the_interval(start: bytes) -> None:
    """Scaled down: eight pings, 0.15 s apart, where one in 0.1 s is allowed."""
    assert ping(ping_options(0.1), start, 8, 0.15) == (8, b"")


@pytest.mark.parametrize("start", [CALL, NO_CALL], ids=["quiet call", "no call"])
def test_pings_that_come_too_early_end_the_connection(start: bytes) -> None:
    options = server_options(ServerSettings())
    count, goodbye = ping(options, start, 20, 0)
    # What the server sends of its own at the start forgives the pings before it.
    assert 3 <= count <= 6
    assert goodbye == b"too_many_pings"


def test_a_ping_in_half_a_minute_is_allowed() -> None:
    options = server_options(ServerSettings())
    assert set(ping_options(30)) < set(options)


@pytest.mark.slow
def test_a_call_on_a_connection_past_its_age_is_cut_off_after_its_grace() -> None:
    async def end(options: Iterable[tuple[str, int]]) -> bytes:
        async with connected(options, CALL) as (reader, _):
            return bytes(await reader.read())

    settings = ServerSettings(max_connection_age_s=1, max_connection_age_grace_s=0.1)
    said = asyncio.run(asyncio.wait_for(end(server_options(settings)), TIMEOUT_S))
    assert b"max_age" in said


def refusal(*data: bytes) -> bytes:
    """What a server says of a call on its first connection, its trailers, after these bytes came."""

    async def ask() -> bytes:
        async with connected(server_options(ServerSettings()), b"".join(data)) as (reader, _):
            while True:
                head = await reader.readexactly(9)
                payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
                if head[3] == HEADERS:
                    return bytes(payload)

    return asyncio.run(asyncio.wait_for(ask(), TIMEOUT_S))


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate"])
def test_compressed_requests_are_refused_by_their_headers(encoding: bytes) -> None:
    """No byte of a message has come, so none can have been inflated."""
    said = refusal(start_call(PATH, (b"grpc-encoding", encoding)))
    assert b"12" in said  # UNIMPLEMENTED
    assert b"Compression algorithm '" + encoding + b"' is disabled" in said


def test_compressed_message_without_an_encoding_is_refused() -> None:
    said = refusal(start_call(PATH), frame(0, 1, 1, message(3, b"abc", compressed=1)))
    assert b"Compression bit set but no encoding configured" in said


def test_message_beyond_the_limit_is_refused_by_its_length() -> None:
    """The client hears of it before it has sent the message."""
    limit = LEAST_MESSAGE_BYTES
    assert b"(%d vs. %d)" % (limit + 1, limit) in refusal(
        start_call(PATH), frame(0, 0, 1, message(limit + 1, b""))
    )
