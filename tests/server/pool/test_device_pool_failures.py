"""Workers that die, hang, lie or never open; callers that must not notice, or get the right error."""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from npugrad.errors import (
    CircuitOpen,
    DeadlineExceeded,
    DeviceError,
    DeviceOutOfMemory,
    ServerBusy,
    WorkerLost,
)
from npugrad_server.pool import DevicePool, DeviceState, DeviceStatus, PlannedCall, PoolObserver
from npugrad_server.worker.descendants import processes

pytestmark = pytest.mark.slow


class Losses(PoolObserver):
    """Writes down what went wrong."""

    def __init__(self) -> None:
        self.requeued: list[tuple[str, str]] = []
        self.lost: list[tuple[str, str]] = []
        self.attempts: list[int] = []
        self.redirected: list[tuple[str, str]] = []
        self.states: list[DeviceState] = []

    def device_changed(self, status: DeviceStatus) -> None:
        self.states.append(status.state)

    def call_redirected(self, planned: PlannedCall, device: str, reason: str) -> None:
        self.redirected.append((device, reason))

    def call_started(self, planned: PlannedCall, device: str, attempt: int, queued_s: float) -> None:
        self.attempts.append(attempt)

    def call_requeued(self, planned: PlannedCall, device: str) -> None:
        self.requeued.append((planned.options.label, device))

    def worker_lost(self, device: str, reason: str) -> None:
        self.lost.append((device, reason))


def _pid(pool: DevicePool, device: int) -> int:
    pid = pool.devices()[device].pid
    assert pid is not None
    return pid


def test_a_worker_killed_in_mid_call_is_replaced_and_the_call_runs_again(run_pool: Any, job: Any) -> None:
    losses = Losses()

    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        one = job()
        call = asyncio.ensure_future(one.check(pool))
        await asyncio.sleep(0)
        assert pool.stats().running == 1
        os.kill(_pid(pool, 0), signal.SIGKILL)
        outcome = await call
        assert (outcome.info.attempts, outcome.info.device) == (2, "test:0")
        (status,) = pool.devices()
        assert (status.state, status.restarts) == (DeviceState.READY, 1)

    run_pool(scenario, "test:1?ms=1000&compute=1", observer=losses)
    assert losses.requeued == [("", "test:0")]
    assert losses.lost == [("test:0", "the worker process was killed by signal 9 (SIGKILL)")]


def _alive(pids: Iterable[int]) -> list[int]:
    return [process.pid for process in processes() if process.pid in {*pids} and process.state != "Z"]


def _is_program(pid: int) -> bool:
    return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep")


def _held(pid: int) -> list[str]:
    """What the descriptors of a process are."""
    return [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]


def _children(pid: int) -> list[int]:
    return [process.pid for process in processes() if process.parent == pid]


@pytest.mark.parametrize("end", ["killed", "by itself", "closed"])
def test_what_a_worker_started_ends_with_it(
    run_pool: Any, job: Any, eventually: Callable[..., Awaitable[None]], end: str
) -> None:
    """Forked children keep its memory, its socket and the device; one is in a session of its own."""
    left: list[int] = []

    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        left.extend(_children(_pid(pool, 0)))
        assert len(left) == 3
        if end == "closed":
            return
        if end == "killed":
            os.kill(_pid(pool, 0), signal.SIGKILL)
        else:
            with pytest.raises(DeviceError):
                await job(label="lost").run(pool)
        await eventually(lambda: pool.devices()[0].restarts > 0)
        assert _alive(left) == []  # before there is another one

    try:
        run_pool(scenario, "test:1?children=1&fault=lost")
        assert _alive(left) == []
    finally:
        for pid in _alive(left):
            os.kill(pid, signal.SIGKILL)


def test_a_program_that_a_worker_starts_gets_nothing_of_the_pool(
    run_pool: Any, eventually: Callable[..., Awaitable[None]]
) -> None:
    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        children = _children(_pid(pool, 0))
        # Its command line is there a moment after it was started.
        await eventually(lambda: any(_is_program(pid) for pid in children))
        held = [_held(pid) for pid in children if _is_program(pid)]
        assert [
            [link for link in links if link.startswith(("/memfd:npugrad", "socket:"))] for links in held
        ] == [[]]

    run_pool(scenario, "test:1?children=1")


