"""What a server believes of a caller's trace context, which RPCs it chooses, and the spans that it makes."""

from __future__ import annotations

import random
import time
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from npugrad.registry import REGISTRY
from npugrad_server.rpc.tracing import MAX_HEADER_CHARACTERS, RpcTracing, caller_context, resource

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.sdk.trace import ReadableSpan

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{SPAN}-01"
NEARLY = st.from_regex(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-..(-.*)?")
BAD = {
    "empty": "",
    "words": "hello",
    "too short": GOOD[:-1],
    "more in version 00": f"{GOOD}-what",
    "longer in version 00": f"{GOOD}0",
    "version ff": f"ff-{TRACE}-{SPAN}-01",
    "no version": f"{TRACE}-{SPAN}-01",
    "upper case": GOOD.upper(),
    "no hex": GOOD.replace("0af", "0xf"),
    "trace id of zeros": f"00-{'0' * 32}-{SPAN}-01",
    "span id of zeros": f"00-{TRACE}-{'0' * 16}-01",
    "short trace id": f"00-{TRACE[1:]}-{SPAN}-01",
    "another later version": f"01-{TRACE}-{SPAN}-01x",
    "two in one": f"{GOOD},{GOOD}",
    "too long": f"01-{TRACE}-{SPAN}-01-{'x' * MAX_HEADER_CHARACTERS}",
    "NUL": GOOD + "\0",
    "digits of another script": GOOD.replace("0", "\u0660"),
}


def context_of(*headers: str | bytes) -> Any:
    """What is believed of a caller's context."""
    return caller_context([("traceparent", header) for header in headers], with_state=True)


def test_a_context_that_does_not_parse_or_comes_twice_or_as_bytes_is_none() -> None:
    assert {name: context_of(header) for name, header in BAD.items()} == dict.fromkeys(BAD)
    assert context_of(GOOD) is not None
    assert context_of(GOOD, GOOD) is None
    assert context_of(GOOD.encode()) is None


@pytest.mark.parametrize(
    ("header", "is_sampled"),
    [
        (GOOD, True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-fe", False),
        (f"cc-{TRACE}-{SPAN}-ff", True),
        (f"cc-{TRACE}-{SPAN}-01-what-will-be-there", True),
    ],
)
def test_of_flags_only_the_sampled_one_counts_in_later_versions_too(header: str, is_sampled: bool) -> None:
    found = caller_context([("x-other", "1"), ("traceparent", header)], with_state=False)
    assert found is not None
    assert (found.trace_id, found.span_id) == (int(TRACE, 16), int(SPAN, 16))
    assert (found.is_remote, int(found.trace_flags)) == (True, int(is_sampled))


@pytest.mark.parametrize(
    ("states", "with_state", "expected"),
    [
        (["vendor=1"], False, ""),
        (["vendor=1"], True, "vendor=1"),
        (["vendor=1", "other=2"], True, "vendor=1,other=2"),
        (["vendor=" + "x" * MAX_HEADER_CHARACTERS], True, ""),
        (["a=1," * 100, "b=1," * 100], True, ""),
        (["no state at all"], True, ""),
    ],
)
def test_state_is_kept_of_trusted_callers_within_bounds(
    states: list[str], with_state: bool, expected: str
) -> None:
    metadata = [("traceparent", GOOD), *(("tracestate", state) for state in states)]
    found = caller_context(metadata, with_state=with_state)
    assert found is not None
    assert found.trace_state.to_header() == expected


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["traceparent", "tracestate", "baggage"]),
            st.one_of(st.text(), st.binary(), NEARLY),
        ),
        max_size=4,
    ),
    st.booleans(),
)
def test_no_header_is_an_error(metadata: list[tuple[str, str | bytes]], with_state: bool) -> None:
    found = caller_context(metadata, with_state=with_state)
    assert found is None or found.is_valid


def test_the_standard_variables_name_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = resource("atlas-a3").attributes
    assert (ours["service.name"], ours["npugrad.product"]) == ("npugrad-server", "atlas-a3")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "gradients")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=lab,npugrad.product=mine")
    named = resource("atlas-a3").attributes
    assert (named["service.name"], named["deployment.environment"]) == ("gradients", "lab")
    assert (named["service.version"], named["npugrad.product"]) == (ours["service.version"], "mine")


