"""Shows that a caller whose calls kill workers stops nobody else: `make prove-poison`.

A neighbour calls one operator, first alone, then beside a caller from the same address whose calls of the
same operator, with another signature, kill each worker that takes them: at once, after their caller has gone,
or by hanging until their grace is over. Both devices have to serve again soon after that caller stops. The
devices are simulated.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.calls import fill
from tests.fix_server import ServerProcess, run_server

from npugrad import OPERATORS
from npugrad_client import Client, NpugradError

DEADLINE_S = 0.25
GRACE_S = 1.0
"""Setting `hang_grace_s` of the server, below its default: a call that hangs costs its device that long."""
WAYS = ("crash", "late", "hang")
LEAST_RATIO, MOST_RECOVERY_S = 0.8, 5.0
_PACE_S = 0.02
"""Between two calls of the caller whose calls kill workers: this is about what they do, not about a flood."""
_TIMEOUT_S = 60.0
_DEVICES = "test:2?ms=20&" + "&".join(f"{way}={way}" for way in WAYS)
_RECORD = OPERATORS["group_norm_backward"]


def _arguments(samples: int) -> dict[str, Any]:
    made = fill(_RECORD, _RECORD.build(n=samples, c=8, hxw=64, group=2))
    return {**made.arrays, **made.call.attrs}


@dataclass
class Neighbour:
    """Whoever calls beside: a thread that takes down when, and from which device, it had answers.

    Attributes:
        address: The server's.
        answers: Time by `time.monotonic()` and device of each.
        failed: What it was told instead.
    """

    address: str
    answers: list[tuple[float, str]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition, repr=False)

    def __post_init__(self) -> None:
        """Starts to call."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._call)
        self._thread.start()

    def _call(self) -> None:
        call = _arguments(2)
        with Client(self.address, timeout_s=_TIMEOUT_S, retry=None) as client:
            while not self._is_over.is_set():
                try:
                    device = client.group_norm_backward(**call).info.device
                except NpugradError as error:
                    self.failed.append(repr(error))
                else:
                    with self.changed:
                        self.answers.append((time.monotonic(), device))
                        self.changed.notify_all()

    def wait(self, reached: Callable[[], bool], timeout_s: float = _TIMEOUT_S) -> bool:
        """Waits until its answers have come so far; returns whether they did in time."""
        with self.changed:
            return self.changed.wait_for(reached, timeout_s)

    def rate(self, start_s: float, end_s: float) -> float:
        """Answers a second between two times."""
        with self.changed:
            return sum(start_s <= at < end_s for at, _ in self.answers) / (end_s - start_s)

    def first_from_each(self, since_s: float) -> dict[str, float]:
        """Seconds until each device that has answered since then did so first."""
        found: dict[str, float] = {}
        for at, device in self.answers:
            if at >= since_s:
                found.setdefault(device, at - since_s)
        return found

    def stop(self) -> None:
        """Ends it."""
        self._is_over.set()
        self._thread.join(_TIMEOUT_S)


@dataclass(frozen=True)
class Poisoning:
    """What came of it.

    Attributes:
        way: How calls killed their workers.
        told: What their caller was told, by reason.
        deaths: Workers that died.
        alone: The neighbour's answers a second, alone.
        beside: The same, beside that caller.
        failed: The neighbour's calls without an answer.
        recovery_s: Seconds from its last call until both devices had answered the neighbour.
    """

    way: str
    told: Counter[str]
    deaths: int
    alone: float
    beside: float
    failed: Sequence[str]
    recovery_s: float

    @property
    def is_contained(self) -> bool:
        """Whether it was as it has to be."""
        kept = self.beside >= LEAST_RATIO * self.alone
        return kept and not self.failed and self.recovery_s < MOST_RECOVERY_S

    def line(self) -> str:
        """The counts, for a person."""
        told = ", ".join(f"{count} {reason}" for reason, count in self.told.most_common())
        return (
            f"{self.way}: {self.told.total()} calls ({told}), {self.deaths} workers died; neighbour "
            f"{self.beside:.1f} of {self.alone:.1f} calls/s ({self.beside / self.alone:.2f}), "
            f"{len(self.failed)} failed; both devices serving {self.recovery_s:.1f} s after"
        )


def _poison(address: str, way: str, end_s: float, neighbour: Neighbour) -> Counter[str]:
    """Calls until a time, and on until it was refused and the neighbour had an answer, within `_TIMEOUT_S`.

    Returns what it was told, by reason.
    """
    told: Counter[str] = Counter()
    call, pause = _arguments(3), threading.Event()
    with Client(address, timeout_s=DEADLINE_S, retry=None) as client:
        begin_s = time.monotonic()

        def is_over() -> bool:
            late_s = time.monotonic() - end_s
            is_met = told["CIRCUIT_OPEN"] > 0 and bool(neighbour.first_from_each(begin_s))
            return late_s >= 0 and (is_met or late_s > _TIMEOUT_S)

        while not is_over():
            try:
                client.group_norm_backward(**call, label=way)
                told["OK"] += 1
            except NpugradError as error:
                told[error.reason] += 1
            pause.wait(_PACE_S)
    return told


def prove(server: ServerProcess, way: str, seconds: float) -> Poisoning:
    """Has a neighbour call alone for so many seconds, then beside a caller whose calls kill workers."""
    before = _restarts(server)
    neighbour = Neighbour(server.address)
    try:
        neighbour.wait(lambda: len(neighbour.first_from_each(0.0)) == 2)
        start_s = time.monotonic()
        neighbour.wait(lambda: time.monotonic() >= start_s + seconds)
        middle_s = time.monotonic()
        told = _poison(server.address, way, middle_s + seconds, neighbour)
        end_s = time.monotonic()
        is_back = neighbour.wait(lambda: len(neighbour.first_from_each(end_s)) == 2)
        back = neighbour.first_from_each(end_s)
    finally:
        neighbour.stop()
    return Poisoning(
        way,
        told,
        _restarts(server) - before,
        neighbour.rate(start_s, middle_s),
        neighbour.rate(middle_s, end_s),
        neighbour.failed,
        max(back.values()) if is_back else float("inf"),
    )


def _restarts(server: ServerProcess) -> int:
    return sum(device.restarts for device in server.info().devices)


def proofs(folder: Path, ways: Sequence[str], seconds: float) -> Iterator[Poisoning]:
    """Each way on a server of its own."""
    for way in ways:
        with ExitStack() as stack:
            flags = ("--log-level", "error", "--hang-grace-s", f"{GRACE_S:g}")
            server = stack.enter_context(run_server(folder / f"{way}.log", *flags, devices=_DEVICES))
            yield prove(server, way, seconds)


def main() -> int:
    """Runs it and prints one line; exit code 0 if nobody else was stopped."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--seconds", type=float, default=30.0, help="of either part; default 30")
    options.add_argument(
        "--ways", nargs="+", choices=WAYS, default=WAYS, help="how workers die; all by default"
    )
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = list(proofs(Path(folder), given.ways, given.seconds))
    print(
        f"calls that kill workers, {given.seconds:g} s, deadline {DEADLINE_S:g} s (SIMULATED devices): ",
        end="",
    )
    print("; ".join(poisoning.line() for poisoning in found))
    return 0 if all(poisoning.is_contained for poisoning in found) else 1


if __name__ == "__main__":
    sys.exit(main())