def test_a_call_moves_to_another_device_without_its_operands_being_sent_again(
    run_pool: Any, job: Any
) -> None:
    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        one = job()
        call = asyncio.ensure_future(one.check(pool))
        await asyncio.sleep(0)
        (device,) = [i for i, worker in enumerate(pool._scheduler.workers) if worker.running]
        os.kill(_pid(pool, device), signal.SIGKILL)
        outcome = await call
        assert (outcome.info.attempts, outcome.info.device) == (2, f"test:{1 - device}")

    # The dead one would be back in 10 s only.
    run_pool(scenario, "test:2?ms=1000&compute=1", respawn_backoff_s=10, respawn_backoff_max_s=10)


def test_results_stay_readable_after_the_death_of_their_worker(
    run_pool: Any, job: Any, eventually: Callable[..., Awaitable[None]]
) -> None:
    async def scenario(pool: DevicePool) -> None:
        one = job(n=4)
        with pool.admit(one.planned) as ticket:
            one.write(ticket)
            outcome = await pool.run(ticket)
            os.kill(_pid(pool, 0), signal.SIGKILL)
            await eventually(lambda: pool.devices()[0].restarts == 1)
            await pool.wait_ready(30)
            for name, array in one.golden().items():
                assert bytes(outcome.contents[name]) == array.tobytes()
        await one.check(pool)

    run_pool(scenario)


def test_a_call_that_always_kills_its_worker_fails_alone(run_pool: Any, job: Any) -> None:
    losses = Losses()

    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        bad = asyncio.ensure_future(job(label="bad").run(pool))
        good = [job(seed=i, label=f"good-{i}", n=3).check(pool) for i in range(6)]
        await asyncio.gather(*good)
        with pytest.raises(WorkerLost, match=r"died at each of 3 tries.*SIGKILL") as caught:
            await bad
        assert (caught.value.reason, caught.value.retryable) == ("WORKER_LOST", False)
        assert caught.value.request_id == "request-0"
        await pool.wait_ready(30)
        assert pool.devices()[0].state is DeviceState.READY

    # Two streams: others run beside it when it strikes for the first time, and each is run again.
    run_pool(
        scenario, "test:1?crash=bad&compute=1&ms=100", observer=losses, streams_per_device=2, max_respawns=3
    )
    assert [label for label, _ in losses.requeued].count("bad") == 2
    assert len(losses.lost) == 3
    assert max(losses.attempts) == 3


def test_a_hanging_call_is_cut_off_at_its_deadline_and_its_worker_after_the_grace(
    run_pool: Any, job: Any, eventually: Callable[..., Awaitable[None]]
) -> None:
    losses = Losses()

    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        pid = _pid(pool, 0)
        start = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="while the call ran"):
            await job(label="stuck", timeout_s=5).run(pool)  # long enough to be launched on a busy machine
        assert pool.stats().running == 1
        assert pool.stats().output_arena_used_bytes > 0  # its worker could still write
        assert _pid(pool, 0) == pid
        await job(label="next").check(pool)
        assert time.monotonic() - start >= 5.2  # its deadline and the grace
        assert pool.devices()[0].restarts == 1

    run_pool(scenario, "test:1?hang=stuck&compute=1", observer=losses)
    assert losses.requeued == []
    assert [device for device, _ in losses.lost] == ["test:0"]


def test_a_call_without_a_deadline_ends_with_the_run_limit_and_is_not_tried_again(
    run_pool: Any, job: Any
) -> None:
    losses = Losses()

    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        with pytest.raises(DeadlineExceeded, match=r"ran for more than 2 s, the limit of the server"):
            await job(label="stuck").run(pool)
        await job(label="next").check(pool)
        (status,) = pool.devices()
        assert (status.state, status.restarts) == (DeviceState.READY, 1)

    run_pool(scenario, "test:1?hang=stuck&compute=1", observer=losses, run_limit_s=2.0)
    assert losses.requeued == []
    assert losses.attempts == [1, 1]


def test_a_worker_is_not_to_blame_when_the_whole_server_stood_still(run_pool: Any, job: Any) -> None:
    """A suspended machine, a stopped group: the worker is silent for longer than it may, as the pool is."""

    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        call = asyncio.ensure_future(job(label="slow").check(pool))
        await asyncio.sleep(0)
        os.kill(_pid(pool, 0), signal.SIGSTOP)
        time.sleep(5.0)  # noqa: ASYNC251 - the event loop stands still
        os.kill(_pid(pool, 0), signal.SIGCONT)
        assert (await call).info.attempts == 1
        assert pool.devices()[0].restarts == 0

    run_pool(scenario, "test:1?ms=6000&compute=1", heartbeat_timeout_s=4.0)


