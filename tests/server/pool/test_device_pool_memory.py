"""Devices with memory of their own, and calls that are given up: real workers that refuse too much."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from npugrad.errors import CallTooLarge, DeadlineExceeded, DeviceOutOfMemory
from npugrad_server.pool import DevicePool, DeviceState, PlannedCall, PoolObserver
from npugrad_server.pool.admission import demand_of

pytestmark = pytest.mark.slow

MEMORY = 1 << 20
BUDGET = MEMORY * 3 // 4
"""What is left of so small a memory for calls."""


class Tally(PoolObserver):
    """Counts what the pool tells of device memory."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.postponed = 0
        self.attempts: list[int] = []

    def call_started(self, planned: PlannedCall, device: str, attempt: int, queued_s: float) -> None:
        self.attempts.append(attempt)

    def workspace_asked(self, device: str, answer: str) -> None:
        self.asked[answer] += 1

    def call_postponed(self, planned: PlannedCall, device: str) -> None:
        self.postponed += 1


def used(pool: DevicePool) -> list[int]:
    return [status.memory_used_bytes for status in pool.devices()]


def test_workspaces_that_do_not_fit_together_are_run_one_after_the_other(run_pool: Any, job: Any) -> None:
    tally = Tally()
    workspace = BUDGET * 6 // 10

    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        assert [status.memory_bytes for status in pool.devices()] == [BUDGET]
        outcomes = await asyncio.gather(*(job(seed=i, label=str(i)).check(pool) for i in range(4)))
        assert {outcome.info.workspace_bytes for outcome in outcomes} == {workspace}
        assert {outcome.info.attempts for outcome in outcomes} == {1}
        assert used(pool) == [0]

    run_pool(
        scenario,
        f"test:1?memory={BUDGET + MEMORY // 4}&workspace={workspace}&ms=300&compute=1",
        observer=tally,
        streams_per_device=2,
    )
    print(f"asked {dict(tally.asked)}, postponed {tally.postponed}, starts {len(tally.attempts)}")
    # Only the first two did not know: one was granted its workspace, the other came back once.
    assert tally.asked == {"granted": 1, "postponed": 1}
    assert tally.postponed == 1
    assert tally.attempts == [1] * 5


def test_a_workspace_that_was_learned_is_asked_for_only_when_it_grows(run_pool: Any, job: Any) -> None:
    tally = Tally()

    async def scenario(pool: DevicePool) -> None:
        for label in ("a", "b", "large", "c", "large"):
            await job(label=label).check(pool)

    options = f"memory={MEMORY}&workspace=10000&big=large&compute=1"
    run_pool(scenario, f"test:1?{options}", observer=tally)
    # The label is not part of what a workspace depends on, so a large one always comes unexpected.
    assert tally.asked == {"granted": 3}


def test_a_call_that_fits_no_device_is_refused_at_once_or_as_soon_as_that_is_known(
    run_pool: Any, job: Any
) -> None:
    large = job(n=40, hxw=64)
    assert demand_of(large.planned, own_memory=True).device_bytes > 130_000

    async def scenario(pool: DevicePool) -> None:
        early = asyncio.ensure_future(large.run(pool))
        await asyncio.sleep(0)
        with pytest.raises(CallTooLarge, match="bytes of tensors on the device; expected at most 75000"):
            await early
        with pytest.raises(CallTooLarge, match="the most that any device has free"):
            pool.admit(large.planned)
        await job().check(pool)

    run_pool(scenario, "test:1?memory=100000&compute=1&open_ms=100")


def test_a_workspace_that_fits_no_device_is_an_error_every_time(run_pool: Any, job: Any) -> None:
    tally = Tally()

    async def scenario(pool: DevicePool) -> None:
        await job(label="a").check(pool)
        for _ in range(2):
            with pytest.raises(DeviceOutOfMemory, match="found 120000 bytes of workspace") as caught:
                await job(label="large").run(pool)
            assert (caught.value.source, caught.value.retryable) == ("device", True)
        await job(label="b").check(pool)
        assert used(pool) == [0]
        assert pool.devices()[0].restarts == 0

    run_pool(scenario, "test:1?memory=100000&workspace=60000&big=large&compute=1", observer=tally)
    assert tally.asked["refused"] == 2
    assert tally.postponed == 0


def test_what_calls_hold_goes_back_when_their_worker_dies(
    run_pool: Any, job: Any, eventually: Callable[..., Awaitable[None]]
) -> None:
    tally = Tally()

    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        calls = [asyncio.ensure_future(job(seed=i, label=str(i)).check(pool)) for i in range(4)]
        await eventually(lambda: tally.asked["granted"] == 1)
        assert used(pool)[0] > 100_000
        pid = pool.devices()[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: pool.devices()[0].restarts == 1)
        await asyncio.gather(*calls)
        assert used(pool) == [0]
        assert pool.devices()[0].state is DeviceState.READY

    options = f"memory={MEMORY}&workspace={BUDGET * 6 // 10}&ms=200&compute=1"
    run_pool(scenario, f"test:1?{options}", observer=tally, streams_per_device=2)
    assert max(tally.attempts) == 2


def test_a_call_whose_caller_has_gone_frees_its_device_early(
    run_pool: Any, job: Any, eventually: Callable[..., Awaitable[None]]
) -> None:
    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        start = time.monotonic()
        gone = asyncio.ensure_future(job(label="long").run(pool))
        await asyncio.sleep(0)
        assert pool.stats().running == 1
        gone.cancel()
        await eventually(lambda: pool.stats().running == 0)
        with pytest.raises(asyncio.CancelledError):
            await gone
        with pytest.raises(DeadlineExceeded):
            await job(timeout_s=0.05).run(pool)
        await eventually(lambda: pool.stats().running == 0)
        assert pool.stats().output_arena_used_bytes == 0
        assert time.monotonic() - start < 15
        (status,) = pool.devices()
        assert (status.state, status.restarts) == (DeviceState.READY, 0)

    run_pool(scenario, "test:1?ms=60000", hang_grace_s=30)


def test_kills_and_callers_who_leave_lose_no_byte_of_device_memory(
    run_pool: Any, job: Any, eventually: Callable[..., Awaitable[None]]
) -> None:
    tally = Tally()

    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        large = [job(seed=i, label="large" if i % 3 else str(i)) for i in range(30)]
        calls = [asyncio.ensure_future(one.check(pool)) for one in large]
        gone = calls[::5]
        for turn in range(4):
            await asyncio.wait(calls, timeout=0.1)
            gone[turn].cancel()
            pid = pool.devices()[turn % 2].pid
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
            await pool.wait_ready(30)
        results = await asyncio.gather(*calls, return_exceptions=True)
        wrong = [r for r in results if isinstance(r, Exception)]
        assert not wrong, wrong
        # A cancelled call stays on its worker until that answers.
        await eventually(lambda: used(pool) == [0, 0] and not pool.stats().running)

    options = f"memory={MEMORY}&workspace={BUDGET * 4 // 10}&big=large&ms=20&compute=1"
    run_pool(
        scenario,
        f"test:2?{options}",
        observer=tally,
        streams_per_device=3,
        max_attempts=10,
        max_respawns=10,
        circuit_deaths=0,  # the kills come from outside, and may hit a call twice
    )
    assert tally.asked["postponed"] >= tally.postponed > 0
    assert tally.asked["refused"] == 0
