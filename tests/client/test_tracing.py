"""Spans of a client: what each is about, how they lie in each other, what servers are told."""

from __future__ import annotations

import pickle
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanContext, SpanKind, StatusCode, TraceFlags, TraceState
from tests.client.both import BOTH, WAYS, Make, call_once
from tests.client.fake_service import STREAMED, Context, Gate, abort_with, fake_service, group_norm
from tests.fix_server import ServerProcess
from tests.interpreter import printed

from npugrad.errors import ServerBusy
from npugrad_client import AsyncClient, Client, InvalidOperand, RetryPolicy

QUICK = RetryPolicy(initial_backoff_s=0.001)
OPERATOR = "group_norm_backward"


class Spans:
    """A provider that keeps what ended."""

    def __init__(self) -> None:
        self._kept = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._kept))

    def all(self) -> list[ReadableSpan]:
        return sorted(self._kept.get_finished_spans(), key=lambda span: span.start_time or 0)

    def call(self) -> ReadableSpan:
        (found,) = (span for span in self.all() if span.name == OPERATOR)
        return found

    def tries(self) -> list[ReadableSpan]:
        return [span for span in self.all() if span.kind is SpanKind.CLIENT]

    def inside(self, parent: ReadableSpan) -> list[ReadableSpan]:
        return [span for span in self.all() if span.parent and span.parent.span_id == ids(parent).span_id]


def ids(span: ReadableSpan) -> SpanContext:
    return cast("SpanContext", span.context)


