from __future__ import annotations

import asyncio
import mmap
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.calls import cpu_backend
from tests.server.pool.plans import altered

from npugrad import TensorMeta
from npugrad.call import ExecutionInfo
from npugrad.errors import CallTooLarge, DeadlineExceeded, ServerBusy, ServerDraining
from npugrad_server.pool import DevicePool, DeviceState, DeviceStatus, PlannedCall, PoolObserver

pytestmark = pytest.mark.slow


class Diary(PoolObserver):
    """Writes down what the pool tells."""

    def __init__(self) -> None:
        self.lines: list[tuple[Any, ...]] = []

    def call_accepted(self, planned: PlannedCall) -> None:
        self.lines.append(("accepted", planned.options.label))

    def call_started(self, planned: PlannedCall, device: str, attempt: int, queued_s: float) -> None:
        assert queued_s >= 0
        self.lines.append(("started", planned.options.label, device, attempt))

    def call_finished(
        self, planned: PlannedCall, reason: str, seconds: float, info: ExecutionInfo | None
    ) -> None:
        assert seconds >= 0
        assert (info is not None) == (reason == "OK")
        self.lines.append(("finished", planned.options.label, reason))

    def device_changed(self, status: DeviceStatus) -> None:
        self.lines.append(("device", status.name, str(status.state)))

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        return [line[1:] for line in self.lines if line[0] == kind]


def test_results_are_those_of_the_reference_bit_for_bit(run_pool: Any, job: Any) -> None:
    jobs = [
        job(seed=seed, dtype=dtype, output_mask=mask, with_gamma=gamma)
        for seed, (dtype, mask, gamma) in enumerate(
            [
                ("float32", (True, True, True), True),
                ("float16", (True, False, True), True),
                ("bfloat16", (False, True, False), True),
                ("float32", (True, True, True), False),
            ]
        )
    ]

    async def scenario(pool: DevicePool) -> None:
        for one in jobs:  # before any device is ready: they wait
            info = (await one.check(pool)).info
            assert (info.backend, info.device, info.simulated) == (cpu_backend().name, "cpu:0", False)
            assert (info.attempts, info.request_id) == (1, one.planned.request_id)
            assert info.run_s > 0
        await asyncio.gather(*(one.check(pool) for one in jobs * 4))
        assert pool.stats().finished_calls == 20

    run_pool(scenario)


