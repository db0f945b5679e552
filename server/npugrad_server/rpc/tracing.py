"""OpenTelemetry spans: one for each RPC, and within it one for each of its stages.

When an RPC ends, the event loop decides whether it is traced, and under which ids; a separate thread makes
the spans, and one of OpenTelemetry's sends them in batches. Spans join the caller's trace, but unless callers
are trusted, nothing else in their trace context counts: otherwise any of them could have all of its calls
recorded. Baggage is never read.
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
"""Seconds to send the remaining spans at the end; any left then are lost."""
MAX_WAITING = 2048
"""RPCs whose spans may wait to be made before more are dropped."""
MAX_HEADER_CHARACTERS = 512
"""Longest header of a trace context; a longer one is ignored."""
_HEADERS = ("traceparent", "tracestate")
_W3C = TraceContextTextMapPropagator()
_CODES = {code.name: code.value[0] for code in grpc.StatusCode}
_FAULTS = ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")
"""Statuses that mark a server's span as an error; the others are the caller's."""


class _Ended(NamedTuple):
    """What is needed to make the spans of an RPC; references neither it nor its error's stack frames."""

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
    """Planned ids for the next span, if any; random ones otherwise. For one thread."""

    trace_id: int = 0
    span_id: int | None = None

    def generate_trace_id(self) -> int:
        """The trace id of the next span without a parent."""
        return self.trace_id

    def generate_span_id(self) -> int:
        """The planned id once, then random ones."""
        planned, self.span_id = self.span_id, None
        return super().generate_span_id() if planned is None else planned


def otlp_processor() -> SpanProcessor:
    """Sends spans over OTLP/gRPC to where the standard ``OTEL_*`` variables say.

    Raises:
        ValueError: One of the variables is invalid.
        OSError: A file that one of them names cannot be read.
    """
    return BatchSpanProcessor(OTLPSpanExporter())


def resource(product: str) -> Resource:
    """Resource of a server's spans; ``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES`` override it."""
    ours = {
        "service.name": "npugrad-server",
        "service.version": npugrad.__version__,
        "npugrad.product": product,
    }
    return Resource.create(Resource(ours).merge(OTELResourceDetector().detect()).attributes)


class RpcTracing:
    """Chooses which RPCs to trace, and makes their spans.

    Concurrency: call `ended` on the event loop; it never waits.
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
            processor: Receives the spans.
            resource: The spans' resource.
            services: The services that are served.
            ratio: Fraction of the RPCs to trace.
            trusts_callers: Whether a caller's trace context, if there is one, decides instead.
        """
        self._ids = _PlannedIds()
        # RPCs are sampled before they get here. `close` shuts the provider down, within its own time limit.
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
        """Takes an RPC that has ended.

        Args:
            call: The RPC.
            seconds: How long it took.
            outcome: gRPC status, reason, and message of the error.

        Returns:
            Trace id and span id, as the log shows them; None for an RPC that is not traced.
        """
        # Not derived from the trace id, which callers choose.
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
        """Sends the remaining spans, within `FAREWELL_S`."""
        self._waiting.put(None)
        self._thread.join(FAREWELL_S)

    def _work(self) -> None:
        while (ended := self._waiting.get()) is not None:
            dropped, self._dropped = self._dropped, 0
            if dropped:
                get_logger().warning("spans dropped", calls=dropped)
            try:
                self._make(ended)
            except Exception as error:  # one RPC must not end the thread
                get_logger().error("spans not made", method=ended.method, exc_info=error)
        self._provider.shutdown()

    def _make(self, ended: _Ended) -> None:
        """Makes the spans of an RPC."""
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
    """The caller's span according to its trace context; None if that is missing or invalid.

    By the W3C rules: a header that does not parse, comes twice or is too long is ignored, and so are flags of
    later versions.

    Args:
        metadata: Metadata of the RPC.
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
