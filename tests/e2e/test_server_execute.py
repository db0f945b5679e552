"""Execute on a real server: chunks both ways, refusals before any payload, clients that stop or vanish.

Streams that break the rules are in `test_hostile_calls`, slow ones in `test_slow_streams`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from tests.calls import (
    TIMEOUT_S,
    Failure,
    Sample,
    call_execute,
    chunk_frames,
    failure_of,
    gated,
    sample,
)
from tests.e2e.harness import case, eventually
from tests.fix_server import ServerProcess, StartServer

from npugrad.codec import CHUNK_BYTES, MAX_CHUNK_BYTES
from npugrad.error_table import BY_REASON
from npugrad.v1 import backward_pb2, backward_pb2_grpc
from npugrad.varint import LENGTH_DELIMITED, VARINT, encode_varint, tag
from npugrad_server.plans import INLINE_REPLY_BYTES

Edit = Callable[[Any], None]

CHUNK, OPERAND, OFFSET, DATA = 2, 1, 2, 3
"""Fields of a frame and of a chunk."""


@pytest.fixture(scope="module")
def large() -> Sample:
    """Operands and one result of 2.4 MB, so three chunks each."""
    return sample(n=1, c=4, hxw=150_001, group=2)


@pytest.mark.parametrize("chunk_bytes", [CHUNK_BYTES, MAX_CHUNK_BYTES, 77_777])
def test_large_results_come_in_chunks_of_a_mebibyte(
    server_channel: grpc.Channel, large: Sample, chunk_bytes: int
) -> None:
    reply = call_execute(server_channel, large.frames(chunk_bytes))
    assert reply.contents == large.reference()
    rest = large.outputs["grad_input"].nbytes - 2 * CHUNK_BYTES
    assert reply.chunk_sizes == [CHUNK_BYTES, CHUNK_BYTES, rest]
    inline = {name for name, content in reply.result.contents.items() if content.data is not None}
    assert inline == {name for name, meta in large.outputs.items() if meta.nbytes < INLINE_REPLY_BYTES}


def test_operands_may_interleave_and_some_may_be_inline(server_channel: grpc.Channel, large: Sample) -> None:
    header, follow = large.header(chunk_from_bytes=1000)
    assert [large.record.params[operand].name for operand, _ in follow] == ["grad_out", "input"]
    first, second = (list(chunk_frames(operand, content)) for operand, content in follow)
    frames = [header, *(frame for pair in zip(second, first, strict=True) for frame in pair)]
    assert call_execute(server_channel, frames).contents == large.reference()


# ------------------------------------------------- chunks as other implementations of protobuf may write them


def number(field: int, value: int) -> bytes:
    return bytes((tag(field, VARINT),)) + encode_varint(value)


def content(field: int, value: bytes) -> bytes:
    return bytes((tag(field, LENGTH_DELIMITED),)) + encode_varint(len(value)) + value


def otherwise(frame: backward_pb2.ExecuteRequest) -> bytes:
    """The frame of a chunk with its fields backwards, twice, in two parts, and with unknown ones."""
    unknown = number(15, 7) + content(14, b"unknown")
    first = content(DATA, frame.chunk.data) + unknown + number(OFFSET, 99)
    second = number(OFFSET, frame.chunk.offset) + number(OPERAND, frame.chunk.operand)
    return content(CHUNK, first) + unknown + content(CHUNK, second)


def test_chunks_may_be_written_otherwise(server_channel: grpc.Channel, large: Sample) -> None:
    header, *chunks = large.frames()
    found = call_execute(server_channel, [header, *map(otherwise, chunks)])
    assert found.contents == large.reference()


# ------------------------------------------------------------------ refused before any payload is read


class Payload:
    """Frames of which only the first may be taken: whoever asks for more has to wait for `release`."""

    def __init__(self, *first: Any) -> None:
        self._first = first
        self._release = threading.Event()

    def __iter__(self) -> Iterator[Any]:
        yield from self._first
        self._release.wait(TIMEOUT_S)

    def release(self) -> None:
        self._release.set()


def refused(channel: grpc.Channel, header: Any) -> Failure:
    """The failure of a call whose client never sends anything after the header, nor ends its side."""
    payload = Payload(header)
    try:
        return failure_of(lambda: call_execute(channel, payload, timeout=20))
    finally:
        payload.release()


def beyond_the_arena(message: Any) -> None:
    """Makes a call of half a GiB of it, all of which is announced."""
    message.n, message.c, message.hxw, message.group = 1, 64, 2**21, 1
    sizes = {"grad_out": 2**27, "input": 2**27, "mean": 1, "rstd": 1, "gamma": 64}
    for name, size in sizes.items():
        tensor = getattr(message, name)
        tensor.meta.shape[:] = [size]
        tensor.chunked_bytes = 4 * size


def announce(nbytes: int) -> Edit:
    def edit(message: Any) -> None:
        message.input.chunked_bytes = nbytes

    return edit


UNDOABLE: tuple[tuple[Edit, str, str], ...] = (
    (lambda message: setattr(message, "group", 3), "ACLNN_ERR_PARAM_INVALID", "group_norm_backward: c"),
    (lambda message: message.ClearField("mean"), "ACLNN_ERR_PARAM_NULLPTR", "mean: found null"),
    *(
        (announce(nbytes), "MALFORMED_TENSOR", f"input: found {nbytes} bytes of content; expected 2400016")
        for nbytes in (0, 1, 2**40, 2**64 - 1)
    ),
    (beyond_the_arena, "CALL_TOO_LARGE", "input_arena_bytes"),
)
"""What is done to a request, the reason with which it is refused, and words of the error."""


def test_what_cannot_be_done_is_told_at_the_header(server_channel: grpc.Channel, large: Sample) -> None:
    for edit, reason, said in UNDOABLE:
        with case(said):
            header, _ = large.header()
            edit(header.header.group_norm_backward)
            failure = refused(server_channel, header)
            assert failure.error.reason == reason
            assert said in str(failure.error)
            assert failure.status.name == BY_REASON[reason].grpc_status
            assert not failure.error.retryable


# ------------------------------------------------------------------------- clients that stop or vanish


def wait_for(server: ServerProcess, *, in_use: bool) -> None:
    """Waits until an arena is, or none is any longer, in use."""

    def is_so() -> bool:
        info = server.info()
        return bool(info.input_arena_used_bytes or info.output_arena_used_bytes) == in_use

    eventually(is_so, f"arena memory is {'' if in_use else 'not '}in use", server)


def test_client_that_does_not_read_its_reply_is_given_up(start_server: StartServer) -> None:
    slow = start_server("--reply-idle-timeout-s", "0.5")
    made = sample(n=1, c=4, hxw=1_500_000, group=2)  # a reply of 24 MB, far beyond what gRPC buffers
    with slow.channel() as channel:
        replies = backward_pb2_grpc.BackwardServiceStub(channel).Execute(made.frames(), timeout=TIMEOUT_S)
        next(replies)
        wait_for(slow, in_use=False)
        with pytest.raises(grpc.RpcError) as caught:
            list(replies)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "found no room for the reply for 0.5 s" in (caught.value.details() or "")


@pytest.mark.slow
def test_uploads_that_nobody_waits_for_any_more_are_no_malformed_calls(server: ServerProcess) -> None:
    """grpc reads the end of a dead call as that of a stream; the bytes that came are counted."""
    made = sample(n=1, c=16, hxw=2**16, group=4)
    sent, gate = 7 * 2**18, threading.Event()
    timeouts_s = {"late": 6.0, "cancelled": TIMEOUT_S}
    with server.channel() as channel:
        stub = backward_pb2_grpc.BackwardServiceStub(channel)
        calls = {
            f"{way}-{number}": stub.Execute(
                gated(made.frames(chunk_bytes=2**18), gate, 8),
                timeout=timeout_s,
                metadata=(("x-request-id", f"{way}-{number}"),),
            )
            for way, timeout_s in timeouts_s.items()
            for number in range(6)
        }
        wait_for(server, in_use=True)
        for name, call in calls.items():
            if name.startswith("cancelled"):
                call.cancel()
        for call in calls.values():
            with pytest.raises(grpc.RpcError):
                list(call)
        gate.set()
    lines = {name: server.find_log("call", request_id=name) for name in calls}
    assert {line["reason"] for line in lines.values()} <= {"DEADLINE_EXCEEDED", "CANCELLED"}
    received = {name: line["received_bytes"] for name, line in lines.items() if line.get("operator")}
    assert max(received.values()) <= sent
    late = [count for name, count in received.items() if name.startswith("late")]
    assert late
    assert min(late) > 0
    server.assert_nothing_leaked()
