"""Divides an arena into regions: first fit by address, neighbours joined when freed. Pure bookkeeping."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

ALIGNMENT = 64
"""Every region and every tensor starts at a multiple of this: one cache line, and what vector code likes."""


def aligned(nbytes: int) -> int:
    """The number of bytes rounded up to `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Region:
    """A piece of an arena.

    Attributes:
        offset: First byte.
        nbytes: Length, a multiple of `ALIGNMENT`; 0 for the region of a call that needs no memory.
    """

    offset: int
    nbytes: int


EMPTY = Region(0, 0)
"""The region of nothing."""


class RegionAllocator:
    """Hands out the lowest region that fits, so that memory touched before is used first.

    Finding takes time in the number of gaps, which is at most the number of live regions plus one.
    """

    def __init__(self, nbytes: int) -> None:
        """Starts with one gap, the whole arena.

        Args:
            nbytes: Size of the arena; what exceeds a multiple of `ALIGNMENT` is not used.
        """
        self.nbytes = nbytes // ALIGNMENT * ALIGNMENT
        self.used_bytes = 0
        self._gaps = [0] if self.nbytes else []
        self._gap_bytes = {0: self.nbytes} if self.nbytes else {}
        self._live: dict[int, int] = {}

    def allocate(self, nbytes: int) -> Region | None:
        """Takes a region of at least this many bytes; None when no gap is large enough."""
        if not nbytes:
            return EMPTY
        wanted = -(-nbytes // ALIGNMENT) * ALIGNMENT
        for index, offset in enumerate(self._gaps):
            gap = self._gap_bytes[offset]
            if gap >= wanted:
                del self._gap_bytes[offset]
                if gap == wanted:
                    del self._gaps[index]
                else:
                    self._gaps[index] = offset + wanted
                    self._gap_bytes[offset + wanted] = gap - wanted
                self._live[offset] = wanted
                self.used_bytes += wanted
                return Region(offset, wanted)
        return None

    def free(self, region: Region) -> None:
        """Takes a region back.

        Raises:
            ValueError: It is not a live region of this allocator.
        """
        if not region.nbytes:
            return
        if self._live.get(region.offset) != region.nbytes:
            raise ValueError(f"{region} is not a live region")
        del self._live[region.offset]
        self.used_bytes -= region.nbytes
        start, end = region.offset, region.offset + region.nbytes
        if end in self._gap_bytes:
            del self._gaps[bisect_left(self._gaps, end)]
            end += self._gap_bytes.pop(end)
        index = bisect_left(self._gaps, start)
        if index and self._gaps[index - 1] + self._gap_bytes[self._gaps[index - 1]] == start:
            start = self._gaps[index - 1]
            self._gap_bytes[start] = end - start
        else:
            insort(self._gaps, start)
            self._gap_bytes[start] = end - start
