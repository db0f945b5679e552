"""Reloads certificate files when they change; new connections use the new certificates."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import grpc
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from npugrad_server.logs import get_logger
from npugrad_server.tls import TlsFilesError, read_contents, try_contents, when
from npugrad_server.watched_files import LOOK_INTERVAL_S, FileWatch, aside

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from npugrad_server.config import ServerSettings
    from npugrad_server.tls import FileContents, TlsFiles


class LiveCertificates(Collector):
    """The certificates that handshakes use, and their metrics.

    Attributes:
        files: The files in use.
        looks: The checks of the files.

    Unusable files are logged once, and the previous contents stay in use.

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
        self._settings, self._log = settings, get_logger()
        self._contents = read_contents(settings)
        self.files = try_contents(settings, self._contents)
        self._configuration = self._given = _configuration(self.files)
        self.looks = FileWatch(lambda: read_contents(settings), look_interval_s)
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
        async for found in self.looks.settled():
            if found != self._contents or self._told:
                await self._take(found)

    async def _take(self, contents: FileContents) -> None:
        try:
            files = await aside(lambda: try_contents(self._settings, contents))
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
