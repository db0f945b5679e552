"""From a worker's answer, or the scheduler's verdict, to what the caller gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npugrad.errors import (
    CallTooLarge,
    DeadlineExceeded,
    DeviceError,
    ErrorDetails,
    NpugradError,
    ServerBusy,
    WorkerLost,
    error_from_details,
)

if TYPE_CHECKING:
    from npugrad_server.pool.types import PlannedCall
    from npugrad_server.worker.protocol import CallFailed

RETRY_NO_DEVICE_S = 5.0
"""What a caller is asked to wait when no device is ready: about the time a pod needs to be replaced."""
RETRY_DRAINING_S = 1.0
"""What a caller is asked to wait when the server shuts down: about the time to find another one."""


def error_from_answer(planned: PlannedCall, answer: CallFailed) -> NpugradError:
    """The exception a worker's answer stands for; its source is the device."""
    operator, request_id = planned.spec.name, planned.request_id
    if answer.reason == "INTERNAL":
        return DeviceError(
            answer.message, reason="INTERNAL", source="device", operator=operator, request_id=request_id
        )
    metadata = {**answer.metadata, "operator": operator, "request_id": request_id, "source": "device"}
    return error_from_details(ErrorDetails(answer.reason, answer.message, metadata))


def error_from_verdict(
    planned: PlannedCall, reason: str, detail: str, code: int | None = None
) -> NpugradError:
    """The exception for a call that got no answer from a worker.

    Args:
        planned: The call.
        reason: CALL_TOO_LARGE, DEADLINE_EXCEEDED, NO_DEVICE or WORKER_LOST.
        detail: What happened.
        code: The vendor's number, when a device failed.
    """
    message = f"{planned.spec.name}: {detail}"
    operator, request_id = planned.spec.name, planned.request_id
    if reason == "DEADLINE_EXCEEDED":
        return DeadlineExceeded(message, operator=operator, request_id=request_id)
    if reason == "CALL_TOO_LARGE":
        return CallTooLarge(message, operator=operator, request_id=request_id)
    if reason == "WORKER_LOST":
        return WorkerLost(message, code=code, source="device", operator=operator, request_id=request_id)
    return ServerBusy(
        message, reason=reason, retry_after_s=RETRY_NO_DEVICE_S, operator=operator, request_id=request_id
    )
