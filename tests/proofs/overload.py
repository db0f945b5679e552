"""`make prove-overload`: three tenants send five times what the devices can do, each call with a deadline.

Each has a certificate and a weight, 1 to 2 to 4, and the lighter it is the more it sends. The devices have to
be as busy as without deadlines, each tenant has to get its share, and what is let in has to be done in time.
Then deadlines that cannot be met, which have to be refused as quickly as other calls. Devices are simulated.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Any

from tests.calls import failure_of, sample
from tests.fix_server import ServerProcess, run_server
from tests.proofs.callers import TIMEOUT_S, arguments, server_of_tenants
from tests.proofs.proof import run, told, verdict

from npugrad.v1 import backward_pb2_grpc
from npugrad_client import AsyncClient, NpugradError, Tls
from npugrad_server.pool.run_times import STALE_S

OVERLOAD, DEADLINE_S = 5.0, 2.0
DEVICES, SERVICE_MS = 2, 100
WEIGHTS = {"light": 1.0, "middle": 2.0, "heavy": 4.0}
DEMANDS = {"light": 3 / 6, "middle": 2 / 6, "heavy": 1 / 6}
"""Each tenant's part of what is sent, which is more than its share of the devices for each of them."""
RAMP_S = 1.5 * DEADLINE_S
"""Queues fill and rates are learned for so long; throughput, shares and calls in time count from then on."""
LEAST_THROUGHPUT, LEAST_JAIN, LEAST_IN_TIME, MOST_LATE = 0.95, 0.95, 0.99, 0.01
MOST_SLOWER = 2.0
_INFEASIBLE_S, _LONG_MS = 1.0, 2000
"""A deadline that calls of so many milliseconds cannot meet, and that has time to reach a busy machine."""
_TAUGHT = 5
"""Three calls are needed until a deadline is refused by their time. A call much faster than those before it
starts the count again; with two more, a stall may slow the first ones."""
_PROBE_S = 2.0
"""Seconds, at least, to measure the capacity for, so that a moment without a processor does not halve it."""
_IN_FLIGHT = 4 * DEVICES
"""So many calls at once keep all devices busy."""


_ARGUMENTS = arguments()


@dataclass
class Caller:
    """A tenant that sends whether it is answered or not, and tries once.

    Of each call it keeps when it was sent and ended, by `time.monotonic()`, and how: ``"OK"``, ``"late
    start"`` for one that was let in and refused when its turn came, or a reason.
    """

    name: str
    client: AsyncClient
    calls: list[tuple[float, float, str]] = field(default_factory=list)

    async def call(self, timeout_s: float | None) -> str:
        sent_s, said = time.monotonic(), "OK"
        try:
            await self.client.group_norm_backward(**_ARGUMENTS, timeout_s=timeout_s)
        except NpugradError as error:
            said = "late start" if "when its turn came" in str(error) else error.reason
        self.calls.append((sent_s, time.monotonic(), said))
        return said

    async def send(self, rate: float, end_s: float, seed: int) -> None:
        """Sends so many a second at random times until one by `time.monotonic()`; waits for the answers."""
        rng, tasks, due_s = random.Random(seed), [], time.monotonic()
        while (due_s := due_s + rng.expovariate(rate)) < end_s:
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            tasks.append(asyncio.create_task(self.call(DEADLINE_S)))
        await asyncio.gather(*tasks)


@dataclass(frozen=True)
class Overload:
    """What came of it; `capacity`, `sent` and `throughput` are a second.

    The capacity is that of devices which always have a call waiting, before and after. Late launches are
    calls handed to devices that nobody had in time.
    """

    capacity: float
    sent: float
    throughput: float
    answered: Mapping[str, int]
    told: Counter[str]
    launches: int
    late_launches: int

    @property
    def jain(self) -> float:
        """Jain's index of answers by weight: 1 when each tenant has its share."""
        shares = [self.answered[name] / weight for name, weight in WEIGHTS.items()]
        return sum(shares) ** 2 / len(shares) / max(sum(share**2 for share in shares), 1e-9)

    @property
    def in_time(self) -> float:
        refused = self.told["WOULD_MISS_DEADLINE"] + self.told["QUEUE_FULL"]
        return self.told["OK"] / max(self.told.total() - refused, 1)

    @property
    def late(self) -> float:
        """Part of the launches that nobody had in time."""
        return self.late_launches / max(self.launches, 1)

    @property
    def holds(self) -> bool:
        return (
            self.throughput >= LEAST_THROUGHPUT * self.capacity
            and self.jain >= LEAST_JAIN
            and self.in_time >= LEAST_IN_TIME
            and self.late <= MOST_LATE
        )

    def __str__(self) -> str:
        answered = ", ".join(f"{name} {count}" for name, count in self.answered.items())
        return (
            f"overload: {self.sent:.0f} calls/s sent to {self.capacity:.1f} calls/s: throughput "
            f"{self.throughput / self.capacity:.3f} of it; answered {answered}: Jain {self.jain:.3f}; "
            f"in time {self.in_time:.4f} of what was let in ({told(self.told)}); "
            f"{self.late_launches} of {self.launches} launches late"
        )


