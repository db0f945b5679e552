"""Errors survive the wire, and their statuses stay small enough for it."""

from __future__ import annotations

import pytest
from google.rpc import code_pb2, error_details_pb2, status_pb2

from npugrad.error_table import ERRORS, ErrorRow
from npugrad.errors import (
    ConnectError,
    DeviceError,
    InvalidOperand,
    MalformedTensor,
    NpugradError,
    OperatorError,
    ServerBusy,
    Violation,
    error_class,
    error_from_details,
)
from npugrad.meta import CallMeta
from npugrad.operator import OpRecord
from npugrad.ops import get_operator
from npugrad.products import Product
from npugrad.status import (
    MAX_MESSAGE_BYTES,
    MAX_STATUS_BYTES,
    ascii_message,
    decode_status,
    encode_status,
    grpc_status_name,
)
from npugrad.validation import error_from_verdict, validate_call


def _over_the_wire(error: NpugradError) -> NpugradError:
    status = encode_status(error, "request-7")
    assert status.ByteSize() <= MAX_STATUS_BYTES
    details = decode_status(status_pb2.Status.FromString(status.SerializeToString()))
    assert details is not None
    return error_from_details(details)


def _everything_null(record: OpRecord) -> CallMeta:
    legal = next(iter(record.samples(next(iter(record.products)))))
    return CallMeta(
        inputs=dict.fromkeys(legal.call.inputs),
        attrs=dict(legal.call.attrs),
        outputs={p.name: None for p in record.outputs},
        product=legal.call.product,
    )


@pytest.mark.parametrize("row", ERRORS, ids=lambda row: row.reason)
def test_every_reason_comes_back_as_its_class(row: ErrorRow) -> None:
    cls = error_class(row.reason)
    error = cls(
        "group_norm_backward: n: found 1; expected 2", reason=row.reason, operator="group_norm_backward"
    )
    if isinstance(error, OperatorError):
        error.code = row.code
    back = _over_the_wire(error)
    assert type(back) is cls
    assert back.reason == row.reason
    assert back.operator == "group_norm_backward"
    assert back.request_id == "request-7"
    assert back.retryable is row.retryable
    assert str(back) == str(error)
    assert code_pb2.Code.Name(encode_status(error).code) == row.grpc_status


def test_violations_of_a_call_that_breaks_much_fit_and_the_first_is_whole(record: OpRecord) -> None:
    error = error_from_verdict(record, validate_call(record, _everything_null(record)))
    back = _over_the_wire(error)
    assert isinstance(back, OperatorError)
    assert back.code == error.code
    assert back.constraint == error.constraint
    assert back.violations_total == len(error.violations)
    assert back.violations[0] == error.violations[0]
    assert [v.id for v in back.violations] == [v.id for v in error.violations][: len(back.violations)]
    assert all(v.code and v.text and v.sources for v in back.violations)


def test_status_stays_small_whatever_is_in_it() -> None:
    long = "ü" * 5000
    violations = [Violation(f"id.{i}", 161002, (f"operand{i}" * 40,), long, long) for i in range(500)]
    error = InvalidOperand(long, code=161002, constraint="c" * 999, violations=violations, operator="o" * 999)
    back = _over_the_wire(error)
    assert isinstance(back, InvalidOperand)
    assert back.violations_total == 500
    assert 1 <= len(back.violations) < 500
    assert len(str(back)) <= MAX_MESSAGE_BYTES


def test_message_is_printable_ascii() -> None:
    assert ascii_message("a\nb\tcé漢\x00d") == "a?b?c??" + "?d"
    assert ascii_message("x" * 600) == "x" * 509 + "..."


def test_retry_delay_travels() -> None:
    back = _over_the_wire(ServerBusy("o: full", retry_after_s=2.25))
    assert isinstance(back, ServerBusy)
    assert back.retry_after_s == 2.25
    without = _over_the_wire(ServerBusy("o: full"))
    assert isinstance(without, ServerBusy)
    assert without.retry_after_s is None


def test_operand_of_a_malformed_tensor_travels() -> None:
    back = _over_the_wire(MalformedTensor("o: mean: found x; expected y", operand="mean"))
    assert isinstance(back, MalformedTensor)
    assert back.operand == "mean"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (161001, "INTERNAL"),
        (161002, "INTERNAL"),
        (561002, "INTERNAL"),
        (561000, "INTERNAL"),
        (361001, "INTERNAL"),
        (561003, "FAILED_PRECONDITION"),
        (561107, "FAILED_PRECONDITION"),
        (561108, "FAILED_PRECONDITION"),
        (561112, "FAILED_PRECONDITION"),
        (507015, "INTERNAL"),
    ],
)
def test_numbers_of_a_device_have_their_own_status(code: int, status: str) -> None:
    """After our validator passed, a device's refusal is our bug or the node's, never the caller's."""
    error = DeviceError("o: device says no", code=code, source="device")
    assert grpc_status_name(error) == status
    back = _over_the_wire(error)
    assert type(back) is DeviceError
    assert back.code == code
    assert back.source == "device"


def test_operator_that_the_product_lacks_keeps_the_vendor_number() -> None:
    for name, code in (
        ("fused_floyd_attention_grad", 561003),
        ("multi_scale_deformable_attention_grad", 561103),
    ):
        record = get_operator(name)
        call = CallMeta(dict.fromkeys(p.name for p in record.inputs), {}, product=Product.ATLAS_TRAINING)
        error = error_from_verdict(record, validate_call(record, call))
        assert grpc_status_name(error) == "UNIMPLEMENTED"
        back = _over_the_wire(error)
        assert isinstance(back, OperatorError)
        assert (back.code, back.reason) == (code, "OPERATOR_UNSUPPORTED")


@pytest.mark.parametrize(
    "status",
    [
        status_pb2.Status(code=3, message="from a proxy"),
        status_pb2.Status(code=3, details=[]),
    ],
)
def test_status_of_someone_else_is_not_ours(status: status_pb2.Status) -> None:
    assert decode_status(status) is None
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="elsewhere.example"))
    assert decode_status(status) is None


def test_reason_of_a_newer_server_is_not_guessed() -> None:
    status = encode_status(ConnectError("x"))
    info = error_details_pb2.ErrorInfo()
    status.details[0].Unpack(info)
    info.reason = "FROM_THE_FUTURE"
    status.details[0].Pack(info)
    assert decode_status(status) is None
