"""How calls and their clients end: interrupts, two answers at once, clients that nobody closes."""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.client import programs
from tests.client.both import WAYS
from tests.client.fake_service import Context, Gate, abort_with, fake_service, group_norm

from npugrad.errors import InvalidOperand
from npugrad_client import AsyncClient, RetryPolicy


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_an_interrupt_ends_a_batch_and_cancels_its_calls() -> None:
    gate = Gate()
    program = """
    import sys, warnings
    warnings.simplefilter("error")
    from tests.client.fake_service import group_norm
    from npugrad_client import Client
    with Client(sys.argv[1]) as client:
        try:
            client.run_many(client.group_norm_backward, [group_norm()] * 9, concurrency=3)
        except KeyboardInterrupt:
            print("interrupted")
    """
    with fake_service(before=gate.hold) as service, tempfile.TemporaryFile("w+") as stderr:
        process = programs.start(program, service.address, stderr=stderr)
        try:
            for _ in range(3):
                gate.wait_for_call()
            process.send_signal(signal.SIGINT)
            for _ in range(3):
                gate.wait_until_given_up()
            status = process.wait(20)
        finally:
            process.kill()
            gate.open()
        assert process.stdout is not None
        with process.stdout as stdout:
            output = stdout.read()
        stderr.seek(0)
        assert (output, stderr.read(), status) == ("interrupted\n", "", 0)


@WAYS
@pytest.mark.parametrize("ends", [("no", "no"), ("no", "yes"), ("yes", "yes")], ids=" ".join)
def test_both_tries_of_a_race_may_end_at_once(ends: tuple[str, str], way: int) -> None:
    """The loop is kept busy until both servers have answered."""
    gate, left = Gate(), [threading.Event(), threading.Event()]

    def end(place: int) -> Callable[[Context], None]:
        def act(context: Context) -> None:
            context.add_callback(left[place].set)
            gate.hold()
            if ends[place] == "no":
                abort_with(context, InvalidOperand("no", code=161002))

        return act

    hedged = RetryPolicy(hedge_after_s=0.0, max_tries=2)

    async def work(targets: list[str]) -> Any:
        async with AsyncClient(targets, timeout_s=20, retry=hedged, stream_from_bytes=way) as client:
            task = asyncio.ensure_future(client.group_norm_backward(**group_norm()))
            for _ in range(2):
                await asyncio.to_thread(gate.wait_for_call)
            gate.open()
            for event in left:
                assert event.wait(20)  # in the loop's own thread: it turns only afterwards
            threading.Event().wait(0.05)  # nothing tells that what was sent has been read
            return (await asyncio.gather(task, return_exceptions=True))[0]

    with fake_service(before=end(0)) as one, fake_service(before=end(1)) as two:
        found = asyncio.run(asyncio.wait_for(work([one.address, two.address]), 30))
    if "yes" in ends:
        assert isinstance(found, InvalidOperand) or found.info.device == "test:0"
    else:
        assert isinstance(found, InvalidOperand), repr(found)


def test_clients_that_are_left_behind_leave_nothing_and_say_nothing() -> None:
    program = """
    import asyncio, gc, os, sys, time, warnings
    warnings.simplefilter("error")
    from tests.client.fake_service import STREAMED, group_norm
    from npugrad_client import AsyncClient, Client, RetryPolicy

    HEDGED = RetryPolicy(hedge_after_s=0)


    def use(policy):
        for way in ({}, {"stream_from_bytes": STREAMED}):
            client = Client(sys.argv[1], timeout_s=20, retry=policy, **way)
            client.group_norm_backward(**group_norm())
            client.submit.group_norm_backward(**group_norm(hxw=10_000)).result()


    async def use_async(policy):
        for way in ({}, {"stream_from_bytes": STREAMED}):
            client = AsyncClient(sys.argv[1], timeout_s=20, retry=policy, **way)
            await client.group_norm_backward(**group_norm(hxw=10_000))


    def held():
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


    def is_little():
        return max(held()) <= 12


    for policy in (None, HEDGED):
        for act in (use, lambda policy: asyncio.run(use_async(policy))):
            for _ in range(4):
                act(policy)
            gc.collect()
            for _ in range(4000):
                if is_little():
                    break
                time.sleep(0.01)
            print(is_little(), held())
    left = Client(sys.argv[1], retry=HEDGED)
    left.group_norm_backward(**group_norm())
    flying = left.submit.group_norm_backward(**group_norm())


    async def leave():
        global other
        other = AsyncClient(sys.argv[1])
        await other.group_norm_backward(**group_norm())
        asyncio.ensure_future(other.group_norm_backward(**group_norm(hxw=1_000_000)))
        await asyncio.sleep(0)

    asyncio.run(leave())
    """
    with fake_service() as service:
        ran = programs.run(program, service.address)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert [line.split()[0] for line in ran.stdout.splitlines()] == ["True"] * 4, ran.stdout


def test_many_calls_in_flight_hold_little_memory() -> None:
    """Beside its operands, which are the caller's, a small call in flight holds some tens of KiB."""
    program = """
    import asyncio, resource, sys
    from tests.client.fake_service import group_norm
    from npugrad_client import AsyncClient


    async def work():
        async with AsyncClient(sys.argv[1], timeout_s=60) as client:
            call = group_norm()
            await client.group_norm_backward(**call)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            await asyncio.gather(*(client.group_norm_backward(**call) for _ in range(400)))
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)

    asyncio.run(work())
    """
    with fake_service() as service:
        ran = programs.run(program, service.address)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < 40 * 1024, "KiB for 400 calls"
