"""Completion of calls: turns workers' answers and the scheduler's decisions into what callers get."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from npugrad.errors import (
    CallTooLarge,
    CircuitOpen,
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
from npugrad_server.worker.protocol import CallFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from npugrad.call import ExecutionInfo
    from npugrad_server.pool.commands import CircuitChanged, FailCall
    from npugrad_server.pool.ticket import Ticket
    from npugrad_server.pool.types import DeviceStatus, PlannedCall, PoolObserver
    from npugrad_server.worker.protocol import CallDone, DeviceReady

_log = logging.getLogger(__name__)

RETRY_NO_DEVICE_S = 5.0
"""Seconds that a caller is asked to wait if no device is ready and it is unknown when one will be: about as
long as replacing a pod takes."""
_LEAST_RETRY_S = 1.0
"""The shortest such wait: about as long as opening a device takes."""


def error_from_answer(planned: PlannedCall, answer: CallFailed) -> NpugradError:
    """Returns the exception for a worker's answer, with the device as its source."""
    operator, request_id = planned.plan.record.name, planned.request_id
    if answer.reason == "INTERNAL":
        return DeviceError(
            answer.message, reason="INTERNAL", source="device", operator=operator, request_id=request_id
        )
    metadata = {**answer.metadata, "operator": operator, "request_id": request_id, "source": "device"}
    return error_from_details(ErrorDetails(answer.reason, answer.message, metadata))


def error_without_answer(
    planned: PlannedCall,
    reason: str,
    detail: str,
    code: int | None = None,
    retry_after_s: float | None = None,
) -> NpugradError:
    """Returns the exception for a call that got no answer from a worker.

    Args:
        planned: The call.
        reason: CALL_TOO_LARGE, CIRCUIT_OPEN, DEADLINE_EXCEEDED, QUEUE_FULL, WOULD_MISS_DEADLINE,
            OPERATOR_UNSUPPORTED, DETERMINISM_UNSUPPORTED or WORKER_LOST; NO_DEVICE is `error_without_device`.
        detail: What happened.
        code: The vendor's number, if a device failed.
        retry_after_s: Seconds to wait before the call may be tried again, for CIRCUIT_OPEN and QUEUE_FULL.
    """
    message = f"{planned.plan.record.name}: {detail}"
    operator, request_id = planned.plan.record.name, planned.request_id
    if reason == "DEADLINE_EXCEEDED":
        return DeadlineExceeded(message, operator=operator, request_id=request_id)
    if reason in ("QUEUE_FULL", "WOULD_MISS_DEADLINE"):
        return ServerBusy(
            message, reason=reason, retry_after_s=retry_after_s, operator=operator, request_id=request_id
        )
    if reason == "CALL_TOO_LARGE":
        return CallTooLarge(message, operator=operator, request_id=request_id)
    if reason == "CIRCUIT_OPEN":
        return CircuitOpen(message, retry_after_s=retry_after_s, operator=operator, request_id=request_id)
    if reason == "DETERMINISM_UNSUPPORTED":
        return OperatorError(message, reason=reason, operator=operator, request_id=request_id)
    if reason == "OPERATOR_UNSUPPORTED":
        return UnsupportedOperator(message, operator=operator, request_id=request_id)
    return WorkerLost(message, code=code, source="device", operator=operator, request_id=request_id)


