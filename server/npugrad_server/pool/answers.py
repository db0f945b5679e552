"""From a worker's answer, or the scheduler's verdict, to what the caller gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npugrad.errors import (
    CallTooLarge,
    DeadlineExceeded,
    DeviceError,
    ErrorDetails,
    NpugradError,
    OperatorError,
    ServerBusy,
    UnsupportedOperator,
    WorkerLost,
    error_from_details,
)
from npugrad.status import MAX_MESSAGE_BYTES
from npugrad_server.pool.types import DeviceState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npugrad_server.pool.types import DeviceStatus, PlannedCall
    from npugrad_server.worker.protocol import CallFailed

RETRY_NO_DEVICE_S = 5.0
"""What a caller is asked to wait when no device is ready and nobody knows when one will be: about the time a
pod needs to be replaced."""
_LEAST_RETRY_S = 1.0
"""The shortest such wait: about what opening a device takes."""


def error_from_answer(planned: PlannedCall, answer: CallFailed) -> NpugradError:
    """The exception a worker's answer stands for; its source is the device."""
    operator, request_id = planned.plan.record.name, planned.request_id
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
        reason: CALL_TOO_LARGE, DEADLINE_EXCEEDED, OPERATOR_UNSUPPORTED, DETERMINISM_UNSUPPORTED or
            WORKER_LOST; NO_DEVICE is `error_without_device`.
        detail: What happened.
        code: The vendor's number, when a device failed.
    """
    message = f"{planned.plan.record.name}: {detail}"
    operator, request_id = planned.plan.record.name, planned.request_id
    if reason == "DEADLINE_EXCEEDED":
        return DeadlineExceeded(message, operator=operator, request_id=request_id)
    if reason == "CALL_TOO_LARGE":
        return CallTooLarge(message, operator=operator, request_id=request_id)
    if reason == "DETERMINISM_UNSUPPORTED":
        return OperatorError(message, reason=reason, operator=operator, request_id=request_id)
    if reason == "OPERATOR_UNSUPPORTED":
        return UnsupportedOperator(message, operator=operator, request_id=request_id)
    return WorkerLost(message, code=code, source="device", operator=operator, request_id=request_id)


def error_without_device(devices: Sequence[DeviceStatus], planned: PlannedCall | None = None) -> ServerBusy:
    """The exception when no device is ready, or none that may run a call.

    It says why, device by device, as far as a status has room, and asks to come again when the next device
    will have been tried.

    Args:
        devices: Every device.
        planned: The call, if there is one.
    """
    operator = planned.plan.record.name if planned is not None else ""
    found: dict[str, list[str]] = {}
    for device in devices:
        if device.state is not DeviceState.READY:
            found.setdefault(f"{device.state}, {device.reason}", []).append(device.name)
    other = any(device.state is DeviceState.READY for device in devices)
    start = f"no device {'that may run it ' if other else ''}is ready: "
    if operator:
        start = f"{operator}: {start}"
    tries = [device.next_try_s for device in devices if device.next_try_s is not None]
    words = [f"{', '.join(names)}: {why}" for why, names in found.items()]
    return ServerBusy(
        start + _within(words, MAX_MESSAGE_BYTES - len(start)),
        reason="NO_DEVICE",
        retry_after_s=max(_LEAST_RETRY_S, min(tries)) if tries else RETRY_NO_DEVICE_S,
        operator=operator,
        request_id=planned.request_id if planned is not None else "",
    )


def _within(words: Sequence[str], limit: int) -> str:
    """The parts in a row, the longest ones cut so that none is lost for another's length."""
    room = limit - 2 * len(words)
    short = sorted(len(part) for part in words)
    share = room
    for done, length in enumerate(short):
        share = room // (len(short) - done)
        if length > share:
            break
        room -= length
    else:
        return "; ".join(words)
    return "; ".join(_cut(part, share) for part in words)[:limit]


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: max(limit - 3, 0)] + "..."
