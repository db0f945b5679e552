"""Runs against a server whose answers the test writes: what is sent, when, how often, and what is counted."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.client.bench.made import GRID, scenario
from tests.client.fake_service import Context, abort_with, fake_service, zeros
from tests.fix_server import ServerProcess, StartServer

from npugrad import OPERATORS, OpRecord
from npugrad.errors import NpugradError, ServerBusy
from npugrad_client import Client, ConnectError, Recipe
from npugrad_client.bench.bottleneck import client_bound
from npugrad_client.bench.engine import LoadProgress
from npugrad_client.bench.interrupts import ENDING
from npugrad_client.bench.result import Result
from npugrad_client.bench.run import run
from npugrad_client.bench.scenario import LoadStage, ScenarioError, WeightedWorkload

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
    named = WeightedWorkload("group_norm_backward", label="training", priority=7, weight=1)
    other = WeightedWorkload("grid_sampler_2d_backward", label="live", priority=-7, weight=1)
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

    def count(record: OpRecord, request: Any, context: Context) -> Any:
        with lock:
            number = next(numbers)
            inside.add(number)
            most[0] = max(most[0], len(inside))
        answer = zeros(record, request, context)
        with lock:
            inside.discard(number)
        return answer

    with fake_service(count) as service:
        result = run(scenario("closed", level=3, duration_s=120, max_calls=61, workers=2), service.address)
    assert len(service.methods) == 63
    assert (result.intended, result.answered) == (61, 61)
    assert 1 <= most[0] <= 3
    assert result.duration_s < 120, "the calls were up before the time"
    assert result.throughput_per_s == pytest.approx(61 / result.elapsed_s)


def test_workers_without_a_caller_keep_no_calls_to_themselves() -> None:
    with fake_service() as service:
        result = run(scenario("closed", level=2, duration_s=30, max_calls=9, workers=3), service.address)
    assert result.answered == 9


def test_a_server_that_stalls_is_sent_to_all_the_same_and_too_much_is_dropped() -> None:
    """The server answers nothing until the schedule is over: 5 calls wait, the others are dropped."""
    freed = threading.Event()
    calls = itertools.count()

    def stall(record: OpRecord, request: Any, context: Context) -> Any:
        if next(calls):
            freed.wait(30)
        return zeros(record, request, context)

    def on_progress(at_s: float, progress: LoadProgress) -> None:
        if at_s > 4.2:
            freed.set()

    with fake_service(stall) as service:
        result = run(scenario(level=5, duration_s=4.0, max_in_flight=5), service.address, on_progress)
    assert (result.intended, result.answered, result.dropped) == (20, 5, 15)
    assert result.error_share == 0.75
    assert result.record.latency.percentile_s(50) > 1.0, "from the intended start of the call"
    lateness_s = result.record.lateness.percentile_s(50)
    assert lateness_s < result.record.latency.percentile_s(50) / 2, "they were sent in time"


def test_failures_and_missed_deadlines_are_counted_by_reason() -> None:
    calls = itertools.count()
    ended = threading.Event()

    def answer(record: OpRecord, request: Any, context: Context) -> Any:
        number = next(calls)
        if number == 5:
            ended.wait(60)
        if number % 4 == 3:
            abort_with(context, ServerBusy("busy", operator=record.name))
        return zeros(record, request, context)

    with fake_service(answer) as service:
        result = run(scenario("closed", level=1, duration_s=30, max_calls=20, timeout_s=5.0), service.address)
        ended.set()
    assert result.record.total.failed == {"QUEUE_FULL": 5, "DEADLINE_EXCEEDED": 1}
    assert result.answered == 14
    assert result.deadline_miss_share == 1 / 20
    assert not result.succeeded


def test_a_ramp_of_callers() -> None:
    made = scenario("closed", stages=(LoadStage(0, 4, 1.0), LoadStage(1, 1, 0.5)), warm_up_s=0.2)
    with fake_service() as service:
        result = run(made, service.address)
    assert result.answered > 0
    assert result.succeeded


def test_progress_is_told_while_it_goes_on() -> None:
    told: list[tuple[float, LoadProgress]] = []
    with fake_service() as service:
        result = run(
            scenario(level=30, duration_s=3), service.address, lambda at, what: told.append((at, what))
        )
    assert len(told) >= 3
    assert sum(progress.answered for _, progress in told) == result.answered == 90
    assert sum(progress.latency.count for _, progress in told) == 90


def test_a_worker_that_cannot_connect_says_why() -> None:
    with pytest.raises(ConnectError, match="cannot reach unix:/nonexistent"):
        run(scenario(timeout_s=5), "unix:/nonexistent/npugrad.sock")
    assert multiprocessing.active_children() == []


def test_a_refused_call_is_no_measurement() -> None:
    def refuse(record: OpRecord, request: Any, context: Context) -> Any:
        abort_with(context, ServerBusy("busy", operator=record.name))

    with fake_service(refuse) as service, pytest.raises(ServerBusy):
        run(scenario(workloads=(GRID,), workers=2), service.address)
    assert multiprocessing.active_children() == []


# ------------------------------------------------------------------------------ several servers, recipes


def test_several_servers_are_sent_to_in_turn_and_told_apart() -> None:
    """One of them refuses what comes after the call that connects: its share fails, the other's does not."""
    calls = itertools.count()

    def refuse(record: OpRecord, request: Any, context: Context) -> Any:
        if next(calls) >= 2:  # each worker connects with one
            abort_with(context, ServerBusy("busy", operator=record.name))
        return zeros(record, request, context)

    with fake_service() as good, fake_service(refuse) as bad:
        made = scenario(level=40, duration_s=1, workers=2)
        result = run(made, [good.address, bad.address])
    assert len(good.methods) == len(bad.methods) == 22
    servers = result.record.servers
    assert servers[good.address].tally.answered == servers[good.address].tally.intended == 20
    assert servers[bad.address].tally.failed == {"QUEUE_FULL": 20}
    assert servers[bad.address].latency.count == 0
    assert set(result.record.devices) == {f"{good.address} test:0 (test)"}
    assert [each["target"] for each in result.environment["servers"]] == [good.address, bad.address]
    assert result.summary()["servers"][bad.address]["failed"] == {"QUEUE_FULL": 20}


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("digest", [False, True])
def test_operands_are_made_by_the_server(operator: str, digest: bool, server: ServerProcess) -> None:
    data, recipe = WeightedWorkload(operator), WeightedWorkload(operator, inputs="recipe", digest=digest)
    made = scenario("closed", level=1, duration_s=60, max_calls=6, workloads=(data, recipe))
    result = run(made, server.address)
    assert result.record.total.failed == {}
    sent = {each["inputs"]: each["request_bytes"] for each in made.as_dict()["workloads"]}
    assert sent["recipe"] < 100 < sent["data"], "level tables at most"
    assert set(result.record.workloads) == {data.name, recipe.name}
    assert result.answered == 6


