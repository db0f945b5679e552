"""Shows that rolling restarts lose no call: `make prove-restarts`.

Two servers are restarted in turn, one after the other, by SIGTERM, while callers keep both busy: from threads
and from an event loop, unary and streamed, with both addresses in one client and through one address that
spreads connections, as a Service of Kubernetes does. A call that was accepted before holds each server for
some seconds. A call of the callers is lost when it raises or its result is wrong.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.calls import sample
from tests.client.both import Looped, Make
from tests.e2e.harness import STREAMED, UNARY
from tests.e2e.service_address import service_address
from tests.fix_server import ServerProcess, run_server
from tests.proofs.callers import PACE_S, Load, arguments, sdk
from tests.proofs.proof import run

from npugrad_client import Client, NpugradError

_CALL_TIMEOUT_S = 120.0
_HELD = "held"
"""Label of calls that hang until their deadline, while the server drains."""
_DEVICES = f"test:2?compute=1&hang={_HELD}"
_LISTEN = "127.0.0.11:0", "127.0.0.12:0"
"""Where no other test listens: an address is free for seconds while its server ends and starts again."""
_HXW = {UNARY: 64, STREAMED: 5_000}
"""Makes calls of 4 and of 320 KiB each way."""


@dataclass(frozen=True)
class Restarted:
    restarts: int
    loads: Mapping[str, Load]

    @property
    def lost(self) -> list[str]:
        return [f"{name}: {why} x {n}" for name, load in self.loads.items() for why, n in load.failed.items()]

    @property
    def tries(self) -> list[int]:
        return [each.answer.tries for load in self.loads.values() for each in load.ended if not each.told]

    def __str__(self) -> str:
        made = "; ".join(f"{name}: {load.calls}" for name, load in sorted(self.loads.items()))
        tries, loads = self.tries, self.loads.values()
        return (
            f"rolling restarts: {self.restarts} restarts of 2 servers, {sum(load.calls for load in loads)} "
            f"calls, {sum(load.failed.total() for load in loads)} lost; {sum(n > 1 for n in tries)} sent "
            f"again, at most {max(tries)} tries, the longest call "
            f"{max(load.longest_s for load in loads):.1f} s ({made})"
        )


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
                client.group_norm_backward(**arguments(), label=_HELD, timeout_s=seconds)

        thread = threading.Thread(target=work)
        thread.start()
        return thread

    def restart(self, place: int) -> None:
        old = self.servers[place]
        old.signal()
        code = old.wait(_CALL_TIMEOUT_S)
        if code != 0:
            raise RuntimeError(f"a server ended with {code}:\n{old.log_text()}")
        self._stacks[place].close()
        self.servers[place] = self._start(place, old.address)


def _wait(loads: Iterable[Load], calls: int) -> None:
    for load, before in [(load, load.calls) for load in loads]:
        load.wait_for(before + calls)


def prove(folder: Path, restarts: int, calls: int, held_s: float, pace_s: float = PACE_S) -> Restarted:
    """Restarts two servers in turn, under load.

    Each of the 8 callers makes so many calls between two restarts at least; a call holds each server that is
    to end for so long.
    """
    loads: dict[str, Load] = {}
    with ExitStack() as stack:
        fleet = Fleet(folder, stack)
        addresses = [server.address for server in fleet.servers]
        front = stack.enter_context(service_address(*addresses))
        routes = {"a list": addresses, "one address": [front.address]}
        kinds: dict[str, Make] = {"threads": Client, "asyncio": Looped}
        ways = {"unary": UNARY, "streamed": STREAMED}
        for route, kind, way in itertools.product(routes, kinds, ways):
            made = sample(n=2, c=8, hxw=_HXW[ways[way]], group=2)
            call = stack.enter_context(
                sdk(routes[route], made, kinds[kind], timeout_s=_CALL_TIMEOUT_S, stream_from_bytes=ways[way])
            )
            load = loads[f"{route}, {kind}, {way}"] = Load(call, callers=1, pace_s=pace_s)
            stack.enter_context(load)
        for restart in range(restarts):
            _wait(loads.values(), calls)
            held = fleet.hold(restart % 2, held_s)
            _wait(loads.values(), 1)  # which is as good as a sign that the held call has arrived
            fleet.restart(restart % 2)
            held.join(_CALL_TIMEOUT_S)
        _wait(loads.values(), calls)
    return Restarted(restarts, loads)


def main(given: Any, folder: Path) -> bool:
    found = prove(folder, given.restarts, given.calls, given.held)
    for text in found.lost:
        print(text)
    print(found)
    return not found.lost


if __name__ == "__main__":
    run(
        main,
        __doc__,
        restarts=(20, "of both servers together"),
        calls=(72, "least calls of each of 8 callers between two"),
        held=(5.0, "seconds that a call holds each server that is to end"),
    )
