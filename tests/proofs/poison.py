"""Shows that a caller whose calls kill workers stops nobody else: `make prove-poison`.

A neighbour calls one operator, first alone, then beside a caller whose calls of the same operator kill each
worker that takes them. From the same address, with another signature: at once, after their caller has gone,
or by hanging until their grace is over. As another tenant: with the neighbour's signature; or with a new one
each time, on devices that take a second or a minute to open, or on one device. Every device has to serve
again soon after that caller stops. And workers that are killed from outside, often both at once, cost no call
of several callers with the client's default retries. The devices are simulated.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tests.calls import sample
from tests.e2e.harness import workers_of
from tests.fix_server import ServerProcess, run_server
from tests.proofs.callers import TIMEOUT_S, Load, arguments, sdk, server_of_tenants
from tests.proofs.proof import run, told, verdict

from npugrad_client import Client, NpugradError, Tls

DEADLINE_S = 0.25
GRACE_S = 1.0
"""Setting `hang_grace_s` of the server, below its default: a call that hangs costs its device that long."""


class Way(NamedTuple):
    """How calls kill: their label; whether they come from another tenant than the neighbour's, and have a new
    signature each time; how many devices there are, and how many seconds they take to open."""

    label: str
    is_other: bool = False
    is_fresh: bool = False
    devices: int = 2
    open_s: float = 0.0


WAYS = {
    "crash": Way("crash"),
    "late": Way("late"),
    "hang": Way("hang"),
    "same": Way("crash", is_other=True),
    "fresh": Way("crash", is_other=True, is_fresh=True, open_s=1.0),
    "fresh-slow": Way("crash", is_other=True, is_fresh=True, open_s=60.0),
    "fresh-alone": Way("crash", is_other=True, is_fresh=True, devices=1, open_s=1.0),
}
LEAST_RATIO, MOST_RECOVERY_S, PACE = 0.8, 5.0, 10
_PACE_S = 0.02
"""Between two calls of the caller whose calls kill workers: this is about what they do, not about a flood."""
_DEVICES = "test:{0}?compute=1&ms=20&open_ms={1:.0f}&crash=crash&late=late&hang=hang"


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

    Every device had answered the neighbour `recovery_s` after the last call of the caller that kills. `most`
    are the starts that it may cost.
    """

    way: str
    told: Counter[str]
    deaths: int
    alone: float
    beside: float
    failed: Counter[str]
    recovery_s: float
    most: float

    @property
    def is_contained(self) -> bool:
        kept = self.beside >= LEAST_RATIO * self.alone and self.deaths <= self.most
        return kept and not self.failed and self.recovery_s < MOST_RECOVERY_S + WAYS[self.way].open_s

    def __str__(self) -> str:
        return (
            f"{self.way}: {self.told.total()} calls ({told(self.told)}), {self.deaths} workers died; "
            f"neighbour {self.beside:.1f} of {self.alone:.1f} calls/s ({self.beside / self.alone:.2f}), "
            f"{self.failed.total()} failed; every device serving {self.recovery_s:.1f} s after"
        )


def _poison(client: Client, way: Way, end_s: float, neighbour: Load) -> Counter[str]:
    """Calls until a time, and on until it was refused and the neighbour had an answer, within `TIMEOUT_S`.

    Returns what it was told, by reason.
    """
    found: Counter[str] = Counter()
    pause, sizes, begin_s = threading.Event(), itertools.count(3), time.monotonic()
    made = arguments(sample(n=3))

    def is_over() -> bool:
        late_s = time.monotonic() - end_s
        is_met = (way.is_fresh or found["CIRCUIT_OPEN"] > 0) and bool(first_from_each(neighbour, begin_s))
        return late_s >= 0 and (is_met or late_s > TIMEOUT_S)

    while not is_over():
        if way.is_fresh:
            made = arguments(sample(n=next(sizes)))
        try:
            client.group_norm_backward(**made, label=way.label)
            found["OK"] += 1
        except NpugradError as error:
            found[error.reason] += 1
        pause.wait(_PACE_S)
    return found


