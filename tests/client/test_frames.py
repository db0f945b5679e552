"""Messages and frames of a call, and replies of servers that lie: each is named, none is believed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest
from tests.client.both import BOTH, Make
from tests.client.fake_service import (
    INFO,
    STATUS_KEY,
    STREAMED,
    Context,
    chunk_frame,
    fake_service,
    group_norm,
    header_frame,
    response,
    zeros,
)

from npugrad import OPERATORS, NpugradError, TensorMeta, codec
from npugrad.call import CallOptions
from npugrad.frames import Chunk, frame_decoder
from npugrad.layout import view
from npugrad.operator import OpRecord
from npugrad.registry import REGISTRY
from npugrad.status import encode_status
from npugrad.v1 import backward_pb2, operators_pb2, server_pb2
from npugrad_client import Client, ServerBusy, _frames, _info
from npugrad_client._attempt import Attempt
from npugrad_client._call import Answer, Prepared, prepare
from npugrad_client._frames import read_response
from npugrad_client._rpcs import Query

Frames = list[backward_pb2.ExecuteResponse]
Lie = Callable[[Frames], Frames]

RECORD = OPERATORS["group_norm_backward"]
SHAPE = (4, 8, 1024)
GRAD_INPUT, GRAD_GAMMA, GRAD_BETA = map(RECORD.param_index, ("grad_input", "grad_gamma", "grad_beta"))
NBYTES = 4 * 8 * 1024 * 4
HALF = NBYTES // 2
MALFORMED = "the server's reply is malformed"


def call_of(sizes: tuple[int, int, int] = SHAPE, **changes: Any) -> dict[str, Any]:
    """Keyword arguments of a legal call, but for the changes."""
    n, c, hxw = sizes
    return {**group_norm(n=n, c=c, hxw=hxw, group=2), **changes}


def prepared(
    out: dict[str, Any] | None = None, sizes: tuple[int, int, int] = SHAPE, **changes: Any
) -> Prepared:
    call = call_of(sizes, **changes)
    names = [p.name for p in RECORD.inputs]
    inputs, attrs = {k: call[k] for k in names}, {k: v for k, v in call.items() if k not in names}
    return prepare(RECORD, inputs, attrs, out, CallOptions(label="test"))


def reply(call: Prepared, chunk_from_bytes: int = 1) -> Frames:
    message, follow = response(RECORD, dict(RECORD.infer(call.call)), chunk_from_bytes)
    frames = [header_frame(RECORD, message)]
    for operand, data in follow:
        half = data.nbytes // 2
        frames += [
            chunk_frame(operand, 0, bytes(data[:half])),
            chunk_frame(operand, half, bytes(data[half:])),
        ]
    return frames


def read_frames(prepared: Prepared, frames: Iterable[backward_pb2.ExecuteResponse]) -> Answer:
    decode = frame_decoder(backward_pb2.ExecuteResponse)
    attempt = Attempt(RECORD.name, "here")
    return _frames.read_frames(prepared, (decode(frame.SerializeToString()) for frame in frames), attempt)


def test_chunks_are_views_of_the_operands() -> None:
    call = prepared()
    chunks = [
        frame
        for frame in _frames.request_frames(call, lambda: False, Attempt(RECORD.name, "here"))
        if isinstance(frame, Chunk)
    ]
    assert [(chunk.operand, chunk.offset) for chunk in chunks] == [(0, 0), (1, 0)]
    for chunk, name in zip(chunks, ("grad_out", "input"), strict=True):
        assert np.shares_memory(np.frombuffer(chunk.data, np.uint8), np.asarray(call.contents[name]))


def test_small_operands_travel_in_the_header() -> None:
    header = next(_frames.request_frames(prepared(), lambda: False, Attempt(RECORD.name, "here"))).header
    kinds = {p.name: getattr(header.group_norm_backward, p.name).WhichOneof("content") for p in RECORD.inputs}
    large = dict.fromkeys(("grad_out", "input"), "chunked_bytes")
    assert kinds == large | dict.fromkeys(("mean", "rstd", "gamma"), "data")


# ----------------------------------------------------------------------------------------- good replies


def test_contiguous_arrays_in_out_are_written_directly_and_others_not_byte_by_byte() -> None:
    for chunk_from_bytes in (1, 10**9):
        target = np.ones(SHAPE, np.float32)
        call = prepared({"grad_input": target})
        answer = read_frames(call, iter(reply(call, chunk_from_bytes)))
        assert answer.info == INFO
        assert answer.arrays["grad_input"] is target
        assert not target.any()
    for other in (np.ones(SHAPE, ">f4"), np.ones(SHAPE[::-1], np.float32).T):
        call = prepared({"grad_input": other})
        assert read_frames(call, iter(reply(call))).arrays["grad_input"] is not other
        assert (other == 1).all()


def test_interleaved_chunks_are_put_together() -> None:
    call = prepared()
    message, _ = response(RECORD, dict(RECORD.infer(call.call)), 1)
    frames = [
        header_frame(RECORD, message),
        chunk_frame(GRAD_GAMMA, 0, b"\1" * 4),
        chunk_frame(GRAD_INPUT, 0, bytes(NBYTES)),
        chunk_frame(GRAD_BETA, 0, bytes(32)),
        chunk_frame(GRAD_GAMMA, 4, b"\2" * 28),
    ]
    gamma = read_frames(call, iter(frames)).arrays["grad_gamma"]
    assert gamma is not None
    assert gamma.tobytes() == b"\1" * 4 + b"\2" * 28


def test_empty_results_need_no_chunks() -> None:
    call = prepared(sizes=(0, 8, 1024))
    assert read_frames(call, iter(reply(call))).arrays["grad_input"] is not None


# ------------------------------------------------------------------------------------------------ lies


def edited(change: Callable[[Any], object]) -> Lie:
    """A lie in the typed response of the header."""

    def lie(frames: Frames) -> Frames:
        message = REGISTRY.responses[RECORD.name]()
        message.CopyFrom(getattr(frames[0].header, RECORD.name))
        change(message)
        return [header_frame(RECORD, message), *frames[1:]]

    return lie


def described(dtype: str, shape: tuple[int, ...] = SHAPE, nbytes: int | None = None, **more: Any) -> Lie:
    """Another meta for grad_input, and another length."""
    meta = TensorMeta(dtype, shape, **more)

    def put(message: Any) -> None:
        message.grad_input.meta.Clear()
        codec.encode_meta(meta, message.grad_input.meta)
        message.grad_input.chunked_bytes = meta.content_bytes if nbytes is None else nbytes

    return edited(put)


def headed(message: Any = None, operator: str = RECORD.name) -> Lie:
    if message is None:
        message = header_frame(OPERATORS[operator], REGISTRY.responses[operator]())
    return lambda frames: [message, *frames[1:]]


def followed(operand: int, offset: int, data: bytes) -> Lie:
    """A chunk right after the header."""
    return lambda frames: [frames[0], chunk_frame(operand, offset, data), *frames[1:]]


NO_FRAME, NO_CALL = (backward_pb2.ExecuteResponse(), backward_pb2.ExecuteResponse())
NO_CALL.header.SetInParent()
AS_IT_IS = r"float32\[4, 8, 1024\]"
LIES: dict[str, tuple[Lie, str]] = {
    "nothing": (lambda f: [], "found nothing as its first frame; expected a header"),
    "chunk first": (lambda f: f[1:], "found chunk as its first frame"),
    "empty frame first": (lambda f: [NO_FRAME, *f], "found an empty frame as its first"),
    "no operator": (headed(NO_CALL), "found results of no operator"),
    "other operator": (headed(operator="layer_norm_backward"), "found results of layer_norm_backward"),
    "missing output": (
        edited(lambda m: m.ClearField("grad_gamma")),
        r"found nothing as grad_gamma; expected float32\[8\]",
    ),
    "wrong dtype": (
        described("float64"),
        rf"found float64\[4, 8, 1024\] as grad_input; expected {AS_IT_IS}",
    ),
    "wrong shape": (described("float32", (4, 8, 512)), r"found float32\[4, 8, 512\] as grad_input"),
    "huge": (
        described("float32", (2**30, 2**30)),
        r"found float32\[1073741824, 1073741824\] as grad_input",
    ),
    "strides": (
        described("float32", strides=(0, 0, 0)),
        f"found {AS_IT_IS} as grad_input; expected it contiguous",
    ),
    "offset": (described("float32", storage_offset=1), "expected it contiguous"),
    "announces too much": (
        described("float32", nbytes=NBYTES + 4),
        f"grad_input: found {NBYTES + 4} bytes of content; expected {NBYTES}",
    ),
    "inline too short": (
        edited(lambda m: setattr(m.grad_gamma, "data", b"123")),
        "grad_gamma: found 3 bytes of content; expected 32",
    ),
    "unknown dtype": (
        edited(lambda m: setattr(m.grad_input.meta, "data_type", 99)),
        "grad_input: found data type 99",
    ),
    "negative size": (
        edited(lambda m: m.grad_input.meta.shape.insert(0, -1)),
        "grad_input: found shape .* expected sizes of 0 or more",
    ),
    "no product": (edited(lambda m: setattr(m.info, "product", 0)), "info: found product 0"),
    "controls": (edited(lambda m: setattr(m.info, "device", "npu\x1b[2J")), "info: found control characters"),
    "ends early": (lambda f: f[:-1], "found 16 bytes of grad_beta at its end; expected 32"),
    "no chunks": (lambda f: f[:1], f"found 0 bytes of grad_input at its end; expected {NBYTES}"),
    "out of order": (
        lambda f: [f[0], f[2], f[1], *f[3:]],
        f"chunk of {HALF} bytes of grad_input at offset {HALF}",
    ),
    "repeated": (lambda f: [*f[:2], *f[1:]], "of grad_input at offset 0; expected 1 to"),
    "gap": (followed(GRAD_INPUT, 4, b"1234"), "found a chunk of 4 bytes of grad_input at offset 4"),
    "far away": (followed(GRAD_INPUT, 2**63, b"1"), f"at offset {2**63}"),
    "too long": (
        lambda f: [*f[:2], chunk_frame(GRAD_INPUT, HALF, bytes(NBYTES))],
        f"found a chunk of {NBYTES} bytes of grad_input at offset {HALF}; expected 1 to {HALF}",
    ),
    "past the end": (lambda f: [*f, chunk_frame(GRAD_INPUT, NBYTES, b"1")], "expected 1 to 0 bytes"),
    "empty chunk": (followed(GRAD_INPUT, 0, b""), "found a chunk of 0 bytes"),
    "an input": (followed(0, 0, b"1"), "a chunk of parameter 0, which its header"),
    "no parameter": (followed(99, 0, b"1"), "a chunk of parameter 99"),
    "second header": (lambda f: [f[0], *f], "found a second header; expected a chunk"),
    "empty frame": (lambda f: [f[0], NO_FRAME, *f[1:]], "found an empty frame"),
}


@BOTH
def test_a_lie_is_named_writes_nothing_outside_its_result_and_leaves_the_client_usable(make: Make) -> None:
    lies: list[Lie] = []

    def execute(frames: Any, context: Context) -> Iterator[Any]:
        for _ in frames:
            pass
        yield from lies.pop()(reply(prepared()))

    guarded = np.full(NBYTES // 4 + 64, 7, np.float32)
    target = guarded[32:-32].reshape(SHAPE)
    with (
        fake_service(execute=execute) as service,
        make(service.address, timeout_s=60, stream_from_bytes=STREAMED) as client,
    ):
        for name, (lie, message) in LIES.items():
            lies.append(lie)
            with pytest.raises(
                NpugradError, match=rf"^group_norm_backward: {MALFORMED}: .*{message}"
            ) as caught:
                client.group_norm_backward(**call_of(), out={"grad_input": target})
            assert type(caught.value) is NpugradError, f"{name}: the caller's call was fine"
            assert caught.value.operator == "group_norm_backward"
            assert not caught.value.retryable
            assert (guarded[:32] == 7).all(), name
            assert (guarded[-32:] == 7).all(), name
        lies.append(list)
        assert client.group_norm_backward(**call_of(), out={"grad_input": target}).grad_input is target
        assert not target.any()


def test_an_endless_reply_is_left_at_its_first_frame_too_many() -> None:
    call = prepared()
    taken = []

    def endless() -> Iterator[backward_pb2.ExecuteResponse]:
        yield from reply(call)
        while True:
            taken.append(True)
            yield chunk_frame(GRAD_INPUT, NBYTES, b"more")

    with pytest.raises(NpugradError, match="malformed"):
        read_frames(call, endless())
    assert len(taken) == 1


def test_a_frame_is_gone_before_the_next_one_is_asked_for() -> None:
    call, fed = prepared(), []
    decode = frame_decoder(backward_pb2.ExecuteResponse)

    def watched(message: backward_pb2.ExecuteResponse) -> Any:
        frame = decode(message.SerializeToString())
        if isinstance(frame, Chunk):
            memory = np.frombuffer(frame.data, np.uint8).copy()
            fed.append(weakref.ref(memory))
            frame = frame._replace(data=memory.data)
        return frame

    def frames() -> Iterator[Any]:
        for message in reply(call):
            yield watched(message)
            assert [each for each in fed if each() is not None] == []

    _frames.read_frames(call, frames(), Attempt(RECORD.name, "here"))
    assert fed


def test_a_result_that_was_masked_out_is_named() -> None:
    call = prepared(output_mask=(False, True, True))
    with pytest.raises(NpugradError, match=r"found float32\[4, 8, 1024\] as grad_input; expected nothing"):
        read_frames(call, iter(reply(prepared())))


def test_what_a_refused_call_brings_is_checked_against_the_callers_arrays() -> None:
    """The record here refuses and so infers nothing; a newer server may still answer."""
    target = np.ones((4, 8, 1), np.float32)
    call = prepared({"grad_input": target}, group=0)
    assert call.is_refused
    with pytest.raises(
        NpugradError, match=r"found float32\[4, 8, 1024\] as grad_input; expected float32\[4, 8, 1\]"
    ):
        read_frames(call, iter(reply(prepared())))


# --------------------------------------------------------------------------------------- unary replies


def complex_gamma(message: Any) -> None:
    message.grad_gamma.Clear()
    codec.encode_meta(TensorMeta("complex64", (8,)), message.grad_gamma.meta)
    message.grad_gamma.data = b""


UNARY_LIES: list[tuple[Callable[[Any], object], str]] = [
    (lambda m: setattr(m.grad_gamma, "chunked_bytes", 32), "grad_gamma announced in chunks"),
    (lambda m: setattr(m.grad_gamma, "data", b""), "grad_gamma: found 0 bytes of content"),
    (complex_gamma, r"found complex64\[8\] as grad_gamma"),
    (lambda m: setattr(m.grad_gamma.region, "name", "x"), "grad_gamma: found 0 bytes of content"),
]


def test_a_unary_lie_is_named() -> None:
    for change, message in UNARY_LIES:
        call = replace(prepared(), expected={})
        answered, _ = response(RECORD, dict(RECORD.infer(call.call)))
        change(answered)
        with pytest.raises(NpugradError, match=f"{MALFORMED}: .*{message}") as caught:
            read_response(call, answered)
        assert type(caught.value) is NpugradError


def test_a_unary_reply_is_copied_out_of_the_message() -> None:
    call = prepared()
    message, _ = response(RECORD, dict(RECORD.infer(call.call)))
    message.grad_input.data = np.random.default_rng(0).bytes(NBYTES)
    found = read_response(call, message).arrays["grad_input"]
    assert found is not None
    expected = view(TensorMeta("uint32", SHAPE), message.grad_input.data)
    np.testing.assert_array_equal(found.view(np.uint32), expected)
    found[...] = 0  # memory of its own


SMALL = (2, 4, 8)
SMALL_LIES: list[tuple[Callable[[Any], object], str]] = [
    (lambda m: m.ClearField("grad_beta"), r"found nothing as grad_beta; expected float32\[4\]"),
    (lambda m: m.grad_input.meta.shape.__setitem__(2, 2), r"grad_input: found 256 bytes of content"),
    (lambda m: m.grad_input.meta.shape.reverse(), r"found float32\[8, 4, 2\] as grad_input"),
    (
        lambda m: setattr(m.grad_input.meta, "data_type", TensorMeta("int32", ()).dtype.wire),
        r"found int32\[2, 4, 8\] as grad_input; expected float32\[2, 4, 8\]",
    ),
    (lambda m: setattr(m.info, "backend", "\x07"), "info: found control characters"),
]


@BOTH
def test_a_lie_about_a_small_call_is_named_too(make: Make) -> None:
    """With a plan or without: small calls are not inferred before they are sent."""
    lies: list[Callable[[Any], object]] = []

    def unary(record: OpRecord, request: Any, context: Context) -> Any:
        message = zeros(record, request, context)
        lies.pop()(message)
        return message

    with fake_service(unary) as service, make(service.address, timeout_s=60) as client:
        for is_planned in (False, True):
            for lie, message in SMALL_LIES:
                lies.append(lie)
                with pytest.raises(NpugradError, match=f"{MALFORMED}: .*{message}") as caught:
                    client.group_norm_backward(**call_of(SMALL))
                assert type(caught.value) is NpugradError, is_planned
            lies.append(lambda message: None)
            client.group_norm_backward(**call_of(SMALL))


@BOTH
def test_compressed_replies_are_refused_and_huge_ones_asked_for_in_pieces(make: Make) -> None:
    def compressed(record: OpRecord, request: Any, context: Context) -> Any:
        context.set_compression(grpc.Compression.Gzip)
        return zeros(record, request, context)

    with (
        fake_service(compressed) as service,
        make(service.address, timeout_s=60, retry=None) as client,
        pytest.raises(NpugradError, match="Compression algorithm not supported: gzip"),
    ):
        client.group_norm_backward(**call_of())
    with (
        fake_service(lambda *_: bytes(5 * 2**20)) as service,
        make(service.address, timeout_s=60, retry=None) as client,
    ):
        client.group_norm_backward(**call_of())
        assert service.methods == ["GroupNormBackward", "Execute"]


def test_what_a_server_says_cannot_command_a_terminal() -> None:
    reply = server_pb2.GetServerInfoResponse(operators=["a\x1b[31m"], versions={"torch": "\x9b1"})
    reply.product = operators_pb2.PRODUCT_ATLAS_A2
    reply.devices.add(name="npu:0", description="line\nline\t\x00")
    query = Query("server_info", _info.SERVER_INFO_REQUEST)
    found = _info.decode_server_info(query.read(reply, Attempt("server_info", "here")))
    assert found.operators == ("a\\x1b[31m",)
    assert found.versions == {"torch": "\\x9b1"}
    assert found.devices[0].description == "line\nline\\t\\x00"


@pytest.mark.parametrize("is_ours", [True, False])
def test_the_text_of_an_error_cannot_either(is_ours: bool) -> None:
    text = "busy\x1b[2J"

    def refuse(record: OpRecord, request: Any, context: Context) -> None:
        if is_ours:
            status = encode_status(ServerBusy(text))
            status.message = text
            context.set_trailing_metadata(((STATUS_KEY, status.SerializeToString()),))
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)

    with (
        fake_service(refuse) as service,
        Client(service.address, timeout_s=60, retry=None) as client,
        pytest.raises(ServerBusy, match=r"busy\\x1b\[2J"),
    ):
        client.group_norm_backward(**call_of(SMALL))
