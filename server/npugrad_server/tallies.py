"""What is counted for every call, as plain numbers that become Prometheus metrics when somebody looks.

The metrics of prometheus_client cost a lock, a look-up and a dozen frames each time, which adds up where
there are many for every call. What these show is the same.

Thread safety: added to on one thread, the event loop's; collected on any. A page may so show a call in one
family and not yet in another one.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque
from math import inf
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

Labels: TypeAlias = "tuple[str, ...]"
"""Values of the labels of a metric, in their order."""
_T = TypeVar("_T")


class Cells(dict[Labels, _T], Generic[_T]):
    """A number, or some, for each combination of labels that was met; made when it is first asked for.

    Attributes:
        created_s: When each was made, in seconds since the epoch.
    """

    def __init__(self, make: Callable[[], _T]) -> None:
        """Starts with none.

        Args:
            make: Makes what a new combination starts with.
        """
        super().__init__()
        self.created_s: dict[Labels, float] = {}
        self._make = make

    def __missing__(self, labels: Labels) -> _T:
        """A combination that is met for the first time."""
        self.created_s[labels] = time.time()
        self[labels] = made = self._make()
        return made


class _Tally(Collector):
    def __init__(self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        """Starts with none.

        Args:
            name: Name of the metric, without what its kind appends.
            text: What it tells.
            labels: Names of its labels.
            registry: What shows it.
        """
        self._name, self._text, self._labels = name, text, tuple(labels)
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """The metric, whose names no other one may have."""
        return self.collect()


class CounterTally(_Tally):
    """Counts what only grows.

    Attributes:
        counts: By labels; add to them.
    """

    def __init__(self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        """Starts with none; see `_Tally`."""
        self.counts = Cells(float)
        super().__init__(name, text, labels, registry)

    def collect(self) -> Iterator[Metric]:
        """The counter as prometheus_client would show it."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, count in list(self.counts.items()):
            family.add_metric(labels, count, created=self.counts.created_s[labels])
        yield family


class GaugeTally(_Tally):
    """Counts what comes and goes.

    Attributes:
        values: By labels; add to them and take away.
    """

    def __init__(self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        """Starts with none; see `_Tally`."""
        self.values = Cells(float)
        super().__init__(name, text, labels, registry)

    def collect(self) -> Iterator[Metric]:
        """The gauge as prometheus_client would show it."""
        family = GaugeMetricFamily(self._name, self._text, labels=self._labels)
        for labels, value in list(self.values.items()):
            family.add_metric(labels, value)
        yield family


class HistogramTally(_Tally):
    """Counts how large something was.

    Attributes:
        observed: What was not counted yet, labels and how large: append to it.
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
        """Starts with none; see `_Tally`.

        Args:
            name: Name of the metric.
            text: What it tells.
            labels: Names of its labels.
            registry: What shows it.
            buckets: Upper bounds, in rising order; one without a bound follows.
        """
        self._bounds = (*buckets, inf)
        self._names = [str(floatToGoString(bound)) for bound in self._bounds]  # type: ignore[no-untyped-call]
        self._cells = Cells(lambda: [0.0] * (len(self._bounds) + 1))  # one of each bucket, then the sum
        self.observed: deque[tuple[Labels, float]] = deque()
        self._lock = threading.Lock()
        super().__init__(name, text, labels, registry)

    def count(self) -> None:
        """Counts what was observed. Somebody has to from time to time, also if nobody looks."""
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
            named = dict(zip(self._labels, labels, strict=True))
            family.add_sample(f"{self._name}_created", named, self._cells.created_s[labels])
        yield family
