"""`make prove-floods`: callers who mean harm flood a connection while a neighbour makes calls.

Through the gateway, Envoy with ``deploy/gateway/envoy.yaml``, the neighbour loses no call and nobody's memory
grows without bound. A bare server is measured too: it cannot hold off every flood, and docs/security.md
says what it then does.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.resident import status_bytes
from tests.fix_server import run_server
from tests.proofs.attacks import ATTACKS, Attack, Flood
from tests.proofs.callers import Load, plain
from tests.proofs.proof import MIB, Table, run, told, verdict
from tests.proofs.proxies import ENVOY, SERVER_FLAGS

DEVICES = "test:1?ms=2&compute=1"
BARE, THROUGH = "bare", "Envoy"
MOST_GROWTH_MIB = 256.0
"""What the server and the gateway may grow by together in a flood of any length."""


@dataclass(frozen=True)
class FloodSize:
    calls: int = 400
    seconds: float = 10.0


@dataclass(frozen=True)
class FloodRow:
    """What a neighbour noticed of an attack, past the gateway or through it, and what that cost."""

    path: str
    load: Load
    server_mib: float
    gateway_mib: float
    connections: int
    sent_mib: float

    @property
    def is_kept(self) -> bool:
        """Whether the gateway held it off; nothing is promised for a bare server."""
        grown = self.server_mib + self.gateway_mib
        return self.path == BARE or (not self.load.failed and grown <= MOST_GROWTH_MIB)


class _Growth:
    def __init__(self, pid: int) -> None:
        self._pid, self._first = pid, status_bytes("VmRSS", pid)
        self.mib = 0.0

    def look(self) -> None:
        self.mib = max(self.mib, (status_bytes("VmRSS", self._pid) - self._first) / MIB)


@contextmanager
def _entry(path: str, folder: Path) -> Iterator[tuple[str, list[int]]]:
    """An address, and the processes behind it: the front process, and the gateway where there is one."""
    folder.mkdir(parents=True)
    with run_server(folder / "server.log", *SERVER_FLAGS, devices=DEVICES, check_end=False) as server:
        if path == BARE:
            yield server.address, [server.process.pid]
            return
        with ENVOY.started([server], folder / "gateway") as (address, pid):
            yield address, [server.process.pid, pid]


def measured(attack: Attack, path: str, size: FloodSize, folder: Path) -> FloodRow:
    """One attack on a server of its own."""
    with _entry(path, folder) as (address, pids), plain((address,)) as call:
        call()  # connects
        grown = [_Growth(pid) for pid in pids]
        end_s = time.monotonic() + size.seconds
        with Flood(attack, address) as flood, Load(call) as load:
            while time.monotonic() < end_s:
                time.sleep(0.1)
                for each in grown:
                    each.look()
            load.wait_for(size.calls)
    server, gateway, *_ = [each.mib for each in grown] + [0.0]
    return FloodRow(path, load, server, gateway, flood.connections, flood.sent_bytes / MIB)


def main(given: Any, folder: Path) -> bool:
    """Prints a table; memory and what was sent are in MiB."""
    size, is_kept = FloodSize(given.calls, given.seconds), True
    if THROUGH in given.path and ENVOY.missing():
        print(ENVOY.missing())
        return False
    table = Table(
        **{"attack": 20, "path": 6, "calls": 6, "failed": 6, "longest_s": 9, "server_grew": 11},
        **{"gateway_grew": 12, "connections": 11, "sent": 6, "failures": 0},
    )
    for attack in (attack for attack in ATTACKS if attack.name in given.attack):
        for path in given.path:
            row = measured(attack, path, size, folder / f"{attack.name}-{path}")
            failed, load = row.load.failed, row.load
            grown = round(row.server_mib), round(row.gateway_mib)
            cells = (*grown, row.connections, round(row.sent_mib), told(failed, 3))
            table.row(attack.name, path, load.calls, failed.total(), load.longest_s, *cells)
            is_kept = is_kept and row.is_kept
    return verdict(f"through the gateway 0 failed, at most {MOST_GROWTH_MIB:g} MiB", is_kept)


if __name__ == "__main__":
    run(
        main,
        __doc__,
        attack=([attack.name for attack in ATTACKS], "only these"),
        path=([BARE, THROUGH], "only these"),
        calls=(FloodSize.calls, "of the neighbour, at least"),
        seconds=(FloodSize.seconds, "of each flood, at least"),
    )
