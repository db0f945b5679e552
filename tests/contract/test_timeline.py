"""Timelines: what is covered, what is shown, and what a server may say without harm."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npugrad.timeline import (
    SERVER_STAGES,
    Interval,
    Timeline,
    Try,
    parse_stages,
    placed,
    seconds_by_stage,
    serialize_marks,
)
from npugrad.v1 import operators_pb2

MARKS = [("", 5.0), ("decode", 5.25), ("receive", 6.0), ("", 6.5), ("run", 8.0), ("run", 8.5)]
times = st.floats(0, 10)
intervals = st.tuples(times, times).map(lambda ends: Interval("run", "server", min(ends), max(ends), 1))


def timeline(*stages: Interval, wall_s: float = 10.0, tries: tuple[Try, ...] = ()) -> Timeline:
    """A timeline of some stages."""
    return Timeline("group_norm_backward", wall_s, tuple(sorted(stages, key=lambda i: i.start_s)), tries)


def test_marks_travel_as_stages_and_gaps_do_not() -> None:
    assert parse_stages(serialize_marks(MARKS)) == [
        ("decode", 0.0, 0.25),
        ("receive", 0.25, 1.0),
        ("run", 1.5, 3.0),
        ("run", 3.0, 3.5),
    ]
    assert seconds_by_stage(MARKS) == {"decode": 0.25, "receive": 0.75, "run": 2.0}
    marks = [("", 0.0), *((stage, 1.0 + i) for i, stage in enumerate(SERVER_STAGES))]
    assert [stage for stage, _, _ in parse_stages(serialize_marks(marks))] == list(SERVER_STAGES)
    assert len(SERVER_STAGES) == len(operators_pb2.Stage.values()) - 1


def test_stages_that_cannot_be_meant_and_more_than_any_server_makes_are_left_out() -> None:
    odd = [(0, 0, 1), (99, 0, 1), (7, 2, 1), (7, -1, 1), (7, 0, math.inf), (7, math.nan, 1), (7, 0, math.nan)]
    for stage, start_s, end_s in odd:
        message = operators_pb2.Timeline()
        message.stages.add(stage=7, start_s=0, end_s=1)
        message.stages.add(stage=stage, start_s=start_s, end_s=end_s)
        assert parse_stages(message.SerializeToString()) == [("run", 0.0, 1.0)]
    message = operators_pb2.Timeline()
    for _ in range(10_000):
        message.stages.add(stage=7, start_s=0, end_s=1)
    assert len(parse_stages(message.SerializeToString())) == 64


@given(st.binary(max_size=200))
def test_any_bytes_are_stages_or_nothing(data: bytes) -> None:
    for stage, start_s, end_s in parse_stages(data):
        assert stage in SERVER_STAGES
        assert 0 <= start_s <= end_s < math.inf


@given(st.lists(st.tuples(times, times), max_size=5), times, times)
def test_stages_of_a_server_lie_where_the_client_waited(
    ends: list[tuple[float, float]], one: float, other: float
) -> None:
    stages = [("run", min(pair), max(pair)) for pair in ends]
    start_s, end_s = min(one, other), max(one, other)
    for interval in placed(stages, start_s, end_s, 1):
        assert start_s <= interval.start_s <= interval.end_s <= end_s


@given(st.lists(intervals, max_size=8))
def test_covered_is_the_union(stages: list[Interval]) -> None:
    found = timeline(*stages)
    points = [random.Random(i).uniform(0, 10) for i in range(2000)]
    inside = sum(any(i.start_s <= point <= i.end_s for i in stages) for point in points)
    assert found.covered_s == pytest.approx(10 * inside / len(points), abs=0.6)
    assert found.covered_s + found.transport_s == pytest.approx(10)


def test_what_is_printed() -> None:
    found = timeline(
        Interval("pack", "client", 0.0, 2.0),
        Interval("run", "server", 4.0, 9.0, 2),
        tries=(Try(1, "a:1", 2.0, 3.0, "ConnectError"), Try(2, "b:1", 3.0, 10.0, "")),
    )
    assert str(found).splitlines() == [
        "group_norm_backward: 10000.00 ms, 70% of it measured",
        "stage     where     start ms        ms",
        "pack      client        0.00   2000.00  ━━━━━━━━",
        "run       server     4000.00   5000.00                  ━━━━━━━━━━━━━━━━━━━━",
        "transport rest                 3000.00",
        "try  server, error",
        "1    a:1, ConnectError",
        "2    b:1",
    ]
    assert repr(found) == (
        "Timeline(group_norm_backward: 10000.0 ms; run 5000.0, pack 2000.0, transport 3000.0)"
    )
    assert str(timeline(wall_s=0.0)).startswith("group_norm_backward: 0.00 ms, 100% of it measured")
