"""The one place where an exception becomes a status, and where every call is logged and counted.

Handlers take a message and an `RpcCall`, and raise `NpugradError`; the funnel does the rest:
- an `NpugradError` becomes its gRPC status with `google.rpc.Status` in ``grpc-status-details-bin``;
- anything else becomes INTERNAL with the request id, its traceback goes to the log, the server goes on;
- a cancelled task (the client left, or its deadline passed) is only counted and logged.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import grpc.aio

from npugrad.error_table import RUNTIME_ERROR
from npugrad.errors import MalformedRequest, NpugradError, OperatorError
from npugrad.status import encode_status, grpc_status_name
from npugrad.timeline import TIMELINE_KEY, seconds_by_stage
from npugrad_server.logs import get_logger, log_later
from npugrad_server.pool.tenant import NOBODY
from npugrad_server.rpc.refusals import REFUSALS, RefusalLog
from npugrad_server.rpc.register import Garbage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from google.rpc.status_pb2 import Status

    from npugrad.call import ExecutionInfo
    from npugrad.meta import CallMeta
    from npugrad.timeline import Mark
    from npugrad_server.metrics import Metrics
    from npugrad_server.pool.tenant import Tenant
    from npugrad_server.rpc.identity import Identities
    from npugrad_server.rpc.register import Handler
    from npugrad_server.rpc.tracing import RpcTracing

    Context = grpc.aio.ServicerContext[Any, Any]
    UnaryHandler = Callable[[Any, "RpcCall"], Awaitable[Any]]
    StreamHandler = Callable[["RpcCall"], Awaitable[None]]

REQUEST_ID_KEY = "x-request-id"
"""Metadata key of a request identifier, both ways."""
STATUS_KEY = "grpc-status-details-bin"
_SANE_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_OURS = "/npugrad."
_LATENCY_S = 5e-3
_LEVELS = {
    **dict.fromkeys(("INTERNAL", "UNKNOWN", "DATA_LOSS"), logging.ERROR),
    "UNAVAILABLE": logging.WARNING,
}
"""How the log takes the statuses that are our fault, or nobody's; the others are the caller's affair."""
_RPC_FIELDS = ("request_id", "method", "peer", "tenant", "status", "reason")


@dataclass
class RpcCall:
    """One RPC in progress, and what the log will say of it.

    Attributes:
        context: gRPC's side of it.
        method: Name of the RPC.
        request_id: The client's identifier if it is sane, else one of ours.
        tenant: Whose call it is.
        operator: Operator, once known.
        described: Types, shapes and attributes, once known; never contents.
        info: What produced the result, once there.
        received_bytes: Content bytes that have come so far.
        sent_bytes: Content bytes that go.
        marks: When its stages ended; the first mark is its arrival.
        timeline: What the trailing metadata say of its stages; empty where the reply says it.
        task: What runs it.
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

    def __post_init__(self) -> None:
        """It has arrived; remembers how long the client will wait."""
        self.marks = [("", time.monotonic())]
        self._granted_s: float = self.context.time_remaining() or 0.0

    @property
    def timeout_s(self) -> float | None:
        """Seconds until the client's deadline; None when it set none."""
        remaining: float | None = self.context.time_remaining()
        return remaining

    @property
    def is_late(self) -> bool:
        """Whether the client's deadline has passed, by its own clock.

        It reaches us rounded up by as much as a hundredth, and with the time it took to come: when the client
        gives up, some of it is left here.
        """
        remaining = self.timeout_s
        return remaining is not None and remaining < _LATENCY_S + self._granted_s / 100

    def describe(self, call: CallMeta) -> None:
        """Notes types, shapes and attributes for the log."""
        self.described = call


