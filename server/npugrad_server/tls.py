"""The certificates a server shows and asks for: files read and tried before a port is taken."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from npugrad_server.config import ServerSettings

_MISMATCHES = frozenset({"KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED"})
"""What OpenSSL says of a key that belongs to another certificate, of the same kind or of another one."""


class TlsFilesError(ValueError):
    """TLS cannot be served.

    Attributes:
        problems: One line for each file that is missing or wrong.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


@dataclass(frozen=True)
class TlsFiles:
    """What the files of the settings hold, in PEM.

    Attributes:
        certificate: The server's certificate, and those that lead to its authority.
        key: Its private key.
        client_ca: Authorities of the callers' certificates; None when callers need none.
    """

    certificate: bytes
    key: bytes
    client_ca: bytes | None


def read_tls(settings: ServerSettings) -> TlsFiles | None:
    """Reads the files of the settings; None when TLS is off.

    Raises:
        TlsFilesError: Files cannot be read, hold something else, or do not belong together; all at once.
    """
    if settings.tls_certificate is None or settings.tls_key is None:
        return None
    problems: list[str] = []
    certificate = _read("tls_certificate", settings.tls_certificate, problems)
    key = _read("tls_key", settings.tls_key, problems)
    client_ca = None
    if settings.tls_client_ca is not None:
        client_ca = _read("tls_client_ca", settings.tls_client_ca, problems)
        if client_ca is not None:
            _check_certificates("tls_client_ca", settings.tls_client_ca, problems)
    if certificate is not None and _check_certificates("tls_certificate", settings.tls_certificate, problems):
        _check_key(settings.tls_certificate, settings.tls_key, problems if key is not None else [])
    if problems or certificate is None or key is None:
        raise TlsFilesError(*problems)
    return TlsFiles(certificate, key, client_ca)


def _read(name: str, path: str, problems: list[str]) -> bytes | None:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        problems.append(f"{name}: cannot read {path!r}: {error.strerror}")
        return None


def _check_certificates(name: str, path: str, problems: list[str]) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cafile=path)
    except ssl.SSLError:
        problems.append(f"{name}: found no certificate in {path!r}; expected one in PEM")
        return False
    return True


def _check_key(certificate: str, key: str, problems: list[str]) -> None:
    try:
        # Without a password of ours OpenSSL would ask for one on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, OSError) as error:
        if getattr(error, "reason", None) in _MISMATCHES:
            problems.append(
                f"tls_key: found in {key!r} the key of another certificate; expected that of {certificate!r}"
            )
        else:
            problems.append(f"tls_key: found no private key in {key!r}; expected one in PEM, not encrypted")
