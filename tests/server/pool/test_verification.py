"""Results that are compared with the reference, by verifiers that run, stand still or die."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from tests.server.pool.pools import Seen, in_pool, make_job, until

from npugrad import get_operator
from npugrad.errors import DeadlineExceeded, DeviceError
from npugrad_server.pool import DevicePool, DeviceState
from npugrad_server.pool.tenant import Tenant
from npugrad_server.pool.verification import Verification
from npugrad_server.worker.descendants import processes
from npugrad_server.worker.verifier import NAME

pytestmark = pytest.mark.slow

RIGHT = "test:1?compute=1"
ALL = 1.0
"""Share of the calls that are sampled."""


def verifiers() -> list[int]:
    """Verifiers that this process has started."""
    found = [process.pid for process in processes() if process.parent == os.getpid()]
    return [pid for pid in found if Path(f"/proc/{pid}/comm").read_text().strip() == NAME]


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


async def compare(pool: DevicePool, **sizes: Any) -> None:
    """Has a call compared, as its caller wishes."""
    found = await make_job(verify=True, **sizes).check(pool)
    assert [each.name for each in found.info.verified] == list(found.contents)
    assert all(each.max_relative_error < 0.1 for each in found.info.verified)
    assert all(0 <= each.tolerance_used <= 1 for each in found.info.verified)


async def begin_to_compare(pool: DevicePool) -> asyncio.Task[Any]:
    """Has one compared, up to where the device is done with it."""
    compared = make_job(verify=True).start(pool)
    await asyncio.sleep(0)
    assert pool.stats().running
    await until(lambda: not pool.stats().running)
    return compared


async def is_let_go(pool: DevicePool) -> None:
    """Waits until no operand is kept for a comparison."""
    await until(lambda: not pool.stats().input_arena_used_bytes)


@pytest.mark.parametrize("devices", ["cpu:0", RIGHT])
@in_pool("{devices}")
async def test_results_of_a_right_device_pass_and_it_is_left_to_others_meanwhile(
    pool: DevicePool, seen: Seen, devices: str
) -> None:
    for dtype in ("float32", "float16", "bfloat16"):
        await compare(pool, dtype=dtype, n=3, hxw=16)
    with halted():
        compared = asyncio.create_task(compare(pool))
        for seed in range(3):
            await make_job(seed=seed).check(pool)
        assert not compared.done()
    await compared
    assert seen.compared == {("verify", "ok"): 4}


@in_pool(RIGHT, input_arena_bytes=50_000, output_arena_bytes=50_000)
async def test_tenants_share_verifiers_and_the_memory_of_what_waits_for_them(pool: DevicePool) -> None:
    """Half of it has room for three, as each takes an eighth and a bit; the others wait to be run."""
    made = make_job(n=2, c=6, hxw=64, group=3, verify=True)
    order: list[str] = []

    async def compared(name: str) -> None:
        await replace(made, planned=replace(made.planned, tenant=Tenant(name))).run(pool)
        order.append(name)

    await compared("hog")
    with halted():
        hogs = [asyncio.create_task(compared("hog")) for _ in range(6)]
        await until(lambda: pool.stats().queue_depth == 3 and not pool.stats().running)
        await make_job().check(pool)
        accepted = pool.stats().accepted_calls
        other = asyncio.create_task(compared("other"))
        await until(lambda: pool.stats().accepted_calls > accepted and not pool.stats().running)
    await asyncio.gather(*hogs, other)
    assert order.index("other") <= 3


@in_pool("test:1?corrupt=x&compute=1")
async def test_a_flipped_bit_is_found(pool: DevicePool) -> None:
    found, _ = await make_job(label="x").run(pool)
    assert found["grad_input"] != make_job().golden()["grad_input"].tobytes()
    with pytest.raises(DeviceError, match="grad_input: found a result outside tolerance") as caught:
        await make_job(label="x", verify=True).run(pool)
    assert (caught.value.reason, caught.value.source) == ("VERIFICATION_FAILED", "device")
    await compare(pool, label="y")


@in_pool(RIGHT)
async def test_nobody_waits_for_a_comparison_beyond_the_deadline(pool: DevicePool, seen: Seen) -> None:
    verify = Verification._verify

    def verify_a_late_one(self: Any, ticket: Any) -> None:
        """Its deadline is near once its device is done, however long that took."""
        ticket.planned = replace(ticket.planned, deadline_s=time.monotonic() + 0.1)
        verify(self, ticket)

    await compare(pool)
    with halted() as pid:
        with (
            mock.patch.object(Verification, "_verify", verify_a_late_one),
            pytest.raises(DeadlineExceeded, match="with the reference did not finish in time"),
        ):
            await make_job(verify=True).check(pool)
        await compare(pool)  # by another verifier
        assert pid not in verifiers()
    assert seen.compared == {("verify", "ok"): 2, ("verify", "unfinished"): 1}


@in_pool("test:1?compute=1&ms=50")
async def test_a_caller_that_leaves_takes_its_memory_from_the_verifier(pool: DevicePool) -> None:
    await compare(pool)
    with halted() as pid:
        left = await begin_to_compare(pool)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        assert pool.stats().input_arena_used_bytes == 0
        await until(lambda: pid not in verifiers())


@pytest.mark.parametrize("deaths", [1, 2])
@in_pool("test:1?compute=1&ms=50")
async def test_a_call_is_compared_by_another_verifier_when_one_dies(
    pool: DevicePool, monkeypatch: pytest.MonkeyPatch, deaths: int
) -> None:
    give = Verification._give

    def give_to_a_halted_one(self: Any, seat: Any, check: Any) -> None:
        os.kill(seat.process.pid, signal.SIGSTOP)
        give(self, seat, check)

    await compare(pool)
    if deaths > 1:  # the other one must not be done before it is killed
        monkeypatch.setattr(Verification, "_give", give_to_a_halted_one)
    with halted() as pid:
        compared = await begin_to_compare(pool)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: pid not in verifiers())
    if deaths == 1:
        await compared
        return
    await until(verifiers)
    os.kill(verifiers()[0], signal.SIGKILL)
    with pytest.raises(DeviceError, match="no comparison with the reference: the verifier ended") as caught:
        await compared
    assert caught.value.reason == "INTERNAL"


@in_pool(RIGHT, verify_sample=ALL)
async def test_a_sampled_call_waits_for_nothing_and_keeps_its_memory_until_it_was_compared(
    pool: DevicePool, seen: Seen
) -> None:
    await compare(pool)
    with halted():
        await make_job().check(pool)
        held = pool.stats()
        assert min(held.input_arena_used_bytes, held.output_arena_used_bytes) > 0
        await make_job(seed=1).check(pool)
        assert pool.stats().input_arena_used_bytes == held.input_arena_used_bytes
    await is_let_go(pool)
    assert seen.compared == {("verify", "ok"): 1, ("sample", "ok"): 1, ("sample", "skipped"): 1}


@in_pool(RIGHT, verify_sample=ALL)
async def test_a_sampled_call_whose_verifier_dies_was_not_compared(pool: DevicePool, seen: Seen) -> None:
    await compare(pool)
    with halted() as pid:
        await make_job().check(pool)
        os.kill(pid, signal.SIGKILL)
        await is_let_go(pool)
    await compare(pool)
    assert seen.compared == {("verify", "ok"): 2, ("sample", "unfinished"): 1}


@in_pool(RIGHT, verify_sample=ALL)
async def test_a_pool_that_closes_waits_for_no_comparison(pool: DevicePool) -> None:
    await compare(pool)
    with halted() as pid:
        await make_job().check(pool)
        assert pool.stats().input_arena_used_bytes > 0
        await pool.close()
        assert pid not in verifiers()
    assert pool.stats().input_arena_used_bytes == 0


@in_pool("test:1?compute=1&corrupt=x", verify_sample=ALL)
async def test_two_wrong_samples_quarantine_a_device_whose_canaries_are_right(
    pool: DevicePool, seen: Seen
) -> None:
    await compare(pool)
    while len(seen.mismatches) < 2:
        await make_job(label="x").run(pool)  # its caller gets what the device computed
        await is_let_go(pool)
    assert ("test:0", DeviceState.QUARANTINED) in seen.states
    assert seen.compared["sample", "mismatch"] == 2
    await until(lambda: pool.devices()[0].state is DeviceState.READY)


FLOYD = "fused_floyd_attention_grad"


@in_pool(RIGHT)
async def test_values_that_no_arithmetic_gets_right_are_nobodys_fault(pool: DevicePool, seen: Seen) -> None:
    """Exponentials overflow, on the CPU as well."""
    sizes = get_operator(FLOYD).workloads.canary
    assert sizes is not None

    def larger(operand: Any) -> Any:
        return operand * np.float16(30) if operand.dtype == np.float16 else operand

    for seed in range(3):
        job = make_job(operator=FLOYD, seed=seed, verify=True, layout=larger, **sizes)
        with pytest.raises(DeviceError, match="from which the CPU path differs as well") as caught:
            await job.run(pool)
        assert caught.value.reason == "VERIFICATION_FAILED"
    assert seen.compared == {("verify", "tolerance"): 3}
    assert seen.mismatches == []
    assert pool.devices()[0].restarts == 0


@in_pool("test:1?compute=1&corrupt=x")
async def test_calls_alone_never_quarantine_a_device_for_good(pool: DevicePool, seen: Seen) -> None:
    def is_ready(restarts: int) -> bool:
        (status,) = pool.devices()
        return (status.state, status.restarts) == (DeviceState.READY, restarts)

    for restarts in range(3):
        await until(partial(is_ready, restarts))
        for turn in range(2):
            # of other signatures each, for which no circuit opens
            with pytest.raises(DeviceError, match="found a result outside tolerance"):
                await make_job(label="x", verify=True, n=1 + restarts, hxw=4 + turn).run(pool)
    await until(lambda: pool.devices()[0].state is DeviceState.READY)
    await compare(pool)
    assert len(seen.mismatches) == 6
