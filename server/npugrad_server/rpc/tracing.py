"""Spans of OpenTelemetry: one for an RPC, and in it one for each of its stages.

Whether an RPC is traced, and under which ids, is decided on the event loop when it ends; a thread of its own
makes the spans, and another of OpenTelemetry's sends them, many at a time. The caller's trace is joined, so
that both sides are one, but unless callers are trusted nothing else that they say counts: else any of them
could have all of its calls recorded. Baggage is never read.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import grpc
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import npugrad
from npugrad_server.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from google.protobuf.descriptor import ServiceDescriptor
    from opentelemetry.sdk.trace import SpanProcessor

    from npugrad.call import ExecutionInfo
    from npugrad.timeline import Mark
    from npugrad_server.rpc.funnel import RpcCall

FAREWELL_S = 2.0
"""Seconds that spans have to be sent at the end; those left then are lost."""
MAX_WAITING = 2048
"""RPCs whose spans may wait to be made before others are dropped."""
MAX_HEADER_CHARACTERS = 512
"""Longest header of a trace context; a longer one is ignored."""
_HEADERS = ("traceparent", "tracestate")
_W3C = TraceContextTextMapPropagator()
_CODES = {code.name: code.value[0] for code in grpc.StatusCode}
_FAULTS = ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")
"""Statuses that are an error of a server's span; the others are the caller's affair."""


class _Ended(NamedTuple):
    """What is needed of an RPC to make its spans; holds neither it nor the frames of its error."""

    parent: SpanContext | None
    trace_id: int
    span_id: int
    method: str
    operator: str
    request_id: str
    moved_bytes: tuple[int, int]
    info: ExecutionInfo | None
    outcome: tuple[str, str, str]
    marks: Sequence[Mark]
    end_s: float


class _PlannedIds(RandomIdGenerator):
    """Ids of the next span, where they were planned; random ones otherwise. For one thread."""

    trace_id: int = 0
    span_id: int | None = None

    def generate_trace_id(self) -> int:
        """That of the next span without a parent."""
        return self.trace_id

    def generate_span_id(self) -> int:
        """The planned id once, then random ones."""
        planned, self.span_id = self.span_id, None
        return super().generate_span_id() if planned is None else planned


def otlp_processor() -> SpanProcessor:
    """What sends spans by OTLP over gRPC to where the standard variables ``OTEL_*`` say.

    Raises:
        ValueError: One of the variables is wrong.
        OSError: A file that one of them names cannot be read.
    """
    return BatchSpanProcessor(OTLPSpanExporter())


def resource(product: str) -> Resource:
    """What the spans of a server are of; ``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES`` go first."""
    ours = {
        "service.name": "npugrad-server",
        "service.version": npugrad.__version__,
        "npugrad.product": product,
    }
    return Resource.create(Resource(ours).merge(OTELResourceDetector().detect()).attributes)


class RpcTracing:
    """Chooses the RPCs that are traced, and makes their spans.

    Concurrency: `ended` is for the event loop and waits for nothing.
    """

    def __init__(
        self,
        processor: SpanProcessor,
        resource: Resource,
        services: Iterable[ServiceDescriptor],
        *,
        ratio: float,
        trusts_callers: bool,
    ) -> None:
        """Starts the thread.

        Args:
            processor: What the spans go to.
            resource: What they are of.
            services: Those that are served.
            ratio: Part of the RPCs that are traced.
            trusts_callers: Whether a caller's trace context decides instead, where there is one.
        """
        self._ids = _PlannedIds()
        # What comes to it was chosen already. The end of the server ends it, within its own time.
        self._provider = TracerProvider(
            sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False, id_generator=self._ids
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("npugrad_server", npugrad.__version__)
        self._services = {m.name: service.full_name for service in services for m in service.methods}
        self._ratio, self._trusts_callers = ratio, trusts_callers
        self._random = RandomIdGenerator()
        self._waiting: queue.SimpleQueue[_Ended | None] = queue.SimpleQueue()
        self._dropped = 0
        self._thread = threading.Thread(target=self._work, name="spans", daemon=True)
        self._thread.start()

    def ended(self, call: RpcCall, seconds: float, outcome: tuple[str, str, str]) -> tuple[str, str] | None:
        """An RPC has ended.

        Args:
            call: The RPC.
            seconds: How long it took.
            outcome: gRPC status, reason, and message of the error.

        Returns:
            Trace id and span id, as the log has them; None for an RPC that is not traced.
        """
        # Not by the trace id: callers choose that.
        is_traced = random.random() < self._ratio
        if not (is_traced or self._trusts_callers):
            return None
        parent = caller_context(call.context.invocation_metadata() or (), with_state=self._trusts_callers)
        if parent is not None and self._trusts_callers:
            is_traced = parent.trace_flags.sampled
        if not is_traced:
            return None
        if self._waiting.qsize() >= MAX_WAITING:
            self._dropped += 1
            return None
        trace_id = self._random.generate_trace_id() if parent is None else parent.trace_id
        span_id = self._random.generate_span_id()
        self._waiting.put(
            _Ended(
                parent,
                trace_id,
                span_id,
                call.method,
                call.operator,
                call.request_id,
                (call.received_bytes, call.sent_bytes),
                call.info,
                outcome,
                tuple(call.marks),
                call.marks[0][1] + seconds,
            )
        )
        return trace.format_trace_id(trace_id), trace.format_span_id(span_id)

    def close(self) -> None:
        """Sends the spans that are left, within `FAREWELL_S`."""
        self._waiting.put(None)
        self._thread.join(FAREWELL_S)

    def _work(self) -> None:
        while (ended := self._waiting.get()) is not None:
            dropped, self._dropped = self._dropped, 0
            if dropped:
                get_logger().warning("spans dropped", calls=dropped)
            try:
                self._make(ended)
            except Exception as error:  # the thread must not end for one RPC
                get_logger().error("spans not made", method=ended.method, exc_info=error)
        self._provider.shutdown()

    def _make(self, ended: _Ended) -> None:
        """The spans of an RPC."""
        epoch_ns = time.time_ns() - time.monotonic_ns()
        service, start_s = self._services.get(ended.method, ""), ended.marks[0][1]
        context = trace.set_span_in_context(
            trace.INVALID_SPAN if ended.parent is None else trace.NonRecordingSpan(ended.parent)
        )
        self._ids.trace_id, self._ids.span_id = ended.trace_id, ended.span_id
        span = self._tracer.start_span(
            f"{service}/{ended.method}",
            context,
            SpanKind.SERVER,
            {"rpc.system": "grpc", "rpc.service": service, "rpc.method": ended.method, **_attributes(ended)},
            start_time=epoch_ns + round(start_s * 1e9),
        )
        inner = trace.set_span_in_context(span)
        for (_, begun_s), (stage, done_s) in pairwise(ended.marks):
            if stage:
                part = self._tracer.start_span(stage, inner, start_time=epoch_ns + round(begun_s * 1e9))
                part.end(epoch_ns + round(done_s * 1e9))
        status, reason, message = ended.outcome
        end_ns = epoch_ns + round(ended.end_s * 1e9)
        if status != "OK":
            span.set_attribute("error.type", reason)
            if message:
                named = {"exception.type": reason, "exception.message": message}
                span.add_event("exception", named, end_ns)
        if status in _FAULTS:
            span.set_status(Status(StatusCode.ERROR, message))
        span.end(end_ns)


def _attributes(ended: _Ended) -> dict[str, str | int]:
    found: dict[str, str | int] = {
        "rpc.grpc.status_code": _CODES[ended.outcome[0]],
        "npugrad.request_id": ended.request_id,
    }
    if ended.operator:
        received, sent = ended.moved_bytes
        found |= {"npugrad.operator": ended.operator}
        found |= {"npugrad.received_bytes": received, "npugrad.sent_bytes": sent}
    if ended.info is not None:
        found |= {"npugrad.device": ended.info.device, "npugrad.backend": ended.info.backend}
        found |= {"npugrad.attempts": ended.info.attempts}
    return found


def caller_context(metadata: Iterable[tuple[str, str | bytes]], *, with_state: bool) -> SpanContext | None:
    """The span that a caller says it is in; None where it says none, or says it wrongly.

    By the rules of W3C: what does not parse, comes twice or is too long is as good as nothing; flags that a
    later version has mean nothing here.

    Args:
        metadata: What came with the RPC.
        with_state: Whether ``tracestate`` is kept as well.
    """
    found: dict[str, list[str]] = {}
    for key, value in metadata:
        if key in _HEADERS and isinstance(value, str):
            found.setdefault(key, []).append(value)
    parents = found.get("traceparent", [])
    if len(parents) != 1 or len(parents[0]) > MAX_HEADER_CHARACTERS:
        return None
    states = found.pop("tracestate", [])
    if with_state and sum(map(len, states)) <= MAX_HEADER_CHARACTERS:
        found["tracestate"] = states
    parsed = trace.get_current_span(_W3C.extract(found, Context())).get_span_context()
    if not parsed.is_valid:
        return None
    flags = TraceFlags(parsed.trace_flags & TraceFlags.SAMPLED)
    return SpanContext(parsed.trace_id, parsed.span_id, True, flags, parsed.trace_state)
