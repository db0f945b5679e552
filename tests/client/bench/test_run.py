"""Runs against a server whose answers the test writes: what is sent, when, how often, and what is counted."""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.client.bench.made import GRID, SPAWNING, answer, scenario
from tests.client.bench.made import forked_workers as forked_workers
from tests.client.fake_service import Context, Unary, abort_with, fake_service, zeros
from tests.fix_server import ServerProcess, StartServer

from npugrad import OPERATORS, OpRecord
from npugrad.errors import NpugradError, ServerBusy
from npugrad_client import Client, ConnectError, Recipe
from npugrad_client.bench import engine
from npugrad_client.bench.bottleneck import client_bound
from npugrad_client.bench.engine import Engine, LoadProgress
from npugrad_client.bench.interrupts import ENDING
from npugrad_client.bench.record import Record
from npugrad_client.bench.result import Result
from npugrad_client.bench.run import run
from npugrad_client.bench.scenario import LoadStage, ScenarioError, WeightedWorkload
from npugrad_client.bench.scenario_file import trace_stage

pytestmark = pytest.mark.slow  # every run starts processes


def answering(act: Callable[[int, OpRecord, Context], object]) -> Unary:
    """Answers with zeros, after what is done at the call of this number."""
    numbers = itertools.count()

    def handle(record: OpRecord, request: Any, context: Context) -> Any:
        act(next(numbers), record, context)
        return zeros(record, request, context)

    return handle


def refuse(record: OpRecord, context: Context) -> None:
    abort_with(context, ServerBusy("busy", operator=record.name))


def test_a_schedule_is_sent_whole_by_several_workers_and_told_while_it_goes_on() -> None:
    made = scenario(level=40, duration_s=1, warm_up_s=0.5, workers=2)
    told: list[LoadProgress] = []
    with fake_service() as service:
        result = run(made, service.address, lambda _, progress: told.append(progress))
    assert len(service.methods) == 62, "20 of the warm-up, 40, and one of each worker that connects it"
    assert (result.intended, result.answered, result.dropped) == (40, 40, 0)
    assert result.record.lateness.count == result.record.latency.count == 40
    assert sum(w.tally.intended for w in result.record.windows.values()) == 60
    assert sum(w.completed for w in result.record.windows.values()) == 60
    assert result.record.service.percentile_s(50) <= result.record.latency.percentile_s(50)
    assert len(result.cpus) == 2
    assert all(0 < cpu.loop_share < 1.1 for cpu in result.cpus)
    assert len(told) > 2, "more than the last report of each worker"
    assert sum(progress.answered for progress in told) == 60
    assert sum(progress.latency.count for progress in told) == 60
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
    """A worker without a caller keeps no calls to itself."""
    inside: set[int] = set()
    most, numbers, lock = [0], itertools.count(), threading.Lock()

    def count(record: OpRecord, request: Any, context: Context) -> Any:
        with lock:
            number = next(numbers)
            if number >= 4:  # each worker connects with one
                inside.add(number)
                most[0] = max(most[0], len(inside))
        answer = zeros(record, request, context)
        with lock:
            inside.discard(number)
        return answer

    with fake_service(count) as service:
        result = run(scenario("closed", level=3, duration_s=120, max_calls=61, workers=4), service.address)
    assert len(service.methods) == 65
    assert (result.intended, result.answered) == (61, 61)
    assert 1 <= most[0] <= 3
    assert result.duration_s < 120, "the calls were up before the time"
    # Each worker's rate counts until its own calls are up.
    assert 61 / result.elapsed_s <= result.throughput_per_s <= 61 / result.duration_s


def test_a_server_that_stalls_is_sent_to_all_the_same_and_too_much_is_dropped() -> None:
    """The server answers nothing until the schedule is over: 5 calls wait, the others are dropped."""
    freed = threading.Event()
    came_s: list[float] = []

    def stall(number: int, record: OpRecord, context: Context) -> None:
        if number:
            came_s.append(time.monotonic())
            freed.wait(30)

    def on_progress(at_s: float, progress: LoadProgress) -> None:
        now_s = time.monotonic()
        # Wherever this machine stood still, the calls wait for longer than they may have been sent late.
        if at_s > 1.2 and at_s > 2 * (came_s[-1] - (now_s - at_s)):
            freed.set()

    with fake_service(answering(stall)) as service:
        result = run(scenario(level=20, duration_s=1, max_in_flight=5), service.address, on_progress)
    assert (result.intended, result.answered, result.dropped) == (20, 5, 15)
    assert result.error_share == 0.75
    assert result.record.latency.percentile_s(50) > 1.0, "from the intended start of the call"
    lateness_s = result.record.lateness.percentile_s(50)
    assert lateness_s < result.record.latency.percentile_s(50) / 2, "they were sent in time"


def test_failures_and_missed_deadlines_are_counted_by_reason() -> None:
    ended = threading.Event()

    def act(number: int, record: OpRecord, context: Context) -> None:
        if number == 5:
            ended.wait(60)
        if number % 4 == 3:
            refuse(record, context)

    with fake_service(answering(act)) as service:
        result = run(scenario("closed", level=1, duration_s=30, max_calls=20, timeout_s=4.0), service.address)
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


def test_a_worker_that_cannot_connect_says_why() -> None:
    with pytest.raises(ConnectError, match="cannot reach unix:/nonexistent"):
        run(scenario(timeout_s=5), "unix:/nonexistent/npugrad.sock")
    assert multiprocessing.active_children() == []