def error_without_device(devices: Sequence[DeviceStatus], planned: PlannedCall | None = None) -> ServerBusy:
    """Returns the exception for when no device is ready, or none that may run a call.

    Its message gives the reason for each device, as far as a status has room. It asks the caller to retry
    once the next device will have been tried.

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
    """Joins the parts within a limit, cutting the longest ones so that none is lost."""
    room = limit - 2 * len(words)
    lengths = sorted(len(part) for part in words)
    share = room
    for done, length in enumerate(lengths):
        share = room // (len(lengths) - done)
        if length > share:
            break
        room -= length
    else:
        return "; ".join(words)
    return "; ".join(_cut(part, share) for part in words)[:limit]


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: max(limit - 3, 0)] + "..."


class Completion:
    """Gives callers their results or errors, and tells the observer. On the pool's event loop.

    Attributes:
        count: Calls with an answer, good or bad.
    """

    def __init__(self, observer: PoolObserver, devices: Callable[[], Sequence[DeviceStatus]]) -> None:
        """Starts with no calls.

        Args:
            observer: Notified of events.
            devices: Returns the status of every device.
        """
        self._devices = devices
        self.count = 0
        self._observer = observer

    def take(self, ticket: Ticket, answer: CallDone | CallFailed) -> None:
        """Keeps a worker's answer until the scheduler says whether it counts."""
        ticket.answer = answer
        if isinstance(answer, CallFailed) and answer.trace:
            _log.error("request %s: %s\n%s", ticket.planned.request_id, answer.message, answer.trace)

    def complete(self, ticket: Ticket, device: str, ready: DeviceReady | None) -> None:
        """Gives the worker's answer to the caller.

        Args:
            ticket: The call.
            device: Name of the device.
            ready: What its worker reported about it.
        """
        if ready is None:
            raise RuntimeError(f"{device}: answered before it was ready")
        if isinstance(ticket.answer, CallFailed):
            self.finish(ticket, error_from_answer(ticket.planned, ticket.answer))
            return
        outcome = ticket.outcome(device, ready)
        if ticket.future is not None and not ticket.future.done():
            ticket.future.set_result(outcome)
        self.report(ticket, "OK", outcome.info)

    def fail(self, ticket: Ticket, command: FailCall) -> None:
        """Gives the caller the error that the scheduler decided on."""
        planned = ticket.planned
        if command.reason == "WORKER_LOST":
            _log.error(
                "request %s: %s is given up: %s", planned.request_id, planned.plan.record.name, command.detail
            )
        if command.reason == "NO_DEVICE":
            self.finish(ticket, error_without_device(self._devices(), planned))
        else:
            error = error_without_answer(
                planned, command.reason, command.detail, command.code, command.retry_after_s
            )
            self.finish(ticket, error)

    def finish(self, ticket: Ticket, error: NpugradError) -> None:
        """Gives the caller an error."""
        if ticket.future is not None and not ticket.future.done():
            ticket.future.set_exception(error)
        self.report(ticket, error.reason, None)

    def report(self, ticket: Ticket, reason: str, info: ExecutionInfo | None) -> None:
        """Tells the observer, once, how a call ended."""
        if not ticket.reported:
            ticket.reported = True
            self.count += 1
            self._observer.call_finished(
                ticket.planned, reason, time.monotonic() - ticket.state.submitted_s, info
            )

    def requeued(self, ticket: Ticket, device: str) -> None:
        """Notes that a call waits again because its worker died."""
        ticket.mark_lost()
        _log.warning(
            "request %s: the worker of %s died; the call is queued again", ticket.planned.request_id, device
        )
        self._observer.call_requeued(ticket.planned, device)

    def circuit_changed(self, ticket: Ticket, command: CircuitChanged) -> None:
        """Notes that a circuit of a call's tenant opened or closed."""
        planned = ticket.planned
        about = f"{planned.plan.record.name} of {planned.tenant.name or 'an unknown tenant'}"
        calls = "calls of several signatures" if command.whole else "calls of its signature"
        if not command.deaths:
            _log.info("request %s: %s: circuit closed, %s run again", planned.request_id, about, calls)
            return
        _log.warning(
            "request %s: %s: circuit open, workers lost under isolated %s: %s (%s)",
            planned.request_id,
            about,
            calls,
            command.deaths,
            planned.plan.call.summary,
        )
        self._observer.circuit_opened(planned)

    def redirected(self, ticket: Ticket, device: str, reason: str) -> None:
        """Notes that a call waits for another device because this one could not take it."""
        ticket.mark_lost()
        _log.warning(
            "request %s: %s could not complete the call (%s); it waits for another device",
            ticket.planned.request_id,
            device,
            reason,
        )
        self._observer.call_redirected(ticket.planned, device, reason)

    def postponed(self, ticket: Ticket, device: str) -> None:
        """Notes that a call waits again because there was no room for its workspace."""
        ticket.mark_lost()
        _log.info(
            "request %s: %s has no memory for its workspace now; it is queued again",
            ticket.planned.request_id,
            device,
        )
        self._observer.call_postponed(ticket.planned, device)
