"""Runs against a server whose answers the test writes: what is sent, when, how often, and what is counted."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
from typing import TYPE_CHECKING, Any

import pytest
from tests.client.bench.made import GRID, scenario
from tests.client.fake_service import Context, abort_with, fake_service, zeros

from npugrad.errors import ServerBusy
from npugrad_client import ConnectError
from npugrad_client.bench.run import run
from npugrad_client.bench.scenario import Stage, Workload

if TYPE_CHECKING:
    from npugrad import OpSpec
    from npugrad_client.bench.engine import Progress

pytestmark = pytest.mark.slow  # every run starts processes


def test_a_schedule_is_sent_whole_by_several_workers() -> None:
    made = scenario(level=40, duration_s=1, warm_up_s=0.5, workers=2)
    with fake_service() as service:
        result = run(made, service.address)
    assert len(service.methods) == 62, "20 of the warm-up, 40, and one of each worker that connects it"
    assert (result.intended, result.answered, result.dropped) == (40, 40, 0)
    assert result.record.lateness.count == result.record.latency.count == 40
    assert sum(w.tally.intended for w in result.record.windows.values()) == 60
    assert sum(w.completed for w in result.record.windows.values()) == 60
    assert result.record.service.percentile_s(50) <= result.record.latency.percentile_s(50)
    assert len(result.cpus) == 2
    assert all(0 < cpu.loop_share < 1.1 for cpu in result.cpus)
    assert multiprocessing.active_children() == []


def test_labels_priorities_and_the_mix_reach_the_server() -> None:
    named = Workload("group_norm_backward", label="training", priority=7, weight=1)
    other = Workload("grid_sampler_2d_backward", label="live", priority=-7, weight=1)
    with fake_service() as service:
        result = run(scenario(level=60, duration_s=0.5, workloads=(named, other)), service.address)
    seen = {
        method: (header.options.label, header.options.priority)
        for method, header in zip(service.methods, service.headers, strict=True)
    }
    assert seen == {"GroupNormBackward": ("training", 7), "GridSampler2DBackward": ("live", -7)}
    parts = result.record.workloads
    assert parts[named.name].tally.answered + parts[other.name].tally.answered == 30
    assert min(part.tally.answered for part in parts.values()) > 3


def test_no_more_callers_than_asked_for_in_a_closed_loop() -> None:
    inside: set[int] = set()
    most, numbers, lock = [0], itertools.count(), threading.Lock()

    def count(spec: OpSpec, request: Any, context: Context) -> Any:
        with lock:
            number = next(numbers)
            inside.add(number)
            most[0] = max(most[0], len(inside))
        answer = zeros(spec, request, context)
        with lock:
            inside.discard(number)
        return answer

    with fake_service(count) as service:
        result = run(scenario("closed", level=3, duration_s=30, max_calls=61, workers=2), service.address)
    assert len(service.methods) == 63
    assert (result.intended, result.answered) == (61, 61)
    assert 1 <= most[0] <= 3
    assert result.duration_s < 30, "the calls were up before the time"
    assert result.throughput_per_s == pytest.approx(61 / result.elapsed_s)


def test_a_server_that_stalls_is_sent_to_all_the_same_and_too_much_is_dropped() -> None:
    """The server answers nothing until the schedule is over: 5 calls wait, the others are dropped."""
    freed = threading.Event()
    calls = itertools.count()

    def stall(spec: OpSpec, request: Any, context: Context) -> Any:
        if next(calls):
            freed.wait(30)
        return zeros(spec, request, context)

    def on_progress(at_s: float, progress: Progress) -> None:
        if at_s > 1.2:
            freed.set()

    with fake_service(stall) as service:
        result = run(scenario(level=20, duration_s=1.0, max_in_flight=5), service.address, on_progress)
    assert (result.intended, result.answered, result.dropped) == (20, 5, 15)
    assert result.error_share == 0.75
    assert result.record.latency.percentile_s(50) > 1.0, "from the intended start of the call"
    assert result.record.lateness.percentile_s(50) < 0.2, "they were sent in time"


def test_failures_and_missed_deadlines_are_counted_by_reason() -> None:
    calls = itertools.count()
    ended = threading.Event()

    def answer(spec: OpSpec, request: Any, context: Context) -> Any:
        number = next(calls)
        if number == 5:
            ended.wait(5)
        if number % 4 == 3:
            abort_with(context, ServerBusy("busy", operator=spec.name))
        return zeros(spec, request, context)

    with fake_service(answer) as service:
        result = run(scenario("closed", level=1, duration_s=30, max_calls=20, timeout_s=1.0), service.address)
        ended.set()
    assert result.record.total.failed == {"QUEUE_FULL": 5, "DEADLINE_EXCEEDED": 1}
    assert result.answered == 14
    assert result.deadline_miss_share == 1 / 20
    assert not result.succeeded


def test_a_ramp_of_callers() -> None:
    made = scenario("closed", stages=(Stage(0, 4, 1.0), Stage(1, 1, 0.5)), warm_up_s=0.2)
    with fake_service() as service:
        result = run(made, service.address)
    assert result.answered > 0
    assert result.succeeded


def test_progress_is_told_while_it_goes_on() -> None:
    told: list[tuple[float, Progress]] = []
    with fake_service() as service:
        result = run(
            scenario(level=30, duration_s=1.2), service.address, lambda at, what: told.append((at, what))
        )
    assert len(told) >= 3
    assert sum(progress.answered for _, progress in told) == result.answered == 36
    assert sum(progress.latency.count for _, progress in told) == 36


def test_a_worker_that_cannot_connect_says_why() -> None:
    with pytest.raises(ConnectError, match="cannot reach unix:/nonexistent"):
        run(scenario(timeout_s=5), "unix:/nonexistent/npugrad.sock")
    assert multiprocessing.active_children() == []


def test_a_refused_call_is_no_measurement() -> None:
    def refuse(spec: OpSpec, request: Any, context: Context) -> Any:
        abort_with(context, ServerBusy("busy", operator=spec.name))

    with fake_service(refuse) as service, pytest.raises(ServerBusy):
        run(scenario(workloads=(GRID,), workers=2), service.address)
    assert multiprocessing.active_children() == []
