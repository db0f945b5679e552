"""One call in a worker: what its backend gets, and the messages it exchanges with the pool meanwhile."""

from __future__ import annotations

import time
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from npugrad.errors import DeadlineExceeded, DeviceOutOfMemory
from npugrad_server.backends.base import CallAbandoned, CallPostponed, DeviceCall
from npugrad_server.worker.plans import WorkerPlan, lowest
from npugrad_server.worker.protocol import AbandonCall, NeedWorkspace, RunCall, WorkspaceRefused

if TYPE_CHECKING:
    from collections.abc import Callable

    from npugrad_server.worker.protocol import Message, WorkspaceGranted
    from npugrad_server.worker.run_again import RunAgain

ANSWER_TIMEOUT_S = 30.0
"""Seconds the pool has to answer; it does so at once, unless its event loop hangs."""


class WorkerCall(DeviceCall):
    """A call in progress. The listening thread calls `hear`; the thread that runs the call, the rest.

    `execute` sets its tensors and its stream before a backend sees it.

    Attributes:
        plan: What it shares with other calls; its own if it was sent whole and nothing is to be kept.
        call: Its number.
        operator: Name of its operator.
        input_offset: First byte of its operands in their arena.
        output_offset: First byte of its wanted outputs in theirs.
    """

    def __init__(
        self,
        order: RunCall | RunAgain,
        send: Callable[[Message], None],
        timeout_s: float = ANSWER_TIMEOUT_S,
        *,
        plan: WorkerPlan | None = None,
    ) -> None:
        """Sends nothing yet.

        Args:
            order: The call.
            send: Sends a message to the pool.
            timeout_s: Seconds the pool has to answer a query.
            plan: The call's plan; None for its own plan, which only a whole call can have.

        Raises:
            TypeError: The call is not whole, and there is no plan.
        """
        if plan is None:
            if not isinstance(order, RunCall):
                raise TypeError("found a call by number without a plan; expected a whole one")
            plan = WorkerPlan(order)
        self.plan = plan
        self.operator = plan.order.operator
        if isinstance(order, RunCall):
            self.call, self.deadline_s, self._set_aside = order.call, order.deadline_s, order.workspace_bytes
            self.input_offset, self.output_offset = lowest(order.input_offsets), lowest(order.output_offsets)
            self.options = order.options
        else:
            (
                self.call,
                _,
                self.input_offset,
                self.output_offset,
                self.deadline_s,
                self._set_aside,
                priority,
                label,
            ) = order.fields()
            self.options = plan.options(priority, label)
        self.memo = plan.memo
        self._send = send
        self._timeout_s = timeout_s
        self._abandoned = False
        self._replies: SimpleQueue[WorkspaceGranted | WorkspaceRefused] = SimpleQueue()

    def hear(self, message: AbandonCall | WorkspaceGranted | WorkspaceRefused) -> None:
        """Takes a message from the pool about the call."""
        if isinstance(message, AbandonCall):
            self._abandoned = True
        else:
            self._replies.put(message)

    def check_wanted(self) -> None:
        """Checks that somebody still waits for the result.

        Raises:
            CallAbandoned: Nobody does.
            DeadlineExceeded: The result would come too late.
        """
        if self._abandoned:
            raise CallAbandoned
        deadline_s = self.deadline_s
        if deadline_s is not None and time.monotonic() >= deadline_s:
            raise DeadlineExceeded(
                f"{self.operator}: the deadline passed before the launch", operator=self.operator
            )

    def reserve_workspace(self, nbytes: int) -> None:
        """Makes sure that the pool has set this much device memory aside; asks it if need be.

        Args:
            nbytes: All the workspace the operator needs.

        Raises:
            CallPostponed: There is no room now, or the pool did not answer in time.
            DeviceOutOfMemory: No device has that much, even when idle.
        """
        if self._set_aside is None or nbytes <= self._set_aside:
            return
        self._send(NeedWorkspace(self.call, nbytes))
        try:
            reply = self._replies.get(timeout=self._timeout_s)
        except Empty:
            # What the pool grants later returns to it with the call's answer.
            raise CallPostponed(nbytes) from None
        if not isinstance(reply, WorkspaceRefused):
            self._set_aside = nbytes
        elif reply.final:
            raise DeviceOutOfMemory(
                f"{self.operator}: found {nbytes} bytes of workspace needed by the device's operator; "
                f"expected at most {reply.most_bytes} in addition to its tensors",
                source="device",
                operator=self.operator,
            )
        else:
            raise CallPostponed(nbytes)
