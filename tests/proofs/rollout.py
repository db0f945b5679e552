"""What a rollout costs callers: two servers, one of which is told to end while a call of it is held.

Four callers call one after the other, by a plain grpcio stub without retries or by the SDK, along each path
that calls take in a cluster. `make prove-rollout` prints the table and fails where the SDK lost a call, or a
plain caller more than a few; `--path NAME` and `--caller NAME` choose rows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from tests.calls import sample
from tests.e2e.service_address import ServiceAddress, service_address
from tests.fix_server import SERVER_PYTHON, run_server
from tests.proofs.proxies import PROXIES, Proxy

from npugrad.v1 import backward_pb2_grpc
from npugrad_client import Client, NpugradError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.fix_server import ServerProcess

CALLERS, TIMEOUT_S, PACE_S = 4, 60.0, 0.01
ENDPOINT_LAG_S = 0.5
"""How long a cluster sends new connections to a server that is about to end."""
DEVICES = "test:1?ms=2"
MOST_PLAIN = 5
"""Failures of plain callers that are nobody's fault: what reaches a server in the moment in which it ends."""
ROUND_ROBIN = json.dumps(
    {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}}
)


@dataclass(frozen=True)
class Size:
    """How much of it.

    Attributes:
        calls: Calls of a row at least.
        held_s: How long the call is held that the ending server has accepted.
        drain_delay_s: What the servers are started with, where they know the flag.
        left_alone_s: How long calls go on once one of them has gone.
    """

    calls: int = 2000
    held_s: float = 8.0
    drain_delay_s: float = 5.0
    left_alone_s: float = 2.0


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
        settles_s: How long it takes after its first call until it notices how servers are.
    """

    name: str
    missing: Callable[[], str]
    entered: Callable[[Sequence[ServerProcess], Path], Any]
    settles_s: float = 0.0


@contextmanager
def _pinned(servers: Sequence[ServerProcess], folder: Path) -> Iterator[Entry]:
    with service_address(servers[0]) as front:  # all are pinned to the one that ends: the worst case
        yield Entry((front.address,), front)


@contextmanager
def _all_of_them(servers: Sequence[ServerProcess], folder: Path) -> Iterator[Entry]:
    yield Entry(tuple(server.address for server in servers))


def _through(proxy: Proxy) -> Way:
    @contextmanager
    def entered(servers: Sequence[ServerProcess], folder: Path) -> Iterator[Entry]:
        with proxy.running([server.address for server in servers], folder / "proxy") as address:
            yield Entry((address,))

    def missing() -> str:
        return "" if proxy.executable() else f"{proxy.program} is not installed: {proxy.source}"

    return Way(proxy.name, missing, entered, proxy.settles_s)


PATHS = (
    Way("pinned connection", lambda: "", _pinned),
    *(_through(proxy) for proxy in PROXIES),
    Way("client round robin", lambda: "", _all_of_them),
)


# ---------------------------------------------------------------------------------------------- callers


@contextmanager
def _plain(targets: tuple[str, ...]) -> Iterator[Callable[[], object]]:
    """One channel, as a process has, and a stub that tries once."""
    options: list[tuple[str, Any]] = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    target = targets[0]
    if len(targets) > 1:
        target = f"ipv4:{','.join(targets)}"
        options.append(("grpc.service_config", ROUND_ROBIN))
    message = sample().message()
    with grpc.insecure_channel(target, options=options) as channel:
        stub = backward_pb2_grpc.BackwardServiceStub(channel)
        yield lambda: stub.GroupNormBackward(message, timeout=TIMEOUT_S)


@contextmanager
def _sdk(targets: tuple[str, ...]) -> Iterator[Callable[[], object]]:
    """One client as it comes."""
    made = sample()
    given: dict[str, Any] = {**made.arrays, **made.call.attrs}
    with Client(list(targets), timeout_s=TIMEOUT_S) as client:
        yield lambda: client.group_norm_backward(**given)


KINDS = {"plain": _plain, "SDK": _sdk}


def _reason(error: Exception) -> str:
    if isinstance(error, grpc.RpcError):
        return f"{error.code().name}: {error.details()}"[:60]
    return getattr(error, "reason", "") or type(error).__name__


class Load:
    """Callers in threads, each of which calls again when it has its answer, but not at once.

    Attributes:
        failed: Failures by what they say.
        longest_s: The longest that a call took.
    """

    def __init__(self, call: Callable[[], object]) -> None:
        self._call, self.failed, self.longest_s = call, Counter[str](), 0.0
        self._calls, self._changed, self._is_over = 0, threading.Condition(), False
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(CALLERS)]

    def _work(self) -> None:
        while not self._is_over:
            begin_s, told = time.monotonic(), ""
            try:
                self._call()
            except (grpc.RpcError, NpugradError) as error:
                told = _reason(error)
            took_s = time.monotonic() - begin_s
            with self._changed:
                self._calls += 1
                self.longest_s = max(self.longest_s, took_s)
                if told:
                    self.failed[told] += 1
                self._changed.notify_all()
            time.sleep(
                max(0.0, PACE_S - took_s)
            )  # so that failures, which are quick, do not outnumber answers

    @property
    def calls(self) -> int:
        """Calls that have ended."""
        return self._calls

    def wait_for(self, calls: int, timeout_s: float = 300.0) -> None:
        """Waits until so many calls have ended."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._calls >= calls, timeout_s):
                raise TimeoutError(f"found {self._calls} calls after {timeout_s:g} s; expected {calls}")

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        for thread in self._threads:
            thread.join(TIMEOUT_S + 10)


