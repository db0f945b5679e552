"""errors.proto is googleapis' own wire format: what other languages read by it is what was sent."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from npugrad.errors import InvalidOperand, MalformedTensor, NpugradError, ServerBusy, Violation
from npugrad.status import encode_status
from npugrad.v1 import errors_pb2

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
ERRORS = st.one_of(
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


@pytest.mark.parametrize(("ours", "theirs"), PEERS.items(), ids=[m.DESCRIPTOR.name for m in PEERS])
def test_every_field_is_theirs(ours: Any, theirs: Any) -> None:
    assert _fields(ours).items() <= _fields(theirs).items()


def test_no_message_is_left_out() -> None:
    names = {message.DESCRIPTOR.full_name for message in PEERS}
    declared = errors_pb2.DESCRIPTOR.message_types_by_name.values()
    assert {m.full_name for m in declared} < names
    nested = {n.full_name for m in declared for n in m.nested_types if not n.GetOptions().map_entry}
    assert nested == {"npugrad.v1.BadRequest.FieldViolation"}


@given(ERRORS)
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
