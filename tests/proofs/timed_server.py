"""A server that says, when SIGUSR1 asks, which callback of its event loop took the most processor time."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from types import FrameType
from typing import Any

from npugrad_server.cli import main

EVENT = "longest callback"


class LoopClock:
    """Measures callbacks in the time of their thread, so that a busy machine does not count."""

    def __init__(self) -> None:
        self._run = asyncio.Handle._run
        self._longest_s, self._what, self._asked = 0.0, "", 0

    def install(self) -> None:
        """From now on each callback of each loop is measured."""

        def run(handle: asyncio.Handle) -> None:
            start_s = time.thread_time()
            self._run(handle)
            took_s = time.thread_time() - start_s
            if took_s > self._longest_s:
                self._longest_s, self._what = took_s, _name(handle)

        asyncio.Handle._run = run  # type: ignore[assignment,method-assign]
        signal.signal(signal.SIGUSR1, self._tell)

    def _tell(self, number: int, frame: FrameType | None) -> None:
        self._asked += 1
        told = {"event": EVENT, "number": self._asked, "seconds": self._longest_s, "what": self._what}
        print(json.dumps(told), file=sys.stderr, flush=True)
        self._longest_s, self._what = 0.0, ""


def _name(handle: asyncio.Handle) -> str:
    """What a callback is; of the step of a task, its coroutine and the innermost one."""
    callback: Any = getattr(handle, "_callback", "")
    owner = getattr(callback, "__self__", None)
    if not isinstance(owner, asyncio.Task):
        return str(getattr(callback, "__qualname__", callback))
    names: list[str] = []
    waits: Any = owner.get_coro()
    while waits is not None:
        names.append(getattr(waits, "__qualname__", type(waits).__name__))
        waits = getattr(waits, "cr_await", None)
    return names[-1] if len(names) < 2 else f"{names[0]} ... {names[-1]}"


if __name__ == "__main__":
    LoopClock().install()
    main()
