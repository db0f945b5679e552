"""Gives callers what became of their calls, and tells whoever counts."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from npugrad.errors import NpugradError
from npugrad_server.pool.answers import error_from_verdict, error_without_device
from npugrad_server.worker.protocol import CallFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from npugrad.call import ExecutionInfo
    from npugrad_server.pool.admission import Admission
    from npugrad_server.pool.commands import FailCall
    from npugrad_server.pool.types import DeviceStatus, PoolObserver
    from npugrad_server.worker.protocol import CallDone, DeviceReady

_log = logging.getLogger(__name__)


class Replies:
    """The way of an answer to its caller. On the pool's event loop.

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

    def take(self, admission: Admission, answer: CallDone | CallFailed) -> None:
        """Keeps a worker's answer until the scheduler says whether it counts."""
        admission.answer = answer
        if isinstance(answer, CallFailed) and answer.trace:
            _log.error("request %s: %s\n%s", admission.planned.request_id, answer.message, answer.trace)

    def complete(self, admission: Admission, device: str, ready: DeviceReady | None) -> None:
        """The worker's answer goes to the caller.

        Args:
            admission: The call.
            device: Name of the device.
            ready: What its worker said of it.
        """
        if ready is None:
            raise RuntimeError(f"{device}: answered before it was ready")
        try:
            outcome = admission.outcome(device, ready)
        except NpugradError as error:
            self.finish(admission, error)
            return
        if admission.future is not None and not admission.future.done():
            admission.future.set_result(outcome)
        self.report(admission, "OK", outcome.info)

    def fail(self, admission: Admission, command: FailCall) -> None:
        """The scheduler's verdict goes to the caller."""
        planned = admission.planned
        if command.reason == "WORKER_LOST":
            _log.error(
                "request %s: %s is suspect: %s", planned.request_id, planned.plan.record.name, command.detail
            )
        if command.reason == "NO_DEVICE":
            self.finish(admission, error_without_device(self._devices(), planned))
        else:
            self.finish(admission, error_from_verdict(planned, command.reason, command.detail, command.code))

    def finish(self, admission: Admission, error: NpugradError) -> None:
        """An error goes to the caller."""
        if admission.future is not None and not admission.future.done():
            admission.future.set_exception(error)
        self.report(admission, error.reason, None)

    def report(self, admission: Admission, reason: str, info: ExecutionInfo | None) -> None:
        """Tells the observer, once, how a call ended."""
        if not admission.reported:
            admission.reported = True
            self.count += 1
            self._observer.call_finished(
                admission.planned, reason, time.monotonic() - admission.record.submitted_s, info
            )

    def requeued(self, admission: Admission, device: str) -> None:
        """The worker died under a call, which waits again."""
        admission.mark_lost()
        _log.warning(
            "request %s: %s died under it; it waits for another try", admission.planned.request_id, device
        )
        self._observer.call_requeued(admission.planned, device)

    def redirected(self, admission: Admission, device: str, reason: str) -> None:
        """A device could not take a call, which waits for another one."""
        admission.mark_lost()
        _log.warning(
            "request %s: %s answered %s; it waits for another device",
            admission.planned.request_id,
            device,
            reason,
        )
        self._observer.call_redirected(admission.planned, device, reason)

    def postponed(self, admission: Admission, device: str) -> None:
        """There was no room for a call's workspace; it waits again."""
        admission.mark_lost()
        _log.info("request %s: %s has no room for its workspace now", admission.planned.request_id, device)
        self._observer.call_postponed(admission.planned, device)
