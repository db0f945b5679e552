"""One RPC in progress: what its handler works with, and what is logged about it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from npugrad_server.pool.tenant import NOBODY
from npugrad_server.rpc.front_memory import FrontMemory
from npugrad_server.rpc.identity import ARRIVED_BY

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    import grpc.aio

    from npugrad.call import ExecutionInfo
    from npugrad.errors import NpugradError
    from npugrad.meta import CallMeta
    from npugrad.timeline import Mark
    from npugrad_server.pool.tenant import Tenant

    Context = grpc.aio.ServicerContext[Any, Any]

_LATENCY_S = 5e-3


@dataclass
class RpcCall:
    """One RPC in progress, and what is logged about it.

    Attributes:
        context: gRPC's side of it.
        method: Name of the RPC.
        request_id: The client's identifier if it is valid, else a generated one.
        tenant: Its tenant.
        operator: Operator, once known.
        described: Types, shapes and attributes, once known; never contents.
        info: Execution info of the result, once known.
        received_bytes: Content bytes received so far.
        sent_bytes: Content bytes of the reply.
        marks: When its stages ended; the first mark is its arrival.
        timeline: Its stages for the trailing metadata; empty if the reply has them.
        task: The task that runs it.
        memory: Counts the memory that it holds.
        request_bytes: Bytes held by its messages, set by `memory`.
        reply_bytes: Bytes held by its reply, set by `memory`.
        reading_s: When reading its message began, on the monotonic clock; None if none is being read.
        answered_s: When its reply, or the status behind it, began to wait to be taken; else None.
        is_slow: In a stream, tells whether the caller is slow; None in a unary call.
        failure: Why the server ended it while it waited for its caller.
        socket: The Unix socket that it came by; empty for TCP.
        is_untaken: Whether its reply was not taken in time, and that was counted.
    """

    context: Context
    method: str
    request_id: str
    tenant: Tenant = NOBODY
    operator: str = ""
    described: CallMeta | None = None
    info: ExecutionInfo | None = None
    received_bytes: int = 0
    sent_bytes: int = 0
    marks: list[Mark] = field(init=False)
    timeline: bytes = b""
    task: asyncio.Task[Any] | None = None
    memory: FrontMemory = field(default_factory=FrontMemory)
    request_bytes: int = 0
    reply_bytes: int = 0
    reading_s: float | None = None
    answered_s: float | None = None
    is_slow: Callable[[], bool] | None = None
    failure: NpugradError | None = None
    is_untaken: bool = False
    socket: str = field(default_factory=ARRIVED_BY.get)

    def __post_init__(self) -> None:
        """Records the arrival, and how long the client will wait."""
        self.marks = [("", time.monotonic())]
        self._granted_s: float = self.context.time_remaining() or 0.0

    @property
    def timeout_s(self) -> float | None:
        """Seconds until the client's deadline; None when it set none."""
        remaining: float | None = self.context.time_remaining()
        return remaining

    @property
    def peer(self) -> str:
        """The peer as gRPC names it, or the Unix socket, which gRPC does not know."""
        return self.socket or self.context.peer()

    @property
    def is_late(self) -> bool:
        """Whether the client's deadline has passed, by the client's clock.

        The remaining time arrives rounded up by as much as a hundredth, and late by the time in transit: when
        the client gives up, some of it is left here.
        """
        remaining = self.timeout_s
        return remaining is not None and remaining < _LATENCY_S + self._granted_s / 100

    def end(self, failure: NpugradError) -> None:
        """Ends it while it waits for its caller, who is told why."""
        self.failure = failure
        if self.task is not None:
            self.task.cancel()

    def was_ended(self) -> bool:
        """Whether `end` is what cancelled the task, which then goes on; to be asked once per cancellation."""
        uncancel = getattr(self.task, "uncancel", None)  # since Python 3.11
        if self.failure is not None and uncancel is not None:
            uncancel()
        return self.failure is not None

    def describe(self, call: CallMeta) -> None:
        """Records types, shapes and attributes for the log."""
        self.described = call
