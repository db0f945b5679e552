from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from prometheus_client import CollectorRegistry

from npugrad_server.loop_lag import LoopLag


def test_a_callback_that_holds_the_loop_is_seen() -> None:
    """Holding it is what this is about, so it is the one test that sleeps there."""
    registry = CollectorRegistry()
    lag = LoopLag(registry)

    async def act() -> None:
        watching = asyncio.create_task(lag.watch())
        await asyncio.sleep(0)
        time.sleep(0.3)  # noqa: ASYNC251
        await asyncio.sleep(0.05)  # it was due before
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching

    def count() -> float:
        return registry.get_sample_value("npugrad_loop_lag_seconds_count") or 0.0

    asyncio.run(act())
    assert (registry.get_sample_value("npugrad_loop_lag_seconds_sum") or 0.0) >= 0.2
    assert registry.get_sample_value("npugrad_loop_lag_seconds_bucket", {"le": "0.1"}) < count()  # type: ignore[operator]
