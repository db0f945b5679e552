"""Errors from servers that are older than this client and lack an operator."""

from __future__ import annotations

from typing import Any

from npugrad.errors import MalformedRequest, NpugradError, UnsupportedOperator
from npugrad.v1 import server_pb2
from npugrad_client._attempt import Attempt

VERSION_REQUEST = server_pb2.GetServerInfoRequest()
_VERSION_WAIT_S = 5.0
_NO_CALL = "header: found no call"
"""What the first servers say of a call that they cannot read, as if there were none."""


def asked_operator(service: str, request: Any) -> str:
    """The operator that one of the small services is asked about; empty for none."""
    return request.call.WhichOneof("call") or "" if service == "validate" else ""


def lacks_operator(error: NpugradError, attempt: Attempt) -> bool:
    """Whether a server said that it does not know the operator of a call.

    A unary method that it does not have is refused by gRPC itself, without a request id. Of a call in a
    header the server cannot say which operator it is, unlike one that knows it and has no device for it.
    """
    if not attempt.operator:
        return False
    if isinstance(error, UnsupportedOperator):
        return not (error.request_id and error.operator)
    return isinstance(error, MalformedRequest) and not error.operator and _NO_CALL in str(error)


def version_question(attempt: Attempt) -> Attempt:
    """The try that asks the server for its version, in what the call has left of its deadline."""
    left_s = _VERSION_WAIT_S if attempt.timeout_s is None else attempt.timeout_s - attempt.elapsed_s
    return Attempt(
        "server_info", attempt.target, max(0.001, min(left_s, _VERSION_WAIT_S)), attempt.is_encrypted
    )


def lacking(error: NpugradError, attempt: Attempt, info: Any) -> NpugradError:
    """What the caller gets; the answer itself where nothing says that a server of ours gave it.

    Args:
        error: What the server answered.
        attempt: The try that it answered.
        info: Its GetServerInfoResponse; None where it gave none.
    """
    if info is None and not error.request_id:
        return error
    version = f"version {info.version}" if info else "unknown version"
    made = UnsupportedOperator(
        f"{attempt.operator}: {attempt.target}: this server, of {version}, has no such operator; "
        "a later one may",
        operator=attempt.operator,
        request_id=error.request_id,
    )
    made.cause = error.cause
    return made
