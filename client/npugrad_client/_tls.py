"""TLS settings of a client: trusted authorities and its own certificate."""

from __future__ import annotations

import logging
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from npugrad.errors import WrongType, WrongValue
from npugrad.usage import reports_usage

Pem: TypeAlias = "bytes | str | os.PathLike[str]"
"""PEM text as bytes, or the path of a file with it."""
PemParts: TypeAlias = "tuple[bytes | None, bytes | None, bytes | None]"
"""Authorities, certificate and key as PEM."""
LOOK_INTERVAL_S = 1.0
"""Interval between checks of the files."""
LEFT_ALONE_S = 2.0
"""How long a file must be unchanged to count as complete."""


@reports_usage
@dataclass(frozen=True)
class Tls:
    """TLS settings of a client: whom it trusts and, for mutual TLS, its own certificate.

    Certificates and keys are PEM text as bytes, or the path of a PEM file. Files are read when the client is
    created and again when they change: new calls then use a new connection, while calls in flight finish on
    theirs. If a changed file is unusable, the client keeps what it has.

    Example:
        >>> tls = Tls(ca="ca.pem")  # trust this authority only
        >>> mutual = Tls(ca="ca.pem", certificate="client.pem", key="client.key")
        >>> Client("npugrad.example.org:443", tls=mutual)
        Client('npugrad.example.org:443')

    Attributes:
        ca: Certificates of the authorities to trust; None for the system's.
        certificate: The client's certificate, with any intermediate certificates.
        key: Private key of `certificate`; give both or neither.
        server_name: Name to expect in the server's certificate; None for that of the target.
    """

    ca: Pem | None = None
    certificate: Pem | None = None
    key: Pem | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        """Rejects parts of the wrong type, a certificate without a key, and the reverse."""
        for name in ("ca", "certificate", "key"):
            if not isinstance(getattr(self, name), (bytes, str, os.PathLike, type(None))):
                found = type(getattr(self, name)).__name__
                raise WrongType(f"Tls: {name}: found {found}; expected a path, or PEM as bytes")
        if not isinstance(self.server_name, (str, type(None))):
            raise WrongType(
                f"Tls: server_name: found {type(self.server_name).__name__}; expected text or None"
            )
        if (self.certificate is None) != (self.key is None):
            found, lacking = ("key", "certificate") if self.certificate is None else ("certificate", "key")
            raise WrongValue(f"tls: a {found} needs a {lacking}")

    def __repr__(self) -> str:
        """Shows which parts are set, never a key."""
        parts = [n for n in ("ca", "certificate", "key") if getattr(self, n) is not None]
        return f"Tls({', '.join([*(f'{n}=...' for n in parts), f'server_name={self.server_name!r}'])})"

    def read(self) -> PemParts:
        """Authorities, certificate and key as PEM.

        Raises:
            OSError: A file cannot be read.
            ValueError: The content is not PEM.
        """
        return (
            _pem("ca", self.ca or _system_roots()),
            _pem("certificate", self.certificate),
            _pem("key", self.key),
        )

    def files(self) -> dict[str, str]:
        """Paths of the parts that are files."""
        parts = {"ca": self.ca or _system_roots(), "certificate": self.certificate, "key": self.key}
        return {n: os.fspath(v) for n, v in parts.items() if v is not None and not isinstance(v, bytes)}


class TlsSource:
    """The current contents of a `Tls`.

    Thread safety: any number of threads may ask; if two notice a change at once, both read it.

    Processes: a pickle includes what was read; where the files differ, they are read again.
    """

    def __init__(self, tls: Tls) -> None:
        """Reads the files.

        Raises:
            OSError: A file cannot be read.
            ValueError: The content is not PEM.
        """
        self._tls, self._files = tls, tls.files()
        self._stamp = self._stamp_now()
        self._pem = tls.read()
        self._look_at_s = 0.0 if self._files else math.inf

    @property
    def server_name(self) -> str | None:
        """Name the server's certificate must have; None for the target's."""
        return self._tls.server_name

    def current(self) -> PemParts:
        """Authorities, certificate and key; the same object until they change."""
        now_s = time.monotonic()
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_INTERVAL_S
            self._look()
        return self._pem

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state without what is only valid in this process."""
        return {**self.__dict__, "_look_at_s": 0.0 if self._files else math.inf}

    def _look(self) -> None:
        stamp = self._stamp_now()
        if stamp is None or stamp == self._stamp:
            return
        age_s = time.time() - max(changed_ns for changed_ns, *_ in stamp) / 1e9
        if 0 <= age_s < LEFT_ALONE_S:  # it may be half written
            self._look_at_s = time.monotonic() + LEFT_ALONE_S
            return
        try:
            pem = self._tls.read()
            self._try()
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            if self._stamp_now() == stamp:
                self._stamp = stamp
                _LOG.warning("tls: the changed files cannot be used, so the old ones stay in use: %s", error)
            return
        if self._stamp_now() == stamp:  # else the files were of two versions
            self._stamp = stamp
            self._pem = pem if pem != self._pem else self._pem

    def _stamp_now(self) -> tuple[tuple[int, int, int], ...] | None:
        """Stamp that changes with the files; None while one is missing."""
        try:
            found = [os.stat(path) for path in self._files.values()]
        except OSError:
            return None
        return tuple((one.st_mtime_ns, one.st_ino, one.st_size) for one in found)

    def _try(self) -> None:
        """Raises ssl.SSLError for files that do not belong together or are incomplete."""
        import ssl

        context, files = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), self._files
        if "ca" in files:
            context.load_verify_locations(cafile=files["ca"])
        if "certificate" in files and "key" in files:
            # Without a password, OpenSSL would ask for one on the terminal.
            context.load_cert_chain(files["certificate"], files["key"], password="")


_LOG = logging.getLogger("npugrad_client")


def _pem(name: str, value: Pem | None) -> bytes | None:
    if value is None:
        return None
    data = value if isinstance(value, bytes) else Path(value).read_bytes()
    if b"-----BEGIN " not in data:
        where = "" if isinstance(value, bytes) else f" in {os.fspath(value)}"
        raise WrongValue(f"tls: {name}: no PEM block (-----BEGIN ...){where}")
    return data


def _system_roots() -> str | None:
    """The system's file of authorities, if Python knows one; else grpc uses its own list."""
    import ssl  # here, because most clients need none

    return ssl.get_default_verify_paths().cafile


@dataclass(frozen=True)
class Servers:
    """Servers that are called separately, and how to connect.

    Attributes:
        targets: Addresses, one per server.
        tls: TLS settings; None for unencrypted connections.
    """

    targets: tuple[str, ...]
    tls: Tls | None = None