def test_a_digest_that_is_wrong_is_refused_by_the_server(server: ServerProcess) -> None:
    """So that a digest is not just carried along."""
    arguments = WeightedWorkload("group_norm_backward", inputs="recipe", digest=True).arguments(3)
    right = arguments["grad_out"]
    assert right.digest == right.sha256()
    wrong = Recipe.of(right.draw, right.meta, right.seed + 1, right.digest)
    with Client(server.address) as client, pytest.raises(NpugradError, match="digest"):
        client.group_norm_backward(**{**arguments, "grad_out": wrong})


# ------------------------------------------------------------------------------------- what goes wrong


def test_a_deadline_that_no_call_keeps_is_counted_and_not_taken_for_the_connection() -> None:
    freed = threading.Event()
    calls = itertools.count()

    def slow(record: OpRecord, request: Any, context: Context) -> Any:
        if next(calls):
            freed.wait(20)
        return zeros(record, request, context)

    with fake_service(slow) as service:
        result = run(scenario(level=20, duration_s=0.5, timeout_s=0.001), service.address)
        freed.set()
    assert result.answered == 0
    assert result.record.total.failed == {"DEADLINE_EXCEEDED": 10}
    assert client_bound(result) == (), "nothing was answered, so nothing is late"


def test_more_calls_than_can_be_sent_end_in_time_and_are_told() -> None:
    """A million a second: the sender gives up soon after the end, and the report is refused."""
    with fake_service() as service:
        begin_s = time.monotonic()
        result = run(scenario(level=1e6, duration_s=3, max_in_flight=4), service.address)
        took_s = time.monotonic() - begin_s
    assert took_s < 120
    assert result.elapsed_s < 30
    assert result.record.unsent_s > 0
    assert client_bound(result)[0].startswith("not all calls were sent: a worker was ")
    assert Result.from_dict(json.loads(result.as_json())).record.unsent_s == result.record.unsent_s


def test_a_server_that_dies_midway_leaves_a_report(start_server: StartServer) -> None:
    running = start_server(check_end=False)
    answered = 0

    def on_progress(at_s: float, progress: LoadProgress) -> None:
        nonlocal answered
        answered += progress.answered
        if answered >= 20:
            running.process.kill()

    result = run(scenario(level=40, duration_s=5), running.address, on_progress)
    assert result.answered >= 20
    assert result.failed >= 20
    assert result.answered + result.failed == result.intended == 200
    assert multiprocessing.active_children() == []


