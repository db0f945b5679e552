"""`make prove-gateways`: calls through the gateways in ``deploy/gateway``, with each file as it is shipped.

Large calls, calls of 70 s, and one of two servers that ends under 2,000 calls, by SIGTERM or by SIGKILL.
Every result but those of the silent calls is compared with the reference. `--gateway` and `--part` choose.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc
from tests.calls import sample
from tests.e2e.harness import STREAMED, UNARY
from tests.fix_server import run_server
from tests.proofs.callers import CALLERS, KINDS, TIMEOUT_S, in_columns, reason_of
from tests.proofs.long_call import hold
from tests.proofs.proxies import PROXIES, SERVER_FLAGS, Proxy
from tests.proofs.rollout import Size, measured, through

from npugrad.v1 import server_pb2, server_pb2_grpc
from npugrad_client import NpugradError

DEVICES = "test:1?compute=1"
LARGE_UNARY_HXW = 44_000
"""Makes a message a little below the 4 MiB and 64 KiB that servers take."""
LARGE_STREAM_HXW = 700_000
"""Makes operands of 64 MiB and results of half of that."""


@dataclass(frozen=True)
class GatewaySize:
    """How much of it.

    Attributes:
        large_calls: Large calls of each kind.
        long_s: How long the long calls take.
        rollout: Calls while a server ends, and how it does.
    """

    large_calls: int = 4
    long_s: float = 70.0
    rollout: Size = field(default_factory=Size)


@dataclass
class GatewayRow:
    """What became of calls of one kind.

    Attributes:
        gateway: Through which gateway.
        what: Calls of which kind.
        calls: Calls made.
        failed: Failures by what they say.
        longest_s: The longest call.
    """

    gateway: str
    what: str
    calls: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0

    def note(self, call: Callable[[], bool | str]) -> None:
        """Makes a call, which says whether it is right, or what is wrong."""
        begin_s = time.monotonic()
        try:
            told = call()
        except (grpc.RpcError, NpugradError) as error:
            told = reason_of(error)
        self.longest_s = max(self.longest_s, time.monotonic() - begin_s)
        self.calls += 1
        if told is not True:
            self.failed[told or "a wrong result"] += 1

    def cells(self) -> tuple[str, ...]:
        """As the table shows it."""
        why = "; ".join(f"{count} x {what}" for what, count in self.failed.most_common(4))
        return (
            *(self.gateway, self.what, str(self.calls), str(self.failed.total())),
            *(f"{self.longest_s:.2f}", why),
        )


def large(proxy: Proxy, size: GatewaySize, folder: Path) -> Iterator[GatewayRow]:
    """Calls as large as a message can be, and streamed ones of 64 MiB; none is tried again."""
    unary, streamed = sample(hxw=LARGE_UNARY_HXW), sample(hxw=LARGE_STREAM_HXW)
    with _entry(proxy, DEVICES, folder) as address:
        with KINDS["plain"]((address,), unary) as call:
            yield _made(GatewayRow(proxy.name, "unary, 4 MiB"), call, size.large_calls)
        with KINDS["SDK"]((address,), streamed, retry=None) as call:
            yield _made(GatewayRow(proxy.name, "streamed, 64 MiB"), call, size.large_calls)


def forged(proxy: Proxy, size: GatewaySize, folder: Path) -> Iterator[GatewayRow]:
    """A call that says itself whose it is, for which a server that gets to see it refuses it."""
    with _entry(proxy, DEVICES, folder) as address, grpc.insecure_channel(address) as channel:
        stub, request = server_pb2_grpc.ServerServiceStub(channel), server_pb2.GetServerInfoRequest()
        says = (("x-npugrad-tenant", "vision"),)
        call = partial(stub.GetServerInfo, request, timeout=TIMEOUT_S, metadata=says)
        yield _made(GatewayRow(proxy.name, "with a tenant header"), lambda: bool(call().devices), 1)


def long(proxy: Proxy, size: GatewaySize, folder: Path) -> Iterator[GatewayRow]:
    """A unary and a streamed call that say nothing for so long, without retries, at once."""
    row = GatewayRow(proxy.name, f"silent for {size.long_s:g} s")

    def one(address: str, stream_from_bytes: int) -> None:
        told = hold(address, size.long_s, stream_from_bytes)
        row.note(lambda: told.startswith("answered") or told)

    with _entry(proxy, f"test:2?ms={size.long_s * 1000:g}", folder) as address, ThreadPoolExecutor(2) as pool:
        begin_s = time.monotonic()
        list(pool.map(partial(one, address), (UNARY, STREAMED)))
        row.longest_s = time.monotonic() - begin_s
    yield row


@contextmanager
def _entry(proxy: Proxy, devices: str, folder: Path) -> Iterator[str]:
    folder.mkdir(parents=True)
    with (
        run_server(folder / "server.log", *SERVER_FLAGS, devices=devices) as server,
        proxy.running([server], folder / "proxy") as address,
    ):
        yield address


def _made(row: GatewayRow, call: Callable[[], bool], count: int) -> GatewayRow:
    for _ in range(count):
        row.note(call)
    return row


def ending(number: signal.Signals, proxy: Proxy, size: GatewaySize, folder: Path) -> Iterator[GatewayRow]:
    """One of two servers ends by a signal under the SDK's calls."""
    found = measured(through(proxy), ["SDK"], size.rollout, folder, ending=number)[0]
    row = GatewayRow(proxy.name, f"{number.name} of one of two", found.calls, found.failed, found.longest_s)
    if not found.is_kept and not row.failed:
        row.failed[f"held call {found.held}, exit {found.status}"] += 1
    yield row


PARTS: dict[str, Callable[[Proxy, GatewaySize, Path], Iterator[GatewayRow]]] = {
    "large": large,
    "forged": forged,
    "long": long,
    "SIGTERM": partial(ending, signal.SIGTERM),
    "SIGKILL": partial(ending, signal.SIGKILL),
}
HEADS = ("gateway", "calls that are", "calls", "failed", "longest s", "failures")
_WIDTHS = (8, 22, 6, 6, 9, 0)


def main() -> int:
    """Command line; 1 where a call failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [proxy.name for proxy in PROXIES]
    parser.add_argument("--gateway", action="append", choices=names, help="only these")
    parser.add_argument("--part", action="append", choices=list(PARTS), help="only these")
    parser.add_argument("--calls", type=int, default=Size.calls, help="while a server ends, at least")
    options = parser.parse_args()
    size = GatewaySize(rollout=Size(calls=options.calls))
    print(
        f"simulated devices; {CALLERS} callers while a server ends\n{in_columns(HEADS, _WIDTHS)}", flush=True
    )
    failed = 0
    with tempfile.TemporaryDirectory(prefix="npugrad-gateways-") as folder:
        for proxy in PROXIES:
            if options.gateway and proxy.name not in options.gateway:
                continue
            if proxy.missing():
                print(f"{proxy.name}: skipped: {proxy.missing()}", flush=True)
                continue
            for part in options.part or PARTS:
                for row in PARTS[part](proxy, size, Path(folder) / f"{proxy.name}-{part}"):
                    print(in_columns(row.cells(), _WIDTHS), flush=True)
                    failed += row.failed.total()
    print(f"allowed: 0 failed: {'BROKEN' if failed else 'kept'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
