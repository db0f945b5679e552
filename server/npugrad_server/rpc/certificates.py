"""Reloads certificate files when they change; new connections use the new certificates."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import grpc
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from npugrad_server.logs import get_logger
from npugrad_server.tls import TlsFilesError, read_contents, try_contents, when

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from npugrad_server.config import ServerSettings
    from npugrad_server.tls import FileContents, TlsFiles

LOOK_INTERVAL_S = 1.0
"""How often the files are checked."""
_LEFT_ALONE = 0.25
"""Fraction of that for which changed files must stay the same, so that a half-written file is not taken for a
whole one; files that differ at every check are still taken."""


class LiveCertificates(Collector):
    """The certificates that handshakes use, and their metrics.

    Attributes:
        files: The files in use.
        look_count: Number of checks of the files since the start.

    An asyncio thread reads all files each second and compares their contents, so it does not matter how a
    change came about: by a rename, by swapping a symbolic link above them, as Kubernetes does, or by writing
    into the files. Unusable files are logged once, and the previous contents stay in use.

    Threads: gRPC calls `fetch` at each handshake, on its own threads and not on the event loop's.
    """

    def __init__(self, settings: ServerSettings, look_interval_s: float = LOOK_INTERVAL_S) -> None:
        """Reads the files.

        Args:
            settings: Settings that name the files.
            look_interval_s: Seconds between two checks of the files.

        Raises:
            TlsFilesError: TLS cannot be served with them.
        """
        self._settings, self._look_interval_s, self._log = settings, look_interval_s, get_logger()
        self._contents = read_contents(settings)
        self.files = try_contents(settings, self._contents)
        self._configuration = self._given = _configuration(self.files)
        self.look_count = 0
        self._told: tuple[str, ...] = ()
        self._lock = threading.Lock()
        self._handshake_count = self._swap_count = self._kept_count = 0

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials for a port."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration,
            self.fetch,  # type: ignore[arg-type]  # None keeps what there is
            require_client_authentication=self.files.client_ca is not None,
        )

    def fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """The configuration for a new handshake; None if it is the one that the last handshake used."""
        with self._lock:
            self._handshake_count += 1
            if self._given is self._configuration:
                return None
            self._given = self._configuration
            return self._given

    async def watch(self) -> None:
        """Checks the files for changes until cancelled."""
        left_alone_s = self._look_interval_s * _LEFT_ALONE
        pause_s = self._look_interval_s
        while True:
            await asyncio.sleep(pause_s)
            pause_s = self._look_interval_s
            found = await asyncio.to_thread(read_contents, self._settings)
            if found != self._contents or self._told:
                await asyncio.sleep(left_alone_s)
                if found == await asyncio.to_thread(read_contents, self._settings):
                    await self._take(found)
                else:
                    pause_s = left_alone_s
            self.look_count += 1

    async def _take(self, contents: FileContents) -> None:
        try:
            files = await asyncio.to_thread(try_contents, self._settings, contents)
        except TlsFilesError as error:
            if error.problems != self._told:
                self._told = error.problems
                self._kept_count += 1
                self._log.warning("certificates kept", problems=list(error.problems))
            return
        self._told = ()
        if contents == self._contents:
            self._log.info("certificates unchanged", serial=files.facts[0].serial)
            return
        self._contents, self.files, self._configuration = contents, files, _configuration(files)
        self._swap_count += 1
        self._log.info("certificates swapped", **told(files))

    def describe(self) -> tuple[()]:
        """Describes nothing in advance."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Expiry times of the certificates, and the counters."""
        expiry = GaugeMetricFamily(
            "npugrad_tls_certificate_expiry_seconds",
            "When a certificate in use expires, as Unix time: the server's and those sent with it, and the "
            "authorities of callers.",
            labels=("file", "serial"),
        )
        for fact in self.files.facts:
            expiry.add_metric((fact.name, fact.serial), fact.expires.timestamp())
        yield expiry
        reloads = CounterMetricFamily(
            "npugrad_tls_reloads",
            "Changes of certificate files, by outcome: swapped, or kept where the new ones cannot be used.",
            labels=("outcome",),
        )
        reloads.add_metric(("swapped",), self._swap_count)
        reloads.add_metric(("kept",), self._kept_count)
        yield reloads
        yield CounterMetricFamily(
            "npugrad_tls_handshakes", "TLS handshakes that began.", value=self._handshake_count
        )


def told(files: TlsFiles) -> dict[str, str]:
    """Log fields of certificates that come into use."""
    own = files.facts[0]
    fields = {"serial": own.serial, "expires": when(own.expires)}
    authorities = [fact.serial for fact in files.facts if fact.name == "tls_client_ca"]
    return {**fields, "client_ca": ",".join(authorities)} if authorities else fields


def _configuration(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(files.key, files.certificate)], files.client_ca)
