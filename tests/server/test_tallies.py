"""What our own counters show is what prometheus_client's would, to the byte, without times of creation."""

from __future__ import annotations

import re
import threading
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary, generate_latest

from npugrad_server.tallies import CounterTally, GaugeTally, HistogramTally, SummaryTally

BUCKETS = (0.001, 0.25, 1.0, 100.0)
LABELS = ("operator", "device")
labels = st.sampled_from([("a", "cpu:0"), ("a", "cpu:1"), ('b"\\\n', "")])
amounts = st.one_of(st.sampled_from([0.0, *BUCKETS, inf]), st.floats(-1, 1000))


def page(registry: CollectorRegistry) -> str:
    """The page, without times of creation."""
    return re.sub(r"(# \w+ )?\w+_created\b.*\n", "", generate_latest(registry).decode())


@given(
    st.lists(st.tuples(labels, st.floats(0, 1e9))),
    st.lists(st.tuples(labels, st.sampled_from([1, -1]))),
    st.lists(st.tuples(labels, amounts)),
)
def test_a_page_shows_what_the_library_shows(
    counted: list[Any], gauged: list[Any], observed: list[Any]
) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = CounterTally("x_y", "A text.", LABELS, ours)
    counter = Counter("x_y", "A text.", LABELS, registry=theirs)
    for key, amount in counted:
        tally.counts[key] += amount
        counter.labels(*key).inc(amount)
    level, gauge = GaugeTally("z", "A text.", LABELS, ours), Gauge("z", "A text.", LABELS, registry=theirs)
    for key, amount in gauged:
        level.values[key] += amount
        gauge.labels(*key).inc(amount)
    times = HistogramTally("x", "A text.", LABELS, ours, buckets=BUCKETS)
    histogram = Histogram("x", "A text.", LABELS, registry=theirs, buckets=BUCKETS)
    sums, summary = (
        SummaryTally("w", "A text.", LABELS, ours),
        Summary("w", "A text.", LABELS, registry=theirs),
    )
    for key, amount in observed:
        sums.add(key, amount)
        summary.labels(*key).observe(amount)
        times.observed.append((key, amount))
        if amount > 500:
            times.count()
        histogram.labels(*key).observe(amount)
    assert page(ours) == page(theirs)


def test_a_name_is_given_once() -> None:
    registry = CollectorRegistry()
    CounterTally("x", "A text.", LABELS, registry)
    with pytest.raises(ValueError, match="Duplicated"):
        Counter("x", "A text.", LABELS, registry=registry)


def test_new_combinations_do_not_disturb_whoever_looks() -> None:
    registry = CollectorRegistry()
    counter = CounterTally("x", "A text.", LABELS, registry)
    histogram = HistogramTally("y", "A text.", LABELS, registry, buckets=BUCKETS)
    done = threading.Event()

    def count() -> None:
        for number in range(500):
            counter.counts["a", str(number)] += 1
            histogram.observed.append((("a", str(number)), 0.5))
            if number % 7 == 0:
                histogram.count()
        done.set()

    thread = threading.Thread(target=count)
    thread.start()
    while not done.is_set():
        generate_latest(registry)
    thread.join()
    (family,) = histogram.collect()
    counted = {s.labels["device"]: s.value for s in family.samples if s.name == "y_sum"}
    assert counted == {str(number): 0.5 for number in range(500)}
