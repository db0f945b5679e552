"""Clients that vanish, and bytes on the port that are no gRPC: nothing is leaked and nobody else notices."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from tests.calls import TIMEOUT_S, Sample, call_execute, fill
from tests.e2e.harness import case
from tests.e2e.service_address import service_address
from tests.fix_server import ServerProcess
from tests.http2 import PREFACE, frame, literal, message, start_call
from tests.operators import FLOYD, GROUP_NORM, MSDA
from tests.summary import Tally

from npugrad.v1 import backward_pb2_grpc
from npugrad_client import Client
from npugrad_client.errors import ConnectError

pytestmark = pytest.mark.usefixtures("unharmed")

SOCKET_TIMEOUT_S = 20.0


@pytest.fixture(scope="module")
def large() -> Sample:
    """About 2 MiB up in chunks, about 1 MiB down."""
    return fill(GROUP_NORM, GROUP_NORM.build(n=1, c=16, hxw=2**14, group=4))


def assert_lost(running: ServerProcess, made: Sample, **cut_after: float) -> None:
    """The client of a connection that is cut after so many bytes learns that it may try again."""
    with service_address(running.address, **cut_after) as carried:
        with (
            Client(carried.address, timeout_s=TIMEOUT_S, retry=None) as client,
            pytest.raises(ConnectError) as caught,
        ):
            getattr(client, made.record.name)(**made.arrays, **made.call.attrs)
        assert carried.cut.wait(SOCKET_TIMEOUT_S)
    assert caught.value.retryable


def cut_short(running: ServerProcess, since: int) -> int:
    """How many later calls of this operator the log says were cancelled, and not one that ended too early."""
    lines = [line for line in running.log_lines("call")[since:] if line.get("operator") == GROUP_NORM.name]
    assert not [line for line in lines if "end of the stream" in line.get("error", "")]
    return sum(line["status"] == "CANCELLED" for line in lines)


def test_clients_that_vanish_mid_stream(victim: ServerProcess, large: Sample, tally: Tally) -> None:
    """Their connections are reset after 32 different numbers of bytes, between header and last chunk.

    A reset also throws away what the server has not read yet, so not every call was seen with chunks, and on
    a busy machine few are: there are three rounds at most.
    """
    sent = sum(map(len, large.contents.values()))
    for _ in range(3):
        earlier = len(victim.log_lines("call"))
        for part in range(32):
            assert_lost(victim, large, up_bytes=1 + part * sent / 32)
            tally("hostile: connections reset", 1)
        end_s = time.monotonic() + 10
        while (seen := cut_short(victim, earlier)) < 8 and time.monotonic() < end_s:
            victim.info()  # a round trip, for the log to be written meanwhile
        if seen >= 8:
            return
    pytest.fail("the log tells of fewer than 8 calls in each of three rounds of 32")


def test_clients_that_vanish_while_they_are_answered(
    victim: ServerProcess, large: Sample, tally: Tally
) -> None:
    received = large.call.tensor("input").nbytes
    for part in range(8):
        assert_lost(victim, large, down_bytes=300 + part * received / 8)
        tally("hostile: connections reset", 1)


def test_clients_that_vanish_while_their_calls_run(
    victim: ServerProcess, legal: Mapping[str, Sample], tally: Tally
) -> None:
    """Everything was sent; some calls run, some wait in the queue, and nobody will read the results."""
    floyd = legal[FLOYD.name]
    everything = sum(frame.ByteSize() for frame in floyd.frames())
    with ExitStack() as stack:
        for _ in range(6):
            carried = stack.enter_context(service_address(victim.address, up_bytes=everything))
            channel = stack.enter_context(grpc.insecure_channel(carried.address))
            stub = backward_pb2_grpc.BackwardServiceStub(channel)
            replies = stub.Execute(floyd.frames(), timeout=TIMEOUT_S)
            assert carried.cut.wait(TIMEOUT_S)
            with pytest.raises(grpc.RpcError) as caught:
                list(replies)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            tally("hostile: connections reset", 1)


@pytest.mark.parametrize("way", ["cancel", "close"])
def test_clients_that_give_up_after_some_frames(
    way: str, victim: ServerProcess, legal: Mapping[str, Sample]
) -> None:
    """They say farewell, unlike the ones above."""
    for after in range(5):
        with case(f"{after} frames"):
            give_up(after, way, victim, legal)


def give_up(after: int, way: str, victim: ServerProcess, legal: Mapping[str, Sample]) -> None:
    reached, let_go = threading.Barrier(5), threading.Event()

    def frames(made: Sample) -> Iterator[Any]:
        yield from list(made.frames())[:after]
        reached.wait(TIMEOUT_S)
        let_go.wait(TIMEOUT_S)

    with victim.channel() as channel:
        stub = backward_pb2_grpc.BackwardServiceStub(channel)
        made = [legal[name] for name in (FLOYD.name, GROUP_NORM.name, MSDA.name, FLOYD.name)]
        calls = [stub.Execute(frames(sample), timeout=TIMEOUT_S) for sample in made]
        reached.wait(TIMEOUT_S)
        if way == "cancel":
            for call in calls:
                call.cancel()
        else:
            channel.close()
        let_go.set()
        for call in calls:
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
            assert caught.value.code() is grpc.StatusCode.CANCELLED


def test_a_vanished_client_leaves_its_neighbours_alone(victim: ServerProcess, large: Sample) -> None:
    """Streams of another connection run to their end, right, while eight connections are reset."""
    stop = threading.Event()
    wrong: list[int] = []
    rounds: list[int] = []

    def neighbour() -> None:
        with victim.channel() as channel:
            while not stop.is_set():
                if call_execute(channel, large.frames(chunk_bytes=50_000)).contents != expected:
                    wrong.append(1)
                rounds.append(1)

    expected = large.reference()
    beside = threading.Thread(target=neighbour)
    beside.start()
    try:
        for part in range(8):
            assert_lost(victim, large, up_bytes=1000 + part * 2**18)
    finally:
        stop.set()
        beside.join(TIMEOUT_S)
    assert rounds
    assert not wrong


# ----------------------------------------------------------------------------------- bytes that are no gRPC

UNARY = f"/npugrad.v1.BackwardService/{GROUP_NORM.rpc}".encode()
EXECUTE = b"/npugrad.v1.BackwardService/Execute"
GARBAGE = {
    "nothing": b"",
    "zeros": bytes(4096),
    "random": random.Random(1).randbytes(2**16),
    "http1": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "tls": bytes.fromhex("16030100c8010000c40303") + random.Random(2).randbytes(200),
    "half_preface": PREFACE[:11],
    "preface_and_random": PREFACE + random.Random(3).randbytes(2**14),
    "frame_too_long": PREFACE + b"\xff\xff\xff\0\0\0\0\0\1" + bytes(2**16),
    "unknown_frames": PREFACE + frame(4, 0, 0) + frame(0xEE, 0xFF, 7, b"x" * 99) * 100,
    "data_without_headers": PREFACE + frame(4, 0, 0) + frame(0, 1, 1, b"hello"),
    "broken_header_block": PREFACE + frame(4, 0, 0) + frame(1, 5, 1, b"\xff" * 200),
    "even_stream": PREFACE + frame(4, 0, 0) + frame(1, 5, 2, literal(b":path", b"/")),
    "window_overflow": PREFACE + frame(4, 0, 0) + frame(8, 0, 0, b"\x7f\xff\xff\xff") * 3,
    "pings": PREFACE + frame(4, 0, 0) + frame(6, 0, 0, bytes(8)) * 2000,
    "settings": PREFACE + frame(4, 0, 0, b"\0\3\0\0\0\1") * 2000,
    "resets": PREFACE + frame(4, 0, 0) + b"".join(frame(3, 0, i, bytes(4)) for i in range(1, 999, 2)),
    "message_cut": start_call(UNARY) + frame(0, 0, 1, message(1000, b"abc")),
    "message_huge": start_call(UNARY) + frame(0, 0, 1, message(2**32 - 1, b"abc")),
    "message_2_gib": start_call(UNARY) + frame(0, 0, 1, message(2**31 - 1, b"abc")),
    "message_compressed": start_call(UNARY) + frame(0, 1, 1, message(3, b"abc", compressed=1)),
    "message_flags": start_call(UNARY) + frame(0, 1, 1, message(3, b"abc", compressed=0xFF)),
    "message_twice": start_call(UNARY) + frame(0, 1, 1, message(0, b"") * 2),
    "stream_cut": start_call(EXECUTE) + frame(0, 0, 1, message(2**20, b"\n\0")),
    "stream_2_gib": start_call(EXECUTE) + frame(0, 0, 1, message(2**31 - 1, b"\n\0")),
}


def _send(running: ServerProcess, data: bytes) -> bytes:
    """Sends bytes and the end of the stream; what the server says until it hangs up."""
    host, _, port = running.address.rpartition(":")
    with socket.create_connection((host, int(port)), SOCKET_TIMEOUT_S) as connection:
        answer = b""
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(2**16):
                answer += part
        except OSError:
            pass  # it hung up while we were still talking
        return answer


def test_bytes_that_are_no_grpc(victim: ServerProcess) -> None:
    """The server hangs up on every one of them, and says nothing that is not HTTP/2."""
    for what, data in GARBAGE.items():
        for _ in range(5):
            with case(what):
                assert b"Traceback" not in _send(victim, data)


def test_hundreds_of_idle_connections(victim: ServerProcess, legal: Mapping[str, Sample]) -> None:
    """They say nothing, or half a preface, and stay; calls go on beside them."""
    host, _, port = victim.address.rpartition(":")
    made = legal[GROUP_NORM.name]
    with ExitStack() as stack:
        for index in range(300):
            idle = stack.enter_context(socket.create_connection((host, int(port)), SOCKET_TIMEOUT_S))
            idle.sendall(PREFACE[: index % 20])
        with victim.channel() as channel:
            assert call_execute(channel, made.frames()).contents == made.reference()
