"""What the load test claims, on servers of known service time; `make test-bench-stats` shows more of it.

A simulated device takes its time by a timer, so c devices of s seconds answer c / s calls a second at most.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from typing import Any

import pytest
from tests.client.bench.made import GRID, scenario
from tests.fix_server import ServerProcess, StartServer

from npugrad_client.bench.capacity import UNLIMITED, CapacityTrial, Search, at_rate, judge
from npugrad_client.bench.compare import compare
from npugrad_client.bench.engine import LoadProgress
from npugrad_client.bench.result import Result
from npugrad_client.bench.run import run
from npugrad_client.bench.scenario import Scenario

pytestmark = pytest.mark.large  # it measures: nothing may run beside it
IS_LONG = os.environ.get("NPUGRAD_BENCH_STATS") == "1"
PAIRS, MOST_WRONG = (20, 2) if IS_LONG else (3, 1)
MOST_OVERHEAD_S = 2e-3
STALL_S = 2.0
_IN_LONG = pytest.mark.skipif(not IS_LONG, reason="takes minutes: `make test-bench-stats`")
_TIMEOUT = pytest.mark.timeout(1500 if IS_LONG else 600)


def stalled(made: Scenario, server: ServerProcess) -> Result:
    """A run in whose first half the whole front process stands still for `STALL_S`."""
    timers: list[threading.Timer] = []

    def on_progress(at_s: float, progress: LoadProgress) -> None:
        if at_s > 1.0 and not timers:
            server.signal(signal.SIGSTOP)
            timers.append(threading.Timer(STALL_S, server.signal, [signal.SIGCONT]))
            timers[0].start()

    try:
        return run(made, server.address, on_progress)
    finally:
        server.signal(signal.SIGCONT)


@_TIMEOUT
def test_a_stall_shows_in_an_open_loop_and_not_in_a_naive_one(start_server: StartServer) -> None:
    running = start_server(devices="test:1?ms=2")
    opened = stalled(scenario(level=40, duration_s=6), running)
    closed = stalled(scenario("closed", level=1, duration_s=90, max_calls=2500), running)
    # One call of the closed loop meets the stall, and a busy machine holds up a few: ten are beyond the
    # percentile, however few calls a slow machine makes.
    assert closed.answered >= 200
    quantile = 100 * (1 - 10 / closed.answered)
    tail, naive = (each.record.latency.percentile_s(quantile) for each in (opened, closed))
    print(
        f"p{quantile:.4g} in a run with a stall of {STALL_S:g} s: open loop {tail:.3f} s, "
        f"closed loop {naive:.3f} s of {closed.answered} calls"
    )
    assert opened.answered == 240
    assert tail > 0.8 * STALL_S, f"a third of the calls met the stall; found {tail} s"
    assert closed.record.latency.percentile_s(100) > 0.8 * STALL_S, "one call of the closed loop met it too"
    assert naive < tail / 2, f"the closed loop hides it; found {naive} s"


@pytest.fixture
def quick_service(start_server: StartServer) -> None:
    """Skips where the service's own share of a call would hide what the devices take."""
    running = start_server(devices="test:2?ms=1")
    found = run(scenario("closed", level=12, duration_s=2, warm_up_s=0.5), running.address)
    overhead_s = 2 / found.throughput_per_s - 1e-3
    running.stop()
    if overhead_s > MOST_OVERHEAD_S:
        pytest.skip(f"too slow a machine: {1e3 * overhead_s:.1f} ms between two calls of a device")


@pytest.mark.usefixtures("quick_service")
@_TIMEOUT
def test_the_throughput_of_known_devices_is_theirs(start_server: StartServer) -> None:
    running = start_server(devices="test:2?ms=100")
    found = run(scenario("closed", level=12, duration_s=6, warm_up_s=1), running.address)
    print(f"2 devices of 100 ms: {found.throughput_per_s:.1f}/s of 20")
    assert found.throughput_per_s == pytest.approx(2 / 0.1, rel=0.05)


@_IN_LONG
@_TIMEOUT
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_the_search_finds_the_capacity_of_known_devices(devices: int, start_server: StartServer) -> None:
    """Of 50 ms, so that the millisecond which the service itself takes between two calls is no matter."""
    running = start_server(devices=f"test:{devices}?ms=50")
    made = scenario(duration_s=5, warm_up_s=0.5)

    def measure(rate: float) -> CapacityTrial:
        return judge(run(at_rate(made, rate), running.address), rate, UNLIMITED)

    found = Search(measure).run(devices * 15.0)
    print(f"{devices} devices of 50 ms: {found}; {len(found.trials)} trials")
    assert found.is_settled
    assert found.rate == pytest.approx(devices / 0.05, rel=0.05), str(found)


@pytest.mark.usefixtures("quick_service")
@_TIMEOUT
def test_runs_alike_are_told_from_a_fifth_slower(start_server: StartServer) -> None:
    usual, slow = (start_server(devices=f"test:2?ms={ms}") for ms in (50, 60))
    made: dict[str, Any] = {"level": 20, "duration_s": 4, "warm_up_s": 0.5, "workloads": (GRID,)}
    alike, slower = [], []
    for _ in range(PAIRS):
        first, second, third = (run(scenario(**made), each.address) for each in (usual, usual, slow))
        alike.append(compare(first, second, allow_flawed=True))
        slower.append(compare(second, third, allow_flawed=True))
    for what, verdicts in (("the same build", alike), ("a fifth slower", slower)):
        print(f"{what}: {dict(Counter(each.judgement for each in verdicts))} of {PAIRS}")
    assert sum(each.judgement != "no difference" for each in alike) <= MOST_WRONG, [str(e) for e in alike]
    assert sum(each.judgement != "slower" for each in slower) <= MOST_WRONG, [str(e) for e in slower]
