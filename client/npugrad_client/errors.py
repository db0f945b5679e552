"""Exceptions a call can raise, from `npugrad.errors`.

NpugradError                    .reason .operator .retryable .tries .request_id .cause
├── TransportError              no usable answer                 .retry_after_s
│   ├── ConnectError            the server cannot be reached; retry
│   │   └── TlsError            no TLS connection could be established
│   ├── DeadlineExceeded        the deadline passed
│   ├── Cancelled               the call was cancelled, or the client closed
│   ├── ServerBusy              queue or memory full, or no device ready; retry
│   ├── ServerDraining          the server is shutting down; retry elsewhere
│   ├── CircuitOpen             workers died or hung under such calls; rejected for a while
│   ├── TenantRefused           the caller is not a tenant of the server
│   └── CallTooLarge            too large for the server, its devices or a quota
├── UsageError                  wrong usage; nothing was sent
│   ├── WrongType               an argument is unknown, missing or of the wrong type; also a TypeError
│   ├── WrongValue              an argument has a value that is not allowed; also a ValueError
│   └── ClientUnusable          the client is closed, or of another event loop or process; also a RuntimeError
├── RequestError                the call is malformed            .operand
│   ├── MalformedTensor         shape, strides, dtype and content are inconsistent
│   ├── MalformedRequest        an attribute is missing, of the wrong type or out of range
│   ├── UnsafeLevels            a level extends beyond the value tensor
│   ├── UnsafeIndices           an index lies outside the tensor that it is for
│   ├── InvalidRecipe           a recipe is invalid
│   └── RecipeMismatch          the generated content does not match the recipe's digest
└── OperatorError               the operator rejects the call    .code .constraint .violations .source
    ├── NullOperand             161001: a required operand or attribute is null
    ├── InvalidOperand          161002: an operand or attribute breaks a documented rule
    ├── TilingError             561002: the sizes break a documented limit of the tiling
    ├── UnsupportedOperator     the product or server lacks the operator
    └── DeviceError             a device failed; `.code` is the vendor's code if there is one
        ├── DeviceOutOfMemory   the device is out of memory; retry later
        └── WorkerLost          workers died while they ran the call

A plain `NpugradError` means that the server failed or violated the protocol. Messages of broken rules name
the operator, the operand, what was found and what was expected. All can be pickled, except for `.cause`, the
gRPC error.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status

import npugrad
from npugrad.errors import (
    UNARY_LIMIT_HINT,
    CallTooLarge,
    Cancelled,
    CircuitOpen,
    ClientUnusable,
    ConnectError,
    DeadlineExceeded,
    DeviceError,
    DeviceOutOfMemory,
    ErrorDetails,
    InvalidOperand,
    InvalidRecipe,
    MalformedRequest,
    MalformedTensor,
    NpugradError,
    NullOperand,
    OperatorError,
    RecipeMismatch,
    RequestError,
    ServerBusy,
    ServerDraining,
    TenantRefused,
    TilingError,
    TransportError,
    UnsafeIndices,
    UnsafeLevels,
    UnsupportedOperator,
    UsageError,
    WorkerLost,
    WrongType,
    WrongValue,
    error_from_details,
)
from npugrad.ops import OPERATORS
from npugrad.representation import printable
from npugrad.status import decode_status
from npugrad.v1 import server_pb2
from npugrad_client._targets import DEFAULT_PORT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npugrad.operator import OpRecord
    from npugrad_client._attempt import Attempt

__all__ = [
    "CallTooLarge",
    "Cancelled",
    "CircuitOpen",
    "ClientUnusable",
    "ConnectError",
    "DeadlineExceeded",
    "DeviceError",
    "DeviceOutOfMemory",
    "InvalidOperand",
    "InvalidRecipe",
    "MalformedRequest",
    "MalformedTensor",
    "NpugradError",
    "NullOperand",
    "OperatorError",
    "RecipeMismatch",
    "RequestError",
    "ServerBusy",
    "ServerDraining",
    "TenantRefused",
    "TilingError",
    "TlsError",
    "TransportError",
    "UnsafeIndices",
    "UnsafeLevels",
    "UnsupportedOperator",
    "UsageError",
    "WorkerLost",
    "WrongType",
    "WrongValue",
]


class TlsError(ConnectError):
    """TLS failed: a certificate is missing, untrusted or for another name, or one side does not use TLS.

    Not retried, because only another certificate or setting helps.

    Example:
        >>> Client("localhost:50051", tls=True, retry=None).server_info()
        Traceback (most recent call last):
        npugrad_client.errors.TlsError: server_info: no encrypted connection to localhost:50051: ...
    """

    @property
    def retryable(self) -> bool:
        """Always False."""
        return False


_STATUS_KEY = "grpc-status-details-bin"

_HANDSHAKE = (
    "ssl handshake failed",
    "tls handshake failed",
    "ssl_error",
    "peer certificate",
    "hostname verification",
    "security handshaker",
)
"""Parts of grpc's messages after a failed handshake."""
_OTHER_NAME = "the server's certificate is for another name than the target; set it with Tls(server_name=...)"
_NOT_TRUSTED = (
    "the server's certificate is signed by an authority that is not trusted; name it with Tls(ca=...)"
)
_HINTS = {
    "security handshaker": "ca, certificate or key cannot be used, or the key belongs to another certificate",
    "hostname verification": _OTHER_NAME,
    "not in peer certificate": _OTHER_NAME,
    "has expired": "the server's certificate has expired",
    "local issuer": _NOT_TRUSTED,
    "self signed": _NOT_TRUSTED,
    "self-signed": _NOT_TRUSTED,
    "wrong_version_number": "the server does not speak TLS",
}
"""What such a message means, as a hint for the user."""
_CLOSED = ("socket closed", "connection reset")
_CLOSED_HINTS = {
    True: "it closed the connection, as a server does if it requires a client certificate, or one from "
    "another authority",
    False: "it closed the connection, as a server does if it only speaks TLS; "
    "then pass tls=True or Tls(ca=...)",
}
"""By whether the client speaks TLS: with TLS 1.3, a rejected client learns nothing more."""
_CONTRACT = server_pb2.DESCRIPTOR.package
_NO_GRPC = (
    "what listens there does not speak HTTP/2, so it is not a gRPC server: perhaps a metrics port "
    '(9464) or a web server. Use the address that npugrad-server prints after "listening on", '
    f"port {DEFAULT_PORT} by default"
)
_OTHER_CONTRACT = (
    f"the server does not know this method of {_CONTRACT}; it must speak {_CONTRACT}, as "
    f"this client of version {npugrad.__version__} does"
)
_NO_HTTP2 = re.compile(r"failed parsing http/2|http1\.x server", re.I)
"""gRPC's messages for bytes that do not start an HTTP/2 connection."""
_MISCONFIGURED = re.compile(
    rf"errors resolving|dns resolution failed|{_NO_HTTP2.pattern}|http proxy returned response code 4", re.I
)
"""gRPC's messages where waiting does not help; for an unknown name, those of 1.67 and 1.85 differ."""
_NOT_CONNECTED = re.compile(r"failed to connect|connections to all backends failing", re.I)
"""gRPC's messages where there was no connection, with a single address and with several."""
_REFUSED = re.compile(r"received rst_stream with error code 7\b", re.I)
"""gRPC's message for REFUSED_STREAM. gRPC's servers send it if a connection has too many calls: one counts
until the server has released it, so that a client which keeps to the limit can still exceed it."""
_TOO_MANY = "its connection has too many calls, or a proxy there has lost its server"
_BROKEN_OFF = re.compile(
    r"received rst_stream with error code [02578]\b|stream removed(?! \(rst_stream)|no status received"
    r"|internal error from core",
    re.I,
)
"""gRPC's messages, as INTERNAL or UNKNOWN, for a stream that a proxy ended because it lost the server.

The codes are NO_ERROR, INTERNAL_ERROR (nginx and Envoy, once a reply has begun), STREAM_CLOSED,
REFUSED_STREAM and CANCEL (HAProxy); the others blame what the client sent. Before a reply has begun, these
proxies answer with HTTP 502 or 503 or their own status, which is UNAVAILABLE here. The last message is that
of grpc.aio if a stream ends while it is being written and no status arrives.
"""
_MESSAGE_LIMIT = re.compile(
    r"larger than max|exceeds maximum size|status:? 413|payload too large|request entity too large", re.I
)
"""Messages of gRPC in its languages, and of proxies, about a message that is too large: nginx answers with
HTTP 413, which gRPC turns into UNKNOWN, and Envoy with the text of that status."""
_MESSAGE_LIMIT_CODES = (
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
)
_REQUEST_ID_KEY = "x-request-id"

