"""What nobody should send: each thing gets a typed error, and the server stays healthy."""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from tests.calls import TIMEOUT_S, call_execute, call_unary, failure_of, fill, sample

from npugrad.codec import encode_meta
from npugrad.errors import InvalidOperand, MalformedRequest, MalformedTensor, NullOperand, OperatorError
from npugrad.meta import MAX_RANK, TensorMeta
from npugrad.ops import OPERATORS, get_operator
from npugrad.status import MAX_STATUS_BYTES
from npugrad.v1 import backward_pb2, operators_pb2, tensor_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fix_server import ServerProcess

UNARY = [
    *(f"npugrad.v1.BackwardService/{record.rpc}" for record in OPERATORS.values()),
    "npugrad.v1.ValidationService/Validate",
    "npugrad.v1.ServerService/ListOperators",
]


@pytest.fixture(scope="module")
def channel(server: ServerProcess) -> Iterator[grpc.Channel]:
    with server.channel() as opened:
        yield opened


@pytest.fixture(autouse=True)
def still_healthy(server: ServerProcess) -> Iterator[None]:
    """After each test the server answers, right, and has nothing in use."""
    yield
    made = sample()
    with server.channel() as channel:
        result = call_unary(channel, made.record, made.message())
    assert {name: content.data for name, content in result.contents.items()} == made.reference()
    server.assert_nothing_leaked()
    assert not server.log_lines("unexpected error")


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


@pytest.mark.parametrize("operator", OPERATORS)
def test_damaged_headers_are_refused_or_computed_but_break_nothing(
    channel: grpc.Channel, operator: str
) -> None:
    """Bits of a good header are flipped; whatever comes back is an answer or an error of the contract."""
    rng = random.Random(7)
    record = get_operator(operator)
    header, *chunks = (frame.SerializeToString() for frame in fill(record, record.build()).frames())
    execute: Any = channel.stream_stream("/npugrad.v1.BackwardService/Execute")
    outcomes: Counter[str] = Counter()
    for _ in range(100):
        damaged = bytearray(header)
        for _ in range(rng.choice([1, 1, 2, 8])):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        try:
            list(execute(iter([bytes(damaged), *chunks]), timeout=TIMEOUT_S))
            outcomes["OK"] += 1
        except grpc.RpcError as error:
            outcomes[error.code().name] += 1
    assert set(outcomes) <= {"OK", "INVALID_ARGUMENT", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED"}, outcomes
    assert outcomes["INVALID_ARGUMENT"] > 50, outcomes


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
    server: ServerProcess, channel: grpc.Channel, metadata: list[tuple[str, Any]]
) -> None:
    made = sample()
    result = call_unary(channel, made.record, made.message(), metadata=metadata)
    expected = "good" if ("x-request-id", "good") in metadata else None
    given = {value for key, value in metadata if key == "x-request-id"} - {"good"}
    assert result.info.request_id not in given
    assert expected in (None, result.info.request_id)
    assert server.find_log("call", request_id=result.info.request_id)["operator"] == made.record.name


def test_metadata_beyond_the_limit_of_http2_is_refused_by_the_transport(channel: grpc.Channel) -> None:
    made = sample()
    with pytest.raises(grpc.RpcError) as caught:
        call_unary(channel, made.record, made.message(), metadata=[("x-junk", "y" * 200_000)])
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        ({"priority": 101}, "priority"),
        ({"priority": -(2**31)}, "priority"),
        ({"label": "x" * 65}, "label"),
        ({"label": "a\nb"}, "label"),
        ({"label": "\u00e9"}, "label"),
    ],
)
def test_options_out_of_range(channel: grpc.Channel, options: dict[str, Any], culprit: str) -> None:
    made = sample()
    message = made.message()
    message.options.CopyFrom(operators_pb2.CallOptions(**options))
    failure = failure_of(lambda: call_unary(channel, made.record, message))
    assert isinstance(failure.error, MalformedRequest)
    assert failure.error.operand == culprit


# ----------------------------------------------------------------------------------------- tensors


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"data_type": 0}, "found data type 0"),
        ({"data_type": 99}, "found data type 99"),
        ({"format": 77}, "found format 77"),
        ({"shape": [-1, 6, 4]}, r"found shape \[-1, 6, 4\]"),
        ({"shape": [-(2**63)]}, "found shape"),
        ({"shape": [2**62, 2**62]}, "2\\^63 - 1 bytes"),
        ({"shape": [2**63 - 1]}, "2\\^63 - 1 bytes"),
        ({"shape": [1] * (MAX_RANK + 1)}, f"found rank {MAX_RANK + 1}"),
        ({"shape": [1] * 100_000}, "found rank 100000"),
        ({"strides": [1]}, "found 1 strides"),
        ({"strides": [-24, 4, 1]}, "found strides"),
        ({"strides": [2**62, 2**62, 2**62]}, "found"),
        ({"strides": [1] * 100_000}, "found 100000 strides"),
        ({"storage_offset": -1}, "found storage offset -1"),
        ({"storage_offset": 2**63 - 1}, "found"),
        ({"storage_offset": 1}, "found 192 bytes of content; expected 196"),
        ({"strides": [24, 4, 2]}, "found 192 bytes of content"),
    ],
)
@pytest.mark.parametrize("way", ["unary", "execute"])
def test_tensor_that_is_not_sane(
    channel: grpc.Channel, change: dict[str, Any], complaint: str, way: str
) -> None:
    made = sample()
    message = made.message() if way == "unary" else made.header()[0].header.group_norm_backward
    for name, value in change.items():
        if isinstance(value, list):
            getattr(message.input.meta, name)[:] = value
        else:
            setattr(message.input.meta, name, value)
    if way == "unary":
        failure = failure_of(lambda: call_unary(channel, made.record, message))
    else:
        header = backward_pb2.ExecuteRequest(header=backward_pb2.ExecuteHeader(group_norm_backward=message))
        failure = failure_of(lambda: call_execute(channel, [header]))
    assert failure.status is grpc.StatusCode.INVALID_ARGUMENT
    assert isinstance(failure.error, MalformedTensor)
    assert failure.error.operand == "input"
    assert "group_norm_backward: input: found" in str(failure.error)
    with pytest.raises(MalformedTensor, match=complaint):
        raise failure.error


