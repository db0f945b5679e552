"""Divides an arena into regions: first fit by address, adjacent gaps joined on free. Pure bookkeeping."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

ALIGNMENT = 64
"""Every region and every tensor starts at a multiple of this: a cache line, which also suits vector code."""


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
"""The empty region."""


class RegionAllocator:
    """Hands out the lowest region that fits, so that memory touched before is used first.

    Allocation takes time linear in the number of gaps, which is at most the number of live regions plus one.
    """

    def __init__(self, nbytes: int) -> None:
        """Starts with one gap, the whole arena.

        Args:
            nbytes: Size of the arena, rounded down to a multiple of `ALIGNMENT`.
        """
        self.nbytes = nbytes // ALIGNMENT * ALIGNMENT
        self.used_bytes = 0
        self._gaps = [0] if self.nbytes else []
        self._gap_bytes = {0: self.nbytes} if self.nbytes else {}
        self._live: dict[int, int] = {}

    def allocate(self, nbytes: int) -> Region | None:
        """Allocates a region of at least this many bytes; None when no gap is large enough."""
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
        """Frees a region.

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
