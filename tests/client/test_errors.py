"""Every error over a real connection: the right class, number and words, whatever happened to its details."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from tests.client.both import Looped
from tests.client.fake_service import (
    STATUS_KEY,
    STREAMED,
    UNARY,
    Context,
    Seen,
    abort_with,
    fake_service,
    group_norm,
)

import npugrad_client
import npugrad_client.errors
from npugrad import errors
from npugrad.error_table import BY_REASON, ERRORS
from npugrad.errors import (
    CallTooLarge,
    ConnectError,
    DeadlineExceeded,
    DeviceError,
    InvalidOperand,
    MalformedRequest,
    NpugradError,
    NullOperand,
    OperatorError,
    RequestError,
    ServerBusy,
    TilingError,
    TransportError,
    UnsupportedOperator,
    Violation,
    error_class,
)
from npugrad.ops import get_operator
from npugrad.status import encode_status
from npugrad.validation import error_from_verdict, make_call, validate_call
from npugrad_client import Client, TensorMeta
from npugrad_client._attempt import Attempt
from npugrad_client._older import version_question
from npugrad_client.errors import STATUS_CLASSES

End = Callable[[Context], object]
RECORD = get_operator("group_norm_backward")


ENDS: list[End] = []
"""How a call ends, which is the last one."""


@pytest.fixture(scope="module")
def service() -> Iterator[Seen]:
    with fake_service(before=lambda context: ENDS[-1](context)) as seen:
        yield seen


@pytest.fixture(scope="module", params=[UNARY, STREAMED], ids=["unary", "streamed"])
def way(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module", params=[Client, Looped], ids=["threads", "asyncio"])
def client(request: pytest.FixtureRequest, service: Seen, way: int) -> Iterator[Any]:
    with request.param(service.address, timeout_s=20, stream_from_bytes=way, retry=None) as made:
        yield made


@pytest.fixture
def error_of(client: Any) -> Callable[[End], NpugradError]:
    """Gives what a call raises when the server ends it in some way."""

    def call(end: End) -> NpugradError:
        ENDS.append(end)
        with pytest.raises(NpugradError) as caught:
            client.group_norm_backward(**group_norm())
        error = caught.value
        assert error.__cause__ is None, "a second exception, of grpc's"
        assert error.__suppress_context__ or error.__context__ is None
        return caught.value

    return call


ErrorOf = Callable[[End], NpugradError]


def made(reason: str, source: str) -> NpugradError:
    """An error of a row as the server raises it."""
    cls, row = error_class(reason, source), BY_REASON[reason]
    common: dict[str, Any] = {"reason": reason, "operator": RECORD.name}
    if issubclass(cls, OperatorError):
        common |= {"code": row.code, "source": source}
    if issubclass(cls, RequestError):
        common["operand"] = "gamma"
    if issubclass(cls, TransportError):
        common["retry_after_s"] = 1.25
    return cls(f"{RECORD.name}: gamma: found this; expected that", **common)


# -------------------------------------------------------------------------------------------- the table


def test_every_row_arrives_as_it_was_raised(error_of: ErrorOf, client: Any) -> None:
    for row in ERRORS if isinstance(client, Client) else ERRORS[::4]:
        for source in ("validator", "device") if row.code is not None else ("validator",):
            sent = made(row.reason, source)
            got = error_of(lambda context, sent=sent: abort_with(context, sent))  # type: ignore[misc]
            assert type(got) is type(sent)
            assert str(got) == str(sent)
            assert got.request_id == "abc123"
            same = {name: value for name, value in vars(sent).items() if name not in ("request_id", "source")}
            assert {name: getattr(got, name) for name in same} == same
            if isinstance(sent, OperatorError):
                assert isinstance(got, OperatorError)
                assert got.source == source
            assert isinstance(got.cause, grpc.RpcError)


CLASSES_OF_CODES = {161001: NullOperand, 161002: InvalidOperand, 561002: TilingError}


def test_every_class_of_the_table_is_public() -> None:
    for row in ERRORS:
        for source in ("validator", "device"):
            cls = error_class(row.reason, source)
            assert getattr(npugrad_client, cls.__name__) is cls
        if row.code is not None:
            assert error_class(row.reason) is CLASSES_OF_CODES.get(row.code, DeviceError)
            assert error_class(row.reason, "device") is DeviceError


# ------------------------------------------------------------------------------------------- violations


def broken_call() -> tuple[OperatorError, tuple[Violation, ...]]:
    """The error of a call that breaks many constraints, and all its violations."""
    call = make_call(
        RECORD,
        {p.name: TensorMeta("int8", (1,) * 9) for p in RECORD.inputs},
        {"n": -1, "c": 7, "hxw": -1, "group": 2, "output_mask": (True,)},
    )
    verdict = validate_call(RECORD, call)
    return error_from_verdict(RECORD, verdict), verdict.violations


def test_violations_are_completed_from_the_record_and_the_first_is_told(error_of: ErrorOf) -> None:
    sent, violations = broken_call()
    assert len(violations) > 8
    got = error_of(lambda context: abort_with(context, sent))
    assert isinstance(got, InvalidOperand)
    assert got.violations_total == len(violations)
    assert got.violations[0] == violations[0]
    for arrived, original in zip(got.violations, violations, strict=False):
        assert (arrived.id, arrived.code, arrived.text) == (original.id, original.code, original.text)
        assert (arrived.sources, arrived.operands) == (original.sources, original.operands)
    first = violations[0]
    assert str(got).startswith(
        f"group_norm_backward: {first.operands[0]}: found {first.found}; expected {first.expected}"
    )
    assert f"and {len(violations) - 1} more" in str(got)
    back = pickle.loads(pickle.dumps(got))
    assert {**vars(back), "cause": back.cause} == {**vars(got), "cause": None}
    assert (back.constraint, back.tries) == (got.constraint, 1)


def test_a_constraint_of_a_newer_server_is_kept_as_it_came(error_of: ErrorOf) -> None:
    unknown = Violation("gamma.newer_rule", 161002, ("gamma",), "this", "that")
    sent = InvalidOperand("gamma: ...", code=161002, violations=(unknown,), operator=RECORD.name)
    got = error_of(lambda context: abort_with(context, sent))
    assert isinstance(got, InvalidOperand)
    assert (got.violations[0].id, got.violations[0].found) == ("gamma.newer_rule", "this")


# --------------------------------------------------------------------------------------------- pickling


def test_every_error_can_be_pickled_and_copied() -> None:
    for row in ERRORS:
        error = made(row.reason, "device")
        error.cause = ValueError("not to be pickled")
        for back in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
            assert type(back) is type(error)
            assert str(back) == str(error)
            assert {**vars(back), "cause": back.cause} == {**vars(error), "cause": None}


# -------------------------------------------------------------------------- statuses without our details

CLASSES = {
    "CANCELLED": ConnectError,  # nobody here cancelled, so the server did, because it ends
    "INVALID_ARGUMENT": RequestError,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "RESOURCE_EXHAUSTED": ServerBusy,
    "UNIMPLEMENTED": UnsupportedOperator,
    "UNAVAILABLE": ConnectError,
}
FAILURES = [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]


def test_a_status_without_details_keeps_its_words(error_of: ErrorOf, service: Seen) -> None:
    assert set(STATUS_CLASSES) == set(FAILURES)
    for code in FAILURES:
        got = error_of(lambda context, code=code: context.abort(code, "what the proxy says"))  # type: ignore[misc]
        assert type(got) is CLASSES.get(code.name, NpugradError)
        assert service.address in str(got)
        assert str(got).startswith("group_norm_backward: ")
        if code is not grpc.StatusCode.DEADLINE_EXCEEDED:
            assert "what the proxy says" in str(got)
        assert got.operator == "group_norm_backward"
        assert got.retryable is (code.name in ("CANCELLED", "RESOURCE_EXHAUSTED", "UNAVAILABLE"))
        assert isinstance(got.cause, grpc.RpcError)
    said = "Received message larger than max (5000000 vs. 4194304)"
    got = error_of(lambda context: context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, said))
    assert type(got) is CallTooLarge
    assert said in str(got)
    assert not got.retryable, "a limit on the way"


def details(*, value: bytes | None = None, **info: str) -> bytes:
    """A status with one detail, or with bytes of another kind in its place."""
    status = status_pb2.Status(code=3, message="no")
    if value is None:
        status.details.add().Pack(error_details_pb2.ErrorInfo(**info))
    else:
        status.details.add(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=value)
    return bytes(status.SerializeToString())


GARBAGE = {
    "bytes": b"\xff\xfe\xfd",
    "empty": b"",
    "foreign": details(reason="ACLNN_ERR_PARAM_INVALID", domain="other.example"),
    "newer": details(reason="NEWER", domain="npugrad"),
    "mistyped": details(value=b"\xff\xff\xff"),
}


def test_details_that_are_not_ours_change_nothing(error_of: ErrorOf) -> None:
    for name, garbage in GARBAGE.items():

        def end(context: Context, garbage: bytes = garbage) -> None:
            context.set_trailing_metadata(((STATUS_KEY, garbage),))
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no")

        got = error_of(end)
        assert type(got) is RequestError, name
        assert str(got).endswith("INVALID_ARGUMENT: no"), name


def test_details_survive_a_proxy_that_rewrote_code_and_message(error_of: ErrorOf) -> None:
    def end(context: Context) -> None:
        status = encode_status(broken_call()[0])
        context.set_trailing_metadata(((STATUS_KEY, status.SerializeToString()),))
        context.abort(grpc.StatusCode.UNKNOWN, "upstream error")

    got = error_of(end)
    assert isinstance(got, InvalidOperand)
    assert got.code == 161002


def test_the_public_list_and_the_tree_of_the_docstring_are_all_classes_of_the_contract() -> None:
    classes = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, NpugradError)
    }
    assert set(npugrad_client.errors.__all__) == classes | {"TlsError"}  # which only a client meets
    assert classes <= set(npugrad_client.__all__)
    drawn = npugrad_client.errors.__doc__ or ""
    for name in npugrad_client.errors.__all__:
        assert f" {name} " in drawn or drawn.startswith(name) or f"\n{name} " in drawn, name


# ------------------------------------------------------------------------- servers that lack an operator

NO_CALL = "execute: header: found no call; expected one of gelu_backward"


@pytest.mark.parametrize("way", [STREAMED], indirect=True, ids=["streamed"])
def test_a_server_that_lacks_an_operator_may_keep_its_version_to_itself(error_of: ErrorOf) -> None:
    for error in (MalformedRequest(NO_CALL), UnsupportedOperator("found an unknown operator")):
        found = error_of(lambda context, error=error: abort_with(context, error))  # type: ignore[misc]
        assert type(found) is UnsupportedOperator
        assert (found.reason, found.operator) == ("OPERATOR_UNSUPPORTED", RECORD.name)
        assert found.request_id == "abc123"
        assert "this server, of unknown version, does not have this operator" in str(found)
    for error in (
        MalformedRequest("execute: found another header; expected a chunk"),
        MalformedRequest(NO_CALL, operator=RECORD.name),
        UnsupportedOperator("group_norm_backward: no device has it", operator=RECORD.name),
    ):
        found = error_of(lambda context, error=error: abort_with(context, error))  # type: ignore[misc]
        assert (type(found), str(found), found.operator) == (type(error), str(error), error.operator)


@pytest.mark.parametrize(
    ("timeout_s", "passed_s", "most_s"), [(None, 9.0, 5.0), (2.0, 1.5, 0.5), (2.0, 9.0, 0.001)]
)
def test_the_version_is_asked_for_in_what_the_deadline_leaves(
    timeout_s: float | None, passed_s: float, most_s: float
) -> None:
    attempt = Attempt(RECORD.name, "here:1", timeout_s)
    attempt.started_s -= passed_s
    question = version_question(attempt)
    assert question.target == attempt.target
    assert question.timeout_s is not None
    assert 0 < question.timeout_s <= most_s
