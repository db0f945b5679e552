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
    from npugrad_server.pool.commands import FailCall
    from npugrad_server.pool.entry import Entry
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

    def take(self, entry: Entry, answer: CallDone | CallFailed) -> None:
        """Keeps a worker's answer until the scheduler says whether it counts."""
        entry.answer = answer
        if isinstance(answer, CallFailed) and answer.trace:
            _log.error("request %s: %s\n%s", entry.planned.request_id, answer.message, answer.trace)

    def complete(self, entry: Entry, device: str, ready: DeviceReady | None) -> None:
        """The worker's answer goes to the caller.

        Args:
            entry: The call.
            device: Name of the device.
            ready: What its worker said of it.
        """
        if ready is None:
            raise RuntimeError(f"{device}: answered before it was ready")
        try:
            outcome = entry.outcome(device, ready)
        except NpugradError as error:
            self.finish(entry, error)
            return
        if entry.future is not None and not entry.future.done():
            entry.future.set_result(outcome)
        self.report(entry, "OK", outcome.info)

    def fail(self, entry: Entry, command: FailCall) -> None:
        """The scheduler's verdict goes to the caller."""
        planned = entry.planned
        if command.reason == "WORKER_LOST":
            _log.error(
                "request %s: %s is suspect: %s", planned.request_id, planned.record.name, command.detail
            )
        if command.reason == "NO_DEVICE":
            self.finish(entry, error_without_device(self._devices(), planned))
        else:
            self.finish(entry, error_from_verdict(planned, command.reason, command.detail, command.code))

    def finish(self, entry: Entry, error: NpugradError) -> None:
        """An error goes to the caller."""
        if entry.future is not None and not entry.future.done():
            entry.future.set_exception(error)
        self.report(entry, error.reason, None)

    def report(self, entry: Entry, reason: str, info: ExecutionInfo | None) -> None:
        """Tells the observer, once, how a call ended."""
        if not entry.reported:
            entry.reported = True
            self.count += 1
            self._observer.call_finished(entry.planned, reason, time.monotonic() - entry.submitted_s, info)

    def requeued(self, entry: Entry, device: str) -> None:
        """The worker died under a call, which waits again."""
        _log.warning(
            "request %s: %s died under it; it waits for another try", entry.planned.request_id, device
        )
        self._observer.call_requeued(entry.planned, device)

    def redirected(self, entry: Entry, device: str, reason: str) -> None:
        """A device could not take a call, which waits for another one."""
        _log.warning(
            "request %s: %s answered %s; it waits for another device",
            entry.planned.request_id,
            device,
            reason,
        )
        self._observer.call_redirected(entry.planned, device, reason)

    def postponed(self, entry: Entry, device: str) -> None:
        """There was no room for a call's workspace; it waits again."""
        _log.info("request %s: %s has no room for its workspace now", entry.planned.request_id, device)
        self._observer.call_postponed(entry.planned, device)
