"""Exceptions of client and server; their codes and reasons are in `error_table`.

NpugradError
├── TransportError            no usable answer                .reason .retryable .retry_after_s
│   ├── ConnectError · DeadlineExceeded · Cancelled
│   └── ServerBusy · ServerDraining · CallTooLarge · CircuitOpen · TenantRefused
├── UsageError                wrong usage, before anything is sent
│   └── WrongType (a TypeError) · WrongValue (a ValueError) · ClientUnusable (a RuntimeError)
├── RequestError              the call is malformed           .reason .operator .operand
│   └── MalformedTensor · MalformedRequest · UnsafeLevels · UnsafeIndices · InvalidRecipe · RecipeMismatch
└── OperatorError             the operator rejects the call   .code .operator .constraint .violations .source
    ├── NullOperand (161001) · InvalidOperand (161002) · TilingError (561002)
    ├── UnsupportedOperator (561003 or 561103: operator missing)
    └── DeviceError (other codes)
        └── DeviceOutOfMemory · WorkerLost
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from npugrad.error_table import (
    BY_CODE,
    BY_REASON,
    PARAM_INVALID,
    PARAM_NULLPTR,
    TILING_ERROR,
    ErrorRow,
)
from npugrad.representation import short_repr, shortened

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class Source:
    """Where a constraint is documented.

    Attributes:
        document: Official name of the page, or for the vendor's code a name such as ``"vendor source
            (ops-nn)"``.
        section: Section of the document.
        row: Row or sentence of the section.
    """

    document: str
    section: str
    row: str

    def __str__(self) -> str:
        """The citation."""
        return f"{self.document}, {self.section}, {self.row}"


@dataclass(frozen=True)
class Violation:
    """One violated constraint of a call.

    Example:
        >>> verdict = client.validate("layer_norm_backward", inputs={}, attrs={
        ...     "normalized_shape": (4,), "output_mask": (True, True, True)})
        >>> verdict.violations[0].message("layer_norm_backward")
        'layer_norm_backward: grad_out: found null; expected a tensor'

    Attributes:
        id: Stable identifier of the constraint.
        code: Its aclnn code.
        operands: Operands and attributes it concerns.
        found: What the call has.
        expected: What is allowed.
        text: The documented sentence.
        sources: Where it is documented.
    """

    __repr__ = short_repr

    id: str
    code: int
    operands: tuple[str, ...]
    found: str
    expected: str
    text: str = ""
    sources: tuple[Source, ...] = ()

    def message(self, operator: str) -> str:
        """One-line message: operator, operands, found, expected."""
        return f"{operator}: {', '.join(self.operands)}: found {self.found}; expected {self.expected}"


UNARY_LIMIT_HINT = "in a unary call, use Execute"
"""End of a `CallTooLarge` message about the size of one message: the call may fit when streamed."""

_SHOWN_CHARACTERS = 200
"""Characters of a message that the `repr` of an error shows."""


class NpugradError(Exception):
    """Base of every error of the service.

    Example:
        >>> try:
        ...     grads = client.group_norm_backward(**call)
        ... except NpugradError as error:
        ...     print(error.reason, error.request_id, "retry" if error.retryable else "do not retry")

    Attributes:
        reason: `ErrorInfo.reason`, a row of `ERRORS`.
        operator: Operator of the call, if known.
        request_id: Identifier of the request in the server's log, if it reached the server.
        cause: Underlying gRPC error, if any; not pickled.
        tries: Number of times the client sent the call; 0 if it never did.
    """

    default_reason = "INTERNAL"
    tries: int = 0
    cause: BaseException | None = None

    def __init__(self, message: str, *, reason: str = "", operator: str = "", request_id: str = "") -> None:
        """Creates the error.

        Args:
            message: What happened: operator, operand, found, expected.
            reason: Row of `ERRORS`; by default that of the class.
            operator: Operator of the call.
            request_id: Identifier of the request in the server's log.
        """
        super().__init__(message)
        self.reason = reason or self.default_reason
        self.operator = operator
        self.request_id = request_id

    def __repr__(self) -> str:
        """Class, message and reason; a long message is truncated, `str` has it in full."""
        return f"{type(self).__name__}({shortened(str(self), _SHOWN_CHARACTERS)!r}, reason={self.reason!r})"

    @property
    def row(self) -> ErrorRow:
        """Row of the error table."""
        return BY_REASON.get(self.reason, BY_REASON["INTERNAL"])

    @property
    def retryable(self) -> bool:
        """Whether the same call may succeed later or elsewhere."""
        return self.row.retryable

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles class, message and attributes, because constructors take keywords."""
        state = {name: value for name, value in self.__dict__.items() if name != "cause"}
        return _rebuild, (type(self), self.args, state)


