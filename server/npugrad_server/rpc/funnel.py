"""The one place where an exception becomes a status, and where every call is logged and counted.

Handlers take a message and an `RpcCall`, and raise `NpugradError`; the funnel does the rest:
- an `NpugradError` becomes its gRPC status with `google.rpc.Status` in ``grpc-status-details-bin``;
- anything else becomes INTERNAL with the request id, its traceback goes to the log, the server goes on;
- a cancelled task (the client left, or its deadline passed) is only counted and logged.

What a call holds of the front process's memory is counted from before its message is read until its reply
was taken (`rpc/front_memory.py`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
import traceback
from typing import TYPE_CHECKING, Any, NoReturn, cast

import grpc
import grpc.aio

from npugrad.error_table import RUNTIME_ERROR
from npugrad.errors import MalformedRequest, NpugradError, OperatorError, ServerBusy
from npugrad.status import encode_status, grpc_status_name
from npugrad.timeline import TIMELINE_KEY
from npugrad_server.logs import get_logger, log_later
from npugrad_server.rpc.call_log import call_fields, error_fields
from npugrad_server.rpc.front_memory import FrontMemory
from npugrad_server.rpc.refusals import REFUSALS, RefusalLog
from npugrad_server.rpc.register import Garbage
from npugrad_server.rpc.rpc_call import RpcCall as RpcCall

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from google.rpc.status_pb2 import Status

    from npugrad_server.metrics import Metrics
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
_LEVELS = {
    **dict.fromkeys(("INTERNAL", "UNKNOWN", "DATA_LOSS"), logging.ERROR),
    "UNAVAILABLE": logging.WARNING,
}
"""How the log takes the statuses that are our fault, or nobody's; the others are the caller's affair."""


class Funnel(grpc.aio.ServerInterceptor):
    """Wraps handlers for `register`; as an interceptor it knows of an RPC before its message has come.

    Guarantees: every RPC whose handler began is logged and counted once, and none is left out of `settle`.
    """

    def __init__(
        self,
        metrics: Metrics,
        identities: Identities,
        tracing: RpcTracing | None = None,
        memory: FrontMemory | None = None,
    ) -> None:
        """Has seen no RPC yet.

        Args:
            metrics: What counts.
            identities: Who tells whose RPC it is.
            tracing: What makes spans; None for none.
            memory: Counts what RPCs hold; one without a bound if None.
        """
        self._metrics, self._identities, self._tracing = metrics, identities, tracing
        self._log, self._refusals = get_logger(), RefusalLog()
        self._memory = memory or FrontMemory()
        self._active: dict[asyncio.Task[Any], RpcCall | None] = {}
        self._unanswered: set[asyncio.Task[Any]] = set()
        self._others: set[asyncio.Task[Any]] = set()

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Remembers the task of an RPC of ours; those of health and reflection may never end."""
        task, method = asyncio.current_task(), handler_call_details.method
        is_ours = method.startswith(_OURS)
        if is_ours:
            self._follow(task)
        elif task is not None:
            self._others.add(task)
            task.add_done_callback(self._others.discard)
        handler = await continuation(handler_call_details)
        found, limit = len(self._active if is_ours else self._others), self._memory.limits.calls
        if found <= limit or handler is None:
            return handler
        return self._full(method.rpartition("/")[2] if is_ours else "other", found, limit)

    def _full(self, method: str, found: int, limit: int) -> Any:
        """A handler that refuses a call before anything of it is read."""

        async def refuse(_: list[Any], call: RpcCall) -> Any:
            call.memory.refused["slot"] += 1
            text = f"{method}: found {found} calls in progress; expected at most {limit} (setting max_calls)"
            raise ServerBusy(text, retry_after_s=1.0)

        return grpc.stream_stream_rpc_method_handler(self._handler(method, refuse))

    def calls(self) -> list[RpcCall]:
        """The RPCs in progress whose handlers have begun, with those whose reply was not taken yet."""
        return [call for call in self._active.values() if call is not None]

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
        """The gRPC handler of a unary RPC, for `register`: it reads the message, once there is room."""
        begin = lambda box, call: handler(sane(box.pop()), call)  # noqa: E731
        return _asynchronous(self._handler(method, begin, is_unary=True))

    def stream(self, method: str, handler: StreamHandler) -> Handler:
        """The gRPC handler of a bidirectional RPC, which reads and writes frames itself."""
        return self._handler(method, lambda _, call: handler(call))

    def _handler(
        self,
        method: str,
        begin: Callable[[list[Any], RpcCall], Awaitable[Any]],
        *,
        is_unary: bool = False,
    ) -> Handler:
        """The gRPC handler of an RPC.

        Args:
            method: Its name.
            begin: Answers it, given a box with its message and the call.
            is_unary: Whether its one message is read before.
        """
        memory = self._memory
        incoming_bytes = memory.limits.incoming_bytes(is_streamed=not is_unary)

        async def handle(_: Any, context: Context) -> Any:
            call = self._arrive(method, context)
            # gRPC keeps the frames of an abort in a cycle that only the garbage collector opens, which may
            # take long to come: a large message must not be in them.
            box: list[Any] = []
            try:
                call.tenant = self._identities.tenant_of(context)
                if not memory.arrive(call, incoming_bytes):
                    await memory.wait_for_room(call, incoming_bytes)
                if is_unary:
                    call.reading_s = time.monotonic()
                    box.append(await context.read())
                    memory.arrived(call, box[0])
                    if box[0] is grpc.aio.EOF:
                        await _confirm_end(call)
                    call.marks[0] = ("", time.monotonic())
                answer = await begin(box, call)
                if is_unary:
                    memory.answered(call, answer)
            except asyncio.CancelledError:
                status = self._cancelled(call)
            except Exception as error:
                status = self._failed(call, error)
                traceback.clear_frames(error.__traceback__)
            else:
                named = (REQUEST_ID_KEY, call.request_id)
                told = (TIMELINE_KEY, call.timeline)
                context.set_trailing_metadata((named, told) if call.timeline else (named,))
                self._answered(call, "OK", "OK", None)
                return answer
            memory.failed(call)
            # Outside of the handler of the error, or the error would become the context of the abort.
            await _abort(call, status)
            raise AssertionError("an abort returned")

        return handle

    def _cancelled(self, call: RpcCall) -> Status:
        """The status of a call that we ended while it waited for its caller.

        Raises:
            asyncio.CancelledError: Its caller ended it: nobody listens any more.
        """
        if call.failure is None:
            # A deadline that passed arrives as a cancellation, too.
            reason = "DEADLINE_EXCEEDED" if call.is_late else "CANCELLED"
            self._answered(call, reason, reason, None)
            raise asyncio.CancelledError
        uncancel = getattr(call.task, "uncancel", None)  # since Python 3.11
        if uncancel is not None:
            uncancel()
        return self._failed(call, call.failure)

    def _arrive(self, method: str, context: Context) -> RpcCall:
        call = RpcCall(
            context,
            method,
            _request_id(context),
            task=asyncio.current_task(),
            memory=self._memory,
        )
        self._metrics.call_arrived(method)
        if call.task is not None:
            if call.task not in self._active:
                self._follow(call.task)
            self._active[call.task] = call
        return call

    def _follow(self, task: asyncio.Task[Any] | None) -> None:
        """That task ends after the status was sent, and its reply taken, and not when the handler returns."""
        if task is None:
            raise RuntimeError("a handler runs in the task of its RPC")
        self._active[task] = None
        self._unanswered.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._unanswered.discard(task)
        call = self._active.pop(task, None)
        if call is not None:
            self._memory.release(call)

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
            call_fields,
            (call.request_id, call.method, call.context.peer(), call.tenant.name, status, reason, seconds),
            (call.operator, call.described, *sizes) if call.operator else None,
            call.info,
            None if error is None else error_fields(error),
            stages,
            span,
        )


def _asynchronous(handler: Handler) -> Handler:
    """The same handler as something that can be awaited, which it is not.

    grpc asks twice for each call whether a handler is asynchronous, and asks this first: what else it asks of
    a function takes six more steps each time.
    """
    parts = {"__call__": staticmethod(handler), "__await__": staticmethod(handler)}
    return cast("Handler", type("AsynchronousHandler", (), parts)())


async def _confirm_end(call: RpcCall) -> None:
    """Makes sure that it was the client that ended its side: grpc reads the end from a dead call, too."""
    try:
        await call.context.send_initial_metadata(())
    except (grpc.aio.BaseError, grpc.RpcError):
        raise asyncio.CancelledError from None


def sane(message: Any, operator: str = "") -> Any:
    """The message, if its bytes were one; the error names the operator, where the method tells it.

    Raises:
        MalformedRequest: They were not.
    """
    if message is grpc.aio.EOF:
        raise MalformedRequest("request: found no message; expected one")
    if isinstance(message, Garbage):
        where = f"{operator}: request" if operator else "request"
        raise MalformedRequest(f"{where}: {message}", operator=operator)
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
