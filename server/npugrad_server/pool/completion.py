"""Completion of calls: what callers get for a worker's answer, or for the scheduler's decision."""

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
    from npugrad_server.pool.commands import FailCall
    from npugrad_server.pool.ticket import Ticket
    from npugrad_server.pool.types import DeviceStatus, PlannedCall, PoolObserver
    from npugrad_server.worker.protocol import CallDone, DeviceReady

_log = logging.getLogger(__name__)

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


def error_without_answer(
    planned: PlannedCall,
    reason: str,
    detail: str,
    code: int | None = None,
    retry_after_s: float | None = None,
) -> NpugradError:
    """The exception for a call that got no answer from a worker.

    Args:
        planned: The call.
        reason: CALL_TOO_LARGE, CIRCUIT_OPEN, DEADLINE_EXCEEDED, QUEUE_FULL, WOULD_MISS_DEADLINE,
            OPERATOR_UNSUPPORTED, DETERMINISM_UNSUPPORTED or WORKER_LOST; NO_DEVICE is `error_without_device`.
        detail: What happened.
        code: The vendor's number, when a device failed.
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
    """Gives callers what became of their calls, and tells the observer. On the pool's event loop.

    Attributes:
        count: Calls with an answer, good or bad.
    """

    def __init__(self, observer: PoolObserver, devices: Callable[[], Sequence[DeviceStatus]]) -> None:
        """Starts with none.

        Args:
            observer: Who counts.
            devices: Tells how every device stands.
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
        """The worker's answer goes to the caller.

        Args:
            ticket: The call.
            device: Name of the device.
            ready: What its worker said of it.
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
        """The error that the scheduler decided on goes to the caller."""
        planned = ticket.planned
        if command.reason == "WORKER_LOST":
            _log.error(
                "request %s: %s is suspect: %s", planned.request_id, planned.plan.record.name, command.detail
            )
        if command.reason == "NO_DEVICE":
            self.finish(ticket, error_without_device(self._devices(), planned))
        else:
            error = error_without_answer(
                planned, command.reason, command.detail, command.code, command.retry_after_s
            )
            self.finish(ticket, error)

    def finish(self, ticket: Ticket, error: NpugradError) -> None:
        """An error goes to the caller."""
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
        """The worker died under a call, which waits again."""
        ticket.mark_lost()
        _log.warning(
            "request %s: %s died under it; it waits for another try", ticket.planned.request_id, device
        )
        self._observer.call_requeued(ticket.planned, device)

    def circuit_changed(self, ticket: Ticket, deaths: int) -> None:
        """The circuit of a call's tenant and signature was opened by so many deaths, or closed."""
        planned = ticket.planned
        about = f"{planned.plan.record.name} of {planned.tenant.name or 'nobody known'}"
        if not deaths:
            _log.info(
                "request %s: %s: circuit closed, calls of its signature run again", planned.request_id, about
            )
            return
        _log.warning(
            "request %s: %s: circuit open, %d workers died under calls of its signature (%s)",
            planned.request_id,
            about,
            deaths,
            planned.plan.call.summary,
        )
        self._observer.circuit_opened(planned)

    def redirected(self, ticket: Ticket, device: str, reason: str) -> None:
        """A device could not take a call, which waits for another one."""
        ticket.mark_lost()
        _log.warning(
            "request %s: %s answered %s; it waits for another device",
            ticket.planned.request_id,
            device,
            reason,
        )
        self._observer.call_redirected(ticket.planned, device, reason)

    def postponed(self, ticket: Ticket, device: str) -> None:
        """There was no room for a call's workspace; it waits again."""
        ticket.mark_lost()
        _log.info("request %s: %s has no room for its workspace now", ticket.planned.request_id, device)
        self._observer.call_postponed(ticket.planned, device)
