"""A rig on a CPU: the same processes and messages as on an NPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.worker_forks import forked_workers

from npugrad.products import Product
from npugrad.releases import CannRelease
from npugrad_server.acceptance.report import StepCheck, StepReport
from npugrad_server.acceptance.rig import BenchSettings, Rig
from npugrad_server.acceptance.step import Step

SETTINGS = BenchSettings(
    "cpu:0",
    Product.ATLAS_A2,
    release=CannRelease.parse("9.2.0-beta.2"),
    soak_s=1.0,
    simulated=True,
    start_timeout_s=60,
    arena_bytes=256 << 20,
)


class Seen:
    """Remembers what it is shown of steps."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def started(self, step: Step) -> None:
        self.told.append(step.key)

    def finished(self, report: StepReport) -> None:
        self.told.append(report)

    def checked(self, check: StepCheck) -> None:
        self.told.append(check)

    def progress(self, done: int, total: int, what: str) -> None:
        self.told.append((done, total, what))


def bench_on(device: str, arena_bytes: int = 64 << 20) -> Rig:
    """A small rig on another device."""
    return Rig(BenchSettings(device, Product.ATLAS_A2, start_timeout_s=30, arena_bytes=arena_bytes))


# Not of the package: tests of others run before its last one, and their workers are what they say.
@pytest.fixture(scope="module", autouse=True)
def fast_workers() -> Iterator[None]:
    """Steps start worker after worker: a fork takes a tenth of the time."""
    with forked_workers():
        yield


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """One for all tests of a module, which leave a worker behind that answers, or none."""
    with Rig(SETTINGS) as made:
        yield made


@pytest.fixture
def absent() -> Iterator[Rig]:
    """A rig whose device does not open: these tests run where there is no CANN."""
    with bench_on("npu:0") as made:
        yield made