def prove(server: ServerProcess, name: str, seconds: float, tls: Sequence[Tls | None]) -> Poisoning:
    """Has a neighbour call alone for so many seconds, then beside a caller whose calls kill workers."""
    way, before = WAYS[name], _restarts(server)
    calls = sdk([server.address], sample(n=3) if name == "same" else None, retry=None, tls=tls[0])
    client = Client(server.address, timeout_s=DEADLINE_S, retry=None, tls=tls[1])
    with client, calls as call, Load(call, callers=1, pace_s=0) as neighbour:
        neighbour.wait(lambda: len(first_from_each(neighbour, 0.0)) == way.devices, TIMEOUT_S)
        start_s = time.monotonic()
        neighbour.wait(lambda: time.monotonic() >= start_s + seconds, TIMEOUT_S + seconds)
        middle_s = time.monotonic()
        found = _poison(client, way, middle_s + seconds, neighbour)
        end_s = time.monotonic()
        is_back = neighbour.wait(
            lambda: len(first_from_each(neighbour, end_s)) == way.devices, TIMEOUT_S + way.open_s
        )
        back = first_from_each(neighbour, end_s)
    alone, beside = (
        sum(not each.told for each in neighbour.between(*times)) / (times[1] - times[0])
        for times in ((start_s, middle_s), (middle_s, end_s))
    )
    recovery_s, deaths = max(back.values()) if is_back else float("inf"), _restarts(server) - before
    openings = (end_s - middle_s) / (PACE * way.open_s) if way.devices == 1 else float("inf")
    return Poisoning(name, found, deaths, alone, beside, neighbour.failed, recovery_s, 1 + openings)


def _restarts(server: ServerProcess) -> int:
    return sum(device.restarts for device in server.info().devices)


def proofs(folder: Path, ways: Sequence[str], seconds: float) -> Iterator[Poisoning]:
    flags = ("--log-level", "error", "--hang-grace-s", f"{GRACE_S:g}")
    for name in ways:
        way, place = WAYS[name], folder / name
        place.mkdir()
        devices = _DEVICES.format(way.devices, 1000 * way.open_s)
        if way.is_other:
            names = {"neighbour": 1.0, "poisoner": 1.0}
            with server_of_tenants(place, names, *flags, devices=devices) as (server, tls):
                yield prove(server, name, seconds, tls)
        else:
            with run_server(place / "server.log", *flags, devices=devices) as server:
                yield prove(server, name, seconds, (None, None))


@dataclass(frozen=True)
class Killed:
    """What came of kills from outside, with what became of the callers' calls."""

    kills: int
    load: Load

    @property
    def is_harmless(self) -> bool:
        return not self.load.failed

    def __str__(self) -> str:
        tries = max((each.answer.attempts for each in self.load.ended if not each.told), default=0)
        return (
            f"{self.kills} workers killed from outside: {self.load.failed.total()} of {self.load.calls} "
            f"calls lost ({told(self.load.failed)}), at most {tries} attempts"
        )


def kill(folder: Path, kills: int, seed: int = 0) -> Killed:
    """Kills so many workers of two devices, often both at once, while callers keep them busy."""
    drawn, done = random.Random(seed), 0
    flags = ("--log-level", "error", "--respawn-backoff-s", "0.05")
    with (
        run_server(folder / "killed.log", *flags, devices="test:2?compute=1&ms=20") as server,
        sdk([server.address]) as call,
        Load(call, callers=8, pace_s=0) as load,
    ):
        load.wait_for(20)
        while done < kills:
            workers = workers_of(server.process.pid)
            for pid in drawn.sample(workers, min(len(workers), drawn.choice([1, 2, 2]))):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    done += 1
            load.wait_for(load.calls + drawn.randint(1, 60))
        load.wait_for(load.calls + 20)
    return Killed(done, load)


def main(given: Any, folder: Path) -> bool:
    harmless = []
    for run_number in range(given.runs):
        place = folder / f"kills{run_number}"
        place.mkdir()
        killed = kill(place, given.kills, run_number)
        harmless.append(verdict(killed, killed.is_harmless))
    found = list(proofs(folder, given.ways, given.seconds))
    line = f"calls that kill workers, {given.seconds:g} s, deadline {DEADLINE_S:g} s (SIMULATED devices): "
    line += "; ".join(map(str, found))
    return verdict(line, all(poisoning.is_contained for poisoning in found)) and all(harmless)


if __name__ == "__main__":
    run(
        main,
        __doc__,
        seconds=(30.0, "of either part"),
        ways=(WAYS, "how workers die"),
        kills=(64, "workers killed from outside in each run"),
        runs=(5, "of kills"),
    )
