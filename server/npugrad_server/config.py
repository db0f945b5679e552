"""Settings of the server: one model whose fields become flags, environment variables and TOML keys.

The command line takes precedence over the environment (``NPUGRAD_`` and the field's name), which takes
precedence over the TOML file (``--config`` or ``NPUGRAD_CONFIG``) and the defaults. An unknown key is an
error that suggests the nearest field.
"""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ByteSize, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from npugrad.codec import MAX_CHUNK_BYTES, MAX_MESSAGE_BYTES
from npugrad.products import Product, product_from_name
from npugrad.releases import CannRelease
from npugrad_server.addresses import Address, parse_listens, parse_metrics_listen

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pydantic_settings import PydanticBaseSettingsSource

ENV_PREFIX = "NPUGRAD_"
CONFIG_VARIABLE = "NPUGRAD_CONFIG"
"""Environment variable that names the TOML file."""

# The client, the workers, the build and the tests share the prefix.
_OTHERS_VARIABLES = re.compile(r"NPUGRAD_(CONFIG|TARGET|(BUILD|CLIENT|WORKER|TEST|KERNEL|KERNELS|BENCH)_.*)")
# Kubernetes puts these into every pod of a namespace that has a Service called npugrad or npugrad-*.
_SERVICE_LINKS = re.compile(
    r"NPUGRAD_([A-Z0-9_]+_)?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_\d+_(TCP|UDP|SCTP)(_.*)?)?)"
)
LEAST_MESSAGE_BYTES = MAX_CHUNK_BYTES + 64 * 2**10
"""Fits any frame of a stream: a largest chunk and what surrounds it."""
MESSAGES_PER_CALL = 4
"""Messages that the largest unary call takes: its request, its reply, gRPC's copy, and some overhead."""
FRONT_MESSAGES = 8
"""Messages that the front memory has to hold: those of a call, and what is set aside of it."""
_LONGEST_S = 2e6
"""grpc keeps some times as milliseconds in 32 bits."""


