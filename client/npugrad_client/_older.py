"""Errors from servers that are older than this client and lack an operator."""

from __future__ import annotations

from typing import Any

from npugrad.errors import MalformedRequest, NpugradError, UnsupportedOperator
from npugrad.v1 import server_pb2
from npugrad_client._attempt import Attempt

VERSION_REQUEST = server_pb2.GetServerInfoRequest()
_VERSION_WAIT_S = 5.0
_NO_CALL = "header: found no call"
"""What the first servers report for a call that they cannot read, as if there were none."""


def asked_operator(service: str, request: Any) -> str:
    """The operator that a query is about; empty for none."""
    return request.call.WhichOneof("call") or "" if service == "validate" else ""


def lacks_operator(error: NpugradError, attempt: Attempt) -> bool:
    """Whether an error says that the server does not know the operator of a call.

    gRPC itself refuses a unary method that the server lacks, without a request id. For a call in a header,
    such a server cannot name the operator, unlike one that knows it and has no device for it.
    """
    if not attempt.operator:
        return False
    if isinstance(error, UnsupportedOperator):
        return not (error.request_id and error.operator)
    return isinstance(error, MalformedRequest) and not error.operator and _NO_CALL in str(error)


def version_question(attempt: Attempt) -> Attempt:
    """Returns the try that asks the server for its version, in the rest of the call's deadline."""
    left_s = _VERSION_WAIT_S if attempt.timeout_s is None else attempt.timeout_s - attempt.elapsed_s
    return Attempt(
        "server_info", attempt.target, max(0.001, min(left_s, _VERSION_WAIT_S)), attempt.is_encrypted
    )


def lacking(error: NpugradError, attempt: Attempt, info: Any) -> NpugradError:
    """Returns the error for the caller; the original one if nothing shows that it is from a server of ours.

    Args:
        error: The server's error.
        attempt: The try that failed with it.
        info: The server's GetServerInfoResponse; None if it sent none.
    """
    if info is None and not error.request_id:
        return error
    version = f"version {info.version}" if info else "unknown version"
    made = UnsupportedOperator(
        f"{attempt.operator}: {attempt.target}: this server, of {version}, does not have this operator; "
        "a newer one may",
        operator=attempt.operator,
        request_id=error.request_id,
    )
    made.cause = error.cause
    return made
