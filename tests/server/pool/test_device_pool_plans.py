"""Calls that share a plan, on real workers: it is brought once, then named; and what may go wrong with it."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.server.pool.pools import Job, in_pool, make_job, pid_of, until

from npugrad.errors import DeviceOutOfMemory
from npugrad_server.pool import CallPlan, DevicePool, PlannedCall
from npugrad_server.pool.process import WorkerProcess
from npugrad_server.pool.sent_plans import MOST_PLANS, SentPlans
from npugrad_server.worker.protocol import AbandonCall, ForgetPlan, Message, RunCall
from npugrad_server.worker.run_again import RunAgain
from npugrad_server.worker.verifier import NAME as VERIFIER

pytestmark = pytest.mark.slow

FORGETFUL = "tests.server.pool.forgetful_worker"


def shared(count: int, **sizes: Any) -> list[Job]:
    """Calls of one plan, each with operands of its own."""
    jobs = [make_job(seed=seed, **sizes) for seed in range(count)]
    first = jobs[0].planned
    plan = CallPlan(first.plan.record, first.plan.call, first.plan.outputs, first.plan.options, is_kept=True)
    return [
        replace(each, planned=PlannedCall(plan, each.planned.options, each.planned.request_id, None))
        for each in jobs
    ]


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What workers are told about calls and plans, in order; verifiers get theirs besides."""
    told: list[Any] = []
    send = WorkerProcess.send

    def note(self: WorkerProcess, message: Message, *descriptors: int) -> None:
        if self.device != VERIFIER and isinstance(message, (RunCall, RunAgain, ForgetPlan, AbandonCall)):
            told.append(message)
        send(self, message, *descriptors)

    monkeypatch.setattr(WorkerProcess, "send", note)
    return told


def kinds(orders: list[Any]) -> list[str]:
    return [type(order).__name__ for order in orders]


def plans(orders: list[Any]) -> list[tuple[type, int | None]]:
    return [(type(order), order.plan) for order in orders]


@pytest.mark.parametrize(
    ("devices", "sizes"),
    [
        ("cpu:0", {"layout": np.asfortranarray}),
        ("cpu:0", {"verify": True}),
        ("test:1?compute=1", {"dtype": "float16", "output_mask": (False, True, True), "with_gamma": False}),
    ],
    ids=["strided", "verified", "masked"],
)
@in_pool("{devices}", streams_per_device=2)
async def test_every_call_of_a_plan_has_the_results_of_one_brought_whole(
    pool: DevicePool, orders: list[Any], devices: str, sizes: dict[str, Any]
) -> None:
    calls = shared(4, **sizes)
    for call in calls:
        await call.check(pool)
    await asyncio.gather(*(call.check(pool) for call in calls))
    assert kinds(orders) == ["RunCall"] + ["RunAgain"] * 7
    assert {order.plan for order in orders} == {0}


@in_pool()
async def test_a_call_that_shares_no_plan_is_brought_whole_without_a_number(
    pool: DevicePool, orders: list[Any]
) -> None:
    for _ in range(2):
        await make_job().check(pool)
    assert plans(orders) == [(RunCall, None)] * 2


@in_pool("test:1?ms=50&compute=1")
async def test_a_call_whose_worker_died_is_brought_whole_to_the_next_one(
    pool: DevicePool, orders: list[Any]
) -> None:
    first, second, third = shared(3)
    await first.check(pool)
    os.kill(pid_of(pool), signal.SIGSTOP)  # so that it cannot answer before it is killed
    call = second.start(pool)
    await asyncio.sleep(0)
    os.kill(pid_of(pool), signal.SIGKILL)
    assert (await call).info.attempts == 2
    await third.check(pool)  # of the new process's first number
    await third.check(pool)
    expected = [(RunCall, 0), (RunAgain, 0), (RunCall, None), (RunCall, 0), (RunAgain, 0)]
    assert plans(orders) == expected


@in_pool(worker_module=FORGETFUL, streams_per_device=2)
async def test_a_worker_that_lacks_the_plan_gets_the_call_whole(pool: DevicePool, orders: list[Any]) -> None:
    calls = shared(6)
    for call in calls[:4]:
        assert (await call.check(pool)).info.attempts == 1
    await asyncio.gather(*(call.check(pool) for call in calls))
    assert pool.devices()[0].restarts == 0
    # It lacks number 0 when that is named, has the call whole, and keeps the plan as number 1.
    expected = [(RunCall, 0), (RunAgain, 0), (RunCall, None), (RunCall, 1), (RunAgain, 1)]
    assert plans(orders)[:5] == expected


# Each would run for a minute, and its worker be ended after half of that.
@in_pool("test:1?ms=60000", worker_module=FORGETFUL, hang_grace_s=30)
async def test_a_call_that_nobody_waits_for_is_given_up_also_where_its_plan_was_lacking(
    pool: DevicePool, orders: list[Any]
) -> None:
    for call in shared(2):
        unwanted = asyncio.ensure_future(call.run(pool))
        await asyncio.sleep(0)
        assert pool.stats().running == 1
        unwanted.cancel()
        await asyncio.gather(unwanted, return_exceptions=True)
        await until(lambda: pool.stats().running == 0)
    assert pool.devices()[0].restarts == 0
    assert kinds(orders) == ["RunCall", "AbandonCall", "RunAgain", "AbandonCall", "RunCall", "AbandonCall"]


@in_pool("test:1?compute=1")
async def test_plans_beyond_the_most_are_forgotten_(pool: DevicePool, orders: list[Any]) -> None:
    (first,) = shared(1)
    for _ in range(2):
        await first.check(pool)
    for _ in range(MOST_PLANS):
        await shared(1)[0].run(pool)
    assert kinds(orders).count("ForgetPlan") == 1
    await first.check(pool)
    assert kinds(orders)[:2] == ["RunCall", "RunAgain"]
    assert [order.plan for order in orders if isinstance(order, ForgetPlan)] == [0, 1]
    # The first one was dropped, and is brought again under a number that no plan had.
    assert [order.plan for order in orders if isinstance(order, RunCall)] == list(range(MOST_PLANS + 2))


@in_pool("test:1?oom=x")
async def test_the_label_that_a_call_has_is_the_workers_as_well(pool: DevicePool, orders: list[Any]) -> None:
    first, second = shared(2)
    await first.run(pool)
    options = replace(second.planned.options, label="x", priority=5)
    with pytest.raises(DeviceOutOfMemory):
        await replace(second, planned=PlannedCall(second.planned.plan, options, "r", None)).run(pool)
    await second.run(pool)
    assert kinds(orders) == ["RunCall", "RunAgain", "RunAgain"]


@in_pool("test:1?ms=50&compute=1", streams_per_device=2)
async def test_a_plan_is_forgotten_when_the_last_of_its_calls_has_ended(
    pool: DevicePool, orders: list[Any]
) -> None:
    pool._fleet.process(0).plans = SentPlans(pool._fleet.process(0).send, 1)
    (first,), (second,) = shared(1), shared(1)
    both = [first.start(pool), second.start(pool)]
    await asyncio.sleep(0)
    assert pool.stats().running == 2
    assert kinds(orders) == ["RunCall", "RunCall"]
    await asyncio.gather(*both)
    assert [order.plan for order in orders if isinstance(order, ForgetPlan)] == [0]
