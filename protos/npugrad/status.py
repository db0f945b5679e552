"""Encodes and decodes errors: `google.rpc.Status` with ErrorInfo, BadRequest and RetryInfo.

A serialized status stays under 4 KiB, because gRPC loses statuses above about 8 KiB of metadata: the first
violation is sent in full, the others as identifier and operands while they fit, and `violations_total` is the
number of all. `Validate` returns all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2, error_details_pb2, status_pb2

from npugrad.error_table import BY_REASON, DOMAIN
from npugrad.errors import ErrorDetails, NpugradError, OperatorError, RequestError, TransportError, Violation
from npugrad.ops import OPERATORS
from npugrad.representation import make_printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from npugrad.operator import OpRecord

MAX_STATUS_BYTES = 4096
MAX_MESSAGE_BYTES = 512


def ascii_message(text: str, limit: int = MAX_MESSAGE_BYTES) -> str:
    """The text in printable ASCII, at most `limit` bytes, because gRPC percent-encodes anything else."""
    clean = "".join(c if " " <= c <= "~" else "?" for c in text)
    return clean if len(clean) <= limit else clean[: limit - 3] + "..."


def grpc_status_name(error: NpugradError) -> str:
    """Name of the gRPC status of an error, by its reason and by who found it."""
    row = error.row
    # Codes of the device's runtime have reasons of our own, with their own status.
    from_device = isinstance(error, OperatorError) and error.source == "device" and row.code is not None
    return row.device_grpc_status if from_device else row.grpc_status


def encode_status(error: NpugradError, request_id: str = "") -> status_pb2.Status:
    """The status of an error, under 4 KiB."""
    metadata = {"operator": error.operator, "request_id": request_id or error.request_id}
    violations: tuple[Violation, ...] = ()
    if isinstance(error, OperatorError):
        violations = error.violations
        metadata |= {"source": error.source, "constraint": error.constraint}
        metadata |= {"code": "" if error.code is None else str(error.code)}
        metadata |= {"violations_total": str(error.violations_total) if violations else ""}
    elif isinstance(error, RequestError):
        metadata |= {"operand": error.operand}
    status = status_pb2.Status(
        code=code_pb2.Code.Value(grpc_status_name(error)), message=ascii_message(str(error))
    )
    info = error_details_pb2.ErrorInfo(
        reason=error.reason,
        domain=DOMAIN,
        metadata={k: ascii_message(v, 128) for k, v in metadata.items() if v},
    )
    status.details.add().Pack(info)
    if isinstance(error, TransportError) and error.retry_after_s is not None:
        delay = Duration(nanos=int(error.retry_after_s % 1 * 1e9), seconds=int(error.retry_after_s))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    if violations:
        bad_request = _fitting(violations, MAX_STATUS_BYTES - status.ByteSize() - 64)
        status.details.add().Pack(bad_request)
    return status


def _fitting(violations: Iterable[Violation], room: int) -> error_details_pb2.BadRequest:
    bad_request = error_details_pb2.BadRequest()
    for index, violation in enumerate(violations):
        entry = error_details_pb2.BadRequest.FieldViolation(
            field=ascii_message(",".join(violation.operands), 128), reason=violation.id
        )
        if index == 0:
            found, expected = ascii_message(violation.found, 256), ascii_message(violation.expected, 256)
            entry.description = f"found {found}; expected {expected}"
        room -= entry.ByteSize() + 4
        if room < 0:
            break
        bad_request.field_violations.append(entry)
    return bad_request


def decode_status(
    status: status_pb2.Status, records: Mapping[str, OpRecord] = OPERATORS
) -> ErrorDetails | None:
    """Decodes a status of this service; None if it is not one."""
    info = error_details_pb2.ErrorInfo()
    bad_request, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    retry_after_s = None
    for detail in status.details:
        # Unpack returns False and changes nothing for a detail of another type.
        if detail.Unpack(info) or detail.Unpack(bad_request):
            continue
        if detail.Unpack(retry):
            retry_after_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    if info.domain != DOMAIN or info.reason not in BY_REASON:
        return None
    for text in (status, info, bad_request):
        make_printable(text)
    metadata = dict(info.metadata)
    violations = tuple(
        _violation(records.get(metadata.get("operator", "")), v) for v in bad_request.field_violations
    )
    return ErrorDetails(info.reason, status.message, metadata, violations, retry_after_s)


def _violation(record: OpRecord | None, entry: error_details_pb2.BadRequest.FieldViolation) -> Violation:
    found, _, expected = entry.description.removeprefix("found ").partition("; expected ")
    operands = tuple(entry.field.split(","))
    # The record on this side has the rest, so it is not sent.
    known = next((c for c in record.constraints if c.id == entry.reason), None) if record else None
    if known is None:
        return Violation(entry.reason, 0, operands, found, expected)
    return Violation(entry.reason, known.code, operands, found, expected, known.text, known.sources)
