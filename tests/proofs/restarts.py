"""Shows that rolling restarts lose no call: `make prove-restarts`.

Two servers are restarted in turn, one after the other, by SIGTERM, while callers keep both busy: from threads
and from an event loop, unary and streamed, with both addresses in one client and through one address that
spreads connections, as a Service of Kubernetes does. A call that was accepted before holds each server for
some seconds. A call of the callers is lost when it raises or its result is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.calls import fill
from tests.e2e.service_address import service_address
from tests.fix_server import ServerProcess, run_server

from npugrad import OPERATORS
from npugrad_client import AsyncClient, Client, NpugradError

STREAMED, UNARY = 0, 2**40
"""Values of `stream_from_bytes` that force one way or the other."""
_CALL_TIMEOUT_S = 120.0
_PROGRESS_TIMEOUT_S = 300.0
_HELD = "held"
"""Label of calls that hang until their deadline, while the server drains."""
_DEVICES = f"test:2?compute=1&hang={_HELD}"
_RECORD = OPERATORS["group_norm_backward"]
_LISTEN = "127.0.0.11:0", "127.0.0.12:0"
"""Where no other test listens: an address is free for seconds while its server ends and starts again."""


# -------------------------------------------------------------------------------------------- callers


@dataclass
class Count:
    """What became of the calls.

    Attributes:
        calls: Answered or lost calls by route, client and way.
        lost: What was wrong, of each lost call.
        tries: The most tries of a call.
        again: Calls that were sent more than once.
        longest_s: Seconds of the slowest call.
    """

    calls: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    tries: int = 0
    again: int = 0
    longest_s: float = 0.0
    changed: threading.Condition = field(default_factory=threading.Condition, repr=False)

    def note(self, name: str, found: Any, expected: dict[str, bytes], took_s: float) -> None:
        """Takes down a call that has ended: its result, or what it raised."""
        is_result = not isinstance(found, BaseException)
        is_right = is_result and {o: getattr(found, o).tobytes() for o in expected} == expected
        tries = found.info.tries if is_result else 0
        with self.changed:
            self.calls[name] += 1
            self.again += tries > 1
            self.tries, self.longest_s = max(self.tries, tries), max(self.longest_s, took_s)
            if not is_right:
                self.lost.append(f"{name}: {'a wrong result' if is_result else repr(found)}")
            self.changed.notify_all()


class Callers:
    """One caller for each client and way: threads and asyncio, unary and streamed."""

    def __init__(self, route: str, targets: list[str], count: Count) -> None:
        self._route, self._targets = route, targets
        self._count = count
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._call, args=(way,)) for way in (UNARY, STREAMED)]
        self._threads.append(threading.Thread(target=self._call_all))
        for thread in self._threads:
            thread.start()

    def _call(self, way: int) -> None:
        call, expected = _sample(way)
        with Client(self._targets, timeout_s=_CALL_TIMEOUT_S, stream_from_bytes=way) as client:
            while not self._is_over.is_set():
                started_s = time.monotonic()
                try:
                    found: Any = client.group_norm_backward(**call)
                except Exception as error:
                    found = error
                self._note("threads", way, found, expected, started_s)

    def _call_all(self) -> None:
        async def work(way: int) -> None:
            call, expected = _sample(way)
            async with AsyncClient(self._targets, timeout_s=_CALL_TIMEOUT_S, stream_from_bytes=way) as client:
                while not self._is_over.is_set():
                    started_s = time.monotonic()
                    try:
                        found: Any = await client.group_norm_backward(**call)
                    except (Exception, asyncio.CancelledError) as error:  # nobody here cancels
                        found = error
                    self._note("asyncio", way, found, expected, started_s)

        async def both() -> None:
            await asyncio.gather(work(UNARY), work(STREAMED))

        asyncio.run(both())

    def _note(self, kind: str, way: int, found: Any, expected: dict[str, bytes], started_s: float) -> None:
        name = f"{self._route}, {kind}, {'unary' if way == UNARY else 'streamed'}"
        self._count.note(name, found, expected, time.monotonic() - started_s)

    def wait(self, calls: int) -> None:
        """Waits until each caller has made so many more calls."""
        count = self._count
        with count.changed:
            before = Counter(count.calls)

            def is_moved() -> bool:
                mine = [name for name in count.calls if name.startswith(self._route)]
                return len(mine) == 4 and all(count.calls[name] >= before[name] + calls for name in mine)

            if not count.changed.wait_for(is_moved, _PROGRESS_TIMEOUT_S):
                raise TimeoutError(f"{self._route}: a caller stands still: {count}")

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(_CALL_TIMEOUT_S)


def _sample(way: int) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The arguments of a call of 4 or 320 KiB each way, and its right results."""
    call = fill(_RECORD, _RECORD.build(n=2, c=8, hxw=64 if way == UNARY else 5_000, group=2))
    return {**call.arrays, **call.call.attrs}, call.reference()


