"""Both clients under one surface, so that what is true of both is written once."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
from tests.client.fake_service import STREAMED, UNARY, group_norm

from npugrad_client import AsyncClient, Client
from npugrad_client._retry import RetrySchedule

LIMIT_S = 60
Make = Callable[..., Any]


class Looped:
    """An `AsyncClient` on a loop in a thread of its own, whose methods wait as those of a `Client` do.

    Attributes:
        client: The client.
        submit: Its methods, which give a future that cancels the task.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.client = AsyncClient(*arguments, **options)
        self.submit: Any = _Submit(self)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def start(self, method: Any, arguments: Any, options: Any) -> Any:
        """A future of what a coroutine function gives back."""
        plain = (getattr(each, "__wrapped__", each) for each in arguments)
        return asyncio.run_coroutine_threadsafe(method(*plain, **options), self._loop)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.client, name)
        if not inspect.iscoroutinefunction(method):
            return method

        @wraps(method)
        def call(*arguments: Any, **options: Any) -> Any:
            return self.start(method, arguments, options).result(LIMIT_S)

        return call

    def __enter__(self) -> Looped:
        return self

    def __exit__(self, *_: object) -> None:
        self.start(self._end, (), {}).result(LIMIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        """Closes the client, and ends the tasks that are left as `asyncio.run` does."""
        await self.client.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


class _Submit:
    def __init__(self, looped: Looped) -> None:
        self._looped = looped

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._looped.client, name)
        return lambda **options: self._looped.start(method, (), options)


BOTH = pytest.mark.parametrize("make", [Client, Looped], ids=["threads", "asyncio"])
WAYS = pytest.mark.parametrize("way", [UNARY, STREAMED], ids=["unary", "streamed"])
PAIRS = pytest.mark.parametrize(
    ("make", "way"), [(Client, UNARY), (Looped, STREAMED)], ids=["threads-unary", "asyncio-streamed"]
)
"""For what takes long, or hardly depends on either."""


def call_once(make: Make, target: Any, call: dict[str, Any] | None = None, **options: Any) -> Any:
    with make(target, **{"timeout_s": LIMIT_S, **options}) as client:
        return client.group_norm_backward(**(call or group_norm()))


def failures(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Released for each try that its client has seen fail, before it looks what comes next."""
    seen, failed = threading.Semaphore(0), RetrySchedule.failed

    def note(self: RetrySchedule, *told: Any) -> bool:
        seen.release()
        return failed(self, *told)

    monkeypatch.setattr(RetrySchedule, "failed", note)
    return seen


def caught(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except Exception as error:
        return error