class Made:
    """A `RpcTracing` whose spans are kept; they are there once it is closed."""

    def __init__(self, ratio: float, trusts_callers: bool) -> None:
        self._kept = InMemorySpanExporter()
        self.tracing = RpcTracing(
            SimpleSpanProcessor(self._kept),
            resource("atlas-a2"),
            [REGISTRY.backward],
            ratio=ratio,
            trusts_callers=trusts_callers,
        )

    def spans(self) -> list[ReadableSpan]:
        self.tracing.close()
        return list(self._kept.get_finished_spans())

    def end(self, *metadata: tuple[str, str], outcome: tuple[str, str, str] = ("OK", "OK", "")) -> Any:
        """An RPC of two stages ends."""
        now = time.monotonic()
        call: Any = SimpleNamespace(
            context=SimpleNamespace(invocation_metadata=lambda: metadata),
            method="GroupNormBackward",
            operator="group_norm_backward",
            request_id="abc",
            received_bytes=5,
            sent_bytes=7,
            info=None,
            marks=[("", now - 3), ("decode", now - 2), ("", now - 1.5), ("run", now - 1)],
        )
        return self.tracing.ended(call, 3.0, outcome)


@contextmanager
def made(ratio: float, trusts_callers: bool = False) -> Iterator[Made]:
    found = Made(ratio, trusts_callers)
    try:
        yield found
    finally:
        found.tracing.close()


def test_the_spans_of_an_rpc_are_in_the_callers_trace_whatever_its_flag_says() -> None:
    with made(1.0) as one:
        trace_id, span_id = one.end(("traceparent", GOOD[:-2] + "00"), ("tracestate", "vendor=1"))
        decode, run, rpc = one.spans()
    assert rpc.name == "npugrad.v1.BackwardService/GroupNormBackward"
    assert (trace_id, f"{rpc.context.span_id:016x}") == (TRACE, span_id)
    assert rpc.parent is not None
    assert rpc.parent.span_id == int(SPAN, 16)
    assert not rpc.context.trace_state
    assert [decode.name, run.name] == ["decode", "run"]
    for span in (decode, run):
        assert span.parent is not None
        assert span.parent.span_id == rpc.context.span_id
        assert (rpc.start_time or 0) <= (span.start_time or 0) <= (span.end_time or 0) <= (rpc.end_time or 0)
    assert {"npugrad.operator": "group_norm_backward", "npugrad.received_bytes": 5}.items() <= dict(
        rpc.attributes or {}
    ).items()


def test_an_rpc_of_a_caller_that_says_nothing_begins_a_trace() -> None:
    with made(1.0) as one:
        first, second = one.end(), one.end(("traceparent", "garbage"))
        rpcs = [span for span in one.spans() if span.parent is None]
    assert [(f"{s.context.trace_id:032x}", f"{s.context.span_id:016x}") for s in rpcs] == [first, second]
    assert first[0] != second[0]


@pytest.mark.parametrize("flag", ["00", "01"])
def test_the_callers_flag_decides_only_where_it_is_trusted(flag: str) -> None:
    context = ("traceparent", GOOD[:-2] + flag)
    for ratio in (0.0, 1.0):
        with made(ratio) as untrusting:
            assert (untrusting.end(context) is not None) == (ratio == 1.0)
        with made(ratio, trusts_callers=True) as trusting:
            assert (trusting.end(context) is not None) == (flag == "01")
            assert (trusting.end() is not None) == (ratio == 1.0)
            assert (trusting.end(("traceparent", "x"), ("tracestate", "a=1")) is not None) == (ratio == 1.0)


def test_a_part_of_the_rpcs_is_traced_whatever_trace_ids_callers_choose() -> None:
    """Ids of zeros but one are those that a choice by id takes first."""
    random.seed(7)
    context = ("traceparent", f"00-{1:032x}-{SPAN}-01")
    with made(0.25) as one:
        count = sum(one.end(context) is not None for _ in range(400))
    assert 60 <= count <= 140


@pytest.mark.parametrize(("status", "is_fault"), [("INTERNAL", True), ("INVALID_ARGUMENT", False)])
def test_a_failure_is_told_and_an_error_where_it_is_the_servers(status: str, is_fault: bool) -> None:
    with made(1.0) as one:
        one.end(outcome=(status, "SOME_REASON", "found this"))
        rpc = one.spans()[-1]
    (event,) = rpc.events
    assert (rpc.attributes or {})["error.type"] == "SOME_REASON"
    assert (event.attributes or {})["exception.message"] == "found this"
    assert (rpc.status.status_code is StatusCode.ERROR) == is_fault
