"""Metrics of the front memory, for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

    from npugrad_server.rpc.front_memory import FrontMemory

_USED = (
    "Memory outside the arenas used by messages and replies. A message still arriving counts as one of the "
    "largest size allowed; a reply counts twice until the caller has taken it."
)


class FrontCollector(Collector):
    """Reads the figures at each scrape; single numbers, which may be read on any thread."""

    def __init__(self, *memories: FrontMemory) -> None:
        self._memories = memories

    def collect(self) -> Iterator[Metric]:
        """The current figures."""
        memories = self._memories
        used = GaugeMetricFamily("npugrad_front_memory_used_bytes", _USED, labels=("what",))
        used.add_metric(("requests",), sum(memory.requests_bytes for memory in memories))
        used.add_metric(("replies",), sum(memory.replies_bytes for memory in memories))
        yield used
        text = "Memory outside the arenas available to messages and replies."
        limit = sum(memory.limits.memory_bytes for memory in memories)
        yield GaugeMetricFamily("npugrad_front_memory_bytes", text, limit)
        for name, text, counts in (
            (
                "npugrad_front_refused_calls",
                "Calls refused because front memory or call slots ran out, by what they needed.",
                [memory.refused for memory in memories],
            ),
            (
                "npugrad_front_slow_callers",
                "Messages and replies dropped because the caller was too slow.",
                [memory.dropped for memory in memories],
            ),
        ):
            counter = CounterMetricFamily(name, text, labels=("what",))
            for what in counts[0]:
                counter.add_metric((what,), sum(count[what] for count in counts))
            yield counter
