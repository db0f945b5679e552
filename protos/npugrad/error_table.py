"""All errors of the contract in one table: vendor codes, the service's own reasons, and their meaning.

Codes are those of the vendor's page "aclnn return codes"; the service's own reasons have none. gRPC statuses
are strings, so that the contract does not depend on grpc.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

DOMAIN = "npugrad"
"""`ErrorInfo.domain` of every error of this service."""

PARAM_NULLPTR = 161001
PARAM_INVALID = 161002
RUNTIME_ERROR = 361001
INNER = 561000
TILING_ERROR = 561002
FIND_KERNEL_ERROR = 561003
INNER_NULLPTR = 561103


@dataclass(frozen=True)
class ErrorRow:
    """One row of the error table.

    Attributes:
        reason: `ErrorInfo.reason`, stable.
        code: aclnn code; None for the service's own reasons.
        grpc_status: gRPC status if the service detects the error; for codes only a device returns, that of
            the device.
        retryable: Whether the same call may succeed later or elsewhere.
        sentence: What it means, in one sentence.
        device_grpc_status: gRPC status if a device returns it for a call that passed validation.
    """

    reason: str
    code: int | None
    grpc_status: str
    retryable: bool
    sentence: str
    device_grpc_status: str = "INTERNAL"


_INVALID, _INTERNAL, _PRECONDITION = "INVALID_ARGUMENT", "INTERNAL", "FAILED_PRECONDITION"


def _inner(code: int, name: str, sentence: str, grpc_status: str = _INTERNAL) -> ErrorRow:
    """A code that only a device returns; a missing operator has the reason OPERATOR_UNSUPPORTED."""
    return ErrorRow(f"ACLNN_ERR_INNER{name}", code, grpc_status, False, sentence, grpc_status)


ERRORS: tuple[ErrorRow, ...] = (
    ErrorRow("ACLNN_ERR_PARAM_NULLPTR", 161001, _INVALID, False, "A required operand or attribute is null."),
    ErrorRow(
        "ACLNN_ERR_PARAM_INVALID",
        161002,
        _INVALID,
        False,
        "An operand or attribute breaks a documented rule.",
    ),
    ErrorRow("ACLNN_ERR_RUNTIME_ERROR", 361001, _INTERNAL, False, "A call of the NPU runtime failed."),
    _inner(561000, "", "The operator library failed internally."),
    _inner(561001, "_INFERSHAPE_ERROR", "The operator library could not infer the output shapes."),
    ErrorRow(
        "ACLNN_ERR_INNER_TILING_ERROR",
        561002,
        _INVALID,
        False,
        "The sizes break a documented limit of the operator's tiling.",
    ),
    _inner(561003, "_FIND_KERNEL_ERROR", "The device has no kernel for this operator.", _PRECONDITION),
    _inner(561101, "_CREATE_EXECUTOR", "The executor could not be created."),
    _inner(561102, "_NOT_TRANS_EXECUTOR", "The executor was not released to the caller."),
    _inner(561103, "_NULLPTR", "The operator library found an internal null pointer."),
    _inner(561104, "_WRONG_ATTR_INFO_SIZE", "The operator library counted its attributes wrongly."),
    _inner(561105, "_KEY_CONFLICT", "Two kernels have one key."),
    _inner(561106, "_INVALID_IMPL_MODE", "The implementation mode is invalid."),
    _inner(561107, "_OPP_PATH_NOT_FOUND", "ASCEND_OPP_PATH is not set on the server.", _PRECONDITION),
    _inner(561108, "_LOAD_JSON_FAILED", "The operator information file was not loaded.", _PRECONDITION),
    _inner(561109, "_JSON_VALUE_NOT_FOUND", "A field of the operator information file is missing."),
    _inner(561110, "_JSON_FORMAT_INVALID", "The operator information file has a bad format entry."),
    _inner(561111, "_JSON_DTYPE_INVALID", "The operator information file has a bad dtype entry."),
    _inner(
        561112, "_OPP_KERNEL_PKG_NOT_FOUND", "The kernel package is not loaded on the server.", _PRECONDITION
    ),
    _inner(561113, "_OP_FILE_INVALID", "A field of the operator file is wrong."),
    _inner(561114, "_ATTR_NUM_OUT_OF_BOUND", "There are more attributes than the operator describes."),
    _inner(561115, "_ATTR_LEN_NOT_ENOUGH", "There are fewer attributes than the operator describes."),
    _inner(561116, "_INPUT_NUM_IN_JSON_TOO_LARGE", "The operator describes more than 32 inputs."),
    _inner(561117, "_INPUT_JSON_IS_NULL", "The description of an input is missing."),
    _inner(561118, "_STATIC_WORKSPACE_INVALID", "A static kernel has a bad workspace size."),
    _inner(561119, "_STATIC_BLOCK_DIM_INVALID", "A static kernel has a bad core count."),
    ErrorRow(
        "MALFORMED_TENSOR",
        None,
        _INVALID,
        False,
        "Shape, strides, type and content of a tensor are inconsistent.",
    ),
    ErrorRow(
        "MALFORMED_REQUEST",
        None,
        _INVALID,
        False,
        "The request does not parse, lacks an attribute, has one out of range, or breaks the order of a "
        "stream.",
    ),
    ErrorRow(
        "CONTENT_UNSUPPORTED", None, "UNIMPLEMENTED", False, "The server does not take content of this kind."
    ),
    ErrorRow(
        "RECIPE_INVALID",
        None,
        _INVALID,
        False,
        "The recipe is invalid: its generator, a parameter or the type is wrong.",
    ),
    ErrorRow(
        "RECIPE_MISMATCH",
        None,
        _PRECONDITION,
        False,
        "The content made from the recipe does not match the caller's digest.",
    ),
    ErrorRow("UNSAFE_LEVELS", None, _INVALID, False, "A level extends beyond the value tensor."),
    ErrorRow("UNSAFE_INDICES", None, _INVALID, False, "An index lies outside the tensor that it is for."),
    ErrorRow("OPERATOR_UNSUPPORTED", None, "UNIMPLEMENTED", False, "Product or server lacks the operator."),
    ErrorRow("UNKNOWN_OPERATOR", None, "UNIMPLEMENTED", False, "There is no operator of this name."),
    ErrorRow(
        "DETERMINISM_UNSUPPORTED",
        None,
        _PRECONDITION,
        False,
        "The operator cannot run deterministically on this device.",
    ),
    ErrorRow(
        "VERIFICATION_FAILED",
        None,
        "DATA_LOSS",
        False,
        "The device's result differs from the reference by more than the tolerance.",
    ),
    ErrorRow(
        "CALL_TOO_LARGE",
        None,
        "RESOURCE_EXHAUSTED",
        False,
        "The call can never fit: it exceeds the memory of the server or its devices, its tenant's quota "
        "or, if unary, the message limit.",
    ),
    ErrorRow(
        "QUEUE_FULL",
        None,
        "RESOURCE_EXHAUSTED",
        True,
        "The server is at a limit now: of calls, uploads, the queue, or the memory for operands, messages or "
        "replies.",
    ),
    ErrorRow(
        "QUOTA_EXCEEDED",
        None,
        "RESOURCE_EXHAUSTED",
        True,
        "The caller's tenant has reached its quota of calls or of bytes in the server.",
    ),
    ErrorRow(
        "WOULD_MISS_DEADLINE",
        None,
        "RESOURCE_EXHAUSTED",
        True,
        "The server does not expect to finish before the deadline; another one may be faster.",
    ),
    ErrorRow(
        "TENANT_REFUSED",
        None,
        "PERMISSION_DENIED",
        False,
        "The caller is not listed and unlisted callers are refused, or the tenant header is missing, "
        "repeated, invalid or not allowed from this caller.",
    ),
    ErrorRow(
        "DEVICE_OUT_OF_MEMORY",
        None,
        "RESOURCE_EXHAUSTED",
        True,
        "The device does not have enough free memory for the call.",
    ),
    ErrorRow(
        "DEVICE_BUSY", None, "UNAVAILABLE", True, "The device has no free stream, event or task for the call."
    ),
    ErrorRow(
        "DEVICE_ERROR",
        None,
        _INTERNAL,
        False,
        "A call of the device's runtime failed; the message has its function, number and text.",
    ),
    ErrorRow(
        "DEADLINE_EXCEEDED",
        None,
        "DEADLINE_EXCEEDED",
        False,
        "The deadline passed, the call ran longer than the server allows, or the caller sent or read too "
        "slowly.",
    ),
    ErrorRow("CANCELLED", None, "CANCELLED", False, "The caller cancelled the call."),
    ErrorRow("DRAINING", None, "UNAVAILABLE", True, "The server shut down before the call was answered."),
    ErrorRow(
        "NO_DEVICE",
        None,
        "UNAVAILABLE",
        True,
        "No device that can run the call is ready or starting.",
    ),
    ErrorRow(
        "WORKER_LOST",
        None,
        "UNAVAILABLE",
        False,
        "Workers died while they ran the call, and it is not tried again.",
    ),
    ErrorRow(
        "CIRCUIT_OPEN",
        None,
        _PRECONDITION,
        False,
        "Workers died or hung under isolated calls of this caller with this signature or operator; one may "
        "be tried again after a while.",
    ),
    ErrorRow("UNAVAILABLE", None, "UNAVAILABLE", True, "The server cannot be reached."),
    ErrorRow(
        "INTERNAL", None, _INTERNAL, False, "The server failed; its log has the details under the request id."
    ),
)
"""The whole table, in documented order, our own reasons last."""

BY_CODE: dict[int, ErrorRow] = {row.code: row for row in ERRORS if row.code is not None}
BY_REASON: dict[str, ErrorRow] = {row.reason: row for row in ERRORS}


class BlameRule(NamedTuple):
    """What a server concludes from a death of a worker, or from a result.

    Attributes:
        event: What happened.
        evidence: What it shows.
        who_pays: What follows, and for whom.
        reasons: Reasons of errors that it may end with.
    """

    event: str
    evidence: str
    who_pays: str
    reasons: tuple[str, ...]


BLAME = (
    BlameRule(
        "a worker dies under calls",
        "Nothing yet: nobody can tell who sent a signal. It may be the call that the failure names, that "
        "exceeded its limit, or any of those that ran.",
        "The tenant is suspect with the operator until these calls are answered, for at most 60 s, or the "
        "time that ten starts of a device take if that is longer. Its calls of the operator wait, within "
        "their deadlines, for a device of their own. If another tenant has calls, they leave it a device; "
        "where there is only one, they may cost it one start in the time that ten take. A call is tried "
        "three times in all.",
        ("WORKER_LOST", "CIRCUIT_OPEN", "DEADLINE_EXCEEDED"),
    ),
    BlameRule(
        "a worker dies under such an isolated call by SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL, an exit or a "
        "reported device failure, or because the call hangs",
        "Two of them (--circuit-deaths), unless the calls were answered later.",
        "A circuit breaker opens: the tenant's calls of this signature (operator, types, shapes, attributes, "
        "options), waiting ones included, fail with CIRCUIT_OPEN for 10 s; after deaths under several "
        "signatures all its calls of the operator do. Then one call at a time is let through; its outcome "
        "closes the breaker or opens it again.",
        ("WORKER_LOST", "CIRCUIT_OPEN"),
    ),
    BlameRule(
        "a worker dies under an isolated call by SIGKILL or another signal that the server did not send",
        "Four of them: each counts half as much as one of those above.",
        "As above. The call itself is tried until its deadline.",
        ("WORKER_LOST", "CIRCUIT_OPEN"),
    ),
    BlameRule(
        "workers of two devices die within a second, under calls that ran at the same time",
        "Nothing.",
        "Nobody; these calls run again, one after the other.",
        ("WORKER_LOST", "CIRCUIT_OPEN"),
    ),
    BlameRule(
        "a worker dies under a single call that another device then completes",
        "The call was not the cause.",
        "The device: more than --max-respawns in a row take it down.",
        ("NO_DEVICE",),
    ),
    BlameRule(
        "a result differs from the reference, and the CPU path's agrees with it",
        "Two of them within ten minutes, or of wrong canaries.",
        "The device is quarantined; its calls run elsewhere.",
        ("VERIFICATION_FAILED", "NO_DEVICE"),
    ),
    BlameRule(
        "a result differs from the reference, and the CPU path's as well",
        "Nothing: such values lose more digits than the tolerance allows.",
        "Nobody; the log and npugrad_compared_results_total call it tolerance.",
        ("VERIFICATION_FAILED",),
    ),
)
"""Who is to blame, by evidence, in the order of the documentation."""
