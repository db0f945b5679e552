"""Shows that a caller whose calls kill workers stops nobody else: `make prove-poison`.

A neighbour calls one operator, first alone, then beside a caller from the same address whose calls of the
same operator, with another signature, kill each worker that takes them: at once, after their caller has gone,
or by hanging until their grace is over. Both devices have to serve again soon after that caller stops. The
devices are simulated.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.calls import sample
from tests.fix_server import ServerProcess, run_server
from tests.proofs.callers import TIMEOUT_S, Load, arguments, sdk
from tests.proofs.proof import run, told, verdict

from npugrad_client import Client, NpugradError

DEADLINE_S = 0.25
GRACE_S = 1.0
"""Setting `hang_grace_s` of the server, below its default: a call that hangs costs its device that long."""
WAYS = ("crash", "late", "hang")
LEAST_RATIO, MOST_RECOVERY_S = 0.8, 5.0
_PACE_S = 0.02
"""Between two calls of the caller whose calls kill workers: this is about what they do, not about a flood."""
_DEVICES = "test:2?compute=1&ms=20&" + "&".join(f"{way}={way}" for way in WAYS)


def first_from_each(neighbour: Load, since_s: float) -> dict[str, float]:
    """Seconds until each device that has answered since then did so first."""
    found: dict[str, float] = {}
    for each in neighbour.between(since_s):
        if not each.told:
            found.setdefault(each.answer.device, each.end_s - since_s)
    return found


@dataclass(frozen=True)
class Poisoning:
    """What came of it; `alone` and `beside` are the neighbour's answers a second.

    Both devices had answered the neighbour `recovery_s` after the last call of the caller that kills.
    """

    way: str
    told: Counter[str]
    deaths: int
    alone: float
    beside: float
    failed: Counter[str]
    recovery_s: float

    @property
    def is_contained(self) -> bool:
        """Whether it was as it has to be."""
        kept = self.beside >= LEAST_RATIO * self.alone
        return kept and not self.failed and self.recovery_s < MOST_RECOVERY_S

    def __str__(self) -> str:
        return (
            f"{self.way}: {self.told.total()} calls ({told(self.told)}), {self.deaths} workers died; "
            f"neighbour {self.beside:.1f} of {self.alone:.1f} calls/s ({self.beside / self.alone:.2f}), "
            f"{self.failed.total()} failed; both devices serving {self.recovery_s:.1f} s after"
        )


def _poison(address: str, way: str, end_s: float, neighbour: Load) -> Counter[str]:
    """Calls until a time, and on until it was refused and the neighbour had an answer, within `TIMEOUT_S`.

    Returns what it was told, by reason.
    """
    found: Counter[str] = Counter()
    call, pause = arguments(sample(n=3)), threading.Event()
    with Client(address, timeout_s=DEADLINE_S, retry=None) as client:
        begin_s = time.monotonic()

        def is_over() -> bool:
            late_s = time.monotonic() - end_s
            is_met = found["CIRCUIT_OPEN"] > 0 and bool(first_from_each(neighbour, begin_s))
            return late_s >= 0 and (is_met or late_s > TIMEOUT_S)

        while not is_over():
            try:
                client.group_norm_backward(**call, label=way)
                found["OK"] += 1
            except NpugradError as error:
                found[error.reason] += 1
            pause.wait(_PACE_S)
    return found


def prove(server: ServerProcess, way: str, seconds: float) -> Poisoning:
    """Has a neighbour call alone for so many seconds, then beside a caller whose calls kill workers."""
    before = _restarts(server)
    with sdk([server.address], retry=None) as call, Load(call, callers=1, pace_s=0) as neighbour:
        neighbour.wait(lambda: len(first_from_each(neighbour, 0.0)) == 2, TIMEOUT_S)
        start_s = time.monotonic()
        neighbour.wait(lambda: time.monotonic() >= start_s + seconds, TIMEOUT_S + seconds)
        middle_s = time.monotonic()
        found = _poison(server.address, way, middle_s + seconds, neighbour)
        end_s = time.monotonic()
        is_back = neighbour.wait(lambda: len(first_from_each(neighbour, end_s)) == 2, TIMEOUT_S)
        back = first_from_each(neighbour, end_s)
    alone, beside = (
        sum(not each.told for each in neighbour.between(*times)) / (times[1] - times[0])
        for times in ((start_s, middle_s), (middle_s, end_s))
    )
    recovery_s, deaths = max(back.values()) if is_back else float("inf"), _restarts(server) - before
    return Poisoning(way, found, deaths, alone, beside, neighbour.failed, recovery_s)


def _restarts(server: ServerProcess) -> int:
    return sum(device.restarts for device in server.info().devices)


def proofs(folder: Path, ways: Sequence[str], seconds: float) -> Iterator[Poisoning]:
    """Each way on a server of its own."""
    flags = ("--log-level", "error", "--hang-grace-s", f"{GRACE_S:g}")
    for way in ways:
        with run_server(folder / f"{way}.log", *flags, devices=_DEVICES) as server:
            yield prove(server, way, seconds)


def main(given: Any, folder: Path) -> bool:
    """Prints one line."""
    found = list(proofs(folder, given.ways, given.seconds))
    line = f"calls that kill workers, {given.seconds:g} s, deadline {DEADLINE_S:g} s (SIMULATED devices): "
    line += "; ".join(map(str, found))
    return verdict(line, all(poisoning.is_contained for poisoning in found))


if __name__ == "__main__":
    run(main, __doc__, seconds=(30.0, "of either part"), ways=(WAYS, "how workers die"))
