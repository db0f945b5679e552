"""Errors survive the wire, and their statuses stay small enough for it."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto
from google.rpc import code_pb2, error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from npugrad.error_table import ERRORS
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
from npugrad.v1 import errors_pb2
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


def test_every_reason_comes_back_as_its_class() -> None:
    for row in ERRORS:
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


def test_retry_delay_and_operand_travel() -> None:
    for delay in (2.25, None):
        back = _over_the_wire(ServerBusy("o: full", retry_after_s=delay))
        assert isinstance(back, ServerBusy)
        assert back.retry_after_s == delay
    malformed = _over_the_wire(MalformedTensor("o: mean: found x; expected y", operand="mean"))
    assert isinstance(malformed, MalformedTensor)
    assert malformed.operand == "mean"


@pytest.mark.parametrize(
    ("status", "codes"),
    [
        ("INTERNAL", (161001, 161002, 561002, 561000, 361001, 507015)),
        ("FAILED_PRECONDITION", (561003, 561107, 561108, 561112)),
    ],
)
def test_numbers_of_a_device_have_their_own_status(status: str, codes: tuple[int, ...]) -> None:
    """After our validator passed, a device's refusal is our bug or the node's, never the caller's."""
    for code in codes:
        error = DeviceError("o: device says no", code=code, source="device")
        assert grpc_status_name(error) == status
        back = _over_the_wire(error)
        assert type(back) is DeviceError
        assert (back.code, back.source) == (code, "device")


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


def test_status_of_someone_else_or_of_a_newer_server_is_not_ours() -> None:
    status = status_pb2.Status(code=3, message="from a proxy")
    assert decode_status(status) is None
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="elsewhere.example"))
    assert decode_status(status) is None
    status = encode_status(ConnectError("x"))
    info = error_details_pb2.ErrorInfo()
    status.details[0].Unpack(info)
    info.reason = "FROM_THE_FUTURE"
    status.details[0].Pack(info)
    assert decode_status(status) is None


# errors.proto is googleapis' own wire format: what other languages read by it is what was sent.

PEERS: dict[Any, Any] = {
    errors_pb2.ErrorStatus: status_pb2.Status,
    errors_pb2.ErrorInfo: error_details_pb2.ErrorInfo,
    errors_pb2.RetryInfo: error_details_pb2.RetryInfo,
    errors_pb2.BadRequest: error_details_pb2.BadRequest,
    errors_pb2.BadRequest.FieldViolation: error_details_pb2.BadRequest.FieldViolation,
}

TEXT = st.text(max_size=600)
VIOLATIONS = st.lists(
    st.builds(Violation, TEXT, st.just(161002), st.lists(TEXT, max_size=3).map(tuple), TEXT, TEXT),
    max_size=40,
)
ANY_ERROR = st.one_of(
    st.builds(
        InvalidOperand, TEXT, code=st.just(161002), constraint=TEXT, violations=VIOLATIONS, operator=TEXT
    ),
    st.builds(MalformedTensor, TEXT, operand=TEXT, operator=TEXT),
    st.builds(ServerBusy, TEXT, retry_after_s=st.one_of(st.none(), st.floats(0, 1e6))),
)


def _fields(message: Any) -> dict[str, tuple[Any, ...]]:
    """Name and what decides the bytes of each field."""
    declared = DescriptorProto()
    message.DESCRIPTOR.CopyToProto(declared)
    return {f.name: (f.number, f.type, f.label, f.type_name.rpartition(".")[2]) for f in declared.field}


def test_every_field_is_theirs_and_no_message_is_left_out() -> None:
    for ours, theirs in PEERS.items():
        assert _fields(ours).items() <= _fields(theirs).items()
    names = {message.DESCRIPTOR.full_name for message in PEERS}
    declared = errors_pb2.DESCRIPTOR.message_types_by_name.values()
    assert {m.full_name for m in declared} < names
    nested = {n.full_name for m in declared for n in m.nested_types if not n.GetOptions().map_entry}
    assert nested == {"npugrad.v1.BadRequest.FieldViolation"}


@given(ANY_ERROR)
def test_what_is_sent_is_read_in_full(error: NpugradError) -> None:
    sent = encode_status(error, "request-7")
    read = errors_pb2.ErrorStatus.FromString(sent.SerializeToString())
    assert (read.code, read.message) == (sent.code, sent.message)
    assert len(read.details) == len(sent.details)
    kinds = []
    for detail, original in zip(read.details, sent.details, strict=True):
        prefix, _, kind = detail.type_url.rpartition(".")
        assert prefix == "type.googleapis.com/google.rpc"
        kinds.append(kind)
        message = getattr(errors_pb2, kind).FromString(detail.value)
        theirs = getattr(error_details_pb2, kind).FromString(original.value)
        message.DiscardUnknownFields()  # there are none: it says the same without them
        assert getattr(error_details_pb2, kind).FromString(message.SerializeToString()) == theirs
    assert kinds == [k for k in ("ErrorInfo", "RetryInfo", "BadRequest") if k in kinds]
    assert kinds[0] == "ErrorInfo"
