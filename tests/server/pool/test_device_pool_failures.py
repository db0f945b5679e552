"""Workers that die, hang, lie or never open; callers that must not notice, or get the right error."""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import signal
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.server.pool.pools import Seen, in_pool, make_job, pid_of, until

from npugrad.errors import (
    CircuitOpen,
    DeadlineExceeded,
    DeviceError,
    DeviceOutOfMemory,
    ServerBusy,
    WorkerLost,
)
from npugrad_server.pool import DevicePool, DeviceState
from npugrad_server.pool.process import WorkerProcess
from npugrad_server.worker.descendants import processes
from npugrad_server.worker.protocol import RunCall

pytestmark = pytest.mark.slow


def _kill(pool: DevicePool, device: int = 0) -> None:
    os.kill(pid_of(pool, device), signal.SIGKILL)


async def _ready(pool: DevicePool) -> None:
    await until(lambda: pool.devices()[0].state is DeviceState.READY)


# -------------------------------------------------------------------------------------- workers that die


@in_pool("test:1?ms=1000&compute=1")
async def test_a_worker_killed_in_mid_call_is_replaced_and_the_call_runs_again(
    pool: DevicePool, seen: Seen
) -> None:
    call = make_job().start(pool)
    await asyncio.sleep(0)
    assert pool.stats().running == 1
    _kill(pool)
    outcome = await call
    assert (outcome.info.attempts, outcome.info.device) == (2, "test:0")
    (status,) = pool.devices()
    assert (status.state, status.restarts) == (DeviceState.READY, 1)
    assert seen.requeued == [("", "test:0")]
    assert seen.lost == [("test:0", "the worker process was killed by signal 9 (SIGKILL)")]


# The dead one would be back in 10 s only.
@in_pool("test:2?ms=1000&compute=1", respawn_backoff_s=10, respawn_backoff_max_s=10)
async def test_a_call_moves_to_another_device_without_its_operands_being_sent_again(pool: DevicePool) -> None:
    call = make_job().start(pool)
    await asyncio.sleep(0)
    (device,) = [i for i, worker in enumerate(pool._scheduler.workers) if worker.running]
    _kill(pool, device)
    outcome = await call
    assert (outcome.info.attempts, outcome.info.device) == (2, f"test:{1 - device}")


@in_pool(ready=False)
async def test_results_stay_readable_after_the_death_of_their_worker(pool: DevicePool) -> None:
    one = make_job(n=4)
    with pool.admit(one.planned) as ticket:
        one.write(ticket)
        outcome = await pool.run(ticket)
        _kill(pool)
        await until(lambda: pool.devices()[0].restarts == 1)
        await pool.wait_ready(30)
        for name, array in one.golden().items():
            assert bytes(outcome.contents[name]) == array.tobytes()
    await one.check(pool)


# Two streams: others run beside it when it strikes for the first time, and each is run again.
@in_pool("test:1?crash=bad&compute=1&ms=100", streams_per_device=2)
async def test_a_call_that_always_kills_its_worker_fails_alone(pool: DevicePool, seen: Seen) -> None:
    bad = make_job(label="bad").start(pool)
    await asyncio.gather(*(make_job(seed=i, label=f"good-{i}", n=3).check(pool) for i in range(6)))
    with pytest.raises(WorkerLost, match=r"died at each of 3 tries.*SIGABRT") as caught:
        await bad
    assert (caught.value.reason, caught.value.retryable) == ("WORKER_LOST", False)
    assert caught.value.request_id == "request-0"
    await pool.wait_ready(30)
    assert pool.devices()[0].state is DeviceState.READY
    assert [label for label, _ in seen.requeued].count("bad") == 2
    assert len(seen.lost) == max(seen.attempts) == 3


# The kills come from outside, often at both devices at once, and may hit a call twice.
@in_pool("test:2?ms=20&compute=1", max_respawns=10)
async def test_many_kills_lose_no_call(pool: DevicePool) -> None:
    calls = [make_job(seed=i, label=str(i % 5)).start(pool) for i in range(60)]
    for turn in range(6):
        await pool.wait_ready(30)
        for device in pool.devices()[turn % 2 :]:
            if device.pid is not None:
                os.kill(device.pid, signal.SIGKILL)
        await asyncio.wait(calls, timeout=0.15)
    outcomes = await asyncio.gather(*calls)
    assert sum(outcome.info.attempts - 1 for outcome in outcomes) > 0
    assert pool.stats().finished_calls == 60


