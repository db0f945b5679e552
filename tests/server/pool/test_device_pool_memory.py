"""Devices with memory of their own, and calls that are given up: real workers that refuse too much."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from tests.server.pool.pools import Seen, in_pool, make_job, until

from npugrad.errors import CallTooLarge, DeviceOutOfMemory
from npugrad_server.pool import DevicePool
from npugrad_server.pool.admission import demand_of

pytestmark = pytest.mark.slow

MEMORY = 1 << 20
BUDGET = MEMORY * 3 // 4
"""What is left of so small a memory for calls."""
MOST = BUDGET * 6 // 10
"""A workspace that does not fit twice."""


def used(pool: DevicePool) -> list[int]:
    return [status.memory_used_bytes for status in pool.devices()]


@in_pool(f"test:1?memory={BUDGET + MEMORY // 4}&workspace={MOST}&ms=300&compute=1", streams_per_device=2)
async def test_workspaces_that_do_not_fit_together_are_run_one_after_the_other(
    pool: DevicePool, seen: Seen
) -> None:
    assert [status.memory_bytes for status in pool.devices()] == [BUDGET]
    outcomes = await asyncio.gather(*(make_job(seed=i, label=str(i)).check(pool) for i in range(4)))
    assert {outcome.info.workspace_bytes for outcome in outcomes} == {MOST}
    assert {outcome.info.attempts for outcome in outcomes} == {1}
    assert used(pool) == [0]
    # Only the first two did not know: one was granted its workspace, the other came back once.
    assert seen.asked == {"granted": 1, "postponed": 1}
    assert seen.postponed == 1
    assert seen.attempts == [1] * 5


@in_pool(f"test:1?memory={MEMORY}&workspace=10000&big=large&compute=1")
async def test_a_workspace_that_was_learned_is_asked_for_only_when_it_grows(
    pool: DevicePool, seen: Seen
) -> None:
    for label in ("a", "b", "large", "c", "large"):
        await make_job(label=label).check(pool)
    # The label is not part of what a workspace depends on, so a large one always comes unexpected.
    assert seen.asked == {"granted": 3}


@in_pool("test:1?memory=100000&compute=1&open_ms=100", ready=False)
async def test_a_call_that_fits_no_device_is_refused_at_once_or_as_soon_as_that_is_known(
    pool: DevicePool,
) -> None:
    large = make_job(n=40, hxw=64)
    assert demand_of(large.planned, own_memory=True).device_bytes > 130_000
    early = asyncio.ensure_future(large.run(pool))
    await asyncio.sleep(0)
    with pytest.raises(CallTooLarge, match="bytes of tensors on the device; expected at most 75000"):
        await early
    with pytest.raises(CallTooLarge, match="the most that any device has free"):
        pool.admit(large.planned)
    await make_job().check(pool)


@in_pool("test:1?memory=100000&workspace=60000&big=large&compute=1")
async def test_a_workspace_that_fits_no_device_is_an_error_every_time(pool: DevicePool, seen: Seen) -> None:
    await make_job(label="a").check(pool)
    for _ in range(2):
        with pytest.raises(DeviceOutOfMemory, match="found 120000 bytes of workspace") as caught:
            await make_job(label="large").run(pool)
        assert (caught.value.source, caught.value.retryable) == ("device", True)
    await make_job(label="b").check(pool)
    assert used(pool) == [0]
    assert pool.devices()[0].restarts == 0
    assert seen.asked["refused"] == 2
    assert seen.postponed == 0


@in_pool(
    f"test:2?memory={MEMORY}&workspace={BUDGET * 4 // 10}&big=large&ms=20&compute=1",
    streams_per_device=3,
    max_attempts=10,
    max_respawns=10,
    circuit_deaths=0,  # the kills come from outside, and may hit a call twice
)
async def test_kills_and_callers_who_leave_lose_no_byte_of_device_memory(
    pool: DevicePool, seen: Seen
) -> None:
    calls = [make_job(seed=i, label="large" if i % 3 else str(i)).start(pool) for i in range(30)]
    gone = calls[::5]
    await until(lambda: seen.asked["granted"])
    assert max(used(pool)) > 100_000
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
    await until(lambda: used(pool) == [0, 0] and not pool.stats().running)
    assert max(seen.attempts) > 1
    assert seen.asked["postponed"] >= seen.postponed > 0
    assert seen.asked["refused"] == 0
