"""Shows that no caller takes another one's share: `make prove-tenants`.

Two callers with certificates of equal weight call one operator over TLS. One keeps a few calls waiting. The
other one asks for more than its share in some way: a fresh label for each call, the highest priority, twenty
times as many calls at once, or all of it. Without tenants it would get nearly everything. The device is
simulated.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.proofs.callers import CALLERS, TIMEOUT_S, Load, arguments, server_of_tenants
from tests.proofs.proof import run, verdict

from npugrad_client import Client, Tls

HOG_FACTOR = 20
WAYS: Mapping[str, tuple[bool, int, int]] = {
    "fresh labels": (True, 0, 2),
    "priority 100": (False, 100, 2),
    "20x calls": (False, 0, HOG_FACTOR),
    "all of it": (True, 100, HOG_FACTOR),
}
"""Whether each call has a label of its own, their priority, and how many there are for one of the other."""
SHARE, LEAST_PART = 0.5, 0.9
"""The other caller's share by weight, and what of it there must be: the rest is chance at the ends."""
_REFUSED_PAUSE_S = 0.4
"""Between a refusal and the next call of a thread: this is about shares, not about a flood."""


def callers(stack: ExitStack, address: str, tls: Tls, *, way: str = "") -> Load:
    """Callers as one tenant; those that ask for more than their share do it in some way."""
    has_labels, priority, factor = WAYS.get(way, (False, 0, 1))
    client = stack.enter_context(Client(address, tls=tls, timeout_s=TIMEOUT_S, retry=None))
    numbers, given = itertools.count(), arguments()

    def call() -> object:
        label = str(next(numbers)) if has_labels else ""
        return client.group_norm_backward(**given, label=label, priority=priority)

    count = factor * CALLERS
    found = Load(call, callers=count, pace_s=0, refused_pause_s=_REFUSED_PAUSE_S)
    stack.enter_context(found).wait_for(2 * count, TIMEOUT_S)
    return found


@dataclass(frozen=True)
class Sharing:
    """What both callers were told, by reason."""

    way: str
    hog: Counter[str]
    other: Counter[str]

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

    def __str__(self) -> str:
        refused = self.hog.total() - self.hog["OK"]
        return (
            f"{self.way}: other caller {self.other['OK']} of {self.other['OK'] + self.hog['OK']} answers "
            f"({self.share / SHARE:.2f} of its share), {self.refused_count} refused; hog {refused} of "
            f"{self.hog.total()} refused"
        )


def prove(address: str, hog_tls: Tls, other_tls: Tls, way: str, seconds: float) -> Sharing:
    """Has both call for so many seconds, once each has calls waiting."""
    with ExitStack() as stack:
        both = callers(stack, address, hog_tls, way=way), callers(stack, address, other_tls)
        begin_s = time.monotonic()
        threading.Event().wait(seconds)
        end_s = time.monotonic()
    hog, other = (Counter(each.told or "OK" for each in load.between(begin_s, end_s)) for load in both)
    return Sharing(way, hog, other)


def proofs(folder: Path, ways: Sequence[str], seconds: float) -> Iterator[Sharing]:
    """Each way, one after the other, on one server."""
    flags, weights = ("--log-level", "error", "--max-queue-depth", "32"), {"hog": 1, "neighbour": 1}
    with server_of_tenants(folder, weights, *flags, devices="test:1?ms=40") as (server, (hog, other)):
        for way in ways:
            yield prove(server.address, hog, other, way, seconds)


def main(given: Any, folder: Path) -> bool:
    """Prints one line."""
    found = list(proofs(folder, given.ways, given.seconds))
    line = f"two tenants of equal weight over TLS, {given.seconds:g} s each (SIMULATED device): "
    return verdict(line + "; ".join(map(str, found)), all(sharing.is_fair for sharing in found))


if __name__ == "__main__":
    run(main, __doc__, seconds=(30.0, "of each way"), ways=([*WAYS], "how the other one asks for more"))