def test_a_server_that_drains_answers_what_it_has(start_server: StartServer) -> None:
    running = start_server(devices="test:1?ms=20", check_end=False)
    told = threading.Event()
    answered = 0

    def on_progress(at_s: float, progress: LoadProgress) -> None:
        nonlocal answered
        answered += progress.answered
        if answered >= 10 and not told.is_set():
            told.set()
            running.signal(signal.SIGTERM)

    result = run(scenario(level=20, duration_s=5), running.address, on_progress)
    running.process.wait(30)
    assert result.answered >= 10
    assert result.failed >= 10
    assert set(result.record.total.failed) <= {"DRAINING", "UNAVAILABLE", "CANCELLED"}


def test_a_worker_that_dies_ends_the_run_and_what_the_others_measured_is_kept() -> None:
    killed: list[int] = []

    def on_progress(at_s: float, progress: LoadProgress) -> None:
        workers = multiprocessing.active_children()
        if at_s > 0.5 and not killed and workers[0].pid is not None:
            killed.append(workers[0].pid)
            os.kill(killed[0], signal.SIGKILL)

    with fake_service() as service:
        result = run(scenario(level=40, duration_s=300, workers=2), service.address, on_progress)
    assert result.died == "a worker process of the load test died"
    assert not result.is_interrupted
    assert len(result.cpus) == 1
    assert 0 < result.answered == result.intended
    assert 0.5 < result.duration_s < 300
    assert multiprocessing.active_children() == []


def test_workers_that_all_die_leave_a_result_that_says_so() -> None:
    def on_progress(at_s: float, progress: LoadProgress) -> None:
        for worker in multiprocessing.active_children():
            if worker.pid is not None:
                os.kill(worker.pid, signal.SIGKILL)

    with fake_service() as service:
        result = run(scenario(level=20, duration_s=300, workers=2), service.address, on_progress)
    assert result.died
    assert (result.answered, result.duration_s, result.throughput_per_s) == (0, 0.0, 0.0)


def test_an_error_ends_calls_in_flight_at_once() -> None:
    """What is raised in the parent, such as a second interrupt, does not wait for deadlines."""
    freed = threading.Event()
    calls = itertools.count()

    def stall(record: OpRecord, request: Any, context: Context) -> Any:
        if next(calls) >= 3:
            freed.wait(60)
        return zeros(record, request, context)

    class Enough(Exception):
        pass

    raised_s: list[float] = []

    def on_progress(at_s: float, progress: LoadProgress) -> None:
        if progress.in_flight >= 2:
            raised_s.append(time.monotonic())
            raise Enough

    with fake_service(stall) as service:
        with pytest.raises(Enough):
            run(scenario(level=30, duration_s=30, workers=3), service.address, on_progress)
        ended_s = time.monotonic()
        freed.set()
    assert multiprocessing.active_children() == []
    assert ended_s - raised_s[0] < 30, "half of the calls' deadline"


def test_operands_too_large_for_memory_are_told() -> None:
    with pytest.raises(ScenarioError, match=r"sizes: found '\d+ bytes of operands'; expected at most"):
        WeightedWorkload("group_norm_backward", sizes={"n": 1024, "c": 1024, "hxw": 4096, "group": 1})
    huge = WeightedWorkload(
        "group_norm_backward", sizes={"n": 1024, "c": 1024, "hxw": 4096, "group": 1}, inputs="recipe"
    )
    assert huge.nbytes[0] == 0


def test_answers_that_are_wrong_are_failures() -> None:
    calls = itertools.count()

    def lie(record: OpRecord, request: Any, context: Context) -> Any:
        answer = zeros(record, request, context)
        if next(calls) % 2:
            answer.ClearField("grad_input")
        return answer

    with fake_service(lie) as service:
        result = run(scenario("closed", level=1, duration_s=60, max_calls=10), service.address)
    assert (result.answered, result.failed) == (5, 5)
    (reason,) = result.record.total.failed
    assert reason == "INTERNAL"


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_an_interrupt_of_a_whole_group_reaches_no_worker() -> None:
    """Not even one that has just started: it is born with the signals held back."""
    blocked: set[tuple[int, int]] = set()

    def on_progress(at_s: float, progress: LoadProgress) -> None:
        for worker in multiprocessing.active_children():
            text = Path(f"/proc/{worker.pid}/status").read_text("ascii")
            mask = next(line.split()[1] for line in text.splitlines() if line.startswith("SigBlk:"))
            blocked.update((number, int(mask, 16) >> (number - 1) & 1) for number in ENDING)

    with fake_service() as service:
        run(scenario(level=10, duration_s=1.2, workers=2), service.address, on_progress)
    assert blocked == {(signal.SIGINT, 1), (signal.SIGTERM, 1)}
    assert not set(ENDING) & signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
