from __future__ import annotations

import itertools
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
    chunk,
    chunk_frames,
    failure_of,
    gated,
    named_sample,
    named_samples,
    sample,
)
from tests.fix_server import ServerProcess, StartServer

from npugrad.codec import CHUNK_BYTES, MAX_CHUNK_BYTES
from npugrad.errors import DeadlineExceeded, InvalidOperand, MalformedRequest, MalformedTensor, NullOperand
from npugrad.ops import OPERATORS
from npugrad.v1 import backward_pb2, backward_pb2_grpc
from npugrad_server.plans import INLINE_REPLY_BYTES

Frames = list[backward_pb2.ExecuteRequest]

EXAMPLES = [*named_samples("group_norm_backward"), *(next(iter(named_samples(name))) for name in OPERATORS)]


@pytest.fixture(scope="module")
def channel(server: ServerProcess) -> Iterator[grpc.Channel]:
    with server.channel() as opened:
        yield opened


@pytest.fixture(scope="module")
def large() -> Sample:
    """Operands and one result of 2.4 MB, so three chunks each."""
    return sample(n=1, c=4, hxw=150_001, group=2)


@pytest.mark.parametrize(("operator", "name"), EXAMPLES)
def test_result_equals_the_reference_bit_for_bit(channel: grpc.Channel, operator: str, name: str) -> None:
    made = named_sample(operator, name)
    assert call_execute(channel, made.frames()).contents == made.reference()


@pytest.mark.parametrize("chunk_bytes", [CHUNK_BYTES, MAX_CHUNK_BYTES, 77_777])
def test_large_results_come_in_chunks_of_a_mebibyte(
    channel: grpc.Channel, large: Sample, chunk_bytes: int
) -> None:
    reply = call_execute(channel, large.frames(chunk_bytes))
    assert reply.contents == large.reference()
    assert reply.chunk_sizes == [
        CHUNK_BYTES,
        CHUNK_BYTES,
        large.outputs["grad_input"].nbytes - 2 * CHUNK_BYTES,
    ]
    inline = {name for name, content in reply.result.contents.items() if content.data is not None}
    assert inline == {name for name, meta in large.outputs.items() if meta.nbytes < INLINE_REPLY_BYTES}


def test_operands_may_interleave_and_some_may_be_inline(channel: grpc.Channel, large: Sample) -> None:
    header, follow = large.header(chunk_from_bytes=1000)
    assert [large.record.params[operand].name for operand, _ in follow] == ["grad_out", "input"]
    first, second = (list(chunk_frames(operand, content)) for operand, content in follow)
    frames = [header, *(frame for pair in zip(second, first, strict=True) for frame in pair)]
    assert call_execute(channel, frames).contents == large.reference()


# ----------------------------------------------------------------------------- what breaks the rules


def _frames(made: Sample) -> Frames:
    return list(made.frames())


def _without_header(made: Sample) -> Frames:
    return _frames(made)[1:]


def _two_headers(made: Sample) -> Frames:
    frames = _frames(made)
    return [frames[0], *frames]


def _header_again_at_the_end(made: Sample) -> Frames:
    frames = _frames(made)
    return [*frames, frames[0]]


def _empty_frame_inside(made: Sample) -> Frames:
    frames = _frames(made)
    return [frames[0], backward_pb2.ExecuteRequest(), *frames[1:]]


def _header_without_call(made: Sample) -> Frames:
    return [backward_pb2.ExecuteRequest(header=backward_pb2.ExecuteHeader())]


def _unknown_operand(made: Sample) -> Frames:
    return [_frames(made)[0], chunk(77, 0, b"1234")]


def _attribute_as_operand(made: Sample) -> Frames:
    return [_frames(made)[0], chunk(made.record.param_index("n"), 0, b"1234")]


def _operand_that_was_inline(made: Sample) -> Frames:
    header, follow = made.header(chunk_from_bytes=100)
    assert all(made.record.params[operand].name != "mean" for operand, _ in follow)
    return [header, chunk(made.record.param_index("mean"), 0, b"1234")]


def _gap(made: Sample) -> Frames:
    return [_frames(made)[0], chunk(0, 4, b"1234")]


def _overlap(made: Sample) -> Frames:
    return [_frames(made)[0], chunk(0, 0, b"12345678"), chunk(0, 4, b"5678")]


def _empty_chunk(made: Sample) -> Frames:
    return [_frames(made)[0], chunk(0, 0, b"")]


def _beyond_the_announced(made: Sample) -> Frames:
    header, follow = made.header()
    operand, content = follow[0]
    return [header, chunk(operand, 0, bytes(content) + b"1")]


def _truncated(made: Sample) -> Frames:
    return _frames(made)[:-1]