STATUS_CLASSES: dict[grpc.StatusCode, type[NpugradError]] = {
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.UNKNOWN: NpugradError,
    grpc.StatusCode.INVALID_ARGUMENT: RequestError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.NOT_FOUND: NpugradError,
    grpc.StatusCode.ALREADY_EXISTS: NpugradError,
    grpc.StatusCode.PERMISSION_DENIED: NpugradError,
    grpc.StatusCode.UNAUTHENTICATED: NpugradError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ServerBusy,
    grpc.StatusCode.FAILED_PRECONDITION: NpugradError,
    grpc.StatusCode.ABORTED: NpugradError,
    grpc.StatusCode.OUT_OF_RANGE: NpugradError,
    grpc.StatusCode.UNIMPLEMENTED: UnsupportedOperator,
    grpc.StatusCode.INTERNAL: NpugradError,
    grpc.StatusCode.UNAVAILABLE: ConnectError,
    grpc.StatusCode.DATA_LOSS: NpugradError,
}
"""Classes for statuses without our details: from grpc itself, a proxy or another service."""


def translate(
    error: grpc.RpcError,
    attempt: Attempt,
    *,
    is_ours: bool = False,
    records: Mapping[str, OpRecord] = OPERATORS,
) -> NpugradError:
    """Returns the exception for a failed RPC, from the service's error details or else from the gRPC status.

    Args:
        error: The gRPC error; kept as `.cause`.
        attempt: The try that failed.
        is_ours: Whether this client cancelled it.
        records: The operators by name.
    """
    if _trailers(error):
        attempt.hear()
    details = _details(error, records)
    if details is not None:
        translated = error_from_details(details)
    else:
        translated = _without_details(error, attempt, is_ours)
        translated.operator = attempt.what if attempt.what in records else ""
    if isinstance(translated, CallTooLarge):
        is_limit = details is None or UNARY_LIMIT_HINT in details.message
        translated.is_message = is_limit and not attempt.is_streamed
    # Without its traceback, whose frames would keep the operands alive as long as the error.
    translated.cause = error.with_traceback(None)
    return translated