# ------------------------------------------------------------------------------------------- restarts


class Fleet:
    """Two servers, each of which can be restarted at its address."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._starts = folder, itertools.count()
        self._stacks = [stack.enter_context(ExitStack()) for _ in _LISTEN]
        self.servers = [self._start(place, address) for place, address in enumerate(_LISTEN)]

    def _start(self, place: int, address: str) -> ServerProcess:
        log_path = self._folder / f"server{next(self._starts)}.log"
        flags = ("--log-level", "warning")
        started = run_server(log_path, *flags, devices=_DEVICES, listen=address, check_end=False)
        return self._stacks[place].enter_context(started)

    def hold(self, place: int, seconds: float) -> threading.Thread:
        """Makes a call that keeps a server from its end until the call's deadline, however it ends."""

        def work() -> None:
            with Client(self.servers[place].address, retry=None) as client, suppress(NpugradError):
                client.group_norm_backward(**_sample(UNARY)[0], label=_HELD, timeout_s=seconds)

        thread = threading.Thread(target=work)
        thread.start()
        return thread

    def restart(self, place: int) -> None:
        """Ends a server and starts it again at its address."""
        old = self.servers[place]
        old.signal()
        code = old.wait(_CALL_TIMEOUT_S)
        if code != 0:
            raise RuntimeError(f"a server ended with {code}:\n{old.log_text()}")
        self._stacks[place].close()
        self.servers[place] = self._start(place, old.address)


def prove(folder: Path, restarts: int, calls: int, held_s: float) -> Count:
    """Restarts two servers in turn, under load.

    Args:
        folder: For the servers' logs.
        restarts: How many, of both servers together.
        calls: The least number of calls of each of the 8 callers between two restarts.
        held_s: Seconds for which a call holds each server that is to end.
    """
    count = Count()
    with ExitStack() as stack:
        fleet = Fleet(folder, stack)
        addresses = [server.address for server in fleet.servers]
        front = stack.enter_context(service_address(*addresses))
        routes = {"a list": addresses, "one address": [front.address]}
        callers = [Callers(route, targets, count) for route, targets in routes.items()]
        for each in callers:
            stack.callback(each.stop)
        for restart in range(restarts):
            for each in callers:
                each.wait(calls)
            held = fleet.hold(restart % 2, held_s)
            for each in callers:
                each.wait(1)  # which is as good as a sign that the held call has arrived
            fleet.restart(restart % 2)
            held.join(_CALL_TIMEOUT_S)
        for each in callers:
            each.wait(calls)
    return count


def main() -> int:
    """Runs it and prints one line, and what was lost; exit code 0 if nothing was."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--restarts", type=int, default=20, help="of both servers together; default 20")
    options.add_argument("--calls", type=int, default=72, help="least calls of each of 8 callers between two")
    options.add_argument("--held", type=float, default=5.0, help="seconds that a call holds each; default 5")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        count = prove(Path(folder), given.restarts, given.calls, given.held)
    for text in count.lost:
        print(text)
    made = "; ".join(f"{name}: {number}" for name, number in sorted(count.calls.items()))
    print(
        f"rolling restarts: {given.restarts} restarts of 2 servers, {count.calls.total()} calls, "
        f"{len(count.lost)} lost; {count.again} sent again, at most {count.tries} tries, the longest call "
        f"{count.longest_s:.1f} s ({made})"
    )
    return 1 if count.lost else 0


if __name__ == "__main__":
    sys.exit(main())
