"""The composition root: the only place that wires settings, pool, services and signals together.

Start: bind ports, start workers, serve, announce it once a device is ready. SIGTERM or SIGINT: calls in
progress finish (see `App.drain`), a second one ends them at once. SIGHUP: tenants and TLS files are read.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import npugrad
from npugrad.errors import NpugradError
from npugrad.ops import OPERATORS
from npugrad.registry import REGISTRY, Registry
from npugrad.v1 import server_pb2
from npugrad_server.addresses import AddressError
from npugrad_server.dispatch import Dispatcher
from npugrad_server.logs import get_logger
from npugrad_server.loop_lag import LoopLag
from npugrad_server.metrics import Metrics
from npugrad_server.pages import Pages, serve_pages
from npugrad_server.pool import DevicePool, keep_reaping
from npugrad_server.pool.types import WORKER_MODULE
from npugrad_server.rpc.certificates import LiveCertificates, told
from npugrad_server.rpc.front_limits import FrontLimits
from npugrad_server.rpc.front_memory import FrontMemory, keep_giving_back
from npugrad_server.rpc.front_metrics import FrontCollector
from npugrad_server.rpc.funnel import Funnel
from npugrad_server.rpc.health import Health, register_health, register_reflection
from npugrad_server.rpc.identity import Identities
from npugrad_server.rpc.pace import PaceLimits
from npugrad_server.rpc.register import OtherContracts, register
from npugrad_server.rpc.server import Facts, ServerServicer
from npugrad_server.rpc.servicer import BackwardServicer
from npugrad_server.rpc.transport import open_servers
from npugrad_server.rpc.validation import ValidationServicer
from npugrad_server.start_checks import (
    METRICS_CURE,
    StartError,
    live_tenants,
    npu_report,
    pool_settings,
    ready_timeout_s,
    tracing_problem,
)
from npugrad_server.tenants import TenantsError
from npugrad_server.tls import TlsFilesError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from npugrad_server.addresses import Address
    from npugrad_server.config import LoadedSettings, ServerSettings
    from npugrad_server.pool import PoolSettings
    from npugrad_server.rpc.tracing import RpcTracing
    from npugrad_server.watched_files import FileWatch

OPERATORS.load()  # now, and not on the event loop, or after a fork
_FAREWELL_S = 1.0
"""Seconds for clients to read their last answers and the end of their connections."""
_SERVER_SERVICE = server_pb2.DESCRIPTOR.services_by_name["ServerService"]
_T = TypeVar("_T")

_UNCOMPARED = "a device that computes wrong results without failing, but not in canaries, goes unnoticed"


async def serve(
    loaded: LoadedSettings,
    announce: Callable[[Address], None],
    print_fd: int = 2,
    *,
    registry: Registry = REGISTRY,
    worker_module: str = WORKER_MODULE,
) -> int:
    """Runs a server until a signal ends it.

    Args:
        loaded: Settings and where they came from.
        announce: Called once calls are served, with each bound address.
        print_fd: Descriptor that workers print to.
        registry: The operators and the services that carry them.
        worker_module: Module that a worker process runs.

    Returns:
        Exit code: 0, or 1 when accepted calls were cut off or the gRPC server ended on its own.

    Raises:
        StartError: Something needed for the start is missing.
    """
    log, stop, delay_s = get_logger(), StopSignals(), 0.0
    report = npu_report(loaded.settings)
    made = pool_settings(loaded.settings, report)
    for note in report.notes:
        log.warning("npu", note=note)
    made = replace(made, print_fd=print_fd, worker_module=worker_module)
    log.info("settings", **_changed(loaded, made))
    if not made.verify_sample:
        log.warning("results are not compared", risk=_UNCOMPARED, cure="--verify-sample 0.001")
    app = App(loaded.settings, made, registry)
    stop.install(app.reload)
    try:
        await app.start()
        await until(stop.asked, app.ready())
        if not stop.asked.is_set():
            gc.collect()
            gc.freeze()  # later collections skip what exists now, and do not stall the loop with it
            for address in app.addresses:
                announce(address)
            metrics_address = str(app.metrics_address or "")
            log.info(
                "listening",
                address=",".join(map(str, app.addresses)),
                tls=loaded.settings.tls,
                metrics_address=metrics_address,
            )
            await until(stop.asked, app.ended())
            delay_s = loaded.settings.drain_delay_s if stop.first == "SIGTERM" else 0.0
        finished = await app.drain(stop.at_once, delay_s)
        return 0 if finished and stop.asked.is_set() else 1
    finally:
        await app.close()
        log.info("stopped")


def _changed(loaded: LoadedSettings, made: PoolSettings) -> dict[str, dict[str, Any]]:
    """The settings that differ from their defaults, by where they came from; `chosen` by the server."""
    told: dict[str, dict[str, Any]] = {}
    for name, value in loaded.settings:
        # The pool's settings have the values that defaults such as "auto" resolved to.
        effective, origin = getattr(made, name, value) or value, loaded.origins[name]
        if effective != type(loaded.settings).model_fields[name].default:
            shown = str(effective) if isinstance(effective, str) else effective
            told.setdefault("chosen" if origin == "default" else origin, {})[name] = shown
    return told


class StopSignals:
    """Handles stop signals: the first asks to drain, the second to end at once.

    Attributes:
        asked: Set by the first.
        at_once: Set by the second.
        first: Name of the first; empty before it.
    """

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.at_once = asyncio.Event()
        self.first = ""

    def install(self, reload: Callable[[], None]) -> None:
        """Handles SIGTERM and SIGINT on the running loop, and calls `reload` at each SIGHUP."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.ask, signal.Signals(number).name)

        def hung_up() -> None:
            get_logger().info("signal", signal="SIGHUP", action="read the files again")
            reload()

        loop.add_signal_handler(signal.SIGHUP, hung_up)

    def ask(self, name: str) -> None:
        """Handles one signal."""
        again = self.asked.is_set()
        get_logger().info("signal", signal=name, action="end at once" if again else "drain")
        self.first = self.first or name
        (self.at_once if again else self.asked).set()


