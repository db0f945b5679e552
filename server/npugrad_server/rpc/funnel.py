"""The only place where exceptions become statuses, and where calls are logged and counted.

Handlers take a message and an `RpcCall`, and raise `NpugradError`; the funnel does the rest:
- an `NpugradError` becomes its gRPC status with `google.rpc.Status` in ``grpc-status-details-bin``;
- anything else becomes INTERNAL with the request id, its traceback goes to the log, and the server goes on;
- a cancelled task (the client left, or its deadline passed) is only counted and logged.

The front memory that a call holds is counted from before its message is read until its reply is taken
(`rpc/front_memory.py`).
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
from npugrad.errors import MalformedRequest, NpugradError, OperatorError
from npugrad.status import encode_status, grpc_status_name
from npugrad.timeline import TIMELINE_KEY
from npugrad_server.logs import get_logger, log_later
from npugrad_server.rpc.call_log import call_fields, error_fields
from npugrad_server.rpc.front_memory import FrontMemory
from npugrad_server.rpc.open_calls import OpenCalls
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
"""Metadata key of a request identifier, in both directions."""
STATUS_KEY = "grpc-status-details-bin"
_SANE_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_OURS = "/npugrad."
_LEVELS = {
    **dict.fromkeys(("INTERNAL", "UNKNOWN", "DATA_LOSS"), logging.ERROR),
    "UNAVAILABLE": logging.WARNING,
}
"""Log levels of statuses that are the server's fault or nobody's; the others are the caller's."""


