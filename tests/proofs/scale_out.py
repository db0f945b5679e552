"""`make prove-scale-out`: a second server behind a name that callers use already.

A name server on loopback gives one address, then two. The SDK keeps its connection until the first server's
age limit ends it, asks for the name again, and has to share its calls soon after. gRPC asks at most every
30 s: the age limit is longer. Devices are simulated.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dnslib import QTYPE, RR, A, DNSRecord
from dnslib.server import BaseResolver, DNSLogger, DNSServer
from tests.fix_server import ServerProcess, run_server
from tests.proofs.callers import Load, sdk
from tests.proofs.proof import run, verdict

AGE_S, WITHIN_S, LEAST_SHARE = 32.0, 10.0, 0.35
_DEVICES = "test:1?ms=2&compute=1"
_FIRST, _SECOND = "127.0.0.1", "127.0.0.2"


@dataclass(frozen=True)
class Found:
    """The new server's share of the calls, and after which time from the age limit it was large enough."""

    age_s: float
    share: float
    after_s: float
    calls: int
    failed: int

    @property
    def ok(self) -> bool:
        return self.after_s <= WITHIN_S and self.failed == 0

    def __str__(self) -> str:
        return (
            f"scale-out by name (SIMULATED devices): the new server had {self.share:.2f} of the calls "
            f"{self.after_s:.1f} s after the age limit of {self.age_s:g} s; "
            f"{self.failed} of {self.calls} calls failed"
        )


class _Names(BaseResolver):  # type: ignore[misc]
    """Answers every name with the same addresses, which may be replaced at any time."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses

    def resolve(self, request: DNSRecord, handler: object) -> DNSRecord:
        reply = request.reply()
        if request.q.qtype == QTYPE.A:
            reply.add_answer(*(RR(request.q.qname, rdata=A(address), ttl=1) for address in self.addresses))
        return reply


@contextmanager
def _name_server(names: _Names) -> Iterator[int]:
    server = DNSServer(names, address=_FIRST, port=0, logger=DNSLogger(logf=lambda _: None))
    server.start_thread()
    try:
        yield server.server.server_address[1]
    finally:
        server.stop()
        server.server.server_close()


def scaled_out(folder: Path, age_s: float = AGE_S) -> Found:
    """One server under load, a second one behind the same name, and the shares that follow."""
    names, flags = _Names(_FIRST), ("--max-connection-age-s", str(age_s), "--streams-per-device", "8")
    with run_server(folder / "first.log", *flags, devices=_DEVICES) as first, _name_server(names) as dns:
        port = first.address.rpartition(":")[2]
        beside = ("--listen", f"{_SECOND}:{port}", *flags)
        with (
            run_server(folder / "second.log", *beside, devices=_DEVICES) as second,
            sdk([f"dns://{_FIRST}:{dns}/npugrad.test:{port}"]) as call,
        ):
            begin_s = time.monotonic()
            with Load(call) as load:
                load.wait_for(100)
                names.addresses = (_FIRST, _SECOND)
                share, now_s = _await_share(first, second, load, begin_s + age_s + WITHIN_S)
    return Found(age_s, share, now_s - begin_s - age_s, load.calls, load.failed.total())


def _await_share(
    first: ServerProcess, second: ServerProcess, load: Load, deadline_s: float
) -> tuple[float, float]:
    """The new server's share once it is large enough, else at the end, and when that was."""
    while True:
        before = (_accepted(first), _accepted(second))
        load.wait_for(load.calls + 100)
        old, new = _accepted(first) - before[0], _accepted(second) - before[1]
        share, now_s = new / (old + new), time.monotonic()
        if share >= LEAST_SHARE or now_s > deadline_s:
            return share, now_s


def _accepted(server: ServerProcess) -> int:
    return int(server.info().accepted_calls)


def main(given: Any, folder: Path) -> bool:
    found = scaled_out(folder)
    return verdict(found, found.ok)


if __name__ == "__main__":
    run(main, __doc__)