def _rebuild(cls: type[NpugradError], args: tuple[Any, ...], state: dict[str, Any]) -> NpugradError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class TransportError(NpugradError):
    """No usable answer: connection failure, deadline, overload or shutdown.

    Example:
        >>> try:
        ...     grads = client.group_norm_backward(**call)
        ... except TransportError as error:
        ...     print(f"{error.tries} tries; the server asks to wait {error.retry_after_s} s")

    Attributes:
        retry_after_s: Seconds the server asks to wait before a retry; None if it did not say.
    """

    default_reason = "UNAVAILABLE"

    def __init__(self, message: str, *, retry_after_s: float | None = None, **kwargs: str) -> None:
        """Creates the error; `retry_after_s` in seconds, other arguments as for `NpugradError`."""
        super().__init__(message, **kwargs)
        self.retry_after_s = retry_after_s


class ConnectError(TransportError):
    """The server cannot be reached (UNAVAILABLE).

    Example:
        >>> Client("localhost:1", retry=None).server_info()
        Traceback (most recent call last):
        npugrad.errors.ConnectError: server_info: cannot reach localhost:1: ...

    Attributes:
        is_misconfigured: Whether the settings look wrong rather than the server being down: the name does not
            resolve, no gRPC server listens on the port, or the connection is closed at once, as when only one
            side uses TLS.
        was_connected: Whether there was a connection, which was lost.
    """

    is_misconfigured: bool = False
    was_connected: bool = False


class DeadlineExceeded(TransportError):
    """The deadline passed, or the call or its caller was too slow for the server (DEADLINE_EXCEEDED).

    Example:
        >>> client.group_norm_backward(**call, timeout_s=1e-6)
        Traceback (most recent call last):
        npugrad.errors.DeadlineExceeded: group_norm_backward: ...
    """

    default_reason = "DEADLINE_EXCEEDED"


class Cancelled(TransportError):
    """The caller cancelled the call (CANCELLED).

    Example:
        >>> try:
        ...     grads = client.group_norm_backward(**call)
        ... except Cancelled:
        ...     print("the client was closed")
    """

    default_reason = "CANCELLED"


class ServerBusy(TransportError):
    """Queue, operand memory, device memory or a quota is full, or no device is ready; safe to retry.

    Example:
        >>> import time
        >>> try:
        ...     grads = client.group_norm_backward(**call)
        ... except ServerBusy as error:
        ...     time.sleep(error.retry_after_s or 1.0)
    """

    default_reason = "QUEUE_FULL"


class ServerDraining(TransportError):
    """The server is shutting down (DRAINING); safe to retry elsewhere.

    Example:
        >>> try:
        ...     grads = client.group_norm_backward(**call)
        ... except ServerDraining:
        ...     grads = Client("localhost:50051").group_norm_backward(**call)
    """

    default_reason = "DRAINING"


class CircuitOpen(TransportError):
    """Rejected for now, because workers died or hung under such calls of this caller (CIRCUIT_OPEN).

    Not retried automatically; after `retry_after_s` seconds the server will try one such call again.

    Example:
        >>> try:
        ...     grads = client.group_norm_backward(**call)
        ... except CircuitOpen as error:
        ...     print(f"{error}; at the earliest in {error.retry_after_s} s")
    """

    default_reason = "CIRCUIT_OPEN"


class CallTooLarge(TransportError):
    """The call is too large for the server, its devices, the tenant's quota or a message (CALL_TOO_LARGE).

    Example:
        >>> try:
        ...     grads = client.group_norm_backward(**call)
        ... except CallTooLarge as error:
        ...     print(f"fewer samples at once: {error}")

    Attributes:
        is_message: Whether only the message was too large, for the server or a proxy on the way; the call may
            succeed as a stream.
    """

    default_reason = "CALL_TOO_LARGE"
    is_message: bool = False