def test_a_hanging_call_that_was_cancelled_does_not_hold_the_device_for_ever(run_pool: Any, job: Any) -> None:
    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        stuck = asyncio.ensure_future(job(label="stuck").run(pool))
        await asyncio.sleep(0)
        stuck.cancel()
        await job(label="next").check(pool)
        with pytest.raises(asyncio.CancelledError):
            await stuck

    run_pool(scenario, "test:1?hang=stuck&compute=1")


def test_a_stopped_worker_is_killed_like_a_hanging_one(run_pool: Any, job: Any) -> None:
    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        os.kill(_pid(pool, 0), signal.SIGSTOP)
        with pytest.raises(DeadlineExceeded):
            await job(timeout_s=0.05).run(pool)
        await job().check(pool)

    run_pool(scenario)


@pytest.mark.parametrize(
    ("failure", "expected", "reason"),
    [("bug", DeviceError, "INTERNAL"), ("oom", DeviceOutOfMemory, "DEVICE_OUT_OF_MEMORY")],
)
def test_a_worker_survives_what_an_operator_does_wrong(
    run_pool: Any, job: Any, failure: str, expected: type[DeviceError], reason: str
) -> None:
    async def scenario(pool: DevicePool) -> None:
        with pytest.raises(expected, match="group_norm_backward") as caught:
            await job(label="x").run(pool)
        assert (caught.value.reason, caught.value.source) == (reason, "device")
        assert (caught.value.operator, caught.value.request_id) == ("group_norm_backward", "request-0")
        await job(label="y").check(pool)
        assert pool.devices()[0].restarts == 0

    run_pool(scenario, f"test:1?{failure}=x&compute=1")


def test_a_call_that_finds_no_memory_is_tried_on_one_other_device(run_pool: Any, job: Any) -> None:
    losses = Losses()

    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        with pytest.raises(DeviceOutOfMemory, match="group_norm_backward"):
            await job(label="x").run(pool)
        outcome = await job(label="y").check(pool)
        (well,) = [worker.index for worker in pool._scheduler.workers if not worker.exhausted]
        assert (outcome.info.attempts, outcome.info.device) == (1, f"test:{well}")
        assert sum(status.restarts for status in pool.devices()) == 0

    run_pool(scenario, "test:3?oom=x&compute=1", observer=losses)
    assert losses.attempts == [1, 2, 1]
    assert [reason for _, reason in losses.redirected] == ["DEVICE_OUT_OF_MEMORY"]
    assert losses.requeued == losses.lost == []


def test_verification_finds_a_flipped_bit(run_pool: Any, job: Any) -> None:
    async def scenario(pool: DevicePool) -> None:
        found, _ = await job(label="x").run(pool)
        assert found["grad_input"] != job().golden()["grad_input"].tobytes()
        with pytest.raises(DeviceError, match="grad_input: found a result outside tolerance") as caught:
            await job(label="x", verify=True).run(pool)
        assert (caught.value.reason, caught.value.source) == ("VERIFICATION_FAILED", "device")
        await job(label="y", verify=True).check(pool)

    run_pool(scenario, "test:1?corrupt=x&compute=1")


def test_verification_passes_on_a_right_device(run_pool: Any, job: Any) -> None:
    async def scenario(pool: DevicePool) -> None:
        for dtype in ("float32", "float16", "bfloat16"):
            found = await job(dtype=dtype, verify=True, n=3, hxw=16).check(pool)
            assert [each.name for each in found.info.verified] == list(found.contents)
            assert all(each.max_relative_error < 0.1 for each in found.info.verified)
            assert all(0 <= each.tolerance_used <= 1 for each in found.info.verified)

    run_pool(scenario)


def test_a_device_that_never_opens_is_marked_down_and_says_why(
    run_pool: Any, job: Any, eventually: Callable[..., Awaitable[None]]
) -> None:
    losses = Losses()

    async def scenario(pool: DevicePool) -> None:
        waiting = asyncio.ensure_future(job().run(pool))
        with pytest.raises(ServerBusy, match="test:0: down, RuntimeError: test:0: does not open") as caught:
            await pool.wait_ready(30)
        assert caught.value.reason == "NO_DEVICE"
        words = "group_norm_backward: no device is ready: test:0: down, RuntimeError: test:0: does not open"
        with pytest.raises(ServerBusy, match=f"^{words}") as caught:
            await waiting
        assert (caught.value.reason, caught.value.request_id) == ("NO_DEVICE", "request-0")
        assert caught.value.retry_after_s
        with pytest.raises(ServerBusy, match=f"^{words}") as caught:
            pool.admit(job().planned)
        assert (caught.value.reason, caught.value.request_id) == ("NO_DEVICE", "request-0")
        (status,) = pool.devices()
        assert status.state is DeviceState.DOWN
        assert status.next_try_s is not None
        # It is tried again all the same, and stays down meanwhile.
        await eventually(lambda: pool.devices()[0].restarts > 3)
        assert losses.states == ["starting", "restarting", "starting", "down"]

    run_pool(scenario, "test:1?open=fail", observer=losses, max_respawns=1, respawn_backoff_max_s=0.02)


