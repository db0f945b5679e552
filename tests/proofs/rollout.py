"""What a rollout costs callers: two servers, one of which gets SIGTERM while it holds a call.

Four callers call one after the other, by a plain grpcio stub without retries or by the SDK, along each path
that calls take in a cluster. `make prove-rollout` prints the table and fails where the SDK lost a call, or a
plain caller more than a few; `--path NAME` and `--caller NAME` choose rows.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.service_address import ServiceAddress, service_address
from tests.fix_server import ServerProcess, run_server
from tests.proofs.callers import CALLERS, KINDS, HeldCall, Load, in_columns
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

    Attributes:
        calls: Calls of a row at least.
        held_s: How long the call is held that the ending server has accepted.
        drain_delay_s: What the servers are started with.
        left_alone_s: How long calls go on once one of them has gone.
        endpoint_lag_s: How long new connections still go to a server that is about to end.
    """

    calls: int = 2000
    held_s: float = 8.0
    drain_delay_s: float = 5.0
    left_alone_s: float = 2.0
    endpoint_lag_s: float = 0.5


# ------------------------------------------------------------------------------------------------ paths


@dataclass(frozen=True)
class Entry:
    """Where callers call.

    Attributes:
        targets: One address, or several for callers that choose themselves.
        front: What carries connections, where it has to be told of servers that end.
    """

    targets: tuple[str, ...]
    front: ServiceAddress | None = None


@dataclass(frozen=True)
class Way:
    """A way from callers to servers.

    Attributes:
        name: What the table calls it.
        missing: What is to be installed for it; empty where it can be taken.
        entered: The entry in front of running servers, in a folder.
    """

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
    """The way through a gateway."""

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


@dataclass
class Row:
    """What one way of calling lost.

    Attributes:
        path: Along which path.
        caller: By which caller.
        skipped: Why it was not tried; empty where it was.
        calls: Calls made.
        failed: Failures by what they say.
        longest_s: The longest call.
        held: What became of the call that the ending server had accepted.
        status: Exit status of that server.
    """

    path: str
    caller: str
    skipped: str = ""
    calls: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0
    held: str = ""
    status: int = 0

    @property
    def is_kept(self) -> bool:
        """Whether it lost no more than is allowed."""
        most = 0 if self.caller == "SDK" else MOST_PLAIN
        ends = ("answered", 0), ("", -signal.SIGKILL)
        return self.failed.total() <= most and (self.held, self.status) in ends

    def cells(self) -> tuple[str, ...]:
        """As the table shows it."""
        if self.skipped:
            return (self.path, self.caller, "", "", "", "", f"skipped: {self.skipped}")
        why = "; ".join(f"{count} x {what}" for what, count in self.failed.most_common(4))
        held = self.held if self.status == 0 else f"{self.held}, exit {self.status}"
        total = str(self.failed.total())
        return (self.path, self.caller, str(self.calls), total, f"{self.longest_s:.2f}", held, why)


def measured(
    path: Way,
    callers: Sequence[str],
    size: Size,
    folder: Path,
    *,
    ending: signal.Signals = signal.SIGTERM,
) -> list[Row]:
    """A row for each kind of caller, all at once; the first server ends in the midst of it, by a signal."""
    flags = ("--drain-delay-s", str(size.drain_delay_s), "--streams-per-device", "8")
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        first, second = _two_servers(stack, folder, *flags)
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
    return [
        Row(path.name, caller, "", load.calls, load.failed, load.longest_s, answer, status)
        for caller, load in zip(callers, loads, strict=True)
    ]


def _two_servers(stack: ExitStack, folder: Path, *flags: str) -> list[ServerProcess]:
    servers = [
        stack.enter_context(
            run_server(
                folder / f"{name}.log", *SERVER_FLAGS, *flags, devices=DEVICES, wait=False, check_end=False
            )
        )
        for name in ("first", "second")
    ]
    for server in servers:
        server.wait_ready()
    return servers


def explained(told: str) -> list[str]:
    """The words of `EXPLAINED` that a failure holds."""
    return [words for words in EXPLAINED if words in told]


def rows(paths: Sequence[Way], callers: Sequence[str], size: Size, folder: Path) -> Iterator[Row]:
    """Every row, each when it is there."""
    for index, path in enumerate(paths):
        for caller in callers:
            missing = path.missing()
            if missing:
                yield Row(path.name, caller, missing)
            else:
                yield from measured(path, [caller], size, folder / f"{index}-{caller}")


HEADS = ("path", "caller", "calls", "failed", "longest s", "held call", "failures")
_WIDTHS = (27, 6, 6, 6, 9, 10, 0)


def main() -> int:
    """Command line; 1 where a row lost more than is allowed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", action="append", choices=[path.name for path in PATHS], help="only these")
    parser.add_argument("--caller", action="append", choices=list(KINDS), help="only these")
    parser.add_argument("--calls", type=int, default=Size.calls, help="of each row, at least")
    options = parser.parse_args()
    size = Size(calls=options.calls)
    delay = f"--drain-delay-s {size.drain_delay_s:g}"
    print(
        f"{CALLERS} callers, servers with {delay}; one accepted call held for {size.held_s:g} s", flush=True
    )
    print(in_columns(HEADS, _WIDTHS), flush=True)
    seen: set[str] = set()
    is_kept, paths = True, [path for path in PATHS if not options.path or path.name in options.path]
    with tempfile.TemporaryDirectory(prefix="npugrad-rollout-") as folder:
        for row in rows(paths, options.caller or list(KINDS), size, Path(folder)):
            print(in_columns(row.cells(), _WIDTHS), flush=True)
            seen |= {words for told in row.failed for words in explained(told)}
            is_kept = is_kept and (bool(row.skipped) or row.is_kept)
    for words, why in EXPLAINED.items():
        if words in seen:
            print(f"{words}: the call {why}.")
    print(f"allowed: SDK 0, plain {MOST_PLAIN} a row: {'kept' if is_kept else 'BROKEN'}")
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main())
