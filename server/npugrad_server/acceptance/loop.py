"""An event loop on its own thread, for steps, which are plain blocking functions."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from concurrent.futures import Future

_Found = TypeVar("_Found")


class LoopThread:
    """Runs an event loop until `close`; every method may be called from any thread but its own."""

    def __init__(self) -> None:
        """Starts the thread."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="acceptance-loop", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, _Found]) -> Future[_Found]:
        """Runs a coroutine; the future has its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, _Found], timeout_s: float | None = None) -> _Found:
        """Runs a coroutine and waits for its result.

        Raises:
            concurrent.futures.TimeoutError: The time ran out, and the coroutine was cancelled.
        """
        future = self.submit(work)
        try:
            return future.result(timeout_s)
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[[], _Found]) -> _Found:
        """Calls a function on the loop and waits for its result."""

        async def work() -> _Found:
            return function()

        return self.run(work())

    def later(self, function: Callable[[], object]) -> None:
        """Calls a function on the loop without waiting."""
        self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """Ends the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