def _transposed(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.ascontiguousarray(array.T).T


def _expanded(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.broadcast_to(array.reshape(-1)[:1].reshape((1,) * array.ndim), array.shape)


@pytest.mark.parametrize("layout", [_transposed, _expanded])
def test_other_layouts_are_made_contiguous_by_the_worker(
    run_pool: Any, job: Any, layout: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]
) -> None:
    one = job(layout=layout)
    assert any(not meta.is_contiguous for meta in one.planned.plan.call.inputs.values())

    async def scenario(pool: DevicePool) -> None:
        await one.check(pool)

    run_pool(scenario)


def test_an_empty_call_and_one_without_wanted_outputs_need_no_memory(run_pool: Any, job: Any) -> None:
    async def scenario(pool: DevicePool) -> None:
        await job(n=0).check(pool)
        assert (await job(output_mask=(False, False, False)).check(pool)).contents == {}

    run_pool(scenario)


def test_nothing_of_earlier_calls_is_in_a_reply(run_pool: Any, job: Any) -> None:
    pattern = b"\xa5"
    one = job(n=3, c=6, hxw=5)

    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        process = pool._fleet.process(0)
        with mmap.mmap(process.outputs.fd, process.outputs.nbytes) as outputs:
            outputs[:] = pattern * len(outputs)
        pool._inputs._memory[:] = pattern * pool._inputs.nbytes
        await one.check(pool)
        assert bytes(process.outputs._memory[-64:]) == pattern * 64  # it really was in the way

    run_pool(scenario)
    run_pool(scenario, "test:1?compute=1")


def test_a_simulated_device_says_so_and_returns_zeros(run_pool: Any, job: Any) -> None:
    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        found, outcome = await job(n=2).run(pool)
        assert all(set(data) == {0} for data in found.values())
        assert (outcome.info.backend, outcome.info.device, outcome.info.simulated) == ("test", "test:0", True)
        assert outcome.info.run_s >= 0.02

    run_pool(scenario, "test:1?ms=20")


def test_two_devices_share_the_load(run_pool: Any, job: Any) -> None:
    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        assert {status.name for status in pool.devices()} == {"test:0", "test:1"}
        calls = [asyncio.ensure_future(job(seed=i).run(pool)) for i in range(10)]
        await asyncio.sleep(0)
        assert pool.stats().queue_depth == 8
        while pool.stats().queue_depth:  # no device is idle meanwhile, however long the other one takes
            assert [len(worker.running) for worker in pool._scheduler.workers] == [1, 1]
            await asyncio.sleep(0.002)
        devices = {outcome.info.device for _, outcome in await asyncio.gather(*calls)}
        assert devices == {"test:0", "test:1"}

    run_pool(scenario, "test:2?ms=50")


def test_streams_run_at_once(run_pool: Any, job: Any) -> None:
    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        calls = [asyncio.ensure_future(job(seed=i).run(pool)) for i in range(4)]
        await asyncio.sleep(0)
        assert (pool.stats().running, pool.stats().queue_depth) == (3, 1)
        await asyncio.gather(*calls)

    run_pool(scenario, "test:1?ms=50", streams_per_device=3)


def test_priorities_and_labels_decide_who_is_next(run_pool: Any, job: Any) -> None:
    diary = Diary()

    async def scenario(pool: DevicePool) -> None:
        labels = [("first", 0), ("greedy", 0), ("greedy", 0), ("greedy", 0), ("modest", 0), ("urgent", 9)]
        await asyncio.gather(*(job(label=label, priority=p).run(pool) for label, p in labels))

    run_pool(scenario, "test:1?ms=5&open_ms=200", observer=diary)
    order = [label for label, _, _ in diary.of("started")]
    assert order == ["urgent", "first", "greedy", "modest", "greedy", "greedy"]
    assert [reason for _, reason in diary.of("finished")] == ["OK"] * 6
    assert [state for _, state in diary.of("device")] == ["starting", "ready"]


def test_what_can_never_fit_is_refused_and_names_the_setting(run_pool: Any, job: Any) -> None:
    huge = TensorMeta("float32", (2**20, 2**10, 2**10), strides=(0, 0, 0))
    one = job()
    stretched = one.planned.plan.call.with_inputs(grad_out=huge)
    planned = altered(one.planned, call=stretched)

    async def scenario(pool: DevicePool) -> None:
        for call, setting in [
            (job(n=100, hxw=500).planned, "input_arena_bytes"),
            (job(n=100, hxw=500, layout=_expanded).planned, "output_arena_bytes"),
            (planned, "device_memory_bytes"),
        ]:
            start = time.thread_time()
            with pytest.raises(CallTooLarge, match=rf"group_norm_backward: found \d+ bytes.*{setting}"):
                pool.admit(call)
            assert time.thread_time() - start < 1
        assert pool.stats().accepted_calls == 0
        await one.check(pool)

    run_pool(scenario)


def test_a_full_queue_is_told_when_to_come_again(run_pool: Any, job: Any) -> None:
    async def scenario(pool: DevicePool) -> None:
        admitted = [pool.admit(job().planned) for _ in range(4)]
        with pytest.raises(ServerBusy, match="the queue is full: 4 calls wait") as caught:
            pool.admit(job().planned)
        assert caught.value.reason == "QUEUE_FULL"
        assert caught.value.retry_after_s is not None
        assert 0 < caught.value.retry_after_s <= 30
        assert pool.stats().uploads == 4
        for ticket in admitted:
            ticket.close()
            ticket.close()
        await job().check(pool)

    run_pool(scenario, max_queue_depth=4)


def test_full_operand_memory_is_told_when_to_come_again(run_pool: Any, job: Any) -> None:
    async def scenario(pool: DevicePool) -> None:
        half = job(n=10, c=6, hxw=64, group=3)
        with (
            pool.admit(half.planned),
            pytest.raises(ServerBusy, match=r"no room for .* bytes of operands now"),
        ):
            pool.admit(half.planned)
        await half.check(pool)

    run_pool(scenario, input_arena_bytes=50_000)


def test_calls_wait_for_room_for_their_results(run_pool: Any, job: Any) -> None:
    async def scenario(pool: DevicePool) -> None:
        one, other = job(seed=1, n=8, hxw=64), job(seed=2, n=8, hxw=64)
        with pool.admit(one.planned) as ticket:
            one.write(ticket)
            outcome = await pool.run(ticket)
            waiting = asyncio.ensure_future(other.check(pool))
            await asyncio.sleep(0)
            assert (pool.stats().queue_depth, pool.stats().running) == (1, 0)
            assert bytes(outcome.contents["grad_input"]) == one.golden()["grad_input"].tobytes()
        await waiting

    run_pool(scenario, output_arena_bytes=16_384)


def test_a_deadline_passes_in_the_queue(run_pool: Any, job: Any) -> None:
    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        pid = pool.devices()[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        long = asyncio.ensure_future(job().run(pool))
        await asyncio.sleep(0)
        with pytest.raises(DeadlineExceeded, match="in the queue"):
            await job(timeout_s=1).run(pool)
        assert not long.done()
        os.kill(pid, signal.SIGCONT)
        await long
        with pytest.raises(DeadlineExceeded):
            await job(timeout_s=-1).run(pool)

    run_pool(scenario, "test:1?ms=20")


def test_a_cancelled_call_leaves_the_queue(run_pool: Any, job: Any) -> None:
    diary = Diary()

    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        first = asyncio.ensure_future(job(label="first").run(pool))
        second = asyncio.ensure_future(job(label="second").run(pool))
        await asyncio.sleep(0)
        assert pool.stats().queue_depth == 1
        assert pool.stats().longest_wait_s > 0
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert pool.stats().longest_wait_s == pool.stats().queued_s == 0
        assert pool.stats().queue_depth == 0
        await first

    run_pool(scenario, "test:1?ms=50", observer=diary)
    assert diary.of("started") == [("first", "test:0", 1)]
    assert sorted(diary.of("finished")) == [("first", "OK"), ("second", "CANCELLED")]


def test_a_cancelled_running_call_keeps_its_memory_until_the_worker_is_done(
    run_pool: Any, job: Any, eventually: Callable[..., Awaitable[None]]
) -> None:
    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        call = asyncio.ensure_future(job().run(pool))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert pool.stats().running == 1
        assert pool.stats().input_arena_used_bytes > 0
        assert pool.stats().output_arena_used_bytes > 0
        await eventually(lambda: pool.stats().running == 0)

    run_pool(scenario, "test:1?ms=60000", hang_grace_s=60)


def test_calls_inside_get_an_answer_when_they_are_abandoned(run_pool: Any, job: Any) -> None:
    diary = Diary()

    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        running = asyncio.ensure_future(job(label="running").run(pool))
        queued = asyncio.ensure_future(job(label="queued").run(pool))
        uploading = pool.admit(job().planned)
        await asyncio.sleep(0)
        pool.abandon()
        for call in (running, queued):
            with pytest.raises(ServerDraining, match="shut down before"):
                await call
        with pytest.raises(ServerDraining):
            await pool.run(uploading)
        with pytest.raises(ServerDraining):
            pool.admit(job().planned)
        uploading.close()
        await pool.close()

    run_pool(scenario, "test:1?ms=10000", observer=diary)
    assert sorted(diary.of("finished")) == [("queued", "DRAINING"), ("running", "DRAINING")]


def test_an_admission_runs_once_and_its_views_end_with_it(run_pool: Any, job: Any) -> None:
    async def scenario(pool: DevicePool) -> None:
        one = job(with_gamma=False)
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

    run_pool(scenario)


def test_whoever_watches_sees_devices_change(run_pool: Any) -> None:
    seen: list[tuple[DeviceState, ...]] = []

    async def scenario(pool: DevicePool) -> None:
        pool.on_change.append(lambda: seen.append(tuple(status.state for status in pool.devices())))
        await pool.wait_ready(30)
        status = pool.devices()[0]
        assert (status.backend, status.simulated, status.restarts) == (cpu_backend().name, False, 0)
        assert (status.reason, "host CPU" in status.description) == ("", True)
        assert status.pid is not None

    run_pool(scenario)
    assert seen[-1] == (DeviceState.READY,)


def test_uploads_take_no_place_in_the_queue(run_pool: Any, job: Any) -> None:
    async def scenario(pool: DevicePool) -> None:
        uploads = [pool.admit(job(seed=n).planned, is_upload=True) for n in range(6)]
        await job().check(pool)
        assert pool.stats().uploads == 6
        with pool.admit(job().planned), pool.admit(job().planned), pytest.raises(ServerBusy):
            pool.check(job().planned)
        for ticket in uploads:
            ticket.close()

    run_pool(scenario, max_queue_depth=2)


def test_there_may_be_four_uploads_for_each_place_in_the_queue(run_pool: Any, job: Any) -> None:
    async def scenario(pool: DevicePool) -> None:
        uploads = [pool.admit(job(seed=n).planned, is_upload=True) for n in range(8)]
        with pytest.raises(ServerBusy, match="found 8 uploads in progress; expected fewer than 8"):
            pool.check(job().planned, is_upload=True)
        await job().check(pool)  # another one has its place
        uploads[3].give_way = lambda: True
        uploads.append(pool.admit(job().planned, is_upload=True))
        assert [ticket.closed for ticket in uploads] == [n == 3 for n in range(9)]
        assert pool.stats().uploads == 8
        for ticket in uploads:
            ticket.close()

    run_pool(scenario, max_queue_depth=2)


def test_an_upload_that_may_go_gives_its_memory_to_others(run_pool: Any, job: Any) -> None:
    async def scenario(pool: DevicePool) -> None:
        half = job(n=10, c=6, hxw=64, group=3)
        slow = pool.admit(half.planned, is_upload=True)
        slow.give_way = lambda: False
        with pytest.raises(ServerBusy, match=r"no room for .* bytes of operands now"):
            pool.check(half.planned)
        slow.give_way = lambda: True
        await half.check(pool)
        assert slow.closed

    run_pool(scenario, input_arena_bytes=50_000)


def test_operands_go_back_before_results_that_nobody_takes(run_pool: Any, job: Any) -> None:
    async def scenario(pool: DevicePool) -> None:
        one = job()
        with pool.admit(one.planned) as ticket:
            one.write(ticket)
            outcome = await pool.run(ticket)
            pool.drop_operands(ticket)
            assert pool.stats().input_arena_used_bytes == 0
            await job(seed=2).check(pool)
            golden = one.golden()
            assert {name: bytes(data) for name, data in outcome.contents.items()} == {
                name: array.tobytes() for name, array in golden.items()
            }

    run_pool(scenario)


def test_results_that_nobody_takes_are_asked_to_leave(run_pool: Any, job: Any) -> None:
    """Once a call waits for their room; again and again while none goes."""

    async def scenario(pool: DevicePool) -> None:
        one, other = job(seed=1, n=8, hxw=64), job(seed=2, n=8, hxw=64)
        with pool.admit(one.planned) as ticket:
            one.write(ticket)
            await pool.run(ticket)
            asked: list[bool] = []

            def give_way() -> bool:
                asked.append(True)
                if len(asked) == 3:
                    asyncio.get_running_loop().call_soon(ticket.close)
                return len(asked) >= 3

            ticket.give_way = give_way
            await asyncio.wait_for(other.check(pool), 60)
        assert len(asked) == 3

    run_pool(scenario, output_arena_bytes=20_000)
