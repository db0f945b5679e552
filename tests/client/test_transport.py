"""The way to the server: which RPC by which size, refusals, deadlines."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.client.both import BOTH, WAYS, Looped, Make, call_once, caught
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
from npugrad_client import Client, DeadlineExceeded, NpugradError, _async_transport, _transport
from npugrad_client._channels import LARGEST_UNARY_BYTES


@pytest.mark.parametrize(
    ("hxw", "options", "method"),
    [
        (8, {}, "GroupNormBackward"),
        (65_535, {}, "GroupNormBackward"),
        (65_536, {}, "Execute"),
        (8, {"stream_from_bytes": 1}, "Execute"),
        (8, {"stream_from_bytes": 2**20}, "GroupNormBackward"),
        (LARGEST_UNARY_BYTES // 32 - 8, {"stream_from_bytes": UNARY}, "GroupNormBackward"),
        (LARGEST_UNARY_BYTES // 32, {"stream_from_bytes": UNARY}, "Execute"),
    ],
)
def test_calls_of_up_to_two_mebibytes_travel_as_one_message_or_as_a_setting_says(
    hxw: int, options: dict[str, Any], method: str
) -> None:
    """And none of three, whose message could be larger than what gRPC takes by default."""
    call = group_norm(n=1, c=4, hxw=hxw)
    if not options:
        nbytes = sum(given.nbytes for given in call.values() if isinstance(given, np.ndarray))
        assert (nbytes <= 2**21) is (method == "GroupNormBackward")
    with fake_service() as service:
        call_once(Client, service.address, call, **options)
    assert service.methods == [method]
    assert all(header.ByteSize() < 4 * 2**20 for header in service.headers)


def test_tiny_operands_with_large_results_are_streamed() -> None:
    shape = (2, 4, 2**18)
    one = np.broadcast_to(np.float32(1), shape)
    with fake_service() as service:
        grads = call_once(
            Client, service.address, {**group_norm(), "grad_out": one, "input": one, "hxw": shape[2]}
        )
    assert grads.grad_input.shape == shape
    assert service.methods == ["Execute"]
    assert len(service.frames) == 1, "an expanded operand travels in the header"


@BOTH
def test_both_ways_carry_the_same_operands(make: Make) -> None:
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
            call_once(make, service.address, {**call, "label": "same"}, stream_from_bytes=way)
    expected = {name: value.tobytes() for name, value in call.items() if isinstance(value, np.ndarray)}
    assert arrived == {"unary": expected, "streamed": expected}
    assert service.headers[0].options.label == service.frames[0].header.group_norm_backward.options.label
    assert max(len(frame.chunk.data) for frame in service.frames) == 2**20


@BOTH
@pytest.mark.parametrize("group", [0, 8], ids=["refused", "legal"])
def test_a_call_that_is_bound_to_be_refused_uploads_nothing(
    group: int, make: Make, monkeypatch: pytest.MonkeyPatch
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

    for module in (_transport, _async_transport):
        monkeypatch.setattr(module, "REFUSAL_WAIT_S", 30.0)
    call = group_norm(n=8, c=64, hxw=4096, group=8)
    with fake_service(execute=linger) as service, pytest.raises(InvalidOperand):
        call_once(make, service.address, {**call, "group": group})
    assert service.methods == ["Execute"]
    assert [f.WhichOneof("frame") for f in service.frames] == ["header", "chunk"][: 1 + bool(group)]


@BOTH
def test_a_newer_server_may_take_what_the_local_record_refuses(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (_transport, _async_transport):
        monkeypatch.setattr(module, "REFUSAL_WAIT_S", 0.01)
    call = group_norm(n=8, c=64, hxw=1024)
    # The fake infers with the same record and so fails; what counts is that the upload went on.
    with fake_service() as service, contextlib.suppress(NpugradError):
        call_once(make, service.address, {**call, "group": 0})
    assert sum(len(f.chunk.data) for f in service.frames) == 2 * 8 * 64 * 1024 * 4


@BOTH
def test_a_refusal_at_the_header_ends_the_upload_and_frees_its_memory(make: Make) -> None:
    def refuse(context: Context) -> None:
        abort_with(context, ServerBusy("busy", retry_after_s=60, operator="x"))

    released = threading.Event()
    call = group_norm(n=8, c=64, hxw=2**13)
    weakref.finalize(call["input"], released.set)
    with fake_service(before=refuse) as service, make(service.address, timeout_s=30) as client:
        error = caught(partial(client.group_norm_backward, **call)).with_traceback(None)
        del call
        assert isinstance(error, ServerBusy)
        assert released.wait(20), "something still holds the operands of a refused call"


def test_a_deadline_ends_a_call_that_stalls() -> None:
    """Of the call or else of its client, before the reply or in the middle of it; all of them at once."""
    gate, arrived_s = Gate(), list[float]()

    def unary(record: OpRecord, request: Any, context: Context) -> Any:
        arrived_s.append(time.monotonic())
        return gate.unary(record, request, context)

    def execute(frames: Any, context: Context) -> Iterator[Any]:
        arrived_s.append(time.monotonic())
        replies = stream_zeros(frames, context)
        yield next(replies)  # the header came, and then nothing
        gate.hold()

    def late(make: Make, way: int, is_submitted: bool) -> Any:
        with make(service.address, timeout_s=4 if is_submitted else 60, stream_from_bytes=way) as client:
            if is_submitted:
                return caught(client.submit.group_norm_backward(**group_norm()).result)
            return caught(lambda: client.group_norm_backward(**group_norm(), timeout_s=4))

    begun_s = time.monotonic()
    with fake_service(unary, execute) as service, ThreadPoolExecutor(8) as pool:
        kinds = itertools.product((Client, Looped), (UNARY, STREAMED), (False, True))
        flying = [pool.submit(late, *kind) for kind in kinds]
        errors = [each.result() for each in flying]
        gate.open()
    assert len(errors) == len(arrived_s) == 8
    for error in errors:
        assert type(error) is DeadlineExceeded, error
        assert not error.retryable
        text = rf"group_norm_backward: no answer from {re.escape(service.address)} within ([\d.]+) s"
        found = re.fullmatch(text, str(error))
        assert found, error
        # All of the time, but for what passed before the call was sent.
        assert 4 - (max(arrived_s) - begun_s) - 0.001 <= float(found[1]) <= 4


@BOTH
def test_a_deadline_that_has_passed_sends_nothing(make: Make) -> None:
    with fake_service() as service, make(service.address) as client:
        for timeout_s in (0, 0.0, -1, -math.inf):
            with pytest.raises(DeadlineExceeded, match=r"backward: the deadline of .* s has already passed"):
                client.group_norm_backward(**group_norm(), timeout_s=timeout_s)
            with pytest.raises(DeadlineExceeded, match="server_info: the deadline"):
                client.server_info(timeout_s=timeout_s)
    assert service.methods == []


@WAYS
@BOTH
def test_no_deadline_is_too_long_and_nan_is_none(make: Make, way: int) -> None:
    with fake_service() as service, make(service.address, timeout_s=1e-9, stream_from_bytes=way) as client:
        for timeout_s in (math.inf, 1e300, 1e9):
            assert client.group_norm_backward(**group_norm(), timeout_s=timeout_s).info.backend == "test"
        with pytest.raises(ValueError, match="timeout_s: found nan"):
            client.group_norm_backward(**group_norm(), timeout_s=math.nan)