def test_a_refused_call_is_no_measurement() -> None:
    refusing = answering(lambda number, *call: refuse(*call))
    with fake_service(refusing) as service, pytest.raises(ServerBusy):
        run(scenario(workloads=(GRID,), workers=2), service.address)
    assert multiprocessing.active_children() == []


# ------------------------------------------------------------------------------ several servers, recipes


def test_several_servers_are_sent_to_in_turn_and_told_apart() -> None:
    """One of them refuses what comes after the call that connects: its share fails, the other's does not."""
    # Each worker connects with one.
    refusing = answering(lambda number, *call: refuse(*call) if number >= 2 else None)
    with fake_service() as good, fake_service(refusing) as bad:
        result = run(scenario(level=40, duration_s=1, workers=2), [good.address, bad.address])
    assert len(good.methods) == len(bad.methods) == 22
    servers = result.record.servers
    assert servers[good.address].tally.answered == servers[good.address].tally.intended == 20
    assert servers[bad.address].tally.failed == {"QUEUE_FULL": 20}
    assert servers[bad.address].latency.count == 0
    assert set(result.record.devices) == {f"{good.address} test:0 (test)"}
    assert [each["target"] for each in result.environment["servers"]] == [good.address, bad.address]
    assert result.summary()["servers"][bad.address]["failed"] == {"QUEUE_FULL": 20}


INDEXED = ("embedding_dense_backward", "nll_loss_backward")


def test_operands_are_made_by_the_server(server: ServerProcess) -> None:
    """Those of every operator, with a digest and without, beside calls that send theirs."""
    ways: list[dict[str, Any]] = [
        {},
        {"inputs": "recipe"},
        {"inputs": "recipe", "digest": True, "label": "d"},
    ]
    workloads = tuple(WeightedWorkload(operator, **way) for operator in OPERATORS for way in ways)
    trace = tuple((0.0, index) for index in range(len(workloads)))
    made = scenario("trace", stages=(trace_stage(trace),), trace=trace, workloads=workloads)
    result = run(made, server.address)
    assert result.record.total.failed == {}
    assert {name: part.tally.answered for name, part in result.record.workloads.items()} == {
        each.name: 1 for each in workloads
    }
    for each in made.as_dict()["workloads"]:
        most = 2000 if each["operator"] in INDEXED else 100
        assert (each["request_bytes"] < most) is (each["inputs"] == "recipe"), "tables or indices at most"


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
    slow = answering(lambda number, *_: freed.wait(20) if number else None)
    with fake_service(slow) as service:
        result = run(scenario(level=20, duration_s=0.5, timeout_s=0.001), service.address)
        freed.set()
    assert result.answered == 0
    assert result.record.total.failed == {"DEADLINE_EXCEEDED": 10}
    assert client_bound(result) == (), "nothing was answered, so nothing is late"


def test_more_calls_than_can_be_sent_end_in_time_and_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million a second: the sender gives up soon after the end, and the report is refused."""
    monkeypatch.setattr(engine, "_LEAST_GRACE_S", 0.1)
    made = scenario(level=1e6, duration_s=0.4, max_in_flight=4)
    record = Record(made.window_s)

    async def send(workload: int, server: int) -> Any:
        return answer(0.001)

    async def work() -> float:
        sender = Engine(made, 0, send, record, time.monotonic())
        await sender.run()
        return sender.ended_s

    result = Result(made.as_dict(), record, asyncio.run(work()))
    assert result.elapsed_s < 30
    assert result.record.unsent_s > 0
    assert client_bound(result)[0].startswith("not all calls were sent: a worker was ")
    assert Result.from_dict(json.loads(result.as_json())).record.unsent_s == result.record.unsent_s


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_that_dies_or_drains_midway_leaves_a_report(
    start_server: StartServer, number: signal.Signals
) -> None:
    """Its calls take 4 s in all: it answers those of half a second, and when it drains what it has."""
    running = start_server(devices="test:1?ms=20", check_end=False)
    answered = 0

    def on_progress(at_s: float, progress: LoadProgress) -> None:
        nonlocal answered
        before, answered = answered, answered + progress.answered
        if before < 10 <= answered:
            running.signal(number)

    result = run(scenario("closed", level=2, duration_s=60, max_calls=200), running.address, on_progress)
    running.wait(30)
    assert result.answered >= 10
    assert result.failed >= 20
    assert result.answered + result.failed == result.intended == 200
    assert set(result.record.total.failed) <= {"DRAINING", "UNAVAILABLE", "CANCELLED"}
    assert multiprocessing.active_children() == []


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
    stall = answering(lambda number, *_: freed.wait(60) if number >= 3 else None)

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
def test_an_interrupt_of_a_whole_group_reaches_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one that has just started: it is born with the signals held back."""
    monkeypatch.setattr(multiprocessing, "get_context", SPAWNING)
    blocked: set[tuple[int, int]] = set()

    def on_progress(at_s: float, progress: LoadProgress) -> None:
        for worker in multiprocessing.active_children():
            text = Path(f"/proc/{worker.pid}/status").read_text("ascii")
            mask = next(line.split()[1] for line in text.splitlines() if line.startswith("SigBlk:"))
            blocked.update((number, int(mask, 16) >> (number - 1) & 1) for number in ENDING)

    with fake_service() as service:
        run(scenario(level=10, duration_s=0.6, workers=2), service.address, on_progress)
    assert blocked == {(signal.SIGINT, 1), (signal.SIGTERM, 1)}
    assert not set(ENDING) & signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
