"""Pools of workers that do as they should: results, order, room, admission, cancellation."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import time
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.calls import cpu_backend
from tests.server.pool.pools import Seen, altered, in_pool, make_job, pid_of, until

from npugrad import TensorMeta
from npugrad.errors import CallTooLarge, DeadlineExceeded, ServerBusy, ServerDraining
from npugrad.timeline import serialize_marks
from npugrad_server.pool import DevicePool, DeviceState
from npugrad_server.pool.commands import StartCall
from npugrad_server.pool.tenant import Tenant

pytestmark = pytest.mark.slow


def _transposed(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.ascontiguousarray(array.T).T


def _expanded(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.broadcast_to(array.reshape(-1)[:1].reshape((1,) * array.ndim), array.shape)


@in_pool(ready=False)
async def test_results_are_those_of_the_reference_bit_for_bit(pool: DevicePool) -> None:
    """Other layouts are made contiguous by the worker; what is empty or unwanted needs no memory."""
    jobs = [
        make_job(seed=1, dtype="float32", output_mask=(True, True, True)),
        make_job(seed=2, dtype="float16", output_mask=(True, False, True)),
        make_job(seed=3, dtype="bfloat16", output_mask=(False, True, False)),
        make_job(seed=4, with_gamma=False),
        make_job(seed=5, layout=_transposed),
        make_job(seed=6, layout=_expanded),
        make_job(n=0),
        make_job(output_mask=(False, False, False)),
    ]
    for one in jobs[4:6]:
        assert any(not meta.is_contiguous for meta in one.planned.plan.call.inputs.values() if meta)
    for one in jobs:  # before any device is ready: they wait
        info = (await one.check(pool)).info
        assert (info.backend, info.device, info.simulated) == (cpu_backend().name, "cpu:0", False)
        assert (info.attempts, info.request_id) == (1, one.planned.request_id)
        assert info.run_s > 0 or one in jobs[6:]
    await asyncio.gather(*(one.check(pool) for one in jobs * 4))
    assert pool.stats().finished_calls == 5 * len(jobs)
    (status,) = pool.devices()
    assert (status.backend, status.simulated, status.restarts) == (cpu_backend().name, False, 0)
    assert (status.reason, "host CPU" in status.description) == ("", True)


@pytest.mark.parametrize("devices", ["cpu:0", "test:1?compute=1"])
@in_pool("{devices}")
async def test_nothing_of_earlier_calls_is_in_a_reply(pool: DevicePool, devices: str) -> None:
    pattern, process = b"\xa5", pool._fleet.process(0)
    with mmap.mmap(process.outputs.fd, process.outputs.nbytes) as outputs:
        outputs[:] = pattern * len(outputs)
    pool._inputs._memory[:] = pattern * pool._inputs.nbytes
    await make_job(n=3, c=6, hxw=5).check(pool)
    assert bytes(process.outputs._memory[-64:]) == pattern * 64  # it really was in the way


@in_pool("test:1?ms=20")
async def test_a_simulated_device_says_so_and_returns_zeros(pool: DevicePool) -> None:
    found, outcome = await make_job(n=2).run(pool)
    assert all(set(data) == {0} for data in found.values())
    assert (outcome.info.backend, outcome.info.device, outcome.info.simulated) == ("test", "test:0", True)
    assert outcome.info.run_s >= 0.02


@in_pool("test:2?ms=50", streams_per_device=2)
async def test_devices_and_their_streams_share_the_load(pool: DevicePool) -> None:
    calls = [asyncio.ensure_future(make_job(seed=i).run(pool)) for i in range(14)]
    await asyncio.sleep(0)
    assert (pool.stats().running, pool.stats().queue_depth) == (4, 10)
    while pool.stats().queue_depth:  # no stream is idle meanwhile, however long the others take
        assert [len(worker.running) for worker in pool._scheduler.workers] == [2, 2]
        await asyncio.sleep(0.002)
    devices = {outcome.info.device for _, outcome in await asyncio.gather(*calls)}
    assert devices == {status.name for status in pool.devices()} == {"test:0", "test:1"}


@in_pool("test:1?ms=5&open_ms=200", ready=False)
async def test_priorities_and_labels_decide_who_is_next(pool: DevicePool, seen: Seen) -> None:
    labels = [("first", 0), ("greedy", 0), ("greedy", 0), ("greedy", 0), ("modest", 0), ("urgent", 9)]
    states: list[DeviceState] = []
    pool.on_change.append(lambda: states.append(pool.devices()[0].state))
    await asyncio.gather(*(make_job(label=label, priority=p).run(pool) for label, p in labels))
    order = [label for label, _, _ in seen.started]
    assert order == ["urgent", "first", "greedy", "modest", "greedy", "greedy"]
    assert [reason for _, reason in seen.finished] == ["OK"] * 6
    assert seen.states == [("test:0", "starting"), ("test:0", "ready")]
    assert states[-1] is DeviceState.READY


# ----------------------------------------------------------------------------------------------- admission


@in_pool()
async def test_what_can_never_fit_is_refused_and_names_the_setting(pool: DevicePool) -> None:
    huge = TensorMeta("float32", (2**20, 2**10, 2**10), strides=(0, 0, 0))
    one = make_job()
    stretched = one.planned.plan.call.with_inputs(grad_out=huge)
    for call, setting in [
        (make_job(n=100, hxw=500).planned, "input_arena_bytes"),
        (make_job(n=100, hxw=500, layout=_expanded).planned, "output_arena_bytes"),
        (altered(one.planned, call=stretched), "device_memory_bytes"),
    ]:
        start = time.thread_time()
        with pytest.raises(CallTooLarge, match=rf"group_norm_backward: found \d+ bytes.*{setting}"):
            pool.admit(call)
        assert time.thread_time() - start < 1
    assert pool.stats().accepted_calls == 0
    await one.check(pool)


@in_pool(max_queue_depth=4)
async def test_a_full_queue_is_told_when_to_come_again(pool: DevicePool) -> None:
    admitted = [pool.admit(make_job().planned) for _ in range(4)]
    with pytest.raises(ServerBusy, match="the queue is full: 4 calls wait") as caught:
        pool.admit(make_job().planned)
    assert caught.value.reason == "QUEUE_FULL"
    assert caught.value.retry_after_s is not None
    assert 0 < caught.value.retry_after_s <= 30
    assert pool.stats().uploads == 4
    for ticket in admitted:
        ticket.close()
        ticket.close()
    await make_job().check(pool)


@in_pool(max_queue_depth=2)
async def test_uploads_take_no_place_in_the_queue_and_have_four_for_each_of_it(pool: DevicePool) -> None:
    uploads = [pool.admit(make_job(seed=n).planned, is_upload=True) for n in range(8)]
    with pytest.raises(ServerBusy, match="found 8 uploads in progress; expected fewer than 8"):
        pool.check(make_job().planned, is_upload=True)
    await make_job().check(pool)  # another one has its place
    with pool.admit(make_job().planned), pool.admit(make_job().planned), pytest.raises(ServerBusy):
        pool.check(make_job().planned)
    uploads[3].give_way = lambda _: True
    uploads.append(pool.admit(make_job().planned, is_upload=True))
    assert [ticket.closed for ticket in uploads] == [n == 3 for n in range(9)]
    assert pool.stats().uploads == 8
    for ticket in uploads:
        ticket.close()


@in_pool(input_arena_bytes=50_000)
async def test_operand_memory_is_of_calls_inside_and_an_upload_may_give_its_own_to_others(
    pool: DevicePool,
) -> None:
    half = make_job(n=10, c=6, hxw=64, group=3)
    with pool.admit(half.planned), pytest.raises(ServerBusy, match=r"no room for .* bytes of operands now"):
        pool.admit(half.planned)
    await half.check(pool)
    slow = pool.admit(half.planned, is_upload=True)
    slow.give_way = lambda _: False
    with pytest.raises(ServerBusy, match=r"no room for .* bytes of operands now"):
        pool.check(half.planned)
    slow.give_way = lambda _: True
    await half.check(pool)
    assert slow.closed


@in_pool(input_arena_bytes=50_000)
async def test_an_upload_of_a_tenant_over_its_share_is_judged_at_once_if_another_one_gave_way_lately(
    pool: DevicePool,
) -> None:
    half = make_job(n=10, c=6, hxw=64, group=3)
    asked: list[float] = []

    def give_way(after_s: float) -> bool:
        asked.append(after_s)
        return after_s <= 1.0

    for _ in range(2):
        long = pool.admit(replace(half.planned, tenant=Tenant("hog", 0.5)), is_upload=True)
        long.give_way = give_way
        with pytest.raises(ServerBusy, match="no room for"):  # not for one that would have more
            pool.check(replace(half.planned, tenant=Tenant("other", 0.25)))
        await half.check(pool)
        assert long.closed
    assert asked == [inf, inf, 1.0, inf, inf, 0.0]


@in_pool()
async def test_an_admission_runs_once_and_its_views_end_with_it(pool: DevicePool) -> None:
    one = make_job(with_gamma=False)
    with pool.admit(one.planned) as ticket:
        operand = ticket.view("input")
        assert (operand.readonly, operand.nbytes) == (False, one.planned.plan.call.tensor("input").nbytes)
        with pytest.raises(KeyError, match="gamma is null"):
            ticket.view("gamma")
        with pytest.raises(KeyError):
            ticket.view("no_such_operand")
        one.write(ticket)
        outcome = await pool.run(ticket)
        result = outcome.contents["grad_input"]
        assert result.readonly
        with pytest.raises(RuntimeError, match="only before the call runs"):
            ticket.view("input")
        with pytest.raises(RuntimeError, match="runs once"):
            await pool.run(ticket)
    for view in (operand, result):
        with pytest.raises(ValueError, match="released"):
            view[0]
    with pytest.raises(RuntimeError, match="runs once"):
        await pool.run(ticket)


@in_pool()
async def test_a_call_that_is_given_back_again_and_again_says_so_in_few_words(pool: DevicePool) -> None:
    with pool.admit(make_job().planned) as ticket:
        start = StartCall(ticket.number, worker=0, incarnation=1, attempt=1, queued_s=0.0)
        for _ in range(1000):
            ticket.order(start, pool._fleet.process(0))
            ticket.mark_lost()
        marks = ticket.marks
        # With more than gRPC takes of metadata by default, a call that went well would fail.
        assert len(serialize_marks(marks)) < 8 * 1024 / 4
        assert {stage for stage, _ in marks} == {"queued", "lost"}
        assert all(before[1] <= after[1] for before, after in pairwise(marks))
        assert marks[-1][0] == "lost"


# ------------------------------------------------------------------------------------------ room for results


@in_pool(output_arena_bytes=20_000)
async def test_calls_wait_for_room_for_their_results_which_others_are_asked_for(pool: DevicePool) -> None:
    """Once a call waits for it; again and again while none goes."""
    one, other = make_job(seed=1, n=8, hxw=64), make_job(seed=2, n=8, hxw=64)
    asked: list[bool] = []
    with pool.admit(one.planned) as ticket:
        one.write(ticket)
        outcome = await pool.run(ticket)

        def give_way(_: float) -> bool:
            asked.append(True)
            if len(asked) == 3:
                asyncio.get_running_loop().call_soon(ticket.close)
            return len(asked) >= 3

        ticket.give_way = give_way
        waiting = other.start(pool)
        await asyncio.sleep(0)
        assert (pool.stats().queue_depth, pool.stats().running) == (1, 0)
        assert bytes(outcome.contents["grad_input"]) == one.golden()["grad_input"].tobytes()
        await asyncio.wait_for(waiting, 60)
    assert len(asked) == 3


@in_pool()
async def test_operands_go_back_before_results_that_nobody_takes(pool: DevicePool) -> None:
    one = make_job()
    with pool.admit(one.planned) as ticket:
        one.write(ticket)
        outcome = await pool.run(ticket)
        pool.drop_operands(ticket)
        assert pool.stats().input_arena_used_bytes == 0
        await make_job(seed=2).check(pool)
        golden = {name: array.tobytes() for name, array in one.golden().items()}
        assert {name: bytes(data) for name, data in outcome.contents.items()} == golden


# --------------------------------------------------------------------------------- deadlines, cancellation


@in_pool("test:1?ms=20")
async def test_a_deadline_passes_in_the_queue(pool: DevicePool) -> None:
    os.kill(pid_of(pool), signal.SIGSTOP)
    long = asyncio.ensure_future(make_job().run(pool))
    await asyncio.sleep(0)
    with pytest.raises(DeadlineExceeded, match="in the queue"):
        await make_job(timeout_s=0.2).run(pool)
    assert not long.done()
    os.kill(pid_of(pool), signal.SIGCONT)
    await long
    with pytest.raises(DeadlineExceeded):
        await make_job(timeout_s=-1).run(pool)


@in_pool("test:1?ms=50")
async def test_a_cancelled_call_leaves_the_queue(pool: DevicePool, seen: Seen) -> None:
    first, second = (asyncio.ensure_future(make_job(label=label).run(pool)) for label in ("first", "second"))
    await asyncio.sleep(0)
    assert pool.stats().queue_depth == 1
    assert pool.stats().longest_wait_s > 0
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert pool.stats().longest_wait_s == pool.stats().queued_s == 0
    assert pool.stats().queue_depth == 0
    await first
    assert seen.started == [("first", "test:0", 1)]
    assert sorted(seen.finished) == [("first", "OK"), ("second", "CANCELLED")]


@in_pool("test:1?ms=60000", hang_grace_s=30)
async def test_a_call_whose_caller_has_gone_keeps_its_memory_until_the_worker_is_done_which_is_early(
    pool: DevicePool,
) -> None:
    start = time.monotonic()
    gone = asyncio.ensure_future(make_job(label="long").run(pool))
    await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert pool.stats().running == 1
    assert pool.stats().input_arena_used_bytes > 0
    assert pool.stats().output_arena_used_bytes > 0
    await until(lambda: pool.stats().running == 0)
    with pytest.raises(DeadlineExceeded):
        await make_job(timeout_s=0.05).run(pool)
    await until(lambda: pool.stats().running == 0)
    assert pool.stats().output_arena_used_bytes == 0
    assert time.monotonic() - start < 15
    (status,) = pool.devices()
    assert (status.state, status.restarts) == (DeviceState.READY, 0)


@in_pool("test:1?ms=10000")
async def test_calls_inside_get_an_answer_when_they_are_abandoned(pool: DevicePool, seen: Seen) -> None:
    calls = [asyncio.ensure_future(make_job(label=label).run(pool)) for label in ("running", "queued")]
    uploading = pool.admit(make_job().planned)
    await asyncio.sleep(0)
    pool.abandon()
    for call in calls:
        with pytest.raises(ServerDraining, match="shut down before"):
            await call
    with pytest.raises(ServerDraining):
        await pool.run(uploading)
    with pytest.raises(ServerDraining):
        pool.admit(make_job().planned)
    uploading.close()
    await pool.close()
    assert sorted(seen.finished) == [("queued", "DRAINING"), ("running", "DRAINING")]