def _truncated_in_a_tensor(made: Sample) -> Frames:
    header, follow = made.header()
    operand, content = follow[0]
    return [header, chunk(operand, 0, bytes(content[:-1]))]


def _extra_chunk(made: Sample) -> Frames:
    return [*_frames(made), chunk(0, 0, b"1234")]


def _nothing(made: Sample) -> Frames:
    return []


BROKEN: dict[Callable[[Sample], Frames], tuple[type[Exception], str]] = {
    _without_header: (MalformedRequest, "found chunk first; expected a header"),
    _nothing: (MalformedRequest, "found the end of the stream first; expected a header"),
    _header_without_call: (MalformedRequest, "header: found no call; expected one of"),
    _two_headers: (MalformedRequest, "found a second header; expected a chunk"),
    _header_again_at_the_end: (MalformedRequest, "found a second header; expected a chunk"),
    _empty_frame_inside: (MalformedRequest, "found an empty frame; expected a chunk"),
    _unknown_operand: (
        MalformedRequest,
        "found operand 77; expected an announced one: 0 (grad_out), 1 (input)",
    ),
    _attribute_as_operand: (MalformedRequest, "expected an announced one"),
    _operand_that_was_inline: (MalformedRequest, "found operand 2; expected an announced one"),
    _gap: (MalformedTensor, "grad_out: found a chunk at offset 4; expected offset 0"),
    _overlap: (MalformedTensor, "grad_out: found a chunk at offset 4; expected offset 8"),
    _empty_chunk: (MalformedTensor, "grad_out: found a chunk of 0 bytes; expected 1 to 4194304"),
    _beyond_the_announced: (
        MalformedTensor,
        "grad_out: found 193 bytes in chunks; expected the announced 192",
    ),
    _truncated: (
        MalformedTensor,
        "gamma: found the end of the stream after 0 bytes; expected the announced 24",
    ),
    _truncated_in_a_tensor: (
        MalformedTensor,
        "grad_out: found the end of the stream after 191 bytes; expected the announced 192",
    ),
    _extra_chunk: (MalformedRequest, "found a chunk after the last announced byte; expected the end"),
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__.strip("_"))
def test_stream_that_breaks_a_rule(
    server: ServerProcess, channel: grpc.Channel, broken: Callable[[Sample], Frames]
) -> None:
    kind, complaint = BROKEN[broken]
    failure = failure_of(lambda: call_execute(channel, broken(sample())))
    assert failure.status is grpc.StatusCode.INVALID_ARGUMENT
    assert type(failure.error) is kind
    assert complaint in str(failure.error)
    server.assert_nothing_leaked()


def test_chunk_above_the_limit(channel: grpc.Channel) -> None:
    header, follow = (made := sample(n=1, c=4, hxw=300_000, group=2)).header()
    operand, content = follow[0]
    assert content.nbytes > MAX_CHUNK_BYTES
    frames = [header, chunk(operand, 0, bytes(content[: MAX_CHUNK_BYTES + 1]))]
    failure = failure_of(lambda: call_execute(channel, frames))
    assert isinstance(failure.error, MalformedTensor)
    assert f"{made.record.name}: grad_out: found a chunk of {MAX_CHUNK_BYTES + 1} bytes" in str(failure.error)


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


def test_broken_constraint_is_told_at_the_header(channel: grpc.Channel, large: Sample) -> None:
    header, _ = large.header()
    header.header.group_norm_backward.group = 3
    failure = refused(channel, header)
    assert isinstance(failure.error, InvalidOperand)
    assert (failure.error.code, failure.error.constraint) == (161002, "c.multiple_of_group")


def test_null_operand_is_told_at_the_header(channel: grpc.Channel, large: Sample) -> None:
    header, _ = large.header()
    header.header.group_norm_backward.ClearField("mean")
    failure = refused(channel, header)
    assert isinstance(failure.error, NullOperand)
    assert failure.error.code == 161001


@pytest.mark.parametrize("announced", [0, 1, 2**40, 2**64 - 1])
def test_announced_length_that_does_not_fit_the_tensor(
    channel: grpc.Channel, large: Sample, announced: int
) -> None:
    header, _ = large.header()
    header.header.group_norm_backward.input.chunked_bytes = announced
    failure = refused(channel, header)
    assert isinstance(failure.error, MalformedTensor)
    assert failure.error.operand == "input"
    assert f"found {announced} bytes of content; expected 2400016" in str(failure.error)


