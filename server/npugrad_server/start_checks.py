"""Checks what a start needs: settings of the pool, free ports, memory, devices that open."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from npugrad.errors import NpugradError
from npugrad.ops import OPERATORS
from npugrad.products import Product, chip_kind, product_from_soc
from npugrad.profiles import profile_of, records_at
from npugrad.releases import CannRelease
from npugrad_server import devices
from npugrad_server.addresses import Address, AddressError, check_free
from npugrad_server.logs import get_logger
from npugrad_server.machine import memory_bytes
from npugrad_server.npus import NpuReport, find_npus, op_init_problem
from npugrad_server.pool import DevicePool, DeviceState, PoolSettings
from npugrad_server.pool.types import START_LIMIT_FACTOR
from npugrad_server.tenants import LiveTenants, TenantsError
from npugrad_server.tls import TlsFilesError, read_tls, when

if TYPE_CHECKING:
    from npugrad_server.config import ServerSettings

METRICS_CURE = "for metrics and probes name a free port: --metrics-listen HOST:PORT"
"""What to do about a taken default port, without which a server starts."""
READY_MARGIN_S = 5.0
"""Seconds beyond `PoolSettings.start_limit_s` within which the pool reports the outcome of a device."""


class StartError(Exception):
    """The server cannot start.

    Attributes:
        problems: One line for each missing thing.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


def npu_report(settings: ServerSettings) -> NpuReport:
    """The NPUs of this host, probed only if the settings may refer to them; takes a moment."""
    return find_npus() if devices.may_need_npus(settings.devices) else NpuReport()


