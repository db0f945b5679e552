"""What connections may do, seen by a client that speaks HTTP/2 by hand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ByteSize
from tests.http2 import (
    ACK,
    DATA,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    SETTINGS,
    frame,
    message,
    start_call,
)

from npugrad_server.config import LEAST_MESSAGE_BYTES, ServerSettings
from npugrad_server.rpc.front_limits import FrontLimits
from npugrad_server.rpc.transport import GrpcServers, ping_options, server_options

TIMEOUT_S = 30
PATH = b"/test/Wait"
CALL = start_call(PATH) + frame(0, 1, 1, message(0, b""))
"""A connection with a call that is never answered."""
NO_CALL = PREFACE + frame(SETTINGS, 0, 0)


async def serving(options: Iterable[tuple[str, int]] = ()) -> tuple[grpc.aio.Server, int]:
    """A server whose calls are never answered, and its port."""

    async def wait(request: Any, context: Any) -> bytes:
        await asyncio.Event().wait()
        return b""

    server = grpc.aio.server(options=tuple(options))
    methods: Any = {
        "Wait": grpc.unary_unary_rpc_method_handler(wait),
        "Leave": grpc.stream_unary_rpc_method_handler(wait),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, port


@asynccontextmanager
async def connected(options: Iterable[tuple[str, int]], start: bytes) -> AsyncIterator[Any]:
    """A connection to a server with these options, on which something was said."""
    server, port = await serving(options)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(start)
        yield reader, writer
    finally:
        writer.close()
        await server.stop(None)


async def frame_of(reader: asyncio.StreamReader, *kinds: int) -> tuple[int, int, bytes]:
    """The next frame of one of these kinds: kind, flags and payload."""
    while True:
        head = await asyncio.wait_for(reader.readexactly(9), TIMEOUT_S)
        payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
        if head[3] in kinds:
            return head[3], head[4], payload


async def answered_pings(
    options: Iterable[tuple[str, int]], start: bytes, number: int, gap_s: float
) -> tuple[int, bytes]:
    """Pings a server, each time after the last answer and a gap.

    Returns:
        How many were answered, and what the server said when it ended the connection, or nothing.
    """
    async with connected(options, start) as (reader, writer):
        for done in range(number):
            writer.write(frame(PING, 0, 0, bytes(8)))
            kind, flags = PING, 0
            while kind == PING and not flags & ACK:
                kind, flags, payload = await frame_of(reader, PING, GOAWAY)
            if kind == GOAWAY:
                return done, payload[8:]
            await asyncio.sleep(gap_s)  # the time between pings is what this is about
        return number, b""


@pytest.mark.slow
@pytest.mark.parametrize("start", [CALL, NO_CALL], ids=["quiet call", "no call"])
async def test_a_quiet_connection_may_be_pinged_again_and_again_at_the_interval(start: bytes) -> None:
    """Scaled down: eight pings, 0.15 s apart, where one in 0.1 s is allowed."""
    assert await answered_pings(ping_options(0.1), start, 8, 0.15) == (8, b"")


@pytest.mark.parametrize("start", [CALL, NO_CALL], ids=["quiet call", "no call"])
async def test_pings_that_come_too_early_end_the_connection(start: bytes) -> None:
    options = server_options(ServerSettings())
    assert set(ping_options(30)) < set(options), "one in half a minute is allowed"
    count, goodbye = await answered_pings(options, start, 20, 0)
    # What the server sends of its own at the start forgives the pings before it.
    assert 3 <= count <= 6
    assert goodbye == b"too_many_pings"


@pytest.mark.slow
async def test_a_call_on_a_connection_past_its_age_is_cut_off_after_its_grace() -> None:
    settings = ServerSettings(max_connection_age_s=1, max_connection_age_grace_s=0.1)
    async with connected(server_options(settings), CALL) as (reader, _):
        assert b"max_age" in await asyncio.wait_for(reader.read(), TIMEOUT_S)


LIMIT = LEAST_MESSAGE_BYTES
GZIP, DEFLATE = (start_call(PATH, (b"grpc-encoding", name)) for name in (b"gzip", b"deflate"))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        # By their headers: no byte of a message has come, so none can have been inflated.
        (GZIP, b"Compression algorithm 'gzip' is disabled"),
        (DEFLATE, b"Compression algorithm 'deflate' is disabled"),
        (
            start_call(PATH) + frame(0, 1, 1, message(3, b"abc", compressed=1)),
            b"Compression bit set but no encoding configured",
        ),
        # By its length: the client hears of it before it has sent the message.
        (start_call(PATH) + frame(0, 0, 1, message(LIMIT + 1, b"")), b"(%d vs. %d)" % (LIMIT + 1, LIMIT)),
    ],
    ids=["gzip", "deflate", "no encoding", "too long"],
)
async def test_messages_that_are_compressed_or_too_long_are_refused(data: bytes, words: bytes) -> None:
    async with connected(server_options(ServerSettings()), data) as (reader, _):
        _, _, trailers = await frame_of(reader, HEADERS)
        assert words in trailers
        assert b"12" in trailers or b"algorithm" not in words  # UNIMPLEMENTED


async def test_of_a_call_that_nobody_reads_a_window_comes_and_no_more() -> None:
    """By itself, gRPC would ping now, and widen the window with the answer."""
    settings = ServerSettings(front_memory_bytes=ByteSize(2**29))
    window = FrontLimits.of(settings).window_bytes
    assert window == 2**17
    data = message(2**22, b"") + bytes(window - 5)
    async with connected(server_options(settings), start_call(b"/test/Leave")) as (reader, writer):
        _, _, told = await frame_of(reader, SETTINGS)
        assert b"\0\4" + window.to_bytes(4, "big") in told
        writer.write(frame(SETTINGS, ACK, 0))
        for at in range(0, window, 2**14):
            writer.write(frame(DATA, 0, 1, data[at : at + 2**14]))
            writer.write(frame(PING, 0, 0, bytes(8)))
            kind, flags, payload = await frame_of(reader, PING, GOAWAY)
            if kind == GOAWAY:
                pytest.fail(str(payload))
            assert flags & ACK, "the server pings"


@given(
    st.integers(2**25, 2**36),
    st.integers(1, 10**6),
    st.integers(LEAST_MESSAGE_BYTES, LEAST_MESSAGE_BYTES * 40),
)
def test_all_that_callers_may_take_is_the_front_memory(total: int, calls: int, message_bytes: int) -> None:
    total = max(total, 8 * message_bytes)
    given_ = {"front_memory_bytes": total, "max_calls": calls, "max_message_bytes": message_bytes}
    limits = FrontLimits.of(ServerSettings(**given_))  # type: ignore[arg-type]
    queries = limits.of_queries()
    windows = limits.window_bytes * (limits.calls + queries.calls)
    taken = limits.memory_bytes + queries.memory_bytes + windows + total // 32
    assert taken == limits.total_bytes == total
    assert limits.memory_bytes >= limits.call_bytes
    assert queries.memory_bytes >= queries.call_bytes
    assert 1 <= limits.calls <= calls


async def test_two_stops_whose_times_are_up_at_once_end_a_server_with_calls() -> None:
    """In gRPC, which each of them used to ask, that is a SIGSEGV, on a busy loop."""

    async def busy() -> None:
        while True:
            until = time.monotonic() + 0.004
            while time.monotonic() < until:
                pass
            await asyncio.sleep(0)

    work = asyncio.ensure_future(busy())
    for late_s in (0.004, 0.008, 0.012, 0.016):
        server, port = await serving()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(CALL)
        await reader.read(1)
        servers = GrpcServers(server)
        await asyncio.gather(servers.stop(0.1), servers.stop(0.1 + late_s))
        writer.close()
    work.cancel()