def test_one_element_repeated_to_a_terabyte_is_refused_before_anything_is_made_of_it(
    channel: grpc.Channel,
) -> None:
    """2^40 elements travel as one; results would need 4 TiB."""
    made = sample(n=1, c=4, hxw=1, group=2)
    message = made.message()
    message.hxw = 2**38
    for name in ("grad_out", "input"):
        tensor = getattr(message, name)
        tensor.ClearField("meta")
        encode_meta(TensorMeta("float32", (1, 4, 2**38), strides=(0, 0, 0)), tensor.meta)
        tensor.data = bytes(4)
    failure = failure_of(lambda: call_unary(channel, made.record, message))
    assert failure.status is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert failure.error.reason == "CALL_TOO_LARGE"
    header = backward_pb2.ExecuteRequest(header=backward_pb2.ExecuteHeader(group_norm_backward=message))
    failure = failure_of(lambda: call_execute(channel, [header]))
    assert failure.error.reason == "CALL_TOO_LARGE"


def test_unsupported_type_is_a_documented_violation_and_not_a_parse_error(channel: grpc.Channel) -> None:
    made = sample()
    message = made.message()
    for name in ("grad_out", "input", "mean", "rstd", "gamma"):
        tensor = getattr(message, name)
        tensor.meta.data_type = tensor_pb2.DATA_TYPE_FLOAT8_E4M3FN
        tensor.ClearField("data")
    failure = failure_of(lambda: call_unary(channel, made.record, message))
    assert isinstance(failure.error, InvalidOperand)
    assert failure.error.constraint == "grad_out.dtype"


def test_values_that_are_not_finite_are_computed(channel: grpc.Channel) -> None:
    made = sample()
    grad_out = made.arrays["grad_out"]
    assert grad_out is not None
    grad_out.reshape(-1)[:3] = [np.nan, np.inf, -np.inf]
    result = call_unary(channel, made.record, made.message())
    assert {name: content.data for name, content in result.contents.items()} == made.reference()


def test_level_sizes_that_point_outside_are_computed_without_leaving_the_tensor(
    channel: grpc.Channel,
) -> None:
    made = sample("multi_scale_deformable_attention_grad")
    for name in ("spatial_shape", "level_start_index"):
        array = made.arrays[name]
        assert array is not None
        array[...] = 1_065_353_216
    result = call_unary(channel, made.record, made.message())
    assert {name: content.data for name, content in result.contents.items()} == made.reference()


# ---------------------------------------------------------------------------------------- statuses


def test_call_that_breaks_everything_always_gets_the_same_status(channel: grpc.Channel) -> None:
    """Every constraint that can be broken together is broken, 200 times."""
    record = get_operator("group_norm_backward")
    message = operators_pb2.GroupNormBackwardRequest(n=-1, c=-3, hxw=-4, group=0)
    message.output_mask.values.extend([True])
    for name in ("grad_out", "rstd", "gamma"):
        encode_meta(TensorMeta("int8", (1,) * 9), getattr(message, name).meta)
    for name in ("grad_input", "grad_gamma", "grad_beta"):
        getattr(message, name).SetInParent()
    metadata = [("x-request-id", "always-the-same")]
    header = backward_pb2.ExecuteRequest(header=backward_pb2.ExecuteHeader(group_norm_backward=message))

    def unary() -> object:
        return call_unary(channel, record, message, metadata=metadata)

    def execute() -> object:
        return call_execute(channel, [header], metadata=metadata)

    failures = [failure_of(act) for act in (unary, execute) * 100]
    assert all(isinstance(failure.error, NullOperand) for failure in failures)
    assert len({(failure.status, failure.raw) for failure in failures}) == 1


@pytest.mark.parametrize("operator", OPERATORS)
def test_nothing_but_nulls_tells_the_first_null_in_a_status_that_fits(
    channel: grpc.Channel, operator: str
) -> None:
    record = get_operator(operator)
    message = getattr(operators_pb2, f"{record.rpc}Request")()
    for attr in record.attrs:
        if attr.type == "bool_array":
            getattr(message, attr.name).values.extend([True] * len(record.outputs))
        else:
            setattr(message, attr.name, 1)
    for output in record.outputs:
        getattr(message, output.name).SetInParent()
    failure = failure_of(lambda: call_unary(channel, record, message))
    assert isinstance(failure.error, OperatorError)
    assert failure.error.code == 161001
    assert failure.error.violations_total == len(record.inputs) - sum(
        p.optional for p in record.inputs
    ) + len(record.outputs)
    assert len(failure.raw) <= MAX_STATUS_BYTES


def test_random_contents_of_a_header_break_nothing(channel: grpc.Channel) -> None:
    execute: Any = channel.stream_stream("/npugrad.v1.BackwardService/Execute")
    for _ in range(50):
        failure = failure_of(lambda: list(execute(iter([os.urandom(200)]), timeout=TIMEOUT_S)))
        assert isinstance(failure.error, (MalformedRequest, MalformedTensor))