class ServerSettings(BaseSettings):
    """Settings of one server process.

    The constructor reads only its arguments; `load_settings` reads environment and file as well.
    """

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True, allow_inf_nan=False)

    listen: str = Field(
        default="127.0.0.1:50051",
        description="Addresses to serve on, separated by commas: host:port (port 0 takes a free one), "
        "unix:path, or unix:path?mode=660 with the socket's permissions. Each Unix socket is a tenant.",
    )
    insecure: bool = Field(
        default=False, description="Serve plaintext on an address that is not loopback when TLS is off."
    )
    tls_certificate: str | None = Field(
        default=None,
        description="PEM file with the server's certificate and its chain; turns TLS on.",
    )
    tls_key: str | None = Field(
        default=None, description="PEM file with the certificate's private key, unencrypted."
    )
    tls_client_ca: str | None = Field(
        default=None,
        description="PEM file with the authorities of client certificates. Every caller must then present "
        "a certificate signed by one of them (mutual TLS).",
    )
    tenants: str | None = Field(
        default=None,
        description="TOML file of tenants: identities in callers' certificates, sockets, weights, gateways. "
        "Read again when it changes. Default: each caller is a tenant of weight 1.",
    )
    tenant_header: str = Field(
        default="x-npugrad-tenant",
        pattern=r"^x-[a-z0-9_.-]*[a-z0-9_]$",
        description="Metadata key in which the listed gateways, and only they, name a call's tenant.",
    )
    devices: str = Field(
        default="auto",
        description="Devices, such as cpu:0 or npu:0,npu:1; auto takes all NPUs, or one CPU device if "
        "there are none. npu:0?deterministic=1 runs every call deterministically; "
        "cpu:0?coordinates=float64 computes sampling coordinates in float64 instead of as PyTorch's and "
        "mmcv's kernels do.",
    )
    product: Literal["auto", "atlas-training", "atlas-a2", "atlas-a3"] = Field(
        default="auto",
        description="Product whose documented limits apply; auto asks the NPU, and means atlas-a2 on CPUs.",
    )
    cann: str = Field(
        default="auto",
        description="CANN release by whose pages calls are checked, such as 9.1.0; auto takes that of the "
        "NPUs, and without them the pages that the operators are documented by.",
    )
    metrics_listen: str = Field(
        default="127.0.0.1:9464",
        description="host:port that serves /metrics, /livez and /readyz; empty turns them off. They are also "
        "off if the default port is taken; a taken port that was asked for ends the start.",
    )
    log_format: Literal["auto", "json", "console"] = Field(
        default="auto",
        description="Format of the log on standard error; auto means console on a terminal, json elsewhere.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Lowest level that is logged."
    )
    trace_ratio: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Fraction of calls to trace, 0 to 1, as OpenTelemetry spans, exported over OTLP/gRPC "
        "to where the standard OTEL_* variables say. Needs the extra otel.",
    )
    trust_trace_context: bool = Field(
        default=False,
        description="Follow the caller's trace context, where there is one, in deciding whether to trace "
        "a call; trace_ratio decides for the other calls.",
    )
    input_arena_bytes: ByteSize | None = Field(
        default=None,
        description="Bytes of operands held at once, such as 2GiB; no call can have more. Default: a "
        "quarter of the memory of the machine or its control group.",
    )
    output_arena_bytes: ByteSize | None = Field(
        default=None,
        description="Bytes of results that each device holds at once; no call can have more. Default: an "
        "eighth of the memory, and at most a quarter of it for all devices together.",
    )
    prefault_bytes: ByteSize = Field(
        default=ByteSize(64 * 2**20),
        description="Bytes of each arena to touch at start, so that no call waits for page faults.",
    )
    device_memory_bytes: ByteSize | None = Field(
        default=None,
        description="Bytes of host memory for what workers derive from operands, such as contiguous "
        "copies of strided ones; shared by all devices. An NPU reports its own memory. Default: half of "
        "the memory.",
    )
    max_message_bytes: ByteSize = Field(
        default=ByteSize(LEAST_MESSAGE_BYTES),
        ge=LEAST_MESSAGE_BYTES,
        le=MAX_MESSAGE_BYTES,
        description="Largest gRPC message in either direction, and so the largest unary call; Execute "
        "takes any size. Messages lie outside the arenas. The default, a largest chunk and 64 KiB, is also "
        "the minimum. A larger message delays all other calls by 1 to 5 ms for each MiB.",
    )
    front_memory_bytes: ByteSize | None = Field(
        default=None,
        description="Bytes outside the arenas that callers may take of the front process: messages, unread "
        "replies, which count twice because gRPC keeps a copy, and in two fifths of it, what callers send "
        "before or after it is read, and calls about the server. Calls that find no room get QUEUE_FULL. At "
        "least eight times max_message_bytes. Default: an eighth of the memory, at most 4 GiB.",
    )
    max_calls: int = Field(
        default=1024,
        ge=1,
        description="Calls in progress at once, until they are answered; more get QUEUE_FULL. Tenants share "
        "these places by weight: a call of one that has fewer ends one of the tenant that has most. "
        "GetServerInfo, ListOperators, health checks and reflection have a quarter as many places of their "
        "own. A quarter of front_memory_bytes, divided by max_calls, is what a caller can have in transit on "
        "a call, from 64 KiB to 16 MiB: with fewer places, uploads over long distances are faster.",
    )
    max_streams_per_connection: int = Field(
        default=256,
        ge=1,
        le=2**31 - 1,
        description="Calls in progress at once on one connection; the client's gRPC holds back more until "
        "one ends. From about 1,000 on, floods of resets can cancel everybody's calls.",
    )
    max_connections: int = Field(
        default=4096,
        ge=1,
        le=2**31 - 1,
        description="Open connections of all callers together; more are closed. Limits per caller belong "
        "in a gateway.",
    )
    max_pending_calls: int = Field(
        default=1000,
        ge=1,
        le=2**30,
        description="Calls that gRPC queues before the server accepts them. Beyond that it refuses some "
        "at random, and beyond three times as many it refuses all.",
    )
    handshake_timeout_s: float = Field(
        default=20.0,
        gt=0,
        le=_LONGEST_S,
        description="Seconds for the TLS and HTTP/2 handshakes of a new connection.",
    )
    unary_reply_timeout_s: float = Field(
        default=50.0,
        gt=0,
        description="Seconds for a client to read the reply of a unary call; then its connection is "
        "closed, because gRPC cannot abandon a single reply. 5 s while front_memory_bytes "
        "is short: over 70 % in use, or a call waits for room or was just refused.",
    )
    max_queue_depth: int = Field(
        default=256,
        ge=1,
        description="Calls that may wait for a device; more get QUEUE_FULL. In addition, four times as "
        "many Execute calls may be uploading; those queue once they are complete, however many wait "
        "already.",
    )
    streams_per_device: int = Field(default=1, ge=1, le=16, description="Calls that one device runs at once.")
    drain_delay_s: float = Field(
        default=0.0,
        ge=0,
        description="Seconds to keep serving after SIGTERM while health says NOT_SERVING, so that load "
        "balancers send new calls elsewhere. Does not apply to SIGINT.",
    )
    drain_timeout_s: float = Field(
        default=120.0,
        ge=0,
        description="Seconds for calls in progress to finish after SIGTERM or SIGINT.",
    )
    max_connection_age_s: float | None = Field(
        default=None,
        ge=1,
        le=_LONGEST_S,
        description="Age in seconds, give or take a tenth, at which the server closes a connection, so "
        "that callers resolve the server's name again and find new servers. Default: never.",
    )
    max_connection_age_grace_s: float | None = Field(
        default=None,
        gt=0,
        le=_LONGEST_S,
        description="Seconds for the calls on such a connection to finish before they are cut off. "
        "Default: as long as they take.",
    )
    hang_grace_s: float = Field(
        default=10.0,
        gt=0,
        description="Seconds that a call may go on running after its deadline, or after its caller has left, "
        "before its worker is killed.",
    )
    run_limit_s: float = Field(
        # torch_npu has CANN end an operator after 547 s with an error code that indicates a failed device, so
        # the call would run again on another NPU. The server's own limit comes first, and blames the call.
        default=540.0,
        gt=0,
        description="Seconds a call may run, whatever its deadline, before its device counts as hung. "
        "Keep it below 547, after which torch_npu has CANN abort an operator.",
    )
    heartbeat_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="Seconds without a sign of life from a worker, whatever it runs, before it is replaced.",
    )
    canary_interval_s: float = Field(
        default=60.0,
        ge=0,
        description="Seconds between rounds in which each ready device computes a tiny call of every "
        "operator, to be compared with the reference; 0: only before a device is ready. A device that is "
        "wrong twice is quarantined.",
    )
    verify_sample: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Fraction of calls without `verify` picked to be compared with the reference after "
        "they are answered, in a separate process, such as 0.001; 0: none. A picked call is skipped if "
        "that process is busy or the call is large.",
    )
    worker_start_timeout_s: float = Field(
        default=180.0,
        gt=0,
        description="Seconds that a starting worker may spend on one stage (import, device, first call of "
        "each operator); three times as long in all. Doubled after a start that took longer, at most twice.",
    )
    upload_idle_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="Seconds that an Execute call waits for the client's next chunk, or a unary call for its "
        "whole message, before it is ended.",
    )
    reply_idle_timeout_s: float = Field(
        default=50.0,
        gt=0,
        description="Seconds an Execute call waits for the client to take a chunk before it is ended.",
    )
    upload_min_bytes_per_s: float = Field(
        default=16 * 2**10,
        ge=0,
        description="Lowest average rate of an Execute call's upload, which may lag behind it by "
        "upload_idle_timeout_s. 16 KiB/s are 0.13 Mbit/s: a faster client may pause for nearly 60 s at any "
        "time, one that sends a byte now and then is ended after 60 s (DEADLINE_EXCEEDED). While others "
        "find no memory for their operands, a slower upload loses its memory after 5 s (QUEUE_FULL), and a "
        "faster one that would take more than 10 s if its tenant is over its share. 0: no limit.",
    )
    upload_limit_s: float = Field(
        default=4 * 3600.0,
        gt=0,
        description="Seconds that an Execute call may wait for its chunks in total; in 4 h, 1 GiB arrives "
        "at 0.6 Mbit/s.",
    )
    reply_min_bytes_per_s: float = Field(
        default=16 * 2**10,
        ge=0,
        description="Lowest average rate at which the client takes an Execute call's reply, which may lag "
        "behind it by reply_idle_timeout_s. Results in the way of other calls are moved aside, up to half "
        "of front_memory_bytes in total; beyond that, a reply of which no chunk was taken for 5 s is ended "
        "(QUEUE_FULL). 0: no limit.",
    )
    reply_limit_s: float = Field(
        default=4 * 3600.0,
        gt=0,
        description="Seconds that an Execute call may wait in total for the client to take its reply.",
    )
    respawn_backoff_s: float = Field(
        default=0.1,
        ge=0,
        description="Seconds before a lost worker is replaced; doubles with each consecutive loss.",
    )
    respawn_backoff_max_s: float = Field(
        default=1.0,
        ge=0,
        description="Longest such wait in seconds; a device that keeps failing on its own waits longer, "
        "up to 60 s.",
    )
    max_respawns: int = Field(
        default=10,
        ge=0,
        description="How often in a row a device's worker is replaced without serving a call; after the next "
        "loss the device is down: calls do not wait for it, but it is tried again.",
    )
    circuit_deaths: int = Field(
        default=2,
        ge=0,
        description="Number of workers that must die under one tenant's isolated calls of the same "
        "operator, types, shapes, attributes and options for such calls to be refused with CIRCUIT_OPEN "
        "for 10 s; twice as many if they were killed by a signal that anybody may have sent. 0 turns this "
        "off; use it only where devices often fail on their own and every caller is trusted.",
    )
    liveness_down_limit_s: float | None = Field(
        default=None,
        gt=0,
        description="Seconds without a ready device, once one has been ready, after which the liveness "
        "probe fails, so that Kubernetes restarts the server; must be longer than a worker takes to start. "
        "Default: never.",
    )

    @field_validator("tls_certificate", "tls_key", "tls_client_ca", "tenants")
    @classmethod
    def _empty_is_none(cls, value: str | None) -> str | None:
        return value or None

    @field_validator("listen")
    @classmethod
    def _listen_address_parses(cls, value: str) -> str:
        parse_listens(value)
        return value

    @field_validator("metrics_listen")
    @classmethod
    def _metrics_address_parses(cls, value: str) -> str:
        if value:
            parse_metrics_listen(value)
        return value

    @field_validator("cann")
    @classmethod
    def _release_parses(cls, value: str) -> str:
        if value != "auto":
            CannRelease.parse(value)
        return value

    @field_validator("log_level", "log_format", mode="before")
    @classmethod
    def _case_is_free(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value

    @model_validator(mode="after")
    def _plaintext_is_wanted(self) -> ServerSettings:
        remote = [address for address in self.listen_addresses if not address.is_local]
        if remote and not (self.insecure or self.tls_certificate):
            raise ValueError(
                f"found {remote[0]}, which is not loopback, without TLS; expected a loopback address or "
                "unix:path, --tls-certificate and --tls-key, or --insecure to serve plaintext to the network"
            )
        return self

    @model_validator(mode="after")
    def _tls_is_whole(self) -> ServerSettings:
        if self.tls_certificate and not self.tls_key:
            raise _about("tls_certificate", "needs tls_key")
        for name in ("tls_key", "tls_client_ca"):
            if getattr(self, name) and not self.tls_certificate:
                raise _about(name, "needs tls_certificate")
        return self

    @model_validator(mode="after")
    def _age_has_its_grace(self) -> ServerSettings:
        if self.max_connection_age_grace_s is not None and self.max_connection_age_s is None:
            raise _about(
                "max_connection_age_grace_s",
                "needs max_connection_age_s",
            )
        return self

    @model_validator(mode="after")
    def _a_call_fits_the_front_memory(self) -> ServerSettings:
        least = FRONT_MESSAGES * self.max_message_bytes
        if self.front_memory_bytes is not None and self.front_memory_bytes < least:
            raise _about(
                "front_memory_bytes",
                f"found {self.front_memory_bytes} bytes; expected at least {least}, which is "
                f"{FRONT_MESSAGES} times max_message_bytes",
            )
        return self

    @property
    def tls(self) -> Literal["off", "server", "mutual"]:
        """Which sides present certificates: none, the server, or both."""
        return "off" if not self.tls_certificate else "mutual" if self.tls_client_ca else "server"

    @property
    def is_tracing(self) -> bool:
        """Whether any call may be traced."""
        return self.trace_ratio > 0 or self.trust_trace_context

    @property
    def listen_addresses(self) -> tuple[Address, ...]:
        """The addresses to listen on."""
        return parse_listens(self.listen)

    @property
    def sockets(self) -> frozenset[str]:
        """The Unix sockets among them, by the identities of their callers."""
        return frozenset(str(address) for address in self.listen_addresses if address.path)

    @property
    def metrics_address(self) -> Address | None:
        """Address of the metrics and probe pages; None if disabled."""
        return parse_metrics_listen(self.metrics_listen) if self.metrics_listen else None

    def asks_for(self, name: str) -> bool:
        """Whether a setting was given, be it with its default value."""
        return name in self.model_fields_set

    @property
    def fixed_product(self) -> Product | None:
        """The product; None to use that of the devices."""
        return None if self.product == "auto" else product_from_name(self.product)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only the arguments: `load_settings` reads the other sources, to know where a value came from."""
        return (init_settings,)


def _about(setting: str, problem: str) -> PydanticCustomError:
    """The error of a rule over several fields, reported for one that was given."""
    return PydanticCustomError("setting", "{problem}", {"setting": setting, "problem": problem})


@dataclass(frozen=True)
class LoadedSettings:
    """Effective settings.

    Attributes:
        settings: The values.
        origins: Where each value came from: ``"flag"``, ``"environment"``, ``"file"`` or ``"default"``.
    """

    settings: ServerSettings
    origins: Mapping[str, str]


class SettingsError(ValueError):
    """Some settings are invalid.

    Attributes:
        problems: One line per problem.
        usable: The settings with defaults in place of invalid ones, so that `check` can go on.
    """

    def __init__(self, problems: Iterable[str], usable: LoadedSettings) -> None:
        self.problems = tuple(problems)
        self.usable = usable
        super().__init__("\n".join(self.problems))


def load_settings(flags: Mapping[str, Any] | None = None, config: str | Path | None = None) -> LoadedSettings:
    """Reads flags, environment and file.

    Args:
        flags: Values of the command line by field name; None if not given.
        config: TOML file; None for ``NPUGRAD_CONFIG``, or no file if that is not set.

    Raises:
        SettingsError: A value is invalid, a key is unknown, or the file cannot be read; lists all problems.
    """
    problems: list[str] = []
    layers = {
        "file": _known(_from_file(config or os.environ.get(CONFIG_VARIABLE), problems), "file", problems),
        "environment": _from_environment(problems),
        "flag": {name: value for name, value in (flags or {}).items() if value is not None},
    }
    values: dict[str, Any] = {}
    origins = dict.fromkeys(ServerSettings.model_fields, "default")
    for origin, layer in layers.items():
        values |= layer
        origins |= dict.fromkeys(layer, origin)
    settings = _validated(values, origins, problems)
    loaded = LoadedSettings(settings, origins)
    if problems:
        raise SettingsError(problems, loaded)
    return loaded


def _from_file(config: str | Path | None, problems: list[str]) -> dict[str, Any]:
    if not config:
        return {}
    path = Path(config)
    try:
        path.read_bytes()  # the source treats a missing file as empty
        return dict(TomlConfigSettingsSource(ServerSettings, path)())
    except OSError as error:
        problems.append(f"config: cannot read {str(path)!r}: {error.strerror}")
    except ValueError as error:
        problems.append(f"config: {str(path)!r} is not TOML: {error}")
    return {}


def _from_environment(problems: list[str]) -> dict[str, Any]:
    for variable in sorted(os.environ):
        if not variable.startswith(ENV_PREFIX) or _OTHERS_VARIABLES.fullmatch(variable):
            continue
        if variable.removeprefix(ENV_PREFIX).lower() not in ServerSettings.model_fields:
            if _SERVICE_LINKS.fullmatch(variable):
                continue
            nearest = _nearest(variable, [ENV_PREFIX + name.upper() for name in ServerSettings.model_fields])
            problems.append(f"environment: unknown variable {variable}{nearest}")
    found = EnvSettingsSource(ServerSettings)()
    return {name: value for name, value in found.items() if name in ServerSettings.model_fields}


def _known(values: dict[str, Any], origin: str, problems: list[str]) -> dict[str, Any]:
    for name in sorted(set(values) - set(ServerSettings.model_fields)):
        problems.append(f"{origin}: unknown key {name}{_nearest(name, ServerSettings.model_fields)}")
        del values[name]
    return values


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(known)}"


_BOUNDS = {
    "greater_than": "expected more than {gt:g}",
    "greater_than_equal": "expected at least {ge:.15g}",
    "less_than_equal": "expected at most {le:.15g}",
    "int_parsing": "expected an integer",
    "float_parsing": "expected a number",
    "bool_parsing": "expected true or false",
}
"""Our wording for numbers and flags."""


def _validated(values: dict[str, Any], origins: dict[str, str], problems: list[str]) -> ServerSettings:
    """Builds the model; invalid values are reported and replaced by their defaults."""
    try:
        return ServerSettings(**values)
    except ValidationError as error:
        wrong = set()
        for detail in error.errors(include_url=False):
            message = detail["msg"].removeprefix("Value error, ")
            # A rule over several fields has no location: the error names the field, or it is the address.
            name = str(detail["loc"][0] if detail["loc"] else detail.get("ctx", {}).get("setting", "listen"))
            if detail["type"] != "setting" and not message.startswith("found "):
                bound = _BOUNDS.get(detail["type"], message).format(**detail.get("ctx", {}))
                message = f"found {str(detail['input'])[:80]!r}; {bound}"
            problems.append(f"{name}: {message} (from {origins[name]})")
            wrong.add(name)
    for name in wrong:
        del values[name]
        origins[name] = "default"
    # Rules over several fields run only once every field is valid, so the second round may find more.
    return _validated(values, origins, problems)
