"""Each constraint proves itself over loopback, on a server of each product.

A legal sample passes; after `violate` exactly that constraint is reported, with its code, in all three ways:
by `Validate`, by an `Execute` header with no payload behind it, and by the unary method. What comes over the
wire is compared with what the validator says here; that it is right is shown by the tests of the contract.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from tests.calls import header_frame
from tests.e2e.harness import CALL_TIMEOUT_S, RECORDS, Wire, case
from tests.fix_server import run_quick_server
from tests.summary import Tally

from npugrad import codec
from npugrad.error_table import BY_REASON, DOMAIN
from npugrad.errors import OperatorError, Violation, error_class
from npugrad.meta import CallMeta
from npugrad.operator import Constraint, OpRecord, Sample
from npugrad.products import Product
from npugrad.status import MAX_STATUS_BYTES
from npugrad.v1 import backward_pb2, validation_pb2
from npugrad.validation import Verdict, error_from_verdict, validate_call
from npugrad_client._attempt import Attempt
from npugrad_client.errors import translate

UNARY_BYTES = 2**20
"""Calls with less data are also sent whole."""
SAMPLES = {Product.ATLAS_A2: 2}
"""Samples that each constraint is proved with, first to last, and one on the other products; the tests of the
contract take them all."""


def spread(samples: list[tuple[Sample, CallMeta]], count: int) -> list[tuple[Sample, CallMeta]]:
    """Some of them, from the first to the last."""
    if len(samples) <= count or count == 1:
        return samples[:count]
    return [samples[index * (len(samples) - 1) // (count - 1)] for index in range(count)]


# ------------------------------------------------------------------------------------------- three ways


def request(record: OpRecord, call: CallMeta, content: str) -> Any:
    """The typed request of a call; its contents are none, zeros, or announced in chunks that never come."""
    message, _ = codec.encode_request(call.inputs, {}, record, call.attrs, call.outputs)
    for name, meta in call.inputs.items():
        if meta is None or content == "none":
            continue
        if content == "zeros":
            getattr(message, name).data = bytes(meta.content_bytes)
        else:
            getattr(message, name).chunked_bytes = meta.content_bytes
    return message


def validate(wire: Wire, record: OpRecord, call: CallMeta) -> validation_pb2.ValidateResponse:
    """What `Validate` says, for the call's product whatever the server's."""
    call_header = codec.wrap(backward_pb2.ExecuteHeader(), record, request(record, call, "none"))
    message = validation_pb2.ValidateRequest(call=call_header, product=call.product.wire)  # type: ignore[arg-type]
    return wire.validation.Validate(message, timeout=CALL_TIMEOUT_S)


def refused_execute(wire: Wire, record: OpRecord, call: CallMeta) -> grpc.RpcError:
    """How a header is refused while its payload is still to come: the client's side stays open."""
    answered = threading.Event()

    def frames() -> Iterator[backward_pb2.ExecuteRequest]:
        yield header_frame(record, request(record, call, "announced"))
        answered.wait(CALL_TIMEOUT_S)

    stream = wire.backward.Execute(frames(), timeout=CALL_TIMEOUT_S)
    try:
        with pytest.raises(grpc.RpcError) as caught:
            next(iter(stream))
    finally:
        answered.set()
    return caught.value


def refused_unary(wire: Wire, record: OpRecord, call: CallMeta, content: str) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        wire.unary(record, request(record, call, content))
    return caught.value


# ---------------------------------------------------------------------------------------- what is expected


def assert_validated(response: validation_pb2.ValidateResponse, expected: Verdict, product: Product) -> None:
    """`Validate` says all that the validator says."""
    assert (response.status, response.product) == (expected.status, product.wire)
    assert [v.id for v in response.violations] == [v.id for v in expected.violations]
    for found, violation in zip(response.violations, expected.violations, strict=True):
        assert (found.code, tuple(found.operands)) == (violation.code, violation.operands)
        assert (found.found, found.expected, found.text) == (
            violation.found,
            violation.expected,
            violation.text,
        )
        sources = [(s.document, s.section, s.row) for s in violation.sources]
        assert [(s.document, s.section, s.row) for s in found.sources] == sources
    metas = {
        o.name: codec.decode_meta(o.meta, "", o.name) if o.HasField("meta") else None
        for o in response.outputs
    }
    assert metas == expected.outputs
    assert not response.HasField("workspace_bytes")  # no device here can tell it