class TenantRefused(TransportError):
    """The caller is not a tenant of the server, or cannot be identified (TENANT_REFUSED).

    Example:
        >>> try:
        ...     grads = client.group_norm_backward(**call)
        ... except TenantRefused as error:
        ...     print(f"ask for an entry in the server's file of tenants: {error}")
    """

    default_reason = "TENANT_REFUSED"


class UsageError(NpugradError):
    """The client, or something made for it, was used in a wrong way; nothing was sent.

    Example:
        >>> try:
        ...     grads = client.group_norm_backward(**call, groups=3)
        ... except UsageError as error:
        ...     print(error)
        group_norm_backward: unknown argument 'groups'; did you mean 'group'?
    """

    default_reason = "MALFORMED_REQUEST"


class WrongType(UsageError, TypeError):
    """An argument is unknown, missing or of the wrong type.

    Example:
        >>> Client("localhost:50051", timeout=30)
        Traceback (most recent call last):
        npugrad.errors.WrongType: Client: unknown argument 'timeout'; did you mean 'timeout_s'?
    """


class WrongValue(UsageError, ValueError):
    """An argument has a value that is not allowed.

    Example:
        >>> Client("localhost:50051", timeout_s=-1)
        Traceback (most recent call last):
        npugrad.errors.WrongValue: timeout_s: found -1; expected seconds above 0, or None
    """


class ClientUnusable(UsageError, RuntimeError):
    """The client was closed, or belongs to another event loop or to the parent of a fork.

    Example:
        >>> closed = Client("localhost:50051")
        >>> closed.close()
        >>> closed.server_info()
        Traceback (most recent call last):
        npugrad.errors.ClientUnusable: the client for localhost:50051 is closed; make a new one
    """

    default_reason = "CANCELLED"


class RequestError(NpugradError, ValueError):
    """The call is malformed in a way that has no aclnn code.

    Example:
        >>> try:
        ...     grads = client.group_norm_backward(**call, label=1)
        ... except RequestError as error:
        ...     print(error.reason, error.operand)
        MALFORMED_REQUEST label

    Attributes:
        operand: Operand or attribute it concerns; empty if none.
    """

    default_reason = "MALFORMED_REQUEST"

    def __init__(self, message: str, *, operand: str = "", **kwargs: str) -> None:
        """Creates the error; `operand` as above, other arguments as for `NpugradError`."""
        super().__init__(message, **kwargs)
        self.operand = operand


class MalformedRequest(RequestError):
    """The request does not parse, lacks or has an invalid attribute, or is out of order (MALFORMED_REQUEST).

    Example:
        >>> client.group_norm_backward(**call, priority=101)
        Traceback (most recent call last):
        npugrad.errors.MalformedRequest: group_norm_backward: priority: found 101; expected -100 to 100
    """


class MalformedTensor(RequestError):
    """Shape, strides, dtype and content of a tensor are inconsistent (MALFORMED_TENSOR).

    Example:
        >>> TensorMeta("float32", (2, -3))
        Traceback (most recent call last):
        npugrad.errors.MalformedTensor: found shape [2, -3]; expected sizes of 0 or more
    """

    default_reason = "MALFORMED_TENSOR"


class UnsafeLevels(RequestError):
    """A level extends beyond the value tensor (UNSAFE_LEVELS).

    Example:
        >>> try:
        ...     grads = client.multi_scale_deformable_attention_grad(**call)
        ... except UnsafeLevels as error:
        ...     print(error.operand)
    """

    default_reason = "UNSAFE_LEVELS"


class UnsafeIndices(RequestError):
    """An index lies outside the tensor that it is for (UNSAFE_INDICES).

    Example:
        >>> try:
        ...     grads = client.embedding_dense_backward(**call)
        ... except UnsafeIndices as error:
        ...     print(error.operand)
    """

    default_reason = "UNSAFE_INDICES"


class InvalidRecipe(RequestError):
    """A recipe is invalid (RECIPE_INVALID).

    Example:
        >>> Recipe("uniform", shape=(2, 3), seed=-1)
        Traceback (most recent call last):
        npugrad.errors.InvalidRecipe: recipe: found seed -1; expected 0 to 18446744073709551615
    """

    default_reason = "RECIPE_INVALID"


