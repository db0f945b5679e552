"""Traces of real servers: one over both sides, who decides about it, and servers that do without."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from tests.client.fake_service import STREAMED, UNARY, group_norm
from tests.e2e.harness import case
from tests.fix_server import ServerProcess, StartServer, run_quick_server

from npugrad.v1 import server_pb2, server_pb2_grpc
from npugrad_client import Client, InvalidOperand, RetryPolicy

RPC = "npugrad.v1.BackwardService/GroupNormBackward"
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
WITHOUT_OTEL = (
    "-c",
    "import sys; sys.modules['opentelemetry'] = None; from npugrad_server.cli import main; main()",
)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self._came: queue.Queue[Any] = queue.Queue()
        self._spans: list[Span] = []
        self.resource: dict[str, str] = {}
        self.address = ""

    def Export(self, request: Any, context: Any) -> Any:
        self._came.put(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait_for(self, is_meant: Callable[[Span], bool], count: int = 1) -> list[Span]:
        """The spans that are meant, once there are so many."""
        while len(found := list(filter(is_meant, self._spans))) < count:
            for group in self._came.get(timeout=60).resource_spans:
                self.resource = {a.key: a.value.string_value for a in group.resource.attributes}
                for scope in group.scope_spans:
                    self._spans.extend(scope.spans)
        return found

    def of_try(self, one: ReadableSpan) -> Span:
        """The server's span of a try of a client."""
        (found,) = self.wait_for(lambda span: span.parent_span_id.hex() == f"{one.context.span_id:016x}")
        return found

    def of_request(self, request_id: str) -> Span:
        (found,) = self.wait_for(lambda span: attributes(span).get("npugrad.request_id") == request_id)
        return found

    def stages(self, parent: Span) -> list[Span]:
        """The children of a span that came; they come before it."""
        return [span for span in self._spans if span.parent_span_id == parent.span_id]

    @property
    def variables(self) -> Mapping[str, str]:
        """What makes a server send its spans here, soon."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{self.address}", "OTEL_BSP_SCHEDULE_DELAY": "50"}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    found, server = Collector(), grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(found, server)  # type: ignore[no-untyped-call]
    found.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield found
    server.stop(0).wait(10)


@pytest.fixture(scope="module")
def traced(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log_path = tmp_path_factory.mktemp("traced") / "log"
    with run_quick_server(log_path, "--trace-ratio", "1", env=collector.variables) as running:
        yield running


@pytest.fixture(scope="module")
def slow(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Another one, whose device is done with no call before the tests are."""
    log_path = tmp_path_factory.mktemp("slow") / "log"
    never: dict[str, Any] = {"devices": "test:1?ms=600000", "check_end": False}
    with run_quick_server(log_path, "--trace-ratio", "1", env=collector.variables, **never) as running:
        yield running


@contextmanager
def recorded() -> Iterator[tuple[TracerProvider, InMemorySpanExporter]]:
    """A client's provider, and what it keeps."""
    kept, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    yield provider, kept
    provider.shutdown()


def tries_of(kept: InMemorySpanExporter) -> list[ReadableSpan]:
    return [span for span in kept.get_finished_spans() if span.kind is SpanKind.CLIENT]


def attributes(span: Span) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value") or "") for a in span.attributes}


