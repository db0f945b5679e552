"""The error table and the exceptions: complete, reachable, the same on both sides of a wire or a pickle."""

from __future__ import annotations

import ast
import copy
import inspect
import pickle
import re
from pathlib import Path

import grpc
import pytest

from npugrad import errors
from npugrad.error_table import BY_CODE, BY_REASON, ERRORS, ErrorRow
from npugrad.errors import (
    DeviceError,
    ErrorDetails,
    InvalidOperand,
    MalformedTensor,
    NpugradError,
    NullOperand,
    OperatorError,
    RequestError,
    ServerBusy,
    Source,
    TilingError,
    TransportError,
    UnsupportedOperator,
    UsageError,
    Violation,
    error_class,
    error_from_details,
)

REPOSITORY = Path(__file__).parents[2]
# The page "aclnn return codes" has these and no others.
VENDOR_CODES = {161001, 161002, 361001, *range(561000, 561004), *range(561101, 561120)}
FAILED_PRECONDITION = {561003, 561107, 561108, 561112}
VIOLATION = Violation(
    id="gamma.count",
    code=161002,
    operands=("gamma",),
    found="4 elements, shape [4]",
    expected="c = 3 elements",
    text="gamma has c elements.",
    sources=(Source("aclnnGroupNormBackward", "return codes, 161002", "row 11"),),
)


def classes() -> list[type[NpugradError]]:
    found: list[type[NpugradError]] = [NpugradError]
    for cls in found:
        found.extend(sub for sub in cls.__subclasses__() if sub.__module__ == errors.__name__)
    return found


def details(row: ErrorRow, source: str) -> ErrorDetails:
    return ErrorDetails(
        reason=row.reason,
        message="group_norm_backward: gamma: found 4 elements, shape [4]; expected c = 3 elements",
        metadata={
            "code": "" if row.code is None else str(row.code),
            "operator": "group_norm_backward",
            "operand": "gamma",
            "constraint": "gamma.count",
            "source": source,
            "violations_total": "7",
            "request_id": "r-1",
        },
        violations=(VIOLATION,),
        retry_after_s=0.25,
    )


def test_the_table_has_every_vendor_code_once_and_none_of_our_own() -> None:
    assert [row.code for row in ERRORS if row.code is not None] == sorted(VENDOR_CODES)
    assert set(BY_CODE) == VENDOR_CODES
    assert len(BY_REASON) == len(ERRORS)
    for row in ERRORS:
        assert re.fullmatch(r"[A-Z][A-Z0-9_]+", row.reason)
        assert row.reason.startswith("ACLNN_ERR_") == (row.code is not None)
        assert row.sentence.endswith(".")


def test_the_grpc_statuses_exist_and_are_those_of_the_design() -> None:
    for row in ERRORS:
        assert grpc.StatusCode[row.grpc_status] is not grpc.StatusCode.OK
        assert grpc.StatusCode[row.device_grpc_status] is not grpc.StatusCode.OK
        if row.code is not None:
            assert row.device_grpc_status == (
                "FAILED_PRECONDITION" if row.code in FAILED_PRECONDITION else "INTERNAL"
            )
            assert (row.grpc_status == "INVALID_ARGUMENT") == (row.code in {161001, 161002, 561002})
        if row.grpc_status in {"INVALID_ARGUMENT", "UNIMPLEMENTED", "FAILED_PRECONDITION", "INTERNAL"}:
            assert not row.retryable, row.reason
    assert {row.reason for row in ERRORS if row.retryable} == {
        "QUEUE_FULL",
        "QUOTA_EXCEEDED",
        "WOULD_MISS_DEADLINE",
        "DEVICE_OUT_OF_MEMORY",
        "DEVICE_BUSY",
        "DRAINING",
        "NO_DEVICE",
        "UNAVAILABLE",
    }


@pytest.mark.parametrize("source", ["validator", "device"])
def test_every_row_becomes_an_exception_that_can_be_pickled_and_keeps_what_it_says(source: str) -> None:
    for row in ERRORS:
        error = error_from_details(details(row, source))
        assert type(error) is error_class(row.reason, source)
        assert error.row is row
        assert error.retryable == row.retryable
        assert str(error) == details(row, source).message
        assert (error.reason, error.operator, error.request_id) == (row.reason, "group_norm_backward", "r-1")
        if isinstance(error, TransportError):
            assert error.retry_after_s == 0.25
        elif isinstance(error, RequestError):
            assert error.operand == "gamma"
        elif isinstance(error, OperatorError):
            assert (error.code, error.constraint, error.source) == (row.code, "gamma.count", source)
            assert (error.violations, error.violations_total) == ((VIOLATION,), 7)
        else:
            assert row.reason == "INTERNAL"
        pickles = (pickle.dumps(error, protocol) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1))
        for twin in (*map(pickle.loads, pickles), copy.copy(error), copy.deepcopy(error)):
            assert type(twin) is type(error)
            assert {"args": twin.args, **vars(twin)} == {"args": error.args, **vars(error)}
            assert str(twin) == str(error)