class App:
    """One running server.

    Attributes:
        addresses: Where it listens, with the bound ports.
        metrics_address: Address of the metrics and probe pages; None if they are off.
    """

    def __init__(self, settings: ServerSettings, made: PoolSettings, registry: Registry = REGISTRY) -> None:
        """Stores the arguments; `start` does the work.

        Args:
            settings: Settings of the server.
            made: Settings of its pool, from `pool_settings`.
            registry: The operators and the services that carry them.
        """
        self._registry = registry.at(made.release)
        self._settings, self._made = settings, made
        self._log = get_logger()
        self._resources = AsyncExitStack()
        self.addresses = settings.listen_addresses
        self.metrics_address: Address | None = None
        self._looks: list[FileWatch[Any]] = []

    def reload(self) -> None:
        """Reads the files of tenants and TLS at once, and takes them as they are."""
        for look in self._looks:
            look.look_now()

    async def start(self) -> None:
        """Binds the ports, starts the workers and serves; devices become ready later.

        Raises:
            StartError: A port cannot be bound, the files for TLS or tenants are unusable, the arenas do not
                fit into memory, or OpenTelemetry is missing for traces.
        """
        started_s = time.monotonic()
        self._metrics = metrics = Metrics(npugrad.__version__, str(self._made.product))
        try:
            tenants = live_tenants(self._settings)
            mutual = self._settings.tls == "mutual"
            identities = Identities(tenants, self._settings.tenant_header, verified=mutual)
            self._memory = FrontMemory(FrontLimits.of(self._settings))
            self._funnel = Funnel(metrics, identities, self._open_tracing(), self._memory)
            self._certificates = self._open_certificates(metrics)
            self._server, self.addresses = open_servers(
                self._settings, self._funnel, certificates=self._certificates
            )
            self._serve_pages(metrics)
            self.pool = await DevicePool.open(self._made, metrics)
        except (TlsFilesError, TenantsError) as error:
            raise StartError(*error.problems) from None
        except (AddressError, OSError) as error:
            raise StartError(str(error)) from None
        self._resources.push_async_callback(self.pool.close)
        self._keep(keep_reaping())
        self._keep(tenants.watch())
        self._looks.append(tenants.looks)
        self._keep(LoopLag(metrics.registry).watch())
        if self._certificates is not None:
            self._keep(self._certificates.watch())
            self._looks.append(self._certificates.looks)
        memories = (self._memory, self._funnel.queries.memory)
        for memory in memories:
            self._keep(memory.watch(self._funnel.calls, *self.addresses))
        self._keep(keep_giving_back(lambda: sum(memory.used_bytes for memory in memories)))
        metrics.show_pool(self.pool, asyncio.get_running_loop())
        metrics.registry.register(FrontCollector(*memories))
        facts = Facts(self._made, self._settings, self._memory, started_s, self._registry.records)
        self._info = ServerServicer(self.pool, facts)
        self._register()
        self.pool.on_change.append(self._device_changed)
        await self._server.start()
        self._end = asyncio.create_task(self._server.wait_for_termination())

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs an endless coroutine until the server ends."""
        self._resources.callback(asyncio.create_task(work).cancel)

    def _open_certificates(self, metrics: Metrics) -> LiveCertificates | None:
        if self._settings.tls == "off":
            return None
        certificates = LiveCertificates(self._settings)
        metrics.registry.register(certificates)
        self._log.info("certificates", **told(certificates.files))
        return certificates

    def _open_tracing(self) -> RpcTracing | None:
        settings = self._settings
        if problem := tracing_problem(settings):
            raise StartError(problem)
        if not settings.is_tracing:
            return None
        from npugrad_server.rpc import tracing as spans  # imported only here: OpenTelemetry is an extra

        try:
            processor = spans.otlp_processor()
        except (ValueError, OSError) as error:
            raise StartError(f"OTEL_*: {error}") from None
        tracing = spans.RpcTracing(
            processor,
            spans.resource(str(self._made.product)),
            (self._registry.backward, self._registry.validation, _SERVER_SERVICE),
            ratio=settings.trace_ratio,
            trusts_callers=settings.trust_trace_context,
        )
        self._resources.push_async_callback(asyncio.to_thread, tracing.close)
        return tracing

    def _serve_pages(self, metrics: Metrics) -> None:
        self._pages = Pages(metrics.registry, asyncio.get_running_loop())
        if self._settings.metrics_address is None:
            return
        try:
            self.metrics_address, close = serve_pages(self._pages, self._settings.metrics_address)
        except AddressError as error:
            if self._settings.asks_for("metrics_listen"):
                raise
            self._log.warning("metrics off", reason=str(error), cure=METRICS_CURE)
            return
        # The pages query the loop, so the loop must not wait for the pages.
        self._resources.push_async_callback(asyncio.to_thread, close)

    def _register(self) -> None:
        settings = self._settings
        backward = BackwardServicer(
            Dispatcher(self.pool, self._made.product, int(settings.max_message_bytes), self._registry),
            upload=PaceLimits.of_uploads(settings),
            reply=PaceLimits.of_replies(settings),
        )
        names = []
        validation = ValidationServicer(self._made.product, self.pool, self._registry)
        for descriptor, servicer, codec in (
            (self._registry.backward, backward, (backward.deserializers, backward.serializers)),
            (self._registry.validation, validation, ()),
            (_SERVER_SERVICE, self._info, ()),
        ):
            register(self._server, descriptor, servicer.handlers(self._funnel), *codec)
            names.append(str(descriptor.full_name))
        backward_name = self._registry.backward.full_name
        operators = {f"{backward_name}/{operator}": operator for operator in self._registry.records}
        queries = self._funnel.queries
        self._health = Health(names, settings.liveness_down_limit_s, operators, queries)
        self._pages.show_state(self._health, self.pool)
        names.append(register_health(self._server, self._health))
        register_reflection(self._server, names, queries)
        self._server.add_generic_rpc_handlers((OtherContracts(_SERVER_SERVICE.file.package),))

    def _device_changed(self) -> None:
        self._health.update(self.pool.devices())

    async def ready(self) -> None:
        """Waits until every device is ready or down.

        Raises:
            StartError: No device is ready; lists every device's reason.
        """
        try:
            await self.pool.wait_ready(ready_timeout_s(self._made))
        except NpugradError:
            raise StartError(*(f"{d.name}: {d.state}, {d.reason}" for d in self.pool.devices())) from None
        self._device_changed()

    async def ended(self) -> None:
        """Waits until the gRPC server ends unexpectedly.

        Raises:
            Exception: The error that ended the gRPC server.
        """
        await asyncio.shield(self._end)  # grpc would take the cancellation of a waiter for its own

    async def drain(self, at_once: asyncio.Event, delay_s: float = 0.0) -> bool:
        """Gives load balancers time to notice, then closes connections and lets their calls finish.

        Health reports NOT_SERVING at once, but everything is still served for `delay_s`. Then every
        connection gets a GOAWAY: its client opens no more calls on it and connects elsewhere, and calls that
        are already open finish, uploads included.

        Args:
            at_once: Ends the delay and the wait.
            delay_s: Seconds to keep serving.

        Returns:
            Whether all calls finished. The others were answered with DRAINING.
        """
        self._health.start_draining()
        self._info.start_draining()
        self._metrics.draining.set(1)
        if delay_s:
            self._log.info("still serving", delay_s=delay_s)
            await until(at_once, asyncio.sleep(delay_s))
        limit_s = self._settings.drain_timeout_s
        self._log.info("closing connections", calls=self._funnel.active_count, timeout_s=limit_s)
        ending = asyncio.ensure_future(self._server.stop(limit_s + _FAREWELL_S))
        self._health.close()
        await until(at_once, self._funnel.settle_last(ending, _FAREWELL_S), limit_s)
        finished = not self._funnel.active_count
        self._log.info("drained" if finished else "drain cut short", calls=self._funnel.active_count)
        self.pool.abandon()
        await self._server.stop(_FAREWELL_S)
        await ending
        return finished

    async def close(self) -> None:
        """Ends whatever still runs: server, workers, pages."""
        try:
            if hasattr(self, "_server"):
                await self._server.stop(None)
        finally:
            await self._resources.aclose()


async def until(
    event: asyncio.Event, work: Coroutine[Any, Any, _T], timeout_s: float | None = None
) -> _T | None:
    """Runs `work` until it ends, the event is set or the time is up; returns its result, else None."""
    tasks = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