@pytest.mark.parametrize("way", [UNARY, STREAMED], ids=["unary", "streamed"])
def test_a_call_is_one_trace_over_both_sides(traced: ServerProcess, collector: Collector, way: int) -> None:
    with (
        recorded() as (provider, kept),
        Client(traced.address, stream_from_bytes=way, tracing=provider) as client,
    ):
        result = client.group_norm_backward(**group_norm())
    timeline = result.info.timeline
    assert timeline is not None
    (one,) = tries_of(kept)
    rpc = collector.of_try(one)
    assert (rpc.name, rpc.trace_id.hex()) == (one.name, f"{one.context.trace_id:032x}")
    assert (
        attributes(rpc).items()
        >= {
            "rpc.system": "grpc",
            "rpc.grpc.status_code": 0,
            "npugrad.operator": "group_norm_backward",
            "npugrad.device": "cpu:0",
            "npugrad.attempts": 1,
            "npugrad.request_id": result.info.request_id,
        }.items()
    )
    theirs = {i.stage: i.end_s - i.start_s for i in timeline.stages if i.where == "server"}
    stages = collector.stages(rpc)
    found = {span.name: (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 for span in stages}
    assert found == pytest.approx(theirs, abs=1e-6)
    for span in stages:
        assert rpc.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= rpc.end_time_unix_nano
        assert span.trace_id == rpc.trace_id
    line = traced.find_log("call", request_id=result.info.request_id)
    assert (line["trace_id"], line["span_id"]) == (rpc.trace_id.hex(), rpc.span_id.hex())
    assert collector.resource["service.name"] == "npugrad-server"
    assert collector.resource["npugrad.product"] == "atlas-a2"


def test_retries_at_several_servers_are_one_trace(
    traced: ServerProcess, slow: ServerProcess, collector: Collector
) -> None:
    """The first takes longer than a try may."""
    policy = RetryPolicy(try_timeout_s=3.0, max_tries=2, initial_backoff_s=0.001)
    with (
        recorded() as (provider, kept),
        Client([slow.address, traced.address], retry=policy, tracing=provider) as client,
    ):
        while len(tries_of(kept)) < 2:  # the servers take turns
            kept.clear()
            client.group_norm_backward(**group_norm())
    tries = tries_of(kept)
    theirs = [collector.of_try(one) for one in tries]
    assert [span.trace_id.hex() for span in theirs] == [f"{one.context.trace_id:032x}" for one in tries]
    assert len({span.trace_id for span in theirs}) == 1
    codes = [attributes(span)["rpc.grpc.status_code"] for span in theirs]
    late = (grpc.StatusCode.DEADLINE_EXCEEDED.value[0], grpc.StatusCode.CANCELLED.value[0])
    assert (min(codes), max(codes) in late) == (0, True)


def test_calls_that_fail_or_are_given_up_have_their_stages_too(
    slow: ServerProcess, collector: Collector
) -> None:
    calls = {**group_norm(n=3), "group": 3}, group_norm(n=3)
    with (
        recorded() as (provider, kept),
        Client(slow.address, retry=None, tracing=provider) as client,
    ):
        with pytest.raises(InvalidOperand):
            client.group_norm_backward(**calls[0])
        before = slow.info().accepted_calls
        flying = client.submit.group_norm_backward(**calls[1])
        slow.wait_accepted(before + 1)
        assert flying.cancel()
        while len(tries_of(kept)) < 2:  # its thread notices
            slow.info()
    refused, given_up = map(collector.of_try, tries_of(kept))
    assert "decode" in {span.name for span in collector.stages(refused)}
    assert attributes(refused)["error.type"] == "ACLNN_ERR_PARAM_INVALID"
    (event,) = refused.events
    assert event.name == "exception"
    assert {"decode", "validate"} <= {span.name for span in collector.stages(given_up)}
    assert attributes(given_up)["error.type"] == "CANCELLED"


def ask(server: ServerProcess, request_id: str, *metadata: tuple[str, str]) -> None:
    with server.channel() as channel:
        server_pb2_grpc.ServerServiceStub(channel).GetServerInfo(
            server_pb2.GetServerInfoRequest(),
            timeout=30,
            metadata=(("x-request-id", request_id), *metadata),
        )


def test_the_callers_flag_counts_only_where_callers_are_trusted(
    start_server: StartServer, traced: ServerProcess, collector: Collector
) -> None:
    trusting = start_server("--trace-ratio", "1e-12", "--trust-trace-context", env=collector.variables)
    sampled, unsampled = (("traceparent", f"00-{TRACE}-{SPAN}-{flag}") for flag in ("01", "00"))
    ask(trusting, "sampled", sampled, ("tracestate", "vendor=1"), ("baggage", "user=somebody"))
    for server in (trusting, traced):
        ask(server, "unsampled", unsampled)
        ask(server, "none")
    found = [trusting.find_log("call", request_id=name) for name in ("sampled", "unsampled", "none")]
    assert [line.get("trace_id") for line in found] == [TRACE, None, None]
    rpc = collector.of_request("sampled")
    assert (rpc.parent_span_id.hex(), rpc.trace_state) == (SPAN, "vendor=1")
    assert "somebody" not in str(rpc)
    assert traced.find_log("call", request_id="unsampled")["trace_id"] == TRACE
    assert traced.find_log("call", request_id="none")["trace_id"] != TRACE
    for server in (trusting, traced):
        assert_ignored(server, collector)


def assert_ignored(server: ServerProcess, collector: Collector) -> None:
    # One that comes twice is not among them: gRPC itself keeps the last.
    good = f"00-{TRACE}-{SPAN}-01"
    headers = [
        [("traceparent", "")],
        [("traceparent", "garbage")],
        [("traceparent", good + "-more")],
        [("traceparent", f"ff{good[2:]}")],
        [("traceparent", f"01{good[2:]}-" + "x" * 2000)],
        [("tracestate", "vendor=1")],
        [("traceparent", "00-" + "0" * 32 + f"-{SPAN}-01"), ("tracestate", "=,=;=")],
    ]
    usual = server.find_log("call", request_id="none").keys()
    for number, metadata in enumerate(headers):
        with case(metadata):
            ask(server, f"bad-{number}", *metadata)
            line = server.find_log("call", request_id=f"bad-{number}")
            assert (line["status"], line.keys()) == ("OK", usual)
            assert line.get("trace_id") != TRACE
            if "trace_id" in line:
                assert not collector.of_request(f"bad-{number}").parent_span_id


def test_a_server_ends_in_time_though_nobody_takes_its_spans(start_server: StartServer) -> None:
    nobody = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    server = start_server("--trace-ratio", "1", env=nobody)
    with Client(server.address) as client:
        client.group_norm_backward(**group_norm())
    server.stop()


def test_a_server_that_does_not_trace_does_without_opentelemetry(tmp_path: Path) -> None:
    with run_quick_server(tmp_path / "log", program=WITHOUT_OTEL) as server, Client(server.address) as client:
        client.group_norm_backward(**group_norm())


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("trace_ratio", ["--trace-ratio", "0.5"]),
        pytest.param("trust_trace_context", ["--trust-trace-context"], marks=pytest.mark.deep),
    ],
)
def test_a_server_that_is_to_trace_says_what_it_lacks(tmp_path: Path, name: str, flags: list[str]) -> None:
    log = tmp_path / "log"
    with run_quick_server(log, *flags, program=WITHOUT_OTEL, wait=False, check_end=False) as server:
        assert server.wait() == 1
    install = "pip install '.[otel]' ./server in a checkout of npugrad"
    expected = f"{name}: found no OpenTelemetry; expected the extra otel: {install}"
    assert expected in log.read_text()


def test_a_wrong_variable_is_told_at_start(start_server: StartServer) -> None:
    wrong = {"OTEL_EXPORTER_OTLP_TIMEOUT": "soon"}
    server = start_server("--trace-ratio", "1", env=wrong, wait=False, check_end=False)
    assert server.wait() == 1
    assert "OTEL_*: could not convert string to float: 'soon'" in server.log_text()