class RecipeMismatch(RequestError):
    """The content generated from a recipe does not match its digest (RECIPE_MISMATCH).

    Example:
        >>> made = Recipe("normal", shape=(2, 6, 4), digest=bytes(32))
        >>> client.group_norm_backward(**{**call, "input": made})
        Traceback (most recent call last):
        npugrad.errors.RecipeMismatch: group_norm_backward: input: found content with digest ...
    """

    default_reason = "RECIPE_MISMATCH"


class OperatorError(NpugradError):
    """The operator rejects the call, with an aclnn code.

    Example:
        >>> try:
        ...     grads = client.group_norm_backward(**{**call, "group": 0})
        ... except OperatorError as error:
        ...     print(error.code, [violation.id for violation in error.violations])
        161002 ['...']

    Attributes:
        code: aclnn code; None if the reason is the service's own.
        constraint: Identifier of the constraint that determined the code; empty for a device's error.
        violations: Violated constraints; over the wire as many as fit.
        violations_total: Total number of violated constraints.
        source: ``"validator"`` or ``"device"``.
    """

    default_reason = "ACLNN_ERR_INNER"
    codes: tuple[int, ...] = ()

    def __init__(
        self,
        message: str,
        *,
        code: int | None = None,
        constraint: str = "",
        violations: Sequence[Violation] = (),
        violations_total: int | None = None,
        source: str = "validator",
        **kwargs: str,
    ) -> None:
        """Creates the error; arguments are the attributes above and those of `NpugradError`."""
        if code in BY_CODE and not kwargs.get("reason"):
            kwargs["reason"] = BY_CODE[code].reason
        super().__init__(message, **kwargs)
        self.code = code
        self.constraint = constraint
        self.violations = tuple(violations)
        self.violations_total = len(self.violations) if violations_total is None else violations_total
        self.source = source


class NullOperand(OperatorError):
    """161001: a required operand or attribute is null.

    Example:
        >>> client.group_norm_backward(**{**call, "rstd": None})
        Traceback (most recent call last):
        npugrad.errors.NullOperand: group_norm_backward: rstd: found null; expected a tensor
    """

    codes = (PARAM_NULLPTR,)


class InvalidOperand(OperatorError):
    """161002: an operand or attribute breaks a documented rule.

    Example:
        >>> client.group_norm_backward(**{**call, "group": 0})
        Traceback (most recent call last):
        npugrad.errors.InvalidOperand: group_norm_backward: group: found 0; expected above 0
    """

    codes = (PARAM_INVALID,)


class TilingError(OperatorError):
    """561002: the sizes break a documented limit of the operator's tiling.

    Example:
        >>> client.fused_floyd_attention_grad(**{**call, "query": call["query"][0]})
        Traceback (most recent call last):
        npugrad.errors.TilingError: fused_floyd_attention_grad: query: found rank 4, ...; expected rank 5
    """

    codes = (TILING_ERROR,)


class UnsupportedOperator(OperatorError):
    """The product or server lacks the operator (OPERATOR_UNSUPPORTED, UNKNOWN_OPERATOR).

    Example:
        >>> client.validate("rope", inputs={}, attrs={})
        Traceback (most recent call last):
        npugrad.errors.UnsupportedOperator: unknown operator 'rope'; known are ...
    """

    default_reason = "OPERATOR_UNSUPPORTED"


class DeviceError(OperatorError):
    """A device failed; `code` is the vendor's code if there is one.

    Example:
        >>> try:
        ...     grads = client.group_norm_backward(**call)
        ... except DeviceError as error:
        ...     print(error.code, error.source, error)
    """

    default_reason = "ACLNN_ERR_RUNTIME_ERROR"


class DeviceOutOfMemory(DeviceError):
    """The device is out of memory for the call (DEVICE_OUT_OF_MEMORY); safe to retry later.

    Example:
        >>> try:
        ...     grads = client.group_norm_backward(**call)
        ... except DeviceOutOfMemory:
        ...     grads = Client("localhost:50051").group_norm_backward(**call)
    """

    default_reason = "DEVICE_OUT_OF_MEMORY"


