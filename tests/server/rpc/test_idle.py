from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from npugrad_server.rpc.idle import IdleTimer

NEVER_S = 1000.0


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts the timers that were set."""

    timers = 0

    def call_at(self, *args: Any, **options: Any) -> asyncio.TimerHandle:  # type: ignore[override]
        self.timers += 1
        return super().call_at(*args, **options)


def run(act: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Runs a coroutine to its end; how many timers were set."""
    loop = CountingLoop()
    try:
        loop.run_until_complete(asyncio.wait_for(act(), 60))
        return loop.timers - 1
    finally:
        loop.close()


async def is_too_late(timer: IdleTimer, act: Awaitable[object], timeout_s: float) -> bool:
    """Waits; whether that took too long, by the timer's word."""
    timer.start(timeout_s)
    try:
        await act
    except asyncio.CancelledError:
        if not timer.is_cause():
            raise
        return True
    finally:
        timer.stop()
    return False


def pending() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


def test_what_takes_too_long_is_cancelled_each_time() -> None:
    async def act() -> None:
        timer = IdleTimer()
        for _ in range(3):
            wait = pending()
            assert await is_too_late(timer, wait, 0.01)
            assert wait.cancelled()
        task = asyncio.current_task()
        assert task is not None
        if sys.version_info >= (3, 11):
            assert not task.cancelling(), "or a later timeout of the task would be taken for a cancellation"
        assert not await is_too_late(timer, asyncio.sleep(0), NEVER_S)
        timer.close()

    run(act)


def test_a_thousand_waits_take_one_timer_and_no_task() -> None:
    async def act() -> None:
        timer, made = IdleTimer(), len(asyncio.all_tasks())
        for _ in range(1000):
            wait = pending()
            asyncio.get_running_loop().call_soon(wait.set_result, None)
            assert not await is_too_late(timer, wait, NEVER_S)
            assert len(asyncio.all_tasks()) == made
        timer.close()

    assert run(act) == 1


def test_the_alarm_of_an_earlier_wait_does_not_end_a_later_one() -> None:
    async def act() -> None:
        timer, loop = IdleTimer(), asyncio.get_running_loop()
        assert not await is_too_late(timer, asyncio.sleep(0), 0.01)
        wait = pending()
        loop.call_later(0.03, wait.set_result, None)
        assert not await is_too_late(timer, wait, NEVER_S)
        assert await is_too_late(timer, pending(), 0.01)
        timer.close()

    run(act)


def test_an_alarm_between_two_waits_cancels_nothing() -> None:
    async def act() -> None:
        timer, loop = IdleTimer(), asyncio.get_running_loop()
        assert not await is_too_late(timer, asyncio.sleep(0), 0.01)
        idle = pending()
        loop.call_later(0.03, idle.set_result, None)
        await idle
        assert await is_too_late(timer, pending(), 0.01)
        timer.close()

    run(act)


def test_a_shorter_wait_does_not_last_until_the_alarm_of_a_longer_one() -> None:
    async def act() -> None:
        timer = IdleTimer()
        assert not await is_too_late(timer, asyncio.sleep(0), NEVER_S)
        assert await is_too_late(timer, pending(), 0.01)
        timer.close()

    run(act)


def test_another_cancellation_is_nothing_of_the_timers() -> None:
    async def act() -> None:
        timer, task = IdleTimer(), asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().call_soon(task.cancel)
        try:
            with pytest.raises(asyncio.CancelledError):
                await is_too_late(timer, pending(), NEVER_S)
        finally:
            timer.close()

    run(act)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="a task does not count yet who cancelled it")
def test_another_cancellation_at_the_same_moment_counts_for_more() -> None:
    async def act() -> None:
        timer, task = IdleTimer(), asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().call_soon(task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await is_too_late(timer, pending(), 0.0)
        timer.close()

    run(act)


def test_a_closed_timer_rings_no_more() -> None:
    async def act() -> None:
        timer, loop = IdleTimer(), asyncio.get_running_loop()
        timer.start(0.01)
        timer.close()
        wait = pending()
        loop.call_later(0.03, wait.set_result, None)
        await wait

    run(act)


def test_there_must_be_a_task() -> None:
    async def act() -> None:
        made: asyncio.Future[IdleTimer] = asyncio.get_running_loop().create_future()

        def make() -> None:
            try:
                made.set_result(IdleTimer())
            except RuntimeError as error:
                made.set_exception(error)

        asyncio.get_running_loop().call_soon(make)
        with pytest.raises(RuntimeError, match="found no task; expected one to cancel"):
            await made

    run(act)
