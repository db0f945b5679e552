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

    def __init__(self, memory: FrontMemory) -> None:
        self._memory = memory

    def collect(self) -> Iterator[Metric]:
        """The current figures."""
        memory = self._memory
        used = GaugeMetricFamily("npugrad_front_memory_used_bytes", _USED, labels=("what",))
        used.add_metric(("requests",), memory.requests_bytes)
        used.add_metric(("replies",), memory.replies_bytes)
        yield used
        text = "Memory outside the arenas available to messages and replies."
        yield GaugeMetricFamily("npugrad_front_memory_bytes", text, memory.limits.memory_bytes)
        for name, text, found in (
            (
                "npugrad_front_refused_calls",
                "Calls refused because front memory or call slots ran out, by what they needed.",
                memory.refused,
            ),
            (
                "npugrad_front_slow_callers",
                "Messages and replies dropped because the caller was too slow.",
                memory.dropped,
            ),
        ):
            counter = CounterMetricFamily(name, text, labels=("what",))
            for what, count in found.items():
                counter.add_metric((what,), count)
            yield counter
