"""Throw-away certificates: one authority for the server, one for callers, one that nobody trusts."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path

import grpc
import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from npugrad_client import Tls

CLIENT_ONLY = (ExtendedKeyUsageOID.CLIENT_AUTH,)
SERVER_ONLY = (ExtendedKeyUsageOID.SERVER_AUTH,)


def signed_again(
    certificate: bytes,
    authority: trustme.CA,
    *,
    usages: tuple[x509.ObjectIdentifier, ...] | None = None,
    starts: datetime | None = None,
    ends: datetime | None = None,
    names: Sequence[x509.GeneralName] | None = None,
) -> bytes:
    """The certificate with other usages, dates or names, signed by the authority that it is of."""
    old = x509.load_pem_x509_certificate(certificate)
    made = x509.CertificateBuilder().subject_name(old.subject).issuer_name(old.issuer)
    made = made.public_key(old.public_key()).serial_number(x509.random_serial_number())
    made = made.not_valid_before(starts or old.not_valid_before_utc)
    made = made.not_valid_after(ends or old.not_valid_after_utc)
    for extension in old.extensions:
        value = extension.value
        if usages is not None and isinstance(value, x509.ExtendedKeyUsage):
            value = x509.ExtendedKeyUsage(usages)
        if names is not None and isinstance(value, x509.SubjectAlternativeName):
            value = x509.SubjectAlternativeName(names)
        made = made.add_extension(value, extension.critical)
    key = load_pem_private_key(authority.private_key_pem.bytes(), None)
    return made.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)  # type: ignore[arg-type]


@dataclass
class Certificates:
    """Files and credentials of one test run.

    Attributes:
        folder: Where the files are.
        authorities: The server's, the callers' and one that nobody trusts; None for new ones.
    """

    folder: Path
    authorities: tuple[trustme.CA, trustme.CA, trustme.CA] | None = None

    def __post_init__(self) -> None:
        self._authority, self._callers, self._others = self.authorities or (
            trustme.CA(),
            trustme.CA(),
            trustme.CA(),
        )
        self._authority.cert_pem.write_to_path(self.authority)
        self._callers.cert_pem.write_to_path(self.client_ca)
        self.renew()

    def renew(self) -> None:
        """Writes another certificate and key of the server's, one after the other."""
        server = self._authority.issue_cert("localhost", "127.0.0.1")
        server.private_key_pem.write_to_path(self.key)
        server.cert_chain_pems[0].write_to_path(self.certificate)

    def copied(self, folder: Path) -> Certificates:
        """The same authorities, and another certificate of the server's, in files that a test may change."""
        return Certificates(folder, (self._authority, self._callers, self._others))

    @property
    def serial(self) -> str:
        """Serial number of the server's certificate, as the server tells it."""
        return f"{x509.load_pem_x509_certificate(Path(self.certificate).read_bytes()).serial_number:x}"

    def served_serial(self, address: str) -> str:
        """Serial number of the certificate that a server shows."""
        host, _, port = address.rpartition(":")
        pem = ssl.get_server_certificate((host, int(port)), ca_certs=self.authority)
        return f"{x509.load_pem_x509_certificate(pem.encode()).serial_number:x}"

    @cached_property
    def key(self) -> str:
        return str(self.folder / "server.key")

    @cached_property
    def certificate(self) -> str:
        return str(self.folder / "server.pem")

    @cached_property
    def authority(self) -> str:
        """The server's authority, which callers trust."""
        return str(self.folder / "authority.pem")

    @cached_property
    def client_ca(self) -> str:
        """The callers' authority, which the server trusts."""
        return str(self.folder / "callers.pem")

    @property
    def flags(self) -> tuple[str, ...]:
        """What turns TLS on."""
        return "--tls-certificate", self.certificate, "--tls-key", self.key

    @property
    def mutual_flags(self) -> tuple[str, ...]:
        """What asks callers for a certificate as well."""
        return (*self.flags, "--tls-client-ca", self.client_ca)

    def caller(self, name: str = "caller@example.org", *, trusted: bool = True) -> tuple[bytes, bytes]:
        """Key and certificate of a caller, of the authority that the server trusts or of another one."""
        issued = (self._callers if trusted else self._others).issue_cert(name)
        return issued.private_key_pem.bytes(), issued.cert_chain_pems[0].bytes()

    def named_caller(self, *names: str) -> tuple[bytes, bytes]:
        """Key and certificate of a caller with DNS names and URIs, written as they are."""
        key, plain = self.caller()
        made = [x509.UniformResourceIdentifier(n) if ":" in n else x509.DNSName(n) for n in names]
        return key, signed_again(plain, self._callers, names=made)

    def tls(self, *names: str) -> Tls:
        """What a client of ours needs as a caller with these names."""
        key, certificate = self.named_caller(*names)
        return Tls(ca=self.authority, key=key, certificate=certificate)

    def credentials(self, pair: tuple[bytes, bytes] | None = None) -> grpc.ChannelCredentials:
        """Credentials of a channel; with a caller's key and certificate for mutual TLS."""
        root = self._authority.cert_pem.bytes()
        return grpc.ssl_channel_credentials(root, *(pair or (None, None)))

    def strangers_credentials(self) -> grpc.ChannelCredentials:
        """Credentials of a channel that trusts another authority."""
        return grpc.ssl_channel_credentials(self._others.cert_pem.bytes())


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates for the whole run."""
    return Certificates(tmp_path_factory.mktemp("tls"))
