"""`make prove-model-check`: admission, scheduler, tenants and circuits against a world that does anything.

Random histories on one virtual clock, each event followed by a check of every promise; the last line counts
them. Of a history that breaks one, the shortest part that still does is printed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.server.pool.pool_world import WEIGHTS, Event, PoolWorld

_DEADLY = WEIGHTS | {"die": 16, "ready": 24, "pass_time": 22}
"""In every other world processes die often, and under one call again and again."""


@dataclass
class Checked:
    """What histories showed.

    Attributes:
        events: How many events happened.
        calls: How many calls there were.
        answers: What callers were told instead of results.
        causes: How many workers died, by what was behind it.
        bounded: How often a call was refused for such deaths; none of an innocent.
        failure: What broke, with the shortest history that breaks it; empty when nothing did.
    """

    events: int = 0
    calls: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)
    bounded: int = 0
    failure: str = ""


def history(seed: int, events: int) -> list[Event]:
    rng = random.Random(seed)
    weights = _DEADLY if seed % 2 else WEIGHTS
    names = rng.choices(list(weights), list(weights.values()), k=events)
    return [(name, rng.getrandbits(32)) for name in names]


def broken(seed: int, events: Sequence[Event], found: Checked | None = None) -> str:
    """How a history breaks a promise, and at which event; empty if it breaks none.

    Args:
        seed: Of the world.
        events: The history.
        found: Where to count what happened.
    """
    at, world = -1, None
    try:
        world = PoolWorld(seed)
        happened = 0
        for at, event in enumerate(events):  # noqa: B007 -- read below
            happened += bool(world.apply(event))
        at = len(events)
        world.finish()
    except Exception as error:
        return f"{at} {_where(error)}"
    if found is not None:
        found.events += happened
        found.calls += world.count
        found.answers += world.answers
        found.causes += world.causes
        found.bounded += world.bounded
    return ""


def _where(error: Exception) -> str:
    """An error with the place it comes from: most promises are plain assertions."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({place.name}: {place.line})"


def _kind(told: str) -> str:
    """What broke, without the numbers of events and calls."""
    return "".join(c for c in told if not c.isdigit())


def shortened(seed: int, events: Sequence[Event]) -> list[Event]:
    """The shortest history found that breaks the same promise: parts are left out while it still does."""
    wanted = _kind(broken(seed, events))
    kept, size = list(events), max(1, len(events) // 2)
    while True:
        at, before = 0, len(kept)
        while at < len(kept):
            less = kept[:at] + kept[at + size :]
            if _kind(broken(seed, less)) == wanted:
                kept = less
            else:
                at += size
        if size == 1 and len(kept) == before:
            return kept
        size = max(1, size // 2)


def told(seed: int, events: Sequence[Event]) -> str:
    """What happens in a history, line by line, and how it ends."""
    lines = [f"world {seed}"]
    try:
        world = PoolWorld(seed)
        for event in events:
            lines.append("")
            lines[-1] = f"  {event[0]}: {world.apply(event)}"
        world.finish()
    except Exception as error:
        if lines[-1] == "":
            lines[-1] = f"  {event[0]}"
        lines.append(_where(error))
    return "\n".join(lines)


def checked(events: int, seed: int = 0, length: int = 2000) -> Checked:
    """Random histories until so many events happened, or a promise broke.

    Args:
        events: How many.
        seed: Of the first history.
        length: Events of each history.
    """
    found = Checked()
    while found.events < events:
        drawn = history(seed, min(length, 2 * (events - found.events)))
        if broken(seed, drawn, found):
            found.failure = told(seed, shortened(seed, drawn))
            return found
        seed += 1
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first history")
    options = parser.parse_args()
    begin_s = time.monotonic()
    found = checked(options.events, options.seed)
    took_s = time.monotonic() - begin_s
    if found.failure:
        print(f"after {found.events} events:\n{found.failure}\nmodel check: BROKEN")
        return 1
    refused = ", ".join(f"{count} {reason}" for reason, count in found.answers.most_common())
    causes = ", ".join(f"{count} {cause}" for cause, count in found.causes.most_common())
    print(
        f"model check: {found.events} events, {found.calls} calls in {took_s:.0f} s, told {refused}; deaths: "
        f"{causes}; {found.bounded} calls of guilty tenants refused for deaths, 0 of innocent ones: kept"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