def said(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def seconds(span: ReadableSpan) -> float:
    return ((span.end_time or 0) - (span.start_time or 0)) / 1e9


@pytest.fixture
def spans() -> Iterator[Spans]:
    kept = Spans()
    yield kept
    kept.provider.shutdown()


class Told:
    """A service that notes what headers it was sent, and refuses the first calls."""

    def __init__(self, refusals: int = 0, error: Exception | None = None) -> None:
        self.headers: list[dict[str, Any]] = []
        self._refusals = refusals
        self._error: Any = error or ServerBusy("the queue is full", operator=OPERATOR)

    def note(self, context: Context) -> None:
        self.headers.append(dict(context.invocation_metadata() or ()))
        if len(self.headers) <= self._refusals:
            abort_with(context, self._error)

    @property
    def span_ids(self) -> list[str]:
        """The spans that the calls said they were of."""
        return [header["traceparent"].split("-")[2] for header in self.headers]


@WAYS
@BOTH
def test_a_call_and_its_try_are_spans_of_one_trace_and_the_server_is_told_of_the_try(
    spans: Spans, make: Make, way: int
) -> None:
    told = Told()
    with fake_service(before=told.note) as seen:
        tracer = spans.provider.get_tracer("test")
        with tracer.start_as_current_span("outer") as outer:
            call_once(make, seen.address, stream_from_bytes=way, tracing=spans.provider)
    call, (one,) = spans.call(), spans.tries()
    host, port = seen.address.split(":")
    method = "Execute" if way == STREAMED else "GroupNormBackward"
    assert call.parent == outer.get_span_context()
    assert one in spans.inside(call)
    assert one.name == f"npugrad.v1.BackwardService/{method}"
    assert said(one) == {
        "rpc.system": "grpc",
        "rpc.service": "npugrad.v1.BackwardService",
        "rpc.method": method,
        "rpc.grpc.status_code": 0,
        "server.address": host,
        "server.port": int(port),
        "npugrad.try": 1,
    }
    expected = {"npugrad.operator": OPERATOR, "npugrad.device": "test:0", "npugrad.tries": 1}
    assert expected.items() <= said(call).items()
    assert (call.status.status_code, one.status.status_code) == (StatusCode.UNSET, StatusCode.UNSET)
    (header,) = told.headers
    told_of, flags = header["traceparent"].rsplit("-", 1)
    assert told_of == f"00-{ids(call).trace_id:032x}-{ids(one).span_id:016x}"
    assert int(flags, 16) & TraceFlags.SAMPLED
    assert "baggage" not in header


@WAYS
@BOTH
def test_retries_are_spans_of_one_trace_and_each_says_how_it_failed(
    spans: Spans, make: Make, way: int
) -> None:
    told = Told(refusals=2)
    with fake_service(before=told.note) as seen:
        call_once(make, seen.address, stream_from_bytes=way, tracing=spans.provider, retry=QUICK)
    call, tries = spans.call(), spans.tries()
    assert told.span_ids == [f"{ids(one).span_id:016x}" for one in tries]
    assert {one.parent and one.parent.span_id for one in tries} == {ids(call).span_id}
    assert {ids(span).trace_id for span in spans.all()} == {ids(call).trace_id}
    attributes = [said(one) for one in tries]
    assert [a["npugrad.try"] for a in attributes] == [1, 2, 3]
    assert [a["rpc.grpc.status_code"] for a in attributes] == [8, 8, 0]
    assert [a.get("error.type") for a in attributes] == ["ServerBusy", "ServerBusy", None]
    assert [one.status.status_code for one in tries] == [StatusCode.ERROR] * 2 + [StatusCode.UNSET]
    for one in tries[:2]:
        (event,) = one.events
        assert "the queue is full" in str((event.attributes or {})["exception.message"])
    assert call.status.status_code is StatusCode.UNSET
    assert said(call)["npugrad.tries"] == 3
    assert [span.name for span in spans.inside(call) if span.name == "wait"] == ["wait"] * 2


@BOTH
def test_a_call_that_fails_says_so_without_its_operands(spans: Spans, make: Make) -> None:
    told = Told(1, InvalidOperand("group: found 3", code=161002, operator=OPERATOR))
    with fake_service(before=told.note) as seen, pytest.raises(InvalidOperand):
        call_once(make, seen.address, tracing=spans.provider)
    call, (one,) = spans.call(), spans.tries()
    for span in (call, one):
        (event,) = span.events
        assert span.status.status_code is StatusCode.ERROR
        assert said(span)["error.type"] == "InvalidOperand"
        assert set(event.attributes or {}) == {"exception.type", "exception.message"}
    assert said(one)["rpc.grpc.status_code"] == 3


def test_a_call_that_is_never_sent_is_a_span_without_tries(spans: Spans) -> None:
    with Client("localhost:1", tracing=spans.provider) as client, pytest.raises(TypeError):
        client.group_norm_backward(**{**group_norm(), "input": object()})
    assert [span.name for span in spans.all() if span.name != "pack"] == [OPERATOR]
    assert spans.call().status.status_code is StatusCode.ERROR


@BOTH
def test_a_hedge_is_another_try_of_the_trace_and_the_loser_is_cancelled(spans: Spans, make: Make) -> None:
    gate, told, arriving = Gate(), Told(), threading.Lock()
    policy = RetryPolicy(hedge_after_s=0.01, max_tries=2)
    held: list[str] = []

    def hold_first(context: Context) -> None:
        with arriving:
            told.note(context)
            is_first = not held
            if is_first:
                held.append(told.span_ids[-1])
        if is_first:
            gate.hold()

    with fake_service(before=hold_first) as seen:
        call_once(make, seen.address, tracing=spans.provider, retry=policy)
        gate.open()
    call, tries = spans.call(), spans.tries()
    assert sorted(told.span_ids) == sorted(f"{ids(one).span_id:016x}" for one in tries)
    assert sorted(said(one)["npugrad.try"] for one in tries) == [1, 2]
    # On a busy machine either try may arrive first; the one that does is held and loses.
    codes = {f"{ids(one).span_id:016x}": said(one)["rpc.grpc.status_code"] for one in tries}
    assert (codes.pop(held[0]), list(codes.values())) == (1, [0])
    assert {one.parent and one.parent.span_id for one in tries} == {ids(call).span_id}


@WAYS
@BOTH
def test_stages_lie_in_their_parents_and_take_as_long_as_the_timeline_says(
    server: ServerProcess, spans: Spans, make: Make, way: int
) -> None:
    result = call_once(make, server.address, stream_from_bytes=way, tracing=spans.provider)
    call, (one,) = spans.call(), spans.tries()
    found: Counter[str] = Counter()
    for parent in (call, one):
        for span in spans.inside(parent):
            assert (parent.start_time or 0) <= (span.start_time or 0) <= (span.end_time or 0)
            assert (span.end_time or 0) <= (parent.end_time or 0)
            if span.kind is SpanKind.INTERNAL:
                found[span.name] += seconds(span)  # type: ignore[assignment]
    timeline = result.info.timeline
    ours = {i.stage for i in timeline.stages if i.where == "client"}
    assert found == pytest.approx({stage: timeline.seconds(stage) for stage in ours}, abs=1e-6)
    theirs = {
        key.removeprefix("npugrad.server.").removesuffix("_s"): value
        for key, value in said(one).items()
        if key.startswith("npugrad.server.")
    }
    assert {"decode", "queued", "run", "encode"} <= theirs.keys()
    assert theirs == pytest.approx({stage: timeline.seconds(stage) for stage in theirs})
    assert seconds(call) == pytest.approx(timeline.wall_s, abs=1e-6)


def test_a_trace_that_is_not_sampled_goes_on_unsampled_with_its_state(spans: Spans) -> None:
    """The server is told, so that one that trusts its callers does not begin half a trace."""
    state = TraceState([("vendor", "1")])
    outer = trace.NonRecordingSpan(SpanContext(0xABC, 0xDEF, True, TraceFlags(0), state))
    told = Told()
    with (
        fake_service(before=told.note) as seen,
        trace.use_span(outer),
        Client(seen.address, tracing=TracerProvider(ALWAYS_OFF, shutdown_on_exit=False)) as client,
    ):
        client.group_norm_backward(**group_norm())
    (header,) = told.headers
    _, trace_id, _, flags = header["traceparent"].split("-")
    assert (int(trace_id, 16), flags, header["tracestate"]) == (0xABC, "00", "vendor=1")


@BOTH
def test_futures_are_in_the_span_of_who_started_them(spans: Spans, make: Make) -> None:
    with fake_service() as seen, make(seen.address, tracing=spans.provider) as client:
        with spans.provider.get_tracer("test").start_as_current_span("outer") as outer:
            future = client.submit.group_norm_backward(**group_norm())
        future.result()
    assert spans.call().parent == outer.get_span_context()


@WAYS
@BOTH
@pytest.mark.parametrize("tracing", [False, True], ids=["without tracing", "without a provider"])
def test_nothing_is_sent_of_an_application_that_never_set_it_up(make: Make, way: int, tracing: bool) -> None:
    told = Told()
    with fake_service(before=told.note) as seen:
        call_once(make, seen.address, stream_from_bytes=way, tracing=tracing)
    (header,) = told.headers
    assert not header.keys() & {"traceparent", "tracestate", "baggage"}


_WITHOUT = """
import sys
import threading
sys.modules["opentelemetry"] = None
from npugrad_client import AsyncClient, Client
from tests.client.fake_service import group_norm
with Client(sys.argv[1]) as client:
    client.group_norm_backward(**group_norm())
assert not [name for name in sys.modules if name.startswith("opentelemetry.")]
for kind in (Client, AsyncClient):
    try:
        kind(sys.argv[1], tracing=True)
    except ImportError as error:
        print(error)
"""


def test_a_client_needs_opentelemetry_for_tracing_only_and_says_how_to_get_it() -> None:
    with fake_service() as seen:
        lines = printed(_WITHOUT, seen.address, timeout_s=120)
    assert lines.count("pip install '.[otel]' in a checkout of npugrad") == 2


def test_a_client_that_traces_by_the_global_provider_can_be_pickled_and_no_other(spans: Spans) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(TypeError, match=r"tracing: found str; expected a TracerProvider or a bool"):
            kind("localhost", tracing=cast("Any", "jaeger"))
    with Client("localhost", tracing=True) as client, pickle.loads(pickle.dumps(client)) as copy:
        assert copy._tracing is not None
    with (
        Client("localhost", tracing=spans.provider) as client,
        pytest.raises(TypeError, match="use tracing=True"),
    ):
        pickle.dumps(client)
