"""What a rollout costs callers: two servers, one of which gets SIGTERM while it holds a call.

Four callers call one after the other, by a plain grpcio stub without retries or by the SDK, along each path
that calls take in a cluster. `make prove-rollout` prints the table and fails where the SDK lost a call, or a
plain caller more than a few; `--path NAME` and `--caller NAME` choose rows.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.service_address import ServiceAddress, service_address
from tests.fix_server import ServerProcess, run_server
from tests.proofs.callers import CALLERS, KINDS, HeldCall, Load
from tests.proofs.proof import Table, run, told, verdict
from tests.proofs.proxies import PROXIES, SERVER_FLAGS, Proxy

DEVICES = "test:1?ms=2&compute=1"
MOST_PLAIN = 5
"""Failures of plain callers that are nobody's fault: what reaches a server in the moment in which it ends."""
EXPLAINED = {
    "CANCELLED": "reached the server in the moment in which it began to end: grpc itself refuses it",
    "Stream removed": "was on the wire when its connection ended",
    "status: 503": "HAProxy sent it to the server that had ended, before its next check",
    "upstream connect error": "Envoy sent it to the server that had ended, before its next check",
}
"""What lies behind a failure that holds these words."""


@dataclass(frozen=True)
class Size:
    """How much of it.

    A call that the ending server has accepted is held for `held_s`; calls go on for `left_alone_s` once it
    has gone, and new connections still go to it for `endpoint_lag_s` while it is about to end.
    """

    calls: int = 2000
    held_s: float = 8.0
    drain_delay_s: float = 5.0
    left_alone_s: float = 2.0
    endpoint_lag_s: float = 0.5


# ------------------------------------------------------------------------------------------------ paths


@dataclass(frozen=True)
class Entry:
    """Where callers call: one address, or several for callers that choose themselves.

    `front` carries connections, where it has to be told of servers that end.
    """

    targets: tuple[str, ...]
    front: ServiceAddress | None = None


@dataclass(frozen=True)
class Way:
    """A way from callers to servers: its name, what is to be installed for it, and how it is entered."""

    name: str
    missing: Callable[[], str]
    entered: Callable[[Sequence[ServerProcess], Path], Any]


@contextmanager
def _pinned(servers: Sequence[ServerProcess], folder: Path) -> Iterator[Entry]:
    with service_address(servers[0].address) as front:  # all are pinned to the one that ends: the worst case
        yield Entry((front.address,), front)


@contextmanager
def _all_of_them(servers: Sequence[ServerProcess], folder: Path) -> Iterator[Entry]:
    yield Entry(tuple(server.address for server in servers))


def through(proxy: Proxy) -> Way:
    @contextmanager
    def entered(servers: Sequence[ServerProcess], folder: Path) -> Iterator[Entry]:
        with proxy.running(servers, folder / "proxy") as address:
            yield Entry((address,))

    return Way(proxy.name, proxy.missing, entered)


PINNED = "pinned connection"
PATHS = (
    Way(PINNED, lambda: "", _pinned),
    *(through(proxy) for proxy in PROXIES),
    Way("client round robin", lambda: "", _all_of_them),
)


# --------------------------------------------------------------------------------------------- the rows


@dataclass(frozen=True)
class Row:
    """What one way of calling lost, what became of the held call, and how the server ended."""

    path: str
    caller: str
    load: Load
    held: str
    status: int

    @property
    def is_kept(self) -> bool:
        most = 0 if self.caller == "SDK" else MOST_PLAIN
        ends = ("answered", 0), ("", -signal.SIGKILL)
        return self.load.failed.total() <= most and (self.held, self.status) in ends

    def __str__(self) -> str:
        return f"{self.path}, {self.caller}: {dict(self.load.failed)}, {self.held}, exit {self.status}"


def measured(
    path: Way,
    callers: Sequence[str],
    size: Size,
    folder: Path,
    *,
    ending: signal.Signals = signal.SIGTERM,
) -> list[Row]:
    """A row for each kind of caller, all at once; the first server ends in the midst of it, by a signal."""
    flags = (*SERVER_FLAGS, "--drain-delay-s", str(size.drain_delay_s), "--streams-per-device", "8")
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(run_server(folder / name, *flags, devices=DEVICES, check_end=False))
            for name in ("first.log", "second.log")
        )
        entry = stack.enter_context(path.entered((first, second), folder))
        loads = []
        for caller in callers:
            call = stack.enter_context(KINDS[caller](entry.targets))
            call()  # connects
            loads.append(Load(call))
        held = HeldCall(first) if ending is signal.SIGTERM else None
        with ExitStack() as running:
            for load in loads:
                running.enter_context(load).wait_for(size.calls // 4)
            first.signal(ending)
            time.sleep(size.endpoint_lag_s)
            if entry.front is not None:
                entry.front.servers = (second.address,)
            time.sleep(max(0.0, size.held_s - size.endpoint_lag_s))
            answer = held.outcome() if held else ""
            status = first.wait()
            time.sleep(size.left_alone_s)
            for load in loads:
                load.wait_for(size.calls)
        second.stop()
    return [Row(path.name, caller, load, answer, status) for caller, load in zip(callers, loads, strict=True)]


def explained(told: str) -> list[str]:
    """The words of `EXPLAINED` that a failure holds."""
    return [words for words in EXPLAINED if words in told]


def main(given: Any, folder: Path) -> bool:
    size = Size(calls=given.calls)
    delay = f"--drain-delay-s {size.drain_delay_s:g}"
    print(f"{CALLERS} callers, servers with {delay}; one accepted call held for {size.held_s:g} s")
    table = Table(path=27, caller=6, calls=6, failed=6, longest_s=9, held_call=10, failures=0)
    seen, is_kept = set[str](), True
    for path in (path for path in PATHS if path.name in given.path):
        for caller in given.caller:
            if path.missing():
                table.row(path.name, caller, "", "", "", "", f"skipped: {path.missing()}")
                continue
            (row,) = measured(path, [caller], size, folder / f"{path.name}-{caller}")
            held = row.held if row.status == 0 else f"{row.held}, exit {row.status}"
            failed, load = row.load.failed, row.load
            table.row(path.name, caller, load.calls, failed.total(), load.longest_s, held, told(failed))
            seen |= {words for text in failed for words in explained(text)}
            is_kept = is_kept and row.is_kept
    for words, why in EXPLAINED.items():
        if words in seen:
            print(f"{words}: the call {why}.")
    return verdict(f"allowed: SDK 0, plain {MOST_PLAIN} a row", is_kept)


if __name__ == "__main__":
    run(
        main,
        __doc__,
        path=([path.name for path in PATHS], "only these"),
        caller=(list(KINDS), "only these"),
        calls=(Size.calls, "of each row, at least"),
    )
