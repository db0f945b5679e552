"""Calls that share a plan, on real workers: it is brought once, then named; and what may go wrong with it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from npugrad.errors import DeviceOutOfMemory
from npugrad_server.pool import CallPlan, DevicePool, PlannedCall
from npugrad_server.pool.process import WorkerProcess
from npugrad_server.pool.sent_plans import MOST_PLANS, SentPlans
from npugrad_server.worker.protocol import AbandonCall, ForgetPlan, Message, RunCall
from npugrad_server.worker.run_again import RunAgain
from npugrad_server.worker.verifier import NAME as VERIFIER

pytestmark = pytest.mark.slow


def shared(job: Callable[..., Any], count: int, **sizes: Any) -> list[Any]:
    """Calls of one plan, each with operands of its own."""
    jobs = [job(seed=seed, **sizes) for seed in range(count)]
    first = jobs[0].planned
    plan = CallPlan(first.plan.record, first.plan.call, first.plan.outputs, first.plan.options, is_kept=True)
    return [
        replace(each, planned=PlannedCall(plan, each.planned.options, each.planned.request_id, None))
        for each in jobs
    ]


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> list[RunCall | RunAgain | ForgetPlan | AbandonCall]:
    """What workers are told about calls and plans, in order; verifiers get theirs besides."""
    told: list[RunCall | RunAgain | ForgetPlan | AbandonCall] = []
    send = WorkerProcess.send

    def note(self: WorkerProcess, message: Message, *descriptors: int) -> None:
        if self.device != VERIFIER and isinstance(message, (RunCall, RunAgain, ForgetPlan, AbandonCall)):
            told.append(message)
        send(self, message, *descriptors)

    monkeypatch.setattr(WorkerProcess, "send", note)
    return told


def kinds(orders: list[Any]) -> list[str]:
    return [type(order).__name__ for order in orders]


def turned(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.asfortranarray(array)


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"verify": True},
        {"layout": turned},
        {"dtype": "float16", "output_mask": (False, True, True), "with_gamma": False},
    ],
    ids=["plain", "verified", "strided", "masked"],
)
@pytest.mark.parametrize("devices", ["cpu:0", "test:1?compute=1"])
def test_every_call_of_a_plan_has_the_results_of_one_brought_whole(
    run_pool: Any, job: Any, orders: list[Any], devices: str, sizes: dict[str, Any]
) -> None:
    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        calls = shared(job, 4, **sizes)
        for call in calls:
            await call.check(pool)
        await asyncio.gather(*(call.check(pool) for call in calls))

    run_pool(scenario, devices, streams_per_device=2)
    assert kinds(orders) == ["RunCall"] + ["RunAgain"] * 7
    assert {order.plan for order in orders} == {0}


def test_a_call_that_shares_no_plan_is_brought_whole_without_a_number(
    run_pool: Any, job: Any, orders: list[Any]
) -> None:
    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        for _ in range(2):
            await job().check(pool)

    run_pool(scenario)
    assert [(type(order), order.plan) for order in orders] == [(RunCall, None)] * 2


def test_a_call_whose_worker_died_is_brought_whole_to_the_next_one(
    run_pool: Any, job: Any, orders: list[Any]
) -> None:
    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        first, second, third = shared(job, 3)
        await first.check(pool)
        pid = pool.devices()[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)  # so that it cannot answer before it is killed
        call = asyncio.ensure_future(second.check(pool))
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        assert (await call).info.attempts == 2
        await third.check(pool)  # of the new process's first number
        await third.check(pool)

    run_pool(scenario, "test:1?ms=50&compute=1")
    expected = [(RunCall, 0), (RunAgain, 0), (RunCall, None), (RunCall, 0), (RunAgain, 0)]
    assert [(type(order), order.plan) for order in orders] == expected


def test_a_worker_that_lacks_the_plan_gets_the_call_whole(run_pool: Any, job: Any, orders: list[Any]) -> None:
    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        calls = shared(job, 6)
        for call in calls[:4]:
            assert (await call.check(pool)).info.attempts == 1
        await asyncio.gather(*(call.check(pool) for call in calls))
        (status,) = pool.devices()
        assert status.restarts == 0

    run_pool(scenario, "cpu:0", worker_module="tests.server.pool.forgetful_worker", streams_per_device=2)
    # It lacks number 0 when that is named, has the call whole, and keeps the plan as number 1.
    expected = [(RunCall, 0), (RunAgain, 0), (RunCall, None), (RunCall, 1), (RunAgain, 1)]
    assert [(type(order), order.plan) for order in orders][:5] == expected


def test_a_call_that_nobody_waits_for_is_given_up_also_where_its_plan_was_lacking(
    run_pool: Any, job: Any, orders: list[Any], eventually: Any
) -> None:
    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        first, second = shared(job, 2)
        unwanted = asyncio.ensure_future(first.run(pool))
        await eventually(lambda: pool.stats().running == 1)
        unwanted.cancel()
        await asyncio.gather(unwanted, return_exceptions=True)
        await eventually(lambda: pool.stats().running == 0)
        unwanted = asyncio.ensure_future(second.run(pool))
        await asyncio.sleep(0)
        unwanted.cancel()
        await asyncio.gather(unwanted, return_exceptions=True)
        await eventually(lambda: pool.stats().running == 0)
        (status,) = pool.devices()
        assert status.restarts == 0

    # Each would run for a minute, and its worker be ended after half of that.
    module = "tests.server.pool.forgetful_worker"
    run_pool(scenario, "test:1?ms=60000", worker_module=module, hang_grace_s=30)
    assert kinds(orders) == ["RunCall", "AbandonCall", "RunAgain", "AbandonCall", "RunCall", "AbandonCall"]


def test_plans_beyond_the_most_are_forgotten_(
    run_pool: Any, job: Any, orders: list[Any], eventually: Any
) -> None:
    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        first = shared(job, 1)[0]
        for _ in range(2):
            await first.check(pool)
        for _ in range(MOST_PLANS):
            await shared(job, 1)[0].run(pool)
        assert kinds(orders).count("ForgetPlan") == 1
        await first.check(pool)

    run_pool(scenario, "test:1?compute=1")
    assert kinds(orders)[:2] == ["RunCall", "RunAgain"]
    assert [order.plan for order in orders if isinstance(order, ForgetPlan)] == [0, 1]
    # The first one was dropped, and is brought again under a number that no plan had.
    assert [order.plan for order in orders if isinstance(order, RunCall)] == list(range(MOST_PLANS + 2))


def test_the_label_that_a_call_has_is_the_workers_as_well(run_pool: Any, job: Any, orders: list[Any]) -> None:
    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        first, second = shared(job, 2)
        await first.run(pool)
        options = replace(second.planned.options, label="x", priority=5)
        plan = second.planned.plan
        with pytest.raises(DeviceOutOfMemory):
            await replace(second, planned=PlannedCall(plan, options, "r", None)).run(pool)
        await second.run(pool)

    run_pool(scenario, "test:1?oom=x")
    assert kinds(orders) == ["RunCall", "RunAgain", "RunAgain"]


def test_a_plan_is_forgotten_when_the_last_of_its_calls_has_ended(
    run_pool: Any, job: Any, orders: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SentPlans.__init__, "__defaults__", (1,))

    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        (first,), (second,) = shared(job, 1), shared(job, 1)
        both = [asyncio.ensure_future(call.check(pool)) for call in (first, second)]
        await asyncio.sleep(0)
        assert pool.stats().running == 2
        assert kinds(orders) == ["RunCall", "RunCall"]
        await asyncio.gather(*both)

    run_pool(scenario, "test:1?ms=50&compute=1", streams_per_device=2)
    assert [order.plan for order in orders if isinstance(order, ForgetPlan)] == [0]
