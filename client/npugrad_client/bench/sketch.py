"""Distributions of times: HDR histograms for totals, and sparse buckets for each of many windows."""

from __future__ import annotations

import base64
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import numpy.typing as npt
    from hdrh.histogram import HdrHistogram

LOWEST_US, HIGHEST_US, DIGITS = 1, 86_400_000_000, 3
_GROWTH = math.log(1.01)
"""A bucket of a sketch is 1 % wide."""


def rank_of(percentile: float, count: int) -> int:
    """The rank among `count` values that covers a percentile: rounded up, from 1."""
    return max(math.ceil(count * percentile / 100 - 1e-9), 1)


def count_for(percentile: float) -> int:
    """How many values it takes to tell a percentile: as many as have one beyond it, 100 for the 99th."""
    return math.ceil(round(100 / (100 - percentile), 6)) if percentile < 100 else 1


def known_s(values: Distribution | Sketch, percentile: float) -> float | None:
    """A percentile in seconds, 100 for the maximum; None if there are too few values."""
    return values.percentile_s(percentile) if values.count >= count_for(percentile) else None


class Distribution:
    """An HDR histogram of seconds: 1 us to a day, three digits."""

    def __init__(self, histogram: HdrHistogram | None = None) -> None:
        from hdrh.histogram import HdrHistogram  # here, because it comes with the extra `bench`

        self._histogram = histogram or HdrHistogram(LOWEST_US, HIGHEST_US, DIGITS)

    def add(self, seconds: float) -> None:
        """Counts one value; a value outside the range counts at its end."""
        self._histogram.record_value(min(max(LOWEST_US, int(seconds * 1e6)), HIGHEST_US))

    def merge(self, other: Distribution) -> None:
        """Counts all of the other's values as well."""
        self._histogram.add(other._histogram)

    @property
    def count(self) -> int:
        """How many values there are."""
        return int(self._histogram.get_total_count())

    @property
    def mean_s(self) -> float:
        """Mean in seconds; 0 when empty."""
        if not self.count:
            return 0.0
        total, counts = 0, self._counts()
        for index in np.flatnonzero(counts).tolist():
            least, most = self._bounds_us(index)
            total += int(counts[index]) * (least + (most - least + 1) // 2)
        return total / self.count / 1e6

    def percentile_s(self, percentile: float) -> float:
        """A percentile in seconds, 100 for the maximum; 0 when empty."""
        if not self.count:
            return 0.0
        return self.ranked_s(rank_of(percentile, self.count))

    def ranked_s(self, rank: int) -> float:
        """The value of a rank in seconds, from 1 for the least to `count`."""
        index = int(np.searchsorted(np.cumsum(self._counts()), rank))
        return self._bounds_us(index)[1] / 1e6

    def _counts(self) -> npt.NDArray[np.int64]:
        # The library itself visits 28,000 counts one by one, which takes milliseconds per percentile.
        return np.array(self._histogram.counts, np.int64)

    def _bounds_us(self, index: int) -> tuple[int, int]:
        least = int(self._histogram.get_value_from_index(index))
        return least, int(self._histogram.get_highest_equivalent_value(least))

    def encode(self) -> str:
        """Compressed, in the V2 format that HDR tools of other languages read, as base64."""
        encoded: bytes = self._histogram.encode()
        return encoded.decode("ascii")

    @classmethod
    def decode(cls, text: str) -> Distribution:
        """Reads what `encode` wrote.

        Raises:
            ValueError: The text is something else.
        """
        from hdrh.histogram import HdrHistogram

        try:
            base64.b64decode(text, validate=True)
            return cls(HdrHistogram.decode(text.encode("ascii")))
        except Exception as error:  # the library raises whatever its parts do
            raise ValueError(f"not an HDR histogram: {type(error).__name__}") from None


class Sketch:
    """Counts of times in buckets that are 1 % wide; only those that occur take memory."""

    def __init__(self, counts: Mapping[int, int] | None = None) -> None:
        self.counts: Counter[int] = Counter(counts or {})

    def add(self, seconds: float) -> None:
        """Counts one value."""
        self.counts[bucket(seconds)] += 1

    def merge(self, other: Sketch) -> None:
        """Counts all of the other's values as well."""
        self.counts.update(other.counts)

    @property
    def count(self) -> int:
        """How many values there are."""
        return self.counts.total() if hasattr(self.counts, "total") else sum(self.counts.values())

    def percentile_s(self, percentile: float) -> float:
        """A percentile in seconds within 1 %, 100 for the maximum; 0 when empty or below 1 us."""
        rank, seen = rank_of(percentile, self.count), 0
        for index in sorted(self.counts):
            seen += self.counts[index]
            if seen >= rank:
                return bucket_s(index) if index else 0.0
        return 0.0

    def as_list(self) -> list[list[int]]:
        """Bucket and count, ascending."""
        return [[index, self.counts[index]] for index in sorted(self.counts)]

    @classmethod
    def from_list(cls, pairs: Iterable[Any]) -> Sketch:
        """Reads what `as_list` wrote."""
        return cls({int(index): int(count) for index, count in pairs})


def bucket(seconds: float) -> int:
    """The bucket of a time; times below 1 us are in bucket 0."""
    return round(math.log(max(seconds * 1e6, 1.0)) / _GROWTH)


def bucket_s(index: int) -> float:
    """The middle of a bucket in seconds."""
    return math.exp(index * _GROWTH) / 1e6