class Funnel(grpc.aio.ServerInterceptor):
    """Wraps handlers for `register`; as an interceptor it knows of an RPC before its message has come.

    Guarantees: every RPC whose message came is logged and counted once, and none is left out of `settle`.
    """

    def __init__(self, metrics: Metrics, identities: Identities, tracing: RpcTracing | None = None) -> None:
        """Has seen no RPC yet.

        Args:
            metrics: What counts.
            identities: Who tells whose RPC it is.
            tracing: What makes spans; None for none.
        """
        self._metrics, self._identities, self._tracing = metrics, identities, tracing
        self._log, self._refusals = get_logger(), RefusalLog()
        self._active: set[asyncio.Task[Any]] = set()
        self._unanswered: set[asyncio.Task[Any]] = set()

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Remembers the task of an RPC of ours; those of health and reflection may never end."""
        if handler_call_details.method.startswith(_OURS):
            self._follow(asyncio.current_task())
        return await continuation(handler_call_details)

    @property
    def active_count(self) -> int:
        """RPCs that have no answer yet; the task of one that has may take a moment to end."""
        return len(self._unanswered)

    async def settle(self) -> None:
        """Waits until the replies of all RPCs that are in progress now were handed to the transport."""
        if self._active:
            await asyncio.wait(tuple(self._active))

    async def settle_last(self, ending: asyncio.Future[None], farewell_s: float) -> None:
        """Waits until gRPC, which is ending, has no RPC left; a handler may outlive what it answered.

        Args:
            ending: The end of the gRPC server.
            farewell_s: Seconds that clients get to take their end once nothing is in progress.
        """
        while True:
            await self.settle()
            if ending.done():
                return
            await asyncio.wait([ending], timeout=farewell_s)
            if not self._active:
                return

    def unary(self, method: str, handler: UnaryHandler) -> Handler:
        """The gRPC handler of a unary RPC."""
        return self._handler(method, lambda box, call: handler(sane(box.pop()), call))

    def stream(self, method: str, handler: StreamHandler) -> Handler:
        """The gRPC handler of a bidirectional RPC, which reads and writes frames itself."""
        return self._handler(method, lambda _, call: handler(call))

    def _handler(self, method: str, begin: Callable[[list[Any], RpcCall], Awaitable[Any]]) -> Handler:
        """The gRPC handler of an RPC.

        Args:
            method: Its name.
            begin: Answers it, given a box with its message and the call.
        """

        async def handle(message: Any, context: Context) -> Any:
            box = [message]
            # gRPC keeps the frames of an abort in a cycle that only the garbage collector opens, which may
            # take long to come: a large message must not be in them.
            del message
            call = self._arrive(method, context)
            try:
                call.tenant = self._identities.tenant_of(context)
                answer = await begin(box, call)
            except asyncio.CancelledError:
                # Nobody listens any more. A deadline that passed arrives here as a cancellation, too.
                reason = "DEADLINE_EXCEEDED" if call.is_late else "CANCELLED"
                self._answered(call, reason, reason, None)
                raise
            except Exception as error:
                status = self._failed(call, error)
                traceback.clear_frames(error.__traceback__)
            else:
                named = (REQUEST_ID_KEY, call.request_id)
                told = (TIMELINE_KEY, call.timeline)
                context.set_trailing_metadata((named, told) if call.timeline else (named,))
                self._answered(call, "OK", "OK", None)
                return answer
            # Outside of the handler of the error, or the error would become the context of the abort.
            await _abort(call, status)
            raise AssertionError("an abort returned")

        return handle

    def _arrive(self, method: str, context: Context) -> RpcCall:
        call = RpcCall(
            context,
            method,
            _request_id(context),
            task=asyncio.current_task(),
        )
        self._metrics.call_arrived(method)
        if call.task not in self._active:
            self._follow(call.task)
        return call

    def _follow(self, task: asyncio.Task[Any] | None) -> None:
        """That task ends after the status was sent, and not when the handler returns."""
        if task is None:
            raise RuntimeError("a handler runs in the task of its RPC")
        self._active.add(task)
        self._unanswered.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._active.discard(task)
        self._unanswered.discard(task)

    def _failed(self, call: RpcCall, error: Exception) -> Status:
        """Logs and counts an error; returns its status."""
        known = self._known(call, error)
        try:
            status = encode_status(known, call.request_id)
        except Exception as broken:
            known = self._known(call, broken)
            status = encode_status(known, call.request_id)
        call.operator = call.operator or known.operator
        self._count_rejection(call, known)
        reason = known.row.reason
        if reason in REFUSALS:
            self._refusals.note(call.tenant, reason, str(known), time.monotonic())
        self._answered(call, grpc_status_name(known), reason, known)
        return status

    def _known(self, call: RpcCall, error: Exception) -> NpugradError:
        """The error itself if it is one of the contract, else INTERNAL, with the traceback in the log."""
        if isinstance(error, NpugradError):
            return error
        self._log.error("unexpected error", method=call.method, request_id=call.request_id, exc_info=error)
        return NpugradError(
            f"the server failed; its log has the details under request id {call.request_id}",
            operator=call.operator,
        )

    def _count_rejection(self, call: RpcCall, error: NpugradError) -> None:
        """A device that refuses (161xxx, 561xxx) what our validator passed shows a faulty record."""
        if not isinstance(error, OperatorError) or error.source != "device" or error.code is None:
            return
        refused = error.row.code not in (None, RUNTIME_ERROR)
        if refused and grpc_status_name(error) == "INTERNAL":
            self._metrics.device_rejected(call.operator, error.code)
            self._log.error(
                "device refused what the validator passed", request_id=call.request_id, code=error.code
            )

    def _answered(self, call: RpcCall, status: str, reason: str, error: NpugradError | None) -> None:
        if call.task is not None:
            self._unanswered.discard(call.task)
        seconds = time.monotonic() - call.marks[0][1]
        device = call.info.device if call.info else ""
        self._metrics.call_answered(
            call.method, call.operator, status, reason, device, seconds, tenant=call.tenant.shown
        )
        if call.operator:
            self._metrics.bytes_moved(call.operator, call.received_bytes, call.sent_bytes)
        stages = tuple(call.marks)
        span = None
        if self._tracing is not None:
            span = self._tracing.ended(call, seconds, (status, reason, "" if error is None else str(error)))
        if call.info is not None and error is None:
            self._metrics.stages_passed(call.operator, device, stages)
        level = _LEVELS.get(status, logging.INFO)
        # Nothing that the writing thread gets holds the RPC, its message or the frames of the error.
        sizes = (call.received_bytes, call.sent_bytes)
        log_later(
            level,
            "call",
            _fields,
            (call.request_id, call.method, call.context.peer(), call.tenant.name, status, reason, seconds),
            (call.operator, call.described, *sizes) if call.operator else None,
            call.info,
            None if error is None else _error_fields(error),
            stages,
            span,
        )


def _fields(
    rpc: tuple[str, str, str, str, str, str, float],
    call: tuple[str, CallMeta | None, int, int] | None,
    info: ExecutionInfo | None,
    error: Mapping[str, Any] | None,
    marks: Sequence[Mark],
    span: tuple[str, str] | None,
) -> dict[str, Any]:
    """What the log says of a call."""
    *named, seconds = rpc
    line: dict[str, Any] = dict(zip(_RPC_FIELDS, named, strict=True))
    line["seconds"] = round(seconds, 6)
    if call is not None:
        operator, described, received_bytes, sent_bytes = call
        line |= {"operator": operator, "operands": "" if described is None else described.summary}
        line |= {"received_bytes": received_bytes, "sent_bytes": sent_bytes}
    if info is not None:
        line |= {"device": info.device, "backend": info.backend, "attempts": info.attempts}
        line |= {"queued_s": round(info.queued_s, 6), "run_s": round(info.run_s, 6)}
        if info.predicted_run_s:
            line["predicted_queued_s"] = round(info.predicted_wait_s, 6)
            line["predicted_run_s"] = round(info.predicted_run_s, 6)
    if len(marks) > 1:
        line["stages"] = {stage: round(seconds, 6) for stage, seconds in seconds_by_stage(marks).items()}
    if span is not None:
        line["trace_id"], line["span_id"] = span
    return line if error is None else {**line, **error}


def _error_fields(error: NpugradError) -> dict[str, Any]:
    found: dict[str, Any] = {"error": str(error)}
    if isinstance(error, OperatorError):
        found |= {"code": error.code, "constraint": error.constraint}
    return found


def sane(message: Any) -> Any:
    """The message, if its bytes were one.

    Raises:
        MalformedRequest: They were not.
    """
    if isinstance(message, Garbage):
        raise MalformedRequest(
            f"request: found {message.nbytes} bytes that do not parse; expected {message.expected}"
        )
    return message


def _request_id(context: Context) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_KEY and isinstance(value, str) and _SANE_REQUEST_ID.fullmatch(value):
            return value
    return os.urandom(16).hex()


async def _abort(call: RpcCall, status: Status) -> NoReturn:
    await call.context.abort(
        _STATUS_CODES[status.code],
        status.message,
        ((STATUS_KEY, status.SerializeToString()), (REQUEST_ID_KEY, call.request_id)),
    )


_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}