class HeldCall:
    """A streamed call that a server has accepted, and whose operands come when it is let go."""

    def __init__(self, server: ServerProcess) -> None:
        self._go = threading.Event()
        self._channel = server.channel()
        frames = iter([*sample().frames()])

        def held() -> Iterator[Any]:
            yield next(frames)
            yield next(frames)
            self._go.wait(TIMEOUT_S)
            yield from frames

        before = server.info().input_arena_used_bytes
        stub = backward_pb2_grpc.BackwardServiceStub(self._channel)
        self._answer = stub.Execute(held(), timeout=TIMEOUT_S)
        while server.info().input_arena_used_bytes <= before:  # calls of others come and go
            time.sleep(0.01)

    def outcome(self) -> str:
        """Lets it go; ``"answered"``, or what it says."""
        self._go.set()
        try:
            first, *_ = self._answer
            return "answered" if first.WhichOneof("frame") == "header" else "no header"
        except grpc.RpcError as error:
            return _reason(error)
        finally:
            self._channel.close()


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
        return self.failed.total() <= most and self.held == "answered" and self.status == 0

    def cells(self) -> tuple[str, ...]:
        """As the table shows it."""
        if self.skipped:
            return (self.path, self.caller, "", "", "", "", f"skipped: {self.skipped}")
        why = "; ".join(f"{count} x {what}" for what, count in self.failed.most_common(4))
        held = self.held if self.status == 0 else f"{self.held}, exit {self.status}"
        total = str(self.failed.total())
        return (self.path, self.caller, str(self.calls), total, f"{self.longest_s:.2f}", held, why)


@cache
def knows_drain_delay() -> bool:
    """Whether servers of this version can serve on for a while when they are told to end."""
    command = [SERVER_PYTHON, "-m", "npugrad_server", "serve", "--help"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return "--drain-delay-s" in told.stdout


def measured(path: Way, callers: Sequence[str], size: Size, folder: Path) -> list[Row]:
    """A row for each kind of caller, all at once; the first server is told to end in the midst of it."""
    delay = ("--drain-delay-s", str(size.drain_delay_s)) if knows_drain_delay() else ()
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        first, second = _two_servers(stack, folder, *delay, "--streams-per-device", "8")
        entry = stack.enter_context(path.entered((first, second), folder))
        loads = []
        for caller in callers:
            call = stack.enter_context(KINDS[caller](entry.targets))
            call()  # connects
            loads.append(Load(call))
        time.sleep(path.settles_s)
        held = HeldCall(first)
        with ExitStack() as running:
            for load in loads:
                running.enter_context(load).wait_for(size.calls // 4)
            _end(first, second, entry)
            time.sleep(max(0.0, size.held_s - ENDPOINT_LAG_S))
            answer = held.outcome()
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
            run_server(folder / f"{name}.log", *flags, devices=DEVICES, wait=False, check_end=False)
        )
        for name in ("first", "second")
    ]
    for server in servers:
        server.wait_ready()
    return servers


def _end(first: ServerProcess, second: ServerProcess, entry: Entry) -> None:
    """Tells the first server to end, as a cluster does."""
    first.signal()
    time.sleep(ENDPOINT_LAG_S)
    if entry.front is not None:
        entry.front.servers = (second,)


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


def _line(cells: Sequence[str]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, _WIDTHS, strict=True)).rstrip()


def main() -> int:
    """Command line; 1 where a row lost more than is allowed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", action="append", choices=[path.name for path in PATHS], help="only these")
    parser.add_argument("--caller", action="append", choices=list(KINDS), help="only these")
    parser.add_argument("--calls", type=int, default=Size.calls, help="of each row, at least")
    options = parser.parse_args()
    size = Size(calls=options.calls)
    delay = f"--drain-delay-s {size.drain_delay_s:g}" if knows_drain_delay() else "no --drain-delay-s"
    print(
        f"{CALLERS} callers, servers with {delay}; one accepted call held for {size.held_s:g} s", flush=True
    )
    print(_line(HEADS), flush=True)
    is_kept, paths = True, [path for path in PATHS if not options.path or path.name in options.path]
    with tempfile.TemporaryDirectory(prefix="npugrad-rollout-") as folder:
        for row in rows(paths, options.caller or list(KINDS), size, Path(folder)):
            print(_line(row.cells()), flush=True)
            is_kept = is_kept and (bool(row.skipped) or row.is_kept)
    print(f"allowed: SDK 0, plain {MOST_PLAIN} a row: {'kept' if is_kept else 'BROKEN'}")
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main())
