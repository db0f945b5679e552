"""How late the event loop runs what is due: while a callback blocks it, every call waits."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from npugrad_server.tallies import HistogramTally

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_PERIOD_S = 0.05
_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_MOST_OBSERVED = 256


class LoopLag:
    """A histogram of the event loop's lag, for the metrics page.

    It samples 20 times a second, so that calls cost nothing more; whatever blocks the loop for longer than
    the sampling period is always seen. So is time during which other processes have the processor.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        """Registers the histogram; nothing is measured before `watch`."""
        self._lag = HistogramTally(
            "npugrad_loop_lag_seconds",
            "How late the event loop ran a timer that was due, sampled 20 times a second.",
            (),
            registry,
            buckets=_BUCKETS_S,
        )

    async def watch(self) -> None:
        """Measures the running loop until cancelled."""
        loop, observed = asyncio.get_running_loop(), self._lag.observed
        while True:
            due_s = loop.time() + _PERIOD_S
            await asyncio.sleep(_PERIOD_S)
            observed.append(((), max(0.0, loop.time() - due_s)))
            if len(observed) >= _MOST_OBSERVED:
                self._lag.count()