def test_codes_of_the_validator_have_classes_and_those_of_a_device_are_device_errors() -> None:
    assert [error_class(BY_CODE[code].reason) for code in (161001, 161002, 561002)] == [
        NullOperand,
        InvalidOperand,
        TilingError,
    ]
    for code in VENDOR_CODES:
        assert error_class(BY_CODE[code].reason, "device") is DeviceError
    assert error_class("OPERATOR_UNSUPPORTED") is UnsupportedOperator
    for cls in classes():
        assert all(error_class(BY_CODE[code].reason) is cls for code in getattr(cls, "codes", ()))


def test_every_class_is_reached_by_a_row_or_is_a_base() -> None:
    reached = {error_class(row.reason, source) for row in ERRORS for source in ("validator", "device")}
    bases = {base for cls in classes() for base in cls.__bases__}
    assert {cls for cls in classes() if not issubclass(cls, UsageError)} - reached <= bases
    for cls in classes():
        assert cls.default_reason in BY_REASON
        assert cls("text").row is BY_REASON[cls.default_reason]


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn = set(re.findall(r"\b[A-Z][a-zA-Z]+\b", (errors.__doc__ or "").split("Vendor numbers")[0]))
    assert {cls.__name__ for cls in classes()} <= drawn
    assert all(inspect.getdoc(cls) for cls in classes())


def test_a_malformed_call_is_also_a_value_error() -> None:
    assert issubclass(MalformedTensor, ValueError)
    assert not issubclass(OperatorError, ValueError)


def test_details_may_be_unknown_or_missing() -> None:
    newer = error_from_details(ErrorDetails("SOMETHING_NEW", "text", {"code": "not a number"}))
    assert type(newer) is NpugradError
    assert (newer.reason, newer.retryable, str(newer)) == ("SOMETHING_NEW", False, "text")
    error = error_from_details(ErrorDetails("ACLNN_ERR_PARAM_NULLPTR", "text"))
    assert isinstance(error, NullOperand)
    assert (error.code, error.violations, error.violations_total, error.operator) == (None, (), 0, "")
    busy = error_from_details(ErrorDetails("QUEUE_FULL", "text"))
    assert isinstance(busy, ServerBusy)
    assert busy.retry_after_s is None


def test_a_code_gives_the_reason() -> None:
    assert OperatorError("text", code=361001).reason == "ACLNN_ERR_RUNTIME_ERROR"
    assert OperatorError("text", code=999999).reason == "ACLNN_ERR_INNER"
    assert OperatorError("text", code=561103, reason="OPERATOR_UNSUPPORTED").reason == "OPERATOR_UNSUPPORTED"


def test_a_violation_reads_as_one_line() -> None:
    assert VIOLATION.message("group_norm_backward") == (
        "group_norm_backward: gamma: found 4 elements, shape [4]; expected c = 3 elements"
    )
    assert str(VIOLATION.sources[0]) == "aclnnGroupNormBackward, return codes, 161002, row 11"


# Numbers of the vendor are written once for callers, and once for what the worker does about them. Prose may
# mention them: docstrings, picks, help texts.
WRITTEN_IN = {"protos/npugrad/error_table.py", "server/npugrad_server/acl/faults.py"}
GENERATORS = "_tools"


def vendor_numbers(path: Path) -> list[int]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    numbers = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return [n for n in numbers if type(n) is int and re.fullmatch("(161|361|561)[0-9]{3}", str(n))]


def test_vendor_numbers_are_written_in_the_table_only() -> None:
    found = {}
    for root in ("protos", "server", "client"):
        for path in (REPOSITORY / root).rglob("*.py"):
            if GENERATORS not in path.parts and "_pb2" not in path.name and vendor_numbers(path):
                found[path.relative_to(REPOSITORY).as_posix()] = vendor_numbers(path)
    assert set(found) == WRITTEN_IN, found


def test_the_search_for_vendor_numbers_sees_them(tmp_path: Path) -> None:
    sample = tmp_path / "sample.py"
    sample.write_text('"""Raises 161001."""\nCODE = -561002  # 361001\nOTHER = (161002, 1610020, "161001")\n')
    assert sorted(vendor_numbers(sample)) == [161002, 561002]
