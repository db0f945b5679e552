"""Per-call counts as plain numbers, which become Prometheus metrics at each scrape.

Each update of a prometheus_client metric costs a lock, a look-up and a dozen frames, which adds up with many
updates per call. The classes here show the same metrics.

Thread safety: updated on one thread, the event loop's; collected on any. A page may therefore show a call in
one family and not yet in another.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict, deque
from math import inf
from typing import TYPE_CHECKING, TypeAlias

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

Labels: TypeAlias = "tuple[str, ...]"
"""Label values of a metric, in order."""


class _Tally(Collector):
    def __init__(self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        """Starts empty.

        Args:
            name: Name of the metric, without the suffix of its kind.
            text: Its help text.
            labels: Names of its labels.
            registry: The registry that shows it.
        """
        self._name, self._text, self._labels = name, text, tuple(labels)
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """The metric, so that no other can take its names."""
        return self.collect()


class CounterTally(_Tally):
    """A counter, which only grows.

    Attributes:
        counts: Counts by labels; add to them.
    """

    def __init__(self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        """Starts empty; see `_Tally`."""
        self.counts = defaultdict[Labels, float](float)
        super().__init__(name, text, labels, registry)

    def collect(self) -> Iterator[Metric]:
        """The counter as prometheus_client would show it."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, count in list(self.counts.items()):
            family.add_metric(labels, count)
        yield family


class GaugeTally(_Tally):
    """A gauge, which goes up and down.

    Attributes:
        values: Values by labels; add to them and subtract.
    """

    def __init__(self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        """Starts empty; see `_Tally`."""
        self.values = defaultdict[Labels, float](float)
        super().__init__(name, text, labels, registry)

    def collect(self) -> Iterator[Metric]:
        """The gauge as prometheus_client would show it."""
        family = GaugeMetricFamily(self._name, self._text, labels=self._labels)
        for labels, value in list(self.values.items()):
            family.add_metric(labels, value)
        yield family


class SummaryTally(_Tally):
    """Counts and sums of observed amounts: two numbers where a histogram has dozens."""

    def __init__(self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        """Starts empty; see `_Tally`."""
        self._cells = defaultdict[Labels, tuple[int, float]](lambda: (0, 0.0))
        super().__init__(name, text, labels, registry)

    def add(self, labels: Labels, amount: float) -> None:
        """Counts one observation."""
        count, total = self._cells[labels]
        self._cells[labels] = count + 1, total + amount

    def collect(self) -> Iterator[Metric]:
        """The summary as prometheus_client would show it."""
        family = SummaryMetricFamily(self._name, self._text, labels=self._labels)
        for labels, (count, total) in list(self._cells.items()):
            family.add_metric(labels, count, total)
        yield family


class HistogramTally(_Tally):
    """A histogram of observed amounts.

    Attributes:
        observed: Labels and amounts not yet counted; append to it.
    """

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        registry: CollectorRegistry,
        *,
        buckets: Sequence[float],
    ) -> None:
        """Starts empty; see `_Tally`.

        Args:
            name: Name of the metric.
            text: Its help text.
            labels: Names of its labels.
            registry: The registry that shows it.
            buckets: Upper bounds, in ascending order; an unbounded bucket follows.
        """
        self._bounds = (*buckets, inf)
        self._names = [str(floatToGoString(bound)) for bound in self._bounds]  # type: ignore[no-untyped-call]
        # One number per bucket, then the sum.
        self._cells = defaultdict[Labels, list[float]](lambda: [0.0] * (len(self._bounds) + 1))
        self.observed: deque[tuple[Labels, float]] = deque()
        self._lock = threading.Lock()
        super().__init__(name, text, labels, registry)

    def count(self) -> None:
        """Counts the observations; to be called from time to time, even without scrapes."""
        with self._lock:
            while self.observed:
                labels, amount = self.observed.popleft()
                cell = self._cells[labels]
                cell[bisect_left(self._bounds, amount)] += 1
                cell[-1] += amount

    def collect(self) -> Iterator[Metric]:
        """The histogram as prometheus_client would show it."""
        self.count()
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for labels, cell in list(self._cells.items()):
            *counts, total = tuple(cell)
            buckets, below = [], 0.0
            for name, count in zip(self._names, counts, strict=True):
                below += count
                buckets.append((name, below))
            family.add_metric(labels, buckets, total)
        yield family
