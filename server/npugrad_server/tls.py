"""The server's certificate and its callers' authorities: files that are read and checked before use."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, TypeAlias

from npugrad_server.watched_files import read_files

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cryptography.x509 import Certificate

    from npugrad_server.config import ServerSettings

FileContents: TypeAlias = "dict[str, bytes | str]"
"""Contents of each file by the name of its setting; or text that says why it cannot be read."""
_NAMES = ("tls_certificate", "tls_key", "tls_client_ca")
_BEGIN = b"-----BEGIN CERTIFICATE-----"


class TlsFilesError(ValueError):
    """TLS cannot be served.

    Attributes:
        problems: One line for each file that is missing or wrong.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


@dataclass(frozen=True)
class CertificateFacts:
    """What logs and metrics show of a certificate.

    Attributes:
        name: The setting that names its file.
        serial: Its serial number, in hexadecimal.
        expires: When it expires.
    """

    name: str
    serial: str
    expires: datetime


@dataclass(frozen=True)
class TlsFiles:
    """Contents of the files in the settings, in PEM, all checked.

    Attributes:
        certificate: The server's certificate and its chain.
        key: Its private key.
        client_ca: Authorities of the callers' certificates; None if callers need none.
        facts: Facts about each certificate; the server's own is the first.
    """

    certificate: bytes
    key: bytes
    client_ca: bytes | None
    facts: tuple[CertificateFacts, ...]


def read_tls(settings: ServerSettings) -> TlsFiles | None:
    """Reads and checks the files of the settings; None if TLS is off.

    Raises:
        TlsFilesError: Files cannot be read, have the wrong contents, are not valid, or do not belong
            together; lists all problems.
    """
    contents = read_contents(settings)
    return try_contents(settings, contents) if contents else None


def read_contents(settings: ServerSettings) -> FileContents:
    """Reads the files of the settings without checking them; empty if TLS is off."""
    names = [name for name in _NAMES if settings.tls != "off" and getattr(settings, name) is not None]
    found = read_files(getattr(settings, name) for name in names)
    return {
        name: (one.strerror or str(one)) if isinstance(one, OSError) else one
        for name, one in zip(names, found, strict=True)
    }


def try_contents(settings: ServerSettings, contents: FileContents) -> TlsFiles:
    """Checks the contents of the files.

    Raises:
        TlsFilesError: As in `read_tls`.
    """
    problems: list[str] = []
    found: dict[str, bytes] = {}
    for name, content in contents.items():
        if isinstance(content, bytes):
            found[name] = content
        else:
            problems.append(f"{name}: cannot read {getattr(settings, name)!r}: {content}")
    known = {
        name: _certificates(name, getattr(settings, name), found[name], problems)
        for name in ("tls_client_ca", "tls_certificate")
        if name in found
    }
    now = datetime.now(timezone.utc)
    if known.get("tls_certificate"):
        leaf = known["tls_certificate"][0]
        _check_leaf(str(settings.tls_certificate), leaf, now, problems)
        if "tls_key" in found:
            _check_key(settings, leaf, found["tls_key"], problems)
    if authorities := known.get("tls_client_ca"):
        _check_authorities(str(settings.tls_client_ca), authorities, now, problems)
    if problems:
        raise TlsFilesError(*problems)
    facts = (
        _facts(name, one) for name in ("tls_certificate", "tls_client_ca") for one in known.get(name, ())
    )
    return TlsFiles(found["tls_certificate"], found["tls_key"], found.get("tls_client_ca"), tuple(facts))


def _certificates(name: str, path: str, content: bytes, problems: list[str]) -> Sequence[Certificate]:
    from cryptography import x509  # imported late: a server without TLS need not load its 15 MiB

    count = content.count(_BEGIN)
    try:
        found = x509.load_pem_x509_certificates(content)
    except ValueError:
        problems.append(f"{name}: {path!r} holds no certificate in PEM")
        return ()
    if len(found) < count:  # a block without an end is skipped
        problems.append(f"{name}: {path!r} holds only {len(found)} whole certificates of {count}")
    return found


def _facts(name: str, certificate: Certificate) -> CertificateFacts:
    return CertificateFacts(name, f"{certificate.serial_number:x}", certificate.not_valid_after_utc)


def _check_leaf(path: str, leaf: Certificate, now: datetime, problems: list[str]) -> None:
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    about = f"tls_certificate: the certificate in {path!r}"
    if now > leaf.not_valid_after_utc:
        problems.append(f"{about} expired at {when(leaf.not_valid_after_utc)}")
    if now < leaf.not_valid_before_utc:
        problems.append(f"{about} is not valid before {when(leaf.not_valid_before_utc)}")
    try:
        usages = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:  # valid for any use
        return
    except ValueError as error:
        problems.append(f"{about} has extensions that cannot be read: {error}")
        return
    wanted = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE)
    if not any(usage in wanted for usage in usages):
        names = ", ".join(usage._name for usage in usages)
        problems.append(f"{about} is for {names}; a server needs the extended key usage serverAuth")


def _check_key(settings: ServerSettings, leaf: Certificate, content: bytes, problems: list[str]) -> None:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    path = settings.tls_key
    try:
        key = load_pem_private_key(content, None)
        matches = key.public_key() == leaf.public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: it is encrypted
        problems.append(f"tls_key: {path!r} holds no unencrypted private key in PEM")
        return
    if not matches:
        problems.append(
            f"tls_key: the key in {path!r} does not belong to the certificate in {settings.tls_certificate!r}"
        )


def _check_authorities(
    path: str, authorities: Sequence[Certificate], now: datetime, problems: list[str]
) -> None:
    """One valid authority is enough: a new one is listed next to the old one until that expires."""
    if not any(one.not_valid_before_utc <= now <= one.not_valid_after_utc for one in authorities):
        last = max(one.not_valid_after_utc for one in authorities)
        problems.append(
            f"tls_client_ca: no authority in {path!r} is valid now; the latest expiry is {when(last)}"
        )


def when(moment: datetime) -> str:
    """Formats a moment for messages."""
    return f"{moment:%Y-%m-%dT%H:%M:%SZ}"
