"""Shows that devices which compute wrongly are found, and no others: `make prove-canaries`.

Devices that compute one operator wrongly without a word, from the start or after some calls, by scaling, by
a flipped bit or by results that were never written, have to be quarantined. Devices that are right, by each
rule of coordinates that a kernel may keep and with results that differ in their last bits each time, have to
stay ready. Devices that compute canaries rightly, but not calls, have to be quarantined within 20 calls with
`verify`. Calls with hostile values quarantine no right device, and cost a neighbour no more than others of
their kind. Devices are simulated.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.proofs.proof import run, told, verdict
from tests.server.pool.pools import Job, make_job

from npugrad import OPERATORS, Product
from npugrad.coordinates import CoordinateRule
from npugrad.errors import NpugradError
from npugrad_server.devices import parse_device
from npugrad_server.pool import DevicePool, DeviceState, DeviceStatus, PoolObserver, PoolSettings

DEVICES, CANARIES, SPARING, HOSTILE = 200, 20_000, 18, 20_000
"""Counts of the whole proof."""
HOWS = ("scale", "bit", "stale")
ULPS = 32
"""Right results are off by up to so many units in the last place of float32, another number each time."""
_AT_ONCE = 4
_LATEST_CALL = 30
"""Up to which call a device is right that grows wrong."""
_LIMIT_S = 120.0
"""Seconds for some devices to open and be found, or for the next round of canaries."""
_NEVER_S = 3600.0
VERIFIED, ORDINARY, LEAST_RATIO = 20, 1000, 0.9


class Watch(PoolObserver):
    """Counts canaries by result, and keeps the states that each device was in."""

    def __init__(self) -> None:
        self.canaries: Counter[str] = Counter()
        self.states: dict[str, set[DeviceState]] = {}
        self.changed = asyncio.Event()
        self.doubts = 0

    def results_compared(self, device: str, kind: str, result: str) -> None:
        self.doubts += result == "tolerance"

    def canaries_run(self, device: str, result: str, count: int) -> None:
        self.canaries[result] += count
        self.changed.set()

    def device_changed(self, status: DeviceStatus) -> None:
        self.states.setdefault(status.name, set()).add(status.state)
        self.changed.set()

    def quarantined(self) -> set[str]:
        return {name for name, states in self.states.items() if DeviceState.QUARANTINED in states}


@dataclass(frozen=True)
class Found:
    """What came of it.

    Of the devices that compute wrongly `served` were ready before they were found, and `missed` were not
    found. `alarms` are canaries of right devices that were said to be wrong; `lost` are right devices in
    quarantine.
    """

    devices: int
    missed: Sequence[str]
    served: int
    right: int
    alarms: int
    errors: int
    lost: int

    @property
    def is_good(self) -> bool:
        return not (self.missed or self.alarms or self.errors or self.lost)

    def __str__(self) -> str:
        return (
            f"simulated devices: {self.devices - len(self.missed)} of {self.devices} that compute wrongly "
            f"quarantined, {self.served} of them after they had been ready; {self.alarms} false alarms and "
            f"{self.errors} errors in {self.right} canaries of right devices, {self.lost} quarantined"
        )


def _settings(devices: Sequence[str], interval_s: float) -> PoolSettings:
    return PoolSettings(
        devices=tuple(devices),
        product=Product.ATLAS_A2,
        input_arena_bytes=1 << 20,
        output_arena_bytes=1 << 20,
        prefault_bytes=0,
        max_queue_depth=64,
        streams_per_device=1,
        hang_grace_s=10,
        worker_start_timeout_s=_LIMIT_S,
        respawn_backoff_s=_NEVER_S,  # one that was found is not tried again here
        respawn_backoff_max_s=_NEVER_S,
        max_respawns=3,
        canary_interval_s=interval_s,
    )


def wrong_devices(count: int, seed: int) -> list[str]:
    """Names of devices that are wrong: of each operator in turn, in each way, some from the start."""
    drawn = random.Random(seed)
    operators = list(OPERATORS)
    found = []
    for index in range(count):
        right = 0 if index % 2 else drawn.randrange(1, _LATEST_CALL)
        how = HOWS[index // len(operators) % len(HOWS)]
        operator = operators[index % len(operators)]
        found.append(f"test:{index}?compute=1&wrong={operator}&how={how}&right={right}")
    return found


def right_devices() -> list[str]:
    """Names of devices that are right, each by another rule of coordinates."""
    rules = [rule.value for rule in CoordinateRule]
    return [f"test:{i}?compute=1&rule={rule}&ulps={ULPS}" for i, rule in enumerate(rules)]


async def _find(devices: Sequence[str]) -> Watch:
    """Opens devices that are wrong; returns once all were found, or time is up."""
    watch = Watch()
    pool = await DevicePool.open(_settings(devices, 0.01), watch)
    end_s = time.monotonic() + _LIMIT_S
    try:
        while len(watch.quarantined()) < len(devices) and time.monotonic() < end_s:
            await _next(watch, end_s)
    finally:
        await pool.close()
    return watch


async def _trust(count: int) -> Watch:
    watch = Watch()
    pool = await DevicePool.open(_settings(right_devices(), 0.001), watch)
    try:
        done = -1
        while done < watch.canaries.total() < count and not watch.quarantined():
            done = watch.canaries.total()
            end_s = time.monotonic() + _LIMIT_S
            while watch.canaries.total() == done and time.monotonic() < end_s:
                await _next(watch, end_s)
    finally:
        await pool.close()
    return watch


async def _next(watch: Watch, end_s: float) -> None:
    watch.changed.clear()
    try:
        await asyncio.wait_for(watch.changed.wait(), max(0.0, end_s - time.monotonic()))
    except asyncio.TimeoutError:
        return


@dataclass(frozen=True)
class Judged:
    """What came of calls with `verify`.

    Of `sparing` devices that compute only canaries rightly `missed` were not quarantined. `told` is what
    hostile calls on right devices were told, `doubts` how many were put down to the tolerance, `lost` how
    many devices were quarantined. A neighbour had `before` answers a second next to calls with ordinary
    values, and `beside` next to these.
    """

    sparing: int
    missed: int
    told: Counter[str]
    doubts: int
    lost: int
    before: float
    beside: float

    @property
    def is_good(self) -> bool:
        return not (self.missed or self.lost) and self.beside >= LEAST_RATIO * self.before

    def __str__(self) -> str:
        return (
            f"verified calls: {self.sparing - self.missed} of {self.sparing} devices that spare canaries "
            f"quarantined within {VERIFIED} wrong answers; {self.told.total()} hostile calls "
            f"({told(self.told)}), {self.doubts} put down to the tolerance, {self.lost} right devices "
            f"quarantined; neighbour {self.beside:.1f} of {self.before:.1f} calls/s next to ordinary ones "
            f"({self.beside / max(self.before, 1e-9):.2f})"
        )


def _call(operator: str, seed: int, layout: Callable[[Any], Any] | None = None) -> Job:
    workloads = OPERATORS[operator].workloads
    sizes = workloads.canary or workloads.uneven
    return make_job(operator=operator, seed=seed, verify=True, layout=layout, **sizes)


async def _answer(job: Job, pool: DevicePool) -> str:
    try:
        await job.run(pool)
    except NpugradError as error:
        return error.reason
    return "OK"


async def _spare(name: str) -> bool:
    """Whether a device that is wrong in calls alone is quarantined for its wrong answers."""
    watch, operator = Watch(), parse_device(name).options["wrong"]
    pool = await DevicePool.open(_settings([name], _NEVER_S), watch)
    try:
        await pool.wait_ready(_LIMIT_S)
        for number in range(VERIFIED + _LATEST_CALL):
            if not watch.quarantined():
                await _answer(_call(operator, number), pool)
    finally:
        await pool.close()
    return bool(watch.quarantined())


def _hostile(array: npt.NDArray[Any], drawn: random.Random) -> npt.NDArray[Any]:
    """An operand, as often as not with other values: huge, tiny, shifted, all alike, zero or mixed up."""
    if array.dtype.kind in "iub" or not array.size or drawn.random() < 0.5:
        return array
    values, rng = array.astype(np.float64), np.random.default_rng(drawn.getrandbits(32))
    with np.errstate(all="ignore"):
        changed = drawn.choice(
            [
                values * 10.0 ** drawn.randint(-6, 4),
                values + 10.0 ** drawn.randint(1, 4),
                np.full_like(values, values.flat[0]),
                np.zeros_like(values),
                rng.permuted(values.reshape(-1)).reshape(values.shape),
            ]
        )
        return np.asarray(changed.astype(array.dtype))


async def _attack(calls: int, seed: int) -> tuple[Counter[str], Watch, float, float]:
    """Makes so many ordinary calls on right devices, then as many hostile ones, next to a neighbour.

    Returns what hostile ones were told, what was seen, and the neighbour's answers a second in either part.
    """
    watch, drawn, answers = Watch(), random.Random(seed), Counter[str]()
    pool = await DevicePool.open(_settings([f"test:{i}?compute=1&ms=20" for i in range(2)], 60.0), watch)
    count = 0

    async def call_on() -> None:
        nonlocal count
        while True:
            await make_job(seed=count).run(pool)
            count += 1

    rates = []
    try:
        await pool.wait_ready(_LIMIT_S)
        neighbour = asyncio.create_task(call_on())
        parts = (None, min(calls, ORDINARY)), (partial(_hostile, drawn=drawn), calls)
        for layout, most in parts:
            start_s, before = time.monotonic(), count
            answers.clear()
            for number in range(most):
                job = _call(drawn.choice(list(OPERATORS)), number, layout)
                answers[await _answer(job, pool)] += 1
            rates.append((count - before) / (time.monotonic() - start_s))
        neighbour.cancel()
    finally:
        await pool.close()
    return answers, watch, rates[0], rates[1]


def judge(sparing: int, calls: int, seed: int = 0) -> Judged:
    """Has so many devices that spare canaries verified, and so many hostile calls on right ones."""
    names = [f"{name}&spares=1" for name in wrong_devices(sparing, seed)]
    missed = sum(not asyncio.run(_spare(name)) for name in names)
    answers, watch, before, beside = asyncio.run(_attack(calls, seed))
    return Judged(sparing, missed, answers, watch.doubts, len(watch.quarantined()), before, beside)


def prove(devices: int, canaries: int, seed: int = 0) -> Found:
    names, missed, served = wrong_devices(devices, seed), [], 0
    for start in range(0, devices, _AT_ONCE):
        batch = names[start : start + _AT_ONCE]
        watch = asyncio.run(_find(batch))
        missed += [name for name in batch if name.split("?")[0] not in watch.quarantined()]
        served += sum(DeviceState.READY in states for states in watch.states.values())
    right = asyncio.run(_trust(canaries))
    return Found(
        devices,
        missed,
        served,
        right.canaries.total(),
        right.canaries["mismatch"],
        right.canaries["error"],
        len(right.quarantined()),
    )


def main(given: Any, folder: Path) -> bool:
    logging.disable()  # of what is wrong with each wrong device
    found = prove(given.devices, given.canaries, given.seed)
    for name in found.missed:
        print(f"not found: {name}")
    judged = judge(given.sparing, given.hostile, given.seed)
    return verdict(found, found.is_good) & verdict(judged, judged.is_good)


if __name__ == "__main__":
    run(
        main,
        __doc__,
        devices=(DEVICES, "devices that compute wrongly"),
        canaries=(CANARIES, "canaries of devices that are right"),
        sparing=(SPARING, "devices that are wrong in calls alone"),
        hostile=(HOSTILE, "calls with hostile values"),
        seed=(0, "of what is drawn"),
    )