def test_a_device_that_opens_too_slowly_is_ended(run_pool: Any) -> None:
    async def scenario(pool: DevicePool) -> None:
        with pytest.raises(ServerBusy, match="the device did not open"):
            await pool.wait_ready(30)
        assert pool.devices()[0].state is DeviceState.DOWN

    run_pool(scenario, "test:1?open_ms=30000", worker_start_timeout_s=2, max_respawns=0)


def test_waiting_for_readiness_has_an_end(run_pool: Any) -> None:
    async def scenario(pool: DevicePool) -> None:
        with pytest.raises(ServerBusy, match="test:0: starting"):
            await pool.wait_ready(0.01)

    run_pool(scenario, "test:1?open_ms=30000")  # it is not waited for at the end


def test_many_kills_lose_no_call(run_pool: Any, job: Any) -> None:
    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        calls = [asyncio.ensure_future(job(seed=i, label=str(i % 5)).check(pool)) for i in range(60)]
        for turn in range(6):
            await pool.wait_ready(30)
            pid = pool.devices()[turn % 2].pid
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
            await asyncio.wait(calls, timeout=0.15)
        outcomes = await asyncio.gather(*calls)
        assert sum(outcome.info.attempts - 1 for outcome in outcomes) > 0
        assert pool.stats().finished_calls == 60

    # The kills come from outside, and may hit a call twice.
    often = {"max_respawns": 10, "max_attempts": 10, "circuit_deaths": 0}
    run_pool(scenario, "test:2?ms=20&compute=1", **often)


