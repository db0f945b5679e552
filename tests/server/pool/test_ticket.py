"""What an accepted call keeps of its way through the pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from tests.server.pool.conftest import Job, RunPool

from npugrad.timeline import serialize_marks
from npugrad_server.pool import DevicePool
from npugrad_server.pool.commands import StartCall
from npugrad_server.pool.tenant import Tenant

GRPC_METADATA_BYTES = 8 * 1024
"""What gRPC takes of metadata by default; with more, a call that went well would fail."""


def test_a_tenants_highest_priority_lowers_those_of_its_calls(
    run_pool: RunPool, job: Callable[..., Job]
) -> None:
    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        for wanted, most, given in ((100, 3, 3), (100, 100, 100), (-5, 3, -5), (0, -20, -20)):
            tenant = Tenant("a", max_priority=most)
            with pool.admit(replace(job(priority=wanted).planned, tenant=tenant)) as ticket:
                assert ticket.state.priority == given

    run_pool(scenario)


def test_a_call_that_is_given_back_again_and_again_says_so_in_few_words(
    run_pool: RunPool, job: Callable[..., Job]
) -> None:
    async def scenario(pool: DevicePool) -> None:
        await pool.wait_ready(30)
        with pool.admit(job().planned) as ticket:
            start = StartCall(ticket.number, worker=0, incarnation=1, attempt=1, queued_s=0.0)
            for _ in range(1000):
                ticket.order(start, pool._fleet.process(0))
                ticket.mark_lost()
            marks = ticket.marks
            assert len(serialize_marks(marks)) < GRPC_METADATA_BYTES / 4
            assert {stage for stage, _ in marks} == {"queued", "lost"}
            assert all(before[1] <= after[1] for before, after in pairwise(marks))
            assert marks[-1][0] == "lost"

    run_pool(scenario)
