"""Shows that canaries find devices which compute wrongly, and no others: `make prove-canaries`.

Devices that compute one operator wrongly without a word, from the start or after some calls, by scaling, by
a flipped bit or by results that were never written, have to be quarantined. Devices that are right, by each
rule of coordinates that a kernel may keep and with results that differ in their last bits each time, have to
stay ready. All of them are simulated.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.proofs.proof import run, verdict

from npugrad import OPERATORS, Product
from npugrad.coordinates import CoordinateRule
from npugrad_server.pool import DevicePool, DeviceState, DeviceStatus, PoolObserver, PoolSettings

DEVICES, CANARIES = 200, 20_000
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


class Watch(PoolObserver):
    """Counts canaries by result, and keeps the states that each device was in."""

    def __init__(self) -> None:
        """Has seen nothing."""
        self.canaries: Counter[str] = Counter()
        self.states: dict[str, set[DeviceState]] = {}
        self.changed = asyncio.Event()

    def canaries_run(self, device: str, result: str, count: int) -> None:
        """A device has run canaries."""
        self.canaries[result] += count
        self.changed.set()

    def device_changed(self, status: DeviceStatus) -> None:
        """A device went into another state."""
        self.states.setdefault(status.name, set()).add(status.state)
        self.changed.set()

    def quarantined(self) -> set[str]:
        """Devices that were quarantined."""
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
        """Whether it was as it has to be."""
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
    """Has devices that are right run so many canaries."""
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


def prove(devices: int, canaries: int, seed: int = 0) -> Found:
    """Runs so many wrong devices, and so many canaries of right ones."""
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
    """Prints one line, and what was not found."""
    logging.disable()  # of what is wrong with each wrong device
    found = prove(given.devices, given.canaries, given.seed)
    for name in found.missed:
        print(f"not found: {name}")
    return verdict(found, found.is_good)


if __name__ == "__main__":
    run(
        main,
        __doc__,
        devices=(DEVICES, "devices that compute wrongly"),
        canaries=(CANARIES, "canaries of devices that are right"),
        seed=(0, "of what is drawn"),
    )
