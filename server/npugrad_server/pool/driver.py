"""Carries out what the scheduler decides: messages to workers, answers to callers, news to whoever counts."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from npugrad_server.pool.commands import (
    CompleteCall,
    FailCall,
    KillWorker,
    PostponeCall,
    RedirectCall,
    RequeueCall,
    SpawnWorker,
    StartCall,
    TellWorker,
)
from npugrad_server.worker.protocol import AbandonCall, WorkspaceGranted, WorkspaceRefused

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npugrad_server.pool.admission import Admission
    from npugrad_server.pool.commands import Command
    from npugrad_server.pool.fleet import Fleet
    from npugrad_server.pool.replies import Replies
    from npugrad_server.pool.types import PoolObserver

_log = logging.getLogger(__name__)


class Driver:
    """The scheduler's hands. On the pool's event loop."""

    def __init__(
        self, fleet: Fleet, admissions: Mapping[int, Admission], replies: Replies, observer: PoolObserver
    ) -> None:
        """Does nothing yet.

        Args:
            fleet: The processes.
            admissions: The pool's calls by number.
            replies: The way of answers to callers.
            observer: Who counts.
        """
        self._fleet, self._admissions, self._replies = fleet, admissions, replies
        self._observer = observer

    def carry_out(self, command: Command) -> None:
        """Does what a command says; what concerns the pool itself, it does itself."""
        if isinstance(command, StartCall):
            self._start(command)
        elif isinstance(command, CompleteCall):
            self._complete(self._admissions[command.call])
        elif isinstance(command, FailCall):
            self._replies.fail(self._admissions[command.call], command)
        elif isinstance(command, RequeueCall):
            self._replies.requeued(self._admissions[command.call], self._fleet.names[command.worker])
        elif isinstance(command, RedirectCall):
            device = self._fleet.names[command.worker]
            self._replies.redirected(self._admissions[command.call], device, command.reason)
        elif isinstance(command, PostponeCall):
            self._replies.postponed(self._admissions[command.call], self._fleet.names[command.worker])
        elif isinstance(command, TellWorker):
            self._tell(command)
        elif isinstance(command, SpawnWorker):
            self._fleet.spawn(command.worker, command.incarnation)
        elif isinstance(command, KillWorker):
            _log.warning("%s: its worker is ended: %s", self._fleet.names[command.worker], command.reason)
            self._fleet.kill(command.worker, command.incarnation)

    def _start(self, command: StartCall) -> None:
        admission = self._admissions[command.call]
        process = self._fleet.process(command.worker)
        process.send(admission.order(command, process))
        device = self._fleet.names[command.worker]
        self._observer.call_started(admission.planned, device, command.attempt, command.queued_s)

    def bring_whole(self, worker: int, call: int) -> None:
        """A process lacks the plan of a call that it was sent by number: it gets the call whole."""
        admission, process = self._admissions.get(call), self._fleet.process(worker)
        if admission is None or not process.plans.lacks(call):
            return  # nothing that it was asked
        _log.warning("request %s: %s lacks its plan", admission.planned.request_id, self._fleet.names[worker])
        process.send(admission.whole())
        if admission.future is not None and admission.future.done():
            process.send(AbandonCall(call))  # it may have been told before it had the call

    def _complete(self, admission: Admission) -> None:
        if admission.start is None:
            raise RuntimeError(f"{admission.planned.plan.record.name}: completed without a start")
        worker = admission.start.worker
        self._replies.complete(admission, self._fleet.names[worker], self._fleet.devices[worker].info)

    def _tell(self, command: TellWorker) -> None:
        self._fleet.tell(command.worker, command.incarnation, command.message)
        device = self._fleet.names[command.worker]
        if isinstance(command.message, WorkspaceGranted):
            self._observer.workspace_asked(device, "granted")
        elif isinstance(command.message, WorkspaceRefused):
            self._observer.workspace_asked(device, "refused" if command.message.final else "postponed")