@in_pool(max_respawns=1)
async def test_an_idle_worker_may_be_killed_more_often_than_a_device_may_fail(
    pool: DevicePool, seen: Seen
) -> None:
    for count in range(3):
        await _ready(pool)
        await _lose(pool, seen, count)
    await _ready(pool)
    await make_job().check(pool)
    assert [state for _, state in seen.states].count(DeviceState.DOWN) == 2


async def _lose(pool: DevicePool, seen: Seen, count: int) -> None:
    """Kills the idle worker of the only device, which lost so many, and waits until the pool knows."""
    _kill(pool)
    await until(lambda: len(seen.lost) > count)


# The next process is never there before such a call is past its deadline.
@in_pool("test:1?crash=bad&compute=1&open_ms=100", max_respawns=1, circuit_deaths=0, ready=False)
async def test_calls_that_kill_their_worker_and_time_out_do_not_bring_the_device_down(
    pool: DevicePool, seen: Seen
) -> None:
    turns = itertools.count(1)
    while len(seen.lost) < 4:  # a worker that is late to begin a call refuses it, and lives
        assert next(turns) < 100, seen.lost
        await _ready(pool)
        with pytest.raises(DeadlineExceeded):
            await make_job(label="bad", timeout_s=0.05).run(pool)
        await until(lambda: not pool.stats().running)
    await make_job(label="good").check(pool)
    assert len(seen.lost) == 4
    assert DeviceState.DOWN not in [state for _, state in seen.states]


# --------------------------------------------------------------------------------- what processes leave


def _alive(pids: Iterable[int]) -> list[int]:
    return [process.pid for process in processes() if process.pid in {*pids} and process.state != "Z"]


def _is_program(pid: int) -> bool:
    return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep")


def _held(pid: int) -> list[str]:
    """What the descriptors of a process are."""
    return [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]


LEFT: list[int] = []
"""What the workers of the next test have started."""


@in_pool("test:1?children=1&fault=lost", forked=False)
async def _leave_children(pool: DevicePool) -> None:
    for restarts, end in enumerate(("killed", "by itself", "closed")):
        await _ready(pool)
        mine = [process.pid for process in processes() if process.parent == pid_of(pool)]
        LEFT.extend(mine)
        assert len(mine) == 3
        # The command line of a program is there a moment after it was started; it has nothing of the pool.
        await until(lambda mine=mine: any(map(_is_program, mine)))  # type: ignore[misc]
        (held,) = [_held(pid) for pid in mine if _is_program(pid)]
        assert not [link for link in held if link.startswith(("/memfd:npugrad", "socket:"))]
        if end == "killed":
            _kill(pool)
        elif end == "by itself":
            with pytest.raises(DeviceError):
                await make_job(label="lost").run(pool)
        else:
            return
        await until(lambda restarts=restarts: pool.devices()[0].restarts > restarts)  # type: ignore[misc]
        assert _alive(LEFT) == []  # before there is another one


def test_what_a_worker_started_ends_with_it() -> None:
    """Forked children keep its memory, its socket and the device; one is in a session of its own."""
    try:
        _leave_children()
        assert _alive(LEFT) == []
    finally:
        for pid in _alive(LEFT):
            os.kill(pid, signal.SIGKILL)


LIMITS = resource.getrlimit(resource.RLIMIT_NOFILE)
SPARES = [0, *range(7)]
"""How many files may be opened at each start, which needs seven at once.

When the first loss is told, its arena's descriptor is still open: hence 0 twice.
"""


class Scarce(Seen):
    """Sets the limit for the next start before that start is planned."""

    def worker_lost(self, device: str, reason: str) -> None:
        super().worker_lost(device, reason)
        resource.setrlimit(resource.RLIMIT_NOFILE, LIMITS)
        if len(self.lost) <= len(SPARES):
            free = (number for number in itertools.count() if not os.path.lexists(f"/proc/self/fd/{number}"))
            most = next(itertools.islice(free, SPARES[len(self.lost) - 1], None))
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, LIMITS[1]))


@in_pool(seen=Scarce, forked=False)
async def test_processes_that_cannot_be_started_leave_nothing_behind_and_the_device_comes_back(
    pool: DevicePool, seen: Seen
) -> None:
    try:
        await _lose(pool, seen, 0)
        await until(lambda: len(seen.lost) > len(SPARES))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, LIMITS)
    assert all("its worker process did not start: [Errno 24]" in reason for _, reason in seen.lost[1:])
    await _ready(pool)
    await make_job().check(pool)
    assert len(seen.lost) == 1 + len(SPARES)
    assert ("cpu:0", "down") in seen.states


# ------------------------------------------------------------------------------------- calls that hang


