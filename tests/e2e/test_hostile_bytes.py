"""Bytes that are no message, unknown methods and wild metadata: each gets an error, and harms nothing."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from tests.calls import TIMEOUT_S, call_unary, failure_of, sample
from tests.fix_server import ServerProcess

from npugrad.errors import MalformedRequest
from npugrad.ops import OPERATORS

pytestmark = pytest.mark.usefixtures("unharmed")

UNARY = [
    *(f"npugrad.v1.BackwardService/{record.rpc}" for record in OPERATORS.values()),
    "npugrad.v1.ValidationService/Validate",
    "npugrad.v1.ServerService/ListOperators",
]


def send_bytes(channel: grpc.Channel, method: str, data: bytes) -> bytes:
    """Calls a unary method with any bytes as its message."""
    call: Any = channel.unary_unary(f"/{method}")
    return bytes(call(data, timeout=TIMEOUT_S))


# ------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("method", UNARY)
@pytest.mark.parametrize(
    "data", [b"\xff" * 64, b"\x0a\xff\xff\xff\xff\x0f", b"\x12"], ids=["ff", "length", "cut"]
)
def test_bytes_that_are_no_message(channel: grpc.Channel, method: str, data: bytes) -> None:
    failure = failure_of(lambda: send_bytes(channel, method, data))
    assert failure.status is grpc.StatusCode.INVALID_ARGUMENT
    assert isinstance(failure.error, MalformedRequest)
    assert f"found {len(data)} bytes that do not parse; expected npugrad.v1." in str(failure.error)


@pytest.mark.parametrize("after", [0, 1])
def test_bytes_that_are_no_frame(channel: grpc.Channel, after: int) -> None:
    execute: Any = channel.stream_stream("/npugrad.v1.BackwardService/Execute")
    frames = [frame.SerializeToString() for frame in sample().frames()][:after]
    failure = failure_of(lambda: list(execute(iter([*frames, b"\xff" * 9]), timeout=TIMEOUT_S)))
    assert failure.status is grpc.StatusCode.INVALID_ARGUMENT
    assert "found 9 bytes that do not parse; expected npugrad.v1.ExecuteRequest" in str(failure.error)


def test_health_gets_bytes_that_are_no_message(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        send_bytes(channel, "grpc.health.v1.Health/Check", b"\xff" * 64)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_unknown_method_is_unimplemented(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        send_bytes(channel, "npugrad.v1.BackwardService/DropTables", b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


# ---------------------------------------------------------------------------------------- metadata


@pytest.mark.parametrize(
    "metadata",
    [
        [("x-request-id", "a" * 65)],
        [("x-request-id", "two words")],
        [("x-request-id", '"}\\{"')],
        [("x-request-id", "")],
        [("x-request-id-bin", b"\0\xff")],
        [("grpc-status-details-bin", b"\xff" * 100)],
        [(f"x-junk-{i}", "y" * 50) for i in range(60)],
        [("x-request-id", "good"), ("x-request-id", "other")],
    ],
    ids=["long", "space", "quotes", "empty", "binary", "status", "many", "twice"],
)
def test_hostile_metadata_never_reaches_log_or_reply(
    victim: ServerProcess, channel: grpc.Channel, metadata: list[tuple[str, Any]]
) -> None:
    made = sample()
    result = call_unary(channel, made.record, made.message(), metadata=metadata)
    expected = "good" if ("x-request-id", "good") in metadata else None
    given = {value for key, value in metadata if key == "x-request-id"} - {"good"}
    assert result.info.request_id not in given
    assert expected in (None, result.info.request_id)
    assert victim.find_log("call", request_id=result.info.request_id)["operator"] == made.record.name


def test_metadata_beyond_the_limit_of_http2_is_refused_by_the_transport(channel: grpc.Channel) -> None:
    made = sample()
    with pytest.raises(grpc.RpcError) as caught:
        call_unary(channel, made.record, made.message(), metadata=[("x-junk", "y" * 200_000)])
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
