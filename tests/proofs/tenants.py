"""Shows that no caller takes another one's share: `make prove-tenants`.

Two callers with certificates of equal weight call one operator over TLS. One keeps a few calls waiting. The
other one asks for more than its share in some way: a fresh label for each call, the highest priority, twenty
times as many calls at once, or all of it. Without tenants it would get nearly everything. The device is
simulated.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.calls import fill
from tests.fix_server import run_server
from tests.fix_tls import Certificates

from npugrad import OPERATORS
from npugrad_client import Client, NpugradError, Tls

CALLERS_COUNT, HOG_FACTOR = 4, 20
WAYS: Mapping[str, tuple[bool, int, int]] = {
    "fresh labels": (True, 0, 2),
    "priority 100": (False, 100, 2),
    "20x calls": (False, 0, HOG_FACTOR),
    "all of it": (True, 100, HOG_FACTOR),
}
"""Whether each call has a label of its own, their priority, and how many there are for one of the other."""
SHARE, LEAST_PART = 0.5, 0.9
"""The other caller's share by weight, and what of it there must be: the rest is chance at the ends."""
_TIMEOUT_S = 60.0
_REFUSED_PAUSE_S = 0.4
"""Between a refusal and the next call of a thread: this is about shares, not about a flood."""
_DEVICES, _MAX_QUEUE_DEPTH = "test:1?ms=40", 32
_RECORD = OPERATORS["group_norm_backward"]
_TENANTS = """
[[tenant]]
name = "hog"
identities = ["hog.example.org"]
[[tenant]]
name = "neighbour"
identities = ["neighbour.example.org"]
"""


@dataclass
class Caller:
    """Threads that call as one tenant, each one call after the other, and what they were told.

    Attributes:
        address: The server's.
        tls: Who it is.
        count: Threads.
        has_labels: Whether each call has a label of its own.
        priority: Of its calls.
        told: How many calls were answered, by reason, while it was counted.
    """

    address: str
    tls: Tls
    count: int
    has_labels: bool = False
    priority: int = 0
    told: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        """Starts to call."""
        self._is_over, self._is_counted = threading.Event(), threading.Event()
        self._changed = threading.Condition()
        self.answered = 0
        self._client = Client(self.address, tls=self.tls, timeout_s=_TIMEOUT_S, retry=None)
        self._threads = [threading.Thread(target=self._call, args=(n,)) for n in range(self.count)]
        for thread in self._threads:
            thread.start()

    def _call(self, thread: int) -> None:
        made = fill(_RECORD, _RECORD.build(n=2, c=8, hxw=64, group=2))
        call: dict[str, Any] = {**made.arrays, **made.call.attrs}
        number = 0
        while not self._is_over.is_set():
            number += 1
            label = f"{thread}-{number}" if self.has_labels else ""
            try:
                self._client.group_norm_backward(**call, label=label, priority=self.priority)
                reason = "OK"
            except NpugradError as error:
                reason = error.reason
            with self._changed:
                self.answered += 1
                self.told[reason] += self._is_counted.is_set()
                self._changed.notify_all()
            if reason != "OK":
                self._is_over.wait(_REFUSED_PAUSE_S)

    def wait(self, answered: int) -> None:
        """Waits until so many calls were answered, well or not.

        Raises:
            TimeoutError: They were not in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.answered >= answered, _TIMEOUT_S):
                raise TimeoutError(f"found {self.answered} answers; expected {answered}")

    def set_counted(self, is_counted: bool) -> None:
        """Begins to count answers, or ends it."""
        (self._is_counted.set if is_counted else self._is_counted.clear)()

    def stop(self) -> None:
        """Ends it."""
        self._is_over.set()
        for thread in self._threads:
            thread.join(_TIMEOUT_S)
        self._client.close()


@dataclass(frozen=True)
class Sharing:
    """What came of it.

    Attributes:
        way: How the hog asks for more.
        hog: What the hog was told, by reason.
        other: What the other caller was told.
        seconds: How long both called.
    """

    way: str
    hog: Counter[str]
    other: Counter[str]
    seconds: float

    @property
    def share(self) -> float:
        """The other caller's part of all good answers."""
        return self.other["OK"] / max(self.other["OK"] + self.hog["OK"], 1)

    @property
    def refused_count(self) -> int:
        """The other caller's calls that were not done."""
        return self.other.total() - self.other["OK"]

    @property
    def is_fair(self) -> bool:
        """Whether the other caller had its whole share."""
        return self.share >= LEAST_PART * SHARE and not self.refused_count

    def line(self) -> str:
        """The counts, for a person."""
        refused = self.hog.total() - self.hog["OK"]
        return (
            f"{self.way}: other caller {self.other['OK']} of {self.other['OK'] + self.hog['OK']} answers "
            f"({self.share / SHARE:.2f} of its share), {self.refused_count} refused; hog {refused} of "
            f"{self.hog.total()} refused"
        )


def prove(address: str, hog_tls: Tls, other_tls: Tls, way: str, seconds: float) -> Sharing:
    """Has both call for so many seconds, once each has calls waiting."""
    has_labels, priority, factor = WAYS[way]
    with ExitStack() as stack:
        hog = Caller(address, hog_tls, factor * CALLERS_COUNT, has_labels, priority)
        stack.callback(hog.stop)
        hog.wait(2 * hog.count)
        other = Caller(address, other_tls, CALLERS_COUNT)
        stack.callback(other.stop)
        other.wait(2 * other.count)
        both = (hog, other)
        begin_s = time.monotonic()
        for caller in both:
            caller.set_counted(True)
        threading.Event().wait(seconds)
        for caller in both:
            caller.set_counted(False)
        took_s = time.monotonic() - begin_s
    return Sharing(way, hog.told, other.told, took_s)


def _tls_of(name: str, certificates: Certificates, folder: Path) -> Tls:
    key, certificate = certificates.named_caller(name)
    paths = folder / f"{name}.key", folder / f"{name}.pem"
    for path, content in zip(paths, (key, certificate), strict=True):
        path.write_bytes(content)
    return Tls(ca=certificates.authority, key=str(paths[0]), certificate=str(paths[1]))


def proofs(folder: Path, ways: Sequence[str], seconds: float) -> Iterator[Sharing]:
    """Each way, one after the other, on one server."""
    certificates = Certificates(folder)
    hog, other = (_tls_of(f"{name}.example.org", certificates, folder) for name in ("hog", "neighbour"))
    (folder / "tenants.toml").write_text(_TENANTS)
    flags = (
        *certificates.mutual_flags,
        *("--tenants", str(folder / "tenants.toml"), "--log-level", "error"),
        *("--max-queue-depth", str(_MAX_QUEUE_DEPTH)),
    )
    seen = certificates.credentials(certificates.named_caller("neighbour.example.org"))
    with run_server(folder / "server.log", *flags, devices=_DEVICES, credentials=seen) as server:
        for way in ways:
            yield prove(server.address, hog, other, way, seconds)


def main() -> int:
    """Runs it and prints one line; exit code 0 if the other caller always had its share."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--seconds", type=float, default=30.0, help="of each way; default 30")
    options.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS], help="all by default")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = list(proofs(Path(folder), given.ways, given.seconds))
    print(f"two tenants of equal weight over TLS, {given.seconds:g} s each (SIMULATED device): ", end="")
    print("; ".join(sharing.line() for sharing in found))
    return 0 if all(sharing.is_fair for sharing in found) else 1


if __name__ == "__main__":
    sys.exit(main())