@in_pool("test:1?hang=stuck&compute=1")
async def test_a_hanging_call_is_cut_off_at_its_deadline_and_its_worker_after_the_grace(
    pool: DevicePool, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = WorkerProcess.send

    def untold(self: WorkerProcess, message: Any, *descriptors: int) -> None:
        """Sends a call without its deadline: a worker that came too late for it would not begin it."""
        send(
            self, replace(message, deadline_s=None) if isinstance(message, RunCall) else message, *descriptors
        )

    monkeypatch.setattr(WorkerProcess, "send", untold)
    pid, start = pid_of(pool), time.monotonic()
    with pytest.raises(DeadlineExceeded, match="while the call ran"):
        await make_job(label="stuck", timeout_s=0.3).run(pool)
    assert pool.stats().running == 1
    assert pool.stats().output_arena_used_bytes > 0  # its worker could still write
    assert pid_of(pool) == pid
    await make_job(label="next").check(pool)
    assert time.monotonic() - start >= 0.5  # its deadline and the grace
    assert pool.devices()[0].restarts == 1
    assert seen.requeued == []
    assert [device for device, _ in seen.lost] == ["test:0"]


@in_pool("test:1?hang=stuck&compute=1", run_limit_s=2.0)
async def test_a_call_without_a_deadline_ends_with_the_run_limit_and_is_not_tried_again(
    pool: DevicePool, seen: Seen
) -> None:
    with pytest.raises(DeadlineExceeded, match=r"ran for more than 2 s, the limit of the server"):
        await make_job(label="stuck").run(pool)
    await make_job(label="next").check(pool)
    (status,) = pool.devices()
    assert (status.state, status.restarts) == (DeviceState.READY, 1)
    assert seen.requeued == []
    assert seen.attempts == [1, 1]


@in_pool("test:1?hang=stuck&compute=1")
async def test_a_hanging_call_that_was_cancelled_does_not_hold_the_device_for_ever(pool: DevicePool) -> None:
    stuck = make_job(label="stuck").start(pool)
    await asyncio.sleep(0)
    stuck.cancel()
    await make_job(label="next").check(pool)
    with pytest.raises(asyncio.CancelledError):
        await stuck


@in_pool("test:1?ms=3000&compute=1", heartbeat_timeout_s=2.0)
async def test_a_worker_is_not_to_blame_when_the_whole_server_stood_still(pool: DevicePool) -> None:
    """A suspended machine, a stopped group: the worker is silent for longer than it may, as the pool is."""
    call = make_job(label="slow").start(pool)
    await asyncio.sleep(0)
    os.kill(pid_of(pool), signal.SIGSTOP)
    time.sleep(2.5)  # noqa: ASYNC251 - the event loop stands still
    os.kill(pid_of(pool), signal.SIGCONT)
    assert (await call).info.attempts == 1
    assert pool.devices()[0].restarts == 0


@in_pool()
async def test_a_stopped_worker_is_killed_like_a_hanging_one(pool: DevicePool) -> None:
    os.kill(pid_of(pool), signal.SIGSTOP)
    with pytest.raises(DeadlineExceeded):
        await make_job(timeout_s=0.05).run(pool)
    await make_job().check(pool)


# ------------------------------------------------------------------------- what devices and operators say


@pytest.mark.parametrize(
    ("failure", "expected", "reason"),
    [("bug", DeviceError, "INTERNAL"), ("oom", DeviceOutOfMemory, "DEVICE_OUT_OF_MEMORY")],
)
@in_pool("test:1?{failure}=x&compute=1", ready=False)
async def test_a_worker_survives_what_an_operator_does_wrong(
    pool: DevicePool, failure: str, expected: type[DeviceError], reason: str
) -> None:
    with pytest.raises(expected, match="group_norm_backward") as caught:
        await make_job(label="x").run(pool)
    assert (caught.value.reason, caught.value.source) == (reason, "device")
    assert (caught.value.operator, caught.value.request_id) == ("group_norm_backward", "request-0")
    await make_job(label="y").check(pool)
    assert pool.devices()[0].restarts == 0


@in_pool("test:3?oom=x&compute=1")
async def test_a_call_that_finds_no_memory_is_tried_on_one_other_device(pool: DevicePool, seen: Seen) -> None:
    with pytest.raises(DeviceOutOfMemory, match="group_norm_backward"):
        await make_job(label="x").run(pool)
    outcome = await make_job(label="y").check(pool)
    (well,) = [worker.index for worker in pool._scheduler.workers if not worker.exhausted]
    assert (outcome.info.attempts, outcome.info.device) == (1, f"test:{well}")
    assert sum(status.restarts for status in pool.devices()) == 0
    assert seen.attempts == [1, 2, 1]
    assert [reason for _, reason in seen.redirected] == ["DEVICE_OUT_OF_MEMORY"]
    assert seen.requeued == seen.lost == []


@in_pool("test:2?fault=x&compute=1")
async def test_a_device_that_fails_says_why_and_its_call_runs_elsewhere(pool: DevicePool, seen: Seen) -> None:
    """Every device fails under the labelled call: after two of them it is given up, with the number."""
    with pytest.raises(WorkerLost, match="run returned 507015") as caught:
        await make_job(label="x").run(pool)
    assert (caught.value.code, caught.value.source) == (507015, "device")
    with pytest.raises(WorkerLost):  # only its second try was isolated
        await make_job(label="x").run(pool)
    with pytest.raises(CircuitOpen):
        await make_job().run(pool)
    await make_job(label="y", n=3).check(pool)
    await pool.wait_ready(30)
    assert [status.state for status in pool.devices()] == [DeviceState.READY] * 2
    assert seen.attempts == [1, 2, 1, 1]
    assert {why for _, why in seen.lost} == {"test device: run returned 507015"}
    assert len(seen.lost) == 3


@in_pool("test:1?damage=x")
async def test_a_damaged_device_leaves(pool: DevicePool) -> None:
    with pytest.raises(ServerBusy, match="damaged, not tried again: run returned 507054"):
        await make_job(label="x").run(pool)
    assert [(status.state, status.restarts) for status in pool.devices()] == [(DeviceState.DOWN, 0)]
    with pytest.raises(ServerBusy, match="no device is ready"):
        await make_job().run(pool)


@in_pool("test:1?timeout=x&compute=1")
async def test_a_call_that_runs_too_long_gets_its_deadline_error_and_the_next_one_is_served(
    pool: DevicePool,
) -> None:
    with pytest.raises(DeadlineExceeded, match="wait returned 507046"):
        await make_job(label="x").run(pool)
    await make_job().check(pool)
    assert [status.restarts for status in pool.devices()] == [1]


# -------------------------------------------------------------------------------------- devices that open


@in_pool("test:1?open=fail", max_respawns=1, respawn_backoff_max_s=0.02, ready=False)
async def test_a_device_that_never_opens_is_marked_down_and_says_why(pool: DevicePool, seen: Seen) -> None:
    waiting = asyncio.ensure_future(make_job().run(pool))
    with pytest.raises(ServerBusy, match="test:0: down, RuntimeError: test:0: does not open") as caught:
        await pool.wait_ready(30)
    assert caught.value.reason == "NO_DEVICE"
    words = "group_norm_backward: no device is ready: test:0: down, RuntimeError: test:0: does not open"
    with pytest.raises(ServerBusy, match=f"^{words}") as caught:
        await waiting
    assert (caught.value.reason, caught.value.request_id) == ("NO_DEVICE", "request-0")
    assert caught.value.retry_after_s
    with pytest.raises(ServerBusy, match=f"^{words}") as caught:
        pool.admit(make_job().planned)
    assert (caught.value.reason, caught.value.request_id) == ("NO_DEVICE", "request-0")
    (status,) = pool.devices()
    assert status.state is DeviceState.DOWN
    assert status.next_try_s is not None
    # It is tried again all the same, and stays down meanwhile.
    await until(lambda: pool.devices()[0].restarts > 3)
    assert [state for _, state in seen.states] == ["starting", "restarting", "starting", "down"]


@in_pool("test:1?open_ms=30000", worker_start_timeout_s=0.3, max_respawns=0, ready=False)
async def test_a_device_that_opens_too_slowly_is_ended_and_waiting_for_it_has_an_end(
    pool: DevicePool,
) -> None:
    with pytest.raises(ServerBusy, match="test:0: starting"):
        await pool.wait_ready(0)
    with pytest.raises(ServerBusy, match="the device did not open"):
        await pool.wait_ready(30)
    assert pool.devices()[0].state is DeviceState.DOWN


@in_pool("test:1?open=never", ready=False)
async def test_a_device_that_can_never_open_is_not_tried_again(pool: DevicePool, seen: Seen) -> None:
    with pytest.raises(ServerBusy, match="does not open, as its options ask"):
        await pool.wait_ready(30)
    assert len(seen.lost) == 1


@in_pool("test:1?stages=2", ready=False)
async def test_a_device_that_takes_long_to_open_shows_what_it_is_at(pool: DevicePool) -> None:
    told: list[str] = []
    pool.on_change.append(lambda: told.append(pool.devices()[0].reason))
    await pool.wait_ready(30)
    assert told == ["opening the device", "at stage 1 of 2", "at stage 2 of 2", ""]