def pool_settings(settings: ServerSettings, report: NpuReport) -> PoolSettings:
    """Settings of the pool: devices resolved, product chosen, arenas sized.

    Args:
        settings: Settings of the server.
        report: What `npu_report` found.

    Raises:
        StartError: The devices cannot be served, or the arenas are larger than the memory.
    """
    names = _resolved(settings.devices, report)
    limit = memory_bytes()
    made = PoolSettings(
        devices=names,
        product=_product(settings.fixed_product, names, report),
        cann=_cann(settings.cann, names, report),
        input_arena_bytes=int(settings.input_arena_bytes or limit // 4),
        output_arena_bytes=int(settings.output_arena_bytes or min(limit // 8, limit // 4 // len(names))),
        prefault_bytes=int(settings.prefault_bytes),
        max_queue_depth=settings.max_queue_depth,
        streams_per_device=settings.streams_per_device,
        hang_grace_s=settings.hang_grace_s,
        run_limit_s=settings.run_limit_s,
        heartbeat_timeout_s=settings.heartbeat_timeout_s,
        canary_interval_s=settings.canary_interval_s,
        verify_sample=settings.verify_sample,
        worker_start_timeout_s=settings.worker_start_timeout_s,
        respawn_backoff_s=settings.respawn_backoff_s,
        respawn_backoff_max_s=settings.respawn_backoff_max_s,
        max_respawns=settings.max_respawns,
        circuit_deaths=settings.circuit_deaths,
        device_memory_bytes=int(settings.device_memory_bytes or limit // 2),
    )
    arenas = made.input_arena_bytes + len(names) * made.output_arena_bytes
    if arenas > limit:
        raise StartError(
            f"input_arena_bytes, output_arena_bytes: found {made.input_arena_bytes} and {len(names)} x "
            f"{made.output_arena_bytes} bytes; expected at most the {limit} bytes of memory together"
        )
    return made


def tracing_problem(settings: ServerSettings) -> str:
    """What tracing lacks; empty if nothing, or if it is off."""
    try:
        if not settings.is_tracing or find_spec("opentelemetry.exporter.otlp.proto.grpc"):
            return ""
    except ModuleNotFoundError:  # a parent package is missing
        pass
    name = "trace_ratio" if settings.trace_ratio else "trust_trace_context"
    return (
        f"{name}: found no OpenTelemetry; expected the extra otel: "
        "pip install '.[otel]' ./server in a checkout of npugrad"
    )


def live_tenants(settings: ServerSettings) -> LiveTenants:
    """The tenants of the settings.

    Raises:
        TenantsError: Their file cannot be used, or callers' identities cannot be verified.
    """
    tenants = LiveTenants(settings.tenants, sockets=settings.sockets)
    certified = (tenants.table.listed.keys() | tenants.table.gateways) - settings.sockets
    if certified and settings.tls != "mutual":
        raise TenantsError(
            f"tenants: the identities in {settings.tenants!r} need tls_client_ca, because they are those of "
            "callers' certificates"
        )
    return tenants


def ready_timeout_s(settings: ServerSettings | PoolSettings) -> float:
    """Seconds from the opening of the pool until a server without a ready device gives up."""
    return START_LIMIT_FACTOR * settings.worker_start_timeout_s + READY_MARGIN_S


def _resolved(text: str, report: NpuReport) -> tuple[str, ...]:
    """The devices of a list.

    Raises:
        StartError: They cannot be served; lists everything that is wrong with the NPUs.
    """
    problems = tuple(f"npu: {problem}" for problem in report.problems)
    if text.strip() == devices.AUTO and problems and report.device_nodes:
        # Otherwise a CPU would answer in their place, unnoticed.
        raise StartError(
            "devices: auto found NPUs that cannot be used; name cpu:0 to run without them", *problems
        )
    try:
        names = devices.resolve(text, report.usable_count)
    except devices.DeviceListError as error:
        raise StartError(f"devices: {error}", *problems) from None
    if text.strip() == devices.AUTO:
        get_logger().info("devices", auto=",".join(names), npus=report.count, problems=list(report.problems))
    return names


def _product(wanted: Product | None, names: tuple[str, ...], report: NpuReport) -> Product:
    """The product to serve: the NPUs' own, which the setting can only confirm.

    Raises:
        StartError: They contradict each other, or the chip belongs to no documented product.
    """
    if not names[0].startswith("npu:"):
        return wanted or Product.ATLAS_A2
    found = product_from_soc(report.soc)
    if found is None:
        raise StartError(
            f"product: found NPU {report.soc!r}, which is {chip_kind(report.soc)}; expected one of "
            f"{', '.join(Product)}"
        )
    if wanted not in (None, found):
        raise StartError(f"product: found {wanted}; expected {found} or auto, as the NPU is {report.soc}")
    return found


def _cann(asked: str, names: tuple[str, ...], report: NpuReport) -> str:
    """The release by whose pages calls are checked; empty for the pages that the records are written from.

    Raises:
        StartError: The NPUs have a CANN with other pages.
    """
    installed = None
    if names[0].startswith("npu:"):
        with suppress(ValueError):  # a component's number, from which no release follows
            installed = CannRelease.parse(report.cann)
    release = installed if asked == "auto" else CannRelease.parse(asked)
    if release is None:
        return ""
    profile, warning = profile_of(release)
    if installed is not None and profile_of(installed)[0] != profile:
        raise StartError(f"cann: found {asked}; expected {installed} or auto, as it is the CANN of the NPUs")
    if warning:
        get_logger().warning("cann", note=warning)
    return profile


@dataclass(frozen=True)
class StartFinding:
    """One finding of `check`.

    Attributes:
        ok: Whether it lets a server start.
        text: Description for a person.
        optional: Whether a server can start without it.
    """

    ok: bool
    text: str
    optional: bool = False

    @property
    def label(self) -> str:
        """``"ok"``, ``"FAIL"``, or ``"note"`` if a server can start without it."""
        return "note" if self.optional else "ok" if self.ok else "FAIL"


async def check(settings: ServerSettings) -> list[StartFinding]:
    """Does everything a start does except binding the ports; reports all problems at once."""
    findings = [*_tls(settings), *_tenants(settings)]
    findings += [_free("gRPC", address) for address in settings.listen_addresses]
    if settings.metrics_address is not None:
        found = _free("metrics", settings.metrics_address)
        if not (found.ok or settings.asks_for("metrics_listen")):
            found = StartFinding(True, f"{found.text}; {METRICS_CURE}", optional=True)
        findings.append(found)
    if problem := tracing_problem(settings):
        findings.append(StartFinding(False, problem))
    report = npu_report(settings)
    try:
        # A device that does not open is reported at once, without the retries of a running server.
        made = replace(pool_settings(settings, report), max_respawns=0)
    except StartError as error:
        return findings + [StartFinding(False, problem) for problem in error.problems]
    if made.devices[0].startswith("npu:"):
        findings += [
            StartFinding(True, f"npu: {note}", optional=True)
            for note in (op_init_problem(), *report.notes)
            if note
        ]
    else:
        # With auto, having none is fine, but a user who expected one wants to know why.
        findings += [StartFinding(True, f"npu: {problem}", optional=True) for problem in report.problems]
    return findings + await _try_devices(made)


def _tls(settings: ServerSettings) -> list[StartFinding]:
    try:
        files = read_tls(settings)
    except TlsFilesError as error:
        return [StartFinding(False, problem) for problem in error.problems]
    if files is None:
        return [StartFinding(True, "TLS: off")]
    own = files.facts[0]
    signed = f"a certificate signed by an authority in {settings.tls_client_ca!r}"
    callers = signed if settings.tls == "mutual" else "no certificate"
    return [
        StartFinding(
            True,
            f"TLS: certificate of {settings.tls_certificate!r}, serial {own.serial}, until "
            f"{when(own.expires)}; callers need {callers}",
        )
    ]


def _tenants(settings: ServerSettings) -> list[StartFinding]:
    if settings.tenants is None:
        return []
    try:
        table = live_tenants(settings).table
    except TenantsError as error:
        return [StartFinding(False, problem) for problem in error.problems]
    count = len({tenant.name for tenant in table.listed.values()})
    return [StartFinding(True, f"tenants: {count} in {settings.tenants!r}")]


def _free(what: str, address: Address) -> StartFinding:
    try:
        check_free(address)
    except AddressError as error:
        return StartFinding(False, f"{what}: {error}")
    return StartFinding(True, f"{what}: {address} is free")


async def _try_devices(settings: PoolSettings) -> list[StartFinding]:
    try:
        pool = await DevicePool.open(settings)
    except OSError as error:
        return [StartFinding(False, f"memory: cannot make the arenas: {error}")]
    try:
        await pool.wait_ready(ready_timeout_s(settings))
    except NpugradError:
        pass  # the devices' own reasons say more
    finally:
        found, missing = pool.devices(), _missing_operators(pool, settings)
        await pool.close()
    arenas = (
        f"{settings.input_arena_bytes / 2**30:.4g} GiB of operands, "
        f"{settings.output_arena_bytes / 2**30:.4g} GiB of results per device"
    )
    opened = [
        StartFinding(
            d.state is DeviceState.READY,
            f"{d.name}: {d.state}, {d.reason or d.backend + ', ' + d.description}",
        )
        for d in found
    ]
    return [StartFinding(True, f"memory: {arenas}"), *opened, *missing]


def _missing_operators(pool: DevicePool, settings: PoolSettings) -> list[StartFinding]:
    """Operators of the product that no device can run: never all of them, or no device would be ready."""
    records = records_at(OPERATORS, settings.release)
    known = [name for name, record in records.items() if settings.product in record.products]
    return [
        StartFinding(True, f"{name} is not available: {reason}", optional=True)
        for name in known
        if (reason := pool.unavailable(name))
    ]
