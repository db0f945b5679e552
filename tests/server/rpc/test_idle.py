from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from npugrad_server.rpc.idle import IdleTimer

NEVER_S = 1000.0


@contextmanager
def timed() -> Iterator[IdleTimer]:
    timer = IdleTimer()
    try:
        yield timer
    finally:
        timer.close()


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


def pending(after_s: float | None = None) -> asyncio.Future[None]:
    """What is done after a while, or never."""
    loop = asyncio.get_running_loop()
    made: asyncio.Future[None] = loop.create_future()
    if after_s is not None:
        loop.call_later(after_s, made.set_result, None)
    return made


async def test_what_takes_too_long_is_cancelled_each_time() -> None:
    task = asyncio.current_task()
    assert task is not None
    with timed() as timer:
        for _ in range(3):
            wait = pending()
            assert await is_too_late(timer, wait, 0.01)
            assert wait.cancelled()
        if sys.version_info >= (3, 11):
            assert not task.cancelling(), "or a later timeout of the task would be taken for a cancellation"
        assert not await is_too_late(timer, asyncio.sleep(0), NEVER_S)
        # A shorter wait does not last until the alarm of a longer one.
        assert await is_too_late(timer, pending(), 0.01)


async def test_a_thousand_waits_take_one_timer_and_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, made, timers = asyncio.get_running_loop(), len(asyncio.all_tasks()), list[float]()
    call_at = loop.call_at

    def counted(when: float, *args: Any, **more: Any) -> asyncio.TimerHandle:
        timers.append(when)
        return call_at(when, *args, **more)

    with timed() as timer:
        monkeypatch.setattr(loop, "call_at", counted)
        for _ in range(1000):
            wait = pending()
            loop.call_soon(wait.set_result, None)
            assert not await is_too_late(timer, wait, NEVER_S)
            assert len(asyncio.all_tasks()) == made
    assert len(timers) == 1


async def test_the_alarm_of_an_earlier_wait_ends_no_later_one_and_cancels_nothing_between_two() -> None:
    with timed() as timer:
        assert not await is_too_late(timer, asyncio.sleep(0), 0.01)
        assert not await is_too_late(timer, pending(0.03), NEVER_S)
        assert await is_too_late(timer, pending(), 0.01)
        assert not await is_too_late(timer, asyncio.sleep(0), 0.01)
        await pending(0.03)
        assert await is_too_late(timer, pending(), 0.01)
    timer.start(0.01)
    timer.close()
    await pending(0.03)  # one that was closed rings no more


@pytest.mark.parametrize(
    "timeout_s",
    [
        NEVER_S,
        pytest.param(
            0.0,  # its alarm rings at the same moment
            marks=pytest.mark.skipif(
                sys.version_info < (3, 11), reason="a task does not count yet who cancelled it"
            ),
        ),
    ],
)
async def test_another_cancellation_is_nothing_of_the_timers_and_counts_for_more(timeout_s: float) -> None:
    task = asyncio.current_task()
    assert task is not None
    with timed() as timer:
        asyncio.get_running_loop().call_soon(task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await is_too_late(timer, pending(), timeout_s)
    if sys.version_info >= (3, 11):
        task.uncancel()


async def test_there_must_be_a_task() -> None:
    made: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def make() -> None:
        try:
            made.set_result(IdleTimer())
        except RuntimeError as error:
            made.set_exception(error)

    asyncio.get_running_loop().call_soon(make)
    with pytest.raises(RuntimeError, match="found no task; expected one to cancel"):
        await made
