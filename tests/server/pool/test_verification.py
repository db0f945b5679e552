"""Results that are compared with the reference, by verifiers that run, stand still or die."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from npugrad.errors import DeadlineExceeded, DeviceError
from npugrad_server.pool import DevicePool, DeviceState, PoolObserver
from npugrad_server.pool.verification import Verification
from npugrad_server.worker.descendants import processes
from npugrad_server.worker.verifier import NAME

pytestmark = pytest.mark.slow

RIGHT = "test:1?compute=1"
ALL = 1.0
"""Share of the calls that are sampled."""


class Compared(PoolObserver):
    """Counts what was compared, and writes down what devices did."""

    def __init__(self) -> None:
        self.results: Counter[tuple[str, str]] = Counter()
        self.mismatches: list[str] = []
        self.states: list[tuple[str, DeviceState]] = []

    def results_compared(self, device: str, kind: str, result: str) -> None:
        self.results[kind, result] += 1

    def device_mismatched(self, device: str, operator: str) -> None:
        self.mismatches.append(device)

    def device_changed(self, status: Any) -> None:
        self.states.append((status.name, status.state))


def verifiers() -> list[int]:
    """Verifiers that this process has started."""
    found = [process.pid for process in processes() if process.parent == os.getpid()]
    return [pid for pid in found if NAME.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]


@contextmanager
def halted() -> Iterator[int]:
    """The verifier stands still for a block."""
    (pid,) = verifiers()
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        if pid in verifiers():
            os.kill(pid, signal.SIGCONT)


def test_a_call_that_is_compared_leaves_its_device_to_others(run_pool: Any, job: Any) -> None:
    seen = Compared()

    async def scenario(pool: DevicePool) -> None:
        await job(verify=True).check(pool)
        with halted():
            compared = asyncio.ensure_future(job(verify=True).check(pool))
            for seed in range(3):
                await job(seed=seed).check(pool)
            assert not compared.done()
        found = await compared
        assert [each.name for each in found.info.verified] == list(found.contents)

    run_pool(scenario, RIGHT, observer=seen)
    assert seen.results == {("verify", "ok"): 2}


def test_nobody_waits_for_a_comparison_beyond_the_deadline(run_pool: Any, job: Any) -> None:
    seen = Compared()

    async def scenario(pool: DevicePool) -> None:
        await job(verify=True).check(pool)
        with halted() as pid:
            with pytest.raises(DeadlineExceeded, match="with the reference did not finish in time"):
                await job(verify=True, timeout_s=3).check(pool)
            await job(verify=True).check(pool)  # by another verifier
            assert pid not in verifiers()

    run_pool(scenario, RIGHT, observer=seen)
    assert seen.results == {("verify", "ok"): 2, ("verify", "unfinished"): 1}


def test_a_caller_that_leaves_takes_its_memory_from_the_verifier(
    run_pool: Any, job: Any, eventually: Any
) -> None:
    async def scenario(pool: DevicePool) -> None:
        await job(verify=True).check(pool)
        with halted() as pid:
            left = asyncio.ensure_future(job(verify=True).check(pool))
            await asyncio.sleep(0)
            assert pool.stats().running
            await eventually(lambda: not pool.stats().running)
            left.cancel()
            with pytest.raises(asyncio.CancelledError):
                await left
            assert pool.stats().input_arena_used_bytes == 0
            await eventually(lambda: pid not in verifiers())

    run_pool(scenario, "test:1?compute=1&ms=50")


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_call_is_compared_by_another_verifier_when_one_dies(
    run_pool: Any, job: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch, deaths: int
) -> None:
    give = Verification._give

    def give_to_a_halted_one(self: Any, seat: Any, check: Any) -> None:
        os.kill(seat.process.pid, signal.SIGSTOP)
        give(self, seat, check)

    async def scenario(pool: DevicePool) -> None:
        await job(verify=True).check(pool)
        if deaths > 1:  # the other one must not be done before it is killed
            monkeypatch.setattr(Verification, "_give", give_to_a_halted_one)
        with halted() as pid:
            compared = asyncio.ensure_future(job(verify=True).check(pool))
            await asyncio.sleep(0)
            assert pool.stats().running
            await eventually(lambda: not pool.stats().running)
            os.kill(pid, signal.SIGKILL)
            await eventually(lambda: pid not in verifiers())
        if deaths > 1:
            await eventually(verifiers)
            os.kill(verifiers()[0], signal.SIGKILL)
            with pytest.raises(
                DeviceError, match="no comparison with the reference: the verifier ended"
            ) as caught:
                await compared
            assert caught.value.reason == "INTERNAL"
        else:
            await compared

    run_pool(scenario, "test:1?compute=1&ms=50")


def test_a_sampled_call_waits_for_nothing_and_keeps_its_memory_until_it_was_compared(
    run_pool: Any, job: Any, eventually: Any
) -> None:
    seen = Compared()

    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        await job(verify=True).check(pool)
        with halted():
            await job().check(pool)
            held = pool.stats()
            assert min(held.input_arena_used_bytes, held.output_arena_used_bytes) > 0
            await job(seed=1).check(pool)
            assert pool.stats().input_arena_used_bytes == held.input_arena_used_bytes
        await eventually(lambda: not pool.stats().input_arena_used_bytes)

    run_pool(scenario, RIGHT, observer=seen, verify_sample=ALL)
    assert seen.results == {("verify", "ok"): 1, ("sample", "ok"): 1, ("sample", "skipped"): 1}


def test_a_sampled_call_whose_verifier_dies_was_not_compared(
    run_pool: Any, job: Any, eventually: Any
) -> None:
    seen = Compared()

    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        await job(verify=True).check(pool)
        with halted() as pid:
            await job().check(pool)
            os.kill(pid, signal.SIGKILL)
            await eventually(lambda: not pool.stats().input_arena_used_bytes)
        await job(verify=True).check(pool)

    run_pool(scenario, RIGHT, observer=seen, verify_sample=ALL)
    assert seen.results == {("verify", "ok"): 2, ("sample", "unfinished"): 1}


def test_a_pool_that_closes_waits_for_no_comparison(run_pool: Any, job: Any, eventually: Any) -> None:
    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        await job(verify=True).check(pool)
        (pid,) = verifiers()
        os.kill(pid, signal.SIGSTOP)
        await job().check(pool)
        assert pool.stats().input_arena_used_bytes > 0
        await pool.close()
        assert pid not in verifiers()
        assert pool.stats().input_arena_used_bytes == 0

    run_pool(scenario, RIGHT, verify_sample=ALL)


def test_two_wrong_samples_quarantine_a_device_whose_canaries_are_right(
    run_pool: Any, job: Any, eventually: Any
) -> None:
    seen = Compared()

    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        await job(verify=True).check(pool)
        while len(seen.mismatches) < 2:
            await job(label="x").run(pool)  # its caller gets what the device computed
            await eventually(lambda: not pool.stats().input_arena_used_bytes)
        assert ("test:0", DeviceState.QUARANTINED) in seen.states
        assert seen.results["sample", "mismatch"] == 2
        await eventually(lambda: pool.devices()[0].state is DeviceState.READY)

    run_pool(scenario, "test:1?compute=1&corrupt=x", observer=seen, verify_sample=ALL)


def test_calls_alone_never_quarantine_a_device_for_good(run_pool: Any, job: Any, eventually: Any) -> None:
    seen = Compared()

    def ready(pool: DevicePool, restarts: int) -> bool:
        (status,) = pool.devices()
        return (status.state, status.restarts) == (DeviceState.READY, restarts)

    async def scenario(pool: DevicePool) -> None:
        for restarts in range(3):
            await eventually(partial(ready, pool, restarts))
            for turn in range(2):
                # of other signatures each, for which no circuit opens
                with pytest.raises(DeviceError, match="found a result outside tolerance"):
                    await job(label="x", verify=True, n=1 + restarts, hxw=4 + turn).run(pool)
        await eventually(lambda: pool.devices()[0].state is DeviceState.READY)
        await job(verify=True).check(pool)

    run_pool(scenario, "test:1?compute=1&corrupt=x", observer=seen)
    assert len(seen.mismatches) == 6