class Funnel(grpc.aio.ServerInterceptor):
    """Wraps handlers for `register`; as an interceptor it sees an RPC before its message arrives.

    Guarantees: every RPC whose handler has started is logged and counted once, and `settle` waits for all of
    them.

    Attributes:
        queries: Places and memory of calls about the server, health and reflection: there are some, however
            many others work.
    """

    def __init__(
        self,
        metrics: Metrics,
        identities: Identities,
        tracing: RpcTracing | None = None,
        memory: FrontMemory | None = None,
    ) -> None:
        """Starts without RPCs.

        Args:
            metrics: Counts the calls.
            identities: Determines the tenant of an RPC.
            tracing: Makes spans; None for no spans.
            memory: Counts the memory that RPCs hold; unbounded if None.
        """
        self._metrics, self._identities, self._tracing = metrics, identities, tracing
        self._log, self._refusals = get_logger(), RefusalLog()
        self._memory = memory or FrontMemory()
        self._active: dict[asyncio.Task[Any], RpcCall | None] = {}
        self._unanswered: set[asyncio.Task[Any]] = set()
        self._calls = OpenCalls(self._memory)
        self.queries = OpenCalls(FrontMemory(self._memory.limits.of_queries()))

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Tracks the RPC's task, but not those of health and reflection RPCs, which may never end."""
        if handler_call_details.method.startswith(_OURS):
            self._follow(asyncio.current_task())
        return await continuation(handler_call_details)

    def calls(self) -> list[RpcCall]:
        """RPCs in progress whose handlers have started, including those whose reply is not taken yet."""
        others = [call for call in self.queries.calls() if call.task not in self._active]
        return [call for call in self._active.values() if call is not None] + others

    @property
    def active_count(self) -> int:
        """Number of RPCs without an answer; the task of an answered one may take a moment to end."""
        return len(self._unanswered)

    async def settle(self) -> None:
        """Waits until the replies of all RPCs now in progress have been handed to the transport."""
        if self._active:
            await asyncio.wait(tuple(self._active))

    async def settle_last(self, ending: asyncio.Future[None], farewell_s: float) -> None:
        """Waits until gRPC, which is shutting down, has no RPCs left; a handler may outlive its answer.

        Args:
            ending: Done when the gRPC server has ended.
            farewell_s: Seconds for clients to see the end once nothing is in progress.
        """
        while True:
            await self.settle()
            if ending.done():
                return
            await asyncio.wait([ending], timeout=farewell_s)
            if not self._active:
                return

    def unary(self, method: str, handler: UnaryHandler, places: OpenCalls | None = None) -> Handler:
        """The gRPC handler of a unary RPC, for `register`: it reads the message, once there is room."""
        begin = lambda box, call: handler(sane(box.pop()), call)  # noqa: E731
        return _asynchronous(self._handler(method, begin, is_unary=True, places=places))

    def stream(self, method: str, handler: StreamHandler) -> Handler:
        """The gRPC handler of a bidirectional RPC, which reads and writes frames itself."""
        return self._handler(method, lambda _, call: handler(call))

    def _handler(
        self,
        method: str,
        begin: Callable[[list[Any], RpcCall], Awaitable[Any]],
        *,
        is_unary: bool = False,
        places: OpenCalls | None = None,
    ) -> Handler:
        """The gRPC handler of an RPC.

        Args:
            method: Its name.
            begin: Answers it, given a box with its message and the call.
            is_unary: Whether its one message is read first.
            places: Where it takes a place, if not among the calls that work.
        """
        places = places or self._calls
        memory = places.memory
        incoming_bytes = memory.limits.incoming_bytes(is_streamed=not is_unary)

        async def handle(_: Any, context: Context) -> Any:
            call = self._arrive(method, context, memory)
            # gRPC keeps the stack frames of an abort in a reference cycle until the garbage collector runs,
            # which may take long: they must not reference a large message.
            box: list[Any] = []
            try:
                call.tenant = self._identities.tenant_of(context)
                places.enter(call)
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
                self._succeeded(call)
                return answer
            finally:
                places.leave(call)
            memory.failed(call)
            # Outside the except block, or the error would become the context of the abort.
            await _abort(call, status)
            raise AssertionError("an abort returned")

        return handle

    def _succeeded(self, call: RpcCall) -> None:
        named, told = (REQUEST_ID_KEY, call.request_id), (TIMELINE_KEY, call.timeline)
        call.context.set_trailing_metadata((named, told) if call.timeline else (named,))
        self._answered(call, "OK", "OK", None)

    def _cancelled(self, call: RpcCall) -> Status:
        """The status of a call that the server ended while it waited for its caller.

        Raises:
            asyncio.CancelledError: The caller ended it: nobody waits for the answer.
        """
        if call.was_ended():
            return self._failed(call, cast("NpugradError", call.failure))
        # A passed deadline arrives as a cancellation, too.
        reason = "DEADLINE_EXCEEDED" if call.is_late else "CANCELLED"
        self._answered(call, reason, reason, None)
        raise asyncio.CancelledError

    def _arrive(self, method: str, context: Context, memory: FrontMemory) -> RpcCall:
        call = RpcCall(
            context,
            method,
            _request_id(context),
            task=asyncio.current_task(),
            memory=memory,
        )
        self._metrics.call_arrived(method)
        if call.task is not None:
            if call.task not in self._active:
                self._follow(call.task)
            self._active[call.task] = call
        return call

    def _follow(self, task: asyncio.Task[Any] | None) -> None:
        """Tracks a task, which ends once the status is sent and the reply taken, not with the handler."""
        if task is None:
            raise RuntimeError("a handler runs in the task of its RPC")
        self._active[task] = None
        self._unanswered.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._unanswered.discard(task)
        call = self._active.pop(task, None)
        if call is not None:
            call.memory.release(call)

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
        """The error itself if it is in the contract, else INTERNAL, with the traceback in the log."""
        if isinstance(error, NpugradError):
            return error
        self._log.error("unexpected error", method=call.method, request_id=call.request_id, exc_info=error)
        return NpugradError(
            f"the server failed; its log has the details under request id {call.request_id}",
            operator=call.operator,
        )

    def _count_rejection(self, call: RpcCall, error: NpugradError) -> None:
        """Counts a call that passed validation but a device refused (161xxx, 561xxx): its record is wrong."""
        if not isinstance(error, OperatorError) or error.source != "device" or error.code is None:
            return
        refused = error.row.code not in (None, RUNTIME_ERROR)
        if refused and grpc_status_name(error) == "INTERNAL":
            self._metrics.device_rejected(call.operator, error.code)
            self._log.error(
                "device rejected a call that passed validation", request_id=call.request_id, code=error.code
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
        # Nothing passed to the writing thread references the RPC, its message or the error's stack frames.
        sizes = (call.received_bytes, call.sent_bytes)
        log_later(
            level,
            "call",
            call_fields,
            (call.request_id, call.method, call.peer, call.tenant.name, status, reason, seconds),
            (call.operator, call.described, *sizes) if call.operator else None,
            call.info,
            None if error is None else error_fields(error),
            stages,
            span,
        )


def _asynchronous(handler: Handler) -> Handler:
    """Makes a handler look awaitable, which it is not.

    For each call, grpc checks twice whether a handler is asynchronous, and checks this first: the checks of a
    function take six more steps each time.
    """
    parts = {"__call__": staticmethod(handler), "__await__": staticmethod(handler)}
    return cast("Handler", type("AsynchronousHandler", (), parts)())


async def _confirm_end(call: RpcCall) -> None:
    """Checks that the client itself ended its side: reading from a dead call also returns the end."""
    try:
        await call.context.send_initial_metadata(())
    except (grpc.aio.BaseError, grpc.RpcError):
        raise asyncio.CancelledError from None


def sane(message: Any, operator: str = "") -> Any:
    """Returns the message if its bytes parsed; the error names the operator if the method implies it.

    Raises:
        MalformedRequest: They did not, or there was no message.
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
