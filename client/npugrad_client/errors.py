"""What a call can raise; the tree is drawn in `npugrad.errors`, and this is its public list for callers.

NpugradError                    .reason .operator .retryable .request_id .cause
├── TransportError              nothing usable came back        .retry_after_s
│   ├── ConnectError            the server cannot be reached
│   ├── DeadlineExceeded        the deadline passed
│   ├── Cancelled               the call was cancelled
│   ├── ServerBusy              queue or memory full, no device ready; retry
│   ├── ServerDraining          shutting down; retry elsewhere
│   └── CallTooLarge            can never fit into the server
├── RequestError                the call is not well formed      .operand
│   ├── MalformedTensor · MalformedRequest
│   └── UnsafeLevels            levels point outside the value tensor (NPU)
└── OperatorError               the operator says no             .code .constraint .violations .source
    ├── NullOperand (161001) · InvalidOperand (161002) · TilingError (561002)
    ├── UnsupportedOperator     the product or the server has no such operator
    └── DeviceError             a device failed
        └── DeviceOutOfMemory · WorkerLost
"""

from __future__ import annotations

from typing import Any

import grpc
from grpc_status import rpc_status

from npugrad.errors import (
    BY_REASON,
    CallTooLarge,
    Cancelled,
    ConnectError,
    DeadlineExceeded,
    DeviceError,
    DeviceOutOfMemory,
    ErrorDetails,
    InvalidOperand,
    MalformedRequest,
    MalformedTensor,
    NpugradError,
    NullOperand,
    OperatorError,
    RequestError,
    ServerBusy,
    ServerDraining,
    TilingError,
    TransportError,
    UnsafeLevels,
    UnsupportedOperator,
    WorkerLost,
    error_from_details,
)
from npugrad.status import decode_status

__all__ = [
    "CallTooLarge",
    "Cancelled",
    "ConnectError",
    "DeadlineExceeded",
    "DeviceError",
    "DeviceOutOfMemory",
    "InvalidOperand",
    "MalformedRequest",
    "MalformedTensor",
    "NpugradError",
    "NullOperand",
    "OperatorError",
    "RequestError",
    "ServerBusy",
    "ServerDraining",
    "TilingError",
    "TransportError",
    "UnsafeLevels",
    "UnsupportedOperator",
    "WorkerLost",
]

_BY_STATUS: dict[grpc.StatusCode, type[NpugradError]] = {
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ServerBusy,
    grpc.StatusCode.UNAVAILABLE: ConnectError,
    grpc.StatusCode.INVALID_ARGUMENT: MalformedRequest,
    grpc.StatusCode.UNIMPLEMENTED: UnsupportedOperator,
}
"""Classes for statuses that carry no details of ours: made by grpc itself or by a proxy."""


def translate(error: grpc.RpcError, operator: str = "", target: str = "") -> NpugradError:
    """The exception for a failed RPC: from the service's details when there are some, else from the status.

    Args:
        error: What grpc raised; kept as `.cause`.
        operator: Operator of the call.
        target: Address of the server, named when it could not be reached.
    """
    # What a stub raises is both an RpcError and a Call, which the stubs' types do not say.
    call: Any = error
    code = call.code() if hasattr(call, "code") else grpc.StatusCode.UNKNOWN
    details = _details(call)
    if details is not None and details.reason in BY_REASON:
        translated = error_from_details(details)
    else:
        said = (call.details() if hasattr(call, "details") else str(error)) or "no details"
        where = f"{target}: " if target else ""
        cls = _BY_STATUS.get(code, NpugradError)
        translated = cls(f"{operator or 'npugrad'}: {where}{code.name}: {said}", operator=operator)
    translated.cause = error
    return translated


def _details(call: Any) -> ErrorDetails | None:
    try:
        status = rpc_status.from_call(call)
    except (ValueError, AttributeError):  # a proxy rewrote code or message
        return None
    return None if status is None else decode_status(status)
