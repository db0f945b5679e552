from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from npugrad_server.pool.regions import ALIGNMENT, EMPTY, Region, RegionAllocator, aligned

UNITS = 16


class Allocations(RuleBasedStateMachine):
    """Compares the allocator with a plain map of which unit belongs to whom."""

    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = RegionAllocator(UNITS * ALIGNMENT)
        self.owner: list[Region | None] = [None] * UNITS

    def _units(self, region: Region) -> range:
        return range(region.offset // ALIGNMENT, (region.offset + region.nbytes) // ALIGNMENT)

    @rule(target=live, nbytes=st.integers(0, UNITS * ALIGNMENT + 1))
    def allocate(self, nbytes: int) -> Region:
        wanted = aligned(nbytes) // ALIGNMENT
        starts = (at for at in range(UNITS - wanted + 1) if not any(self.owner[at : at + wanted]))
        expected = next(starts, None)
        region = self.allocator.allocate(nbytes)
        if expected is None:
            assert region is None
            return multiple()  # type: ignore[return-value]
        assert region == (Region(expected * ALIGNMENT, wanted * ALIGNMENT) if wanted else EMPTY)
        for unit in self._units(region):
            self.owner[unit] = region
        return region

    @rule(region=consumes(live))
    def free(self, region: Region) -> None:
        self.allocator.free(region)
        for unit in self._units(region):
            self.owner[unit] = None

    @invariant()
    def used_bytes_are_exact(self) -> None:
        assert self.allocator.used_bytes == ALIGNMENT * sum(unit is not None for unit in self.owner)

    def teardown(self) -> None:
        for region in set(filter(None, self.owner)):
            self.allocator.free(region)
        assert self.allocator.allocate(UNITS * ALIGNMENT) == Region(0, UNITS * ALIGNMENT)


TestAllocations = Allocations.TestCase


@given(st.integers(0, 2**40))
def test_aligned_is_the_next_multiple(nbytes: int) -> None:
    assert aligned(nbytes) % ALIGNMENT == 0
    assert 0 <= aligned(nbytes) - nbytes < ALIGNMENT


def test_freeing_twice_is_refused_and_an_arena_without_bytes_has_room_for_nothing_only() -> None:
    allocator = RegionAllocator(1024)
    region = allocator.allocate(100)
    assert region is not None
    allocator.free(region)
    with pytest.raises(ValueError, match="not a live region"):
        allocator.free(region)
    nothing = RegionAllocator(63)
    assert nothing.allocate(1) is None
    assert nothing.allocate(0) == EMPTY