def test_call_that_can_never_fit_is_told_at_the_header(channel: grpc.Channel) -> None:
    header, _ = sample().header()
    message = header.header.group_norm_backward
    sizes = {"n": 1, "c": 64, "hxw": 2**21, "group": 1}
    for name, value in sizes.items():
        setattr(message, name, value)
    for name, shape in {
        "grad_out": [2**27],
        "input": [2**27],
        "mean": [1],
        "rstd": [1],
        "gamma": [64],
    }.items():
        tensor = getattr(message, name)
        tensor.meta.shape[:] = shape
        tensor.chunked_bytes = 4 * shape[0]
    failure = refused(channel, header)
    assert failure.status is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert failure.error.reason == "CALL_TOO_LARGE"
    assert not failure.error.retryable


# ------------------------------------------------------------------------- clients that stop or vanish


def half_sent(channel: grpc.Channel, made: Sample, **kwargs: Any) -> tuple[Any, Payload]:
    """A call of which the server has the header and a chunk; and what lets its client side go."""
    payload = Payload(*itertools.islice(made.frames(), 2))
    stub = backward_pb2_grpc.BackwardServiceStub(channel)
    return stub.Execute(iter(payload), **{"timeout": TIMEOUT_S, **kwargs}), payload


def wait_for(server: ServerProcess, *, in_use: bool) -> None:
    """Waits until an arena is, or none is any longer, in use. Each look is a call, so nothing sleeps."""
    for _ in range(2000):
        info = server.info()
        if bool(info.input_arena_used_bytes or info.output_arena_used_bytes) == in_use:
            return
    pytest.fail(f"arena memory is {'not' if in_use else 'still'} in use")


@pytest.mark.parametrize("way", ["cancelled", "connection_closed"])
def test_client_that_vanishes_during_the_upload_leaks_nothing(
    server: ServerProcess, large: Sample, way: str
) -> None:
    channel = server.channel()
    call, payload = half_sent(channel, large)
    wait_for(server, in_use=True)
    if way == "cancelled":
        call.cancel()
    else:
        channel.close()
    wait_for(server, in_use=False)
    payload.release()
    channel.close()
    server.assert_nothing_leaked()


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


def test_upload_that_stands_still_is_ended(start_server: StartServer) -> None:
    strict = start_server("--upload-idle-timeout-s", "5")
    with strict.channel() as channel:
        failure = refused(channel, sample().header()[0])
        assert failure.status is grpc.StatusCode.DEADLINE_EXCEEDED
        assert isinstance(failure.error, DeadlineExceeded)
        assert "found no frame from the client for 5 s; expected a chunk" in str(failure.error)
        strict.assert_nothing_leaked()
        made = sample()
        assert call_execute(channel, made.frames()).contents == made.reference()
    assert "InvalidStateError" not in strict.log_text()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["late", "cancelled"])
def test_upload_that_nobody_waits_for_any_more_is_no_malformed_call(server: ServerProcess, way: str) -> None:
    """grpc reads the end of a dead call as that of a stream; the bytes that came are counted."""
    made = sample(n=1, c=16, hxw=2**16, group=4)
    sent, gate = 7 * 2**18, threading.Event()
    with server.channel() as channel:
        stub = backward_pb2_grpc.BackwardServiceStub(channel)
        calls = [
            stub.Execute(
                gated(made.frames(chunk_bytes=2**18), gate, 8),
                timeout=6 if way == "late" else TIMEOUT_S,
                metadata=(("x-request-id", f"{way}-{number}"),),
            )
            for number in range(6)
        ]
        if way == "cancelled":
            wait_for(server, in_use=True)
            for call in calls:
                call.cancel()
        for call in calls:
            with pytest.raises(grpc.RpcError):
                list(call)
        gate.set()
    lines = [server.find_log("call", request_id=f"{way}-{number}") for number in range(6)]
    assert {line["reason"] for line in lines} <= {"DEADLINE_EXCEEDED", "CANCELLED"}
    received = [line["received_bytes"] for line in lines if line.get("operator")]
    assert max(received, default=0) <= sent
    if way == "late":
        assert received
        assert min(received) > 0


def test_deadline_that_passes_during_the_upload_leaks_nothing(server: ServerProcess, large: Sample) -> None:
    with server.channel() as channel:
        call, payload = half_sent(channel, large, timeout=0.3)
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
        payload.release()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_for(server, in_use=False)
    server.assert_nothing_leaked()


def test_slow_upload_does_not_hold_up_other_calls(server: ServerProcess, large: Sample) -> None:
    gate = threading.Event()
    with server.channel() as channel:
        stub = backward_pb2_grpc.BackwardServiceStub(channel)
        slow = stub.Execute(gated(large.frames(), gate, 2), timeout=TIMEOUT_S)
        wait_for(server, in_use=True)
        made = sample()
        assert call_execute(channel, made.frames()).contents == made.reference()
        gate.set()
        assert sum(1 for _ in slow) == 4