def assert_refused(error: Any, record: OpRecord, expected: Verdict) -> None:
    """A status says what the validator says: gRPC status, ErrorInfo, field violations, within 4 KiB."""
    local = error_from_verdict(record, expected)
    first = expected.violations[0]
    row = BY_REASON[local.reason]
    assert error.code().name == row.grpc_status
    assert error.details() == str(local)
    trailing = dict(error.trailing_metadata())
    serialized = trailing["grpc-status-details-bin"]
    assert len(serialized) < MAX_STATUS_BYTES
    status = status_pb2.Status.FromString(serialized)
    assert (status.code, status.message) == (error.code().value[0], str(local))
    info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert len(status.details) == 2
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(bad_request)
    assert (info.reason, info.domain) == (row.reason, DOMAIN)
    assert dict(info.metadata) == {
        "operator": record.name,
        "code": str(first.code),
        "constraint": first.id,
        "source": "validator",
        "violations_total": str(len(expected.violations)),
        "request_id": trailing["x-request-id"],
    }
    assert [v.reason for v in bad_request.field_violations] == [v.id for v in expected.violations]
    entry = bad_request.field_violations[0]
    assert entry.field == ",".join(first.operands)
    assert entry.description == f"found {first.found}; expected {first.expected}"
    assert_translated(translate(error, Attempt(record.name, "loopback")), local, first)


def assert_translated(raised: Exception, local: OperatorError, first: Violation) -> None:
    """The client raises what the validator would raise here."""
    assert isinstance(raised, OperatorError)
    assert type(raised) is type(local) is error_class(local.reason)
    assert (raised.code, raised.constraint, raised.source) == (local.code, local.constraint, "validator")
    assert (raised.operator, raised.reason, raised.retryable) == (local.operator, local.reason, False)
    assert raised.violations[0] == first
    assert raised.request_id


# ------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize(
    "product",
    [product if product in SAMPLES else pytest.param(product, marks=pytest.mark.deep) for product in Product],
)
def test_constraints_prove_themselves_over_loopback(product: Product, tmp_path: Path, tally: Tally) -> None:
    with (
        run_quick_server(tmp_path / "log", "--product", str(product)) as running,
        running.channel() as channel,
    ):
        wire = Wire.of(channel)
        for record in RECORDS:
            with case(record.name):
                if product in record.products:
                    assert_legal(wire, record, product, tally)
                    for constraint in record.constraints:
                        if constraint.applies(product):
                            assert_proved(wire, record, constraint, product, tally)
                else:
                    assert_lacking(wire, record, product, tally)


def assert_legal(wire: Wire, record: OpRecord, product: Product, tally: Tally) -> None:
    """The record's samples are valid."""
    for sample in record.samples(product):
        expected = validate_call(record, sample.call)
        assert expected.status == 0, sample.name
        assert_validated(validate(wire, record, sample.call), expected, product)
        tally("constraints over loopback: legal samples validated", 1)


def assert_proved(
    wire: Wire, record: OpRecord, constraint: Constraint, product: Product, tally: Tally
) -> None:
    """Samples that break a constraint are refused for it and nothing else."""
    broken = [(sample, constraint.violate(sample.call)) for sample in record.samples(product)]
    found = [(sample, call) for sample, call in broken if call is not None]
    assert found, f"no sample can show {constraint.id}"
    for sample, call in spread(found, SAMPLES.get(product, 1)):
        expected = validate_call(record, call)
        with case(constraint.id, sample.name):
            assert [v.id for v in expected.violations] == [constraint.id]
            assert expected.status == constraint.code
            assert_validated(validate(wire, record, call), expected, call.product)
            tally("constraints over loopback: refused by Validate", 1)
            if call.product is not product:  # a server of another one: see `assert_lacking`
                continue
            assert_refused(refused_execute(wire, record, call), record, expected)
            whole = sum(m.content_bytes for m in call.inputs.values() if m is not None) < UNARY_BYTES
            # Constraints come before the lengths of contents, so a large call may come with none.
            content = "zeros" if whole else "none"
            assert_refused(refused_unary(wire, record, call, content), record, expected)
        tally("constraints over loopback: refused by an Execute header, no payload sent", 1)
        tally(f"constraints over loopback: refused by a unary call with {content} as content", 1)
    tally(f"constraints over loopback: constraints on {product}", 1)


def assert_lacking(wire: Wire, record: OpRecord, product: Product, tally: Tally) -> None:
    """Even a call that breaks everything else is answered by the missing operator alone, and unretryably."""
    sample = next(iter(record.samples(next(iter(record.products)))))
    nothing = sample.call.with_inputs(**dict.fromkeys(sample.call.inputs))
    for legal in (sample.call, nothing):
        call = replace(legal, product=product)
        expected = validate_call(record, call)
        assert len(expected.violations) == 1
        error = refused_unary(wire, record, call, "none")
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        assert_refused(error, record, expected)
        assert_refused(refused_execute(wire, record, call), record, expected)
    assert record.name not in wire.info().operators
    tally("constraints over loopback: products without an operator", 1)
