"""Quotas of tenants, and who gives way when queue or memory are full."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace
from typing import Any

import pytest
from tests.server.pool.pools import Job, in_pool, make_job, pid_of, until
from tests.server.pool.scheduling import SETTINGS, open_scheduler

from npugrad.errors import CallTooLarge, ServerBusy
from npugrad_server.pool import DevicePool
from npugrad_server.pool.admission import AdmissionControl, demand_of
from npugrad_server.pool.quotas import MAX_IDLE, TURN_RETRY_S, Quotas
from npugrad_server.pool.regions import RegionAllocator
from npugrad_server.pool.tenant import Tenant

HOG, SMALL, HEAVY = Tenant("hog"), Tenant("small"), Tenant("heavy", 4.0)


def reserve(admission: AdmissionControl, planned: Any) -> None:
    admission.reserve(planned, 0, open_scheduler().forecast, time.monotonic())


def test_what_a_tenant_holds_is_counted_and_forgotten() -> None:
    quotas = Quotas()
    first, second = quotas.enter(HOG, 100), quotas.enter(HOG, 50)
    assert first is second
    assert (first.call_count, first.waiting_count, first.inflight_bytes) == (2, 2, 150)
    quotas.leave(first, 100, waits=True)
    first.waiting_count -= 1  # the other one starts
    quotas.leave(first, 50, waits=False)
    assert (first.waiting_count, first.inflight_bytes, quotas.uses) == (0, 0, {})


def test_counters_of_a_tenant_that_comes_back_are_kept_for_a_bounded_number() -> None:
    quotas = Quotas()
    first = quotas.enter(HOG, 100)
    quotas.leave(first, 100, waits=True)
    assert quotas.enter(HOG, 7) is first
    assert (first.call_count, first.waiting_count, first.inflight_bytes) == (1, 1, 7)
    quotas.leave(first, 7, waits=True)
    for number in range(MAX_IDLE):
        quotas.leave(quotas.enter(Tenant(str(number)), 1), 1, waits=True)
    assert quotas.enter(HOG, 1) is not first


def test_each_quota_is_refused_with_its_name_found_and_expected() -> None:
    settings = replace(SETTINGS, input_arena_bytes=1 << 20, output_arena_bytes=1 << 20)
    admission, planned = AdmissionControl(settings, 1 << 20), make_job().planned
    held = demand_of(planned).inflight_bytes
    for tenant, told in (
        (
            Tenant("a", max_queue_depth=1),
            "found 1 calls that have not started; expected fewer than 1 (its quota max_queue_depth)",
        ),
        (
            Tenant("b", max_inflight_bytes=2 * held - 1),
            f"found {held} bytes in flight; expected room for {held} of {2 * held - 1} "
            "(its quota max_inflight_bytes)",
        ),
    ):
        mine = replace(planned, tenant=tenant)
        reserve(admission, mine)
        use = admission.quotas.enter(tenant, held)
        with pytest.raises(ServerBusy) as caught:
            reserve(admission, mine)
        assert str(caught.value) == f"group_norm_backward: tenant {tenant.name}: {told}"
        assert (caught.value.reason, caught.value.retryable) == ("QUOTA_EXCEEDED", True)
        assert (caught.value.retry_after_s or 0) > 0
        reserve(admission, planned)  # others have room
        admission.quotas.leave(use, held, waits=True)
        reserve(admission, mine)
    with pytest.raises(CallTooLarge, match=rf"tenant c: found {held} bytes .*; expected at most {held - 1} "):
        reserve(admission, replace(planned, tenant=Tenant("c", max_inflight_bytes=held - 1)))


def test_whoever_holds_the_most_for_its_weight_is_the_most_over_its_share() -> None:
    quotas = Quotas()
    for tenant, calls in ((HOG, 3), (HEAVY, 9), (SMALL, 1)):
        for _ in range(calls):
            quotas.enter(tenant, 64 * calls)
    assert quotas.over_share_of_places(Tenant("new")) == [HOG, HEAVY]
    assert quotas.over_share_of_places(HOG) == []
    assert quotas.over_share_of_places(SMALL) == [HOG, HEAVY]
    assert quotas.over_share_of_places(Tenant("new", 0.4)) == [HOG]
    assert quotas.over_share_of_memory(Tenant("new"), 64) == [HEAVY, HOG]
    assert quotas.over_share_of_memory(Tenant("new"), 600) == [HEAVY]


def test_tenants_take_turns_where_uploads_of_one_leave_no_room_for_the_other() -> None:
    planned = make_job().planned
    demand = demand_of(planned)
    settings = replace(SETTINGS, output_arena_bytes=1 << 20)
    nbytes, admission = demand.inputs.nbytes, AdmissionControl(settings, 1 << 20)
    admission.operands = RegionAllocator(2 * nbytes)
    forecast = open_scheduler().forecast

    def ask(tenant: Tenant, now: float) -> tuple[str, float | None]:
        """What a call is told that is over at once if it is admitted."""

        def give_turn(_: Any) -> bool:
            admission.turns.refused(tenant, nbytes, now)
            return False

        mine = replace(planned, tenant=tenant)
        try:
            _, region, _ = admission.reserve(mine, 0, forecast, now, make_room=give_turn)
        except ServerBusy as error:
            return str(error).partition("operands now: ")[2].split()[0], error.retry_after_s
        admission.operands.free(region)
        return "", None

    uploads = [admission.operands.allocate(nbytes) for _ in range(2)]
    use = admission.quotas.enter(HOG, 4 * nbytes)
    assert ask(SMALL, 1.0) == ask(SMALL, 4.0) == (f"{2 * nbytes}", TURN_RETRY_S)
    for region in uploads[1:]:
        assert region is not None
        admission.operands.free(region)
    assert ask(HOG, 5.0) == ("tenant", 5.0)  # seconds for the other one to come again
    assert ask(SMALL, 8.0) == ("", None)
    assert ask(HOG, 14.5) == ("tenant", 0.5)  # the other one found none for 7 s, and has as long
    assert ask(HEAVY, 14.5) == ("", None)  # within its share
    assert ask(HOG, 15.0) == ("", None)
    admission.quotas.leave(use, 4 * nbytes, waits=True)


# -------------------------------------------------------------------------------------- in a pool of devices


def of(tenant: Tenant, priority: int = 0, label: str = "") -> Job:
    made = make_job(priority=priority, label=label)
    return replace(made, planned=replace(made.planned, tenant=tenant))


async def answer(pool: DevicePool, some: Job) -> str:
    try:
        await some.run(pool)
    except ServerBusy as error:
        return f"{error.reason} {(error.retry_after_s or 0) > 0}"
    return "OK"


async def hog_gives_way(pool: DevicePool) -> None:
    """One call runs, the hog fills up the rest, and others come; its least and newest calls go."""
    os.kill(pid_of(pool), signal.SIGSTOP)  # no call ends before all have come
    tasks = [asyncio.create_task(answer(pool, of(HOG, label="0")))]
    await until(lambda: pool.stats().running == 1)
    tasks += [asyncio.create_task(answer(pool, of(HOG, n % 2, f"{n}"))) for n in range(1, 9)]
    await until(lambda: pool.stats().queue_depth == 8)
    others = [asyncio.create_task(answer(pool, of(SMALL, label=f"{n}"))) for n in range(8)]
    await asyncio.sleep(0)
    os.kill(pid_of(pool), signal.SIGCONT)
    assert await asyncio.gather(*others) == ["OK"] * 4 + ["QUEUE_FULL True"] * 4
    told = await asyncio.gather(*tasks)
    assert told == ["OK", *("OK" if n % 2 else "QUEUE_FULL True" for n in range(1, 9))]


@pytest.mark.slow
@in_pool("test:1?ms=5", max_queue_depth=8)
async def test_a_hog_gives_way_in_a_full_queue_until_it_has_its_share(pool: DevicePool) -> None:
    await hog_gives_way(pool)


@pytest.mark.slow
@in_pool("test:1?ms=5", input_arena_bytes=9 * demand_of(make_job().planned).inputs.nbytes)
async def test_a_hog_gives_way_in_full_memory_until_it_has_its_share(pool: DevicePool) -> None:
    await hog_gives_way(pool)


@pytest.mark.slow
@in_pool("test:1?ms=5")
async def test_calls_that_give_up_in_the_queue_give_their_places_back(pool: DevicePool) -> None:
    tenant = Tenant("small", max_queue_depth=1)
    os.kill(pid_of(pool), signal.SIGSTOP)
    running = asyncio.create_task(of(tenant).run(pool))
    await until(lambda: pool.stats().running == 1)
    for _ in range(3):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(of(tenant).run(pool), 0.02)
    os.kill(pid_of(pool), signal.SIGCONT)
    await running


@pytest.mark.slow
@in_pool("test:1?ms=100")
async def test_no_call_has_a_higher_priority_than_its_tenant_may_have_and_a_prediction_knows_that(
    pool: DevicePool,
) -> None:
    for wanted, most, given in ((100, 3, 3), (100, 100, 100), (-5, 3, -5), (0, -20, -20)):
        with pool.admit(of(Tenant("a", max_priority=most), wanted).planned) as ticket:
            assert ticket.state.priority == given
    vision = Tenant("vision", max_priority=0)
    await of(vision).run(pool)
    calls = [asyncio.ensure_future(of(vision).run(pool)) for _ in range(4)]
    await asyncio.sleep(0)
    assert pool.stats().queue_depth == 3
    asked, usual = pool.predict(of(vision, 100).planned)[0], pool.predict(of(vision).planned)[0]
    assert asked is not None
    assert asked == pytest.approx(usual, rel=0.5)
    await asyncio.gather(*calls)
