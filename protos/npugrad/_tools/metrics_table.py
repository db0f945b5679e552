"""The metrics of a server, from its own registry."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import trustme
from prometheus_client.metrics import MetricWrapperBase

from npugrad_server.config import ServerSettings
from npugrad_server.loop_lag import LoopLag
from npugrad_server.metrics import Metrics
from npugrad_server.pool import PoolStats
from npugrad_server.rpc.certificates import LiveCertificates
from npugrad_server.rpc.front_memory import FrontLimits, FrontMemory
from npugrad_server.rpc.front_metrics import FrontCollector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import CollectorRegistry

    from npugrad_server.pool import DeviceStatus


class MetricRow(NamedTuple):
    """One metric.

    Attributes:
        name: As on the metrics page; of a histogram without its suffixes.
        kind: Such as ``"counter"``.
        labels: Names of its labels.
        meaning: Its description on the page.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


class _NoPool:
    """A pool without a device: which metrics there are does not depend on that."""

    def stats(self) -> PoolStats:
        return PoolStats(0, 0, 0, 0, 0, 0, 0, 0, 0)

    def devices(self) -> tuple[DeviceStatus, ...]:
        return ()


def all_metrics() -> list[MetricRow]:
    """Every metric of a server with TLS, by name; one without TLS has no others."""
    return asyncio.run(_all_metrics())


async def _all_metrics() -> list[MetricRow]:
    """Registers what `npugrad_server.app` registers; a test compares the result with a server's page."""
    metrics = Metrics("", "")
    registry = metrics.registry
    LoopLag(registry)
    metrics.show_pool(_NoPool(), asyncio.get_running_loop())
    registry.register(FrontCollector(FrontMemory(FrontLimits.of(ServerSettings()))))
    with tempfile.TemporaryDirectory(prefix="npugrad-metrics-") as folder:
        registry.register(LiveCertificates(_tls_settings(Path(folder))))
    return sorted(await asyncio.to_thread(lambda: list(_rows(registry))))


def _tls_settings(folder: Path) -> ServerSettings:
    pair, path = trustme.CA().issue_cert("localhost"), folder / "server.pem"
    pair.private_key_and_cert_chain_pem.write_to_path(path)
    return ServerSettings(tls_certificate=str(path), tls_key=str(path))


def _rows(registry: CollectorRegistry) -> Iterator[MetricRow]:
    for collector in list(registry._collector_to_names):
        for metric in collector.collect():
            # A metric knows its labels, but lists them only for values that it has.
            labelled = collector if isinstance(collector, MetricWrapperBase) else metric
            labels = tuple(getattr(labelled, "_labelnames", ()))
            name = f"{metric.name}_total" if metric.type == "counter" else metric.name
            yield MetricRow(name, metric.type, labels, metric.documentation)
