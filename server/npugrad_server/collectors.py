"""Gauges computed at each scrape of the Prometheus page, from the pool and the log."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from npugrad_server.logs import LogBacklog
from npugrad_server.pool import DeviceState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from prometheus_client.core import Metric

    from npugrad_server.pool import DeviceStatus, PoolStats

SNAPSHOT_TIMEOUT_S = 5.0
"""Seconds a scrape waits for the event loop before it fails."""
_T = TypeVar("_T")


class PoolFigures(Protocol):
    """The part of the pool that the page shows."""

    def stats(self) -> PoolStats:
        """Current figures."""
        ...

    def devices(self) -> tuple[DeviceStatus, ...]:
        """State of every device."""
        ...


def ask(loop: asyncio.AbstractEventLoop, question: Callable[[], _T], timeout_s: float) -> _T:
    """Calls a function on the event loop, from another thread.

    Args:
        loop: The loop.
        question: The function.
        timeout_s: Seconds to wait for its result.

    Raises:
        TimeoutError: It took longer.
    """

    async def answer() -> _T:
        return question()

    waiting = asyncio.run_coroutine_threadsafe(answer(), loop)
    try:
        return waiting.result(timeout_s)
    except concurrent.futures.TimeoutError:
        waiting.cancel()
        raise TimeoutError(f"the event loop did not answer within {timeout_s:g} s") from None


class LogCollector(Collector):
    """The log's counters."""

    def collect(self) -> Iterator[Metric]:
        """Lines that the process has lost."""
        text = "Log lines, workers' output included, dropped because nobody read them in time."
        yield CounterMetricFamily("npugrad_log_lines_dropped", text, value=LogBacklog.all_dropped_lines)


class PoolCollector(Collector):
    """Gauges that are read from the pool at each scrape."""

    def __init__(self, pool: PoolFigures, loop: asyncio.AbstractEventLoop) -> None:
        """Reads nothing yet.

        Args:
            pool: The pool.
            loop: The pool's event loop.
        """
        self._pool, self._loop = pool, loop
        self._shown: set[str] = set()

    def describe(self) -> Iterable[Metric]:
        """Describes nothing, so that registering does not wait for the event loop."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """The gauges, from figures taken at one moment on the pool's loop."""
        stats, devices = ask(self._loop, self._snapshot, SNAPSHOT_TIMEOUT_S)
        for name, text, value in (
            ("npugrad_queue_depth", "Calls waiting for a device.", stats.queue_depth),
            (
                "npugrad_queued_seconds",
                "Expected device seconds of waiting calls.",
                stats.queued_s,
            ),
            (
                "npugrad_longest_wait_seconds",
                "Seconds the oldest waiting call has waited.",
                stats.longest_wait_s,
            ),
            ("npugrad_running_calls", "Calls running on a device.", stats.running),
            (
                "npugrad_open_circuits",
                "Open circuits: pairs of tenant and signature, or operator, whose calls are refused now.",
                stats.open_circuits,
            ),
            ("npugrad_uploads", "Admitted calls whose operands are still being uploaded.", stats.uploads),
            ("npugrad_input_arena_used_bytes", "Operand memory in use.", stats.input_arena_used_bytes),
            ("npugrad_input_arena_bytes", "Total operand memory.", stats.input_arena_bytes),
            ("npugrad_output_arena_used_bytes", "Result memory in use.", stats.output_arena_used_bytes),
            ("npugrad_output_arena_bytes", "Total result memory.", stats.output_arena_bytes),
        ):
            yield GaugeMetricFamily(name, text, float(value))
        yield from _of_devices(devices)
        yield from self._of_tenants(stats)

    def _of_tenants(self, stats: PoolStats) -> Iterator[Metric]:
        """What tenants hold; one that no longer holds anything is shown as 0."""
        self._shown.update(stats.tenants)
        texts = (
            (
                "npugrad_tenant_waiting_calls",
                "Admitted calls that have not started, uploads included.",
            ),
            ("npugrad_tenant_inflight_bytes", "Operands and results of admitted calls."),
        )
        for index, (name, text) in enumerate(texts):
            gauge = GaugeMetricFamily(name, text, labels=("tenant",))
            for tenant in sorted(self._shown):
                gauge.add_metric((tenant,), stats.tenants.get(tenant, (0, 0))[index])
            yield gauge

    def _snapshot(self) -> tuple[PoolStats, tuple[DeviceStatus, ...]]:
        return self._pool.stats(), self._pool.devices()


def _of_devices(devices: Sequence[DeviceStatus]) -> tuple[Metric, ...]:
    """States, memory and workers of the devices."""
    info = GaugeMetricFamily(
        "npugrad_device_info",
        "Description of a device, value 1; a simulated device is not an NPU.",
        labels=("device", "backend", "description", "simulated"),
    )
    states = GaugeMetricFamily(
        "npugrad_device_state", "1 for the state a device is in.", labels=("device", "state")
    )
    restarts = CounterMetricFamily(
        "npugrad_worker_restarts", "Worker restarts of a device.", labels=("device",)
    )
    memory = GaugeMetricFamily(
        "npugrad_device_memory_bytes",
        "Device memory available to calls; absent for devices that use host memory.",
        labels=("device",),
    )
    used = GaugeMetricFamily(
        "npugrad_device_memory_used_bytes",
        "Device memory used by running calls, reserved workspaces included.",
        labels=("device",),
    )
    resident = GaugeMetricFamily(
        "npugrad_worker_resident_bytes",
        "Host memory of a device's worker, including touched pages of shared arenas.",
        labels=("device",),
    )
    for device in devices:
        if device.memory_bytes is not None:
            memory.add_metric((device.name,), device.memory_bytes)
            used.add_metric((device.name,), device.memory_used_bytes)
        if device.backend:
            simulated = str(device.simulated).lower()
            info.add_metric((device.name, device.backend, device.description, simulated), 1)
        if device.pid is not None and (nbytes := _resident_bytes(device.pid)) is not None:
            resident.add_metric((device.name,), nbytes)
        restarts.add_metric((device.name,), device.restarts)
        for state in DeviceState:
            states.add_metric((device.name, str(state)), float(state == device.state))
    return info, states, restarts, memory, used, resident


def _resident_bytes(pid: int) -> int | None:
    """Resident memory of a process; None if it is gone."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text("ascii").split()[1]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
