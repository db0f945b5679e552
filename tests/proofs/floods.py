"""`make prove-floods`: callers who mean harm flood a connection while a neighbour makes calls.

Through the gateway, Envoy with ``deploy/gateway/envoy.yaml``, the neighbour loses no call and nobody's memory
grows without bound. A bare server is measured too: it cannot hold off every flood, and docs/security.md
says what it then does.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.benchmarks.resident import status_bytes
from tests.fix_server import run_server
from tests.proofs.attacks import ATTACKS, Attack, Flood
from tests.proofs.callers import KINDS, Load, in_columns
from tests.proofs.proxies import ENVOY, SERVER_FLAGS

DEVICES = "test:1?ms=2&compute=1"
BARE, THROUGH = "bare", "Envoy"
MOST_GROWTH_MIB = 256.0
"""What the server and the gateway may grow by together in a flood of any length."""
_MIB = 2**20


@dataclass(frozen=True)
class FloodSize:
    """How much of it.

    Attributes:
        calls: Calls of the neighbour at least.
        seconds: How long the flood lasts at least.
    """

    calls: int = 400
    seconds: float = 10.0


@dataclass
class FloodRow:
    """What the neighbour noticed of one attack.

    Attributes:
        attack: Which.
        path: Past the gateway or through it.
        calls: The neighbour's calls meanwhile.
        failed: Those that failed, by what they say.
        longest_s: The longest of them.
        server_mib: What the front process had grown by at most.
        gateway_mib: What the gateway had.
        connections: Those of the attackers.
        sent_mib: What they sent.
    """

    attack: str
    path: str
    calls: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0
    server_mib: float = 0.0
    gateway_mib: float = 0.0
    connections: int = 0
    sent_mib: float = 0.0

    @property
    def is_kept(self) -> bool:
        """Whether the gateway held it off; nothing is promised for a bare server."""
        grown = self.server_mib + self.gateway_mib
        return self.path == BARE or (not self.failed and grown <= MOST_GROWTH_MIB)

    def cells(self) -> tuple[str, ...]:
        """As the table shows it."""
        why = "; ".join(f"{count} x {what}" for what, count in self.failed.most_common(3))
        return (
            *(self.attack, self.path, str(self.calls), str(self.failed.total()), f"{self.longest_s:.2f}"),
            *(f"{self.server_mib:.0f}", f"{self.gateway_mib:.0f}", str(self.connections)),
            *(f"{self.sent_mib:.0f}", why),
        )


class _Growth:
    """The most that a process has grown by since it was made."""

    def __init__(self, pid: int) -> None:
        self._pid, self._first = pid, status_bytes("VmRSS", pid)
        self.mib = 0.0

    def look(self) -> None:
        self.mib = max(self.mib, (status_bytes("VmRSS", self._pid) - self._first) / _MIB)


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
    with _entry(path, folder) as (address, pids), KINDS["plain"]((address,)) as call:
        call()  # connects
        grown = [_Growth(pid) for pid in pids]
        end_s = time.monotonic() + size.seconds
        with Flood(attack, address) as flood, Load(call) as load:
            while time.monotonic() < end_s:
                time.sleep(0.1)
                for each in grown:
                    each.look()
            load.wait_for(size.calls)
    mib = [each.mib for each in grown] + [0.0]
    found = FloodRow(attack.name, path, load.calls, load.failed, load.longest_s, mib[0], mib[1])
    found.connections, found.sent_mib = flood.connections, flood.sent_bytes / _MIB
    return found


HEADS = (
    "attack",
    "path",
    "calls",
    "failed",
    "longest s",
    "+server",
    "+gateway",
    "connections",
    "sent",
    "failures",
)
_WIDTHS = (20, 6, 6, 6, 9, 7, 8, 11, 6, 0)


def main() -> int:
    """Command line; 1 where the gateway lost a call or memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [attack.name for attack in ATTACKS]
    parser.add_argument("--attack", action="append", choices=names, help="only these")
    parser.add_argument("--path", action="append", choices=[BARE, THROUGH], help="only these")
    parser.add_argument("--calls", type=int, default=FloodSize.calls, help="of the neighbour, at least")
    parser.add_argument("--seconds", type=float, default=FloodSize.seconds, help="of each flood, at least")
    options = parser.parse_args()
    size, is_kept = FloodSize(options.calls, options.seconds), True
    paths = [path for path in (BARE, THROUGH) if not options.path or path in options.path]
    if THROUGH in paths and ENVOY.missing():
        print(ENVOY.missing())
        return 1
    print(f"{in_columns(HEADS, _WIDTHS)}   (memory and what was sent in MiB)", flush=True)
    with tempfile.TemporaryDirectory(prefix="npugrad-floods-") as folder:
        for attack in ATTACKS:
            for path in paths if not options.attack or attack.name in options.attack else ():
                row = measured(attack, path, size, Path(folder) / f"{attack.name}-{path}")
                print(in_columns(row.cells(), _WIDTHS), flush=True)
                is_kept = is_kept and row.is_kept
    print(f"through the gateway 0 failed, at most {MOST_GROWTH_MIB:g} MiB: {'kept' if is_kept else 'BROKEN'}")
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main())