@dataclass(frozen=True)
class Refusals:
    """How long callers waited for a refusal, sorted, in seconds, and what infeasible calls were told."""

    ordinary: Sequence[float]
    infeasible: Sequence[float]
    told: Counter[str]

    @property
    def holds(self) -> bool:
        refused = self.told["WOULD_MISS_DEADLINE"] == self.told.total()
        return refused and self.percentile(99) <= MOST_SLOWER

    def percentile(self, percent: int) -> float:
        """That of an infeasible call in terms of an ordinary refusal's."""
        slow, plain = (quantiles(waits, n=100)[percent - 1] for waits in (self.infeasible, self.ordinary))
        return slow / plain

    def __str__(self) -> str:
        p99_ms = quantiles(self.infeasible, n=100)[98] * 1000
        return (
            f"infeasible deadlines: {told(self.told)}; p99 {p99_ms:.1f} ms, {self.percentile(99):.2f} of an "
            f"ordinary refusal's, p50 {self.percentile(50):.2f}"
        )


async def _capacity(caller: Caller, count: int) -> float:
    left = iter(range(count))

    async def work() -> None:
        for _ in left:
            assert await caller.call(None) == "OK"

    await asyncio.gather(*(caller.call(None) for _ in range(_IN_FLIGHT)))  # plans and run times are known
    start_s = time.monotonic()
    await asyncio.gather(*(work() for _ in range(_IN_FLIGHT)))
    return count / (time.monotonic() - start_s)


def _launches(server: ServerProcess) -> int:
    return int(server.metric("npugrad_attempts_total"))


async def _overload(server: ServerProcess, known: Sequence[Tls], seconds: float) -> Overload:
    async with AsyncExitStack() as stack:
        callers = []
        for name, tls in zip(WEIGHTS, known, strict=True):
            client = AsyncClient(server.address, tls=tls, timeout_s=TIMEOUT_S, retry=None)
            callers.append(Caller(name, await stack.enter_async_context(client)))
        probing = int(max(seconds / 8, _PROBE_S) * DEVICES / SERVICE_MS * 1000)
        capacity = await _capacity(callers[-1], probing)
        callers[-1].calls.clear()
        before = _launches(server)
        start_s = time.monotonic()
        end_s, rate = start_s + RAMP_S + seconds, OVERLOAD * capacity
        sending = [
            caller.send(rate * DEMANDS[caller.name], end_s, seed) for seed, caller in enumerate(callers)
        ]
        await asyncio.gather(*sending)
        launches = _launches(server) - before
        calls = {caller.name: [*caller.calls] for caller in callers}
        capacity = (capacity + await _capacity(callers[-1], probing)) / 2
    from_s = start_s + RAMP_S
    answered = {
        name: sum(said == "OK" and from_s <= at < end_s for _, at, said in made)
        for name, made in calls.items()
    }
    every = [call for made in calls.values() for call in made]
    counts = Counter(said for sent_s, _, said in every if sent_s >= from_s)
    late = launches - sum(said == "OK" for _, _, said in every)
    throughput = sum(answered.values()) / seconds
    return Overload(capacity, counts.total() / seconds, throughput, answered, counts, launches, late)


def prove_overload(folder: Path, seconds: float) -> Overload:
    flags, devices = ("--metrics-listen", "127.0.0.1:0"), f"test:{DEVICES}?ms={SERVICE_MS}"
    with server_of_tenants(folder, WEIGHTS, *flags, devices=devices) as (server, known):
        return asyncio.run(_overload(server, known, seconds))


def prove_refusals(folder: Path, count: int) -> Refusals:
    """Makes so many calls of either kind, in turn, on a server that knows how long its calls run."""
    waits: dict[str, list[float]] = {"ordinary": [], "infeasible": []}
    counts = Counter[str]()
    legal, illegal = sample().message(), sample().message()
    illegal.group = 0
    kinds = ("ordinary", illegal, TIMEOUT_S), ("infeasible", legal, _INFEASIBLE_S)
    with (
        run_server(folder / "refusals.log", devices=f"test:1?ms={_LONG_MS}") as server,
        server.channel() as channel,
    ):
        ask = backward_pb2_grpc.BackwardServiceStub(channel).GroupNormBackward
        known_until_s = 0.0
        for _ in range(count):
            if time.monotonic() > known_until_s:  # else one would be let in, to learn
                for _ in range(_TAUGHT):
                    ask(legal, timeout=TIMEOUT_S)
                known_until_s = time.monotonic() + STALE_S / 2
            for kind, message, timeout_s in kinds:
                start_s = time.monotonic()
                failure = failure_of(partial(ask, message, timeout=timeout_s))
                waits[kind].append(time.monotonic() - start_s)
                if kind == "infeasible":
                    counts[failure.error.reason] += 1
    return Refusals(sorted(waits["ordinary"]), sorted(waits["infeasible"]), counts)


def main(given: Any, folder: Path) -> bool:
    overload = prove_overload(folder, given.seconds)
    is_kept = verdict(f"(SIMULATED devices) {overload}", overload.holds)
    refusals = prove_refusals(folder, given.refusals)
    return verdict(refusals, refusals.holds) and is_kept


if __name__ == "__main__":
    run(main, __doc__, seconds=(60.0, "of the overload"), refusals=(1000, "of either kind"))
