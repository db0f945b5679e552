"""A rig on a CPU: the same processes and messages as on an NPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from npugrad.products import Product
from npugrad.releases import CannRelease
from npugrad_server.acceptance.rig import BenchSettings, Rig

SETTINGS = BenchSettings(
    "cpu:0",
    Product.ATLAS_A2,
    release=CannRelease.parse("9.2.0-beta.2"),
    soak_s=1.0,
    simulated=True,
    start_timeout_s=60,
    arena_bytes=256 << 20,
)


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """One for all tests of a module, which leave a worker behind that answers, or none."""
    with Rig(SETTINGS) as made:
        yield made


@pytest.fixture
def make_bench() -> Iterator[Callable[[str], Rig]]:
    """Gives a function that opens a rig on another device, for this test alone."""
    made: list[Rig] = []

    def make(device: str) -> Rig:
        made.append(Rig(BenchSettings(device, Product.ATLAS_A2, start_timeout_s=30, arena_bytes=64 << 20)))
        return made[-1]

    yield make
    for one in made:
        one.close()