class WorkerLost(DeviceError):
    """Worker processes died while they ran the call, and it is not tried again (WORKER_LOST).

    Example:
        >>> try:
        ...     grads = client.group_norm_backward(**call)
        ... except WorkerLost as error:
        ...     print(f"the server's log has it under {error.request_id}")
    """

    default_reason = "WORKER_LOST"


_CLASS_BY_CODE: dict[int, type[OperatorError]] = {
    code: cls for cls in (NullOperand, InvalidOperand, TilingError) for code in cls.codes
}
_CLASS_BY_REASON: dict[str, type[NpugradError]] = {
    "MALFORMED_TENSOR": MalformedTensor,
    "MALFORMED_REQUEST": MalformedRequest,
    "CONTENT_UNSUPPORTED": RequestError,
    "RECIPE_INVALID": InvalidRecipe,
    "RECIPE_MISMATCH": RecipeMismatch,
    "UNSAFE_LEVELS": UnsafeLevels,
    "UNSAFE_INDICES": UnsafeIndices,
    "OPERATOR_UNSUPPORTED": UnsupportedOperator,
    "UNKNOWN_OPERATOR": UnsupportedOperator,
    "DETERMINISM_UNSUPPORTED": OperatorError,
    "VERIFICATION_FAILED": DeviceError,
    "CALL_TOO_LARGE": CallTooLarge,
    "QUEUE_FULL": ServerBusy,
    "QUOTA_EXCEEDED": ServerBusy,
    "WOULD_MISS_DEADLINE": ServerBusy,
    "TENANT_REFUSED": TenantRefused,
    "DEVICE_OUT_OF_MEMORY": DeviceOutOfMemory,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "CANCELLED": Cancelled,
    "DRAINING": ServerDraining,
    "NO_DEVICE": ServerBusy,
    "DEVICE_BUSY": DeviceError,
    "DEVICE_ERROR": DeviceError,
    "WORKER_LOST": WorkerLost,
    "CIRCUIT_OPEN": CircuitOpen,
    "UNAVAILABLE": ConnectError,
    "INTERNAL": NpugradError,
}


def error_class(reason: str, source: str = "validator") -> type[NpugradError]:
    """Returns the exception class for a reason.

    Args:
        reason: Row of `ERRORS`; the base class for an unknown one.
        source: With ``"device"``, every aclnn code gives a `DeviceError`.
    """
    row = BY_REASON.get(reason)
    if row is None:
        return NpugradError
    if row.code is None:
        return _CLASS_BY_REASON[reason]
    return DeviceError if source == "device" else _CLASS_BY_CODE.get(row.code, DeviceError)


@dataclass(frozen=True)
class ErrorDetails:
    """An error as sent over the wire, enough to raise it again on the other side.

    Attributes:
        reason: Row of `ERRORS`.
        message: Human-readable message.
        metadata: `ErrorInfo.metadata`: code, operator, operand, constraint, source, violations_total,
            request_id.
        violations: As many violations as fit.
        retry_after_s: Seconds to wait before a retry; None if not given.
    """

    reason: str
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    violations: tuple[Violation, ...] = ()
    retry_after_s: float | None = None


def error_from_details(details: ErrorDetails) -> NpugradError:
    """Rebuilds the exception raised on the other side."""
    metadata = details.metadata
    source = metadata.get("source", "validator")
    cls = error_class(details.reason, source)
    common = {
        "reason": details.reason,
        "operator": metadata.get("operator", ""),
        "request_id": metadata.get("request_id", ""),
    }
    if issubclass(cls, TransportError):
        return cls(details.message, retry_after_s=details.retry_after_s, **common)
    if issubclass(cls, RequestError):
        return cls(details.message, operand=metadata.get("operand", ""), **common)
    if issubclass(cls, OperatorError):
        return cls(
            details.message,
            code=_int_or_none(metadata.get("code")),
            constraint=metadata.get("constraint", ""),
            violations=details.violations,
            violations_total=_int_or_none(metadata.get("violations_total")),
            source=source,
            **common,
        )
    return cls(details.message, **common)


def _int_or_none(text: str | None) -> int | None:
    try:
        return None if text is None else int(text)
    except ValueError:
        return None
