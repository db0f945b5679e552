"""The way to the server: which RPC by which size, refusals, deadlines, closed clients, lost servers."""

from __future__ import annotations

import contextlib
import math
import re
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.client.fake_service import (
    STREAMED,
    UNARY,
    Context,
    Gate,
    abort_with,
    fake_service,
    group_norm,
    read_header,
    stream_zeros,
    zeros,
)

from npugrad.errors import InvalidOperand, ServerBusy
from npugrad.operator import OpRecord
from npugrad_client import Client, DeadlineExceeded, NpugradError, _transport

WAYS = pytest.mark.parametrize("stream_from_bytes", [UNARY, STREAMED], ids=["unary", "streamed"])


def expanded(call: dict[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
    """A call whose two large operands are one element each."""
    one = np.broadcast_to(np.float32(1), shape)
    return {**call, "grad_out": one, "input": one}


# ------------------------------------------------------------------------------------- which way by size


@pytest.mark.parametrize(
    ("hxw", "method"), [(8, "GroupNormBackward"), (16_000, "GroupNormBackward"), (32_768, "Execute")]
)
def test_operands_of_a_mebibyte_are_streamed(hxw: int, method: str) -> None:
    with fake_service() as service, Client(service.address, timeout_s=20) as client:
        client.group_norm_backward(**group_norm(n=2, c=4, hxw=hxw))
    assert service.methods == [method]


@pytest.mark.parametrize(("hxw", "method"), [(65_535, "GroupNormBackward"), (65_536, "Execute")])
def test_two_mebibytes_travel_as_one_message(hxw: int, method: str) -> None:
    call = group_norm(n=1, c=4, hxw=hxw, group=2)
    nbytes = sum(given.nbytes for given in call.values() if isinstance(given, np.ndarray))
    assert (nbytes <= 2**21) is (method == "GroupNormBackward")
    with fake_service() as service, Client(service.address, timeout_s=20) as client:
        client.group_norm_backward(**call)
    assert service.methods == [method]


def test_tiny_operands_with_large_results_are_streamed() -> None:
    shape = (2, 4, 2**18)
    call = expanded(group_norm(), shape)
    with fake_service() as service, Client(service.address, timeout_s=20) as client:
        grads = client.group_norm_backward(**{**call, "hxw": shape[2]})
    assert grads.grad_input.shape == shape
    assert service.methods == ["Execute"]
    assert len(service.frames) == 1, "an expanded operand travels in the header"


@pytest.mark.parametrize(("stream_from_bytes", "method"), [(1, "Execute"), (2**20, "GroupNormBackward")])
def test_the_size_is_a_setting(stream_from_bytes: int, method: str) -> None:
    with (
        fake_service() as service,
        Client(service.address, timeout_s=20, stream_from_bytes=stream_from_bytes) as client,
    ):
        client.group_norm_backward(**group_norm())
    assert service.methods == [method]


def test_no_setting_makes_a_message_beyond_what_protobuf_carries() -> None:
    def refuse(frames: Any, context: Context) -> Iterator[Any]:
        read_header(frames)
        abort_with(context, ServerBusy("busy"))
        yield from ()

    with (
        fake_service(execute=refuse) as service,
        Client(service.address, timeout_s=20, stream_from_bytes=UNARY, retry=None) as client,
        pytest.raises(ServerBusy),
    ):
        client.group_norm_backward(**{**expanded(group_norm(), (2, 4, 2**27)), "hxw": 2**27})
    assert service.methods == ["Execute"]


def test_both_ways_carry_the_same_operands() -> None:
    call = group_norm(n=4, c=8, hxw=11_000)  # in chunks, and small enough for a message
    arrived: dict[str, dict[str, bytes]] = {"unary": {}, "streamed": {}}

    def unary(record: OpRecord, request: Any, context: Context) -> Any:
        arrived["unary"] = {p.name: getattr(request, p.name).data for p in record.inputs}
        return zeros(record, request, context)

    def execute(frames: Any, context: Context) -> Iterator[Any]:
        first = next(frames)
        rest = list(frames)
        message = first.header.group_norm_backward
        for index, name in enumerate(("grad_out", "input", "mean", "rstd", "gamma")):
            chunks = b"".join(f.chunk.data for f in rest if f.chunk.operand == index)
            arrived["streamed"][name] = chunks or getattr(message, name).data
        yield from stream_zeros(iter([first]), context)

    with fake_service(unary, execute) as service:
        for way in (UNARY, STREAMED):
            with Client(service.address, timeout_s=20, stream_from_bytes=way) as client:
                client.group_norm_backward(**call)
    expected = {name: value.tobytes() for name, value in call.items() if isinstance(value, np.ndarray)}
    assert arrived == {"unary": expected, "streamed": expected}


# ----------------------------------------------------------------------------------------------- refusals


class Refusing:
    """Refuses every streamed call at its header, or takes it."""

    def __init__(self, error: NpugradError | None) -> None:
        self.error = error

    def __call__(self, frames: Any, context: Context) -> Iterator[Any]:
        if self.error is None:
            yield from stream_zeros(frames, context)
        else:
            read_header(frames)
            abort_with(context, self.error)


@pytest.mark.parametrize("group", [0, 8], ids=["refused", "legal"])
def test_a_call_that_is_bound_to_be_refused_uploads_nothing(
    group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that looks for a chunk for a while before it refuses finds none; of a legal call it does."""
    error = InvalidOperand("group: ...", code=161002, operator="group_norm_backward")

    def linger(frames: Any, context: Context) -> Iterator[Any]:
        read_header(frames)
        reader = threading.Thread(target=lambda: next(frames, None), daemon=True)
        reader.start()
        reader.join(30 if group else 0.3)
        abort_with(context, error)
        yield from ()

    monkeypatch.setattr(_transport, "REFUSAL_WAIT_S", 30.0)
    call = group_norm(n=8, c=64, hxw=4096, group=8)
    with (
        fake_service(execute=linger) as service,
        Client(service.address, timeout_s=20) as client,
        pytest.raises(InvalidOperand),
    ):
        client.group_norm_backward(**{**call, "group": group})
    assert service.methods == ["Execute"]
    assert [f.WhichOneof("frame") for f in service.frames] == ["header", "chunk"][: 1 + bool(group)]


def test_a_newer_server_may_take_what_the_local_record_refuses() -> None:
    call = group_norm(n=8, c=64, hxw=1024)
    with (
        fake_service(execute=Refusing(None)) as service,
        Client(service.address, timeout_s=20) as client,
        # The fake infers with the same record and so fails; what counts is that the upload went on.
        contextlib.suppress(NpugradError),
    ):
        client.group_norm_backward(**{**call, "group": 0})
    assert sum(len(f.chunk.data) for f in service.frames) == 2 * 8 * 64 * 1024 * 4


def test_a_refusal_at_the_header_ends_the_upload_and_frees_its_memory() -> None:
    released = threading.Event()
    call = group_norm(n=8, c=64, hxw=2**15)
    weakref.finalize(call["input"], released.set)
    with (
        fake_service(execute=Refusing(ServerBusy("busy", operator="x"))) as service,
        Client(service.address, timeout_s=30) as client,
    ):
        error: BaseException | None = None
        try:
            client.group_norm_backward(**call)
        except ServerBusy as caught:
            error = caught.with_traceback(None)
        del call
        assert isinstance(error, ServerBusy)
        assert released.wait(20), "something still holds the operands of a refused call"


# ---------------------------------------------------------------------------------------------- deadlines


def assert_waited(error: DeadlineExceeded, address: str, timeout_s: float) -> None:
    """It says for how long: all of the time, but for what passed before the call was sent."""
    found = re.fullmatch(
        rf"group_norm_backward: no answer from {re.escape(address)} within ([\d.]+) s", str(error)
    )
    assert found, error
    assert timeout_s / 2 < float(found[1]) <= timeout_s


@WAYS
def test_a_deadline_ends_a_call_that_stalls(stream_from_bytes: int) -> None:
    gate = Gate()

    def execute(frames: Any, context: Context) -> Iterator[Any]:
        replies = stream_zeros(frames, context)
        yield next(replies)  # the header came, and then nothing
        gate.hold()

    with (
        fake_service(gate.unary, execute) as service,
        Client(service.address, stream_from_bytes=stream_from_bytes) as client,
    ):
        with pytest.raises(DeadlineExceeded) as caught:
            client.group_norm_backward(**group_norm(), timeout_s=2)
        gate.open()
    assert_waited(caught.value, service.address, 2)
    assert not caught.value.retryable


@pytest.mark.parametrize("timeout_s", [0, 0.0, -1, -math.inf])
def test_a_deadline_that_has_passed_sends_nothing(timeout_s: float) -> None:
    with fake_service() as service, Client(service.address) as client:
        with pytest.raises(DeadlineExceeded, match=r"backward: the deadline of .* s has already passed"):
            client.group_norm_backward(**group_norm(), timeout_s=timeout_s)
        with pytest.raises(DeadlineExceeded, match="server_info: the deadline"):
            client.server_info(timeout_s=timeout_s)
    assert service.methods == []


@WAYS
@pytest.mark.parametrize("timeout_s", [math.inf, 1e300, 1e9])
def test_no_deadline_is_too_long(stream_from_bytes: int, timeout_s: float) -> None:
    with (
        fake_service() as service,
        Client(service.address, timeout_s=1e-9, stream_from_bytes=stream_from_bytes) as client,
    ):
        assert client.group_norm_backward(**group_norm(), timeout_s=timeout_s).info.backend == "test"


def test_nan_is_no_deadline() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(ValueError, match="timeout_s: found nan"):
        client.group_norm_backward(**group_norm(), timeout_s=math.nan)


def test_the_clients_deadline_holds_where_a_call_has_none() -> None:
    gate = Gate()
    with fake_service(gate.unary) as service, Client(service.address, timeout_s=2) as client:
        with pytest.raises(DeadlineExceeded) as caught:
            client.group_norm_backward(**group_norm())
        gate.open()
    assert_waited(caught.value, service.address, 2)


# ------------------------------------------------------------------------------------------------ threads


def test_one_client_serves_eight_threads() -> None:
    """Each thread sees the answers to its own calls, whichever way they travel."""

    def unary(record: OpRecord, request: Any, context: Context) -> Any:
        reply = zeros(record, request, context)
        reply.grad_beta.data = request.gamma.data
        return reply

    def execute(frames: Any, context: Context) -> Iterator[Any]:
        first = next(frames)
        for _ in frames:
            pass
        replies = stream_zeros(iter([first]), context)
        gamma = first.header.group_norm_backward.gamma.data
        for frame in replies:
            if frame.chunk.operand == 12:
                frame.chunk.data = gamma
            yield frame

    def work(client: Client, number: int) -> int:
        right = 0
        for turn in range(12):
            hxw = 33_000 if turn % 3 == 0 else 8
            call = group_norm(n=1, c=4, hxw=hxw, seed=1000 * number + turn)
            grads = client.group_norm_backward(**call)
            right += grads.grad_beta.tobytes() == call["gamma"].tobytes()
        return right

    with (
        fake_service(unary, execute) as service,
        Client(service.address, timeout_s=60) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        assert list(pool.map(lambda n: work(client, n), range(8))) == [12] * 8