def _details(error: Any, records: Mapping[str, OpRecord]) -> ErrorDetails | None:
    """Reads the trailers; not by `grpc_status`, which requires message and code as the server sent them."""
    try:
        return decode_status(Status.FromString(_trailers(error)[_STATUS_KEY]), records)
    except (KeyError, DecodeError, TypeError):  # none, or changed by a proxy
        return None


def _trailers(error: Any) -> dict[str, Any]:
    trailers = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
    # Pair by pair: not every release of the asynchronous side returns a mapping that dict() can read.
    return {key: value for key, value in trailers or ()}


def _without_details(error: Any, attempt: Attempt, is_ours: bool) -> NpugradError:
    # A stub raises an error that is both an RpcError and a Call, which its type does not say.
    code = error.code() if hasattr(error, "code") else grpc.StatusCode.UNKNOWN
    said = printable((error.details() if hasattr(error, "details") else str(error)) or "no details")
    cls = _class_of(code, said, _trailers(error))
    if cls is Cancelled and not is_ours:
        # Not cancelled here: the server is ending, or a proxy lost it. Or its clock was ahead of ours.
        cls = DeadlineExceeded if attempt.is_late else ConnectError
    target = attempt.target
    if cls is TlsError:
        text = f"no encrypted connection to {target}: {_hint(said)}"
    elif cls is ConnectError:
        text = _connect_text(target, said, attempt.is_encrypted)
    elif cls is DeadlineExceeded and attempt.timeout_s is not None:
        text = attempt.late_text()
    elif cls is UnsupportedOperator:
        text = f"{target}: {_OTHER_CONTRACT} (gRPC: {said})"
    else:
        text = f"{target}: {code.name}: {said}"
    if attempt.proxy and issubclass(cls, (ConnectError, DeadlineExceeded)):
        text = f"{text}; {attempt.proxy}"
    made = cls(f"{attempt.what}: {text}")
    if isinstance(made, ConnectError):
        made.is_misconfigured = bool(_MISCONFIGURED.search(said) or _is_hung_up(said))
        made.was_connected = not (made.is_misconfigured or _NOT_CONNECTED.search(said))
    return made


def _class_of(code: grpc.StatusCode, said: str, trailers: dict[str, Any]) -> type[NpugradError]:
    cls = STATUS_CLASSES.get(code, NpugradError)
    is_ours = _REQUEST_ID_KEY in trailers  # set by the service itself
    if code in _MESSAGE_LIMIT_CODES and not is_ours and _MESSAGE_LIMIT.search(said):
        return CallTooLarge  # a limit on the path, which no retry changes
    if code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN) and not is_ours:
        return ConnectError if _BROKEN_OFF.search(said) else cls
    if cls is ConnectError and any(word in said.lower() for word in _HANDSHAKE):
        return TlsError
    return cls


def _hint(said: str) -> str:
    found = next((hint for word, hint in _HINTS.items() if word in said.lower()), None)
    return f"{found} (gRPC: {said})" if found else said


def _connect_text(target: str, said: str, is_encrypted: bool) -> str:
    if _REFUSED.search(said):
        return f"the call was refused by {target}: {_TOO_MANY} (gRPC: {said})"
    return f"cannot reach {target}: {_connect_hint(said, is_encrypted)}"


def _connect_hint(said: str, is_encrypted: bool) -> str:
    """Explains a connection that was never established: one that is lost later has other reasons."""
    if _NO_HTTP2.search(said):
        return f"{_NO_GRPC} (gRPC: {said})"
    return f"{_CLOSED_HINTS[is_encrypted]} (gRPC: {said})" if _is_hung_up(said) else said


def _is_hung_up(said: str) -> bool:
    """Whether the peer accepted the connection and closed it before it became one of gRPC's."""
    text = said.lower()
    return "failed to connect" in text and any(word in text for word in _CLOSED)