_FRONT = """
import asyncio
from npugrad import Product
from npugrad_server.pool import DevicePool, PoolSettings

async def main():
    devices, mib = ("cpu:0", "cpu:1"), 1 << 20
    settings = PoolSettings(devices, Product.ATLAS_A2, mib, mib, 0, 9, 1, 1, 30, 1, 1, 1)
    pool = await DevicePool.open(settings)
    await pool.wait_ready(30)
    print(*(status.pid for status in pool.devices()), flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_workers_do_not_outlive_a_front_that_was_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", _FRONT], stdout=subprocess.PIPE, text=True) as front:
        assert front.stdout is not None
        workers = [int(word) for word in front.stdout.readline().split()]
        descriptors = [os.pidfd_open(pid) for pid in workers]
        front.kill()
    assert len(workers) == 2
    for descriptor in descriptors:
        assert select.select([descriptor], [], [], 60)[0], "a worker outlived its front process"
        os.close(descriptor)


def test_a_device_that_fails_says_why_and_its_call_runs_elsewhere(run_pool: Any, job: Any) -> None:
    """Every device fails under the labelled call: after two of them it is given up, with the number."""
    losses = Losses()

    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        with pytest.raises(WorkerLost, match="run returned 507015") as caught:
            await job(label="x").run(pool)
        assert (caught.value.code, caught.value.source) == (507015, "device")
        with pytest.raises(CircuitOpen):
            await job().run(pool)
        await job(label="y", n=3).check(pool)
        await pool.wait_ready(30)
        assert [status.state for status in pool.devices()] == [DeviceState.READY] * 2

    run_pool(scenario, "test:2?fault=x&compute=1", observer=losses)
    assert losses.attempts == [1, 2, 1]
    assert sorted(losses.lost) == [(f"test:{i}", "test device: run returned 507015") for i in (0, 1)]


def test_a_damaged_device_leaves_and_the_other_serves(run_pool: Any, job: Any) -> None:
    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        with pytest.raises(ServerBusy, match="damaged, not tried again: run returned 507054"):
            await job(label="x").run(pool)
        assert [status.state for status in pool.devices()] == [DeviceState.DOWN]
        assert [status.restarts for status in pool.devices()] == [0]
        with pytest.raises(ServerBusy, match="no device is ready"):
            await job().run(pool)

    run_pool(scenario, "test:1?damage=x")


def test_a_call_that_runs_too_long_gets_its_deadline_error_and_the_next_one_is_served(
    run_pool: Any, job: Any
) -> None:
    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        with pytest.raises(DeadlineExceeded, match="wait returned 507046"):
            await job(label="x").run(pool)
        await job().check(pool)
        assert [status.restarts for status in pool.devices()] == [1]

    run_pool(scenario, "test:1?timeout=x&compute=1")


def test_a_device_that_can_never_open_is_not_tried_again(run_pool: Any) -> None:
    losses = Losses()

    async def scenario(pool: DevicePool) -> None:
        with pytest.raises(ServerBusy, match="does not open, as its options ask"):
            await pool.wait_ready(30)

    run_pool(scenario, "test:1?open=never", observer=losses)
    assert len(losses.lost) == 1


async def _lose(pool: DevicePool, losses: Losses, until_lost: Callable[..., Awaitable[None]]) -> None:
    """Kills the idle worker of the only device and waits until the pool knows."""
    count = len(losses.lost)
    os.kill(_pid(pool, 0), signal.SIGKILL)
    await until_lost(lambda: len(losses.lost) > count)


def _leave_descriptors(count: int, hard: int) -> None:
    """Lowers the limit of this process so that it may open so many files more."""
    free = (number for number in itertools.count() if not os.path.lexists(f"/proc/self/fd/{number}"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(free, count, None)), hard))


def test_processes_that_cannot_be_started_leave_nothing_behind_and_the_device_comes_back(
    run_pool: Any, job: Any, eventually: Callable[..., Awaitable[None]]
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A start needs seven at once. When the first loss is told, its arena's descriptor is still open: hence
    # 0 twice.
    spares = [0, *range(7)]

    class Scarce(Losses):
        """Sets the limit for the next start before that start is planned."""

        def worker_lost(self, device: str, reason: str) -> None:
            super().worker_lost(device, reason)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            if len(self.lost) <= len(spares):
                _leave_descriptors(spares[len(self.lost) - 1], limits[1])

    losses = Scarce()

    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        try:
            await _lose(pool, losses, eventually)
            await eventually(lambda: len(losses.lost) > len(spares))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert all("its worker process did not start: [Errno 24]" in reason for _, reason in losses.lost[1:])
        await eventually(lambda: pool.devices()[0].state is DeviceState.READY)
        await job().check(pool)

    run_pool(scenario, observer=losses)
    assert len(losses.lost) == 1 + len(spares)
    assert "down" in losses.states


def test_an_idle_worker_may_be_killed_more_often_than_a_device_may_fail(
    run_pool: Any, job: Any, eventually: Callable[..., Awaitable[None]]
) -> None:
    losses = Losses()

    async def scenario(pool: DevicePool) -> None:
        for _ in range(3):
            await eventually(lambda: pool.devices()[0].state is DeviceState.READY)
            await _lose(pool, losses, eventually)
        await eventually(lambda: pool.devices()[0].state is DeviceState.READY)
        await job().check(pool)

    run_pool(scenario, observer=losses, max_respawns=1)
    assert losses.states.count(DeviceState.DOWN) == 2


def test_calls_that_kill_their_worker_and_time_out_do_not_bring_the_device_down(
    run_pool: Any, job: Any, eventually: Callable[..., Awaitable[None]]
) -> None:
    losses = Losses()

    async def scenario(pool: DevicePool) -> None:
        while len(losses.lost) < 4:  # a worker that is late to begin a call refuses it, and lives
            await eventually(lambda: pool.devices()[0].state is DeviceState.READY)
            with pytest.raises(DeadlineExceeded):
                # No two are alike, so that no circuit breaker ends it.
                await job(label="bad", timeout_s=0.05, n=len(losses.attempts) + 1).run(pool)
            await eventually(lambda: not pool.stats().running)
        await job(label="good").check(pool)

    # The next process is never there before such a call is past its deadline.
    run_pool(scenario, "test:1?crash=bad&compute=1&open_ms=100", observer=losses, max_respawns=1)
    assert len(losses.lost) == 4
    assert DeviceState.DOWN not in losses.states


def test_a_device_that_takes_long_to_open_shows_what_it_is_at(run_pool: Any) -> None:
    seen: list[str] = []

    async def scenario(pool: DevicePool) -> None:
        pool.on_change.append(lambda: seen.append(pool.devices()[0].reason))
        await pool.wait_ready(30)

    run_pool(scenario, "test:1?stages=2")
    assert seen == ["opening the device", "at stage 1 of 2", "at stage 2 of 2", ""]
