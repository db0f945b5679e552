"""OpenTelemetry spans: one per call, in it one per try, and one per stage of the client.

The spans of a call and of its tries start when these do, because the server is told which try it serves; all
else is made when the call ends. The server's stages become attributes of the try: spans for them are up to
the server, by its own clock.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from google.rpc import code_pb2
from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import npugrad
from npugrad.errors import WrongType
from npugrad_client._targets import ADDRESS

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer, TracerProvider

    from npugrad.call import ExecutionInfo
    from npugrad.timeline import Timeline
    from npugrad_client._attempt import Attempt
    from npugrad_client._clock import CallClock

_W3C = TraceContextTextMapPropagator()
"""Without baggage, which is the caller's own and not sent."""


class Tracing:
    """Makes the spans of a client's calls."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        """Uses a provider for the spans; the global one if None.

        Raises:
            WrongType: It is not a tracer provider.
        """
        if not isinstance(provider, (trace.TracerProvider, type(None))):
            raise WrongType(f"tracing: found {type(provider).__name__}; expected a TracerProvider or a bool")
        self._tracer = trace.get_tracer("npugrad_client", npugrad.__version__, provider)

    def begin(self, operator: str, begun_s: float) -> CallTrace:
        """Starts the spans of a call, inside the caller's current span."""
        return CallTrace(self._tracer, operator, begun_s)


class CallTrace:
    """The spans of one call. Times are seconds of `time.monotonic`."""

    def __init__(self, tracer: Tracer, operator: str, begun_s: float) -> None:
        """Starts the span of the call."""
        self._tracer = tracer
        # One reading of both clocks for all spans of a call, so that they keep their order.
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        self._attributes: dict[str, str | int] = {"rpc.system": "grpc"}
        self._tries: dict[int, Span] = {}
        self._span = tracer.start_span(
            operator, start_time=self._ns(begun_s), attributes={"npugrad.operator": operator}
        )
        self._context = trace.set_span_in_context(self._span)

    def prepared(self, service: str, method: str, nbytes: int) -> None:
        """Records its unary RPC, and the bytes of its data in the larger direction."""
        self._attributes |= {"rpc.service": service, "rpc.method": method}
        self._span.set_attribute("npugrad.bytes", nbytes)

    def begin_try(self, attempt: Attempt) -> None:
        """Starts the span of a try; gives the try the metadata that tell the server."""
        context = self._context
        if self._span.is_recording():
            attributes = dict(self._attributes)
            if attempt.is_streamed:
                attributes["rpc.method"] = "Execute"
            named = f"{attributes['rpc.service']}/{attributes['rpc.method']}"
            span = self._tracer.start_span(
                named,
                context,
                SpanKind.CLIENT,
                {**attributes, **_address(attempt.target), "npugrad.try": attempt.number},
                start_time=self._ns(attempt.started_s),
            )
            self._tries[attempt.number] = span
            context = trace.set_span_in_context(span)
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, context)
        attempt.metadata = tuple(carrier.items()) or None

    def end(self, clock: CallClock, error: BaseException | None) -> None:
        """Ends the spans of the call."""
        span = self._span
        if span.is_recording():
            span.set_attribute("npugrad.tries", len(self._tries))
            span.set_attributes({} if clock.info is None else _of_info(clock.info))
            self._end_tries(clock)
            if error is not None:
                _fail(span, type(error).__name__, str(error), self._ns(clock.ended_s))
        span.end(self._ns(clock.ended_s))

    def _end_tries(self, clock: CallClock) -> None:
        timeline, spans = clock.timeline(), dict(self._tries)
        ends = {one.number: clock.begun_s + one.end_s for one in timeline.tries}
        self._make_stages(timeline, clock.begun_s, ends)
        for attempt in list(clock.attempts):
            span = spans.get(attempt.number)
            if span is None:  # a hedge that started after the answer
                continue
            end_ns = self._ns(min(ends.get(attempt.number, clock.ended_s), clock.ended_s))
            # An abandoned try was cancelled.
            status = attempt.status or ("OK" if attempt.received_s else "CANCELLED")
            span.set_attribute("rpc.grpc.status_code", code_pb2.Code.Value(status))
            if attempt.error:
                _fail(span, attempt.error, attempt.error_text, end_ns)
            span.set_attributes(_server_seconds(timeline, attempt.number))
            span.end(end_ns)

    def _make_stages(self, timeline: Timeline, origin_s: float, ends: dict[int, float]) -> None:
        contexts: dict[int, Context] = {0: self._context}
        contexts |= {n: trace.set_span_in_context(span) for n, span in dict(self._tries).items()}
        for stage, where, start_s, end_s, number in timeline.stages:
            if where == "client" and number in contexts:
                span = self._tracer.start_span(
                    stage, contexts[number], start_time=self._ns(origin_s + start_s)
                )
                span.end(self._ns(min(origin_s + end_s, ends.get(number, origin_s + end_s))))

    def _ns(self, at_s: float) -> int:
        """Nanoseconds since the epoch."""
        return self._epoch_ns + round(at_s * 1e9)


def _fail(span: Span, kind: str, message: str, at_ns: int) -> None:
    """Records an error in a span; not the exception itself, whose frames reference the operands."""
    span.set_status(Status(StatusCode.ERROR, message))
    span.set_attribute("error.type", kind)
    span.add_event("exception", {"exception.type": kind, "exception.message": message}, at_ns)


def _of_info(info: ExecutionInfo) -> dict[str, str]:
    named = {"device": info.device, "backend": info.backend, "request_id": info.request_id}
    return {f"npugrad.{name}": value for name, value in named.items()}


def _server_seconds(timeline: Timeline, number: int) -> dict[str, float]:
    """Seconds of the server's stages in a try, as attributes."""
    found: dict[str, float] = {}
    for interval in timeline.stages:
        if (interval.where, interval.number) == ("server", number):
            name = f"npugrad.server.{interval.stage}_s"
            found[name] = found.get(name, 0.0) + interval.end_s - interval.start_s
    return found


def _address(target: str) -> dict[str, str | int]:
    match = None if target.startswith("unix:") else ADDRESS.fullmatch(target)
    if match is None:
        return {"server.address": target}
    port = match["port"]
    return {"server.address": match["host"], **({"server.port": int(port)} if port else {})}
