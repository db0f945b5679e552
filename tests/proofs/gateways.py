"""`make prove-gateways`: calls through the gateways in ``deploy/gateway``, with each file as it is shipped.

Large calls, calls of 70 s, and one of two servers that ends under 2,000 calls, by SIGTERM or by SIGKILL.
Every result but those of the silent calls is compared with the reference. `--gateway` and `--part` choose.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from tests.calls import sample
from tests.e2e.harness import STREAMED, UNARY
from tests.fix_server import run_server
from tests.proofs.callers import CALLERS, TIMEOUT_S, Call, Load, plain, sdk
from tests.proofs.long_call import hold
from tests.proofs.proof import Table, run, told, verdict
from tests.proofs.proxies import PROXIES, SERVER_FLAGS, Proxy
from tests.proofs.rollout import Size, measured, through

from npugrad.v1 import server_pb2, server_pb2_grpc

DEVICES = "test:1?compute=1"
LARGE_UNARY_HXW = 44_000
"""Makes a message a little below the 4 MiB and 64 KiB that servers take."""
LARGE_STREAM_HXW = 700_000
"""Makes operands of 64 MiB and results of half of that."""


@dataclass(frozen=True)
class GatewaySize:
    """How many large calls of each kind, how long the long ones take, and calls while a server ends."""

    large_calls: int = 4
    long_s: float = 70.0
    rollout: Size = field(default_factory=Size)


@dataclass(frozen=True)
class GatewayRow:
    """What became of calls of one kind; failures by what they say."""

    what: str
    calls: int
    failed: Counter[str]
    longest_s: float


def made(what: str, count: int, *calls: Call) -> GatewayRow:
    with Load(*calls, callers=1) as load:
        load.wait_for(count)
    return GatewayRow(what, load.calls, load.failed, load.longest_s)


def large(proxy: Proxy, size: GatewaySize, folder: Path) -> Iterator[GatewayRow]:
    """Calls as large as a message can be, and streamed ones of 64 MiB; none is tried again."""
    unary, streamed = sample(hxw=LARGE_UNARY_HXW), sample(hxw=LARGE_STREAM_HXW)
    with _entry(proxy, DEVICES, folder) as address:
        with plain((address,), unary) as call:
            yield made("unary, 4 MiB", size.large_calls, call)
        with sdk((address,), streamed, retry=None) as call:
            yield made("streamed, 64 MiB", size.large_calls, call)


def forged(proxy: Proxy, size: GatewaySize, folder: Path) -> Iterator[GatewayRow]:
    """A call that says itself whose it is, for which a server that gets to see it refuses it."""
    with _entry(proxy, DEVICES, folder) as address, grpc.insecure_channel(address) as channel:
        stub, request = server_pb2_grpc.ServerServiceStub(channel), server_pb2.GetServerInfoRequest()
        says = (("x-npugrad-tenant", "vision"),)
        call = partial(stub.GetServerInfo, request, timeout=TIMEOUT_S, metadata=says)
        yield made("with a tenant header", 1, lambda: bool(call().devices))


def long(proxy: Proxy, size: GatewaySize, folder: Path) -> Iterator[GatewayRow]:
    """A unary and a streamed call that say nothing for so long, without retries, at once."""
    with _entry(proxy, f"test:2?ms={size.long_s * 1000:g}", folder) as address, ThreadPoolExecutor(2) as pool:
        found = list(pool.map(partial(hold, address, size.long_s), (UNARY, STREAMED)))
    failed = Counter(each.told for each in found if each.told)
    yield GatewayRow(f"silent for {size.long_s:g} s", 2, failed, max(each.seconds for each in found))


@contextmanager
def _entry(proxy: Proxy, devices: str, folder: Path) -> Iterator[str]:
    folder.mkdir(parents=True)
    with (
        run_server(folder / "server.log", *SERVER_FLAGS, devices=devices) as server,
        proxy.running([server], folder / "proxy") as address,
    ):
        yield address


def ending(number: signal.Signals, proxy: Proxy, size: GatewaySize, folder: Path) -> Iterator[GatewayRow]:
    """One of two servers ends by a signal under the SDK's calls."""
    (found,) = measured(through(proxy), ["SDK"], size.rollout, folder, ending=number)
    failed = found.load.failed
    if not found.is_kept and not failed:
        failed[f"held call {found.held}, exit {found.status}"] += 1
    yield GatewayRow(f"{number.name} of one of two", found.load.calls, failed, found.load.longest_s)


PARTS: dict[str, Callable[[Proxy, GatewaySize, Path], Iterator[GatewayRow]]] = {
    "large": large,
    "forged": forged,
    "long": long,
    "SIGTERM": partial(ending, signal.SIGTERM),
    "SIGKILL": partial(ending, signal.SIGKILL),
}


def main(given: Any, folder: Path) -> bool:
    size, failed = GatewaySize(rollout=Size(calls=given.calls)), 0
    print(f"simulated devices; {CALLERS} callers while a server ends")
    table = Table(gateway=8, calls_that_are=22, calls=6, failed=6, longest_s=9, failures=0)
    for proxy in (proxy for proxy in PROXIES if proxy.name in given.gateway):
        if proxy.missing():
            print(f"{proxy.name}: skipped: {proxy.missing()}", flush=True)
            continue
        for part in given.part:
            for row in PARTS[part](proxy, size, folder / f"{proxy.name}-{part}"):
                lost = row.failed.total()
                table.row(proxy.name, row.what, row.calls, lost, row.longest_s, told(row.failed))
                failed += lost
    return verdict("allowed: 0 failed", not failed)


if __name__ == "__main__":
    run(
        main,
        __doc__,
        gateway=([proxy.name for proxy in PROXIES], "only these"),
        part=(list(PARTS), "only these"),
        calls=(Size.calls, "while a server ends, at least"),
    )
